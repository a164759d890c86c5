"""How accurate a newcomer's predictions are and which classes it holds, told without its labels; and how sure that is.

With posteriors r that mean what they say, a prediction d_i is right with probability r_i,d_i:

    accuracy = mean_i r_i,d_i           of the model before (d its own predictions) and after

Posteriors are never quite what they say. How far they are off, the training clients know: each plays the newcomer and
compares with its labels. With e_i = [d_i = y_i] - r_i,d_i on the n_k samples of client k, N in all, and K clients,

    offset m = sum e / N                         corrects the estimate
    within   s2 = (sum_k sum_i (e_i - mean_k e)^2 + 2) / (N - K + 4)
    between  t2 = (sum_k n_k (mean_k e - m)^2 - (K - 1) s2) / M, where that is positive,   M = N - sum n_k^2 / N,
             and one standard error of it more: sqrt(2 / (K - 1)) (t2 + (K - 1) s2 / M)
    scatter  = t2 + t2 sum n_k^2 / N^2 + s2 / N  of a newcomer about the mean client, and of that mean

and the accuracy on the newcomer's own n samples is within

    value + m +- q sqrt(scatter + v / n),   v = (sum_i r_i,d_i (1 - r_i,d_i) + 2) / (n + 4)

The fewer samples a newcomer has, the less it knows of its class mix, and the further off are its posteriors. So
training clients play with 5 and with 20 of their samples, too, and all sums above are formed for each size. A newcomer
with as many samples as training clients have in the mean takes the sums of all samples, one with fewer those of the
next smaller size.

q is Student's quantile for K - 1 clients. The 2 and the 4 are two right and two wrong predictions more, as Agresti and
Coull have them: where every label came out right, or a newcomer has a single sample, that is no proof of certainty. The
standard error is for newcomers with many samples: clients that validate with few cannot tell a small t2 from none.

The class mix. Two estimates of each class's share of these very samples: the mean of the posteriors by which they are
predicted, and of those by the newcomer's own evidence, whatever a gate decided. The one that is nearer to the training
clients' labels is shown, by its total variation (half the sum of absolute differences), with how far it is off: for
training clients in the mean, and by the newcomer's own posteriors.

Too few training clients or labels: there is no estimate. Where no prediction changes, the estimate after is that of
before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from upfl.contract import FITS, FOLDS, Client, Estimate, Fit, Personalized, Total, varies
from upfl.contract.personalizer import LEAST_CLIENTS
from upfl.state import State

TOO_FEW = "too few training clients or labels taught how far such estimates are off"
PSEUDO_WRONG, PSEUDO = 2, 4  # samples more than there are, and how many of them are wrong
SIZES = (5, 20)  # samples with which training clients play, beside all that they have
LEVELS = len(SIZES) + 1


class Reliability(Fit):
    """How far estimates are off, over training clients: of the accuracy before and after, of the class mix."""

    key = "reliability"
    scales: ClassVar = dict.fromkeys(("error", "square", "within", "mixed"), 30)
    personalizer: Any  # a Correction

    def init(self, generator: torch.Generator) -> State:
        pairs = {name: torch.zeros(FITS, LEVELS, 2, dtype=torch.float64) for name in ("offset", "scatter", "mixed")}
        counts = {"clients": torch.zeros(FITS, LEVELS, dtype=torch.int64), "few": torch.zeros(FITS, dtype=torch.int64)}
        return pairs | counts | {"size": torch.zeros(FITS, dtype=torch.float64)}

    def memory(self, client: Client) -> State:
        """For each fit, number of samples, and correction that the gate may choose: it says which when the sums are
        there."""
        y = self.labels(client)
        played = [size for size in (*SIZES, len(y)) if size <= len(y)]
        error, square, within, mixed = torch.zeros(4, FITS, self.personalizer.choices, LEVELS, 2, dtype=torch.float64)
        base = self.personalizer.base
        for fit, published, whole in self.plays(client, base.personalize, varies(base)):
            for level, n in zip(_levels(len(y)), played, strict=True):
                labels, personalized = y[:n], _first(whole, n)
                truth = torch.bincount(labels, minlength=self.classes) / n
                calibrator, possible = self.personalizer.possible(personalized, published)
                for choice, found in enumerate(possible):
                    at = fit, choice, level
                    after = personalized.logits if found.as_is else found.posterior
                    for i, predictions in enumerate((personalized.before, after)):
                        right = (predictions.cpu().argmax(1) == labels).double()
                        off = right - of_predictions(predictions, found.posterior)
                        error[at][i], square[at][i] = off.sum(), off.sum() ** 2 / n
                        within[at][i] = (off - off.mean()).square().sum()
                    mixed[at] = n * total_variation(self.personalizer.mixes(personalized, calibrator, found), truth)
        samples = torch.zeros(LEVELS, dtype=torch.int64)
        samples[_levels(len(y))] = torch.tensor(played)
        return {"error": error, "square": square, "within": within, "mixed": mixed, "samples": samples}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        taking = self.takes_part(client.id).unsqueeze(1)
        samples = taking * carry["samples"]
        up = {"clients": taking * (samples > 0), "samples": samples, "squared_samples": samples * carry["samples"]}
        return up | {name: self.by_fold(carry[name], client.id) for name in self.scales}, carry

    def _chosen(self, sums: Tensor) -> Tensor:
        """The sums of what each gate has chosen, [fits, levels, 2]."""
        choices = [self.personalizer.choice(fitted) for fitted in self.given.folds]
        return self.over_folds(sums[:, torch.arange(FOLDS), choices])

    def aggregate(self, server: State, total: Total, round: int) -> State:
        clients, samples = total["clients"], total["samples"]
        error, square, within, mixed = (self._chosen(total[name]) for name in self.scales)
        k, n, squared = (value.double().unsqueeze(2) for value in (clients, samples, total["squared_samples"]))
        n = n.clamp(min=1)
        offset = error / n
        within = (within + PSEUDO_WRONG) / (n - k + PSEUDO).clamp(min=1)
        others, size = (k - 1).clamp(min=1), (n - squared / n).clamp(min=1e-9)
        between = ((square - n * offset.square() - others * within) / size).clamp(0, 1)
        between = between + (2 / others).sqrt() * (between + others * within / size)
        return {
            "offset": offset,
            "scatter": (between * (1 + squared / n.square()) + within / n).clamp(max=1),
            "mixed": mixed / n,
            "clients": clients,
            "few": self.too_few(clients[:, -1], samples[:, -1]).long(),
            "size": samples[:, -1] / clients[:, -1].clamp(min=1).double(),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        shares = dict.fromkeys(("scatter", "mixed", "few"), (0.0, 1.0))
        return {"offset": (-1.0, 1.0), **shares, **dict.fromkeys(("clients", "size"), (0.0, math.inf))}


def _levels(samples: int) -> list[int]:
    """The places of the sizes with which a client of so many samples plays."""
    return [*(i for i, size in enumerate(SIZES) if size <= samples), LEVELS - 1]


def _first(whole: Personalized, samples: int) -> Personalized:
    """What was said about a client's first samples."""
    posterior = None if whole.posterior is None else whole.posterior[:samples]
    return replace(whole, before=whole.before[:samples], logits=whole.logits[:samples], posterior=posterior)


