"""Federations with label shift and feature shift, whose truth is known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from tests.synthetic import Floats, World, even, world
from upfl.contract import CrossFitted, Unlabelled

EVERYTHING = ("auto", "label-shift", "bbse", "map-em")


def overconfident(here: World, by: float, tilt: Sequence[float]) -> World:
    """The same, seen through a model whose logits are `by` times too large and tilted towards some classes."""

    def bent(all: list[Tensor]) -> list[Tensor]:
        return [by * (z + torch.tensor(tilt)) for z in all]

    return replace(here, logits=bent(here.logits), new_logits=bent(here.new_logits))


def uneven(classes: int, clients: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(classes, 0.7)) for _ in range(clients)]


def pooled_calibration(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[float, Floats]:
    """(a, b) of the pooled data by a general optimizer, on the documented objective."""
    scores, y = torch.cat(list(logits)).double().log_softmax(1), torch.cat(list(labels))
    n, classes = scores.shape
    weight = max(0.5 / n, 1e-3 if classes >= 62 else 0.0)

    def objective(theta: Floats) -> tuple[float, Floats]:
        leaf = torch.tensor(theta, requires_grad=True)
        b = leaf[1:] - leaf[1:].mean()
        loss = torch.nn.functional.cross_entropy(leaf[0] * scores + b, y)
        loss = loss + (leaf[0] - 1) ** 2 / (2 * n) + weight / 2 * (b**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return loss.item(), leaf.grad.numpy()

    start = np.concatenate([[1.0], np.zeros(classes)])
    bounds = [(1e-6, None), *[(None, None)] * classes]
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 5000, "ftol": 0})
    return float(found.x[0]), found.x[1:] - found.x[1:].mean()


def accuracy(here: World, personalizer: Any, fitted: CrossFitted) -> float:
    right = total = 0
    for i, (x, y) in enumerate(zip(here.new_logits, here.new_labels, strict=True)):
        found = personalizer.personalize(fitted.published, Unlabelled(i, x))
        right, total = right + int((found.logits.argmax(1) == y).sum()), total + len(y)
    return 100 * right / total


def feature_shift(clients: int = 15, size: float = 1.5) -> World:
    """Everyone has the same mix of classes, but each client's inputs make some classes look likelier."""
    rng = np.random.default_rng(3)

    def bend(z: Tensor, y: Tensor) -> Tensor:
        return z + torch.tensor(rng.normal(0, size, z.shape[1])).float()

    return world([even(6)] * clients, [even(6)] * clients, samples=60, apart=1.5, bend=bend)
