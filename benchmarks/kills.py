"""Runs whose processes are killed again and again: `python -m benchmarks.kills --kills 50`.

Each run is a command of its own (`upfl train`, then `upfl resume`) in a process group that gets SIGKILL as a whole, at
a random moment, workers and all. It must come to the same bits as a run that nobody stopped: every tensor of the
checkpoint, of the best states and of the clients' memories, every line of metrics but for its times, the result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from upfl.safe.tensors import read_file

METHODS = ("hetero-fedtta", "fedtta", "scaffold", "fedavg", "pfl-ensemble", "odpfl-hn", "fedadg", "closed-form")
COMMON = ("--profile", "smoke", "--rounds", "12", "--clients-per-round", "6", "--evaluate-every", "4")
SETTINGS = ("--set", "partition.clients=24")
MORE = {"closed-form": ("--clients-per-round", "12")}  # asked in turn: twelve rounds, twelve passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    source, kills = random.Random(given.seed), 0  # noqa: S311 - moments, not secrets
    print(json.dumps(machine()))
    methods = given.methods.split(",")
    with tempfile.TemporaryDirectory(prefix="upfl-kills-") as folder:
        references: dict[str, tuple[Path, float]] = {}
        number = 0
        while kills < given.kills:
            method = methods[number % len(methods)]
            if method not in references:
                started = time.monotonic()
                assert call(train(method, Path(folder, method), 2)).wait() == 0, f"{method}: the run itself fails"
                references[method] = Path(folder, method), time.monotonic() - started
            reference, seconds = references[method]
            path = Path(folder, f"{number}-{method}")
            workers, times = source.choice((1, 2, 3)), source.randint(2, 5)
            done = killed(method, path, workers, [source.uniform(0, seconds) for _ in range(times)])
            kills += done
            differences = list(compared(path, reference))
            said = {"method": method, "workers": workers, "kills": done, "differences": differences}
            print(json.dumps(said), flush=True)
            if differences:
                sys.exit(1)
            shutil.rmtree(path)
            number += 1
    print(json.dumps({"runs": number, "kills": kills, "differences": 0}))


def train(method: str, path: Path, workers: int) -> list[str]:
    scale = (*COMMON, *MORE.get(method, ()), *SETTINGS)
    return ["train", method, "digits", *scale, "--out", str(path), "--workers", str(workers), "--json"]


def call(arguments: list[str]) -> subprocess.Popen[bytes]:
    """The command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "upfl", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def killed(method: str, path: Path, workers: int, moments: list[float]) -> int:
    """Kill a run at these moments, and let it come to its end; returns how often it was killed."""
    kills = 0
    for moment in [*moments, float("inf")]:
        begun = (path / "config.toml").exists()
        again = ["resume", str(path), "--workers", str(workers), "--json"]
        process = call(again if begun else train(method, path, workers))
        try:
            _, said = process.communicate(timeout=None if moment == float("inf") else moment)
            assert process.returncode == 0, said.decode()
            return kills
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    return kills


def compared(run: Path, reference: Path) -> Iterator[str]:
    """What differs between a run and another."""
    files = {path.relative_to(reference) for path in reference.rglob("*") if path.is_file()}
    if files != {path.relative_to(run) for path in run.rglob("*") if path.is_file()}:
        yield "the files"
    for name in sorted(files):
        if name.suffix == ".safetensors":
            ours, theirs = read_file(run / name), read_file(reference / name)
            same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
            if not same:
                yield str(name)
    for text in ("metrics.jsonl", "result.json"):
        if timeless(run / text) != timeless(reference / text):
            yield text


def timeless(file: Path) -> list[Any]:
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    return [{key: value for key, value in json.loads(line).items() if not key.endswith("_s")} for line in lines]


if __name__ == "__main__":
    main()
