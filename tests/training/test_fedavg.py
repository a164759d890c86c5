"""FedAvg: local steps against PyTorch's own."""

import pytest
import torch
from torch import nn

from tests.helpers.params import difference, distance
from tests.helpers.rounds import double_server, trained
from tests.reference import CLASSES, Case
from upfl.contract import Task
from upfl.state import select
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_fedavg_steps_are_torchs_sgd_with_clipping(case: Case, clip: float) -> None:
    training = FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(lr=0.2, weight_decay=0.01, clip=clip))
    server = double_server(training)
    batches = [case.batch(n, seed) for seed, n in enumerate((12, 7, 12, 12))]
    ours, losses = trained(training, server, batches, round=7)
    params = {name: nn.Parameter(value.clone()) for name, value in select(server, "psi").items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.2 * 0.99**0.7, weight_decay=0.01)
    expected_losses, norms = [], []
    for batch in batches:
        loss = nn.functional.cross_entropy(case.forward(dict(params), batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(params.values(), clip)))
        optimizer.step()
        expected_losses.append(float(loss))
    assert (min(norms) > clip) == (clip < 1), "the case is not what it says"
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    expected = {name: value.detach() for name, value in params.items()}
    moved = difference(expected, select(server, "psi"))
    assert distance(select(ours, "psi"), expected, scale=moved) < 1e-4  # torch divides by norm + 1e-6
