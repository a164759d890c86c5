"""Where a round's time goes: `python -m benchmarks.rounds --method fedavg --model convnet --clients 4`.

Processor time of the first worker's thread, by part, each without the parts within it: medians over the rounds after
the first ones, in which steps are recorded and libraries make their kernels. What other threads of the process take
(merging, a checkpoint that is written meanwhile) stands on a line of its own. Nothing of this is in the engine: its
functions are wrapped from outside. `--avx2` holds all libraries to AVX2 where the processor has more.

The data are random, of MNIST's shape for the MLP and of CIFAR-10's for other models. Nothing is evaluated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.growth import Teller
from benchmarks.workers import following, leading
from upfl.config import Config, configure
from upfl.data.federation import Federation, build_federation
from upfl.data.forms import Pixels
from upfl.data.inputs import Inputs
from upfl.data.partition import Partition
from upfl.data.source import Source
from upfl.engine.clients import LocalClient
from upfl.engine.fold import FixedPointSum
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2 |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
STEPS, ELSE = "steps", "all else"
OTHERS, OWN, WALL = "other threads of the process", "the round", "by the clock"
WARM = 3  # rounds that are not counted
SAMPLES = 600  # of each client, of which 15% are for validation


class Parts(Teller):
    """Time by part, each without the parts within it; told by the engine when a round is done."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.rounds: list[dict[str, float]] = []
        self._stack = [ELSE]
        self._begin()
        training, cohort = engine.training, engine.cohort
        self._wrap(cohort, "steps", STEPS)
        self._wrap(training, "begin", "start of a client: copies, layout")
        self._wrap_items(LocalClient, "phase", "batches: order, labels")
        self._wrap(Inputs, "x", "batches: gathering")
        self._wrap(engine.setup.inputs, "_read", "batches: normalizing, layout")
        self._wrap(training, "finish", "change")
        self._wrap(FixedPointSum, "check", "sum: check")
        self._wrap(FixedPointSum, "add", "sum: conversion, addition")
        self._wrap(engine.group, "sum_", "merging")
        self._wrap(training, "aggregate", "aggregate")
        self._wrap(engine, "_record", "checkpoint, metrics")
        for name in ("save_memory", "load_memory"):
            self._wrap(engine.folder, name, "clients' memory")

    def begin(self, run: Engine[Any]) -> None:
        self._begin()

    def round(self, metrics: dict[str, Any]) -> None:
        self._until_now()
        self.now[OWN] = self._since - self._began[0]
        self.now[OTHERS] = time.process_time() - self._began[1] - self.now[OWN]
        self.now[WALL] = time.perf_counter() - self._began[2]
        self.rounds.append(self.now)
        self._begin()

    def _begin(self) -> None:
        self.now = defaultdict[str, float](float)
        self._began = time.thread_time(), time.process_time(), time.perf_counter()
        self._since = self._began[0]

    def _enter(self, part: str) -> None:
        self._until_now()
        self._stack.append(part)

    def _leave(self) -> None:
        self._until_now()
        self._stack.pop()

    def _until_now(self) -> None:
        now = time.thread_time()
        self.now[self._stack[-1]] += now - self._since
        self._since = now

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            self._enter(part)
            try:
                return original(*arguments)
            finally:
                self._leave()

        setattr(owner, name, timed)

    def _wrap_items(self, owner: Any, name: str, part: str) -> None:
        """The same for a function that gives one thing after another."""
        original = getattr(owner, name)

        def timed(*arguments: Any) -> Iterator[Any]:
            items = original(*arguments)
            while True:
                self._enter(part)
                item = next(items, None)
                self._leave()
                if item is None:
                    return
                yield item

        setattr(owner, name, timed)


def configured(given: argparse.Namespace) -> Config:
    return configure(
        given.method,
        "mnist" if given.model == "mlp" else "cifar10",  # the shape's name
        model=given.model,
        rounds=WARM + given.rounds + 1,  # the last one is evaluated, and not counted
        clients_per_round=given.clients,
        evaluate_every=10**9,
        evaluate_clients=1,
        training={"iterations": given.iterations},
        partition={"kind": "iid", "clients": 2 * given.clients},
    )


def federation(config: Config) -> Federation:
    shape = (1, 28, 28) if config.dataset == "mnist" else (3, 32, 32)
    rng, count = np.random.default_rng(0), config.partition.clients * SAMPLES
    pixels = rng.integers(0, 256, (count, *shape), np.uint8)
    form = Pixels(shape=shape, scale=255.0, mean=(0.5,) * shape[0], std=(0.25,) * shape[0])
    source = Source("random", pixels, rng.integers(0, 10, count), tuple("0123456789"), count, None, form)
    partition = Partition.model_validate(config.partition.model_dump())
    return build_federation(source, partition, config.partition_seed, config.model.sizes)


def report(rounds: list[dict[str, float]], given: argparse.Namespace) -> None:
    names = dict.fromkeys(name for one in rounds for name in one)
    taken = {name: statistics.median(one[name] for one in rounds) for name in names}
    print(f"{given.method}, {given.model}, {given.clients} clients of {given.iterations} steps: milliseconds a round\n")
    for name in sorted(taken.keys() - {OWN, OTHERS, WALL}, key=lambda name: -taken[name]):
        print(f"{name:44}{1e3 * taken[name]:10.2f}{taken[name] / taken[STEPS]:9.1%} of steps")
    print(f"{OWN:44}{1e3 * taken[OWN]:10.2f}{taken[OWN] / taken[STEPS]:9.3f} times its steps")
    print("\n".join(f"{name:44}{1e3 * taken[name]:10.2f}" for name in (OTHERS, WALL)))


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
    if given.avx2:  # libraries look at the environment when they are loaded
        again = [argument for argument in sys.argv[1:] if argument != "--avx2"]
        sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.rounds", *again], env=os.environ | AVX2).returncode)
    config = configured(given)
    setup = assemble(config, federation(config))
    if given.follow:
        Engine.local(*following(given.workers, *given.follow), setup).run()
        return
    with leading("benchmarks.rounds", given.workers, config) as (folder, group):
        engine = Engine.local(folder, group, setup)
        parts = Parts(engine)
        engine.run(parts)
    report(parts.rounds[WARM:-1], given)


if __name__ == "__main__":
    main()
