"""The Python interface: train, come back to a run, personalize, score."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upfl import plugins
from upfl.config import Config
from upfl.contract import Personalized, Personalizer, Published, Training, Unlabelled
from upfl.data import kept
from upfl.data.federation import Federation
from upfl.data.source import Source
from upfl.engine.folder import CONFIG, RESULT, RunFolder
from upfl.engine.group import Group, torchrun_group, under_torchrun, workers
from upfl.engine.rounds import Engine, Observer
from upfl.engine.setup import Setup, assemble
from upfl.errors import RunError
from upfl.methods import make_personalizer, row_name, training_class


def train(
    config: Config,
    out: str | Path,
    *,
    source: Source | None = None,
    workers: int | None = None,
    observer: Observer | None = None,
) -> Run:
    """Train a federation into the new run folder `out`, with one worker process a core unless told otherwise.

    A data set that is in memory is given as `source`. It is kept among the data sets that were added, so that workers
    and whoever resumes or exports the run find it; `upfl data remove` takes it away again.
    """
    path = Path(out)
    if source is not None:
        if source.name != config.dataset:
            raise RunError(f"the configuration is for '{config.dataset}', and the source is '{source.name}'")
        kept.keep(source)
    setup = assemble(config)  # what cannot start leaves no folder behind
    if not under_torchrun() or os.environ["RANK"] == "0":
        RunFolder.create(path, config)
    return _work(path, workers, observer, setup)


def resume(
    run: str | Path, *, workers: int | None = None, observer: Observer | None = None, rounds: int | None = None
) -> Run:
    """Go on with a run that was stopped; a finished one stays as it is, unless it is to have other rounds."""
    if rounds is not None and not (under_torchrun() and os.environ["RANK"] != "0"):  # others wait for the first
        _set_rounds(RunFolder.open(Path(run)), rounds)
    return _work(Path(run), workers, observer)


def _set_rounds(folder: RunFolder, rounds: int) -> None:
    """Let a run end after another number of rounds than it was begun with; what it was scored at its old end goes."""
    with folder.lock():
        folder.require_local()
        config, done = folder.config(), len(folder.metrics())
        if training_class(config.training_name).in_turn:
            raise RunError(f"{folder.path}: {config.training_name} asks each client in turn: its rounds are settled")
        if rounds < done:
            raise RunError(f"{folder.path}: {done} rounds are done already; --rounds {rounds} would be fewer")
        if rounds == config.rounds:
            return
        for name in (RESULT, "newcomers", "diary.json"):  # first: a result of fewer rounds would end the run
            folder.files.remove(name)
        folder.files.write(CONFIG, config.model_copy(update={"rounds": rounds}).to_toml().encode())


def _work(path: Path, size: int | None, observer: Observer | None, setup: Setup | None = None) -> Run:
    if under_torchrun():
        with torchrun_group() as group:
            _check_shared(path, group)
            folder = RunFolder.open(path)
            if folder.finished:
                return Run(path)
            folder.require_local()
            setup = setup or assemble(folder.config())
            check_memory(setup.training, int(os.environ.get("LOCAL_WORLD_SIZE", group.size)))
            Engine.local(folder, group, setup).run(observer if group.leads else None)
    else:
        folder = RunFolder.open(path)
        if folder.finished:
            return Run(path)
        folder.require_local()
        setup = setup or assemble(folder.config())
        count = worker_count(setup.config, setup.training, size)
        for note in (setup.training.remark(), one_worker_note(setup.training, size)):
            if observer and note:
                observer.note(note)
        with workers(count, [str(path), *(plugins.for_workers() if count > 1 else ())]) as group:
            Engine.local(folder, group, setup).run(observer)
    return Run(path, setup)


LARGE = 50_000_000  # values of server state from which on workers would spend their time on sums


def worker_count(config: Config, training: Training[Any], asked: int | None = None) -> int:
    """As many workers as asked for, or one a core; one on an accelerator, or for a very large state."""
    if asked is not None and asked < 1:
        raise RunError(f"--workers {asked}: at least one is needed")
    count = asked or (cores() if config.device == "cpu" and training.size < LARGE else 1)
    check_memory(training, count)
    return count


def check_memory(training: Training[Any], count: int) -> None:
    """Refuse to start so many workers on this machine if their states will not fit."""
    # A worker holds the state, its sum in 64-bit integers, and one copy more while it aggregates or saves.
    needed, there = count * (16 * training.size + 2**29), available_memory()
    if there is not None and needed > there:
        raise RunError(
            f"{training.name} has {training.size / 1e6:.0f} million values in its server state: {count} worker(s) need "
            f"about {needed / 2**30:.1f} GiB and this machine has {there / 2**30:.1f} GiB free; "
            f"{training.memory_advice}"
        )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_worker_note(training: Training[Any], asked: int | None) -> str | None:
    if asked is not None or training.size < LARGE:
        return None
    return f"one worker, because {training.title} has {training.size / 1e6:.0f} million values in its server state"


def available_memory() -> int | None:
    """Bytes of memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return min((size for size in (free, _left_in_container()) if size is not None), default=None)


