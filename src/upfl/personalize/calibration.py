"""Calibration: probabilities that mean what they say, fitted by the federation; and what stands on it.

    p = softmax(a log softmax(z) + b),   a = 1 / temperature,   sum_c b_c = 0

a and b minimise the cross-entropy on training clients' validation data, after each client personalized as a newcomer
would (so that what a personalizer does to the probabilities is calibrated, too). The problem is convex: Newton steps,
whose loss, gradient and Hessian are sums over clients.

On Flower every round of sums is a message to each client, so there are at most four, three where the personalizer
itself needed a fit; each asks about six points at once. First these are six temperatures with b = 0. Then, from the
best of them: a half, one, one and a half and two Newton steps, a Newton step of b alone, and a Newton step from the
second best. The last Newton step is taken without asking again, where it gains less than a hundredth of a nat.

    pi = mean p over that data        with b free, the label frequencies there; what p is a posterior for. After the
                                      last step it is what the Hessian says

Settled: a is drawn to 1 with the weight of one sample, without which it has no bound where every prediction is right,
and stays above 0: where predictions mislead, it is held at 1e-3 and b goes on alone, so that pi is right nevertheless.
b is drawn to 0 with the weight of half a sample: where few labels are there, or nearly all come out right, nothing else
holds it (with 140 labels of digits, b went to 10 and more; half a sample has the better cross-fitted likelihood there,
and many labels outweigh it). From 62 classes on it is 1e-3 a sample, if that is more. pi is smoothed by 1e-4 from 62
classes on, 1e-6 below.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from pydantic import Field, create_model
from torch import Tensor

from upfl.contract import (
    FITS,
    Client,
    CrossFitted,
    Fit,
    Hyper,
    Need,
    Personalized,
    Personalizer,
    Predictor,
    Published,
    Total,
    Training,
    Unlabelled,
    varies,
)
from upfl.errors import RunError
from upfl.personalize import class_mix
from upfl.personalize.adaptation import entropy
from upfl.personalize.estimate import TOO_FEW, Reliability, enough_clients, estimates, shown_mix
from upfl.personalize.newton import LEAST_SCALE, Newton, newton_sums
from upfl.personalize.nothing import Nothing
from upfl.state import State, select

MANY_CLASSES = 62
CLOSE = 1e-6  # nats that the next step gains, twice: the one after that gains nothing that counts
SURE = 1e-2  # nats, twice, below which a step is taken without a look
SCALES = (1.0, 0.125, 0.25, 0.5, 2.0, 4.0)  # where the clients look first; the model as it is comes first
FRACTIONS = (1.0, 0.5, 1.5, 2.0)  # of a Newton step
POINTS = len(SCALES)
HELD = 0.5  # how many samples' weight draws b to 0
ROUNDING = 2.0**-24  # of a difference of mean losses: in the sum, each client's is off by half of 2^-24 at most


class Calibration(Fit):
    """Newton's method for all fits at once. theta = (a, b) of each fit."""

    key = "calibration"
    rounds = 4
    # Sums of Hessians are large, and need not be exact: a Newton step corrects itself.
    scales: ClassVar = dict.fromkeys(("loss", "gradient", "hessian"), 24)

    def __init__(self, personalizer: Personalizer[Any], given: CrossFitted) -> None:
        super().__init__(personalizer, given)
        if personalizer.needs():
            self.rounds = 3  # type: ignore[misc]

    def init(self, generator: torch.Generator) -> State:
        points = torch.zeros(FITS, POINTS, 1 + self.classes, dtype=torch.float64)
        points[:, :, 0] = torch.tensor(SCALES)
        theta = points[:, 0].clone()
        return {
            "points": points,  # where the clients look next
            "theta": theta,  # the best so far, what the loss is there, and where to go from there
            "loss": torch.full((FITS,), torch.inf, dtype=torch.float64),
            "step": torch.zeros_like(theta),
            "fraction": torch.ones(FITS, dtype=torch.float64),
            "decrement": torch.full((FITS,), torch.inf, dtype=torch.float64),
            "prior": torch.full((FITS, self.classes), 1 / self.classes, dtype=torch.float64),
            "prior_step": torch.zeros(FITS, self.classes, dtype=torch.float64),
            "confusion": torch.zeros(FITS, self.classes, self.classes, dtype=torch.float64),
            "clients": torch.zeros(FITS, dtype=torch.int64),
            "labels": torch.zeros(FITS, dtype=torch.int64),
        }

    def memory(self, client: Client) -> State:
        y = self.labels(client)
        different = varies(self.personalizer)
        scores = torch.zeros(FITS if different else 1, len(y), self.classes, dtype=torch.float64)
        for fit, _, personalized in self.plays(client, self.personalizer.personalize, different):
            if different or fit == 0:
                scores[fit] = personalized.logits.cpu().double().log_softmax(1)
        return {"scores": scores, "y": y}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        part, y = self.part_of(client.id), carry["y"]
        scores = carry["scores"][part] if len(carry["scores"]) > 1 else carry["scores"]
        taking = self.takes_part(client.id)
        at_points = [newton_sums(points, scores, y) for points in server["points"][part].unbind(1)]
        up = {"clients": taking, "counts": taking.unsqueeze(1) * torch.bincount(y, minlength=self.classes)}
        found = {name: torch.stack([sums[name] for sums in at_points], 1) for name in self.scales}
        found["hessian"] = found["hessian"][..., *torch.triu_indices(1 + self.classes, 1 + self.classes)]
        found["confusion"] = at_points[0]["confusion"]  # at one point: it is large, and its use is rough
        for name, value in found.items():
            up[name] = value.new_zeros(FITS, *value.shape[1:])
            up[name][part] = value
        return up, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        labels, points, every = total["counts"].sum(1), server["points"], torch.arange(FITS)
        count = labels.double().clamp(min=1)
        few = self.too_few(total["clients"], labels)
        weight = self.penalty(count).unsqueeze(1).repeat(1, 1 + self.classes)
        weight[:, 0] = 1 / count
        away = points.clone()
        away[:, :, 0] -= 1
        losses = total["loss"] / count.unsqueeze(1) + 0.5 * (weight.unsqueeze(1) * away.square()).sum(2)
        order = losses.argsort(dim=1, stable=True)
        order[few, 0] = 0  # the model stays as it is
        gradients = total["gradient"] / count.view(-1, 1, 1) + weight.unsqueeze(1) * away

        def newton(at: Tensor) -> Newton:
            rows, columns = torch.triu_indices(1 + self.classes, 1 + self.classes)
            slopes = torch.empty(FITS, 1 + self.classes, 1 + self.classes, dtype=torch.float64)
            slopes[:, rows, columns] = slopes[:, columns, rows] = total["hessian"][every, at] / count.unsqueeze(1)
            return Newton.at(points[every, at], gradients[every, at], slopes, weight)

        best, second = newton(order[:, 0]), newton(order[:, 1])
        loss = losses[every, order[:, 0]]
        better = loss <= server["loss"] + ROUNDING
        row = better.unsqueeze(1)
        theta = torch.where(row, best.point, server["theta"])
        step = torch.where(row, best.step, server["step"])
        fraction = torch.where(better, 1.0, server["fraction"] / 8)
        tried = [theta + fraction.unsqueeze(1) * part * step for part in FRACTIONS]
        others = [theta + fraction.unsqueeze(1) * part * step for part in (0.25, 0.125)]
        instead = (best.point + best.bias_step, second.point + second.step)
        tried += [torch.where(row, new, less) for new, less in zip(instead, others, strict=True)]
        ahead = torch.stack(tried, 1)
        ahead[:, :, 0].clamp_(min=LEAST_SCALE)
        frequencies = total["counts"] / count.unsqueeze(1)
        prior = frequencies + total["gradient"][every, order[:, 0], 1:] / count.unsqueeze(1)
        confusion = total["confusion"].double() / count.view(-1, 1, 1)
        still = few.unsqueeze(1)
        return {
            "points": torch.where(few.view(-1, 1, 1), theta.unsqueeze(1), ahead),
            "theta": theta,
            "loss": torch.where(better, loss, server["loss"]),
            "step": torch.where(still, 0.0, step),
            "fraction": fraction,
            "decrement": torch.where(better, best.decrement, server["decrement"]).masked_fill(few, 0.0),
            "prior": torch.where(row, prior, server["prior"]),
            "prior_step": torch.where(row, best.prior_step, server["prior_step"]).masked_fill(still, 0.0),
            "confusion": torch.where(better.view(-1, 1, 1), confusion, server["confusion"]),
            "clients": total["clients"],
            "labels": labels,
        }

    def over_others(self, server: State) -> State:
        return server | {"loss": torch.full_like(server["loss"], torch.inf)}  # of others, it is not to be compared

    def penalty(self, count: Tensor) -> Tensor:
        """The weight of b's distance from 0 in a mean over so many labels."""
        return (HELD / count).clamp(min=1e-3 if self.classes >= MANY_CLASSES else 0.0)

    def done(self, server: State) -> bool:
        return bool((server["decrement"] < CLOSE).all())

    def facts(self, server: State) -> dict[str, float]:
        found, loss = self.fitted(server, 0), server["loss"][0].item()
        gain = server["decrement"][0].item() / 2 if server["decrement"][0] < SURE else 0.0
        return {"temperature": 1 / found["scale"].item(), "cross_entropy": loss - gain}

    def fitted(self, server: State, fit: int) -> State:
        smoothing = 1e-4 if self.classes >= MANY_CLASSES else 1e-6
        sure = (server["decrement"][fit] < SURE).double()
        theta = server["theta"][fit] + sure * server["step"][fit]
        prior = (server["prior"][fit] + sure * server["prior_step"][fit]).clamp(min=0) + smoothing
        return {
            "scale": theta[0].clone(),
            "bias": theta[1:].clone(),
            "prior": prior / prior.sum(),
            "confusion": server["confusion"][fit].clone(),
            "clients": server["clients"][fit].clone(),
            "labels": server["labels"][fit].clone(),
            "few": self.too_few(server["clients"], server["labels"])[fit].long(),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        counts = dict.fromkeys(("clients", "labels"), (0, math.inf))
        return {"scale": (LEAST_SCALE / 2, math.inf), "prior": (1e-12, 1), "confusion": (0, 1), "few": (0, 1)} | counts


@dataclass(frozen=True)
class Calibrator:
    """What a calibration came to."""

    scale: float
    bias: Tensor
    prior: Tensor
    confusion: Tensor
    too_few: str = ""  # why nothing was calibrated, where that is so

    @classmethod
    def of(cls, published: Published, personalizer: str) -> Calibrator:
        known = fitted(published, f"{Calibration.key}.{personalizer}")
        few = f"{int(known['clients'])} training client(s) with {int(known['labels'])} validation label(s) are too few"
        why = few if known["few"] else ""
        return cls(float(known["scale"]), known["bias"], known["prior"], known["confusion"], why)

    def log_posterior(self, logits: Tensor) -> Tensor:
        return (self.scale * logits.cpu().double().log_softmax(1) + self.bias).log_softmax(1)

    def predictor(self, base: Predictor, mix: Tensor | None = None) -> Predictor:
        """The calibrated model, for another mix of classes where one is given: log p + log q - log pi."""
        bias = self.bias if mix is None else self.bias + mix.log() - self.prior.log()
        if base.bias is not None:
            bias = bias + self.scale * base.bias.cpu().double()
        return replace(base, temperature=base.temperature / self.scale, bias=bias.float())


def tempered(base: Personalized, calibrator: Calibrator) -> Personalized:
    """The same predictions, with probabilities at the calibrated temperature."""
    scale, later = calibrator.scale, base.predictor
    bias = None if later.bias is None else scale * later.bias
    predictor = replace(later, temperature=later.temperature / scale, bias=bias)
    return replace(base, logits=scale * base.logits, predictor=predictor)


def fitted(published: Published, name: str) -> State:
    """What was fitted under a name."""
    found = select(published.fitted, name)
    if not found:
        raise RunError(
            f"'{name}' was not fitted in this federation, and the personalizer needs it: "
            "name the personalizer when training (`upfl train --score`) or when exporting (`upfl export --add`)"
        )
    return found


H = TypeVar("H", bound=Hyper)


class Corrected(NamedTuple):
    posterior: Tensor  # of each of the client's samples
    mix: Tensor | None  # the mix of classes that later samples are predicted with, where there is one
    decision: str
    own_mix: Tensor | None = None  # the client's mix by its own evidence, whatever was decided; where it is at hand
    as_is: bool = False  # whether the base's predictions stay as they are: then the posterior only judges them


class Correction(Personalizer[H]):
    """A personalizer that corrects another one's calibrated predictions: those of `none`, or as `BASE+NAME` of BASE.

    For it, training clients play the newcomer when they validate, too: they bring no memory.
    """

    later = "similar"
    Base: ClassVar[type[Personalizer[Any]]] = Nothing
    choices: ClassVar[int] = 1  # from how many corrections its own needs choose

    def __init__(self, training: Training[Any], hyper: H) -> None:
        super().__init__(training, hyper)
        self.base = self.Base(training, getattr(hyper, "base", None) or self.Base.Hyper())

    @classmethod
    @cache
    def on(cls, base: type[Personalizer[Any]]) -> type[Correction[Any]]:
        """This correction of another personalizer."""
        own: Any = create_model(
            cls.Hyper.__name__, __base__=cls.Hyper, base=(base.Hyper, Field(default_factory=base.Hyper))
        )
        members = {"name": f"{base.name}+{cls.name}", "title": f"{base.title}, {cls.title}", "Hyper": own, "Base": base}
        return type(f"{base.__name__}{cls.__name__}", (cls,), members)

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        return cls.Base.why_not(training)

    def needs(self) -> tuple[Need, ...]:
        before = self.base.needs()
        # How far the base's estimates are off tells nothing of its predictions.
        known = (*before, Need.of(Calibration, self.base, [one for one in before if one.kind is not Reliability]))
        own = tuple(need if need.after is not None else need.standing_on(known) for need in self.own_needs())
        chooses = self.choices > 1
        reliability = Need.of(Reliability, self, known if chooses else (*known, *own), own if chooses else ())
        return (*known, *own, reliability)

    def own_needs(self) -> tuple[Need, ...]:
        """What this needs besides the calibration."""
        return ()

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        return self.corrected(self.base.personalize(published, client), published)

    def corrected(self, base: Personalized, published: Published) -> Personalized:
        """What the base came to, corrected."""
        calibrator, found = self.found(base, published)
        known = select(published.fitted, f"{Reliability.key}.{self.name}")
        made = _made(base, calibrator, found)
        mix, mix_error = shown_mix(self.mixes(base, calibrator, found), found.posterior, known)
        diary = replace(
            base.diary,
            entropy=[*base.diary.entropy, entropy(made.logits.double()).mean().item()],
            decision=found.decision if self.Base is Nothing else f"{base.diary.decision}; {found.decision}",
            mix=mix.tolist(),
            mix_error=mix_error,
            accuracy=estimates(base.before, made.logits, found.posterior, known),
            no_accuracy="" if enough_clients(known) else TOO_FEW,
        )
        return replace(made, diary=diary)

    def found(self, base: Personalized, published: Published) -> tuple[Calibrator, Corrected]:
        """What becomes of the base's logits; where too few taught the calibration, they stay."""
        calibrator = Calibrator.of(published, self.base.name)
        return calibrator, _if_too_few(base, calibrator) or self.correct(base, calibrator, published)

    def possible(self, base: Personalized, published: Published) -> tuple[Calibrator, list[Corrected]]:
        """The same for every choice, before it is known which one it will be."""
        calibrator = Calibrator.of(published, self.base.name)
        if unchanged := _if_too_few(base, calibrator):
            return calibrator, [unchanged] * self.choices
        return calibrator, self.all_corrections(base, calibrator, published)

    def all_corrected(self, base: Personalized, published: Published) -> list[Personalized]:
        """What the base comes to by every choice, with the base's diary."""
        calibrator, possible = self.possible(base, published)
        return [_made(base, calibrator, found) for found in possible]

    def choice(self, fitted_so_far: State) -> int:
        """Which of the corrections what was fitted has chosen."""
        return 0

    def all_corrections(self, base: Personalized, calibrator: Calibrator, published: Published) -> list[Corrected]:
        """What becomes of the base's logits by each choice."""
        return [self.correct(base, calibrator, published)]

    def mixes(self, base: Personalized, calibrator: Calibrator, found: Corrected) -> Tensor:
        """Two estimates of the client's mix of classes, [2, classes]: by what was done, and by its own evidence."""
        own = found.own_mix
        if own is None:
            posterior = class_mix.on_grid(calibrator.log_posterior(base.logits), calibrator.prior)
            own = posterior.averaged(torch.zeros_like(posterior.evidence))[0].mean(0)
        return torch.stack([found.posterior.mean(0), own])

    @abstractmethod
    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        """What becomes of the base's logits."""


def _made(base: Personalized, calibrator: Calibrator, found: Corrected) -> Personalized:
    """The base with its logits and its predictor corrected."""
    if found.as_is:
        return replace(tempered(base, calibrator), posterior=found.posterior)
    logits = found.posterior.clamp(min=1e-300).log().to(base.logits)
    return replace(base, logits=logits, predictor=calibrator.predictor(base.predictor, found.mix), posterior=None)


def _if_too_few(base: Personalized, calibrator: Calibrator) -> Corrected | None:
    """Where too few taught the calibration: the base's predictions, as they are."""
    if not calibrator.too_few:
        return None
    posterior = calibrator.log_posterior(base.logits).exp()
    return Corrected(posterior, None, f"not corrected: {calibrator.too_few} to go by", as_is=True)


class Calibrated(Correction[Hyper]):
    name = "calibrated"
    title = "calibrated"

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        posterior = calibrator.log_posterior(base.logits).exp()
        return Corrected(posterior, None, f"temperature {1 / calibrator.scale:.3g} and a bias")
