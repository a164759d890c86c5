"""The paper's methods written anew with plain autograd: short, slow, and independent of upfl's derivatives.

Beside them, what several test modules share: a client that is nobody in particular, and random batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.params import Params, clipped, descend, gradient, leaves, norm
from upfl.contract import Batch, Split
from upfl.models import Layered, convnet, mlp
from upfl.randomness import generator
from upfl.state import prefixed, select

Forward = Callable[[Params, Tensor], Tensor]

CLASSES = 5


# Models, in the paper's own order


def forward_mlp(params: Params, x: Tensor) -> Tensor:
    depth = len(params) // 2
    x = x.flatten(1)
    for i in range(1, depth + 1):
        x = F.linear(x, params[f"fc{i}.weight"], params[f"fc{i}.bias"])
        x = F.relu(x) if i < depth else x
    return x


def forward_convolutions(params: Params, x: Tensor) -> Tensor:
    for name in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, params[f"{name}.weight"], params[f"{name}.bias"], padding=2)), 2)
    return x.flatten(1)


def forward_convnet(params: Params, x: Tensor) -> Tensor:
    x = F.relu(F.linear(forward_convolutions(params, x), params["fc1.weight"], params["fc1.bias"]))
    return F.linear(x, params["fc2.weight"], params["fc2.bias"])


@dataclass(frozen=True)
class Case:
    """A small model with its reference and the shape of a sample."""

    model: Layered
    forward: Forward
    shape: tuple[int, int, int]

    def params(self, seed: int, dtype: torch.dtype = torch.float64) -> Params:
        return {name: value.to(dtype) for name, value in self.model.init(generator(seed, "case")).items()}

    def x(self, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(n, *self.shape, generator=generator(seed, "x"), dtype=torch.float64).to(dtype)

    def batch(self, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
        y = torch.randint(CLASSES, (n,), generator=generator(seed, "y"))
        return Batch(self.x(n, seed, dtype), y)


CASES = {
    "mlp": Case(mlp(2 * 8 * 8, (16, 16), CLASSES), forward_mlp, (2, 8, 8)),
    "convnet": Case(convnet((2, 8, 8), CLASSES, hidden=16, width=0.25), forward_convnet, (2, 8, 8)),
}


# Derivatives and steps


def descended(forward: Forward, psi: Params, batches: Sequence[Batch], rate: float) -> Params:
    """Plain steps down the cross-entropy, with the usual decay of weights and clipping."""
    for batch in batches:
        psi = leaves(psi)
        with torch.enable_grad():
            grads = gradient(F.cross_entropy(forward(psi, batch.x), batch.y), psi)
        psi = descend(psi, grads, rate, 1e-4, 10.0)
    return psi


@dataclass(frozen=True)
class MetaStep:
    """FedTTA's local step, by the method card, with torch.autograd.grad(create_graph=True)."""

    forward: Forward
    inner_lr: float = 0.5
    outer_lr: float = 0.3
    adapt_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 10.0
    second_order: bool = True
    mu: float = 0.0
    kl: str = "own-first"

    def loss(self, psi: Params, phi: Params, x: Tensor, y: Tensor, received: Params) -> Tensor:
        """L as a differentiable function of psi and phi (of psi without the Hessian if not `second_order`)."""
        at = psi if self.second_order else leaves(psi)
        s = forward_mlp(phi, self.forward(at, x))
        guide = (s.square().sum() + 1e-12).sqrt()
        grads = gradient(guide, at, create_graph=True)
        adapted = {
            name: value - self.inner_lr * (grads[name] + self.weight_decay * value) for name, value in psi.items()
        }
        loss = F.cross_entropy(self.forward(adapted, x), y)
        if self.mu:
            p = self.forward(psi, x).log_softmax(1)
            q = self.forward(received, x).detach().log_softmax(1)
            first, second = (p, q) if self.kl == "own-first" else (q, p)
            loss = loss + self.mu * (first.exp() * (first - second)).sum(1).mean()
        return loss

    def gradients(self, psi: Params, phi: Params, batch: Batch, received: Params) -> tuple[Tensor, Params, Params]:
        psi, phi = leaves(psi), leaves(phi)
        with torch.enable_grad():
            loss = self.loss(psi, phi, batch.x, batch.y, received)
            both = gradient(loss, prefixed("psi", psi) | prefixed("phi", phi))
        return loss.detach(), select(both, "psi"), select(both, "phi")

    def run(self, psi: Params, phi: Params, batches: Sequence[Batch], round: int = 0) -> MetaRun:
        """A client's steps in a round: phi's momentum starts at zero, psi as received is what Prox holds on to."""
        decay = 0.99 ** (round / 10)
        received, velocity = psi, {name: torch.zeros_like(value) for name, value in phi.items()}
        losses, norms = [], []
        step = self._decayed(decay)
        for batch in batches:
            loss, grad_psi, grad_phi = step.gradients(psi, phi, batch, received)
            norms.append((norm(grad_psi), norm(grad_phi)))
            grad_phi = clipped(grad_phi, self.clip)
            velocity = {
                name: self.momentum * velocity[name] + grad_phi[name] + self.weight_decay * phi[name] for name in phi
            }
            psi = descend(psi, grad_psi, step.outer_lr, self.weight_decay, self.clip)
            phi = {name: value - step.adapt_lr * velocity[name] for name, value in phi.items()}
            losses.append(float(loss))
        return MetaRun(psi, phi, losses, norms)

    def _decayed(self, factor: float) -> MetaStep:
        values = vars(self) | {name: getattr(self, name) * factor for name in ("inner_lr", "outer_lr", "adapt_lr")}
        return MetaStep(**values)


