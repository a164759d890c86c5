"""Rounds over clients: pure functions over named tensors.

A round is a fold over its clients. For each client that takes part:

    carry = begin(server, memory, client)          what the client works on
    carry, loss = step(carry, batch, round)        once for each batch of each phase
    up, memory = finish(server, carry, client)     what goes up, what the client keeps

and then, once, `server = aggregate(server, total, round)`, where `total` is the sum of what went up. The sum is all the
server ever sees of the clients, so partial sums can be formed anywhere and merged in any order. A client that is left
out changes neither the sum nor its memory.

`step` does no I/O, keeps no state of its own and has no Python branch that depends on data or on the round, so it can
be vectorized over clients, and recorded. It may change the tensors of the carry in place: `begin` makes them the
client's own.

What these functions and personalizers receive is aligned (`state.aligned`): `Batch`, `Unlabelled` and `Published` see
to it, the engine does for the server's state, memories and carries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from upfl.contract.clients import Batch, Client, Split
from upfl.state import State


class Hyper(BaseModel):
    """Hyper-parameters, beside the method that uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Step = Callable[[State, Batch, int], tuple[State, Tensor]]


@dataclass(frozen=True)
class Noise:
    """Random numbers that a step needs for each sample: drawn by the engine, so that `step` stays a pure function."""

    kind: Literal["normal", "uniform"]
    size: int


@dataclass(frozen=True)
class Phase:
    """A part of a client's round: so many batches of a split, each given to `step`."""

    step: Step
    iterations: int | None  # where None, one pass over the split, in order
    batch_size: int
    split: Split = "train"
    noise: Mapping[str, Noise] = field(default_factory=dict)
    cost: float = 1.0  # gradient evaluations in a step: forward and backward passes of the prediction model


class Total(Mapping[str, Tensor]):
    """The sum of what the clients sent, and how many they were."""

    count: int

    @abstractmethod
    def mean(self, name: str) -> Tensor:
        """The entry divided by the sum of the entry `weight`, in the type in which it was sent."""


H = TypeVar("H", bound=Hyper)


class Stage(ABC, Generic[H]):
    """Rounds over clients, as the engine runs them: a training, or what is fitted over a trained model."""

    vectorizes: ClassVar[bool] = False  # whether its steps are tested under torch.func.vmap
    records: ClassVar[bool] = False  # whether its steps may be recorded: this very class's word, which is not inherited
    remembers: ClassVar[bool] = False  # whether clients keep a memory between rounds
    scales: ClassVar[Mapping[str, int]] = {}  # fixed-point bits of what goes up, by name; 40 where silent

    @abstractmethod
    def init(self, generator: torch.Generator) -> State:
        """The server's state before the first round."""

    def memory(self, client: Client) -> State:
        """What a client remembers before it first takes part: a function of the seed and the client."""
        return {}

    def form(self, round: int) -> str:
        """Of what form goes up: rounds with the same answer send the same names, shapes and types."""
        return ""

    @abstractmethod
    def phases(self, round: int) -> tuple[Phase, ...]: ...

    @abstractmethod
    def begin(self, server: State, memory: State, client: Client) -> State: ...

    @abstractmethod
    def finish(self, server: State, carry: State, client: Client) -> tuple[Mapping[str, Tensor], State]:
        """(what goes up, what the client keeps)"""

    def checked(self, up: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a client sent, unless no client can have come to that: `BadClientError`."""
        return up

    @abstractmethod
    def aggregate(self, server: State, total: Total, round: int) -> State:
        """The server's next state. The old one is used up: a training with a large state may change it in place."""
