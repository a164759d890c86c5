"""How near `auto` comes to the best single personalizer: `python -m benchmarks.auto digits=p0.json,p1.json ...`.

Each argument is a setting and its files, one for each partition, as `upfl score RUN --score
none,one-step,early-stopped,calibrated,label-shift,auto -o FILE` writes them. The best single personalizer of a setting
is the one with the highest mean accuracy over its partitions, which is known only afterwards. The interval of the
distance is a bootstrap over clients, paired, each partition for itself; below 0 `auto` is the better one. A setting
passes where that interval reaches below half a point; where label shift is the point (`--keeps`), `auto` must also keep
at least half of label-shift's gain.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.report.statistics import bootstrap

SINGLE = ("none", "one-step", "early-stopped", "label-shift")
WITHIN = 0.5
Rows = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]  # right predictions and samples of each client


def read(path: Path) -> Rows:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {row["name"]: _clients(row["clients"]) for row in found["rows"] if not row["bound"]}


def _clients(clients: list[dict[str, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes = np.array([client["size"] for client in clients], np.float64)
    return np.array([client["accuracy"] for client in clients]) / 100 * sizes, sizes


def difference(partitions: list[Rows], ours: str, theirs: str) -> tuple[float, float, float]:
    interval = bootstrap([(rows[ours][0] - rows[theirs][0], rows[ours][1]) for rows in partitions])
    return interval.value, interval.low, interval.high


def accuracy(partitions: list[Rows], name: str) -> list[float]:
    return [100 * float(right.sum() / sizes.sum()) for right, sizes in (rows[name] for rows in partitions)]


def line(setting: str, partitions: list[Rows], keeps: bool) -> str:
    """A setting's row of the table."""
    single = [name for name in SINGLE if all(name in rows for rows in partitions)]
    means = {name: float(np.mean(accuracy(partitions, name))) for name in single}
    best = max(means, key=lambda name: means[name])
    value, low, high = difference(partitions, best, "auto")
    passes = low < WITHIN
    kept = ""
    if keeps:
        gain = difference(partitions, "label-shift", "none")[0]
        share = difference(partitions, "auto", "none")[0] / gain
        kept, passes = f"{100 * share:.0f}%", passes and share >= 0.5
    figures = [f"{means[name]:.1f}" if name in means else "" for name in SINGLE]
    each = " ".join(f"{one:.1f}" for one in accuracy(partitions, "auto"))
    cells = [
        setting,
        *figures,
        f"{np.mean(accuracy(partitions, 'auto')):.1f} ({each})",
        f"{best}: {value:+.1f} [{low:+.1f}, {high:+.1f}]",
        kept,
        "yes" if passes else "**no**",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("settings", nargs="+", metavar="NAME=FILE,...")
    parser.add_argument("--keeps", default="", help="settings, with commas, where half of label-shift's gain must stay")
    arguments = parser.parse_args()
    print(f"| setting | {' | '.join(SINGLE)} | auto (each partition) | best single, its lead | kept | passes |")
    print(f"|---|{'---:|' * (len(SINGLE) + 4)}")
    for setting in arguments.settings:
        name, _, files = setting.partition("=")
        print(line(name, [read(Path(file)) for file in files.split(",")], name in arguments.keeps.split(",")))


if __name__ == "__main__":
    main()
