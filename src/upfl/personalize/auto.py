"""The choice among personalizers, by label-free evidence: what a newcomer that wants one good answer takes.

Candidates stand on the published model, on the same with its last layer refitted over all training clients (refit.py),
and, where the training has a guide, on adapted models. A model that is closed form already has no refitted one.

First the federation decides which of the published and the refitted model is the better one: the refitted, whose last
layer does not depend on who held what, unless the other, both calibrated, gives training clients' labels a likelihood
that is higher by one standard error (of the paired difference, over clients; a hundredth of the labels is taken for
chance, as by the gate).

Every candidate k makes its predictions d_k of the newcomer's samples. One posterior r says how many of them are right
(estimate.py), that of label-shift on the better model.

    e_k = mean_i r_i,d_k(i)

So candidates are compared on the same samples by the same measure, and differ only where their predictions do. How far
such an estimate is off, training clients know: each plays the newcomer and compares it with its labels. Over clients,
weighted by their samples n,

    m_k = mean (accuracy_k - e_k)
    V   = covariance of m: from its scatter over the clients, and as if K clients more had scattered as r says
          they would by chance: cov(k, l) = mean_i ([d_k = d_l] r_i,d_k - r_i,d_k r_i,d_l) / n of each

(K candidates; a scatter over few clients may be small by chance). Training clients' labels may be few, and a mean over
few of them is mostly chance. A priori every estimate is off by about a point, T = 0.01^2 I, and training clients count
as far as they know better:

    offset = T (T + V)^-1 m,   P = T - T (T + V)^-1 T,   accuracy_k = e_k + offset_k

With many labels the offset is m; with few the newcomer's own evidence decides. The newcomer begins with the better
model, calibrated, for which all training clients' labels speak, goes through label-shift on it, the candidates on the
other model and the adaptations, and leaves the one it has for the next only if that promises more by one standard error
of the difference of their offsets, from P. (None comes after the calibrated published model.)
Labels of new clients play no part in any of this. The accuracy that is told is the chosen correction's own
(estimate.py). None and adaptations tell nothing themselves: there the accuracy before is the measure's, after it is
accuracy_k with P, its scatter over training clients, and the newcomer's own chance.

Settled: the models are compared by their calibrated posteriors, not by those of label-shift. By its own measure a
candidate looks best, so whichever model measures is mostly the one that is chosen. Where a client holds few classes,
label-shift on either model gets nearly every one of a hundred labels right, and the difference of their likelihoods is
smaller than its error; calibrated alone, the models make mistakes enough to be told apart. And where that does not tell
either, labels of those who trained speak for the model that was trained on their mixes of classes.

Label-shift on adapted models (`one-step+label-shift`) is no candidate, and its posterior no measure. A model
that adapted itself to its samples does not look at a class as it does on other clients, and label-shift rests on that;
there it promises most and keeps least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import (
    FITS,
    FOLDS,
    Client,
    CrossFitted,
    Fit,
    Hyper,
    Need,
    Personalized,
    Personalizer,
    Published,
    Total,
    Training,
    Unlabelled,
)
from upfl.personalize.calibration import Calibrated, Calibrator, Correction, fitted, tempered
from upfl.personalize.estimate import (
    TOO_FEW,
    Reliability,
    enough_clients,
    interval,
    own_variance,
    same_predictions,
    thinness,
)
from upfl.personalize.fedtta import EarlyStopped, OneStep
from upfl.personalize.label_shift import SLIP, Gate, LabelShift
from upfl.personalize.nothing import Nothing
from upfl.personalize.refit import Refit
from upfl.state import State

SPREAD = 0.01  # how far estimates are off, a priori
NONE, LABEL_SHIFT = 1, 2  # their places among the candidates
R = TypeVar("R")
Correct = Callable[[Correction[Any], Personalized, Published], list[Personalized]]


class AutoHyper(Hyper):
    patience: int = Field(1, ge=1, description="of the early-stopped candidate")


class Auto(Personalizer[AutoHyper]):
    name = "auto"
    title = "the most promising personalizer"
    later = "similar"
    Hyper = AutoHyper
    takes_settings_of = "early-stopped"

    def __init__(self, training: Training[Any], hyper: AutoHyper) -> None:
        super().__init__(training, hyper)
        self.models: list[Personalizer[Any]] = [Nothing(training, Nothing.Hyper())]
        self.corrections: list[Correction[Any]] = [_made(kind, training) for kind in (Calibrated, LabelShift)]
        if training.takes_steps and Refit.why_not(training) is None:
            self.models.append(Refit(training, Refit.Hyper()))
            self.corrections += [_made(kind.on(Refit), training) for kind in (Calibrated, LabelShift)]
        self.adapted: list[Personalizer[Any]] = []
        if OneStep.why_not(training) is None:
            self.adapted.append(OneStep(training, OneStep.Hyper()))
            self.adapted.append(EarlyStopped(training, EarlyStopped.Hyper(patience=hyper.patience)))

    @property
    def candidates(self) -> list[str]:
        """Those on the published model, on the refitted one, and the adaptations."""
        return self._each(
            [one.name for one in self.corrections], self.models[0].name, [one.name for one in self.adapted]
        )

    def _each(self, corrections: list[R], none: R, adapted: list[R]) -> list[R]:
        """Something of each candidate, in their order."""
        return [corrections[0], none, *corrections[1:], *adapted]

    @property
    def options(self) -> list[int]:
        """How many each candidate may come to, as a gate chooses."""
        return self._each([one.choices for one in self.corrections], 1, [1] * len(self.adapted))

    def chosen(self, fitted_so_far: State) -> list[int]:
        """Which of them the gates have chosen."""
        return self._each([one.choice(fitted_so_far) for one in self.corrections], 0, [0] * len(self.adapted))

    @property
    def of_models(self) -> list[list[int]]:
        """The places of the candidates on each model: the calibrated one first, label-shift last."""
        return [[0, NONE, LABEL_SHIFT], [LABEL_SHIFT + 1, LABEL_SHIFT + 2]][: len(self.models)]

    def order(self, better: int) -> list[int]:
        """The places of the candidates as the newcomer goes through them, the better model's first."""
        on_models = [self.of_models[better], *(self.of_models[:better] + self.of_models[better + 1 :])]
        adapted = range(1 + len(self.corrections), len(self.candidates))
        return [*(place for places in on_models for place in places), *adapted]

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        return Nothing.why_not(training)

    def needs(self) -> tuple[Need, ...]:
        needs = [need for one in self.corrections for need in one.needs()]
        gates = [need for need in needs if need.kind is Gate]
        before = [need for need in needs if need.kind not in (Gate, Reliability)]
        return (*needs, Need.of(Choice, self, before, gates))

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        known = fitted(published, f"{Choice.key}.{self.name}")
        results = self.corrected(self.uncorrected(published, client), published)
        better = int(known["measure"])
        by = self.of_models[better][-1]
        value, chance = measured(
            posterior_of(results[by]), torch.stack([one.logits.argmax(1).cpu() for one in results])
        )
        expected = value + known["offset"]
        chosen = choose(expected, known["covariance"], self.order(better))
        reliability = fitted(published, f"{Reliability.key}.{LabelShift.name}")
        if not (clients := enough_clients(reliability)):
            plain = results[NONE]
            decision = f"{plain.diary.decision}: too few training clients or labels to choose by"
            return replace(plain, diary=replace(plain.diary, decision=decision, no_accuracy=TOO_FEW))
        diary, measure = results[chosen].diary, results[by].diary
        if not diary.accuracy:  # none or an adaptation, which tell nothing themselves
            own = own_variance(chance.diagonal()[chosen] * len(client.x) ** 2, len(client.x))
            taught = (known["covariance"][chosen, chosen] + known["scatter"][chosen]).clamp(min=0)
            variance = own + taught * thinness(reliability, len(client.x))
            after = interval(expected[chosen].item(), variance.item(), clients - 1)
            before = measure.accuracy[0]
            same = same_predictions(results[NONE].logits, results[chosen].logits)
            accuracy = [before, before if same else after]
            diary = replace(diary, accuracy=accuracy, mix=measure.mix, mix_error=measure.mix_error)
        compared = f"compared by expected accuracy: {self._in_percent(expected)}"
        diary = replace(diary, decision=f"{self.candidates[chosen]}: {diary.decision} ({compared})")
        return replace(results[chosen], diary=diary)

    def uncorrected(self, published: Published, client: Unlabelled) -> list[Personalized]:
        """What none, the refitted model and each adaptation come to: what no validation label plays a part in."""
        return [one.personalize(published, client) for one in (*self.models, *self.adapted)]

    def corrected(self, uncorrected: list[Personalized], published: Published) -> list[Personalized]:
        """What each candidate comes to."""
        return [one for (one,) in self._candidates(uncorrected, published, lambda *of: [of[0].corrected(*of[1:])])]

    def all_corrected(self, uncorrected: list[Personalized], published: Published) -> list[list[Personalized]]:
        """The same by every choice of the gates."""
        return self._candidates(uncorrected, published, lambda *of: of[0].all_corrected(*of[1:]))

    def _candidates(
        self, uncorrected: list[Personalized], published: Published, correct: Correct
    ) -> list[list[Personalized]]:
        models, adapted = uncorrected[: len(self.models)], uncorrected[len(self.models) :]
        bases = [model for model in models for _ in (Calibrated, LabelShift)]
        corrected = [correct(one, base, published) for one, base in zip(self.corrections, bases, strict=True)]
        none = tempered(models[0], Calibrator.of(published, self.models[0].name))
        return self._each(corrected, [none], [[one] for one in adapted])

    def _in_percent(self, expected: Tensor) -> str:
        percent = (100 * expected).clamp(0, 100).tolist()
        return ", ".join(f"{name} {value:.1f}" for name, value in zip(self.candidates, percent, strict=True))


