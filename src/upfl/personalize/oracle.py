"""Oracles: what a newcomer could reach if it knew its labels. Bounds for comparison; never a method.

They are a type of their own, because they receive what no personalizer may: the labels. No registry of personalizers
holds them, no run trains or selects by them, no bundle carries them; `upfl score --oracles` draws them apart.

    oracle-prior       the calibrated model with the client's true class frequencies: argmax p_ic q_c / pi_c
    oracle-labels      the calibrated model with its true label set: the same with q proportional to pi on that set
    oracle-step        the most accurate of the models on the way of adaptation: guided steps, or steps down the entropy
    oracle-half        fine-tuned on a random half of the labelled samples, scored on the other half
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl.contract import Need, Published, Training, Unlabelled, all_logits, chunks
from upfl.personalize.adaptation import entropy, summed_gradient
from upfl.personalize.calibration import Calibration, Calibrator
from upfl.personalize.fedtta import OneStep
from upfl.personalize.nothing import Nothing
from upfl.state import State
from upfl.training.sgd import sgd_

STEPS = 50
EPOCHS = 20


class Oracle(ABC):
    """A bound: predictions that may depend on the labels."""

    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, training: Training[Any]) -> None:
        self.training = training

    def needs(self) -> tuple[Need, ...]:
        return ()

    @abstractmethod
    def predict(self, published: Published, client: Unlabelled, y: Tensor) -> tuple[Tensor, Tensor]:
        """(the predicted classes, which samples they are for)"""


class _OnCalibrated(Oracle):
    def needs(self) -> tuple[Need, ...]:
        return (Need.of(Calibration, Nothing(self.training, Nothing.Hyper())),)

    @abstractmethod
    def mix(self, y: Tensor, prior: Tensor) -> Tensor:
        """The class mix that the labels give away."""

    def predict(self, published: Published, client: Unlabelled, y: Tensor) -> tuple[Tensor, Tensor]:
        calibrator = Calibrator.of(published, Nothing.name)
        logits = Nothing(self.training, Nothing.Hyper()).personalize(published, client).logits
        scores = calibrator.log_posterior(logits) - calibrator.prior.log() + self.mix(y, calibrator.prior).log()
        return scores.argmax(1), torch.arange(len(y))


class TruePrior(_OnCalibrated):
    name = "oracle-prior"
    title = "true class frequencies"

    def mix(self, y: Tensor, prior: Tensor) -> Tensor:
        return torch.bincount(y, minlength=len(prior)).double() / len(y)


class TrueLabels(_OnCalibrated):
    name = "oracle-labels"
    title = "true label set"

    def mix(self, y: Tensor, prior: Tensor) -> Tensor:
        return torch.where(torch.bincount(y, minlength=len(prior)) > 0, prior, 0.0)


class BestStep(Oracle):
    name = "oracle-step"
    title = "best adaptation step"

    def predict(self, published: Published, client: Unlabelled, y: Tensor) -> tuple[Tensor, Tensor]:
        best, most = torch.empty(0), -1
        for logits in self._way(published, client):
            predicted = logits.argmax(1).cpu()
            if (right := int((predicted == y).sum())) > most:
                best, most = predicted, right
        return best, torch.arange(len(y))

    def _way(self, published: Published, client: Unlabelled) -> Iterator[Tensor]:
        training = self.training
        guided = OneStep(training, OneStep.Hyper()) if OneStep.why_not(training) is None else None
        psi, phi = guided.training.guided(published, client, None) if guided else (None, {})
        psi = psi or training.start(published, client, None)
        for _ in range(STEPS + 1):
            if guided is not None:
                logits, _, psi = guided.step(phi, psi, client.x, published.round)
            else:
                logits, _, gradient = summed_gradient(entropy, training.logits, psi, client.x)
                scaled = {name: value / len(client.x) for name, value in gradient.items()}
                psi = {name: value.clone() for name, value in psi.items()}
                sgd_(psi, scaled, training.local_rate(published.round), 1e-4, 10.0)
            yield logits


class HalfSupervised(Oracle):
    name = "oracle-half"
    title = "fine-tuned on half of the labels"

    def predict(self, published: Published, client: Unlabelled, y: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(y), generator=client.generator("half"))
        known, asked = order[: len(y) // 2], order[len(y) // 2 :]
        training = self.training
        psi: State = {name: value.clone() for name, value in training.start(published, client, None).items()}
        labels = y.to(client.x.device)
        for epoch in range(EPOCHS):
            shuffled = known[torch.randperm(len(known), generator=client.generator(f"half {epoch}"))]
            for part in chunks(shuffled, 64):
                cross_entropy = partial(F.cross_entropy, target=labels[part], reduction="none")
                _, _, gradient = summed_gradient(cross_entropy, training.logits, psi, client.x[part])
                scaled = {name: value / len(part) for name, value in gradient.items()}
                sgd_(psi, scaled, training.local_rate(published.round), 1e-4, 10.0)
        return all_logits(training.logits, psi, client.x[asked]).argmax(1).cpu(), asked


ORACLES: dict[str, type[Oracle]] = {kind.name: kind for kind in (TruePrior, TrueLabels, BestStep, HalfSupervised)}
