"""How near `auto` comes to the best single personalizer: `python -m benchmarks.auto digits=p0.json,p1.json ...`.

Each argument is a setting and its files, one for each partition, as `upfl score RUN --score
none,calibrated,label-shift,refit+calibrated,refit+label-shift,one-step,early-stopped,auto -o FILE` writes them, without
those that the training does not allow. The best single personalizer of a setting
is the one with the highest mean accuracy over its partitions, which is known only afterwards. The interval of the
distance is a bootstrap over clients, paired, each partition for itself; below 0 `auto` is the better one. A setting
passes where that interval reaches below half a point; where label shift is the point (`--keeps`), `auto` must also keep
at least half of label-shift's gain.

`--harm` has a second table: label-shift and `auto` (or what `--of` names) against the raw and the calibrated model,
clients of 100 samples and more that lose over two points with McNemar's p under 0.05, smaller ones pooled; and how far
the label-free estimate is off, a mean over clients.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.statistics import bootstrap, mcnemar

SINGLE = ("none", "calibrated", "label-shift", "refit+calibrated", "refit+label-shift", "one-step", "early-stopped")
WITHIN = 0.5
Rows = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]  # right predictions and samples of each client


def read(path: Path) -> Rows:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {row["name"]: _clients(row["clients"]) for row in found["rows"] if not row["bound"]}


def _clients(clients: list[dict[str, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes = np.array([client["size"] for client in clients], np.float64)
    return np.array([client["accuracy"] for client in clients]) / 100 * sizes, sizes


def harm(setting: str, files: list[Path], names: list[str]) -> list[str]:
    """The rows of the second table."""
    partitions = [read(file) for file in files]
    found = [{row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]} for file in files]
    lines = []
    for name in names:
        estimates = [rows[name]["estimate"] for rows in found]
        off, covered = (np.mean([one[key] for one in estimates]) for key in ("mean_absolute_error", "covered"))
        for reference in ("none", "calibrated"):
            value, low, high = difference(partitions, name, reference)
            against = [rows[name][f"against_{reference}"] for rows in found]
            harmed, large = (sum(one[key] for one in against) for key in ("harmed_large_clients", "large_clients"))
            lost, won = (sum(one["small_clients"][way] for one in against) for way in ("lost", "won"))
            cells = [
                setting,
                f"{name} against {reference}",
                f"{value:+.2f} [{low:+.2f}, {high:+.2f}]",
                f"{harmed} of {large}",
                f"{lost}, {won} (p {mcnemar(lost, won):.2g})",
                f"{off:.1f}, {covered:.0f}%",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    parser.add_argument("--harm", action="store_true", help="the second table instead")
    parser.add_argument("--of", default="label-shift,auto", help="whose harm, with commas")
    arguments = parser.parse_args()
    named = [setting.partition("=") for setting in arguments.settings]
    settings = {name: [Path(file) for file in files.split(",")] for name, _, files in named}
    if arguments.harm:
        print("| setting | | difference | large clients harmed | small clients: lost, won | estimate off by, covered |")
        print("|---|---|---:|---:|---:|---:|")
        print("\n".join(row for name, files in settings.items() for row in harm(name, files, arguments.of.split(","))))
        return
    print(f"| setting | {' | '.join(SINGLE)} | auto (each partition) | best single, its lead | kept | passes |")
    print(f"|---|{'---:|' * (len(SINGLE) + 4)}")
    for name, files in settings.items():
        print(line(name, [read(file) for file in files], name in arguments.keeps.split(",")))


if __name__ == "__main__":
    main()
