"""FedTTA's training in double precision, for comparison with plain autograd."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.reference import Somebody
from upfl.contract import Batch
from upfl.randomness import generator
from upfl.state import State
from upfl.training.base import LocalTraining


def server_state(training: LocalTraining[Any], seed: int, dtype: torch.dtype = torch.float64) -> State:
    return {name: value.to(dtype) for name, value in training.init(generator(seed, "server")).items()}


def trained(
    training: LocalTraining[Any], server: State, batches: Sequence[Batch], round: int = 0
) -> tuple[State, list[float]]:
    """The server's entries after a client's steps, and the losses."""
    carry, losses = training.begin(server, {}, Somebody(round=round)), []
    with torch.no_grad():
        for batch in batches:
            carry, loss = training.step(carry, batch, round)
            losses.append(float(loss))
    return {name: carry[name].detach().clone() for name in server}, losses


def padded_batch(batch: Batch, extra: Batch) -> Batch:
    """The batch with other samples between its own, masked out."""
    order = torch.randperm(len(batch.x) + len(extra.x), generator=generator(9))
    return Batch(
        torch.cat([batch.x, extra.x])[order],
        torch.cat([batch.y, extra.y])[order],
        torch.cat([batch.x.new_ones(len(batch.x)), batch.x.new_zeros(len(extra.x))])[order],
    )