def of_predictions(predictions: Tensor, posterior: Tensor) -> Tensor:
    """The probability that the posteriors give to each prediction. Rounding may take it past 1."""
    return posterior.gather(1, predictions.cpu().argmax(1, keepdim=True)).squeeze(1).clamp(max=1)


def total_variation(mixes: Tensor, truth: Tensor) -> Tensor:
    """The share of samples that would have to be of another class; along the last axis."""
    return (mixes - truth).abs().sum(-1) / 2


def estimates(before: Tensor, after: Tensor, posterior: Tensor, known: State) -> list[Estimate]:
    """The accuracy of predictions before and after, where training clients taught how far such estimates are off."""
    result = []
    changed = int(not same_predictions(before, after))
    for i, predictions in ((0, before), (changed, after)) if enough_clients(known) else ():
        right, level = of_predictions(predictions, posterior), _level(known, len(posterior))
        variance = own_variance((right * (1 - right)).sum(), len(right)) + known["scatter"][level, i]
        freedom = int(known["clients"][level]) - 1
        result.append(interval(right.mean().item() + known["offset"][level, i].item(), variance.item(), freedom))
    return result


def _level(known: State, samples: int) -> int:
    """The place of the size with which training clients played that teaches most about so many samples."""
    able = [i for i, clients in enumerate(known["clients"][:-1]) if clients >= LEAST_CLIENTS[0]]
    if samples >= known["size"] or not able:
        return LEVELS - 1
    return max((i for i in able if SIZES[i] <= samples), default=able[0])


def thinness(known: State, samples: int) -> float:
    """How many times more estimates of so few samples scatter over clients than those of a training client's own."""
    of_all, of_few = known["scatter"][-1, 1], known["scatter"][_level(known, samples), 1]
    return max(1.0, float(of_few / of_all.clamp(min=1e-12)))


def same_predictions(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.argmax(1).cpu(), other.argmax(1).cpu())


def enough_clients(known: State) -> int:
    """How many training clients taught how far estimates are off; 0 where they were too few."""
    return int(known["clients"][-1]) if known and not known["few"] else 0


def own_variance(sum_of_variances: Tensor, samples: int) -> Tensor:
    """The variance of the accuracy on a newcomer's own samples, from the sum of r (1 - r)."""
    return (sum_of_variances + PSEUDO_WRONG) / (samples + PSEUDO) / samples


def shown_mix(mixes: Tensor, posterior: Tensor, known: State) -> tuple[Tensor, float | None]:
    """The better of two estimates of the class mix, and how far it is off, as far as training clients taught that."""
    if not enough_clients(known):
        return mixes[0], None
    mixed = known["mixed"][_level(known, len(posterior))]
    best = int(mixed.argmin())
    chance = (posterior * (1 - posterior)).sum(0).sqrt().sum() * math.sqrt(2 / math.pi) / (2 * len(posterior))
    return mixes[best], math.hypot(mixed[best].item(), chance.item())


def interval(value: float, variance: float, freedom: int = 10**6) -> Estimate:
    value, half = min(max(value, 0.0), 1.0), student(freedom) * math.sqrt(variance)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def student(freedom: int) -> float:
    """Student's 97.5% quantile, to a thousandth from 5 degrees of freedom on (Abramowitz, Stegun 26.7.5)."""
    z, n = 1.959964, max(freedom, 1)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + _third(z) / n**3


def _third(z: float) -> float:
    return (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384


def accuracy_of(logits: Tensor, y: Tensor) -> float:
    return (logits.cpu().argmax(1) == y).double().mean().item()
