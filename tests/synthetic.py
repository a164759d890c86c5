"""A federation whose truth is known: the inputs are the logits, and the model passes them on.

Samples of class c are x ~ N(d e_c, 1), so that z_c = log pi_c + d x_c are the logits of the exact posterior under the
class frequencies pi. A client with a mix of its own is pure label shift; `bent` inputs are feature shift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.contract import CrossFitted, Personalizer, Published, Task
from upfl.data.federation import Clients, Federation
from upfl.data.forms import Pixels
from upfl.data.inputs import Inputs
from upfl.data.source import Source
from upfl.engine.clients import Population
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.methods import make_personalizer, personalizer_class
from upfl.models import mlp
from upfl.training.fedavg import FedAvg, FedAvgHyper

Floats = NDArray[np.float64]


class Given(Inputs):
    """Inputs that are given, not read from images."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.given, self.truth = x, y

    def x(self, indices: NDArray[np.int64], angle: float = 0.0) -> Tensor:
        return self.given[torch.from_numpy(indices)]

    def y(self, indices: NDArray[np.int64]) -> Tensor:
        return self.truth[torch.from_numpy(indices)]


@dataclass(frozen=True)
class World:
    """Training clients, whose samples but one are for validation, new clients, and a model that repeats its input."""

    logits: list[Tensor]  # of each training client's validation samples
    labels: list[Tensor]
    new_logits: list[Tensor]
    new_labels: list[Tensor]
    trained: list[Tensor] | None = None  # the label of each one's sample that is not for validation; its first's

    @property
    def classes(self) -> int:
        return self.logits[0].shape[1]

    def training(self) -> FedAvg:
        return FedAvg(Task(mlp(self.classes, (), self.classes), self.classes, len(self.logits)), FedAvgHyper())

    def published(self, **fitted: Tensor) -> Published:
        state = {"psi.fc1.weight": torch.eye(self.classes), "psi.fc1.bias": torch.zeros(self.classes)}
        return Published(state, 1, fitted=fitted)

    def federation(self) -> tuple[Federation, Given]:
        trained = self.trained or [y[:1] for y in self.labels]
        padded = (
            [torch.cat([z[:1], z]) for z in self.logits],
            [torch.cat([first, y]) for first, y in zip(trained, self.labels, strict=True)],
        )
        x, y = torch.cat([*padded[0], *self.new_logits]), torch.cat([*padded[1], *self.new_labels])
        train, new = _clients(padded[0], 0, 1), _clients(self.new_logits, sum(map(len, padded[0])), 0)
        names = tuple(map(str, range(self.classes)))
        pixels = np.zeros((len(x), 1, 1, 1), np.uint8)
        form = Pixels(shape=(1, 1, 1), scale=255.0, mean=(0.0,), std=(1.0,))
        source = Source("synthetic", pixels, y.numpy(), names, len(y), None, form)
        return Federation(source, train, new, np.empty(0, np.int64), ()), Given(x, y)

    def personalizer(self, name: str, **hyper: Any) -> Personalizer[Any]:
        return make_personalizer(name, self.training(), personalizer_class(name).Hyper(**hyper))

    def fit(self, *personalizers: Personalizer[Any] | str, group: Group | None = None) -> CrossFitted:
        """What these personalizers need, fitted over the training clients."""
        made = [self.personalizer(one) if isinstance(one, str) else one for one in personalizers]
        federation, inputs = self.federation()
        return fit_needs(made, self.published(), Population(federation, inputs, 0), group or Group())[0]

    def relabelled(self, client: int, labels: Tensor) -> World:
        """The same clients, of whom one has other labels for validation; those that it trained on stay."""
        labels_of = [*self.labels[:client], labels, *self.labels[client + 1 :]]
        return replace(self, labels=labels_of, trained=[y[:1] for y in self.labels])


def _clients(held: Sequence[Tensor], start: int, train: int) -> Clients:
    sizes = [len(one) for one in held]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    indices = np.arange(start, start + offsets[-1])
    return Clients(indices, offsets, np.full(len(held), train), np.zeros(len(held)))


Bend = Callable[[Tensor, Tensor], Tensor]  # logits and labels of a client -> the logits that its inputs give instead


def draw(rng: np.random.Generator, mix: Floats, samples: int, prior: Floats, apart: float) -> tuple[Tensor, Tensor]:
    """A client's logits, exact posteriors under the prior, and labels."""
    y = rng.choice(len(mix), samples, p=mix)
    x = rng.normal(size=(samples, len(mix)))
    x[np.arange(samples), y] += apart
    return torch.tensor(np.log(prior) + apart * x).float(), torch.tensor(y)


def world(
    mixes: Sequence[Floats],
    new_mixes: Sequence[Floats],
    samples: int = 40,
    apart: float = 2.0,
    seed: int = 0,
    bend: Bend = lambda z, y: z,
) -> World:
    """Training clients and new ones with these mixes of classes."""
    rng = np.random.default_rng(seed)
    prior = np.mean(mixes, 0)

    def some(wanted: Sequence[Floats]) -> tuple[list[Tensor], list[Tensor]]:
        drawn = [draw(rng, mix, samples, prior, apart) for mix in wanted]
        return [bend(z, y) for z, y in drawn], [y for _, y in drawn]

    return World(*some(mixes), *some(new_mixes))


def even(classes: int) -> Floats:
    return np.full(classes, 1 / classes)


def pairs(classes: int, clients: int) -> list[Floats]:
    """Clients that hold two classes each: i and i + 1, in turn."""
    mixes = [np.zeros(classes) for _ in range(clients)]
    for i, mix in enumerate(mixes):
        mix[[i % classes, (i + 1) % classes]] = 0.5
    return mixes
