"""Recorded steps: the bits of the steps as they are written, for every training that is recorded."""

from typing import Any

import pytest
import torch

from tests.test_vectorize import CLAIMING
from upfl.config import configure
from upfl.contract import Batch, Task, Training
from upfl.data import Partition, build_federation, load
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.local import train_alone
from upfl.engine.recorded import Recorded, as_written, steps_of
from upfl.engine.setup import assemble
from upfl.methods import TRAININGS
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.state import State
from upfl.training.fedavg import FedAvg

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def trained(training: Training[Any], steps: Any, rounds: tuple[int, ...] = (0, 7)) -> list[tuple[State, torch.Tensor]]:
    """What two clients end with in some rounds; their 37 and 36 samples make batches of three sizes."""
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    inputs, server = Inputs(federation.source), training.init(generator(1, "server"))
    ends = []
    for round in rounds:
        for id in (0, 1):
            client = LocalClient(federation, inputs, 3, id, round)
            carry = training.begin(server, training.memory(client), client)
            with torch.no_grad():
                ends.append(train_alone(training, carry, client, round, steps))
    return ends


@pytest.mark.parametrize("changes", [{}, {"clip": 0.5}], ids=["", "clipped"])
@pytest.mark.parametrize("name", CLAIMING)
def test_a_recorded_step_has_the_bits_of_the_step(name: str, changes: dict[str, float]) -> None:
    kind = TRAININGS[name]
    # The first layer is wide beside a batch, so that its gradient stays in factors; the others are not.
    training = kind(Task(mlp(64, (96, 16), 10), 10, 2), kind.Hyper(iterations=9, batch_size=16, **changes))
    recorded = Recorded(worth=1)
    replayed = trained(training, recorded)
    assert len(recorded._graphs) >= 2  # a full batch, and a pass's last
    for (carry, loss), (ours, our_loss) in zip(trained(training, as_written), replayed, strict=True):
        assert ours.keys() == carry.keys()
        assert torch.equal(our_loss, loss)
        different = [key for key, value in carry.items() if not torch.equal(ours[key], value)]
        assert not different


def test_a_shape_is_recorded_once_it_has_come_up_often_enough() -> None:
    kind, calls = TRAININGS["fedavg"], []
    training = kind(Task(mlp(64, (16,), 10), 10, 2), kind.Hyper(iterations=5, batch_size=8))

    class Watched(type(training)):  # type: ignore[misc]
        def step(self, carry: State, batch: Any, round: int) -> Any:
            calls.append(len(batch.y))
            return super().step(carry, batch, round)

    watched = Watched(training.task, training.hyper)
    trained(watched, Recorded(worth=4), rounds=(0, 1, 2, 3))
    assert calls.count(8) == 5  # four as written, one to record; the rest is replayed without Python


def test_where_steps_are_recorded() -> None:
    def of(name: str, model: Any) -> Any:
        kind = TRAININGS[name]
        return steps_of(kind(Task(model, 10, 2), kind.Hyper()), CPU)

    assert isinstance(of("fedavg", mlp(64, (16,), 10)), Recorded)
    assert of("fedavg", convnet((1, 8, 8), 10)) is as_written
    other = next(name for name, training in TRAININGS.items() if not training.vectorizes and not training.heterogeneous)
    assert of(other, mlp(64, (16,), 10)) is as_written


def test_a_recorded_step_updates_each_model_in_one_operation() -> None:
    kind = TRAININGS["fedtta"]
    training, recorded = kind(Task(mlp(64, (96, 16), 10), 10, 2), kind.Hyper(batch_size=16)), Recorded(worth=0)
    trained(training, recorded, rounds=(0,))
    for graph in recorded._graphs.values():
        assert str(graph._graph.inlined_graph).count("aten::_fused_sgd_") == 2  # psi's and phi's


def test_a_rate_that_does_not_depend_on_the_round_is_recorded_too() -> None:
    class Steady(FedAvg):
        def step(self, carry: State, batch: Batch, round: int) -> tuple[State, torch.Tensor]:
            return super().step(carry, batch, 0)

    training = Steady(Task(mlp(64, (24, 16), 10), 10, 2), Steady.Hyper(iterations=4, batch_size=16))
    recorded = Recorded(worth=0)
    for (carry, _), (ours, _) in zip(trained(training, as_written), trained(training, recorded), strict=True):
        assert all(torch.equal(ours[name], value) for name, value in carry.items())
    assert recorded._graphs


def test_a_carry_in_another_layout_is_recorded_anew() -> None:
    """What is replayed would take the numbers in the order in which they were recorded."""
    kind = TRAININGS["fedavg"]
    training = kind(Task(mlp(64, (24, 16), 10), 10, 2), kind.Hyper(batch_size=16))
    (phase,), recorded = training.phases(0), Recorded(worth=0)
    batch = Batch(torch.randn(16, 1, 8, 8, generator=generator(0)), torch.arange(16) % 10)
    for turned in (False, True):
        carry = training.begin(training.init(generator(1)), {}, None)  # type: ignore[arg-type]
        expected, _ = as_written(phase, {name: value.clone() for name, value in carry.items()}, batch, 0)
        if turned:
            carry = {name: value.t().contiguous().t() for name, value in carry.items()}
        ours, _ = recorded(phase, carry, batch, 0)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value)
    assert len(recorded._graphs) == 2


def test_the_engine_records() -> None:
    """Who changes a step so that it cannot be recorded shall learn of it here, not from a slow run."""
    training = assemble(configure("fedtta", "digits")).training
    assert isinstance(steps_of(training, CPU), Recorded)
