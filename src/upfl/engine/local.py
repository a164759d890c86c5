"""A client's round: what every engine does with a client, whoever it belongs to and wherever the sum is formed.

Several clients may train side by side as one vectorized step (torch.func.vmap over stacked carries and padded batches).
That pays on a device that is fast at large operations and slow to start small ones. On a CPU it is slower: the copies
of the parameters leave the cache.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from upfl.contract import Batch, Training
from upfl.engine.clients import AHEAD, LocalClient
from upfl.engine.recorded import Steps, as_written
from upfl.errors import BadClientError
from upfl.randomness import default_generator
from upfl.state import Factored, State, all_aligned

LOSS = "engine.loss"  # the engine's own entry in the sum


def train_client(
    training: Training[Any], server: State, memory: State, client: LocalClient
) -> tuple[Mapping[str, Tensor], State]:
    """What a client sends up, its mean loss among it, and what it will remember if the round counts."""
    (result,) = train_clients(training, server, [memory], [client])
    if isinstance(result, BadClientError):
        raise result
    return result


def train_clients(
    training: Training[Any],
    server: State,
    memories: Sequence[State],
    clients: Sequence[LocalClient],
    steps: Steps = as_written,
) -> list[tuple[Mapping[str, Tensor], State] | BadClientError]:
    """The same for several clients, side by side; in a client's place the reason why it is left out."""
    server = all_aligned(server)
    carries = [
        all_aligned(training.begin(server, all_aligned(memory), client))
        for memory, client in zip(memories, clients, strict=True)
    ]
    round = clients[0].round
    if len(clients) > 1:
        trained = train_together(training, carries, clients, round)
    else:
        trained = [train_alone(training, carries[0], clients[0], round, steps)]
    results: list[tuple[Mapping[str, Tensor], State] | BadClientError] = []
    for client, (carry, loss) in zip(clients, trained, strict=True):
        if loss.isfinite():
            up, memory = training.finish(server, carry, client)
            results.append((with_loss(up, loss), memory))
        else:
            results.append(BadClientError("its loss is not finite"))
    return results


def upload_like(training: Training[Any], server: State, client: LocalClient) -> Mapping[str, Tensor]:
    """What a client sends, by name, shape and type: that of a client that has not trained."""
    up, _ = training.finish(server, training.begin(server, training.memory(client), client), client)
    return with_loss(up, torch.zeros((), dtype=torch.float64))


def with_loss(up: Mapping[str, Tensor], loss: Tensor) -> Mapping[str, Tensor]:
    more = {LOSS: loss}
    return Factored(up.whole | more, up.factors) if isinstance(up, Factored) else ChainMap(more, up)  # type: ignore[arg-type]


def train_alone(
    training: Training[Any], carry: State, client: LocalClient, round: int, steps: Steps = as_written
) -> tuple[State, Tensor]:
    """A client's carry after its phases, and its mean loss."""
    losses: list[Tensor] = []
    draws = any(model.random for model in training.client_models.values())
    with default_generator(client.seed, "step", client.id, round) if draws else nullcontext() as seed:
        for phase in training.phases(round):
            for batches in ahead(client.phase(phase)):
                if seed is None:
                    carry, some = steps(phase, carry, batches, round)
                    losses += some
                    continue
                for batch in batches:  # what a step draws depends neither on the worker nor on the steps before it
                    seed(len(losses))
                    carry, some = steps(phase, carry, [batch], round)
                    losses += some
    total = 0.0
    for loss in losses:
        total += loss.item()
    return carry, torch.tensor(total, dtype=torch.float64) / len(losses)


def ahead(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """The same batches, several made at once: a step leaves little in the cache of what makes them."""
    for first in batches:
        yield [first, *islice(batches, max(0, AHEAD // max(first.x.nbytes, 1) - 1))]


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
    return [
        (all_aligned({name: value[i] for name, value in carry.items()}), losses[i] / steps) for i in range(len(clients))
    ]


def stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def padded(batches: Sequence[Batch]) -> Batch:
    """Clients' batches along a new first dimension, filled up to the longest with samples that do not count."""
    size = max(len(batch.y) for batch in batches)
    masks = [batch.floats().fill_(1) if batch.mask is None else batch.mask for batch in batches]
    return Batch(
        torch.stack([_filled(batch.x, size) for batch in batches]),
        torch.stack([_filled(batch.y, size) for batch in batches]),
        torch.stack([_filled(mask, size) for mask in masks]),
        stacked([{name: _filled(value, size) for name, value in batch.noise.items()} for batch in batches]),
    )


def _filled(rows: Tensor, size: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
