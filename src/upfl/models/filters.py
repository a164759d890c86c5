"""Layers of filters that are fitted by sums over samples, not trained: exact in integers.

Every number in them is an integer times a power of two, and every sum stays below 2^24, which is as far as float32
counts without gaps. So sums are exact: their bits depend neither on how samples are put into batches, nor on the order
of the terms, nor on the processor. `models/patches.py` has such a layer for images, `models/projections.py` one for
vectors. What one of their filters looks at is a *window* here: a patch of an image, or a vector as a whole.

As a function of its filters such a layer is constant almost everywhere, so its derivative is zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from upfl.models.factored import Direction, Gradient, Outer, Shapes
from upfl.state import State

EXACT = 2**24  # float32 has every integer up to here
WINDOW, FILTER, FEATURE = 2**5, 2**7, 2**9  # steps to one
LARGEST_FEATURE = 2**12 - 1  # in steps: whose square is still exact


class Filters(ABC):
    """What the fit of filters asks of a layer. Windows and answers are in steps."""

    name: str
    outputs: int  # filters

    @property
    @abstractmethod
    def size(self) -> int:
        """D: the values of a window."""

    @property
    @abstractmethod
    def features(self) -> int: ...

    @abstractmethod
    def apply(self, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        """Samples to their features, from 0 to 8: [n, ...] to [n, features]"""

    @abstractmethod
    def windows(self, x: Tensor, seed: int, count: int) -> Tensor:
        """At most so many windows of each sample, which the sample itself and the seed decide: [n count, D]"""

    def answers(self, weight: Tensor, bias: Tensor, windows: Tensor) -> Tensor:
        """Of every filter to each window: [m, D] to [m, K]"""
        return torch.addmm(bias * (FILTER * WINDOW), windows, weight.t() * FILTER)

    def nearest(self, answers: Tensor, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The filter with the largest answer to each window, that answer, and the window as this filter sees it."""
        chosen = answers.abs().argmax(1)
        return chosen, answers.gather(1, chosen.unsqueeze(1)), windows

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of all windows that count, from those that were summed."""
        return mean, covariance

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.size), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> ConstantPass:
        return ConstantPass(self, params, x)


def rounded_filters(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Filters in the steps that keep a layer exact."""
    return (weight * FILTER).round().float() / FILTER, (bias * (FILTER * WINDOW)).round().float() / (FILTER * WINDOW)


class ConstantPass:
    """A forward pass that is constant almost everywhere, with its derivative products: zeros."""

    def __init__(self, layer: Filters, params: State, x: Tensor) -> None:
        self.layer, self.params, self.x = layer, params, x
        self.y = layer.apply(params[f"{layer.name}.weight"], params[f"{layer.name}.bias"], x)

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        if to is not None:
            for name in self.layer.shapes():
                to.value(name, torch.zeros_like(self.params[name]))
        return torch.zeros_like(self.x) if inputs else None

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> ConstantPass:
        return ConstantPass(self.layer, params, x)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        return torch.zeros_like(self.y)

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        return self.backward(dgy, to, inputs)
