"""FedSR: its divergence, its steps against plain autograd, and its sampled predictions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from tests.helpers.params import Params, clipped, descend, difference, distance, doubled, gradient, leaves, norm
from tests.helpers.rounds import CIFAR10, FEMNIST, MLP, double_server, local_round, noisy
from tests.reference import CLASSES, Case, Somebody
from upfl.contract import Batch, Published, Task, Unlabelled
from upfl.models import Layered
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training.fedsr import FedSR, FedSRHyper, gaussian_kl

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 10), st.floats(0.1, 2))
def test_fedsrs_divergence_is_that_of_torch_distributions(seed: int, spread: float, to_spread: float) -> None:
    drawn = torch.randn(2, 7, generator=generator(seed), dtype=torch.float64)
    scale = torch.rand(2, 7, generator=generator(seed, "scale"), dtype=torch.float64) + 0.1
    m, to_m, sigma, to_sigma = *drawn, *(scale * torch.tensor([[spread], [to_spread]]))
    expected = kl_divergence(Normal(m, sigma), Normal(to_m, to_sigma))
    torch.testing.assert_close(gaussian_kl(m, sigma, to_m, to_sigma), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gaussian_kl(m, -sigma, to_m, to_sigma), expected, rtol=1e-6, atol=1e-6)


def test_fedsrs_feature_layers_have_the_papers_sizes() -> None:
    for model, layer, doubled_shape, features, rest in (
        (MLP, "fc2", (400, 200), 200, {"fc3.weight": (10, 200)}),
        (CIFAR10, "conv2", (128, 32, 5, 5), 4096, {"fc1.weight": (512, 4096), "fc2.weight": (10, 512)}),
        (FEMNIST, "conv2", (128, 32, 5, 5), 3136, {"fc1.weight": (2048, 3136), "fc2.weight": (62, 2048)}),
    ):
        training = FedSR(Task(model, 10, 3), FedSRHyper())
        wider = {f"{layer}.weight": doubled_shape, f"{layer}.bias": doubled_shape[:1]}
        assert training.model.shapes == model.shapes | wider
        assert {name: training.model.shapes[name] for name in rest} == rest
        (phase,) = training.phases(0)
        assert (phase.noise["eps"].kind, phase.noise["eps"].size) == ("normal", features)
        memory = training.memory(Somebody())
        shapes = {name: tuple(value.shape) for name, value in memory.items()}
        assert shapes == {"r_m": (10, features), "r_s": (10, features), "C": ()}
        assert (memory["r_m"] == 0).all()
        assert (memory["r_s"] == 1).all()
        assert memory["C"] == 1


def forward_gaussian(psi: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the representation."""
    if "conv1.weight" in psi:
        x = F.max_pool2d(F.relu(F.conv2d(x, psi["conv1.weight"], psi["conv1.bias"], padding=2)), 2)
        x = F.max_pool2d(F.conv2d(x, psi["conv2.weight"], psi["conv2.bias"], padding=2), 2).flatten(1)
    else:
        x = F.relu(F.linear(x.flatten(1), psi["fc1.weight"], psi["fc1.bias"]))
        x = F.linear(x, psi["fc2.weight"], psi["fc2.bias"])
    half = x.shape[1] // 2
    return x[:, :half], F.softplus(x[:, half:])


def forward_classifier(psi: Params, z: Tensor) -> Tensor:
    if "conv1.weight" in psi:
        z = F.relu(F.linear(z, psi["fc1.weight"], psi["fc1.bias"]))
        return F.linear(z, psi["fc2.weight"], psi["fc2.bias"])
    return F.linear(z, psi["fc3.weight"], psi["fc3.bias"])


