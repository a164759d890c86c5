"""upfl's rounds against other systems': `python -m benchmarks.peers` (or `make bench-peers`).

All contenders have the same clients, models, initial weights, batches and cores, and train by plain SGD (FedTTA: by the
method's own steps). Each first does a round of a few clients and steps, whose update must be upfl's own to float
tolerance. Then all do rounds in turn, in an order that changes with each turn, so that all see the same machine.

A sample is thrown away where something else took the cores. A contender with a single thread could have used one core
all the time: under 95% of that, it was stolen. Of those with several, some wait by themselves, so their own CPU time
tells nothing; theirs is thrown away if the rest of the machine used over 5% of all cores meanwhile. Turns go on until
each contender has kept `--samples`, or the time is over; fewer kept samples than that are marked in the table.

`--models module`: the same ConvNet as a module that a user brings, so that upfl's steps are autograd's, too.

On a machine that is never calm, `--cores 1` still compares: every contender has one thread, and the CPU time of its
processes, a column of the table, does not count what others took.

Cold start (`--cold`): from the start of the process to the end of 20 rounds, upfl against Flower's simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_dir

from benchmarks.machine import machine
from benchmarks.peers.environments import UnavailableError, interpreter
from benchmarks.peers.ours import prepare
from benchmarks.peers.process import Process, Sample
from benchmarks.peers.work import Method, Work, mapped
from benchmarks.steps import forward_operations
from upfl.models import convnet, mlp

ROOT = Path(__file__).parents[2]
# How far updates may differ, of their norm. Rounding makes some 1e-5. But single events, probably the ConvNet's
# rectifiers or maxima within rounding of a tie, set contenders further apart: PyTorch's own float32 steps, in its
# default layout, differ from its float64 ones by up to 3e-3 after two steps and 3e-2 after six (results/speed.md). So
# the check takes two steps. The MLP has few such units; the adapters are the same.
TOLERANCE = {"convnet": 1e-2, "mlp": 1e-3, "module": 1e-2}
CHECKED_CLIENTS, CHECKED_ITERATIONS = 4, 2


@dataclass(frozen=True)
class Contender:
    name: str
    module: str
    environment: str = ""  # a requirement file's name; this interpreter where empty
    arguments: tuple[str, ...] = ()
    one_thread: bool = False
    checked: bool = True  # whether its update must be that of the first contender

    @property
    def ours(self) -> bool:
        return self.module == "ours"


def contenders(method: str, cores: int) -> list[Contender]:
    all_, one = ("--workers", str(cores)), cores == 1
    if method == "fedtta":
        return [
            Contender("upfl", "ours", arguments=all_, one_thread=one),
            Contender("upfl, first order", "ours", arguments=(*all_, "--first-order"), one_thread=one, checked=False),
            Contender("loop on higher", "higher_loop", "higher", one_thread=one),
        ]
    if one:
        return [
            Contender("upfl", "ours", arguments=all_, one_thread=True),
            Contender("plain PyTorch loop", "plain_loop", "plain", one_thread=True),
            Contender("pfl-research", "pfl_research", "pfl", one_thread=True),
            Contender("Flower simulation", "flower", "flower"),
            Contender("FedLab", "fedlab", "fedlab", one_thread=True),
        ]
    return [
        Contender("upfl", "ours", arguments=all_),
        Contender("upfl, one worker", "ours", arguments=("--workers", "1"), one_thread=True),
        Contender("plain PyTorch loop", "plain_loop", "plain"),
        Contender("plain PyTorch loop, a process for each core", "plain_loop", "plain", (str(cores),)),
        Contender("pfl-research", "pfl_research", "pfl"),
        Contender("pfl-research, a process for each core", "pfl_research", "pfl", (str(cores),)),
        Contender("Flower simulation", "flower", "flower"),
        Contender("FedLab", "fedlab", "fedlab"),
    ]


@dataclass
class Row:
    """A contender's results."""

    contender: str
    ours: bool
    seconds: float | None = None  # the median of the kept samples, or of the calmest where too few were kept
    cpu: float | None = None  # CPU seconds of its processes, the median of the same samples
    percent: float | None = None  # of the limit: by CPU time where there is one thread
    kept: list[Sample] = field(default_factory=list)
    thrown: list[Sample] = field(default_factory=list)
    difference: float | None = None  # of its update from ours, relative
    note: str = ""
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=("convnet", "mlp", "module"), default=["convnet", "mlp"])
    parser.add_argument("--methods", nargs="+", choices=("fedavg", "fedtta"), default=["fedavg", "fedtta"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only upfl, and contenders whose names begin so")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--samples", type=int, default=7, help="kept samples of each contender")
    parser.add_argument("--minutes", type=float, default=60, help="the most for each table")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cold", action="store_true", help="measure cold start and 20 rounds instead")
    parser.add_argument("--cache", type=Path, default=Path(user_cache_dir("upfl")) / "peers", help="environments")
    parser.add_argument("-o", "--out", type=Path, help="the results as JSON")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])  # inherited by all that is started
    results: list[dict[str, Any]] = []
    methods: list[Method] = ["fedavg"] if options.cold else options.methods
    for method in methods:
        for model in options.models:
            work = Work(model, method, options.clients, options.iterations)
            wanted = [
                one
                for one in contenders(method, options.cores)
                if not options.only or one.name == "upfl" or one.name.startswith(tuple(options.only))
            ]
            with tempfile.TemporaryDirectory() as folder:
                arena = Arena(work, wanted, Path(folder), options.cache)
                if options.cold:
                    result = {"cold": True, "rows": arena.cold(options.samples)}
                else:
                    result = arena.compete(options.samples, 60 * options.minutes)
            result = {"work": asdict(work), **result}
            print(
                title(work), cold_table(result) if options.cold else table(result), sep="\n\n", end="\n\n", flush=True
            )
            results.append(result)
            if options.out:
                options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=1, default=asdict))


