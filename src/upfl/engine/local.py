"""Clients' local steps: one client after another, or several side by side as one vectorized step.

Side by side (torch.func.vmap over stacked carries and padded batches) pays on a device that is fast at large operations
and slow to start small ones. On a CPU it is slower: the copies of the parameters leave the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from upfl.engine.clients import LocalClient
from upfl.state import State
from upfl.training.base import Batch, Training


def train(
    training: Training[Any], carries: Sequence[State], clients: Sequence[LocalClient], round: int
) -> list[tuple[State, Tensor]]:
    """Every client's carry after its phases, and its mean loss."""
    if len(clients) > 1:
        return train_together(training, carries, clients, round)
    carry, losses, steps = carries[0], torch.zeros((), dtype=torch.float64), 0
    for phase in training.phases(round):
        for batch in clients[0].phase(phase):
            carry, loss = phase.step(carry, batch, round)
            losses += loss.detach().cpu()
            steps += 1
    return [(carry, losses / steps)]


def train_together(
    training: Training[Any], carries: Sequence[State], clients: Sequence[LocalClient], round: int
) -> list[tuple[State, Tensor]]:
    carry = stacked(carries)
    losses, steps = torch.zeros(len(clients), dtype=torch.float64), 0
    for phase in training.phases(round):

        def step(carry: State, x: Tensor, y: Tensor, mask: Tensor, noise: State) -> tuple[State, Tensor]:
            return phase.step(carry, Batch(x, y, mask, noise), round)  # noqa: B023 - called within its turn of the loop

        for batches in zip(*(client.phase(phase) for client in clients), strict=True):
            batch = padded(batches)
            carry, loss = vmap(step)(carry, batch.x, batch.y, batch.mask, batch.noise)  # type: ignore[arg-type]
            losses += loss.detach().cpu()
            steps += 1
    return [({name: value[i] for name, value in carry.items()}, losses[i] / steps) for i in range(len(clients))]


def stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def padded(batches: Sequence[Batch]) -> Batch:
    """Clients' batches along a new first dimension, filled up to the longest with samples that do not count."""
    size = max(len(batch.y) for batch in batches)
    masks = [batch.x.new_ones(len(batch.y)) if batch.mask is None else batch.mask for batch in batches]
    return Batch(
        torch.stack([_filled(batch.x, size) for batch in batches]),
        torch.stack([_filled(batch.y, size) for batch in batches]),
        torch.stack([_filled(mask, size) for mask in masks]),
        stacked([{name: _filled(value, size) for name, value in batch.noise.items()} for batch in batches]),
    )


def _filled(rows: Tensor, size: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
