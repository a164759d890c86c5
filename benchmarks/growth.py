"""How a round grows: `python -m benchmarks.growth -o growth.json --plot growth.png`.

Time a round, time from the start of the process to the end of the first round, and peak memory (the proportional set
sizes of all workers, summed) against the number of existing clients with 20 at work, against workers, and against the
size of the model. FedAvg of a small MLP on random images: little work, so that what grows shows. The images are the
same two million in every setting, shared out among more or fewer clients, and batches are as small as the smallest
client: what is compared is the number of clients, not of samples.

Each setting is a process of its own. Settings are measured in turn, several times; a figure is the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.machine import machine
from benchmarks.memory import descendants, proportional
from benchmarks.workers import following, leading
from upfl.config import Config, configure
from upfl.data.federation import Federation, build_federation
from upfl.data.forms import Pixels
from upfl.data.partition import Partition
from upfl.data.source import Source
from upfl.engine.rounds import Engine, Observer
from upfl.engine.setup import assemble

mpl.use("Agg")

from matplotlib import pyplot as plt

SHAPE = (1, 8, 8)
SAMPLES = 2_000_000  # of all clients together
BATCH = 8  # what the smallest client trains on


@dataclass(frozen=True)
class Setting:
    """A run to measure."""

    clients: int = 1000  # training clients; as many new ones exist beside them
    workers: int = 1
    hidden: int = 200  # units of each of the MLP's two hidden layers
    rounds: int = 9

    @property
    def parameters(self) -> int:
        return (64 + 1) * self.hidden + (self.hidden + 1) * self.hidden + (self.hidden + 1) * 10


SWEEPS: dict[str, list[Setting]] = {
    "existing clients": [Setting(clients=n) for n in (100, 1_000, 10_000, 100_000)],
    "workers": [Setting(workers=n, hidden=800) for n in (1, 2)],
    "parameters": [Setting(hidden=n) for n in (50, 200, 800, 3200)],
}


@dataclass(frozen=True)
class Measured:
    first: float  # seconds from the start of the process to the end of the first round
    rounds: list[float]  # seconds, of all rounds but the first, and the last, which is evaluated
    cpu: list[float]  # CPU seconds of the first worker in these rounds
    memory: int  # bytes at the peak
    anonymous: int  # of it without what is mapped from files
    processes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("-o", "--out", type=Path, help="the results as JSON")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # a setting and the images: what is measured
    parser.add_argument("--follow", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(Setting(**json.loads(arguments.run[0])), Path(arguments.run[1]), arguments.follow)
        return
    sweeps = {name: SWEEPS[name] for name in arguments.sweeps}
    measured: dict[Setting, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        write_images(images)
        for _ in range(arguments.repeats):
            for setting in dict.fromkeys(setting for sweep in sweeps.values() for setting in sweep):
                measured[setting].append(measure(setting, images))
                print(f"  {setting}: {statistics.median(measured[setting][-1].rounds):.3f} s a round", file=sys.stderr)
    rows = {name: [summary(setting, measured[setting]) for setting in sweep] for name, sweep in sweeps.items()}
    for name, sweep in rows.items():
        print(table(name, sweep), end="\n\n")
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "sweeps": rows}, indent=1))
    if arguments.plot:
        draw(rows, arguments.plot)


def write_images(path: Path) -> None:
    rng = np.random.default_rng(0)
    path.write_bytes(rng.bytes(SAMPLES * int(np.prod(SHAPE))))
    rng.integers(0, 10, SAMPLES).tofile(path.with_suffix(".labels"))


def run(setting: Setting, images: Path, follow: list[str] | None) -> None:
    """In the process that is measured: train, and say when a round is done."""
    config = configured(setting)
    if follow:
        folder, group = following(setting.workers, *follow)
        Engine.local(folder, group, assemble(config, federation(images, config))).run()
        return
    with leading("benchmarks.growth", setting.workers, config) as (folder, group):
        Engine.local(folder, group, assemble(config, federation(images, config))).run(Teller())


def configured(setting: Setting) -> Config:
    return configure(
        "fedavg",
        "digits",  # the model's name; the data are given
        settings=[f"batch_size={BATCH}"],
        rounds=setting.rounds,
        clients_per_round=20,
        evaluate_every=10**9,
        evaluate_clients=1,
        model={"hidden": setting.hidden},
        partition={"kind": "iid", "clients": 2 * setting.clients},
    )


def federation(images: Path, config: Config) -> Federation:
    pixels = np.memmap(images, np.uint8, "r", shape=(SAMPLES, *SHAPE))
    labels = np.memmap(images.with_suffix(".labels"), np.int64, "r", shape=(SAMPLES,))
    form = Pixels(shape=SHAPE, scale=255.0, mean=(0.5,), std=(0.25,))
    source = Source("synthetic", pixels, labels, tuple("0123456789"), SAMPLES, None, form)
    partition = Partition.model_validate(config.partition.model_dump())
    return build_federation(source, partition, config.partition_seed)


class Teller(Observer):
    """A line for each round that is done: the CPU time of this worker so far."""

    def begin(self, run: Engine[Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None:
        print(time.process_time(), flush=True)


def measure(setting: Setting, images: Path) -> Measured:
    """Run a setting in a process of its own, and watch it."""
    command = [sys.executable, "-m", "benchmarks.growth", "--run", json.dumps(asdict(setting)), str(images)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert process.stdout is not None
    lines, ends, clocks = process.stdout, list[float](), list[float]()

    def read() -> None:
        for line in lines:
            ends.append(time.perf_counter())
            clocks.append(float(line))

    reader = Thread(target=read)
    reader.start()
    memory, anonymous, processes = 0, 0, 0
    while process.poll() is None:
        family = [process.pid, *descendants(process.pid)]
        memory = max(memory, sum(proportional(pid) for pid in family))
        anonymous = max(anonymous, sum(proportional(pid, "Pss_Anon") for pid in family))
        processes = max(processes, len(family))
        time.sleep(0.05)
    reader.join()
    if process.returncode:
        sys.exit(process.returncode)
    between, cpu = ([b - a for a, b in pairwise(clock[:-1])] for clock in (ends, clocks))
    return Measured(ends[0] - started, between, cpu, memory, anonymous, processes)


def summary(setting: Setting, samples: list[Measured]) -> dict[str, Any]:
    return {
        **asdict(setting),
        "parameters": setting.parameters,
        "seconds": statistics.median(seconds for sample in samples for seconds in sample.rounds),
        "cpu": statistics.median(seconds for sample in samples for seconds in sample.cpu),
        "first": statistics.median(sample.first for sample in samples),
        "memory": statistics.median(sample.memory for sample in samples),
        "anonymous": statistics.median(sample.anonymous for sample in samples),
        "samples": [asdict(sample) for sample in samples],
    }


KEYS = {"existing clients": "clients", "workers": "workers", "parameters": "parameters"}


def table(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| {name} | s a round | CPU s, first worker | s to first round | peak memory, MiB | without mapped files |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = " | ".join(f"{row[key] / 2**20:.0f}" for key in ("memory", "anonymous"))
        lines.append(
            f"| {row[KEYS[name]]:,} | {row['seconds']:.3f} | {row['cpu']:.3f} | {row['first']:.1f} | {sizes} |"
        )
    return "\n".join(lines)


def draw(sweeps: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, panels = plt.subplots(2, len(sweeps), figsize=(3.6 * len(sweeps), 5), layout="constrained", squeeze=False)
    for (name, rows), (above, below) in zip(sweeps.items(), panels.T, strict=True):
        x = [row[KEYS[name]] for row in rows]
        for panel, key, scale, colour in ((above, "seconds", 1.0, "#1b7f5c"), (below, "memory", 2**20, "#c2452d")):
            panel.plot(x, [row[key] / scale for row in rows], marker="o", markersize=4, color=colour)
            panel.set_ylim(bottom=0)
            panel.spines[["top", "right"]].set_visible(False)
            if name == "workers":
                panel.set_xticks(x)
            else:
                panel.set_xscale("log")
        below.set_xlabel(name)
    panels[0][0].set_ylabel("s a round")
    panels[1][0].set_ylabel("peak memory, MiB")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
