"""Where a round's time goes: `python -m benchmarks.rounds --method fedavg --model convnet --clients 4`.

Processor time of the first worker's thread, by part, each without the parts within it: medians over the rounds after
the first ones, in which steps are recorded and libraries make their kernels. What other threads of the process take
(merging, files that are written meanwhile) stands on a line of its own, the clock's time below it. The product knows
nothing of this: its functions are wrapped from outside. `--avx2` holds all libraries to AVX2, where the processor has more.

The data are random, of MNIST's shape for models of vectors and CIFAR-10's for others. Nothing is evaluated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upfl.config import Config
    from upfl.data.federation import Federation
    from upfl.engine.rounds import Engine

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
STEPS, FIRST, ELSE = "steps", "first step of a client, beyond a usual one", "all else"
OTHERS, OWN, WALL = "other threads of the process", "own", "wall"
WARM = 3  # rounds that are not counted
SAMPLES = 600  # of each client, of which 15% are for validation


class Parts:
    """Time by part, each without the parts within it."""

    def __init__(self) -> None:
        self.rounds: list[Counter[str]] = []
        self._stack = [ELSE]
        self.steps: list[float] = []
        self.first: list[float] = []
        self.begin()

    def begin(self) -> None:
        self.now: Counter[str] = Counter()
        self._since, self._all, self._wall = time.thread_time(), time.process_time(), time.perf_counter()
        self._round_began = self._since

    def enter(self, part: str) -> None:
        self._until_now()
        self._stack.append(part)

    def leave(self) -> None:
        self._until_now()
        self._stack.pop()

    def _until_now(self) -> None:
        now = time.thread_time()
        self.now[self._stack[-1]] += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            self.enter(part)
            try:
                return original(*arguments)
            finally:
                self.leave()

        setattr(owner, name, timed)

    def wrap_items(self, owner: Any, name: str, part: str) -> None:
        """The same for a function that gives one thing after another."""
        original = getattr(owner, name)

        def timed(*arguments: Any) -> Iterator[Any]:
            items = original(*arguments)
            while True:
                self.enter(part)
                item = next(items, None)
                self.leave()
                if item is None:
                    return
                yield item

        setattr(owner, name, timed)

    def stepping(self, steps: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.enter(STEPS)
            began = self._since
            result = steps(*arguments)
            self.leave()
            (self.steps if self.begun else self.first).append(self._since - began)
            self.begun = True
            return result

        return timed

    def client_begins(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.begun = False
            self.enter("start of a client: copies, layout")
            carry = begin(*arguments)
            self.leave()
            return carry

        return timed

    def round_ends(self) -> None:
        self._until_now()
        usual = statistics.median(self.steps or self.first)
        beyond = sum(self.first) - usual * len(self.first)
        self.now[STEPS] -= beyond
        self.now[FIRST] = beyond
        own = self._since - self._round_began
        self.now[OTHERS] = time.process_time() - self._all - own
        self.now[WALL], self.now[OWN] = time.perf_counter() - self._wall, own
        self.rounds.append(self.now)
        self.steps, self.first = [], []
        self.begin()


def watched(parts: Parts, engine: Any) -> None:
    """Wrap what a round is made of."""
    from upfl.data.inputs import Inputs
    from upfl.engine.clients import LocalClient
    from upfl.engine.fold import FixedPointSum

    training, cohort, folder = engine.training, engine.cohort, engine.folder
    cohort.steps = parts.stepping(cohort.steps)
    training.begin = parts.client_begins(training.begin)
    parts.wrap_items(LocalClient, "phase", "batches: order, labels")
    parts.wrap(Inputs, "x", "batches: gathering")
    parts.wrap(engine.setup.inputs, "_read", "batches: normalizing, layout")
    parts.wrap(training, "finish", "change")
    parts.wrap(FixedPointSum, "check", "sum: check")
    parts.wrap(FixedPointSum, "add", "sum: conversion, addition")
    parts.wrap(engine.group, "sum_", "merging")
    parts.wrap(training, "aggregate", "aggregate")
    parts.wrap(folder, "append_metrics", "metrics")
    parts.wrap(folder, "save", "checkpoint")
    for name in ("save_memory", "load_memory", "supersede_memory"):
        parts.wrap(folder, name, "clients' memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7, help="that are counted")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--follow", nargs=3, help="rank, rendezvous and run folder: what the first process gives")
    given = parser.parse_args()
    if given.avx2 and not AVX2.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.rounds", *sys.argv[1:]], os.environ | AVX2)
    run(given)


def run(given: argparse.Namespace) -> None:
    # Only here: the libraries look at the environment when they are loaded.
    from benchmarks.workers import following, leading
    from upfl.engine.rounds import Engine
    from upfl.engine.setup import assemble

    config = configured(given)
    setup = assemble(config, federation(config))
    if given.follow:
        folder, group = following(given.workers, *given.follow)
        Engine.local(folder, group, setup).run()
        return
    with leading("benchmarks.rounds", given.workers, config) as (folder, group):
        parts, engine = Parts(), Engine.local(folder, group, setup)
        watched(parts, engine)
        engine.run(Watching(parts))
    report(parts.rounds[WARM:], given)


def configured(given: argparse.Namespace) -> Config:
    from upfl.config import configure

    return configure(
        given.method,
        "mnist" if given.model == "mlp" else "cifar10",  # the shape's name; the data are random
        model=given.model,
        rounds=WARM + given.rounds + 1,  # the last one is evaluated, and not counted
        clients_per_round=given.clients,
        evaluate_every=10**9,
        evaluate_clients=1,
        training={"iterations": given.iterations},
        partition={"kind": "iid", "clients": 2 * given.clients},
    )


def federation(config: Config) -> Federation:
    import numpy as np
    from upfl.data.federation import build_federation
    from upfl.data.forms import Pixels
    from upfl.data.partition import Partition
    from upfl.data.source import Source

    shape = (1, 28, 28) if config.dataset == "mnist" else (3, 32, 32)
    rng, count = np.random.default_rng(0), config.partition.clients * SAMPLES
    pixels = rng.integers(0, 256, (count, *shape), np.uint8)
    form = Pixels(shape=shape, scale=255.0, mean=(0.5,) * shape[0], std=(0.25,) * shape[0])
    source = Source("random", pixels, rng.integers(0, 10, count), tuple("0123456789"), count, None, form)
    partition = Partition.model_validate(config.partition.model_dump())
    return build_federation(source, partition, config.partition_seed, config.model.sizes)


class Watching:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def begin(self, run: Engine[Any]) -> None:
        self.parts.begin()

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None:
        self.parts.round_ends()


def report(rounds: list[Counter[str]], given: argparse.Namespace) -> None:
    rounds = rounds[:-1]
    medians = {name: statistics.median(one[name] for one in rounds) for name in dict.fromkeys(n for r in rounds for n in r)}
    wall, own = medians.pop(WALL), medians.pop(OWN)
    others, steps = medians.pop(OTHERS), medians[STEPS]
    print(f"{given.method}, {given.model}, {given.clients} clients of {given.iterations} steps: milliseconds a round\n")
    for name, taken in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{name:44}{1e3 * taken:10.2f}{taken / steps:9.1%} of steps")
    print(f"{'the round':44}{1e3 * own:10.2f}{own / steps:9.3f} times its steps")
    print(f"{OTHERS:44}{1e3 * others:10.2f}\n{'by the clock':44}{1e3 * wall:10.2f}")


if __name__ == "__main__":
    main()