class Arena:
    """The contenders of one table, with the work that they all do."""

    def __init__(self, work: Work, wanted: list[Contender], folder: Path, cache: Path) -> None:
        self.work, self.cache, self.wanted = work, cache, wanted
        self.folder, self.check = folder / "work", folder / "check"
        for part, its_work in (
            (self.folder, work),
            (self.check, replace(work, clients=CHECKED_CLIENTS, iterations=CHECKED_ITERATIONS)),
        ):
            part.mkdir()
            prepare(its_work, part)

    @contextmanager
    def start(self, contender: Contender, folder: Path | None = None) -> Iterator[Process]:
        python = interpreter(contender.environment, self.cache) if contender.environment else Path(sys.executable)
        command = [str(python), "-m", f"benchmarks.peers.{contender.module}", str(folder or self.folder)]
        command += contender.arguments
        log = self.cache / f"{contender.module}.log"
        with Process(command, log, [str(ROOT), *(sys.path if contender.ours else [])]) as process:
            yield process

    def compete(self, samples: int, seconds: float) -> dict[str, Any]:
        """The rows of the table, and the limit in operations a second: on one thread, on all cores."""
        rows = {one: Row(one.name, one.ours) for one in self.wanted}
        limits: dict[str, float] = {"one": 0.0, "all": 0.0}
        with ExitStack() as stack:
            limit = stack.enter_context(self.start(Contender("limit", "limit", "plain")))
            limit.wait_until_ready()
            running: dict[Contender, Process] = {}
            for one in self.wanted:
                if process := self._admitted(one, rows[one], stack):
                    running[one] = process
            started, turn = time.perf_counter(), 0
            while running and time.perf_counter() - started < seconds:
                _, rates = limit.round()
                limits = {key: max(best, rates[key]) for key, best in limits.items()}
                order = list(running)
                for one in order[turn % len(order) :] + order[: turn % len(order)]:
                    sample, _ = running[one].round()
                    (rows[one].kept if calm(one, sample) else rows[one].thrown).append(sample)
                    print(f"  {turn + 1} {one.name}: {sample.wall:.2f} s", file=sys.stderr)
                turn += 1
                if all(len(rows[one].kept) >= samples for one in running):
                    break
        for one, row in rows.items():
            calmest = sorted(row.kept + row.thrown, key=lambda sample: sample.others)[:samples]
            if used := row.kept if len(row.kept) >= samples else calmest:
                row.seconds = statistics.median(sample.wall for sample in used)
                row.cpu = statistics.median(sample.own * sample.wall for sample in used)
                time_, rate = (row.cpu, limits["one"]) if one.one_thread else (row.seconds, limits["all"])
                row.percent = 100 * operations(self.work, "first order" in one.name) / time_ / rate
        return {"limits": limits, "samples": samples, "rows": list(rows.values())}

    def _admitted(self, one: Contender, row: Row, stack: ExitStack) -> Process | None:
        """The contender at work, if it can be run and does what upfl does; else the row says why not."""
        print(f"{self.work.method}, {self.work.model}: starting {one.name}", file=sys.stderr)
        update = self.check / "update"
        try:
            with self.start(one, self.check) as process:
                process.wait_until_ready()
                process.round(save=update)
            row.difference = self._difference(update, one is self.wanted[0])
            if one.checked and row.difference > TOLERANCE[self.work.model]:
                raise UnavailableError(f"its update differs from upfl's by {row.difference:.1e} of the norm")
            process = stack.enter_context(self.start(one))
            row.note = process.wait_until_ready()
            if self.work.model == "mlp":
                process.round()  # to warm up; a median of the ConvNet's rounds of a minute does not see the first
        except UnavailableError as error:
            row.error = str(error)
            return None
        return process

    def _difference(self, path: Path, first: bool) -> float:
        size = path.stat().st_size // 4
        start = mapped(self.check / "start", (size,)).double()
        update = mapped(path, (size,)).double() - start
        if first:
            self.reference = update
        return float(torch.linalg.vector_norm(update - self.reference) / torch.linalg.vector_norm(self.reference))

    def cold(self, repeats: int, rounds: int = 20) -> list[Row]:
        """From the start of the process to the end of so many rounds."""
        rows = {one: Row(one.name, one.ours) for one in self.wanted if one.name in ("upfl", "Flower simulation")}
        for one in rows:
            if one.environment:
                interpreter(one.environment, self.cache)
        for _ in range(repeats):
            for one, row in rows.items():
                try:
                    started = time.perf_counter()
                    with self.start(one) as process:
                        process.wait_until_ready()
                        samples = [process.round()[0] for _ in range(rounds)]
                        wall = time.perf_counter() - started
                except UnavailableError as error:
                    row.error = str(error)
                    continue
                row.kept.append(
                    Sample(wall, *(statistics.fmean(getattr(s, k) for s in samples) for k in ("own", "others")))
                )
                row.seconds = statistics.median(sample.wall for sample in row.kept)
        return list(rows.values())


