"""The lambda experiment's curve and table: `python -m benchmarks.heterogeneous RUN... -o results/heterogeneous.png`.

Reads finished runs of hetero-fedtta (any lambda) and hetero-tent. Figures are of new clients at given rounds, mean and
standard deviation over seeds: validation is of no help in choosing a round here (see results/heterogeneous.md).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from upfl.api import Run

mpl.use("Agg")

from matplotlib import pyplot as plt

Scores = dict[str, list[list[dict[str, Any]]]]  # by method: each seed's evaluated rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("heterogeneous.png"))
    arguments = parser.parse_args()
    scores = collect([Run(path) for path in arguments.runs])
    print(table(scores))
    draw(scores, arguments.out)


def collect(runs: list[Run]) -> Scores:
    scores: Scores = defaultdict(list)
    for run in runs:
        (row,) = (entry["row"] for entry in run.result["rows"])
        name = "hetero-TENT" if row == "hetero-tent" else f"lambda = {run.config.training['lambda_']:.1f}"
        scores[name].append(
            [
                line["rows"][row] | {"round": line["round"], "bytes": line["bytes_up"] / line["clients"]}
                for line in run.metrics
                if "rows" in line
            ]
        )
    return dict(sorted(scores.items()))


def table(scores: Scores) -> str:
    sizes = list(next(iter(scores.values()))[0][-1]["architectures"])
    lines = [
        f"| method | seeds | validation | before | after | gain | {' | '.join(sizes)} | sent up, kB |",
        f"|---|---:|---:|---:|---:|---:|{'---:|' * len(sizes)}---:|",
    ]
    for name, seeds in scores.items():
        last = [rounds[-1] for rounds in seeds]
        cells = [
            *(shown([scored[key] for scored in last]) for key in ("validation", "test_before", "test")),
            shown([scored["test"] - scored["test_before"] for scored in last], "+.1f"),
            *(shown([scored["architectures"][size]["test"] for scored in last]) for size in sizes),
            f"{last[0]['bytes'] / 1000:.1f}",
        ]
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: list[float], form: str = ".1f") -> str:
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.1f}"


def draw(scores: Scores, path: Path) -> None:
    figure, (curves, sweep) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    ours = [name for name in scores if name.startswith("lambda")]
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, max(len(ours), 1)))
    for name, colour in [*zip(ours, colours, strict=True), *((n, "#c2452d") for n in scores if n not in ours)]:
        rounds = [scored["round"] for scored in scores[name][0]]
        tests = np.array([[scored["test"] for scored in seed] for seed in scores[name]])
        style = "-" if name in ours else "--"
        curves.plot(rounds, tests.mean(0), style, color=colour, marker="o", markersize=3, label=name)
    curves.set_xlabel("round")
    curves.set_ylabel("new clients' accuracy, %")
    curves.legend(fontsize=8)
    x = [float(name.split()[-1]) for name in ours]
    for key, label, colour in (("test_before", "before its step", "#9aa5b1"), ("test", "after its step", "#1b7f5c")):
        ends = [[seed[-1][key] for seed in scores[name]] for name in ours]
        for place, seeds in zip(x, ends, strict=True):
            sweep.scatter([place] * len(seeds), seeds, s=10, color=colour, alpha=0.5)
        sweep.plot(x, [np.mean(seeds) for seeds in ends], color=colour, marker="o", markersize=4, label=label)
    for name in scores.keys() - set(ours):
        end = np.mean([seed[-1]["test"] for seed in scores[name]])
        sweep.axhline(end, color="#c2452d", linestyle="--", label=f"{name}, after its step")
    sweep.set_xlabel("lambda, at the last round")
    sweep.legend(fontsize=8)
    for panel in (curves, sweep):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
