"""What adaptation steps are made of: a loss over all of a client's samples with its gradient, and the entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upfl.contract import CHUNK, Training, chunks
from upfl.state import State, trainable


def summed_gradient(
    of: Callable[[Tensor], Tensor],
    logits: Callable[[State, Tensor], Tensor],
    params: State,
    x: Tensor,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor, State]:
    """Logits on all of x, the sum of `of(logits)`, and that sum's gradient for the parameters; buffers have none.

    `of` is asked for so many samples at a time; mostly it gives one value for each, and their number does not matter.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in trainable(params).items()}
    given = {name: leaves.get(name, value) for name, value in params.items()}
    gradient = [torch.zeros_like(value) for value in leaves.values()]
    total = torch.zeros((), device=x.device)
    outputs = []
    for part in chunks(x, size):
        with torch.enable_grad():
            z = logits(given, part)
            value = of(z).sum()
            step = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        torch._foreach_add_(*zip(*[(g, s) for g, s in zip(gradient, step, strict=True) if s is not None], strict=True))
        total += value.detach()
        outputs.append(z.detach())
    return torch.cat(outputs), total, dict(zip(leaves, gradient, strict=True))


def no_steps(training: Training[Any]) -> str | None:
    """Why no step down a gradient can be taken; None where it can."""
    if training.takes_steps:
        return None
    return f"the model of {training.name} comes from sums: it has no learning rate, and its filters no gradient"


def entropy(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits) of each sample, in nats."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)
