"""Calibration: probabilities that mean what they say, fitted by the federation; and what stands on it.

    p = softmax(a log softmax(z) + b),   a = 1 / temperature,   sum_c b_c = 0

a and b minimise the cross-entropy on training clients' validation data, after each client personalized as a newcomer
would (so that what a personalizer does to the probabilities is calibrated, too). The problem is convex: Newton steps,
whose loss, gradient and Hessian are sums over clients. A step that does not lower the loss is halved.

    pi = mean p over that data        with b free, the label frequencies there; what p is a posterior for

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
from upfl.personalize.nothing import Nothing
from upfl.state import State, select

MANY_CLASSES = 62
LEAST_SCALE = 1e-3
CLOSE = 1e-10  # nats from the least mean loss, twice: where data is thin, the sums' rounding lets no step come nearer
HELD = 0.5  # how many samples' weight draws b to 0
ROUNDING = 2.0**-24  # of a difference of mean losses: in the sum, each client's is off by half of 2^-24 at most


class Calibration(Fit):
    """Newton's method for all fits at once. theta = (a, b) of each fit."""

    key = "calibration"
    rounds = 60
    # Sums of Hessians are large, and need not be exact: a Newton step corrects itself.
    scales: ClassVar = dict.fromkeys(("loss", "gradient", "hessian", "prior"), 24)

    def init(self, generator: torch.Generator) -> State:
        fits = FITS
        theta = torch.zeros(fits, 1 + self.classes, dtype=torch.float64)
        theta[:, 0] = 1
        return {
            "point": theta,  # where the clients look next
            "theta": theta.clone(),  # the best so far, what the loss is there, and where to go from there
            "loss": torch.full((fits,), torch.inf, dtype=torch.float64),
            "direction": torch.zeros_like(theta),
            "fraction": torch.ones(fits, dtype=torch.float64),
            "decrement": torch.full((fits,), torch.inf, dtype=torch.float64),
            "prior": torch.full((fits, self.classes), 1 / self.classes, dtype=torch.float64),
            "confusion": torch.zeros(fits, self.classes, self.classes, dtype=torch.float64),
            "clients": torch.zeros(fits, dtype=torch.int64),
            "labels": torch.zeros(fits, dtype=torch.int64),
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
        part = self.part_of(client.id)
        scores = carry["scores"][part] if len(carry["scores"]) > 1 else carry["scores"]
        up = {"clients": self.takes_part(client.id)}
        for name, value in newton_sums(server["point"][part], scores, carry["y"]).items():
            up[name] = value.new_zeros(FITS, *value.shape[1:])
            up[name][part] = value
        return up, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        count = total["count"].double().clamp(min=1)
        weight = self.penalty(count).unsqueeze(1).repeat(1, 1 + self.classes)
        weight[:, 0] = 1 / count
        away = server["point"].clone()
        away[:, 0] -= 1
        loss = total["loss"] / count + 0.5 * (weight * away.square()).sum(1)
        gradient = total["gradient"] / count.unsqueeze(1) + weight * away
        hessian = total["hessian"] / count.view(-1, 1, 1) + torch.diag_embed(weight)
        hessian[:, 1:, 1:] += 1  # b's mean does not show in p: keep it where it is

        better = loss <= server["loss"] + ROUNDING
        step = -torch.linalg.solve(hessian, gradient)
        scale = server["point"][:, 0]
        held = (scale < 1.01 * LEAST_SCALE) & (step[:, 0] < 0)
        hessian[held, 0, 1:] = hessian[held, 1:, 0] = 0
        gradient[held, 0] = 0
        step = -torch.linalg.solve(hessian, gradient)
        step[self.too_few(total["clients"], total["count"])] = 0  # the model stays as it is
        longest = torch.where(step[:, 0] < 0, (scale - LEAST_SCALE) / -step[:, 0], 1.0).clamp(max=1)
        row = better.unsqueeze(1)
        theta = torch.where(row, server["point"], server["theta"])
        direction = torch.where(row, step, server["direction"])
        fraction = torch.where(better, longest, server["fraction"] / 2)
        return {
            "point": theta + fraction.unsqueeze(1) * direction,
            "theta": theta,
            "loss": torch.where(better, loss, server["loss"]),
            "direction": direction,
            "fraction": fraction,
            "decrement": torch.where(better, -(gradient * step).sum(1), server["decrement"]),
            "prior": torch.where(row, total["prior"] / count.unsqueeze(1), server["prior"]),
            "confusion": torch.where(
                better.view(-1, 1, 1), total["confusion"].double() / count.view(-1, 1, 1), server["confusion"]
            ),
            "clients": total["clients"],
            "labels": total["count"],
        }

    def over_others(self, server: State) -> State:
        return server | {"loss": torch.full_like(server["loss"], torch.inf)}  # of others, it is not to be compared

    def penalty(self, count: Tensor) -> Tensor:
        """The weight of b's distance from 0 in a mean over so many labels."""
        return (HELD / count).clamp(min=1e-3 if self.classes >= MANY_CLASSES else 0.0)

    def done(self, server: State) -> bool:
        return bool(((server["decrement"] < CLOSE) | (server["fraction"] < 1e-6)).all())

    def facts(self, server: State) -> dict[str, float]:
        return {"temperature": 1 / server["theta"][0, 0].item(), "cross_entropy": server["loss"][0].item()}

    def fitted(self, server: State, fit: int) -> State:
        smoothing = 1e-4 if self.classes >= MANY_CLASSES else 1e-6
        prior = server["prior"][fit] + smoothing
        return {
            "scale": server["theta"][fit, 0].clone(),
            "bias": server["theta"][fit, 1:].clone(),
            "prior": prior / prior.sum(),
            "confusion": server["confusion"][fit].clone(),
            "clients": server["clients"][fit].clone(),
            "labels": server["labels"][fit].clone(),
            "few": self.too_few(server["clients"], server["labels"])[fit].long(),
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        counts = dict.fromkeys(("clients", "labels"), (0, math.inf))
        return {"scale": (LEAST_SCALE / 2, math.inf), "prior": (1e-12, 1), "confusion": (0, 1), "few": (0, 1)} | counts


def newton_sums(theta: Tensor, scores: Tensor, y: Tensor) -> State:
    """A client's part of the loss, its gradient and Hessian at each theta; and of the mean posterior and confusion.

    theta [fits, 1 + classes], scores [fits or 1, n, classes], y [n].
    """
    (fits, _), (_, n, classes) = theta.shape, scores.shape
    log_p = (theta[:, :1].unsqueeze(2) * scores + theta[:, 1:].unsqueeze(1)).log_softmax(2)
    p = log_p.exp()
    off = p.clone()
    off[:, torch.arange(n), y] -= 1
    away = scores - (p * scores).sum(2, keepdim=True)
    hessian = torch.empty(fits, 1 + classes, 1 + classes, dtype=scores.dtype)
    hessian[:, 0, 0] = (p * away.square()).sum((1, 2))
    hessian[:, 0, 1:] = hessian[:, 1:, 0] = (p * away).sum(1)
    hessian[:, 1:, 1:] = p.sum(1).diag_embed() - p.mT @ p
    confusion = torch.zeros(fits, classes**2, dtype=torch.int64)
    confusion.scatter_add_(1, p.argmax(2) * classes + y, torch.ones(fits, n, dtype=torch.int64))
    return {
        "count": torch.full((fits,), n),
        "loss": -log_p[:, torch.arange(n), y].sum(1),
        "gradient": torch.cat([(off * scores).sum((1, 2)).unsqueeze(1), off.sum(1)], 1),
        "hessian": hessian,
        "prior": p.sum(1),
        "confusion": confusion.view(fits, classes, classes),
    }


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
        known = (*before, Need.of(Calibration, self.base, before))
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
        if found.as_is:
            made = replace(tempered(base, calibrator), posterior=found.posterior)
        else:
            logits = found.posterior.clamp(min=1e-300).log().to(base.logits)
            predictor = calibrator.predictor(base.predictor, found.mix)
            made = replace(base, logits=logits, predictor=predictor, posterior=None)
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
