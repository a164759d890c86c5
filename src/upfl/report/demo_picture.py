"""The demo's picture: each newcomer's accuracy before and after it personalized, method by method."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from upfl.methods import row_title

mpl.use("Agg")

from matplotlib import pyplot as plt

BEFORE, GAIN, LOSS = "#9aa5b1", "#1b7f5c", "#c2452d"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, panels = plt.subplots(1, len(rows), figsize=(2.6 * len(rows), 4.2), sharey=True, layout="constrained")
    lowest = min(min(c["before"], c["accuracy"]) for row in rows for c in row["clients"] if c["kind"] == "new")
    for panel, row in zip(np.atleast_1d(panels), rows, strict=True):
        clients = sorted((c for c in row["clients"] if c["kind"] == "new"), key=lambda c: (c["before"], c["accuracy"]))
        thin = min(1.0, 50 / len(clients))  # many newcomers leave little room for each
        for place, client in enumerate(clients):
            before, after = client["before"], client["accuracy"]
            colour = GAIN if after > before else LOSS if after < before else BEFORE
            panel.plot([place, place], [before, after], color=colour, linewidth=2 * thin, zorder=1)
            panel.scatter(place, before, s=14 * thin, color=BEFORE, zorder=2)
            panel.scatter(place, after, s=26 * thin, color=colour, zorder=3)
        panel.axhline(row["test"], color="#1f2933", linewidth=0.8, linestyle=":")
        panel.set_title(f"{row_title(row['row'])}\n{row['test_before']:.1f} → {row['test']:.1f}", fontsize=11)
        panel.set_xticks([])
        panel.set_xlabel(f"{len(clients)} new clients", fontsize=9, color="#52606d")
        panel.spines[["top", "right", "bottom"]].set_visible(False)
        panel.set_ylim(10 * (lowest // 10) - 2, 102)
    np.atleast_1d(panels)[0].set_ylabel("accuracy on own unlabelled data, %")
    figure.suptitle(
        "Each line is a newcomer: grey dot before personalization, coloured dot after (green gained, red lost)",
        fontsize=10,
        color="#52606d",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
