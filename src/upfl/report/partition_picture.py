"""A partition as a picture: which client holds how much of which class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure  # no pyplot: no display needed
from numpy.typing import NDArray

from upfl.data import Federation, Partition, class_counts
from upfl.errors import ConfigError

MOST_NAMES = 60  # clients that are named at the side


def draw(federation: Federation, partition: Partition, output: Path) -> None:
    names = federation.source.class_names
    roles = [(*of, colours) for of, colours in zip(federation.roles(), ("Blues", "Oranges"), strict=True)]
    shares = [_shares(class_counts(federation, clients)) for _, clients, _ in roles]
    most = max(float(share.max()) for share in shares)
    width = 2 * min(1.6 + 0.28 * len(names), 9.0) + 2
    tallest = max(len(share) for share in shares)
    figure = Figure(figsize=(width, min(max(3.2, 1.4 + 0.13 * tallest), 12)), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(5, 1, 5, 1))
    for (role, clients, colours), share, (heat, bars) in zip(roles, shares, (axes[:2], axes[2:]), strict=True):
        _draw_shares(heat, share, colours, most)
        _draw_sizes(bars, clients.sizes(), heat.get_ylim())
        heat.set_title(f"{len(clients)} {role} clients", fontsize=9)
        if len(clients) <= MOST_NAMES and (named := federation.names(role)):
            heat.set_yticks(range(len(named)), [name[:20] for name in named])
        heat.set_xticks(*_ticks(names), rotation=90 if max(map(len, names)) > 2 else 0)
    title = f"{federation.source.name}, {partition.kind}: the darker, the larger a class's share of a client's samples"
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise ConfigError(f"cannot write the picture {output}: {error}") from error


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    share: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # some have no labels
    return share


def _draw_shares(axes: Any, share: NDArray[np.float64], colours: str, most: float) -> None:
    held = np.ma.masked_equal(share, 0)  # few samples must look different from none
    axes.imshow(held, cmap=colours, vmin=-0.15 * most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set_facecolor("0.97")
    axes.set_ylabel("client", fontsize=8)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)


def _draw_sizes(axes: Any, sizes: NDArray[np.int64], limits: tuple[float, float]) -> None:
    axes.barh(np.arange(len(sizes)), sizes, height=0.8, color="0.75")
    axes.set_ylim(*limits)
    axes.set_yticks([])
    axes.set_title("samples", fontsize=8)
    axes.locator_params(axis="x", nbins=2)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _ticks(names: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Every class by name while there is room, every tenth by number beyond."""
    if len(names) <= 62:
        return list(range(len(names))), list(names)
    return list(range(0, len(names), 10)), [str(index) for index in range(0, len(names), 10)]
