"""New clients' accuracy against processor seconds: `python -m benchmarks.processor_seconds RUN METHOD DATASET ...`.

Trains into the run folder with one worker, in this process, whose processor time counts from its start: imports, data
loading, training, and the evaluation that a figure is of with its fits, not those before it. So other work on the
machine counts as little as it can, and the seconds of two commands compare. Each evaluated round is a row, the first
that reaches the target is marked.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import upfl
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.rounds import Engine

PAPER = 83.31  # FedTTA++ on CIFAR-10, after 1000 rounds of 50 clients


class Clock:
    """An observer that tells training from evaluations."""

    def __init__(self) -> None:
        self.looked, self.since = 0.0, 0.0
        self.lines: list[tuple[int, float, dict[str, float]]] = []

    def begin(self, run: Engine[Any]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)

    def stage(self, what: str) -> None:
        if what == "training":
            self.since = 0.0
        elif not self.since:  # the first stage of an evaluation
            self.since = time.process_time()

    def round(self, metrics: dict[str, Any]) -> None:
        now = time.process_time()
        if "rows" in metrics:
            figures = {name: scores["test"] for name, scores in metrics["rows"].items()}
            self.lines.append((metrics["round"], now - self.looked, figures))
            self.looked += now - self.since


def table(lines: list[tuple[int, float, dict[str, float]]], target: float) -> str:
    names = list(lines[0][2])
    reached: set[str] = set()
    rows = [f"| round | processor seconds | {' | '.join(names)} |", f"|---:|---:|{'---:|' * len(names)}"]
    for round, seconds, figures in lines:
        first = {name for name in names if figures[name] >= target} - reached
        reached |= first
        cells = [f"**{figures[name]:.2f}**" if name in first else f"{figures[name]:.2f}" for name in names]
        rows.append(f"| {round} | {seconds:.0f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path)
    parser.add_argument("method")
    parser.add_argument("dataset")
    parser.add_argument("--score", default="", help="further personalizers, comma-separated")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--target", type=float, default=PAPER, help="percent; the paper's FedTTA++ on CIFAR-10")
    given = parser.parse_args()
    keep_freed_memory()
    score = [name for name in given.score.split(",") if name]
    clock = Clock()
    config = upfl.configure(given.method, given.dataset, settings=given.settings, score=score)
    upfl.train(config, given.run, workers=1, observer=clock)
    print(table(clock.lines, given.target))


if __name__ == "__main__":
    main()
