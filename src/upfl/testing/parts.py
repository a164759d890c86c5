"""What the checks are made of: a small federation with a training, comparisons, and errors in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upfl.config import Config, configure
from upfl.contract import CrossFitted, Personalizer, Published, Training
from upfl.contract.personalizer import LEAST_CLIENTS
from upfl.data import Federation
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient, Population
from upfl.engine.fold import FixedPointSum
from upfl.engine.local import train_client
from upfl.engine.setup import assemble
from upfl.methods import make_personalizer, personalizer_class, resolve, training_class
from upfl.randomness import generator
from upfl.state import State


class CheckError(AssertionError):
    """What does not hold, in words."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise CheckError(message)


@dataclass(frozen=True)
class Parts:
    """A training in a small federation, before its first round."""

    config: Config
    federation: Federation
    inputs: Inputs
    training: Training[Any]
    personalizers: Mapping[str, Personalizer[Any]]
    server: State
    given: CrossFitted

    def client(self, id: int, round: int = 0) -> LocalClient:
        return self.population.training(id, round)

    @property
    def population(self) -> Population:
        return Population(self.federation, self.inputs, self.config.seed)

    @property
    def published(self) -> Published:
        return self.given.published

    def memory(self, id: int) -> State | None:
        return self.training.memory(self.client(id)) if self.training.remembers else None


def small(training: str, model: Any = None, settings: Sequence[str] = (), score: Sequence[str] = ()) -> Config:
    """A run of a second or a few: digits, as many clients of each kind as a correction must have been fitted on.

    Some gradients are clipped.
    """
    short = {
        "iterations": 3,
        "batch_size": 16,
        "clip": 0.3,
        "digest_epochs": 1,
        "newcomer_epochs": 1,
        "digest_batch": 10,
    }
    known = training_class(resolve(training)[0]).Hyper.model_fields
    return configure(
        training,
        "digits",
        profile="smoke",
        settings=[*(f"{key}={value}" for key, value in short.items() if key in known), *settings],
        score=score,
        model=model,
        rounds=2,
        clients_per_round=4,
        evaluate_every=1,
        evaluate_clients=2,
        partition={"clients": 2 * LEAST_CLIENTS[0]},
    )


def parts_of(config: Config, personalizers: Iterable[str] = ()) -> Parts:
    setup = assemble(config)
    training = setup.training
    made = {name: make_personalizer(name, training, personalizer_class(name).Hyper()) for name in personalizers}
    server = training.init(generator(0, "init"))
    clients = range(setup.clients) if training.publishes_memory else ()
    published = Published(training.publish(server), 3, [training.memory(setup.client(i, 0)) for i in clients])
    return Parts(config, setup.federation, setup.inputs, training, made, server, CrossFitted(published))


def train_one(training: Training[Any], server: State, memory: State, client: LocalClient) -> tuple[State, State]:
    """A client's round: what goes up, what the client keeps."""
    with torch.no_grad():
        up, kept = train_client(training, server, memory, client)
    return dict(up), kept


def folded(training: Training[Any], server: State, clients: Iterable[LocalClient]) -> FixedPointSum:
    """The sum of what clients send in their first round."""
    ups = [train_one(training, server, training.memory(client), client)[0] for client in clients]
    total = FixedPointSum(ups[0], len(ups), training.scales)
    for up in ups:
        total.add(up)
    total.merged()
    return total


def snapshot(state: Mapping[str, Tensor]) -> State:
    return {name: value.clone() for name, value in state.items()}


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> None:
    require(ours.keys() == theirs.keys(), f"{what}: other names: {sorted(ours.keys() ^ theirs.keys())}")
    for name, value in theirs.items():
        same = ours[name].dtype == value.dtype and torch.equal(ours[name], value)
        require(same, f"{what}: '{name}' has other bits")


def storable(state: Mapping[str, Tensor], what: str) -> None:
    """Contiguous; floating-point values single precision and finite."""
    for name, value in state.items():
        require(value.is_contiguous(), f"{what}: '{name}' is not contiguous")
        require(not value.requires_grad, f"{what}: '{name}' requires a gradient; detach it")
        allowed = (torch.float32,) if value.is_floating_point() else (torch.int64,)
        require(value.dtype in allowed, f"{what}: '{name}' is of type {value.dtype}")
        require(not value.is_floating_point() or value.isfinite().all(), f"{what}: '{name}' is not finite")
