"""Mean and deviation of features, from sums over training clients alone.

A client's part is its sums of values and of squares. Each value is rounded to a fixed point and added as whole numbers,
in digits of 32 bits, so the sums are exact: who holds which samples, and in which order they are added, changes no bit.
The same function serves a data set on this machine and a node of a federation (`flower/`), whose digits are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from mmap import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upfl.data.forms import Vectors
from upfl.errors import DataError

BASE = 32  # bits of a digit
VALUES = range(32, -65, -BASE)  # exponents of the digits of a value, from the first; values are below 2^51 (`LARGEST`)
SQUARES = range(64, -97, -BASE)
LARGEST = 1e15  # of a feature
ROWS = 2**14  # added at once


@dataclass(frozen=True)
class Sums:
    """Exact sums over rows, in digits: [digit, feature]."""

    count: int
    values: NDArray[np.int64]
    squares: NDArray[np.int64]

    @property
    def plausible(self) -> bool:
        """Whether so many rows can have these sums: the first digit of a square is the largest, below 2^36."""
        digits = (self.values, self.squares)
        return 0 < self.count < 2**26 and all(int(np.abs(d).max()) <= self.count << 36 for d in digits)


def sums_of(x: NDArray[np.float32], indices: NDArray[np.int64]) -> Sums:
    """The sums over some rows of features."""
    width = x.shape[1]
    values, squares = np.zeros((len(VALUES), width), np.int64), np.zeros((len(SQUARES), width), np.int64)
    ordered = np.sort(indices)  # what lies together is read together
    for start, block in _blocks(x):
        first, last = np.searchsorted(ordered, (start, start + len(block)))
        rows = block[ordered[first:last] - start].astype(np.float64)
        _add(values, rows, VALUES)
        _add(squares, np.square(rows, out=rows), SQUARES)
    return Sums(len(ordered), values, squares)


def _blocks(x: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """All rows, a block at a time. A file that is mapped into memory is read instead: its pages would all count."""
    if not isinstance(x, np.memmap) or not isinstance(x.base, mmap):  # a part of a file, perhaps
        yield from ((start, x[start : start + ROWS]) for start in range(0, len(x), ROWS))
        return
    with Path(x.filename).open("rb") as file:
        file.seek(x.offset)
        for start in range(0, len(x), ROWS):
            shape = (min(ROWS, len(x) - start), *x.shape[1:])
            yield start, np.fromfile(file, x.dtype, math.prod(shape)).reshape(shape)


def _add(total: NDArray[np.int64], rows: NDArray[np.float64], exponents: range) -> None:
    """Add rows to sums of digits. So many digits of 32 bits add up exactly in double precision."""
    rest = rows.copy()
    for digit, exponent in enumerate(exponents):
        if not rest.any():
            return
        scaled = rest * 2.0**-exponent
        part = np.rint(scaled) if exponent == exponents[-1] else np.trunc(scaled)
        if part.any():
            total[digit] += part.sum(0).astype(np.int64)
            rest -= part * 2.0**exponent


def standardized(form: Vectors, sums: Sums) -> Vectors:
    """The form with the mean and the deviation that sums over training clients give."""
    if not sums.count:
        raise DataError("no training client has samples to standardize features by")
    means, deviations = [], []
    for first, second in zip(_whole(sums.values, VALUES), _whole(sums.squares, SQUARES), strict=True):
        mean = first / sums.count
        variance = float(second / sums.count - mean * mean)
        deviation = float(np.float32(math.sqrt(max(variance, 0.0))))
        means.append(float(np.float32(float(mean))))
        deviations.append(deviation or 1.0)  # of a feature that does not vary, the mean alone is taken off
    return form.model_copy(update={"mean": tuple(means), "std": tuple(deviations)})


def _whole(digits: NDArray[np.int64], exponents: range) -> list[Fraction]:
    return [
        sum(
            (int(digit) * Fraction(2) ** exponent for digit, exponent in zip(column, exponents, strict=True)),
            Fraction(),
        )
        for column in digits.T
    ]
