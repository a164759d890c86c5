"""How sure the figures are: a bootstrap over clients, and a test of one client's loss.

The clients are the sample: with 50 of them, another draw of clients would move an accuracy by a point or two, far more
than another initialisation does. So clients are drawn anew, with replacement, whole: a client's correct predictions and
its number of samples together, and in a comparison of two rows the same client in both (paired). With c_i the number
of correct predictions (or the difference of two rows' numbers; a mean over training seeds) of client i and n_i that of
its samples,

    accuracy = 100 * sum_i w_i c_i / sum_i w_i n_i,      w ~ Multinomial(clients, 1 / clients)

Every partition seed has clients of its own: they are drawn separately and the accuracies averaged. The interval is that
of the 2.5 and 97.5 percentiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from upfl.randomness import seed_of

DRAWS = 10_000
_BLOCK = 4_000_000  # weights that are in memory at once


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float
    error: float  # the standard error: the draws' standard deviation


def bootstrap(strata: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], draws: int = DRAWS) -> Interval:
    """The accuracy (or difference) in percent over clients (correct, samples) of each partition, with its interval."""
    values = np.zeros(draws)
    for number, (correct, samples) in enumerate(strata):
        rng = np.random.default_rng(seed_of("bootstrap", number))  # the same draws for every row: paired
        clients = len(correct)
        block = max(1, _BLOCK // clients)
        for start in range(0, draws, block):
            count = min(block, draws - start)
            weights = rng.multinomial(clients, np.full(clients, 1 / clients), size=count)
            values[start : start + count] += 100 * (weights @ correct) / (weights @ samples)
    values /= len(strata)
    value = float(np.mean([100 * correct.sum() / samples.sum() for correct, samples in strata]))
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(value, float(low), float(high), float(values.std()))


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds; None for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


Scores = Mapping[int, tuple[float, int]]  # client: correct predictions, samples


def mean_over_seeds(seeds: Sequence[Scores]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Correct predictions (a mean over seeds) and samples of the clients that were scored under every seed."""
    clients = sorted(set.intersection(*(set(scores) for scores in seeds)))
    correct = [np.mean([scores[client][0] for scores in seeds]) for client in clients]
    return np.array(correct, np.float64), np.array([seeds[0][client][1] for client in clients], np.float64)


def paired(ours: Sequence[Scores], theirs: Sequence[Scores]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The difference of two rows' correct predictions, and the samples, of the clients that both have."""
    both = [
        ({c: (a[c][0] - b[c][0], a[c][1]) for c in a.keys() & b.keys() if a[c][1] == b[c][1]})
        for a, b in zip(ours, theirs, strict=True)
    ]
    return mean_over_seeds(both)


def mcnemar(lost: int, won: int) -> float:
    """The two-sided exact p of McNemar's test: a fair coin's for so uneven a split."""
    from scipy.stats import binomtest  # here, because it takes most of a second to import

    return float(binomtest(min(lost, won), lost + won).pvalue) if lost + won else 1.0
