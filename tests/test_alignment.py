"""Nothing that a step, a personalizer or a model is given lies between 64-byte boundaries, wherever it came from.

Whether other bits would come of it depends on the processor (`state.aligned`); where tensors lie shows on every one.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.common import config_of
from tests.runs import Interrupter, StopError, assert_same_bits, begun
from tests.shifted import ShiftedInputs, shifted_published
from upfl import api, data
from upfl.bundle import Bundle, PersonalModel, export
from upfl.contract import Batch, Personalizer, Published, Stage, Unlabelled
from upfl.data.inputs import Inputs
from upfl.engine.clients import Population
from upfl.engine.fitting import fit_needs
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.experiments.score import Scorer
from upfl.methods import make_personalizer, personalizer_class
from upfl.randomness import generator
from upfl.state import ALIGNMENT, is_vectorized

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
WATCHED = ("step", "digest", "revisit", "personalize", "logits")
FITTED = ["label-shift", "auto", "refit", "atp"]
of_some_trainings = pytest.mark.parametrize(
    ("name", "score"),
    [
        ("fedavg", FITTED),
        ("fedtta-prox", ["one-step", "early-stopped"]),
        ("fedper", ["sampled", "ensemble"]),
        ("fedsr", ["tent"]),
        ("odpfl-hn", ["none"]),
        ("hetero-fedtta", ["one-step", "label-shift"]),
    ],
)


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a value, by name."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not is_vectorized(value):
            yield name, value
    elif isinstance(value, Batch | Unlabelled | Published):
        yield from tensors(vars(value), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i in range(len(value)):
            yield from tensors(value[i], f"{name}[{i}]")


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of steps, personalizers and models; one with a tensor that is not aligned fails."""
    counted: Counter[str] = Counter()

    def watching(function: FunctionType) -> Any:
        @functools.wraps(function)
        def watched(self: Any, *arguments: Any, **named: Any) -> Any:
            counted[function.__name__] += 1
            for name, value in tensors([arguments, named]):
                assert value.data_ptr() % ALIGNMENT == 0, f"{function.__qualname__} got {name} out of line"
            return function(self, *arguments, **named)

        return watched

    for kind in {*subclasses(Stage), *subclasses(Personalizer)}:
        for name in WATCHED:
            function = vars(kind).get(name)
            if isinstance(function, FunctionType) and name not in getattr(kind, "__abstractmethods__", ()):
                monkeypatch.setattr(kind, name, watching(function))
    return counted


@of_some_trainings
def test_a_run_its_resumption_its_scores_and_its_bundle_compute_in_line(
    name: str, score: list[str], calls: Counter[str], tmp_path: Path
) -> None:
    engine = begun(config_of(name, score=score, rounds=2, checkpoint_every=1), tmp_path / "run")
    with pytest.raises(StopError):
        engine.run(Interrupter("round", 1))
    Engine.local(engine.folder).run()
    Scorer(engine.folder).score(inductive=True)
    export(api.Run(tmp_path / "run"), tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    images = engine.federation.source.x[engine.federation.new.all(0)]
    architecture = engine.federation.architecture("new", 0) or None
    for personalizer in bundle.personalizers:
        mine = bundle.personalize(images, personalizer, architecture=architecture)
        mine.save(tmp_path / personalizer)
        assert (PersonalModel.load(tmp_path / personalizer).predict_proba(images) == mine.predict_proba(images)).all()
    assert min(calls["step"], calls["personalize"], calls["logits"]) > 0


@of_some_trainings
def test_nodes_of_a_flower_run_compute_in_line(
    name: str, score: list[str], calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from tests.in_process_grid import InProcessGrid
    from upfl.flower import cohort, messages, terms
    from upfl.flower import server as flower_server

    if name == "fedper":
        pytest.skip("memories are not published over Flower")
    config = config_of(name, score=score, rounds=2)
    monkeypatch.setattr(messages, "POLL", 0.01)
    monkeypatch.setattr(cohort, "STEP", 0.01)
    monkeypatch.setattr(data, "load", functools.cache(data.load))  # every message would load the data anew
    monkeypatch.setattr(flower_server, "describe", lambda settings: config)
    grid = InProcessGrid({1000 + client: {"client": client} for client in range(6)})
    flower_server.train(grid, terms.Settings(out=tmp_path / "run", min_nodes=1, timeout=5, wait=0.2), None)
    assert not RunFolder(tmp_path / "run").metrics()[-1]["left_out"]
    assert min(calls["step"], calls["personalize"], calls["logits"]) > 0


def test_clients_side_by_side_finish_in_line(tmp_path: Path) -> None:
    engine = begun(config_of("fedtta", score=["one-step"], rounds=1, vectorize=3), tmp_path / "run")
    finish, seen = engine.training.finish, list[int]()

    def watched(server: Any, carry: Any, client: Any) -> Any:
        seen.extend(value.data_ptr() % ALIGNMENT for _, value in tensors(carry))
        return finish(server, carry, client)

    engine.training.finish = watched  # type: ignore[method-assign]
    engine.run()
    assert len(seen) > 4
    assert not any(seen)


@pytest.mark.parametrize("name", ["fedavg", "hetero-fedtta"])
def test_a_fit_does_not_depend_on_where_things_lie_in_memory(name: str) -> None:
    setup = assemble(config_of(name))
    federation, inputs, training = setup.federation, setup.inputs, setup.training
    published = Published(training.publish(training.init(generator(0, "init"))), 3)
    wanted = [one for one in FITTED if name == "fedavg" or one in ("label-shift", "auto")]
    personalizers = [make_personalizer(one, training, personalizer_class(one).Hyper()) for one in wanted]

    def fitted(published: Published, inputs: Inputs) -> Any:
        return fit_needs(personalizers, published, Population(federation, inputs, 0), Group())[0]

    expected = fitted(published, inputs)
    ours = fitted(shifted_published(published), ShiftedInputs(federation.source))
    assert_same_bits(ours.published.fitted, expected.published.fitted)
    for mine, theirs in zip(ours.folds, expected.folds, strict=True):
        assert_same_bits(mine, theirs)