def _made(kind: type[Correction[Any]], training: Training[Any]) -> Correction[Any]:
    return kind(training, kind.Hyper())


def measured(posterior: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """e of predictions [candidates, n] by a posterior r, and its covariance, r given."""
    right = posterior.gather(1, predicted.T).T
    same = predicted.unsqueeze(1) == predicted
    chance = (same * right).sum(2) - right @ right.T
    return right.mean(1), chance / len(posterior) ** 2


def posterior_of(corrected: Personalized) -> Tensor:
    """r: a correction's logits are log r, unless it left them as they are."""
    return corrected.logits.double().softmax(1).cpu() if corrected.posterior is None else corrected.posterior


def slipping_loss(posterior: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of labels, a share of which is taken for chance."""
    right = posterior.gather(1, y.unsqueeze(1))
    return -((1 - SLIP) * right + SLIP / posterior.shape[1]).log().sum()


def choose(expected: Tensor, covariance: Tensor, order: Sequence[int]) -> int:
    """From the first on, each candidate that promises more than the one before it by one standard error."""
    chosen, *others = order
    for k in others:
        error = covariance[k, k] + covariance[chosen, chosen] - 2 * covariance[k, chosen]
        if expected[k] - expected[chosen] > error.clamp(min=0).sqrt():
            chosen = k
    return chosen


def refitted_is_better(gain: Tensor, squares: Tensor, clients: Tensor) -> Tensor:
    """Unless the published model's loss is less by one standard error; from sums over clients, for each fit."""
    variance = (squares - gain.square() / clients.clamp(min=1)) * clients / (clients - 1).clamp(min=1)
    return gain >= -variance.clamp(min=0).sqrt()


class Choice(Fit):
    """How far the candidates' estimates are off, on training clients that play the newcomer.

    Which label-shift is meant, the gates say. Clients sum for each that they may choose, so that gates and choice go in
    one message.
    """

    key = "choice"
    scales: ClassVar = {"gain": 30, "squares": 20}
    personalizer: Auto

    def __init__(self, personalizer: Auto, given: CrossFitted) -> None:
        super().__init__(personalizer, given)
        self.candidates = len(personalizer.candidates)

    def init(self, generator: torch.Generator) -> State:
        return {
            "measure": torch.zeros(FITS, dtype=torch.int64),
            "offset": torch.zeros(FITS, self.candidates, dtype=torch.float64),
            "covariance": SPREAD**2 * torch.eye(self.candidates, dtype=torch.float64).repeat(FITS, 1, 1),
            "scatter": torch.zeros(FITS, self.candidates, dtype=torch.float64),
        }

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        """For each model and choice of its label-shift: how far estimates by it are off, and how far by chance."""
        y, models = self.labels(client), self.personalizer.of_models
        shape = FITS, len(models), LabelShift.choices, sum(self._options(models[0][-1]))
        error, loss = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[:2], dtype=torch.float64)
        chance = torch.zeros(*shape, shape[-1], dtype=torch.float64)
        for fit, published, uncorrected in self.plays(client, self.personalizer.uncorrected):
            possible = self.personalizer.all_corrected(uncorrected, published)
            predicted = [torch.stack([one.logits.argmax(1).cpu() for one in options]) for options in possible]
            for i, (calibrated, *_, by) in enumerate(models):
                loss[fit, i] = slipping_loss(posterior_of(possible[calibrated][0]), y)
                for choice, measure in enumerate(possible[by]):
                    compared = torch.cat([*predicted[:by], predicted[by][[choice]], *predicted[by + 1 :]])
                    value, chance[fit, i, choice] = measured(posterior_of(measure), compared)
                    error[fit, i, choice] = (compared == y).double().mean(1) - value
        gain, taking = loss[:, 0] - loss[:, -1], self.takes_part(client.id)
        weight = taking.double() * len(y) / 1024  # a power of two, which cancels
        weights = weight.view(-1, 1, 1, 1)
        square = weights.square()
        parts = {
            "error": weights * error,
            "excess": weights * (error.square() - chance.diagonal(dim1=3, dim2=4)),
            "square_error": square * error,
            "square_product": square.unsqueeze(4) * error.unsqueeze(4) * error.unsqueeze(3),
            "chance": square.unsqueeze(4) * chance,
        }
        up = {"clients": taking, "gain": gain, "squares": gain.square(), "weight": weight, "square": weight.square()}
        return up | {name: self.by_fold(value, client.id) for name, value in parts.items()}, {}

    def _options(self, by: int) -> list[int]:
        """How many each candidate has beside a measure, which is a single one."""
        return [1 if k == by else count for k, count in enumerate(self.personalizer.options)]

    def _chosen(self, sums: Tensor, better: Tensor) -> Tensor:
        """The sums of what the gates have chosen, by the better model's measure, [fits, candidates, ...]."""
        found = [
            self._read(part, int(model), fitted)
            for parts, models in zip(sums, (better[:1].expand(FOLDS), better[1:]), strict=True)
            for part, model, fitted in zip(parts, models, self.given.folds, strict=True)
        ]
        return self.over_folds(torch.stack([torch.stack(found[:FOLDS]), torch.stack(found[FOLDS:])]))

    def _read(self, sums: Tensor, model: int, fitted_so_far: State) -> Tensor:
        by, chosen = self.personalizer.of_models[model][-1], self.personalizer.chosen(fitted_so_far)
        sums, options = sums[model, chosen[by]], self._options(by)
        places = [sum(options[:k]) + chosen[k] * (k != by) for k in range(self.candidates)]
        for axis in range(sums.dim()):
            sums = sums.index_select(axis, torch.tensor(places))
        return sums

    def aggregate(self, server: State, total: Total, round: int) -> State:
        """m and V, with n^2 (error - m)(error - m)^T summed by its terms; then what stands above."""
        models = len(self.personalizer.models)
        better = torch.where(
            refitted_is_better(total["gain"], total["squares"], total["clients"].double()), models - 1, 0
        )
        by = {
            name: self._chosen(total[name], better)
            for name in ("error", "excess", "square_error", "square_product", "chance")
        }
        weight, square = total["weight"].view(-1, 1).clamp(min=1e-9), total["square"].view(-1, 1, 1)
        clients = total["clients"].double().view(-1, 1, 1)
        m = by["error"] / weight
        mixed = by["square_error"].unsqueeze(2) * m.unsqueeze(1)
        scatter = by["square_product"] - mixed - mixed.mT + square * m.unsqueeze(2) * m.unsqueeze(1)
        v = (clients * scatter + self.candidates * by["chance"]) / (clients - 1 + self.candidates).clamp(min=1)
        v = v / weight.square().unsqueeze(2)
        prior = SPREAD**2 * torch.eye(self.candidates, dtype=m.dtype)
        gain = torch.linalg.solve(prior + v, prior.expand_as(v)).mT  # T (T + V)^-1
        return {
            "measure": better,
            "offset": (gain @ m.unsqueeze(2)).squeeze(2),
            "covariance": prior - gain @ prior,
            "scatter": (by["excess"] / weight - m.square()).clamp(min=0),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {
            "measure": (0, len(self.personalizer.models) - 1),
            "offset": (-1, 1),
            "covariance": (-1, 1),
            "scatter": (0, 1),
        }

    def facts(self, server: State) -> dict[str, float]:
        names = self.personalizer.candidates
        return {"measure": float(server["measure"][0])} | {
            f"offset.{name}": value for name, value in zip(names, server["offset"][0].tolist(), strict=True)
        }
