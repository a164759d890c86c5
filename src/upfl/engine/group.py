"""Worker processes that train together: one code path, on torch.distributed with gloo.

`upfl train --workers N` starts N - 1 processes beside itself; `torchrun` brings its own. Either way every process
runs the same rounds on its share of the clients, holds the same server state, and takes part in the same sums. Only
tensor collectives are used: the object collectives would pickle.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from heapq import heapreplace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from upfl.errors import StoppedError

T = TypeVar("T")
PLACE = "upfl-group-"  # how the names of folders begin in which workers meet
FRESH = 60  # seconds in which a new one is left alone
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FOLLOWED = 75  # the exit code of a worker that ended because another one did
TIMEOUT = timedelta(days=7)  # a round may take as long as it takes; a dead peer is noticed by its closed connection


class Group:
    """This process's place among the workers."""

    def __init__(self, rank: int = 0, size: int = 1, children: Sequence[Child] = ()) -> None:
        self.rank, self.size, self.children = rank, size, children

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T], cost: Sequence[float] | None = None) -> list[T]:
        """This worker's part of the items: dealt out, the costly ones first, each to whoever has the least so far."""
        if cost is None:
            return list(items[self.rank :: self.size])
        loads = [(0.0, 0, rank) for rank in range(self.size)]  # a heap: costs, and where these are equal, items
        mine = []
        for i in sorted(range(len(items)), key=lambda i: -cost[i]):
            load, count, rank = loads[0]
            heapreplace(loads, (load + cost[i], count + 1, rank))
            if rank == self.rank:
                mine.append(items[i])
        return mine

    def sum_(self, values: Tensor) -> None:
        """Sum integers over all workers, in place."""
        assert values.dtype == torch.int64, "floating-point sums would depend on the number of workers"
        if self.size > 1:
            with self._naming_the_dead():
                dist.all_reduce(values)

    def barrier(self) -> None:
        self.sum_(torch.zeros(1, dtype=torch.int64))

    def check(self) -> None:
        """Raise if a worker that this process started has died."""
        for child in self.children:
            child.check()

    @contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            for _ in range(50):  # the system may take a moment to tell who died
                self.check()
                time.sleep(0.1 if self.children else 0)
            raise StoppedError(f"the connection to another worker broke: {error}") from error


class Child:
    """A worker process that this one started."""

    def __init__(self, rank: int, command: list[str], log: Path) -> None:
        self.rank, self.log = rank, log
        with log.open("wb") as output:
            # The pipe's other end closes when this process ends, however it ends: the worker's sign to end, too.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # finds what this process finds
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def check(self) -> None:
        """Raise if the worker has ended by a fault of its own."""
        code = self.process.poll()
        if code in (None, 0, FOLLOWED):
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-12:])
        last_words = f"; its last words:\n{last}" if last else ""
        raise StoppedError(f"worker {self.rank} (process {self.process.pid}) {how}{last_words}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def workers(size: int, command: Sequence[str]) -> Iterator[Group]:
    """This process and size - 1 others that it starts with `command`, on this machine, over the loopback interface."""
    if size == 1:
        yield Group()
        return
    with meeting_place() as folder:
        store = Path(folder) / "rendezvous"
        worker = [sys.executable, "-m", "upfl.engine.worker"]
        children = [
            Child(rank, [*worker, str(rank), str(size), str(store), *command], Path(folder) / f"worker-{rank}.log")
            for rank in range(1, size)
        ]
        try:
            yield join(0, size, store, children)
            for child in children:
                child.process.wait(60)
                child.check()
        finally:
            for child in children:
                child.stop()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def meeting_place() -> Iterator[str]:
    """A private folder (mode 0700) while this process lives; those that killed processes left behind are removed."""
    for stale in Path(tempfile.gettempdir()).glob(f"{PLACE}*"):
        with _lock(stale) as alone:
            if alone:
                shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PLACE) as folder, _lock(Path(folder)):
        yield folder


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold a folder of this user's for oneself, which the system ends with the process; False if that cannot be."""
    with ExitStack() as at_end:
        alone = False
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            at_end.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            # One that was made a moment ago may not be held yet by its owner.
            alone = found.st_uid == os.getuid() and time.time() - found.st_mtime > FRESH
        yield alone


def join(rank: int, size: int, store: Path, children: Sequence[Child] = ()) -> Group:
    """Meet the other workers of this machine at a file that only this user can read."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    Path(f"{store}-{rank}").touch()
    # Wait here, not in gloo, which would wait for a worker that died at its start until the time-out.
    while not all(Path(f"{store}-{other}").exists() for other in range(size)):
        for child in children:
            child.check()
        time.sleep(0.02)
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size, timeout=TIMEOUT)
    return Group(rank, size, children)


@contextmanager
def torchrun_group() -> Iterator[Group]:
    """The group that torchrun started this process in."""
    # There is nothing to save yet, and a handler in Python would not run before the others come, who may have failed.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield Group(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, by whatever cause."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer

    def wait() -> None:
        os.read(0, 1)  # returns when the other end is closed; a buffered read would block the interpreter's end
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
