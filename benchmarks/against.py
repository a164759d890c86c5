"""This checkout against another one, sample by sample in turn: steps, clients' rounds, whole rounds, cold start.

    git worktree add ../old ac082f2
    python -m benchmarks.against ../old --samples 14
    python -m benchmarks.against ../old --whole mlp convnet --clients 8 --busy

Both get the same core in turn, so that both see the same machine. Printed are medians of processor time (of wall time
for a cold start), and their ratio. Samples that did not have their core for themselves are thrown away.
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.ours import prepare
from benchmarks.peers.process import Process
from benchmarks.peers.work import Work

ROOT = Path(__file__).parents[1]
COLD = (["-m", "upfl", "--help"], ["-c", "import upfl"])

# What runs in each checkout, with the names that either may have.
CHILD = """
import json, sys, time, torch
from benchmarks import steps
from upfl.config import configure
from upfl.engine.clients import LocalClient
from upfl.engine.local import train_clients
from upfl.engine.recorded import steps_of
from upfl.engine.rounds import one_thread
from upfl.randomness import generator
try:
    from upfl.engine.setup import assemble
except ModuleNotFoundError:
    from upfl.engine.rounds import assemble
try:
    from upfl.engine.allocator import keep_freed_memory  # as workers have it; at ac082f2 one_thread did it
    keep_freed_memory()
except ModuleNotFoundError:
    pass

def rounds(method):
    config, cpu = configure(method, "digits", profile="smoke"), torch.device("cpu")
    made = assemble(config) if assemble.__module__.endswith("setup") else assemble(config, cpu)
    parts = made[:3] if isinstance(made, tuple) else (made.federation, made.inputs, made.training)
    federation, inputs, training = parts
    server, how, count = training.init(generator(0, "init")), steps_of(training, cpu), [0]

    def one():
        count[0] += 1
        client = LocalClient(federation, inputs, 0, count[0] % len(federation.training), count[0] % 50)
        train_clients(training, server, [{}], [client], how)

    return one, 100

with one_thread(), torch.no_grad():
    jobs = {name: job for name, job in steps.jobs().items() if "autograd" not in name}
    work = {name: (step, max(1, round(1.5e10 / cost))) for name, (step, cost) in jobs.items()}
    work |= {f"a client's round on digits, {method}": rounds(method) for method in ("fedavg", "fedtta")}
    work = {name: job for name, job in work.items() if sys.argv[1] in name}
    for step, repeats in work.values():
        for _ in range(repeats):  # small models have been recorded then
            step()
    print(json.dumps(list(work)), flush=True)
    for line in sys.stdin:
        step, repeats = work[line.rstrip("\\n")]
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(repeats):
            step()
        print(json.dumps([(time.perf_counter() - wall) / repeats, (time.thread_time() - cpu) / repeats]), flush=True)
"""


def whole_rounds(model: str, given: argparse.Namespace, trees: list[Path]) -> None:
    """Rounds with all that belongs to them, checkpoint and metrics: processor time of the whole process."""
    found: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as made, ExitStack() as at_end:
        folder = Path(made)
        prepare(Work(model, given.method, clients=given.clients), folder)  # type: ignore[arg-type]
        command, processes = [sys.executable, "-P", "-m", "benchmarks.peers.ours", made], list[Process]()
        for i, tree in enumerate(trees):
            process = Process(command, folder / f"log{i}", [str(tree / "src"), str(tree)])
            processes.append(at_end.enter_context(process))
            process.wait_until_ready()
            process.round()  # kernels are made, and steps recorded

        def ask(which: int) -> None:
            before = processor_seconds(processes[which].process.pid)
            processes[which].round()
            found[which].append((processor_seconds(processes[which].process.pid) - before) / given.clients)

        in_turn(given.samples, lambda: ask(0), lambda: ask(1))
    show(f"a client's share of a round, {given.method} {model}", found[0], found[1], 1e3, "ms")


def processor_seconds(process: int) -> float:
    """Of all threads of a process that live, to the nanosecond."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"}


def in_turn(samples: int, ours: Callable[[], None], theirs: Callable[[], None]) -> None:
    for number in range(samples):
        for one in (ours, theirs) if number % 2 else (theirs, ours):
            one()


def show(name: str, ours: list[float], theirs: list[float], unit: float, word: str) -> None:
    this, other = statistics.median(ours), statistics.median(theirs)
    print(f"{name:48}{unit * other:10.3f}{unit * this:10.3f} {word}{this / other:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--samples", type=int, default=14)
    parser.add_argument("--only", default="", help="those with this in their names, such as MLP or round")
    parser.add_argument("--busy", action="store_true", help="keep samples that did not have their core for themselves")
    parser.add_argument("--whole", nargs="+", default=[], help="whole rounds of these models instead: mlp, convnet")
    parser.add_argument("--method", default="fedavg", help="of whole rounds: fedavg or fedtta")
    parser.add_argument("--clients", type=int, default=8, help="of whole rounds")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and not given.busy:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    trees = [ROOT, given.other.resolve()]
    print(f"{'':48}{'other':>10}{'this':>10}   {'ratio':>8}")
    for model in given.whole:
        whole_rounds(model, given, trees)
    if given.whole:
        return
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, given.only],
            cwd=tree,
            env=environment(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in trees
    ]
    names = [json.loads(_line(child)) for child in children]
    for name in (name for name in names[0] if name in names[1]):
        found: list[list[float]] = [[], []]

        def ask(which: int, name: str = name, found: list[list[float]] = found) -> None:
            print(name, file=children[which].stdin, flush=True)
            wall, cpu = json.loads(_line(children[which]))
            if given.busy or cpu > 0.95 * wall:
                found[which].append(cpu)

        in_turn(given.samples, lambda: ask(0), lambda: ask(1))
        if min(map(len, found)) < given.samples // 2:
            print(f"{name:48} the machine is too busy", flush=True)
        else:
            show(name, found[0], found[1], 1e3, "ms")
    for child in children:
        child.communicate()
    for command in COLD:
        took: list[list[float]] = [[], []]

        def start(which: int, command: list[str] = command, took: list[list[float]] = took) -> None:
            begun = time.perf_counter()
            subprocess.run(
                [sys.executable, *command], env=environment(trees[which]), stdout=subprocess.DEVNULL, check=True
            )
            took[which].append(time.perf_counter() - begun)

        in_turn(5, lambda: start(0), lambda: start(1))
        show(f"python {' '.join(command)}", took[0], took[1], 1.0, " s")


def _line(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return child.stdout.readline()


if __name__ == "__main__":
    main()
