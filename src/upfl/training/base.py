"""What most trainings have in common: clients train locally by SGD, and the server takes the mean of their changes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Hyper, Phase, Published, Total, Training, Unlabelled
from upfl.state import State, contiguous, prefixed, select


class LocalHyper(Hyper):
    """What all local training by SGD has in common."""

    iterations: int = Field(20, ge=1, description="local iterations a round")
    batch_size: int = Field(64, ge=1)
    weight_decay: float = Field(1e-4, ge=0)
    clip: float = Field(10.0, gt=0, description="largest gradient norm of each model")
    decay: float = Field(0.99, gt=0, le=1, description="factor on every learning rate for ten rounds")
    aggregation: Literal["uniform", "samples"] = Field("uniform", description="a client's weight in the mean")

    def rate(self, rate: float, round: int) -> float:
        """A learning rate after `round` rounds."""
        factor: float = self.decay ** (round / 10)
        return rate * factor

    def weight(self, client: Client) -> float:
        """A client's weight in the mean."""
        # A power of two keeps weighted values within the range of the sum and cancels in the mean.
        return client.count / 1024 if self.aggregation == "samples" else 1.0


L = TypeVar("L", bound=LocalHyper)


class LocalTraining(Training[L]):
    """Clients start from the server's models, train locally, send the change; the server adds the mean change.

    psi, and phi where there is one, live in the state under these names: newcomers receive these and nothing else.
    """

    def init(self, generator: torch.Generator) -> State:
        return prefixed("psi", self.model.init(generator))

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase(self.step, self.hyper.iterations, self.hyper.batch_size, cost=self.step_cost),)

    @property
    def step_cost(self) -> float:
        """Gradient evaluations in a step. One is three matrix products a layer: forward, and backward to both sides."""
        return 1.0

    def begin(self, server: State, memory: State, client: Client) -> State:
        return self.carry(server)

    def received(self, server: State) -> State:
        """The model that a client begins from, for a carry whose steps are drawn back to it."""
        return prefixed("received", self.model.layout(select(server, "psi")))

    def carry(self, models: State) -> State:
        """A copy of models to train, and what the steps need beside them."""
        return self.model.layout({name: value.clone() for name, value in models.items()})

    @abstractmethod
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        """One local step: the new carry and the batch's loss."""

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        weight = self.hyper.weight(client)
        change = {name: (carry[name] - value).mul_(weight) for name, value in server.items()}
        return contiguous(change) | {"weight": torch.tensor(weight)}, {}

    def aggregate(self, server: State, total: Total, round: int) -> State:
        return {name: value + total.mean(name).to(value) for name, value in server.items()}

    def publish(self, server: State) -> State:
        return {name: value for name, value in server.items() if name.startswith(("psi.", "phi."))}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        return self.model.layout(select(published.state, "psi"))
