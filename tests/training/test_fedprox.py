"""FedProx: FedAvg without mu, and its proximal term against autograd."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.params import descend, difference, distance, gradient, leaves, norm
from tests.helpers.rounds import double_server, local_round, scores, small_run
from tests.reference import CLASSES, Case, Somebody
from tests.runs import assert_same_bits
from upfl.contract import Task
from upfl.state import select
from upfl.training.fedprox import FedProx, FedProxHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fedprox_without_mu_is_fedavg_to_the_bit_over_a_whole_run(tmp_path: Path) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg")
    fedprox = small_run(tmp_path / "fedprox", "fedprox", "mu=0.0")
    assert_same_bits(fedprox.server, fedavg.server)
    assert scores(fedprox) == scores(fedavg)
    held = small_run(tmp_path / "held", "fedprox", "mu=1.0")
    assert distance(held.server, fedavg.server) > 1e-4, "mu makes no difference here"


@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_a_fedprox_step_is_one_down_the_loss_with_its_proximal_term(case: Case, clip: float) -> None:
    hyper = {"lr": 0.3, "mu": 2.0, "clip": clip, "weight_decay": 0.01}
    training = FedProx(Task(case.model, CLASSES, 3), FedProxHyper(**hyper))
    server = double_server(training)
    batches = [case.batch(9, seed) for seed in range(4)]
    up, _, _ = local_round(training, server, {}, Somebody(round=7), batches)
    received = psi = select(server, "psi")
    for batch in batches:
        psi = leaves(psi)
        with torch.enable_grad():
            away = torch.stack([(value - received[name]).square().sum() for name, value in psi.items()]).sum()
            grads = gradient(F.cross_entropy(case.forward(psi, batch.x), batch.y) + 1.0 * away, psi)
        assert norm(grads) > 0.3
        psi = descend(psi, grads, 0.3 * 0.99**0.7, 0.01, clip)
    assert distance(select(dict(up), "psi"), difference(psi, received)) < 1e-6
