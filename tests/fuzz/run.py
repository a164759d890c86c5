"""Cases one after another, watched: time, memory, files outside."""

import hashlib
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.families import FAMILIES
from upfl.errors import UpflError

SECONDS, KIBIBYTES = 10, 2**20


class Slow(Exception):  # noqa: N818 - not an error of ours, but a finding
    """A case that takes too long."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise Slow(f"more than {seconds} s")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def run(family: str, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """So many cases of a family; raises at the first that is neither accepted nor refused as it should be."""
    outside = folder / "outside"
    (outside / "folder").mkdir(parents=True)
    for name in ("file", "folder/round-1", "folder/precious.safetensors"):
        (outside / name).write_bytes(b"precious")
    before = fingerprint(outside)
    (folder / "work").mkdir()
    case = FAMILIES[family](folder / "work", outside)
    start, slowest, said = time.monotonic(), 0.0, Counter[str]()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases):
        begun = time.monotonic()
        source = random.Random(f"{seed}/{family}/{number}")
        try:
            with within(SECONDS):
                case(source)
            said["accepted"] += 1
        except UpflError as error:
            str(error)
            said[f"refused: {type(error).__name__}"] += 1
        except BaseException as error:
            raise AssertionError(f"{family}, seed {seed}, case {number}: {type(error).__name__}: {error}") from error
        slowest = max(slowest, time.monotonic() - begun)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < KIBIBYTES, f"{family}, seed {seed}, case {number}: {grown} KiB more"
    assert fingerprint(outside) == before, f"{family}: files outside were changed"
    return {
        "family": family,
        "cases": cases,
        **said,
        "seconds": round(time.monotonic() - start, 1),
        "slowest_seconds": round(slowest, 2),
        "memory_grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024,
    }


def fingerprint(folder: Path) -> list[tuple[str, str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
