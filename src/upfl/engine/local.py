"""A client's round: what every engine does with one client, whoever it belongs to and wherever the sum is formed."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from upfl.engine.clients import LocalClient
from upfl.errors import BadClientError
from upfl.state import State
from upfl.training.base import Training

LOSS = "engine.loss"  # the engine's own entry in the sum


def train_client(
    training: Training[Any], server: State, memory: State, client: LocalClient
) -> tuple[Mapping[str, Tensor], State]:
    """What a client sends up, its mean loss among it, and what it will remember if the round counts."""
    carry = training.begin(server, memory, client)
    losses = torch.zeros((), dtype=torch.float64)
    steps = 0
    for phase in training.phases(client.round):
        for batch in client.phase(phase):
            carry, loss = phase.step(carry, batch, client.round)
            losses += loss.detach().cpu()
            steps += 1
    if not losses.isfinite():
        raise BadClientError("its loss is not finite")
    up, memory = training.finish(server, carry, client)
    return with_loss(up, losses / steps), memory


def upload_like(training: Training[Any], server: State, client: LocalClient) -> Mapping[str, Tensor]:
    """What a client sends, by name, shape and type: that of a client that has not trained."""
    up, _ = training.finish(server, training.begin(server, training.memory(client), client), client)
    return with_loss(up, torch.zeros((), dtype=torch.float64))


def with_loss(up: Mapping[str, Tensor], loss: Tensor) -> Mapping[str, Tensor]:
    return ChainMap({LOSS: loss}, up)  # type: ignore[arg-type]
