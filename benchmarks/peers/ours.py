"""upfl: its engine as `upfl train` runs it, checkpoint and metrics of each round included, on given data.

python -m benchmarks.peers.ours FOLDER [--workers N] [--first-order]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.work import ConvNet, Pipe, Work, mapped
from benchmarks.workers import following, leading
from upfl.config import Config, configure
from upfl.contract import Phase
from upfl.data.federation import Clients, Federation
from upfl.data.forms import Pixels
from upfl.data.inputs import Inputs
from upfl.data.source import Source
from upfl.engine.clients import LocalClient
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine, Observer
from upfl.engine.setup import assemble
from upfl.randomness import generator
from upfl.training.base import LocalTraining

CLASSES = 10


def prepare(work: Work, folder: Path) -> None:
    """Make a work folder: random images, labels, batches and weights."""
    rng = np.random.default_rng(0)
    count, channels = work.clients * work.samples, work.shape[0]
    rng.integers(0, 256, (count, *work.shape), np.uint8).tofile(folder / "pixels")
    rng.integers(0, CLASSES, count).tofile(folder / "y")
    work.save(folder)
    federation = given(work, folder)
    inputs = Inputs(federation.source)
    x = mapped(folder / "x", (work.clients, work.samples, channels, *work.shape[1:]), write=True)
    order = mapped(folder / "order", (work.clients, work.iterations, work.batch), torch.int64, write=True)
    phase = Phase(LocalTraining.step, work.iterations, work.batch)  # type: ignore[arg-type]
    for client in range(work.clients):
        x[client] = inputs.x(federation.training.train(client))
        for t, batch in enumerate(LocalClient(federation, inputs, 0, client, 0).phase(phase)):
            assert batch.index is not None
            order[client, t] = batch.index
    engine = Engine.local(RunFolder(folder), setup=assemble(configured(work), federation))
    start = packed(engine.training.init(generator(0, "init")))
    mapped(folder / "start", tuple(start.shape), write=True).copy_(start)


def given(work: Work, folder: Path) -> Federation:
    """The federation of a work folder: all samples are for training."""
    count = work.clients * work.samples
    pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=(count, *work.shape))
    labels = np.fromfile(folder / "y", np.int64)
    names, channels = tuple(map(str, range(CLASSES))), work.shape[0]
    form = Pixels(shape=work.shape, scale=255.0, mean=(0.5,) * channels, std=(0.25,) * channels)
    source = Source("synthetic", pixels, labels, names, count, None, form)
    offsets = np.arange(work.clients + 1) * work.samples
    training = Clients(np.arange(count), offsets, np.full(work.clients, work.samples), np.zeros(work.clients))
    new = Clients(np.arange(work.samples), offsets[:2], np.zeros(1, np.int64), np.zeros(1))
    return Federation(source, training, new, np.empty(0, np.int64), ())


def configured(work: Work, first_order: bool = False) -> Config:
    """What others do and nothing else: no decay of rates, and for FedAvg neither weight decay nor clipping."""
    own = {"iterations": work.iterations, "batch_size": work.batch, "decay": 1.0}
    if work.method == "fedavg":
        own |= {"lr": work.lr, "weight_decay": 0.0, "clip": 1e30}
    else:
        own |= {name: getattr(work, name) for name in ("inner_lr", "adapt_lr", "momentum", "weight_decay", "clip")}
        own |= {"outer_lr": work.lr, "second_order": not first_order}
    return configure(
        work.method,
        "mnist" if work.model == "mlp" else "cifar10",  # the model's name; the data are given
        rounds=10**9,
        evaluate_every=10**9,
        training=own,
        model=wrapped if work.model == "module" else None,
    )


def wrapped(shape: tuple[int, ...], classes: int) -> ConvNet:
    """The others' ConvNet, as a user would bring it."""
    return ConvNet()


class Told(Observer):
    """Begins a round when it is told to, in every worker."""

    def __init__(self, group: Group, pipe: Pipe | None) -> None:
        self.group, self.pipe = group, pipe

    def begin(self, run: Engine[Any]) -> None:
        self.engine = run
        if self.pipe:
            self.pipe.ready()
        self._wait()

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None:
        if self.pipe:
            self.pipe.done(packed(self.engine.progress.server))
        self._wait()

    def _wait(self) -> None:
        if self.pipe:
            self.pipe.wait()
        self.group.barrier()


def packed(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first-order", action="store_true")
    parser.add_argument("--follow", nargs=3, help="rank, rendezvous and run folder: what the first process gives")
    arguments = parser.parse_args()
    work = Work.open(arguments.folder)
    config, federation = configured(work, arguments.first_order), given(work, arguments.folder)
    if arguments.follow:
        run, group = following(arguments.workers, *arguments.follow)
        Engine.local(run, group, assemble(config, federation)).run(Told(group, None))
        return
    pipe = Pipe()
    with leading("benchmarks.peers.ours", arguments.workers, config) as (run, group):
        Engine.local(run, group, assemble(config, federation)).run(Told(group, pipe))


if __name__ == "__main__":
    main()