@dataclass(frozen=True)
class MetaRun:
    psi: Params
    phi: Params
    losses: list[float]
    norms: list[tuple[float, float]]  # of the gradients before clipping: psi's, phi's


def guided_step(
    forward: Forward, psi: Params, phi: Params, x: Tensor, rate: float, weight_decay: float, batch: int = 64
) -> Params:
    """A newcomer's step: l = sqrt(min(n, batch)) sqrt(mean s^2), gradient clipped to 10."""
    psi = leaves(psi)
    with torch.enable_grad():
        s = forward_mlp(phi, forward(psi, x))
        guide = math.sqrt(min(len(x), batch)) * (s.square().mean() + 1e-12).sqrt()
        return descend(psi, gradient(guide, psi), rate, weight_decay, clip=10.0)


def guided_step_by_batches(
    forward: Forward, psi: Params, phi: Params, x: Tensor, rate: float, weight_decay: float, batch: int
) -> Params:
    """The authors' rule: the mean of the batches' norms, the short last one counted as much as the others."""
    psi = leaves(psi)
    with torch.enable_grad():
        norms = [forward_mlp(phi, forward(psi, part)).norm() for part in x.split(batch)]  # type: ignore[no-untyped-call]
        return descend(psi, gradient(torch.stack(norms).mean(), psi), rate, weight_decay, clip=10.0)


def guide_gradient_norm(forward: Forward, psi: Params, phi: Params, x: Tensor) -> float:
    """The norm that `guided_step` would clip."""
    psi = leaves(psi)
    with torch.enable_grad():
        s = forward_mlp(phi, forward(psi, x))
        return norm(gradient(math.sqrt(min(len(x), 64)) * (s.square().mean() + 1e-12).sqrt(), psi))


def entropy_in_bits(logits: Tensor) -> Tensor:
    """The mean over samples."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean() / math.log(2)


def entropy_step(
    forward: Forward, psi: Params, x: Tensor, rate: float, weight_decay: float, clip: float, only: str = ""
) -> Params:
    """TENT's step, on the parameters whose names start with `only`."""
    params = leaves({name: value for name, value in psi.items() if name.startswith(only)})
    with torch.enable_grad():
        grads = gradient(entropy_in_bits(forward(psi | params, x)), params)
    return psi | descend(params, grads, rate, weight_decay, clip)


# Clients


@dataclass(frozen=True)
class Somebody:
    """A client for trainings that ask for little more than its sample count."""

    count: int = 10
    id: int = 0
    round: int = 0
    seed: int = 0
    architecture: str = ""

    def generator(self, purpose: str) -> torch.Generator:
        return generator(0, self.id, self.round, purpose)

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        raise NotImplementedError
