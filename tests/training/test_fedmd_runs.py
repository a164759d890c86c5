"""Runs of clients with different models: what newcomers need, what is published, and scores by architecture."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fedmd import PUBLIC, DigestStep, hetero, public_batch, small, teacher
from tests.helpers.params import descend, difference, distance, doubled
from tests.reference import CASES, Case, Somebody, guided_step
from upfl import api
from upfl.cli.runs import show
from upfl.config import SIZES
from upfl.contract import Published, Unlabelled
from upfl.engine.setup import assemble
from upfl.models import mlp
from upfl.personalize.fedtta import GuidedHyper, OneStep
from upfl.randomness import generator
from upfl.safe.tensors import read_file
from upfl.state import select

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["hetero-fedtta", "hetero-tent"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.train(small(request.param), tmp_path_factory.mktemp(request.param) / "run", workers=1)


def test_batches_of_the_public_set_know_their_places() -> None:
    setup = assemble(small())
    client, training = setup.client(1, 1), setup.training
    seen = []
    for batch in client.phase(training.phases(1)[0]):
        assert batch.index is not None
        assert torch.equal(batch.x, training.public[batch.index])  # type: ignore[attr-defined]
        assert not batch.y.any()
        seen += batch.index.tolist()
    assert sorted(seen) == list(range(round(0.1 * 1797)))
    whole = torch.cat([batch.index for batch in client.batches("public", 64) if batch.index is not None])
    assert torch.equal(whole, torch.arange(len(seen)))


def test_newcomers_of_each_size_need_only_what_is_published(run: api.Run, tmp_path: Path) -> None:
    """Without any training client's memory, and without the data but their own: from the stored file alone."""
    alone = api.Run(tmp_path / "run")
    shutil.copytree(run.path, alone.path)
    shutil.rmtree(alone.path / "memory")
    (alone.path / "checkpoint.safetensors").unlink()
    newcomer, sizes = run.newcomer(0), set()
    for name in SIZES:
        client = replace(newcomer, architecture=name)
        mine, theirs = run.personalize(client), alone.personalize(client)
        assert torch.equal(mine.logits, theirs.logits)
        assert mine.logits.isfinite().all()
        assert torch.equal(mine.predict(client.x), mine.logits.argmax(1))
        (params,) = mine.predictor.params
        sizes.add(sum(value.numel() for value in params.values()))
    assert sizes == {mlp(64, (units, units), 10).size for units in (8, 16, 32)}


def test_no_training_clients_weights_are_published(run: api.Run) -> None:
    """Only logits on the public set and the public set; single values may agree with a weight by chance."""
    published = run.published(next(iter(run.config.personalize)))
    training: Any = run.training
    assert not training.publishes_memory
    assert not len(published.members)
    assert published.state.keys() == {*training.knowledge, "public"}
    shapes = {tuple(value.shape) for name, value in published.state.items() if name != "public"}
    assert shapes == {(len(training.public), 10)}
    assert torch.equal(published.state["public"], training.public)
    values = torch.cat([value.flatten() for name, value in published.state.items() if name != "public"])
    files = sorted(run.path.glob("memory/*/*.safetensors"))
    assert len(files) == 12
    for file in files:
        weights = torch.cat([value.flatten() for value in read_file(file).values()])
        assert torch.isin(values, weights).float().mean() < 0.01


def test_a_newcomers_models_are_a_digest_of_what_is_published(case: Case) -> None:
    """Two epochs in shuffled batches from fresh models, then one guided step: with a reference for both."""
    training = hetero(case, digest_batch=5, clip=1e9, lambda_=0.8)
    state = training.publish({name: value.float() for name, value in teacher(3).items()})
    published, client = Published(state, 10), Unlabelled(4, case.x(20, 1, torch.float32), seed=3)
    fresh = doubled(training.students[""].revisit.init(client.generator("models")))
    psi, phi = select(fresh, "psi"), select(fresh, "phi")
    velocity = {name: torch.zeros_like(value) for name, value in phi.items()}
    decay, order = 0.99, client.generator("digest")
    reference = DigestStep(case, 0.8, inner_lr=0.5 * decay)
    taught = doubled({name: state[name] for name in ("base", "personalized")})
    for _ in range(2):
        shuffled = torch.randperm(PUBLIC, generator=order).tolist()
        for start in range(0, PUBLIC, 5):
            batch = public_batch(case, shuffled[start : start + 5])
            batch = replace(batch, x=batch.x.float().double())
            _, to_psi, to_phi = reference.gradients(psi, phi, batch, taught)
            velocity = {k: 0.9 * velocity[k] + to_phi[k] + 1e-4 * phi[k] for k in phi}
            psi = descend(psi, to_psi, 0.3 * decay, 1e-4)
            phi = {k: v - 0.01 * decay * velocity[k] for k, v in phi.items()}
    ours = training.models(published, client, None)
    for name, expected in (("psi", psi), ("phi", phi)):
        started = select(fresh, name)
        moved = difference(doubled(select(ours, name)), started)
        assert distance(moved, difference(expected, started)) < 1e-3, name
    x = client.x.double()
    adapted = guided_step(case.forward, psi, phi, x, 0.5 * decay, 1e-4)
    personalized = OneStep(training, GuidedHyper()).personalize(published, client)
    torch.testing.assert_close(personalized.before.double(), case.forward(psi, x), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(personalized.logits.double(), case.forward(adapted, x), rtol=1e-2, atol=1e-3)


def test_training_clients_validate_with_their_own_models() -> None:
    training = hetero(CASES["mlp"])
    memory = training.memory(Somebody(id=2))
    client = Unlabelled(2, CASES["mlp"].x(5, 1, torch.float32))
    published = Published(training.publish(training.init(generator(0))), 3)
    own = training.start(published, client, memory)
    assert all(torch.equal(own[name], memory[f"psi.{name}"]) for name in own)
    assert torch.equal(training.logits(own, client.x), CASES["mlp"].model.apply(own, client.x))


def test_scores_by_architecture_are_those_of_its_clients(run: api.Run) -> None:
    (row,) = run.result["rows"]
    metrics = run.metrics[row["best_round"] - 1]["rows"][row["row"]]
    assert metrics["architectures"] == row["architectures"]
    assert set(row["architectures"]) == set(SIZES)
    for kind, score in (("training", "validation"), ("new", "test")):
        for name, scores in row["architectures"].items():
            mine = [c for c in row["clients"] if c["kind"] == kind and c["architecture"] == name]
            assert all(run.federation.architecture(kind, c["client"]) == name for c in mine)  # type: ignore[arg-type]
            if not mine:
                assert scores[score] is None
                continue
            correct = sum(c["accuracy"] * c["size"] for c in mine)
            assert scores[score] == pytest.approx(correct / sum(c["size"] for c in mine))
            assert kind == "training" or scores["clients"] == len(mine)


def test_upfl_show_has_a_line_for_each_architecture(
    run: api.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (row,) = run.result["rows"]
    for markdown in (False, True):
        show([run.path], markdown=markdown)
        shown = capsys.readouterr().out
        for name, scores in row["architectures"].items():
            (line,) = (line for line in shown.splitlines() if f" {name} ({scores['clients']})" in line)
            assert f"{scores['test']:.2f}" in line if scores["clients"] else " - " in line
