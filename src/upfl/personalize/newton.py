"""Newton's method for a calibration, p = softmax(a log softmax(z) + b): what clients sum, and steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from upfl.state import State

LEAST_SCALE = 1e-3


class Newton(NamedTuple):
    """Newton's step at a point of each fit, no further than where a is least; what it gains, twice; that of b alone."""

    point: Tensor
    step: Tensor
    decrement: Tensor
    bias_step: Tensor
    prior_step: Tensor  # by how much the mean posterior changes with the step

    @classmethod
    def at(cls, point: Tensor, gradient: Tensor, slopes: Tensor, weight: Tensor) -> Newton:
        hessian = slopes + torch.diag_embed(weight)
        hessian[:, 1:, 1:] += 1  # b's mean does not show in p: keep it where it is
        step, scale = -torch.linalg.solve(hessian, gradient), point[:, 0]
        bias_step = torch.zeros_like(step)
        bias_step[:, 1:] = -torch.linalg.solve(hessian[:, 1:, 1:], gradient[:, 1:])
        held = (scale < 1.01 * LEAST_SCALE) & (step[:, 0] < 0)
        step = torch.where(held.unsqueeze(1), bias_step, step)
        longest = torch.where(step[:, 0] < 0, (scale - LEAST_SCALE) / -step[:, 0], 1.0).clamp(max=1)
        step = longest.unsqueeze(1) * step
        prior_step = (slopes[:, 1:] @ step.unsqueeze(2)).squeeze(2)
        return cls(point, step, -(gradient * step).sum(1), bias_step, prior_step)


def newton_sums(theta: Tensor, scores: Tensor, y: Tensor) -> State:
    """A client's part of the loss, its gradient and Hessian at each theta; and of the confusion.

    theta [fits, 1 + classes], scores [fits or 1, n, classes], y [n].
    """
    (fits, _), (_, n, classes) = theta.shape, scores.shape
    log_p = (theta[:, :1].unsqueeze(2) * scores + theta[:, 1:].unsqueeze(1)).log_softmax(2)
    p = log_p.exp()
    off = p.clone()
    off[:, torch.arange(n), y] -= 1
    away = scores - (p * scores).sum(2, keepdim=True)
    hessian = torch.empty(fits, 1 + classes, 1 + classes, dtype=scores.dtype)
    hessian[:, 0, 0] = (p * away.square()).sum((1, 2))
    hessian[:, 0, 1:] = hessian[:, 1:, 0] = (p * away).sum(1)
    hessian[:, 1:, 1:] = p.sum(1).diag_embed() - p.mT @ p
    confusion = torch.zeros(fits, classes**2, dtype=torch.int64)
    confusion.scatter_add_(1, p.argmax(2) * classes + y, torch.ones(fits, n, dtype=torch.int64))
    return {
        "loss": -log_p[:, torch.arange(n), y].sum(1),
        "gradient": torch.cat([(off * scores).sum((1, 2)).unsqueeze(1), off.sum(1)], 1),
        "hessian": hessian,
        "confusion": confusion.view(fits, classes, classes),
    }
