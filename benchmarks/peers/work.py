"""What all contenders share: the clients' data, the batches, the models, and the pipe by which they are told to work.

It needs nothing but PyTorch, for it is imported in every contender's own environment. A work folder has the data as
plain binary files, which all processes map into memory, so that they are there once:

    work.json    the fields of `Work`
    x, y         float32 [clients, samples, *shape] and int64 [clients, samples]: each client's samples, normalized
    pixels       uint8, the same before normalization: what upfl reads
    order        int64 [clients, iterations, batch]: the samples of each batch of a round
    start        float32: the initial parameters, psi and then (fedtta) phi, one after another

upfl draws a new order each round. The others take the first round's in all of them, which is no more work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]
Method = Literal["fedavg", "fedtta"]


@dataclass(frozen=True)
class Work:
    """A federation and what to do in a round. The rates are such that nothing diverges in a hundred rounds."""

    model: Literal["convnet", "mlp", "module"]  # the last is the ConvNet as a torch.nn.Module, in upfl, too
    method: Method
    clients: int = 50
    iterations: int = 20
    batch: int = 64
    samples: int = 512  # of each client, a multiple of the batch
    lr: float = 0.02
    inner_lr: float = 0.05  # from here on fedtta's alone
    adapt_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 10.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1, 28, 28) if self.model == "mlp" else (3, 32, 32)

    def save(self, folder: Path) -> None:
        (folder / "work.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def open(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text()))


class Data:
    """A work folder's files."""

    def __init__(self, folder: Path) -> None:
        self.work = work = Work.open(folder)
        self.x = mapped(folder / "x", (work.clients, work.samples, *work.shape))
        self.y = mapped(folder / "y", (work.clients, work.samples), torch.int64)
        self.order = mapped(folder / "order", (work.clients, work.iterations, work.batch), torch.int64)
        self.start = mapped(folder / "start", ((folder / "start").stat().st_size // 4,))

    def batches(self, client: int) -> Iterator[Pair]:
        """A round's batches, each gathered when it is asked for."""
        for chosen in self.order[client]:
            yield self.x[client][chosen], self.y[client][chosen]

    def round(self, client: int) -> Pair:
        """All batches of a round, one after another."""
        chosen = self.order[client].flatten()
        return self.x[client][chosen], self.y[client][chosen]

    def models(self) -> list[nn.Module]:
        """psi, and for fedtta phi, as they are before the first round."""
        models: list[nn.Module] = [MLP(784, 200, 200, 10) if self.work.model == "mlp" else ConvNet()]
        if self.work.method == "fedtta":
            models.append(MLP(10, 32, 32, 32, 1))
        unpack(self.start, models)
        return models


@cache
def opened(folder: Path) -> Data:
    """A work folder's files, opened once in each process: for contenders that keep nothing between clients."""
    return Data(folder)


def mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, write: bool = False) -> Tensor:
    """A file as a tensor; one that is to be written is made."""
    return torch.from_file(str(path), shared=write, size=torch.Size(shape).numel(), dtype=dtype).view(shape)


def pack(models: list[nn.Module]) -> Tensor:
    return torch.cat([value.detach().flatten() for model in models for value in model.state_dict().values()])


def unpack(flat: Tensor, models: list[nn.Module]) -> None:
    values = [value for model in models for value in model.state_dict().values()]
    parts = torch.split_with_sizes(flat, [value.numel() for value in values])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view(value.shape))


class ConvNet(nn.Module):
    """upfl's ConvNet as most would write it, but for pooling before the rectifier: the same model in less time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(64 * 8 * 8, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class MLP(nn.Sequential):
    """Linear layers with rectifiers between them."""

    def __init__(self, *sizes: int) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(len(sizes) - 1):
            layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
        super().__init__(*layers[:-1])


def train(model: nn.Module, batches: Iterator[Pair], lr: float) -> None:
    """A client's local training, as everybody writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Pipe:
    """The contender's end: JSON lines, commands in by standard input, answers out by what was standard output.

    What libraries print goes to standard error from here on.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._save: str | None = None

    def ready(self, note: str = "") -> None:
        """Say that rounds can begin, and what a reader of the results should know."""
        self._tell({"ready": True, "note": note})

    def wait(self) -> None:
        """Until a round is wanted; ends the process where none is any more."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self._save = json.loads(line).get("save")

    def done(self, parameters: Tensor, **facts: Any) -> None:
        """The round is done; the new parameters go into a file if that was asked for."""
        if self._save:
            mapped(Path(self._save), tuple(parameters.shape), write=True).copy_(parameters)
        self._tell({"done": True, **facts})

    def _tell(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
