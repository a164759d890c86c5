"""Recorded steps: the bits of the steps as they are written, for every training that is recorded."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.observers import Watching
from tests.runs import assert_same_bits
from upfl import api
from upfl.config import configure
from upfl.contract import Batch, Task, Training
from upfl.data import Partition, build_federation, load
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.local import train_alone
from upfl.engine.recorded import Recorded, as_written, steps_of
from upfl.engine.setup import assemble
from upfl.methods import TRAININGS
from upfl.models import Model, convnet, mlp
from upfl.randomness import generator
from upfl.state import State
from upfl.training.fedavg import FedAvg

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CLAIMING = sorted(name for name, training in TRAININGS.items() if vars(training).get("records"))
PUBLIC = 25  # of another size than clients' batches


def task(model: Model) -> Task:
    return Task(model, 10, 2, public=torch.zeros(PUBLIC, 1, 8, 8))


def trained(training: Training[Any], steps: Any, rounds: tuple[int, ...] = (0, 7)) -> list[tuple[State, torch.Tensor]]:
    """What two clients end with in some rounds; their 37 and 36 samples make batches of three sizes."""
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    federation = replace(federation, public=federation.new.all(0)[:PUBLIC])
    inputs, server = Inputs(federation.source), training.init(generator(1, "server"))
    ends = []
    for round in rounds:
        for id in (0, 1):
            client = LocalClient(federation, inputs, 3, id, round)
            carry = training.begin(server, training.memory(client), client)
            with torch.no_grad():
                ends.append(train_alone(training, carry, client, round, steps))
    return ends


def assert_same_ends(training: Training[Any], recorded: Recorded) -> None:
    replayed = trained(training, recorded)
    for (carry, loss), (ours, our_loss) in zip(trained(training, as_written), replayed, strict=True):
        assert torch.equal(our_loss, loss)
        assert_same_bits(ours, carry)


@pytest.mark.parametrize("changes", [{}, {"clip": 0.5}], ids=["", "clipped"])
@pytest.mark.parametrize("name", CLAIMING)
def test_a_recorded_step_has_the_bits_of_the_step(name: str, changes: dict[str, float]) -> None:
    kind = TRAININGS[name]
    # The first layer is wide beside a batch, so that its gradient stays in factors; the others are not.
    training = kind(task(mlp(64, (96, 16), 10)), kind.Hyper(iterations=9, batch_size=16, **changes))
    recorded = Recorded(worth=1)
    assert_same_ends(training, recorded)
    assert len(recorded._graphs) >= 2  # a full batch, and a pass's last


def test_a_shape_is_recorded_once_it_has_come_up_often_enough() -> None:
    kind, calls = TRAININGS["fedavg"], []
    training = kind(Task(mlp(64, (16,), 10), 10, 2), kind.Hyper(iterations=5, batch_size=8))

    class Watched(type(training)):  # type: ignore[misc]
        def step(self, carry: State, batch: Any, round: int) -> Any:
            calls.append(len(batch.y))
            return super().step(carry, batch, round)

    watched = Watched(training.task, training.hyper)
    trained(watched, Recorded(worth=4), rounds=(0, 1, 2, 3))
    assert calls.count(8) == 6  # four as written, one to record, one to compare; the rest is replayed without Python


def test_where_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(kind: Any, model: Any) -> Any:
        return steps_of(kind(task(model), kind.Hyper()), CPU)

    class Derived(FedAvg):
        pass

    class Declared(FedAvg):
        records = True

    small = mlp(64, (16,), 10)
    assert isinstance(of(FedAvg, small), Recorded)
    assert isinstance(of(Declared, small), Recorded)
    assert of(Derived, small) is as_written  # it may have changed what a step does
    assert of(FedAvg, convnet((1, 8, 8), 10)) is as_written
    assert of(TRAININGS["fedsr"], small) is as_written
    assert of(TRAININGS["hetero-tent"], small) is not as_written
    assert {name for name, training in TRAININGS.items() if training.vectorizes} <= set(CLAIMING)
    monkeypatch.delattr(torch.jit, "trace")
    assert of(FedAvg, small) is as_written


class Pausing(FedAvg):
    """Branches on the round."""

    records = True

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, torch.Tensor]:
        if round < 5:
            return carry, torch.zeros(())
        return super().step(carry, batch, round)


class Doubting(FedAvg):
    """Branches on the loss."""

    records = True

    def fit(self, carry: State, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, dz = super().fit(carry, logits, batch)
        return loss, dz if loss > 2.2 else dz * 0.5


class Scheduled(FedAvg):
    """Looks its rate up by the round, which nobody warns of: as a tensor, no round is found."""

    records = True

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, torch.Tensor]:
        return super().step(carry, batch, {0: 3, 7: 9}.get(round, 500))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Pausing, "branches on a value"), (Doubting, "branches on a value"), (Scheduled, "first replay differs")],
)
def test_a_step_that_cannot_be_recorded_runs_as_written_and_that_is_said_once(kind: type[FedAvg], reason: str) -> None:
    training = kind(Task(mlp(64, (24, 16), 10), 10, 2), kind.Hyper(iterations=4, batch_size=16))
    said = list[str]()
    recorded = Recorded(said.append, worth=0)
    assert_same_ends(training, recorded)
    assert not recorded._graphs
    assert len(said) == 1
    assert reason in said[0]


def test_a_recorder_that_fails_changes_no_bit_and_the_observer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no TorchScript here")

    class Noting(Watching):
        def __init__(self) -> None:
            self.notes = list[str]()

        def note(self, text: str) -> None:
            self.notes.append(text)

    config = configure("fedavg", "digits", profile="smoke", rounds=2, settings=["iterations=20", "batch_size=16"])
    sound, troubled = Noting(), Noting()
    expected = api.train(config, tmp_path / "sound", workers=1, observer=sound).published("none").state
    monkeypatch.setattr(torch.jit, "trace", broken)
    ours = api.train(config, tmp_path / "troubled", workers=1, observer=troubled).published("none").state
    assert_same_bits(ours, expected)
    assert not sound.notes
    assert [note for note in troubled.notes if "no TorchScript here" in note] == troubled.notes != []


def test_a_rate_that_does_not_depend_on_the_round_is_recorded_too() -> None:
    class Steady(FedAvg):
        def step(self, carry: State, batch: Batch, round: int) -> tuple[State, torch.Tensor]:
            return super().step(carry, batch, 0)

    training = Steady(Task(mlp(64, (24, 16), 10), 10, 2), Steady.Hyper(iterations=4, batch_size=16))
    recorded = Recorded(worth=0)
    assert_same_ends(training, recorded)
    assert recorded._graphs


def test_a_carry_in_another_layout_is_recorded_anew() -> None:
    """What is replayed would take the numbers in the order in which they were recorded."""
    kind = TRAININGS["fedavg"]
    training = kind(Task(mlp(64, (24, 16), 10), 10, 2), kind.Hyper(batch_size=16))
    (phase,), recorded = training.phases(0), Recorded(worth=0)
    batch = Batch(torch.randn(16, 1, 8, 8, generator=generator(0)), torch.arange(16) % 10)
    for turned in (False, True):
        carry = training.begin(training.init(generator(1)), {}, None)  # type: ignore[arg-type]
        expected, _ = as_written(phase, {name: value.clone() for name, value in carry.items()}, [batch], 0)
        if turned:
            carry = {name: value.t().contiguous().t() for name, value in carry.items()}
        ours, _ = recorded(phase, carry, [batch], 0)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value)
    assert len(recorded._graphs) == 2


def test_a_step_that_changes_the_layout_is_not_followed_by_itself() -> None:
    class Turning(FedAvg):
        def step(self, carry: State, batch: Batch, round: int) -> tuple[State, torch.Tensor]:
            carry, loss = super().step(carry, batch, round)
            return {name: value.t().contiguous().t() for name, value in carry.items()}, loss

    training = Turning(Task(mlp(64, (24, 16), 10), 10, 2), Turning.Hyper(iterations=5, batch_size=36))
    recorded = Recorded(worth=0)
    assert_same_ends(training, recorded)
    kept = [graph.keeps_layout for graph in recorded._graphs.values()]
    assert sorted(set(kept)) == [False, True]  # the first step's, and those of the steps after it


def test_the_engine_records() -> None:
    """Who changes a step so that it cannot be recorded shall learn of it here, not from a slow run."""
    training = assemble(configure("fedtta", "digits")).training
    assert isinstance(steps_of(training, CPU), Recorded)


def test_a_recording_does_not_outlive_its_run() -> None:
    """TorchScript's own table keeps what it compiles until the process ends: 2 MB a recording of FedTTA's step."""
    shared = importlib.import_module("torch.jit._state")._python_cu
    before = shared.get_functions()
    training = FedAvg(Task(mlp(64, (16,), 10), 10, 2), FedAvg.Hyper(iterations=4, batch_size=16))
    recorded = Recorded(worth=0)
    trained(training, recorded)
    assert recorded._graphs
    assert len(shared.get_functions()) == len(before)
    assert importlib.import_module("torch.jit._state")._python_cu is shared
