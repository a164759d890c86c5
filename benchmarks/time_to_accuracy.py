"""New clients' accuracy against seconds of training: `python -m benchmarks.time_to_accuracy RUN... -o curve.png`.

Every row that a run was scored under is a curve over its evaluated rounds. Seconds are of training alone, summed over
rounds: evaluation is how one looks, not what one pays for. The table says when each row first reached the target.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

from upfl.api import Run
from upfl.methods import row_title

mpl.use("Agg")

from matplotlib import pyplot as plt

PAPER = 83.31  # FedTTA++ on CIFAR-10, after 1000 rounds of 50 clients


class Point(NamedTuple):
    round: int
    seconds: float
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("time-to-accuracy.png"))
    parser.add_argument("--target", type=float, default=PAPER, help="percent; the paper's FedTTA++ on CIFAR-10")
    arguments = parser.parse_args()
    curves = {name: curve for path in arguments.runs for name, curve in read(Run(path)).items()}
    print(table(curves, arguments.target))
    draw(curves, arguments.target, arguments.out)


def read(run: Run) -> dict[str, list[Point]]:
    """Each row's curve, by its title."""
    curves: dict[str, list[Point]] = {}
    seconds = 0.0
    for line in run.metrics:
        seconds += line["train_s"]
        for row, scores in line.get("rows", {}).items():
            curves.setdefault(row_title(row), []).append(Point(line["round"], seconds, scores["test"]))
    return curves


def table(curves: dict[str, list[Point]], target: float) -> str:
    lines = [f"| row | rounds | seconds | new clients | {target:g} reached after |", "|---|---:|---:|---:|---:|"]
    for name, curve in curves.items():
        last, hit = curve[-1], next((point for point in curve if point.accuracy >= target), None)
        reached = f"{hit.seconds:.0f} s, round {hit.round}" if hit else "not reached"
        lines.append(f"| {name} | {last.round} | {last.seconds:.0f} | {last.accuracy:.2f} | {reached} |")
    return "\n".join(lines)


def draw(curves: dict[str, list[Point]], target: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        seconds, accuracies = [point.seconds for point in curve], [point.accuracy for point in curve]
        axes.plot(seconds, accuracies, marker="o", markersize=3, label=name)
    axes.axhline(target, color="#8b97a5", linestyle="--", linewidth=1)
    axes.annotate(f"{target:g}", (0.01, target), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=8)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("new clients' accuracy, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
