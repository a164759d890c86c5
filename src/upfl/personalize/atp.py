"""ATP: Bao, Wei, Wang, He, Adaptive Test-Time Personalization for Federated Learning, NeurIPS 2023.

One entropy step, with a learned rate for each parameter tensor:

    u = grad mean_j H(softmax f(x_j; theta)),   theta' = theta - alpha * u                  H in nats

The rates are learned by the training clients, on the trained model, from alpha = 0: on a batch of its training data

    alpha_l <- alpha_l + rate * <grad CE(theta')_l, u_l> / sqrt(numel_l)

and averaged over the clients. A rate may become negative: for some tensors, less certain is better.

Settled: one pass of the clients, twenty batches each, so that it is one message where clients are machines. Four passes
of five batches came to the same accuracies (CHANGELOG.md): rates hardly move in a pass, so that their mean is the same.
The rates are learned on train splits, so validation scores need no cross-fitting for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import (
    Batch,
    Client,
    CrossFitted,
    Diary,
    Fit,
    Hyper,
    Need,
    Personalized,
    Personalizer,
    Phase,
    Predictor,
    Published,
    Total,
    Training,
    Unlabelled,
    all_logits,
)
from upfl.personalize.adaptation import entropy, no_steps, summed_gradient
from upfl.personalize.calibration import fitted
from upfl.state import State


class AtpHyper(Hyper):
    rate: float = Field(0.1, gt=0, description="of the rates' own learning")
    rounds: int = Field(1, ge=1, description="passes of the clients that learn the rates")
    iterations: int = Field(20, ge=1, description="batches of a client in a pass")


class Atp(Personalizer[AtpHyper]):
    name = "atp"
    title = "entropy minimisation with learned rates"
    Hyper = AtpHyper

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        if training.heterogeneous:
            return "it learns rates for the tensors of one architecture"
        return super().why_not(training) or no_steps(training)

    def needs(self) -> tuple[Need, ...]:
        return (Need.of(Rates, self, after=()),)

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        alpha = fitted(published, f"{Rates.key}.{self.name}")["alpha"]
        theta = self.training.start(published, client, memory)
        before, total, gradient = summed_gradient(entropy, self.training.logits, theta, client.x)
        adapted = stepped(theta, gradient, alpha / len(client.x))
        logits = all_logits(self.training.logits, adapted, client.x)
        diary = Diary(
            entropy=[total.item() / len(client.x), entropy(logits).mean().item()],
            steps=1,
            decision="one step down the entropy, at learned rates",
        )
        return Personalized(before, logits, Predictor(self.training, [adapted]), diary)


def stepped(theta: State, gradient: State, rates: Tensor) -> State:
    """theta after a step; buffers stay."""
    return theta | {
        name: theta[name] - rate * u for (name, u), rate in zip(gradient.items(), rates.tolist(), strict=True)
    }


class Rates(Fit):
    """A rate for each parameter tensor."""

    key = "rates"
    split = "train"
    personalizer: Atp

    def __init__(self, personalizer: Atp, given: CrossFitted) -> None:
        super().__init__(personalizer, given)
        self.hyper = personalizer.hyper
        self.rounds = self.hyper.rounds  # type: ignore[misc]

    def init(self, generator: torch.Generator) -> State:
        return {"alpha": torch.zeros(len(self.training.model.shapes), dtype=torch.float64)}

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase(self.step, self.hyper.iterations, 64),)

    def begin(self, server: State, memory: State, client: Client) -> State:
        return {"alpha": server["alpha"].clone()}

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        alpha, logits = carry["alpha"], self.training.logits
        theta = self.training.start(self.given.published, Unlabelled(0, batch.x), None)
        _, _, summed = summed_gradient(entropy, logits, theta, batch.x)
        u = {name: value / len(batch.x) for name, value in summed.items()}
        adapted = stepped(theta, u, alpha)
        _, loss, slope = summed_gradient(
            lambda z: torch.nn.functional.cross_entropy(z, batch.y, reduction="none"), logits, adapted, batch.x
        )
        gains = [(slope[name] * u[name]).sum().item() / len(batch.x) / math.sqrt(u[name].numel()) for name in u]
        return {"alpha": alpha + self.hyper.rate * torch.tensor(gains, dtype=torch.float64)}, loss / len(batch.x)

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        return carry, {}

    def aggregate(self, server: State, total: Total, round: int) -> State:
        return {"alpha": total["alpha"] / total.count}

    def facts(self, server: State) -> dict[str, float]:
        alpha = server["alpha"]
        return {"least": alpha.min().item(), "largest": alpha.max().item()}

    def fitted(self, server: State, fit: int) -> State:
        return {"alpha": server["alpha"]}
