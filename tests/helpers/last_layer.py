"""Clients and their samples for last layers that are fitted from sums."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from upfl.contract import Batch, Split
from upfl.randomness import generator


def gaussians(n: int, classes: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes of unequal sizes with means of their own and one covariance that is not a multiple of the identity."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.choice(classes, n - classes, p=rng.dirichlet(np.full(classes, 3.0)))])
    means, root = 2 * rng.normal(size=(classes, size)), rng.normal(size=(size, size))
    return torch.tensor(means[y] + rng.normal(size=(n, size)) @ root + 5), torch.tensor(y)


@dataclass(frozen=True)
class Holder:
    """A training client that holds these samples."""

    x: Tensor
    y: Tensor
    id: int = 0
    round: int = 0
    seed: int = 0
    architecture: str = ""

    @property
    def count(self) -> int:
        return len(self.y)

    def generator(self, purpose: str) -> torch.Generator:
        return generator(0, purpose)

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        assert split == "train", "validation labels must not reach this fit"
        for start in range(0, len(self.y), size):
            yield Batch(self.x[start : start + size], self.y[start : start + size])


def dealt(x: Tensor, y: Tensor, to: Tensor) -> list[Holder]:
    return [Holder(x[to == i], y[to == i], i) for i in sorted(set(to.tolist()))]
