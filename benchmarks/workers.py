"""Worker processes for an engine whose federation is made by a benchmark, where `upfl train` would read a data set.

A benchmark's module is started anew for each further worker, with its own arguments and `--follow RANK RENDEZVOUS RUN`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upfl.config import Config
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.folder import RunFolder
from upfl.engine.group import Child, Group, end_with_parent, join


@contextmanager
def leading(module: str, size: int, config: Config) -> Iterator[tuple[RunFolder, Group]]:
    """A new run folder, and this process as the first of `size` workers."""
    keep_freed_memory()  # as `upfl train` does
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", config)
        store = Path(folder) / "rendezvous"
        command = [sys.executable, "-m", module, *sys.argv[1:], "--follow"]
        children = [
            Child(rank, [*command, str(rank), str(store), str(run.path)], Path(folder) / f"worker-{rank}.log")
            for rank in range(1, size)
        ]
        try:
            yield run, join(0, size, store, children) if children else Group()
        finally:
            for child in children:
                child.stop()


def following(size: int, rank: str, store: str, run: str) -> tuple[RunFolder, Group]:
    """The same for a further worker, which ends with the first."""
    end_with_parent()
    keep_freed_memory()
    return RunFolder(Path(run)), join(int(rank), size, Path(store))
