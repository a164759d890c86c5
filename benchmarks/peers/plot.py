"""Results of `python -m benchmarks.peers -o FILE` as a picture: `python -m benchmarks.peers.plot FILE... -o speed.png`.

A panel for each table: the seconds that a round takes over upfl's, and the time that its operations would take at the
machine's limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MODELS = {"convnet": "ConvNet", "mlp": "MLP"}
METHODS = {"fedavg": "FedAvg", "fedtta": "FedTTA"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("speed.png"))
    arguments = parser.parse_args()
    draw([result for file in arguments.files for result in json.loads(file.read_text())["results"]], arguments.out)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    counts = [len(_timed(result)) for result in results]
    figure, panels = plt.subplots(
        len(results), figsize=(8, 1.2 * len(results) + 0.28 * sum(counts)), squeeze=False, height_ratios=counts
    )
    for panel, result in zip(panels.flat, results, strict=True):
        bars(panel, result)
    panels.flat[-1].set_xlabel(
        "time a round over upfl's; dashed: the machine's limit for upfl's operations", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def bars(axes: Axes, result: dict[str, Any]) -> None:
    rows, work = _timed(result), result["work"]
    own = rows[0]
    names, ratios = [row["contender"] for row in rows], [row["seconds"] / own["seconds"] for row in rows]
    drawn = axes.barh(names, ratios, color=["#17825b" if row["ours"] else "#97a3b0" for row in rows])
    axes.bar_label(drawn, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(own["percent"] / 100, color="#c0442c", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(ratios))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{METHODS[work['method']]}, {MODELS[work['model']]}, {work['clients']} clients", fontsize=9)


def _timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The contenders that ran, upfl first."""
    return [row for row in result["rows"] if row["seconds"]]


if __name__ == "__main__":
    main()