def fedsr_loss(psi: Params, own: Params, batch: Batch, l2r: float, cmi: float) -> Tensor:
    m, sigma = forward_gaussian(psi, batch.x)
    z = m + sigma * batch.noise["eps"]
    reference = Normal(own["r_m"][batch.y], F.softplus(own["r_s"][batch.y]))
    divergence: Tensor = kl_divergence(Normal(own["C"] * m, own["C"] * sigma), reference).sum(1).mean()
    length: Tensor = torch.linalg.vector_norm(z, dim=1).mean()
    return F.cross_entropy(forward_classifier(psi, z), batch.y) + l2r * length + cmi * divergence


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_consecutive_fedsr_steps_equal_plain_autograd(case: Case, clip: float) -> None:
    """Regularizers far larger than the paper's, so that they show; references with momentum, from rest."""
    l2r, cmi = 0.3, 0.2
    hyper = FedSRHyper(lr=0.1, l2r=l2r, cmi=cmi, clip=clip, weight_decay=0.01)
    training = FedSR(Task(case.model, CLASSES, 3), hyper)
    server, memory = double_server(training), doubled(training.memory(Somebody()))
    memory["C"] = torch.tensor(1.2, dtype=torch.float64)
    batches = [noisy(case.batch(9, seed), training, seed) for seed in range(4)]
    up, kept, losses = local_round(training, server, memory, Somebody(round=7), batches)
    lr = 0.1 * 0.99**0.7
    psi, own = select(server, "psi"), memory
    velocity = {name: torch.zeros_like(value) for name, value in own.items()}
    for batch, loss in zip(batches, losses, strict=True):
        both = leaves(prefixed("psi", psi) | prefixed("own", own))
        expected = fedsr_loss(select(both, "psi"), select(both, "own"), batch, l2r, cmi)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        grads = gradient(expected, both)
        assert min(norm(select(grads, part)) for part in ("psi", "own")) > 0.05
        psi = descend(psi, select(grads, "psi"), lr, 0.01, clip)
        steps = clipped(select(grads, "own"), clip)
        velocity = {name: 0.9 * value + steps[name] for name, value in velocity.items()}
        own = {name: value - lr * velocity[name] for name, value in own.items()}
    assert distance(select(dict(up), "psi"), difference(psi, select(server, "psi"))) < 1e-4
    assert distance(difference(kept, memory), difference(own, memory)) < 1e-4
    assert up.keys() == server.keys() | {"weight"}, "references are not aggregated"
    assert float((kept["C"] - memory["C"]).abs()) > 1e-3


class Overheard:
    """A classifier that keeps what it is given."""

    def __init__(self, inner: Layered) -> None:
        self.inner, self.heard = inner, [torch.empty(0)][:0]

    def apply(self, params: State, z: Tensor) -> Tensor:
        self.heard.append(z)
        return self.inner.apply(params, z)


def test_fedsr_predicts_the_mean_probability_of_twenty_seeded_samples(case: Case) -> None:
    training = FedSR(Task(case.model, CLASSES, 3), FedSRHyper())
    server, x = training.init(generator(1, "server")), case.x(9, 3, torch.float32)
    overheard = Overheard(training.classifier)
    training.classifier = overheard  # type: ignore[assignment]
    params = training.start(Published(server, 3), Unlabelled(0, x), None)
    log_p = training.logits(params, x)
    psi = select(server, "psi")
    m, sigma = forward_gaussian(psi, x)
    samples = torch.stack(overheard.heard)
    assert samples.shape == (20, *m.shape)
    expected = torch.stack([forward_classifier(psi, z).softmax(1) for z in samples]).mean(0)
    torch.testing.assert_close(log_p.softmax(1), expected, rtol=1e-4, atol=1e-6)
    eps = (samples - m) / sigma
    assert float(eps.mean()) == pytest.approx(0, abs=0.2)
    assert float(eps.std()) == pytest.approx(1, abs=0.1)
    assert not torch.allclose(eps[0], eps[1], atol=0.1)
    torch.manual_seed(99)
    again = training.start(Published(server, 7), Unlabelled(0, x), None)
    assert torch.equal(training.logits(again, x), log_p), "a prediction depends on what was drawn before it"
    torch.testing.assert_close(training.logits(params, x[4:5]), log_p[4:5], rtol=1e-4, atol=1e-5)
