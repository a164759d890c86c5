"""A client's round by the contract, and small whole runs."""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.params import doubled
from tests.reference import Somebody
from tests.runs import Outcome, ran
from upfl.config import Config, configure
from upfl.contract import Batch, Client, Split, Training
from upfl.engine.fold import FixedPointSum
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.state import State

MLP = mlp(784, (200, 200), 10)  # MNIST's
CIFAR10 = convnet((3, 32, 32), 10)
FEMNIST = convnet((1, 28, 28), 62, hidden=2048)


@dataclass(frozen=True)
class Holder(Somebody):
    """A client with samples."""

    own: Batch | None = None

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        assert self.own is not None
        assert split == "train"
        for start in range(0, len(self.own.y), size):
            yield Batch(self.own.x[start : start + size], self.own.y[start : start + size])


def holder(own: Batch, id: int = 0, round: int = 0) -> Holder:
    return Holder(count=len(own.y), id=id, round=round, own=own)


def double_server(training: Training[Any], seed: int = 1) -> State:
    return doubled(training.init(generator(seed, "server")))


def local_round(
    training: Any, server: State, memory: State, client: Client, batches: Sequence[Batch]
) -> tuple[Mapping[str, Tensor], State, list[float]]:
    """What goes up, what is kept, the losses."""
    carry, losses = _steps(training, server, memory, client, batches)
    with torch.no_grad():
        up, kept = training.finish(server, carry, client)
    return up, kept, losses


def trained(training: Any, server: State, batches: Sequence[Batch], round: int = 0) -> tuple[State, list[float]]:
    """The server's entries after a client's steps, and the losses."""
    carry, losses = _steps(training, server, {}, Somebody(round=round), batches)
    return {name: carry[name].detach().clone() for name in server}, losses


def _steps(
    training: Any, server: State, memory: State, client: Client, batches: Sequence[Batch]
) -> tuple[State, list[float]]:
    carry, losses = training.begin(server, memory, client), []
    with torch.no_grad():
        for batch in batches:
            carry, loss = training.step(carry, batch, client.round)
            losses.append(float(loss))
    return carry, losses


def total_of(training: Training[Any], ups: Sequence[Mapping[str, Tensor]]) -> FixedPointSum:
    total = FixedPointSum(ups[0], len(ups), training.scales)
    for up in ups:
        total.add(up)
    return total


def small_config(method: str, *settings: str, **options: Any) -> Config:
    """Six training clients of digits, four of them a round, four rounds; some gradients are clipped."""
    scale: dict[str, Any] = {
        "rounds": 4,
        "clients_per_round": 4,
        "evaluate_every": 2,
        "evaluate_clients": 3,
        "model": {"hidden": 16},
        "partition": {"clients": 12},
    }
    common = ("iterations=3", "batch_size=16", "clip=0.5", "lr=0.2")
    return configure(method, "digits", profile="smoke", settings=(*common, *settings), **(scale | options))


def small_run(path: Path, method: str, *settings: str, **options: Any) -> Outcome:
    return ran(small_config(method, *settings, **options), path)


def scores(run: Outcome) -> list[Any]:
    """Losses and accuracies, under whatever row's name."""
    return [(line["loss"], list(line.get("rows", {}).values())) for line in run.metrics]


def noisy(batch: Batch, training: Training[Any], seed: int) -> Batch:
    """The batch with the noise that the training's phase asks for."""
    (phase,) = training.phases(0)
    (name,) = phase.noise
    wanted = phase.noise[name]
    draw = {"normal": torch.randn, "uniform": torch.rand}[wanted.kind]
    drawn = draw(len(batch.y), wanted.size, generator=generator(seed, "noise"), dtype=torch.float64)
    return Batch(batch.x, batch.y, batch.mask, {name: drawn})


def listen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The names in what clients send, and how often each was sent, from here on."""
    sent: Counter[str] = Counter()
    add = FixedPointSum.add

    def listening(self: FixedPointSum, up: Mapping[str, Tensor]) -> None:
        sent.update(list(up))
        add(self, up)

    monkeypatch.setattr(FixedPointSum, "add", listening)
    return sent


def tensor_bytes() -> int:
    """The bytes of all tensors that Python objects hold."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
