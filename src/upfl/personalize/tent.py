"""Entropy minimisation (TENT): Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021.

    psi <- psi - lr * (clip(grad mean_j H(softmax f(x_j; psi))) + weight_decay * psi)       H in bits

on all of the client's data, at the training's decayed learning rate.

Settled: one step and the entropy in bits (authors' code of UPFL: log2, 1.44 times the gradient in nats). The original
adapts only the scales and shifts of normalisation layers (`parameters = "norm"`), which the paper's models do not have:
they adapt `all`. `auto` takes the first where the model has such layers. `last` is the last layer.

BatchNorm, under `norm`: as in the original, the newcomer's data, as one batch, have statistics of their own in place of
the running ones, and the gradient passes through them. These statistics are then the newcomer's, so that a later
prediction is a function of its input. Under `all` and `last` the running ones stay. GroupNorm and LayerNorm have none.
"""

import math
from typing import Any, Literal

from pydantic import Field

from upfl.contract import (
    CHUNK,
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
from upfl.errors import ConfigError
from upfl.models import Model
from upfl.personalize.adaptation import entropy, no_steps, summed_gradient
from upfl.state import State
from upfl.training.sgd import sgd_


class TentHyper(Hyper):
    steps: int = Field(1, ge=0)
    lr: float | None = Field(None, gt=0, description="by default the training's learning rate, decayed")
    weight_decay: float = Field(1e-4, ge=0)
    clip: float = Field(10.0, gt=0)
    parameters: Literal["auto", "all", "last", "norm"] = "auto"


class Tent(Personalizer[TentHyper]):
    name = "tent"
    title = "entropy minimisation"
    Hyper = TentHyper

    def __init__(self, training: Training[Any], hyper: TentHyper) -> None:
        super().__init__(training, hyper)
        if not all(_chosen(model, hyper.parameters) for model in training.client_models.values()):
            raise ConfigError("tent.parameters = 'norm': the model has no normalisation layers; take 'all' or 'last'")

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        return super().why_not(training) or no_steps(training)

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        hyper, training = self.hyper, self.training
        lr = training.local_rate(published.round) if hyper.lr is None else hyper.lr
        psi = {name: value.clone() for name, value in training.start(published, client, memory).items()}
        model = training.model_of(psi)
        adapted = {name: psi[name] for name in _chosen(model, hyper.parameters)}
        diary = Diary(steps=hyper.steps, decision=f"{hyper.steps} step(s) down the entropy, as configured")
        own = bool(hyper.steps and model.buffers) and _only_norms(model, hyper.parameters)
        logits_of, at_once = (training.batchwise, len(client.x)) if own else (training.logits, CHUNK)
        before = all_logits(training.logits, psi, client.x) if own else None
        for _ in range(hyper.steps):
            logits, total, gradient = summed_gradient(entropy, logits_of, psi, client.x, at_once)
            before = logits if before is None else before
            diary.entropy.append(total.item() / len(client.x))
            diary.loss.append(diary.entropy[-1] / math.log(2))
            in_bits = {name: gradient[name] / (len(client.x) * math.log(2)) for name in adapted}
            sgd_(adapted, in_bits, lr, hyper.weight_decay, hyper.clip)
        psi = model.observed(psi, client.x) if own else psi
        logits = all_logits(training.logits, psi, client.x)
        diary.entropy.append(entropy(logits).mean().item())
        diary.loss.append(diary.entropy[-1] / math.log(2))
        return Personalized(logits if before is None else before, logits, Predictor(training, [psi]), diary)


def _chosen(model: Model, which: str) -> list[str]:
    """The parameters that are adapted."""
    names = list(model.shapes)
    if which == "last":
        return [name for name in names if _layer(name) == _layer(names[-1])]
    return [name for name in names if not _only_norms(model, which) or model.kinds.get(_layer(name)) == "norm"]


def _only_norms(model: Model, which: str) -> bool:
    return which == "norm" or (which == "auto" and "norm" in model.kinds.values())


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]
