"""Named parameters: gradients, plain steps, distances."""

import math

import torch
from torch import Tensor

Params = dict[str, Tensor]


def gradient(value: Tensor, params: Params, create_graph: bool = False) -> Params:
    grads = torch.autograd.grad(value, list(params.values()), create_graph=create_graph, allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), grads, strict=True)
    }


def leaves(params: Params) -> Params:
    return {name: value.detach().clone().requires_grad_() for name, value in params.items()}


def norm(params: Params) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in params.values()))


def clipped(grads: Params, largest: float) -> Params:
    """As torch.nn.utils.clip_grad_norm_ does it."""
    factor = min(1.0, largest / (norm(grads) + 1e-6))
    return {name: grad * factor for name, grad in grads.items()}


def descend(params: Params, grads: Params, rate: float, weight_decay: float, clip: float = math.inf) -> Params:
    grads = clipped(grads, clip)
    return {
        name: value.detach() - rate * (grads[name] + weight_decay * value.detach()) for name, value in params.items()
    }


def doubled(params: Params) -> Params:
    return {name: value.double() for name, value in params.items()}


def difference(ours: Params, theirs: Params) -> Params:
    assert ours.keys() == theirs.keys()
    return {name: ours[name].double() - theirs[name].double() for name in ours}


def distance(ours: Params, theirs: Params, scale: Params | None = None) -> float:
    """The norm of the difference, relative to that of `scale` (or of `theirs`)."""
    return norm(difference(ours, theirs)) / norm(theirs if scale is None else scale)
