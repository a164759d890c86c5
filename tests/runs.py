"""Whole runs: what they leave behind, compared to the bit; runs that are stopped; workers that are threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.observers import Watching
from tests.plugin_methods import timeless
from upfl.config import Config
from upfl.engine.cohort import LocalCohort
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine
from upfl.safe.tensors import read_file
from upfl.state import State, select


@dataclass
class Outcome:
    """All that a run leaves behind, without times."""

    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    tensors: dict[str, State]  # by file: checkpoint, best states, memories

    @property
    def server(self) -> State:
        return select(self.tensors["checkpoint.safetensors"], "server")


def outcome(folder: RunFolder) -> Outcome:
    files = sorted(folder.path.rglob("*.safetensors"))
    tensors = {str(file.relative_to(folder.path)): read_file(file) for file in files}
    return Outcome(timeless(folder.metrics()), folder.result(), tensors)


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.metrics == theirs.metrics
    assert ours.result == theirs.result
    assert ours.tensors.keys() == theirs.tensors.keys()
    for file, state in theirs.tensors.items():
        assert_same_bits(ours.tensors[file], state, file)


def assert_same_bits(ours: State, theirs: State, where: str = "") -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, f"{where} {name}"
        assert torch.equal(ours[name], value), f"{where} {name}"


def ran(config: Config, path: Path) -> Outcome:
    folder = RunFolder.create(path, config)
    Engine.local(folder).run()
    return outcome(folder)


def begun(config: Config, path: Path) -> Engine[LocalCohort]:
    return Engine.local(RunFolder.create(path, config))


class StopError(Exception):
    """What an interrupted run ends with, here."""


class Interrupter(Watching):
    """Stops a run when the n-th stage (or round's end) of a kind is reached."""

    def __init__(self, what: str, number: int) -> None:
        self.what, self.left = what, number

    def stage(self, what: str) -> None:
        self._count(what.split()[0])

    def round(self, metrics: dict[str, Any]) -> None:
        self._count("round")

    def _count(self, what: str) -> None:
        self.left -= what == self.what
        if self.left == 0:
            raise StopError


class Meeting:
    """Where workers in threads of this process add up their integers."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120)
        self.brought: list[Tensor] = [torch.empty(0)] * size


class VirtualGroup(Group):
    """A worker that is a thread: its share of the clients is its own, the sums go through a meeting."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def sum_(self, values: Tensor) -> None:
        assert values.dtype == torch.int64
        self.meeting.brought[self.rank] = values.clone()
        self.meeting.barrier.wait()
        total = torch.stack(self.meeting.brought).sum(0)
        self.meeting.barrier.wait()
        values.copy_(total)


def by_virtual_workers(size: int, work: Callable[[VirtualGroup], None]) -> None:
    """Have so many workers do the same, each in a thread of its own; the first error is raised here."""
    meeting = Meeting(size)
    errors: list[BaseException] = []

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            work(VirtualGroup(rank, size, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def ran_by_workers(config: Config, path: Path, size: int) -> Outcome:
    folder = RunFolder.create(path, config)
    by_virtual_workers(size, lambda group: Engine.local(folder, group).run())
    return outcome(folder)
