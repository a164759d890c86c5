"""What mix of classes a newcomer holds, from unlabelled predictions: variational Bayes, EM and black-box estimation.

All of it rests on label shift: p(x | c) is everyone's, only p(c) is the newcomer's. With calibrated posteriors p and
the class frequencies pi that they were calibrated for, l_ic = log p_ic - log pi_c is the log-likelihood of sample i
under class c, up to a constant of the sample; whatever the newcomer's mix q, its posterior is r_ic proportional to
exp(l_ic) q_c.

Variational Bayes, q ~ Dirichlet(alpha):
    n_c = sum_i r_ic,   r_ic proportional to exp(l_ic + digamma(alpha_c + n_c))          from r = p, until it is still
    L   = sum_ic r_ic (l_ic - log r_ic) + sum_c [lgamma(alpha_c + n_c) - lgamma(alpha_c)]
          + lgamma(alpha_0) - lgamma(alpha_0 + n),     alpha_0 = sum_c alpha_c            a bound on the log evidence

No sweep lowers L. As alpha = s pi with s to infinity, r = p and L = 0: nothing is adapted. So L says how much more (or
less) likely the newcomer's data is under a mix of its own than under the federation's.

Everything is float64: lgamma of thousands of samples, and sums of their differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRENGTHS = (0.15, 0.5, 1.5, 5.0, 15.0, 50.0, 150.0, 500.0, 1500.0)
TOLERANCE = 1e-4
SWEEPS = 60


@dataclass(frozen=True)
class Posterior:
    """Posteriors of a client's samples under each of S priors."""

    r: Tensor  # [S, n, classes]
    mix: Tensor  # [S, classes]: the mean of q
    evidence: Tensor  # [S]

    def averaged(self, log_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(r, q, weights): the average over the priors, weighted by exp(evidence + log_weight)."""
        weights = (self.evidence + log_weight).softmax(0)
        return torch.einsum("s,snc->nc", weights, self.r), weights @ self.mix, weights


def variational(likelihood: Tensor, alpha: Tensor, start: Tensor, sweeps: int = SWEEPS) -> Posterior:
    """Variational Bayes under S Dirichlet priors alpha [S, classes] at once, from the responsibilities `start`."""
    r = start.expand(len(alpha), *start.shape)
    for _ in range(sweeps):
        swept = (likelihood + torch.digamma(alpha + r.sum(1)).unsqueeze(1)).softmax(2)
        change = (swept - r).abs().max()
        r = swept
        if change < TOLERANCE:
            break
    counts = r.sum(1)
    mix = (alpha + counts) / (alpha.sum(1, keepdim=True) + len(start))
    return Posterior(r, mix, evidence_bound(likelihood, alpha, r))


def evidence_bound(likelihood: Tensor, alpha: Tensor, r: Tensor) -> Tensor:
    """L of given responsibilities r [S, n, classes]: a lower bound on the log evidence of the data."""
    counts, total = r.sum(1), alpha.sum(1)
    fit = (r * likelihood).sum((1, 2)) - torch.xlogy(r, r).sum((1, 2))
    prior = (torch.lgamma(alpha + counts) - torch.lgamma(alpha)).sum(1)
    return fit + prior + torch.lgamma(total) - torch.lgamma(total + r.shape[1])


def with_unadapted(posterior: Posterior, p: Tensor, prior: Tensor) -> Posterior:
    """The same, with one more prior at the end: infinitely strong, so that r = p, q = pi, L = 0."""
    return Posterior(
        torch.cat([posterior.r, p.unsqueeze(0)]),
        torch.cat([posterior.mix, prior.unsqueeze(0)]),
        torch.cat([posterior.evidence, posterior.evidence.new_zeros(1)]),
    )


def on_grid(log_p: Tensor, prior: Tensor) -> Posterior:
    """Posteriors under Dirichlet(s pi) for every s of the grid, from weak to strong, and for s = infinity."""
    alpha = torch.tensor(STRENGTHS, dtype=prior.dtype).unsqueeze(1) * prior
    p = log_p.exp()
    return with_unadapted(variational(log_p - prior.log(), alpha, p), p, prior)


def expectation_maximisation(
    likelihood: Tensor, prior: Tensor, strength: float = 0.0, sweeps: int = 1000
) -> tuple[Tensor, Tensor]:
    """(r, q) at the most likely mix (Saerens, Latinne, Decaestecker 2002), or at its mode under Dirichlet(1 + s pi)."""
    mix = prior
    for _ in range(sweeps):
        r = (likelihood + mix.log()).softmax(1)
        counts = r.sum(0) + strength * prior
        swept = counts / counts.sum()
        change = (swept - mix).abs().max()
        mix = swept
        if change < 1e-8:
            break
    return (likelihood + mix.log()).softmax(1), mix


def black_box(confusion: Tensor, predicted: Tensor, prior: Tensor) -> Tensor:
    """The mix by black-box shift estimation (Lipton, Wang, Smola 2018).

    confusion[d, c] is the share of the federation's samples of class c that are predicted as d (of all samples),
    predicted[d] the share of the newcomer's. w = confusion^-1 predicted, in least squares and not negative; q = w pi.
    """
    weights = torch.linalg.lstsq(confusion, predicted.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    mix = weights.clamp(min=0) * prior
    return mix / mix.sum() if mix.sum() > 0 else prior
