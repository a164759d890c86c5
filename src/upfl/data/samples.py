"""Samples that a newcomer or a node's owner has brought, before they are normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Samples:
    """What a user's files hold, ready to be normalized."""

    x: NDArray[Any]  # images [n, channels, height, width], bytes or floats in [0, 1]; rows of features; tokens
    scale: float  # the value of full intensity of images
    names: Sequence[str]  # of each sample: its file, relative to the folder, or its number
    labels: NDArray[np.int64] | None = None
    skipped: tuple[str, ...] = ()  # what is no sample: files that are no images

    def __len__(self) -> int:
        return len(self.x)


class Numbers(Sequence[str]):
    """The names of samples that have none: their numbers, which take no memory."""

    def __init__(self, count: int) -> None:
        self.numbers = range(count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return str(self.numbers[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]
