"""FedGMA: FedAvg without threshold, and its mask by hand."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.params import distance
from tests.helpers.rounds import scores, small_run, total_of
from tests.reference import Somebody
from tests.runs import assert_same_bits
from upfl.contract import Task
from upfl.models import Layered, Linear
from upfl.training.fedgma import FedGMA, FedGMAHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fedgma_without_threshold_is_fedavg_to_the_bit_over_a_whole_run(tmp_path: Path) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg")
    fedgma = small_run(tmp_path / "fedgma", "fedgma", "threshold=0.0", "server_lr=1.0")
    assert_same_bits(fedgma.server, fedavg.server)
    assert scores(fedgma) == scores(fedavg)
    masked = small_run(tmp_path / "masked", "fedgma", "threshold=0.8", "server_lr=1.0")
    assert distance(masked.server, fedavg.server) > 1e-4, "the mask makes no difference here"


def fedgma_after(changes: Tensor, threshold: float, server_lr: float, server: Tensor) -> Tensor:
    """The weight after clients changed it by the rows of `changes`."""
    size = changes.shape[1]
    hyper = FedGMAHyper(threshold=threshold, server_lr=server_lr)
    training = FedGMA(Task(Layered((Linear("fc1", size, 1),)), 1, len(changes)), hyper)
    state = {"psi.fc1.weight": server.view(1, size), "psi.fc1.bias": torch.zeros(1)}
    ends = [state | {"psi.fc1.weight": state["psi.fc1.weight"] + row} for row in changes]
    ups = [training.finish(state, end, Somebody(id=id))[0] for id, end in enumerate(ends)]
    return training.aggregate(state, total_of(training, ups), 0)["psi.fc1.weight"].view(size)


def test_fedgmas_mask_on_an_example_by_hand() -> None:
    changes = torch.tensor(
        [
            [1.0, 1.0, 4.0, 2.0, -1.0, 0.0],
            [2.0, 2.0, 1.0, 2.0, -2.0, 0.0],
            [3.0, 5.0, -1.0, -1.0, -5.0, 0.0],
            [2.0, -4.0, -2.0, 0.0, 0.0, 8.0],
        ]
    )
    #  agreement: 1, 1/2, 0, 1/4, 3/4, 1/4;  mean: 2, 1, 1/2, 3/4, -2, 2
    masked_mean = torch.tensor([2.0, 1.0, 0.0, 0.25 * 0.75, -2.0, 0.25 * 2.0])
    server = torch.tensor([1.0, -1.0, 0.5, 0.25, 2.0, 0.0])
    assert torch.equal(fedgma_after(changes, 0.5, 2.0, server), server + 2 * masked_mean)


@pytest.mark.parametrize("clients", [10, 20, 30, 50])
def test_an_agreement_of_just_the_threshold_is_not_masked(clients: int) -> None:
    """Entry j rises for j clients and falls for the others; thresholds are the decimal fractions that one writes."""
    changes = torch.where(torch.arange(clients).unsqueeze(1) < torch.arange(clients + 1), 1.0, -1.0)
    for tenths in range(1, 10):
        after = fedgma_after(changes, float(f"0.{tenths}"), 1.0, torch.zeros(clients + 1)).tolist()
        for j, value in enumerate(after):
            mean = Fraction(2 * j - clients, clients)
            mask = Fraction(1) if abs(mean) >= Fraction(tenths, 10) else abs(mean)
            assert value == pytest.approx(float(mask * mean), rel=1e-6, abs=1e-9), (tenths, j)
