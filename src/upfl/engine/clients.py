"""Clients as the engine serves them: a training client with its batches, a newcomer without its labels."""

import math
from collections.abc import Iterator, Mapping, Sequence
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

AHEAD = 2**22  # bytes of samples that are made at once, for steps to come


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
        count = len(self._indices(split))
        return self._read(split, list(torch.arange(count).split(size)) if count else [])  # type: ignore[no-untyped-call]

    def phase(self, phase: Phase) -> Iterator[Batch]:
        """The batches of a phase: a shuffled pass over the split that goes on across rounds.

        Batch number i = round * iterations + t is batch i mod B of pass i div B, so no iterator has to be remembered.
        """
        if phase.iterations is None:
            yield from self.batches(phase.split, phase.batch_size)
            return
        count, places = len(self._indices(phase.split)), list[Tensor]()
        in_pass = -(-count // phase.batch_size)
        order, order_of = torch.empty(0, dtype=torch.int64), -1
        for t in range(phase.iterations):
            number, within = divmod(self.round * phase.iterations + t, in_pass)
            if number != order_of:
                order = torch.randperm(count, generator=generator(self.seed, "epoch", self.id, number))
                order_of = number
            places.append(order[within * phase.batch_size : (within + 1) * phase.batch_size])
        noise = self.generator("noise") if phase.noise else None
        for batch in self._read(phase.split, places):
            yield replace(batch, noise=_drawn(phase.noise, batch, noise)) if noise else batch

    def _read(self, split: Split, places: Sequence[Tensor]) -> Iterator[Batch]:
        """The samples at some places of a split, a batch for each tensor of them; several batches are read at once."""
        indices = self._indices(split)
        angle = 0.0 if split == "public" else float(self.federation.training.angles[self.id])
        width = 4 * math.prod(self.federation.source.form.shape)
        # What turns images may compute many of them in another order than few.
        at_once = 1 if angle or not places else max(1, AHEAD // max(width * len(places[0]), 1))
        for start in range(0, len(places), at_once):
            some = places[start : start + at_once]
            sizes, wanted = [len(one) for one in some], indices[torch.cat(list(some)).numpy()]
            x = self.inputs.x(wanted, angle)
            y = torch.zeros(len(x), dtype=torch.int64, device=x.device) if split == "public" else self.inputs.y(wanted)
            for own, labels, index in zip(x.split(sizes), y.split(sizes), some, strict=True):  # type: ignore[no-untyped-call]
                yield Batch(own, labels, index=index.to(x.device))

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
