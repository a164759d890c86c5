"""What local steps are made of: the cross-entropy with its gradient, and the SGD update."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator
from torch import Tensor

from upfl.contract import Batch
from upfl.models import Direction, Gradient, Trace, descend_, split, whole_in_factors
from upfl.state import State, move_, norm, trainable


def cross_entropy(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy over a batch's samples, and its gradient with respect to the logits."""
    log_p = logits.log_softmax(1)
    if batch.mask is None:
        loss, share = F.nll_loss(log_p, batch.y), 1 / len(batch.y)
        return loss, log_p.exp_().mul_(share).scatter_(1, batch.y.unsqueeze(1), -share, reduce="add")
    y, weight = batch.y.unsqueeze(1), batch.weight().unsqueeze(1)
    loss = -(log_p.gather(1, y) * weight).sum()
    return loss, log_p.exp().scatter_add(1, y, _minus_one(y, log_p)) * weight


# The words of earlier versions, which run folders and bundles hold.
_EARLIER = {"reverse": "target-first", "teacher-first": "target-first"}
_EARLIER |= {"forward": "own-first", "student-first": "own-first"}
Order = Annotated[
    Literal["target-first", "own-first"],
    BeforeValidator(lambda order: _EARLIER.get(order, order) if isinstance(order, str) else order),
]


def divergence(logits: Tensor, others: Tensor, weight: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """The weighted sum over samples of a divergence between a model and its target, and its gradient for the logits.

    target-first: KL(softmax(others) || softmax(logits)), own-first: KL(softmax(logits) || softmax(others)).

    One rule for all methods: the target stands first unless `kl` says otherwise. The paper's text puts the model first,
    the authors' code the target, in FedTTA-Prox and in the digest alike; the paper's figures, and the mu that it
    searched, are the code's. On digits with that mu the two are level (results/digits.md).
    """
    own, other, weight = logits.log_softmax(1), others.log_softmax(1), weight.unsqueeze(1)
    p = own.exp()
    if order == "own-first":
        terms = p * (own - other)
        return (terms * weight).sum(), (terms - p * terms.sum(1, keepdim=True)) * weight
    target = other.exp()
    return (target * (other - own) * weight).sum(), (p - target) * weight


def gradients(loss: Callable[[State], Tensor], params: State) -> tuple[Tensor, State]:
    """A loss and its gradient by autograd, for steps whose derivatives are not written out.

    Buffers are handed to the loss as they are, which may update them, and have no gradient.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in trainable(params).items()}
    with torch.enable_grad():
        value = loss({name: leaves.get(name, value) for name, value in params.items()})
        found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return value.detach(), dict(zip(leaves, found, strict=True))


def gradients_through(
    trace: Trace, loss: Callable[[Tensor, State], Tensor], params: State
) -> tuple[Tensor, Gradient, State]:
    """A loss of a trace's output and of further parameters, with its gradients for those of the trace and for these.

    Autograd goes back through the loss alone, which is written so; the way on is the trace's own.
    """
    value, found = gradients(lambda given: loss(given["output"], given), params | {"output": trace.output})
    return value, trace.backward(found.pop("output")), found


def sgd_(
    params: State,
    gradients: Direction,
    rate: float,
    weight_decay: float,
    clip: float,
    momentum: tuple[float, State] | None = None,
) -> None:
    """params <- params - rate * step, in place, with step = clip(gradients) + weight_decay * params.

    The gradients are used up. With momentum (m, buffers) the buffers step instead: buffers <- m * buffers + step.
    """
    if momentum is None and (whole := whole_in_factors(gradients)):
        descend_(params, whole, rate, weight_decay, clip)
        return
    dense, outer = split(gradients) if momentum is None else (dict(gradients), {})
    length = norm([*dense.values(), *(one.norm() for one in outer.values())])
    divisor = ((length + 1e-6) / clip).clamp(min=1.0)
    if dense:
        own, moving = [params[name] for name in dense], None
        if momentum is not None and momentum[0]:
            moving = momentum[0], [momentum[1][name] for name in dense]
        move_(own, list(dense.values()), rate, weight_decay, divisor, moving)
    for layer, one in outer.items():
        one.over(divisor).add_to_(params[f"{layer}.weight"], params[f"{layer}.bias"], -rate, 1 - rate * weight_decay)


def _minus_one(y: Tensor, like: Tensor) -> Tensor:
    return torch.full(y.shape, -1.0, dtype=like.dtype, device=like.device)
