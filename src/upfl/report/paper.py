"""The paper's own figures, to stand beside ours: `paper.csv`.

A figure belongs to a data set, a partition and a row. The file names the partition by the experiment that it comes
from and, where the experiment varies the new clients, by the variable and its value.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from upfl.data.partition import Partition, default_partition
from upfl.experiments.definitions import EXPERIMENTS


@dataclass(frozen=True)
class Figure:
    """Percent; the spread is the one that the paper prints, over three initialisations."""

    test: float
    test_spread: float | None
    validation: float | None
    validation_spread: float | None


def paper_figure(dataset: str, partition: Partition, row: str) -> Figure | None:
    """What the paper has for a row on these clients, if anything."""
    return _figures().get((dataset, partition, row))


@cache
def _figures() -> dict[tuple[str, Partition, str], Figure]:
    figures = {}
    with resources.files("upfl.report").joinpath("paper.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            changes = dict(EXPERIMENTS[line["experiment"]].partition)
            if line["variable"]:
                changes[line["variable"]] = float(line["value"])
            partition = default_partition(line["dataset"]).revised(changes)
            figures[line["dataset"], partition, line["row"]] = Figure(
                float(line["test"]), *(_number(line[key]) for key in ("test_spread", "validation", "validation_spread"))
            )
    return figures


def _number(text: str) -> float | None:
    return float(text) if text else None
