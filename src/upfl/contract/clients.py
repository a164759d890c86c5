"""Clients, as trainings and personalizers see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from upfl.randomness import generator
from upfl.state import State, aligned, all_aligned, set_first

Split = Literal["train", "validation", "public"]


@dataclass(frozen=True)
class Batch:
    """A batch of a client's samples. With a mask, samples where it is 0 are padding and must not count."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    noise: State = field(default_factory=dict)  # what the phase asked for, a row for each sample
    index: Tensor | None = None  # the samples' places in their split

    def __post_init__(self) -> None:
        if (x := aligned(self.x)) is not self.x:  # a batch is made for every step: only what moves is set again
            set_first(self, x=x)
        if self.mask is not None:
            set_first(self, mask=aligned(self.mask))
        if self.noise:
            set_first(self, noise=all_aligned(self.noise))

    def floats(self) -> Tensor:
        """Room for a number for each sample, in the type that models compute with: tokens are whole numbers."""
        dtype = self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()
        return torch.empty(self.y.shape, dtype=dtype, device=self.x.device)

    def weight(self) -> Tensor:
        """Each sample's weight in a mean over the batch."""
        if self.mask is None:
            return self.floats().fill_(1 / len(self.y))
        return self.mask / self.mask.sum()


class Client(Protocol):
    """A training client as its own local code sees it."""

    @property
    def id(self) -> int: ...

    @property
    def round(self) -> int: ...

    @property
    def seed(self) -> int:
        """The run's."""

    @property
    def architecture(self) -> str:
        """The name of its model's architecture, where clients differ in that; else empty."""

    @property
    def count(self) -> int:
        """The number of samples in its train split."""

    def generator(self, purpose: str) -> torch.Generator: ...

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        """One pass over a split, in order."""


@dataclass(frozen=True)
class Unlabelled:
    """A client as a personalizer sees it: inputs, and a seed of its own. There are no labels here."""

    id: int
    x: Tensor
    seed: int = 0
    architecture: str = ""

    def __post_init__(self) -> None:
        set_first(self, x=aligned(self.x))

    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.seed, "personalize", self.id, purpose)
