"""ATP: its rates against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from upfl.contract import Batch, CrossFitted, Personalized, Published, Task, Unlabelled
from upfl.models import mlp
from upfl.personalize.atp import Atp, AtpHyper, Rates
from upfl.randomness import generator
from upfl.state import prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def atp_case() -> tuple[Rates, Atp, Published, Batch]:
    model = mlp(6, (5,), 4)
    training = FedAvg(Task(model, 4, 3), FedAvgHyper())
    psi = {name: value.double() for name, value in model.init(generator(4)).items()}
    published = Published(prefixed("psi", psi), 1)
    personalizer = Atp(training, AtpHyper(rate=0.3))
    x = torch.randn(9, 6, generator=generator(5), dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0]))
    return Rates(personalizer, CrossFitted(published)), personalizer, published, batch


def test_atps_rates_go_down_the_cross_entropy_after_the_step() -> None:
    """Against finite differences of CE(theta - alpha u) in each alpha, at zero and elsewhere; in float64."""
    rates, personalizer, published, batch = atp_case()
    model, psi = personalizer.training.model, select(published.state, "psi")
    leaves = {name: value.clone().requires_grad_() for name, value in psi.items()}
    p = model.apply(leaves, batch.x).softmax(1)
    mean_entropy = -(p * p.log()).sum(1).mean()
    u = dict(zip(psi, torch.autograd.grad(mean_entropy, list(leaves.values())), strict=True))

    def loss(alpha: Tensor) -> float:
        moved = {name: value - alpha[i] * u[name] for i, (name, value) in enumerate(psi.items())}
        return float(torch.nn.functional.cross_entropy(model.apply(moved, batch.x), batch.y))

    for alpha in (torch.zeros(4).double(), torch.tensor([0.5, -1.0, 2.0, 0.3]).double()):
        after, at = rates.step({"alpha": alpha}, batch, 0)
        assert float(at) == pytest.approx(loss(alpha), rel=1e-5)
        for i, (name, value) in enumerate(psi.items()):
            up, down = alpha.clone(), alpha.clone()
            up[i], down[i] = up[i] + 1e-5, down[i] - 1e-5
            slope = (loss(up) - loss(down)) / 2e-5
            expected = -0.3 * slope / math.sqrt(value.numel())
            assert float(after["alpha"][i] - alpha[i]) == pytest.approx(expected, rel=1e-5, abs=1e-10), name


def test_atp_without_rates_is_the_base_model_and_its_step_is_an_entropy_step() -> None:
    _, personalizer, published, batch = atp_case()
    client = Unlabelled(0, batch.x)

    def at(alpha: Tensor) -> Personalized:
        known = Published(published.state, 1, fitted={"rates.atp.alpha": alpha})
        return personalizer.personalize(known, client)

    base = personalizer.training.model.apply(select(published.state, "psi"), batch.x)
    still = at(torch.zeros(4).double())
    torch.testing.assert_close(still.logits, base)
    torch.testing.assert_close(still.before, base)
    torch.testing.assert_close(still.predict_logits(batch.x), base)
    moved = at(torch.full((4,), 0.01).double())
    assert moved.diary.entropy[1] < moved.diary.entropy[0]
    assert at(torch.full((4,), -0.01).double()).diary.entropy[1] > moved.diary.entropy[0]
