"""AFL: the exact projection onto the simplex, and the mixture of a round by hand."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.params import difference, distance
from tests.helpers.rounds import double_server, holder, local_round, small_run, total_of
from tests.reference import CLASSES, Case, descended
from upfl.contract import Task
from upfl.state import State, select
from upfl.training.afl import AFL, AFLHyper, simplex_projection

pytestmark = pytest.mark.usefixtures("one_thread")


def exact_projection(point: Sequence[float]) -> list[Fraction]:
    """The nearest point of the simplex, by trying every support: the one that meets the conditions of optimality."""
    values = [Fraction(value) for value in point]
    for size in range(1, len(values) + 1):
        for support in combinations(range(len(values)), size):
            threshold = sum((values[i] for i in support), Fraction(-1)) / size
            inside = all(values[i] >= threshold for i in support)
            if inside and all(values[i] <= threshold for i in range(len(values)) if i not in support):
                return [values[i] - threshold if i in support else Fraction(0) for i in range(len(values))]
    raise AssertionError("every point has a projection")


numbers = st.floats(-1000, 1000) | st.floats(-1, 1) | st.sampled_from([0.0, 0.25, 0.5, 1.0])


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=6))
def test_the_simplex_projection_is_the_exact_one(point: list[float]) -> None:
    ours = simplex_projection(torch.tensor(point, dtype=torch.float64))
    assert ours.tolist() == pytest.approx([float(value) for value in exact_projection(point)], abs=1e-11)


@pytest.mark.parametrize("participants", [4, 6])
def test_afl_without_a_mixture_rate_is_fedavg_to_1e_6(tmp_path: Path, participants: int) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg", clients_per_round=participants)
    afl = small_run(tmp_path / "afl", "afl", "mixture_lr=0.0", clients_per_round=participants)
    assert distance(select(afl.server, "psi"), select(fedavg.server, "psi")) < 1e-6
    assert afl.server["mixture"].tolist() == pytest.approx([1 / 6] * 6, rel=1e-6)
    moved = small_run(tmp_path / "moved", "afl", "mixture_lr=0.1", clients_per_round=participants)
    assert distance(select(moved.server, "psi"), select(fedavg.server, "psi")) > 1e-4, "the rate makes no difference"


def afl_server(training: AFL, mixture: Sequence[float]) -> State:
    return double_server(training) | {"mixture": torch.tensor(mixture)}


def test_an_afl_client_sends_the_received_models_loss_on_its_training_data_in_its_own_place(case: Case) -> None:
    training = AFL(Task(case.model, CLASSES, 4), AFLHyper(lr=0.3))
    server, own = afl_server(training, [0.4, 0.3, 0.2, 0.1]), case.batch(300, 4)
    up, kept, _ = local_round(training, server, {}, holder(own, id=2), [case.batch(9, seed) for seed in range(3)])
    expected = F.cross_entropy(case.forward(select(server, "psi"), own.x), own.y)
    assert up["losses"].tolist() == [0, 0, pytest.approx(float(expected), rel=1e-6), 0]
    assert kept == {}


@pytest.mark.parametrize("came", [(0, 1, 2, 3), (0, 1), (1, 2, 3), (1, 3), (3,)], ids=str)
def test_an_afl_round_weighs_by_the_mixture_of_those_that_came_and_raises_it_by_their_losses(
    case: Case, came: tuple[int, ...]
) -> None:
    """Client 3 has no weight: where it comes alone the model stays as it is."""
    mixture, rate = [0.5, 0.2, 0.3, 0.0], 0.05
    training = AFL(Task(case.model, CLASSES, 4), AFLHyper(lr=0.3, mixture_lr=rate))
    server, round = afl_server(training, mixture), 7
    received = select(server, "psi")
    ups, moves, losses = [], [], [0.0] * 4
    for id in came:
        own, batches = case.batch(20 + id, 50 + id), [case.batch(9, 10 * id + seed) for seed in range(3)]
        ups.append(local_round(training, server, {}, holder(own, id, round), batches)[0])
        losses[id] = float(F.cross_entropy(case.forward(received, own.x), own.y))
        moves.append(difference(descended(case.forward, received, batches, 0.3 * 0.99**0.7), received))
    after = training.aggregate(server, total_of(training, ups), round)
    weight = sum(mixture[id] for id in came)
    for name, value in received.items():
        mean = sum(mixture[id] * move[name] for id, move in zip(came, moves, strict=True)) / (weight or 1)
        torch.testing.assert_close(after[f"psi.{name}"], value + mean, rtol=1e-6, atol=1e-9)
    raised = [share + rate * 0.99**0.7 * loss for share, loss in zip(mixture, losses, strict=True)]
    expected = [float(value) for value in exact_projection(raised)]
    assert after["mixture"].tolist() == pytest.approx(expected, abs=1e-6)
    assert max(abs(new - old) for new, old in zip(expected, mixture, strict=True)) > 1e-4


def test_afls_effective_number_of_clients_is_in_every_rounds_metrics(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "afl", "mixture_lr=0.3")
    effective = [line["effective_clients"] for line in run.metrics]
    mixture = run.server["mixture"].double()
    assert float(mixture.sum()) == pytest.approx(1, abs=1e-6)
    assert effective[-1] == pytest.approx(1 / float(mixture.square().sum()), rel=1e-6)
    assert all(1 <= value <= 6.0001 for value in effective)
    assert min(effective) < 5.9, "the mixture did not move"
