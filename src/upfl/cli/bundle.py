"""`upfl export`, `upfl personalize`, `upfl predict`, `upfl export-onnx`: from a run to a newcomer's own model."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from upfl import api, bundle
from upfl.bundle.manifest import TaskSection
from upfl.cli.console import Console, echo
from upfl.cli.runs import AsJson
from upfl.config import listed
from upfl.contract import Estimate
from upfl.data.files import Samples, load_unlabelled
from upfl.errors import DataError
from upfl.safe.text import csv_cell

FEW = 20  # samples below which a warning is in place
SHOWN = 12  # classes in a table
BLOCKS = "▁▂▃▄▅▆▇█"

Data = Annotated[
    Path, typer.Argument(help="A folder of images, an image, .npy, .npz or idx; no labels.", metavar="DATA")
]


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle's folder, a new one.")],
    add: Annotated[
        str | None, typer.Option(help="Further personalizers, comma-separated; what they need is fitted now.")
    ] = None,
) -> None:
    """Make a bundle of a run: all that a newcomer needs to personalize, and nothing of the training clients' data.

    The state is that of the row with the best validation accuracy, whose personalizer becomes the default.

    Examples:

        upfl export runs/digits-fedtta-paper-s0 -o bundle

        upfl export runs/digits-fedavg-paper-s0 -o bundle --add label-shift,auto
    """
    console = Console(soft_wrap=True)
    names = listed(add)
    with console.status("fitting what personalizers need" if names else "writing"):
        written = bundle.export(api.Run(run), out, names)
    manifest = written.manifest
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    console.print(
        f"[bold]{escape(str(out))}[/bold]: {escape(written.training.title)} on {escape(manifest.task.name)}, "
        f"round {manifest.training.round}, {size / 1e6:.1f} MB"
    )
    console.print(f"personalizers: {', '.join(manifest.personalizers)} (default: {manifest.default})")
    if written.warning:
        console.print(f"[yellow]warning: {escape(written.warning)}[/yellow]")
    console.print(f"[dim]next: upfl personalize {escape(str(out))} DATA -o ME[/dim]")


def personalize(
    path: Annotated[Path, typer.Argument(help="A bundle.", metavar="BUNDLE")],
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for your own model, a new one.")],
    personalizer: Annotated[str | None, typer.Option(help="One that the bundle carries.  [default: its own]")] = None,
    architecture: Annotated[str | None, typer.Option(help="Of a federation with models of several sizes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model of your own of a bundle, from your images, without labels. Nothing leaves this machine.

    ME is a bundle, too (`upfl predict` takes it), with predictions.csv and summary.html beside it.

    Examples:

        upfl personalize bundle photos/ -o me

        upfl personalize bundle images.npy -o me --personalizer tent --json
    """
    bundle.require_new(out)
    federation = bundle.Bundle.load(path)
    samples = _read(data, federation.manifest.task)
    mine = federation.personalize(samples, personalizer, architecture=architecture)
    mine.save(out)
    probabilities = mine.label_distributions_
    _write(out / "predictions.csv", _csv(samples, mine.classes_, probabilities))
    from upfl.report.personal import page  # here, because only this command draws it

    _write(out / "summary.html", page(mine, samples))
    warnings = _warnings(samples, federation)
    if as_json:
        echo(json.dumps(_found(mine, samples, warnings, out), indent=2))
        return
    console = Console()
    for warning in warnings:
        console.print(f"[yellow]warning: {escape(warning)}[/yellow]")
    _show(mine, console)
    for name, what in (
        ("predictions.csv", "a class and its probability for each sample"),
        ("summary.html", "all of this, to look at"),
    ):
        console.print(f"{escape(str(out / name))}: {what}", soft_wrap=True)
    console.print(f"[dim]next: upfl predict {escape(str(out))} DATA[/dim]", soft_wrap=True)


