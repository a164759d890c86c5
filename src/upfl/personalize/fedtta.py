"""Adaptation guided by the learned model g: one step (FedTTA) and early-stopped steps (FedTTA++).

    l_per(psi) = sqrt(min(n, b)) * sqrt(mean_j g(f(x_j; psi); phi)^2)             b the batch size of training
    psi <- psi - inner_lr * (clip(grad l_per) + weight_decay * psi)               inner_lr with its decay

FedTTA takes one step. FedTTA++ takes up to `steps`, looks at the mean entropy of the predictions after each, stops when
it has not fallen for `patience` steps, and keeps the model with the least entropy.

Settled: training takes the norm over a batch, which grows with the square root of the batch, so that the norm over all
of a newcomer's data would step too far. The authors average the norms of the client's batches, of which the last may
be short and counts as much as the others (`norm = "batches"`). The form above has the same scale and does not depend
on the order of the samples. b is the training's `batch_size`; on a public set, where clients of different models learn
their guides in other batches, that phase's (`training/hetero_fedtta.py`). 50 steps and the unadapted model as a
candidate come from the authors' code; the paper's algorithm compares adapted models only (`candidates = "adapted"`).
On digits the two are the same for every client of six partitions, for a first step always lowers the entropy; `all` is
the default because it cannot keep a model that is less sure than the one received (results/digits.md).
Steps and predictions are in evaluation mode: BatchNorm's running statistics are the federation's.
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
    chunks,
)
from upfl.personalize.adaptation import entropy, summed_gradient
from upfl.state import State
from upfl.training.fedtta import FedTTAHyper
from upfl.training.sgd import sgd_


class GuidedHyper(Hyper):
    batch: int | None = Field(None, ge=1, description="b in l_per; the training's batch size where silent")
    norm: Literal["rms", "batches"] = Field("rms", description="of g over all samples, or the mean over batches of b")


class EarlyStoppedHyper(GuidedHyper):
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


H = TypeVar("H", bound=GuidedHyper)


class _Guided(Personalizer[H]):
    """What both have in common: one step under g's guidance."""

    training: Any  # Guided, as why_not sees to

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        if isinstance(training, Guided):
            return None
        return f"it needs the adaptation model that FedTTA's trainings learn, and {training.name} learns none"

    @property
    def batch(self) -> int:
        return int(self.hyper.batch or self.training.hyper.batch_size)

    def step(self, phi: State, psi: State, x: Tensor, round: int) -> tuple[Tensor, float, State]:
        """The logits and l_per of psi, and psi after a step."""
        training, hyper = self.training, self.training.hyper
        if self.hyper.norm == "batches":
            logits, norms, gradient = summed_gradient(
                lambda z: _norm(training.guide(phi, z)), training.logits, psi, x, self.batch
            )
            parts = -(-len(x) // self.batch)
            l_per, scale = norms.item() / parts, 1 / parts
        else:
            logits, squares, gradient = summed_gradient(
                lambda z: training.guide(phi, z).square(), training.logits, psi, x
            )
            l_per = self._scaled(squares.item(), len(x))
            scale = min(len(x), self.batch) / (2 * l_per * len(x))
        stepped = {name: value.clone() for name, value in psi.items()}
        scaled = {name: value * scale for name, value in gradient.items()}
        sgd_(stepped, scaled, hyper.rate(hyper.inner_lr, round), hyper.weight_decay, hyper.clip)
        return logits, l_per, stepped

    def loss(self, phi: State, logits: Tensor) -> float:
        """l_per of given logits."""
        with torch.no_grad():
            said = self.training.guide(phi, logits)
            if self.hyper.norm == "batches":
                norms = [_norm(part).item() for part in chunks(said, self.batch)]
                return sum(norms) / len(norms)
            return self._scaled(said.square().sum().item(), len(logits))

    def _scaled(self, squares: float, count: int) -> float:
        return math.sqrt(min(count, self.batch) * (squares / count + 1e-12))


def _norm(said: Tensor) -> Tensor:
    """The norm that training takes over a batch."""
    return (said.square().sum() + 1e-12).sqrt()


class OneStep(_Guided[GuidedHyper]):
    name = "one-step"
    title = "one step of adaptation"
    Hyper = GuidedHyper

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
