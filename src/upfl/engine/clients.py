"""Clients as the engine serves them: a training client with its batches, a newcomer without its labels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.contract import Batch, Noise, Phase, Split, Unlabelled
from upfl.data.federation import Federation
from upfl.data.inputs import Inputs
from upfl.randomness import generator
from upfl.state import State


@dataclass(frozen=True)
class LocalClient:
    """A training client in a round."""

    federation: Federation
    inputs: Inputs
    seed: int
    id: int
    round: int

    @property
    def architecture(self) -> str:
        return self.federation.architecture("training", self.id)

    @property
    def count(self) -> int:
        return len(self._indices("train"))

    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.seed, "client", self.round, self.id, purpose)

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        indices = self._indices(split)
        for start in range(0, len(indices), size):
            places = torch.arange(start, min(start + size, len(indices)))
            yield self._batch(indices, places, split)

    def phase(self, phase: Phase) -> Iterator[Batch]:
        """The batches of a phase: a shuffled pass over the split that goes on across rounds.

        Batch number i = round * iterations + t is batch i mod B of pass i div B, so no iterator has to be remembered.
        """
        if phase.iterations is None:
            yield from self.batches(phase.split, phase.batch_size)
            return
        indices = self._indices(phase.split)
        in_pass = -(-len(indices) // phase.batch_size)
        order, order_of = torch.empty(0, dtype=torch.int64), -1
        noise = self.generator("noise") if phase.noise else None
        for t in range(phase.iterations):
            number, within = divmod(self.round * phase.iterations + t, in_pass)
            if number != order_of:
                order = torch.randperm(len(indices), generator=generator(self.seed, "epoch", self.id, number))
                order_of = number
            start = within * phase.batch_size
            batch = self._batch(indices, order[start : start + phase.batch_size], phase.split)
            yield replace(batch, noise=_drawn(phase.noise, batch, noise)) if noise else batch

    def _batch(self, indices: NDArray[np.int64], places: Tensor, split: Split) -> Batch:
        """The samples at some places of a split, whose samples are at `indices` of the source."""
        wanted = indices[places.numpy()]
        angle = 0.0 if split == "public" else float(self.federation.training.angles[self.id])
        x = self.inputs.x(wanted, angle)
        y = torch.zeros(len(x), dtype=torch.int64, device=x.device) if split == "public" else self.inputs.y(wanted)
        return Batch(x, y, index=places.to(x.device))

    def _indices(self, split: Split) -> NDArray[np.int64]:
        if split == "public":
            return self.federation.public
        clients = self.federation.training
        return clients.train(self.id) if split == "train" else clients.validation(self.id)


def _drawn(wanted: Mapping[str, Noise], batch: Batch, source: torch.Generator) -> State:
    draw = {"normal": torch.randn, "uniform": torch.rand}
    return {
        name: draw[noise.kind](len(batch.x), noise.size, generator=source).to(batch.x.device)
        for name, noise in wanted.items()
    }


@dataclass(frozen=True)
class Population:
    """The clients of a run: those that train, in a round, and everybody without labels."""

    federation: Federation
    inputs: Inputs
    seed: int

    def training(self, id: int, round: int = 0) -> LocalClient:
        return LocalClient(self.federation, self.inputs, self.seed, id, round)

    def validating(self, id: int) -> Unlabelled:
        """A training client's validation inputs, as unlabelled as a newcomer's."""
        clients, kind = self.federation.training, self.federation.architecture("training", id)
        return Unlabelled(id, self.inputs.x(clients.validation(id), float(clients.angles[id])), self.seed, kind)

    def newcomer(self, id: int) -> Unlabelled:
        """A new client's inputs. Its labels stay here: a personalizer's client has no place for them."""
        clients, kind = self.federation.new, self.federation.architecture("new", id)
        return Unlabelled(id, self.inputs.x(clients.all(id), float(clients.angles[id])), self.seed, kind)

    def newcomer_labels(self, id: int) -> Tensor:
        """What a new client's predictions are compared with afterwards."""
        return self.inputs.y(self.federation.new.all(id))
