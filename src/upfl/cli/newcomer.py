"""What a newcomer sees of its own model: the class mix, the estimates, the predictions."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from upfl import bundle
from upfl.bundle.in_words import about_accuracy, about_mix, in_words
from upfl.bundle.manifest import TaskSection
from upfl.cli.console import Console
from upfl.data.given import unlabelled
from upfl.data.samples import Samples
from upfl.errors import DataError
from upfl.safe.text import counted, csv_cell

FEW = 20  # samples below which a warning is in place
SHOWN = 12  # classes in a table
BLOCKS = "▁▂▃▄▅▆▇█"


def read(data: Path, task: TaskSection) -> Samples:
    return unlabelled(data, task.input)


def warnings(samples: Samples, federation: bundle.Bundle) -> list[str]:
    found = []
    if samples.skipped:
        some = ", ".join(samples.skipped[:5]) + (", ..." if len(samples.skipped) > 5 else "")
        what = "file(s) left out, no images" if federation.manifest.task.input.kind == "pixels" else "not used"
        found.append(f"{len(samples.skipped)} {what}: {some}")
    if len(samples) < FEW:
        found.append(f"{len(samples)} sample(s) are few: what is found from fewer than {FEW} may be chance")
    return [*found, federation.warning] if federation.warning else found


def best(classes: NDArray[np.str_], probabilities: NDArray[np.float64]) -> list[tuple[str, float]]:
    best = probabilities.argmax(1)
    return [(str(classes[c]), float(row[c])) for c, row in zip(best, probabilities, strict=True)]


def as_csv(
    samples: Samples, classes: NDArray[np.str_], probabilities: NDArray[np.float64], outlying: NDArray[np.bool_]
) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "class", "probability", "outlying"])
    rows = zip(samples.names, best(classes, probabilities), outlying.tolist(), strict=True)
    for name, (likeliest, probability), out in rows:
        writer.writerow([csv_cell(name), csv_cell(likeliest), f"{probability:.4f}", "yes" if out else ""])
    return text.getvalue()


def write(path: Path, text: str) -> None:
    try:
        # File names that are not text are written back as they were found.
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def found(mine: bundle.PersonalModel, samples: Samples, warnings: list[str], out: Path) -> dict[str, Any]:
    mix = bundle.class_mix(mine)
    return {
        "out": str(out),
        "personalizer": mine.manifest.personalizer,
        "samples": len(samples),
        "skipped": list(samples.skipped),
        "warnings": warnings,
        **asdict(mine.diary),
        "mix": dict(zip(map(str, mine.classes_), mix.after, strict=True)),
        "mix_before": dict(zip(map(str, mine.classes_), mix.before, strict=True)),
    }


def show(mine: bundle.PersonalModel, console: Console) -> None:
    diary, manifest = mine.diary, mine.manifest
    console.print(f"[bold]{counted(manifest.samples, 'sample')}, personalized by {manifest.personalizer}[/bold]")
    told = in_words(diary.likeness, manifest.samples)
    console.print(f"[bold red]{escape(told)}[/]" if diary.likeness and diary.likeness.unlike else escape(told))
    console.print(f"{escape(diary.decision)}")
    mix = bundle.class_mix(mine)
    order = np.argsort(-np.maximum(mix.before, mix.after), kind="stable")
    table = Table(title="Class mix of your samples", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("class")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("")
    for c in order[:SHOWN]:
        bar = "█" * round(30 * mix.after[c]) or "▏"
        table.add_row(escape(str(mine.classes_[c])), f"{mix.before[c]:.1%}", f"{mix.after[c]:.1%}", f"[green]{bar}[/]")
    if len(order) > SHOWN:
        rest = order[SHOWN:]
        before, after = (sum(shares[c] for c in rest) for shares in (mix.before, mix.after))
        table.add_row(f"[dim]{len(rest)} others[/dim]", f"{before:.1%}", f"{after:.1%}", "")
    console.print(table)
    console.print(f"the mix after: {about_mix(diary)}")
    if len(diary.entropy) > 1:
        plot = f"{diary.entropy[0]:.3f} {sparkline(diary.entropy)} {diary.entropy[-1]:.3f}"
        console.print(f"uncertainty (mean entropy, nats): {plot}")
    console.print(f"estimated accuracy: {about_accuracy(diary)}")


def sparkline(values: list[float]) -> str:
    """Values as blocks, from the least to the largest."""
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * (value - low) / (high - low or 1))] for value in values)
