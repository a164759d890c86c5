"""The choice among personalizers, by label-free evidence: what a newcomer that wants one good answer takes.

Every candidate k makes its predictions d_k of the newcomer's samples, and the label-shift posterior on the same model's
outputs says how many of them are right (estimate.py):

    e_k = mean_i r_i,d_k(i)

How far such an estimate is to be believed, training clients know: each plays the newcomer, and sees for each candidate
the estimated gain over no personalization, x = e_k - e_0, and the true one, y. Over clients, weighted by their samples,

    gain_k = mean y + slope (x - mean x),   slope = cov(x, y) / var(x), within [0, 1]
    error_k = sqrt(residual variance / effective number of clients)

Where estimates are good the slope is near 1 and the newcomer's own evidence decides; where they are not (feature shift)
it is near 0 and what happened to training clients decides. The newcomer goes through the candidates from the one that
changes least, none, to those that change most, and leaves the one it has for the next only if that promises more even
when its gain is one standard error less. Labels of new clients play no part in any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field

from upfl.personalize.base import Personalized, Personalizer, Unlabelled
from upfl.personalize.calibration import Calibrated, Correction, fitted
from upfl.personalize.estimate import accuracy_of, raw_estimate
from upfl.personalize.fedtta import EarlyStopped, OneStep
from upfl.personalize.fitting import FITS, CrossFitted, Fit, Need, takes_part
from upfl.personalize.label_shift import LabelShift
from upfl.personalize.nothing import Nothing
from upfl.state import State
from upfl.training.base import Client, Hyper, Published, Total, Training

BASES: tuple[type[Personalizer[Any]], ...] = (Nothing, OneStep, EarlyStopped)  # each also with label shift corrected


class AutoHyper(Hyper):
    patience: int = Field(1, ge=1, description="of the early-stopped candidate")


class Auto(Personalizer[AutoHyper]):
    name = "auto"
    title = "the most promising personalizer"
    Hyper = AutoHyper

    def __init__(self, training: Training[Any], hyper: AutoHyper) -> None:
        super().__init__(training, hyper)
        self.calibrated = Calibrated(training, Calibrated.Hyper())
        self.shifted: list[LabelShift] = []
        for base in BASES:
            if base.why_not(training) is None:
                kind: Any = LabelShift if base is Nothing else LabelShift.on(base)
                own = {"base": {"patience": hyper.patience}} if base is EarlyStopped else {}
                self.shifted.append(kind(training, kind.Hyper(**own)))

    @property
    def candidates(self) -> list[str]:
        """None first: every gain is over it."""
        names = [name for shifted in self.shifted for name in (shifted.base.name, shifted.name)]
        return [names[0], self.calibrated.name, *names[1:]]

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        return Nothing.why_not(training)

    def needs(self) -> tuple[Need, ...]:
        corrections: list[Correction[Any]] = [self.calibrated, *self.shifted]
        return (*(need for correction in corrections for need in correction.needs()), Need.of(Choice, self))

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        results = self.results(published, client)
        known = fitted(published, f"{Choice.key}.{self.name}")
        estimated = torch.tensor([estimate for _, estimate in results], dtype=torch.float64)
        expected = known["gain"] + known["slope"] * (estimated - estimated[0] - known["estimated"])
        expected[0] = 0.0
        chosen = choose(expected.tolist(), known["error"].tolist())
        personalized, names = results[chosen][0], self.candidates
        considered = ", ".join(
            f"{name} {100 * gain:+.1f} +- {100 * error:.1f}"
            for name, gain, error in zip(names, expected.tolist(), known["error"].tolist(), strict=True)
        )
        decision = f"{names[chosen]}: {personalized.diary.decision} (expected gain in points: {considered})"
        return replace(personalized, diary=replace(personalized.diary, decision=decision))

    def results(self, published: Published, client: Unlabelled) -> list[tuple[Personalized, float]]:
        """What each candidate comes to, and its estimated accuracy."""
        found: list[tuple[Personalized, float]] = []
        for shifted in self.shifted:
            base = shifted.base.personalize(published, client)
            corrected = shifted.corrected(base, published)
            posterior = corrected.logits.double().softmax(1).cpu()
            both = [base, corrected]
            if not found:
                both.insert(1, self.calibrated.corrected(base, published))
            found += [(one, raw_estimate(one.logits, posterior)[0]) for one in both]
        return found


def choose(gains: Sequence[float], errors: Sequence[float]) -> int:
    """From the first on, each candidate that promises more than the one before it even one standard error lower."""
    chosen = 0
    for k in range(1, len(gains)):
        if gains[k] - errors[k] > gains[chosen]:
            chosen = k
    return chosen


class Choice(Fit):
    """What training clients say about each candidate's gain, and about its estimate."""

    key = "choice"
    personalizer: Auto

    def __init__(self, personalizer: Auto, given: CrossFitted) -> None:
        super().__init__(personalizer, given)
        self.candidates = len(personalizer.candidates)

    def init(self, generator: torch.Generator) -> State:
        names = ("gain", "estimated", "slope", "error")
        return {name: torch.zeros(FITS, self.candidates, dtype=torch.float64) for name in names}

    def memory(self, client: Client) -> State:
        newcomer, y = self.play(client)
        results = self.personalizer.results(self.given.without(client.id), newcomer)
        truth = torch.tensor([accuracy_of(personalized.logits, y) for personalized, _ in results]).double()
        guess = torch.tensor([estimate for _, estimate in results]).double()
        return {"x": guess - guess[0], "y": truth - truth[0], "samples": torch.tensor(float(len(y))).double()}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        x, y = carry["x"], carry["y"]
        weight = takes_part(client.id) * carry["samples"] / 1024  # a power of two, which cancels
        moments = torch.stack([x, y, x * x, x * y, y * y])
        return {
            "weight": weight,
            "squares": weight.square(),
            "moments": weight.view(-1, 1, 1) * moments,
        }, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        weight = total["weight"].clamp(min=1e-9).unsqueeze(1)
        x, y, xx, xy, yy = (total["moments"] / weight.unsqueeze(2)).unbind(1)
        spread, joint = (xx - x * x).clamp(min=0), xy - x * y
        slope = torch.where(spread > 1e-12, joint / spread.clamp(min=1e-12), 0.0).clamp(0, 1)
        residual = (yy - y * y - 2 * slope * joint + slope.square() * spread).clamp(min=0)
        effective = (weight.square() / total["squares"].clamp(min=1e-12).unsqueeze(1)).clamp(min=1)
        return {"gain": y, "estimated": x, "slope": slope, "error": (residual / effective).sqrt()}

    def facts(self, server: State) -> dict[str, float]:
        names = self.personalizer.candidates
        return {f"gain.{name}": gain for name, gain in zip(names, server["gain"][0].tolist(), strict=True)}