def calm(one: Contender, sample: Sample) -> bool:
    """Whether the contender had the cores to itself; the module's docstring says how that is decided."""
    return sample.own >= 0.95 if one.one_thread else sample.others <= 0.05 * len(os.sched_getaffinity(0))


def operations(work: Work, first_order: bool) -> float:
    """Floating-point operations of a round's matrix products, counted as `benchmarks.steps` counts them."""
    model = mlp(784, (200, 200), 10) if work.model == "mlp" else convnet(work.shape, 10)
    first, others = forward_operations(model, work.shape)
    passes = (2, 3) if work.method == "fedavg" else (5, 8) if first_order else (6, 12)
    return work.clients * work.iterations * (passes[0] * first + passes[1] * others)


def title(work: Work) -> str:
    shown = {
        "fedavg": "FedAvg",
        "fedtta": "FedTTA",
        "convnet": "ConvNet, CIFAR-10's shape",
        "mlp": "MLP, MNIST's shape",
        "module": "ConvNet as a torch.nn.Module, CIFAR-10's shape",
    }
    return (
        f"### {shown[work.method]}, {shown[work.model]}\n\n"
        f"{work.clients} clients, {work.iterations} iterations of batch {work.batch}."
    )


def table(result: dict[str, Any]) -> str:
    limits, rows = result["limits"], result["rows"]
    first = rows[0]
    lines = [
        f"Limit: {limits['all'] / 1e9:.0f} GFLOP/s on all cores, {limits['one'] / 1e9:.0f} on one.\n",
        "| contender | s a round | over upfl's | CPU s | over upfl's | % of limit | kept | thrown | difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    remarks: list[str] = []
    for row in rows:
        name = row.contender + _mark(row.note, remarks)
        if row.seconds is None:
            lines.append(f"| {name} | did not run: {row.error} | | | | | | | |")
            continue
        few = len(row.kept) < result["samples"]
        disturbed = f"too few calm samples: the median of the {result['samples']} calmest" if few else ""
        cells = [
            f"{row.seconds:.2f}{_mark(disturbed, remarks)}",
            f"{row.seconds / first.seconds:.2f}" if first.seconds else "",
            f"{row.cpu:.2f}",
            f"{row.cpu / first.cpu:.2f}" if first.cpu else "",
            f"{row.percent:.0f}",
            str(len(row.kept)),
            str(len(row.thrown)),
            f"{row.difference:.0e}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [r"\*" * (i + 1) + f" {remark}." for i, remark in enumerate(remarks)]
    return "\n\n".join(["\n".join(lines), *notes])


def cold_table(result: dict[str, Any]) -> str:
    lines = ["| contender | s from start to the end of 20 rounds | all samples |", "|---|---:|---|"]
    for row in result["rows"]:
        shown = f"{row.seconds:.1f}" if row.seconds is not None else f"did not run: {row.error}"
        lines.append(f"| {row.contender} | {shown} | {', '.join(f'{sample.wall:.1f}' for sample in row.kept)} |")
    return "\n".join(lines)


def _mark(remark: str, remarks: list[str]) -> str:
    """Stars that refer to a remark below the table."""
    if not remark:
        return ""
    if remark not in remarks:
        remarks.append(remark)
    return " " + r"\*" * (remarks.index(remark) + 1)


if __name__ == "__main__":
    main()
