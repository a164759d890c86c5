"""What samples are judged by without labels: the nearest class, by means and one covariance from sums over clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from upfl.contract import chunks

SHRINKAGE, CLASS_WEIGHT = 0.02, 5.0


@dataclass(frozen=True)
class Reference:
    """What samples are judged by: class means, a Cholesky factor of the covariance, and which classes there are."""

    means: Tensor  # [classes, P], whitened
    factor: Tensor
    known: Tensor  # [classes]

    @classmethod
    def of(cls, counts: Tensor, sums: Tensor, products: Tensor) -> Reference | None:
        """From sums; none where there are no samples."""
        n, size = counts.sum(), sums.shape[1]
        if n < 2:
            return None
        means = sums / counts.clamp(min=1).unsqueeze(1)
        within = (_square(products, size) - means.T @ (counts.unsqueeze(1) * means)) / n
        level = (within.trace() / size).clamp(min=1e-12)
        within = (1 - SHRINKAGE) * within + SHRINKAGE * level * torch.eye(size, dtype=within.dtype)
        factor, failed = torch.linalg.cholesky_ex(within)
        if failed:
            return None
        return cls(_whitened(factor, means), factor, counts > 0)

    def judge(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(t, the nearest class, the whitened difference from it) of each sample."""
        white = _whitened(self.factor, h)
        squares = torch.cat([(part.unsqueeze(1) - self.means).square().sum(2) for part in chunks(white)])
        near, nearest = squares.masked_fill(~self.known, math.inf).min(1)
        return (near / h.shape[1]).clamp(min=1e-12).log() / 2, nearest, white - self.means[nearest]


def class_sums(h: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of h over each class, and the upper triangle of h^T h."""
    rows, columns = torch.triu_indices(h.shape[1], h.shape[1])
    return h.new_zeros(classes, h.shape[1]).index_add_(0, y, h), (h.T @ h)[rows, columns]


def usual_distance(seen: Tensor, distance: Tensor) -> Tensor:
    """m_c, from how many samples are nearest to each class, and the sums of their t."""
    overall = distance.sum(0) / seen.sum().clamp(min=1)
    weight = (seen + CLASS_WEIGHT).view(-1, *[1] * (distance.dim() - 1))
    return (distance + CLASS_WEIGHT * overall) / weight


def spread(
    clients: Tensor, samples: Tensor, squared_samples: Tensor, squared_mean: Tensor, square: Tensor, within: Tensor
) -> tuple[Tensor, Tensor]:
    """Variances within and between clients, by moments, from sums over clients."""
    n = samples.clamp(min=1)
    pooled = (within / (n - clients).clamp(min=1)).clamp(min=1e-9)
    between = square - n * squared_mean - (clients - 1) * pooled
    return pooled, (between / (n - squared_samples / n).clamp(min=1e-9)).clamp(min=0)


def _whitened(factor: Tensor, h: Tensor) -> Tensor:
    white: Tensor = torch.linalg.solve_triangular(factor, h.T, upper=False).T
    return white


def _square(triangle: Tensor, size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size)
    square = triangle.new_empty(size, size)
    square[rows, columns] = square[columns, rows] = triangle
    return square
