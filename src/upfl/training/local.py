"""What local steps are made of: the cross-entropy with its gradient, and the SGD update."""

from collections.abc import Callable

import torch
from torch import Tensor

from upfl.state import State, norm
from upfl.training.base import Batch


def cross_entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy over a batch's samples, and its gradient with respect to the logits."""
    log_p = logits.log_softmax(1)
    y = batch.y.unsqueeze(1)
    if batch.mask is None:
        loss = -log_p.gather(1, y).mean()
        return loss, log_p.exp_().scatter_add_(1, y, _minus_one(y, log_p)).mul_(1 / len(y))
    weight = batch.weight().unsqueeze(1)
    loss = -(log_p.gather(1, y) * weight).sum()
    return loss, log_p.exp().scatter_add(1, y, _minus_one(y, log_p)) * weight


def divergence(logits: Tensor, others: Tensor, weight: Tensor, own_first: bool) -> tuple[Tensor, Tensor]:
    """The weighted sum over samples of KL(softmax(logits) || softmax(others)), and its gradient for the logits.

    Where not `own_first`, the two change places.
    """
    own, other, weight = logits.log_softmax(1), others.log_softmax(1), weight.unsqueeze(1)
    p = own.exp()
    if own_first:
        terms = p * (own - other)
        return (terms * weight).sum(), (terms - p * terms.sum(1, keepdim=True)) * weight
    target = other.exp()
    return (target * (other - own) * weight).sum(), (p - target) * weight


def gradients(loss: Callable[[State], Tensor], params: State) -> tuple[Tensor, State]:
    """A loss and its gradient by autograd, for steps whose derivatives are not written out."""
    gradient, value = torch.func.grad_and_value(loss)(params)
    return value, gradient


def sgd_(params: State, gradients: State, rate: float, weight_decay: float, clip: float) -> None:
    """params <- params - rate * (clip(gradients) + weight_decay * params), in place."""
    values = list(params.values())
    # The fused kernel walks through memory: a gradient must lie there as its parameter does.
    steps = [_laid_out_like(value, gradients[name]) for name, value in params.items()]
    divisor = ((norm(steps) + 1e-6) / clip).clamp(min=1.0)
    torch._fused_sgd_(
        values,
        steps,
        [],
        weight_decay=weight_decay,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=divisor.to(torch.float32),
    )


def clip_(gradients: list[Tensor], largest: float) -> None:
    """Scale gradients down to a joint norm of at most `largest`, in place."""
    torch._foreach_mul_(gradients, (largest / (norm(gradients) + 1e-6)).clamp(max=1.0))


def _laid_out_like(value: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == value.stride():
        return gradient
    return torch.empty_like(value).copy_(gradient)


def _minus_one(y: Tensor, like: Tensor) -> Tensor:
    return torch.full(y.shape, -1.0, dtype=like.dtype, device=like.device)
