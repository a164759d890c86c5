"""PFL-Sampled and PFL-Ensemble: newcomers with the models of training clients."""

from collections import Counter
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.rounds import small_config, small_run
from tests.reference import CLASSES, Case, Somebody, forward_mlp
from tests.runs import begun
from upfl import api
from upfl.cli.methods import methods as show_methods
from upfl.cli.tables import show_runs
from upfl.contract import CHUNK, Hyper, Predictor, Published, Task, Unlabelled
from upfl.models import Layered
from upfl.personalize.pfl import Ensemble, Sampled
from upfl.randomness import generator
from upfl.state import State, select
from upfl.training.fedper import FedPer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_that_send_models_say_so_where_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    small_run(tmp_path / "fedper", "fedper", rounds=1)
    small_run(tmp_path / "fedavg", "fedavg", rounds=1)
    show_methods()
    listed = capsys.readouterr().out.splitlines()
    show_runs([api.Run(tmp_path / "fedper")], as_json=False)
    shown = capsys.readouterr().out.splitlines()
    show_runs([api.Run(tmp_path / "fedavg")], as_json=False)
    others = capsys.readouterr().out
    words = "sends training clients' own layers to newcomers"
    assert [line.split()[0] for line in listed if words in line] == ["pfl-sampled", "pfl-ensemble"]
    assert [line.split()[0] for line in shown if words in line] == ["PFL-Sampled", "PFL-Ensemble"]
    assert words not in others


@dataclass(frozen=True)
class Members:
    """FedPer with five training clients whose memories are their first ones."""

    case: Case
    training: FedPer
    published: Published

    def logits(self, member: int, x: Tensor) -> Tensor:
        return self.case.forward(select(self.published.state | self.published.members[member], "psi"), x)

    def newcomer(self, id: int, seed: int = 0) -> Unlabelled:
        return Unlabelled(id, self.case.x(300, id, torch.float32), seed)


@pytest.fixture
def members(case: Case) -> Members:
    training = FedPer(Task(case.model, CLASSES, 5), FedPer.Hyper())
    memories = [training.memory(Somebody(id=i)) for i in range(5)]
    return Members(case, training, Published(training.init(generator(1)), 3, memories))


def test_pfl_ensemble_is_the_mean_of_all_members_logits(members: Members) -> None:
    client, later = members.newcomer(0), members.newcomer(1).x
    personalized = Ensemble(members.training, Hyper()).personalize(members.published, client)
    for x, logits in ((client.x, personalized.logits), (later, personalized.predict_logits(later))):
        every = torch.stack([members.logits(i, x) for i in range(5)])
        torch.testing.assert_close(logits, every.mean(0), rtol=1e-4, atol=1e-5)
        assert float(every.std(0).mean()) > 0.01, "the members are alike"


def test_an_ensemble_computes_what_its_models_share_once_to_the_same_bits(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, client = members.training, members.newcomer(0)
    predictor = Ensemble(training, Hyper()).personalize(members.published, client).predictor
    assert training.cut
    below, passed, apply = training.cut[0], list[Layered](), Layered.apply

    def noted(layers: Layered, params: State, x: Tensor) -> Tensor:
        passed.append(layers)
        return apply(layers, params, x)

    monkeypatch.setattr(Layered, "apply", noted)
    logits = predictor.logits(client.x)
    monkeypatch.undo()
    assert len(client.x) > CHUNK
    assert passed.count(below) == 2, "not once for each part of the samples"
    single = [Predictor(training, [model]).logits(client.x) for model in predictor.params]
    assert torch.equal(logits, reduce(torch.add, single) / 5)


def test_pfl_sampled_is_one_members_model_drawn_from_newcomer_and_seed(members: Members) -> None:
    method = Sampled(members.training, Hyper())

    def drawn(id: int, seed: int) -> int:
        client = members.newcomer(id, seed)
        short = Unlabelled(client.id, client.x[:20], seed)
        personalized = method.personalize(members.published, short)
        fitting = [
            i for i in range(5) if torch.allclose(personalized.logits, members.logits(i, short.x), rtol=1e-4, atol=1e-5)
        ]
        assert len(fitting) == 1
        assert str(fitting[0]) in personalized.diary.decision
        return fitting[0]

    first = [drawn(id, 0) for id in range(60)]
    assert first == [drawn(id, 0) for id in range(60)]
    assert first != [drawn(id, 1) for id in range(60)]
    counts = Counter(first)
    assert set(counts) == set(range(5))
    assert max(counts.values()) < 30, "far from uniform"


def test_both_pfl_rows_have_one_validation_accuracy_that_of_clients_own_models(tmp_path: Path) -> None:
    config = small_config("fedper", rounds=3, evaluate_every=1, evaluate_clients=6, clients_per_round=6)
    engine = begun(config, tmp_path / "run")
    engine.run()
    lines = engine.folder.metrics()
    for line in lines:
        assert line["rows"].keys() == {"pfl-sampled", "pfl-ensemble"}
        assert len({row["validation"] for row in line["rows"].values()}) == 1
    sampled, ensemble = engine.folder.result()["rows"]
    own = [[client for client in row["clients"] if client["kind"] == "training"] for row in (sampled, ensemble)]
    assert own[0] == own[1]
    assert len(own[0]) == 6
    assert sampled["best_round"] == ensemble["best_round"]
    assert any(len({row["test"] for row in line["rows"].values()}) == 2 for line in lines), "the rows are alike"
    correct = samples = 0
    for i in range(engine.setup.clients):
        indices = engine.federation.training.validation(i)
        logits = forward_mlp(
            select(engine.progress.server | engine.cohort.memory(i), "psi"), engine.setup.inputs.x(indices)
        )
        correct += int((logits.argmax(1) == engine.setup.inputs.y(indices)).sum())
        samples += len(indices)
    assert lines[-1]["rows"]["pfl-sampled"]["validation"] == pytest.approx(100 * correct / samples)