def _left_in_container() -> int | None:
    """Bytes that are left under a container's limit; None where there is none."""
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        facts = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        cached = next(line for line in facts if line.startswith("inactive_file"))
    except (OSError, StopIteration):
        return None
    return int(limit) - int(used) + int(cached.split()[1]) if limit.isdigit() else None


def _check_shared(path: Path, group: Group) -> None:
    """Every machine must see the leader's folder: client memory and checkpoints go through it."""
    group.barrier()
    seen = torch.tensor([int((path / "config.toml").is_file())])
    group.sum_(seen)
    if int(seen) < group.size:
        raise RunError(
            f"{path}: {group.size - int(seen)} of {group.size} processes do not see this run folder; "
            "several machines need one that they share"
        )


@dataclass(frozen=True)
class Run:
    """A run folder, with what it describes."""

    path: Path

    def __init__(self, path: str | Path, setup: Setup | None = None) -> None:
        object.__setattr__(self, "path", Path(path))
        if setup is not None:
            self.__dict__["setup"] = setup  # what the training was made of need not be made again

    @cached_property
    def config(self) -> Config:
        return RunFolder.open(self.path).config()

    @property
    def result(self) -> dict[str, Any]:
        """The scores: `result.json`."""
        return RunFolder.open(self.path).result()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object a round: `metrics.jsonl`."""
        return RunFolder.open(self.path).metrics()

    @cached_property
    def setup(self) -> Setup:
        """What the run's configuration describes."""
        return assemble(self.config)

    @property
    def federation(self) -> Federation:
        return self.setup.federation

    @property
    def training(self) -> Training[Any]:
        return self.setup.training

    @property
    def personalizers(self) -> Mapping[str, Personalizer[Any]]:
        """Those that the run is scored under, by name."""
        return self.setup.personalizers

    def published(self, personalizer: str) -> Published:
        """What newcomers receive: the state at the round with the best validation accuracy under a personalizer."""
        row = row_name(self.training.name, personalizer)
        scored = {entry["row"]: entry["best_round"] for entry in self.result["rows"]}
        if row not in scored:
            raise RunError(f"{self.path}: no row '{row}' was scored in this run; it has {', '.join(scored)}")
        return RunFolder(self.path).load_best(scored[row])

    def personalize(self, client: Unlabelled, personalizer: str | None = None) -> Personalized:
        """A client's own predictor, by the run's first personalizer unless another is named."""
        name = personalizer or next(iter(self.config.personalize))
        method = self.personalizers.get(name)
        if method is None:
            method = make_personalizer(name, self.training, self.config.personalizer_hyper(name))
        scored = name if name in self.config.personalize else next(iter(self.config.personalize))
        return method.personalize(self.published(scored), client)

    def newcomer(self, client: int) -> Unlabelled:
        """A new client of the run's federation: inputs without labels."""
        return self.setup.population.newcomer(client)

    def labels(self, client: int) -> Tensor:
        """A new client's labels, for scoring alone."""
        return self.setup.population.newcomer_labels(client)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percent of the samples whose largest logit is their label's."""
    return 100 * int((logits.argmax(1) == labels).sum()) / len(labels)
