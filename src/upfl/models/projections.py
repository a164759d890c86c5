"""Features of a vector: its values and its projections, rectified on both sides, exact in integers.

For a vector x of D values, standardized, K filters w_k, b_k, a threshold a:

    z_k = <w_k, x> + b_k
    h   = relu(x), relu(-x), relu(z_k - a), relu(-z_k - a): 2 D + 2 K features

So a linear layer on h has all linear functions of x, one at least that bends at zero, and those that bend along the
filters. What is rounded, and where it is cut off (`models/filters.py` says why):

    x     to 2^-5, at 8
    w, b  to 2^-7, by whoever makes them (`rounded_filters`)
    h     to 2^-9, at 8

A sum of |w| |x| <= 8 sqrt(D) |w| must stay below 2^24 steps: `too_long` says where it would not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from upfl.models.filters import EXACT, FEATURE, FILTER, LARGEST_FEATURE, WINDOW, Filters

LARGEST = 8  # of a standardized value


@dataclass(frozen=True)
class Projections(Filters):
    """The layer. `inputs` are the vector's values, `outputs` the filters."""

    name: str
    inputs: int
    outputs: int
    threshold: float

    @property
    def size(self) -> int:
        return self.inputs

    @property
    def features(self) -> int:
        return 2 * (self.inputs + self.outputs)

    def apply(self, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        values = self.windows(x, 0, 1)
        z = self.answers(weight, bias, values) / (FILTER * WINDOW)
        sides = torch.cat([values / WINDOW, -values / WINDOW, z - self.threshold, -z - self.threshold], 1)
        return (sides * FEATURE).round().clamp(0, LARGEST_FEATURE) / FEATURE

    def windows(self, x: Tensor, seed: int, count: int) -> Tensor:
        return (x * WINDOW).round().clamp(-LARGEST * WINDOW, LARGEST * WINDOW)


def too_long(size: int, whitening: float) -> bool:
    """Whether vectors of a size could leave the range: filters on whitened vectors are at most whitening^-1/2 long."""
    return LARGEST * math.sqrt(size / whitening) * FILTER * WINDOW > EXACT / 2  # as much is left for the bias
