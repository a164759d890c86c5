"""Data of one's own at scale: image folders and a table of a million clients, added and trained on.

    python -m benchmarks.own_data images --folder F     100,000 images in 10,000 client folders
    python -m benchmarks.own_data table --folder F      a Parquet file of 5 million rows x 32 features with 1,000,000
                                                        clients, one of 5,000 rows with 1,000; trains on both, in
                                                        turns; `--pairs 3` says how often
    ... table --folder F --pairs 3 --added              the same without adding them anew

Files are made in F, the cache folder is F/cache. Each command runs in a process of its own, whose peak memory is told.
The first start on many clients works out who holds what, and is the first line of it; `--added` skips it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 8


def measured(command: list[str], folder: Path) -> dict[str, Any]:
    """A command's time, and the most memory that it took."""
    environment = os.environ | {"UPFL_CACHE": str(folder / "cache")}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = round(time.perf_counter() - started, 1)
    return {
        "seconds": seconds,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "gib": round(usage.ru_maxrss / 2**20, 2),
        "out": out,
    }


def upfl(*words: str) -> list[str]:
    return [sys.executable, "-m", "upfl", *words]


def make_images(folder: Path, clients: int = 10_000, each: int = 10) -> Path:
    from PIL import Image

    path, rng = folder / "images", np.random.default_rng(0)
    if path.exists():
        return path
    for client in range(clients):
        pixels = rng.integers(0, 256, (each, 32, 32, 3), np.uint8)
        for place in range(each):
            target = path / f"client-{client:05}" / f"class-{place % 5}"
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[place]).save(target / f"{place}.png", compress_level=1)
    return path


def make_table(path: Path, rows: int, clients: int, features: int = 32) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.exists():
        return path
    rng, step = np.random.default_rng(0), 250_000
    centres = rng.normal(size=(10, features)).astype(np.float32)
    fields = [(f"f{i}", pa.float32()) for i in range(features)] + [("y", pa.int32()), ("who", pa.int64())]
    with pq.ParquetWriter(path, pa.schema(fields), compression="none", use_dictionary=False) as out:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            y = rng.integers(0, 10, count).astype(np.int32)
            x = centres[y] + rng.standard_normal((count, features), np.float32)
            who = (start + np.arange(count)) % clients
            columns = {f"f{i}": x[:, i] for i in range(features)} | {"y": y, "who": who}
            out.write_table(pa.table(columns, pa.schema(fields)))
    return path


TRAIN = """
import json, resource, sys, time
begun = time.perf_counter()
import upfl
class Watch:
    times, work = [], []
    def tick(self): self.times.append(time.perf_counter()), self.work.append(time.process_time())
    def begin(self, run): self.tick(), self.memory()
    def memory(self): self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    def note(self, text): pass
    def stage(self, what): pass
    def round(self, metrics): self.tick()
watch, (name, out, rounds) = Watch(), sys.argv[1:]
few = ["iterations=5"]
scale = {"rounds": int(rounds), "evaluate_every": int(rounds), "clients_per_round": 100}
config = upfl.configure("fedavg", name, settings=few, **scale)
upfl.train(config, out, workers=1, observer=watch)
between = lambda ticks: [b - a for a, b in zip(ticks, ticks[1:])][1:-1]  # not the first, not the one that is scored
rounds = {"rounds_s": between(watch.times), "rounds_cpu": between(watch.work)}
print(json.dumps({"start_s": watch.times[0] - begun, "start_cpu": watch.work[0], "start_gib": watch.peak} | rounds))
"""


def train(name: str, folder: Path, number: int) -> dict[str, Any]:
    out = folder / f"run-{name}-{number}-{time.time_ns()}"
    found = measured([sys.executable, "-c", TRAIN, name, str(out), str(ROUNDS)], folder)
    told = json.loads(found.pop("out").splitlines()[-1])
    rounds = {name: round(statistics.median(told[f"rounds_{name}"]), 4) for name in ("s", "cpu")}
    starts = {name: round(told[f"start_{name}"], 2) for name in ("s", "cpu", "gib")}
    return found | {"start": starts, "round": rounds}


def show(name: str, found: dict[str, Any]) -> None:
    found.pop("out", None)
    print(name, json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["images", "table"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="a part of the clients, for a trial")
    parser.add_argument("--pairs", type=int, default=2, help="runs on each table")
    parser.add_argument("--added", action="store_true", help="the tables are there from the last time")
    asked = parser.parse_args()
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    if asked.what == "images":
        path = make_images(folder, round(10_000 * asked.scale))
        shutil.rmtree(folder / "cache" / "own" / "many-images", ignore_errors=True)
        return show("add images", measured(upfl("data", "add", "many-images", str(path), "--json"), folder))
    many = round(1_000_000 * asked.scale)
    tables = {"many": make_table(folder / "many.parquet", 5 * many, many)}
    tables["few"] = make_table(folder / "few.parquet", 5_000, 1_000)
    for name, path in tables.items() if not asked.added else ():
        shutil.rmtree(folder / "cache" / "own" / name, ignore_errors=True)
        command = upfl("data", "add", name, str(path), "--label", "y", "--client", "who", "--json")
        show(f"add {name}", measured(command, folder))
    ratios = []
    for number in range(asked.pairs):  # in turns, first one first and then the other: the machine may be busy
        found = {name: train(name, folder, number) for name in (tables if number % 2 else reversed(tables))}
        for name in tables:
            show(f"train {name} {number}", found[name])
        ratios.append({of: found["many"]["round"][of] / found["few"]["round"][of] for of in ("s", "cpu")})
    for of in ("s", "cpu"):
        sorted_ratios = sorted(round(ratio[of], 3) for ratio in ratios)
        print(f"a round, {of}: ratios {sorted_ratios}, median {statistics.median(sorted_ratios):.3f}")
    return None


if __name__ == "__main__":
    main()
