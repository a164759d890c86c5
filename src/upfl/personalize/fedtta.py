"""Adaptation guided by the learned model g: one step (FedTTA) and early-stopped steps (FedTTA++).

    l_per(psi) = sqrt(min(n, 64)) * sqrt(mean_j g(f(x_j; psi); phi)^2)
    psi <- psi - inner_lr * (clip(grad l_per) + weight_decay * psi)               inner_lr with its decay

FedTTA takes one step. FedTTA++ takes up to `steps`, looks at the mean entropy of the predictions after each, stops when
it has not fallen for `patience` steps, and keeps the model with the least entropy.

Settled: training takes the norm over a batch of 64, which grows with the square root of the batch, so that the norm
over all of a newcomer's data would step too far; the authors average the norms of batches of 64. The form above has the
same scale and does not depend on the order of the samples. 50 steps and the unadapted model as a candidate come from
the authors' code; the paper's algorithm compares adapted models only (`candidates = "adapted"`).
"""

import math
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import (
    Diary,
    Hyper,
    Personalized,
    Personalizer,
    Predictor,
    Published,
    Training,
    Unlabelled,
    all_logits,
)
from upfl.personalize.adaptation import entropy, summed_gradient
from upfl.state import State
from upfl.training.fedtta import FedTTAHyper
from upfl.training.sgd import sgd_

TRAINING_BATCH = 64


class OneStepHyper(Hyper):
    pass


class EarlyStoppedHyper(Hyper):
    steps: int = Field(50, ge=1, description="at most")
    patience: int = Field(1, ge=1, description="steps without a fall of the entropy before stopping")
    candidates: Literal["all", "adapted"] = Field("all", description="whether the unadapted model may be kept")


@runtime_checkable
class Guided(Protocol):
    """A training that learns a guide: FedTTA's, whose hyper-parameters the steps take over."""

    hyper: FedTTAHyper

    def guided(self, published: Published, client: Unlabelled, memory: State | None) -> tuple[State, State]:
        """psi and phi of a client before it personalizes."""

    def guide(self, phi: State, logits: Tensor) -> Tensor:
        """g(logits; phi): a number for each sample, as a differentiable function."""


H = TypeVar("H", bound=Hyper)


class _Guided(Personalizer[H]):
    """What both have in common: one step under g's guidance."""

    training: Any  # Guided, as why_not sees to

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        if isinstance(training, Guided):
            return None
        return f"it needs the adaptation model that FedTTA's trainings learn, and {training.name} learns none"

    def step(self, phi: State, psi: State, x: Tensor, round: int) -> tuple[Tensor, float, State]:
        """The logits and l_per of psi, and psi after a step."""
        training, hyper = self.training, self.training.hyper
        logits, squares, gradient = summed_gradient(lambda z: training.guide(phi, z).square(), training.logits, psi, x)
        l_per = _scaled(squares.item(), len(x))
        scale = min(len(x), TRAINING_BATCH) / (2 * l_per * len(x))
        stepped = {name: value.clone() for name, value in psi.items()}
        scaled = {name: value * scale for name, value in gradient.items()}
        sgd_(stepped, scaled, hyper.rate(hyper.inner_lr, round), hyper.weight_decay, hyper.clip)
        return logits, l_per, stepped

    def loss(self, phi: State, logits: Tensor) -> float:
        """l_per of given logits."""
        with torch.no_grad():
            return _scaled(self.training.guide(phi, logits).square().sum().item(), len(logits))


def _scaled(squares: float, count: int) -> float:
    return math.sqrt(min(count, TRAINING_BATCH) * (squares / count + 1e-12))


class OneStep(_Guided[OneStepHyper]):
    name = "one-step"
    title = "one step of adaptation"
    Hyper = OneStepHyper

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        start, phi = self.training.guided(published, client, memory)
        before, l_per, psi = self.step(phi, start, client.x, published.round)
        logits = all_logits(self.training.logits, psi, client.x)
        entropies = [entropy(before).mean().item(), entropy(logits).mean().item()]
        losses = [l_per, self.loss(phi, logits)]
        diary = Diary(entropies, losses, steps=1, decision="one step, always")
        return Personalized(before, logits, Predictor(self.training, [psi]), diary)


class EarlyStopped(_Guided[EarlyStoppedHyper]):
    name = "early-stopped"
    title = "early-stopped adaptation"
    Hyper = EarlyStoppedHyper

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        hyper = self.hyper
        psi, phi = self.training.guided(published, client, memory)
        diary, waited = Diary(), 0
        least, best, best_logits, before = math.inf, psi, None, None
        for taken in range(hyper.steps + 1):
            logits, l_per, stepped = self.step(phi, psi, client.x, published.round)
            before = logits if before is None else before
            diary.loss.append(l_per)
            diary.entropy.append(entropy(logits).mean().item())
            if taken == 0 and hyper.candidates == "adapted":
                psi = stepped
                continue
            if diary.entropy[-1] < least:
                least, best, best_logits, waited = diary.entropy[-1], psi, logits, 0
                diary.steps = taken
            else:
                waited += 1
            if waited >= hyper.patience:
                break
            psi = stepped
        assert before is not None
        if best_logits is None:  # no entropy was finite: the unadapted model is all there is
            best_logits = before
        diary.decision = f"least entropy after {diary.steps} of {len(diary.entropy) - 1} steps"
        return Personalized(before, best_logits, Predictor(self.training, [best]), diary)