def predict(
    path: Annotated[Path, typer.Argument(help="Your own model: what `upfl personalize` made.", metavar="ME")],
    data: Data,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A CSV file.  [default: standard output]", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the classes of images by your own model.

    Example: upfl predict me photos/ -o predictions.csv
    """
    mine = bundle.PersonalModel.load(path)
    samples = _read(data, mine.manifest.task)
    probabilities = mine.predict_proba(samples)
    for name in samples.skipped:
        Console(stderr=True, soft_wrap=True).print(f"[yellow]left out, no image: {escape(name)}[/yellow]")
    if out is not None:
        _write(out, _csv(samples, mine.classes_, probabilities))
    if as_json:
        rows = zip(samples.names, _best(mine.classes_, probabilities), strict=True)
        echo(json.dumps([{"sample": name, "class": c, "probability": p} for name, (c, p) in rows], indent=1))
    elif out is None:
        echo(_csv(samples, mine.classes_, probabilities), nl=False)
    else:
        echo(f"{out}: {len(samples)} predictions")


def export_onnx(
    path: Annotated[Path, typer.Argument(help="Your own model: what `upfl personalize` made.", metavar="ME")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file.")],
) -> None:
    """Export your own model to ONNX, normalization included, and check it with ONNX Runtime.

    It takes `images`, floats in [0, 1] of shape [n, channels, height, width], and gives `probabilities`; the classes'
    names are in its metadata. Needs the extra: pip install 'upfl[onnx]'.

    Example: upfl export-onnx me -o me.onnx
    """
    from upfl.onnx_export import export as export_to  # here, because it is an extra and slow to import

    difference = export_to(bundle.PersonalModel.load(path), out)
    echo(f"{out}: ONNX Runtime agrees to {difference:.1g} in probability")


def _read(data: Path, task: TaskSection) -> Samples:
    return load_unlabelled(data, task.input.image, task.input.scale)


def _warnings(samples: Samples, federation: bundle.Bundle) -> list[str]:
    found = []
    if samples.skipped:
        some = ", ".join(samples.skipped[:5]) + (", ..." if len(samples.skipped) > 5 else "")
        found.append(f"{len(samples.skipped)} file(s) left out, no images: {some}")
    if len(samples) < FEW:
        found.append(f"{len(samples)} sample(s) are few: what is found from fewer than {FEW} may be chance")
    return [*found, federation.warning] if federation.warning else found


def _best(classes: NDArray[np.str_], probabilities: NDArray[np.float64]) -> list[tuple[str, float]]:
    best = probabilities.argmax(1)
    return [(str(classes[c]), float(row[c])) for c, row in zip(best, probabilities, strict=True)]


def _csv(samples: Samples, classes: NDArray[np.str_], probabilities: NDArray[np.float64]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "class", "probability"])
    for name, (best, probability) in zip(samples.names, _best(classes, probabilities), strict=True):
        writer.writerow([csv_cell(name), csv_cell(best), f"{probability:.4f}"])
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    try:
        # File names that are not text are written back as they were found.
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def _found(mine: bundle.PersonalModel, samples: Samples, warnings: list[str], out: Path) -> dict[str, Any]:
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


def _show(mine: bundle.PersonalModel, console: Console) -> None:
    diary, manifest = mine.diary, mine.manifest
    samples = f"{manifest.samples} sample{'s' * (manifest.samples != 1)}"
    console.print(f"[bold]{samples}, personalized by {manifest.personalizer}[/bold]")
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
    if len(diary.entropy) > 1:
        plot = f"{diary.entropy[0]:.3f} {sparkline(diary.entropy)} {diary.entropy[-1]:.3f}"
        console.print(f"uncertainty (mean entropy, nats): {plot}")
    if diary.accuracy:
        before, after = (_in_percent(estimate) for estimate in diary.accuracy)
        console.print(f"estimated accuracy: {before} before, [bold]{after}[/bold] after (95% intervals)")


def _in_percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.0f}% ({100 * estimate.low:.0f}-{100 * estimate.high:.0f})"


def sparkline(values: list[float]) -> str:
    """Values as blocks, from the least to the largest."""
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * (value - low) / (high - low or 1))] for value in values)
