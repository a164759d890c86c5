"""Last layers in closed form, from sums over samples: n_c, sums of features h over class c, and the sum of h h^T.

    mu_c = sum_c / n_c,   S = (sum h h^T - sum_c n_c mu_c mu_c^T) / n,   S' = (1 - g) S + g tr(S) / D I

    discriminant   logits_c = mu_c^T S'^-1 h - mu_c^T S'^-1 mu_c / 2 + log n_c / n   the posterior of Gaussian classes
    ridge          logits = (H^T H + g n I)^-1 H^T Y, on centred H and indicators Y
    means          logits_c = <mu_c / |mu_c|, h / |h|>, up to what all classes have in common

With `standardize`, features are first brought to mean 0 and variance 1, which is folded into the result: then g means
the same for each of them. A class that nobody holds has the mean of all and the weight of one sample in n + C; so have
others theirs (log (n_c + 1) / (n + C)).
"""

from __future__ import annotations

import torch
from torch import Tensor


def discriminant(
    counts: Tensor, sums: Tensor, products: Tensor, shrinkage: float, standardize: bool = False
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the posterior of Gaussian classes: [C], [C, D] and [D, D] to [C, D] and [C].

    `products` is used up: it may be large.
    """
    n = counts.sum().double()
    centre, scale = _standard(counts, sums, products) if standardize else _as_is(sums)
    means = torch.where(counts.unsqueeze(1) > 0, sums / counts.clamp(min=1).unsqueeze(1), sums.sum(0) / n)
    within = products.addmm_(means.T, counts.unsqueeze(1) * means, alpha=-1).div_(n)
    within.div_(scale).div_(scale.unsqueeze(1))
    means = (means - centre) / scale
    weight = torch.linalg.solve(_shrunk(within, shrinkage), means.T).T
    bias = ((counts + 1) / (n + len(counts))).log() - (weight * means).sum(1) / 2
    return _folded(weight, bias, centre, scale)


def ridge(
    counts: Tensor, sums: Tensor, products: Tensor, shrinkage: float, standardize: bool = False
) -> tuple[Tensor, Tensor]:
    """Weight and bias of ridge regression on the classes' indicators. `products` is used up."""
    n = counts.sum().double()
    centre, scale = _standard(counts, sums, products) if standardize else _as_is(sums)
    mean = sums.sum(0) / n
    share = (counts / n).unsqueeze(1)
    covariance = products.div_(n).addmm_(mean.unsqueeze(1), mean.unsqueeze(0), alpha=-1)
    covariance.div_(scale).div_(scale.unsqueeze(1)).diagonal().add_(shrinkage)
    together = (sums / n - share * mean) / scale
    weight = torch.linalg.solve(covariance, together.T).T
    bias = share.squeeze(1) - weight @ ((mean - centre) / scale)
    return _folded(weight, bias, centre, scale)


def _as_is(sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(sums[0]), torch.ones_like(sums[0])


def _standard(counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The features' mean and deviation."""
    n = counts.sum()
    mean = sums.sum(0) / n
    variance = products.diagonal() / n - mean.square()
    return mean, torch.where(variance > 1e-12, variance, 1.0).sqrt()


def _shrunk(within: Tensor, shrinkage: float) -> Tensor:
    level = (within.trace() / len(within)).clamp(
        min=1e-12
    )  # where all features are constant, nothing tells classes apart
    within.mul_(1 - shrinkage).diagonal().add_(shrinkage * level)
    return within


def _folded(weight: Tensor, bias: Tensor, centre: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same logits of features as they were; what all classes have in common says nothing, and may be large."""
    weight = weight / scale
    bias = bias - weight @ centre
    return weight - weight.mean(0), bias - bias.mean()
