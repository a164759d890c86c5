"""A contender's process from outside: have it do a round, measure what it and the rest of the machine used."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.memory import descendants
from benchmarks.peers.environments import UnavailableError, last_line

PATIENCE = 1800.0  # seconds until a contender that says nothing is given up
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """A round: its time, the CPU time of the contender's processes, and that of all others (both as cores in use)."""

    wall: float
    own: float
    others: float


class Process:
    """A contender at work; a context manager, so that nothing is left running."""

    def __init__(self, command: list[str], log: Path, path: list[str]) -> None:
        self.log = log
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_until_ready(self) -> str:
        """Returns what the contender has to remark."""
        return str(self._answer()["note"])

    def round(self, save: Path | None = None) -> tuple[Sample, dict[str, Any]]:
        """Have a round done; returns what it took, and the contender's answer."""
        assert self.process.stdin is not None
        own, all_, started = self._own(), busy(), time.perf_counter()
        self.process.stdin.write(json.dumps({"save": str(save)} if save else {}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._answer()
        wall = time.perf_counter() - started
        own, all_ = self._own() - own, busy() - all_
        return Sample(wall, own / wall, max(0.0, all_ - own) / wall), answer

    def close(self) -> None:
        assert self.process.stdin is not None
        family = descendants(self.process.pid)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in family:  # what a contender leaves behind
            try:
                os.kill(pid, 15)
            except ProcessLookupError:
                continue

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise UnavailableError(f"no answer within {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise UnavailableError(last_line(self.log.read_text(errors="replace")) or "it ended without a word")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _own(self) -> float:
        """CPU seconds of the process, of all that it started, and of those of them that have ended."""
        return sum(cpu_seconds(pid) for pid in [self.process.pid, *descendants(self.process.pid)])


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended
    return sum(map(int, fields[11:15])) / TICKS


def busy() -> float:
    """CPU seconds that the machine has not been idle, with what the hypervisor gave to others."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS
