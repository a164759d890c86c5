"""`upfl export`, `upfl personalize`, `upfl predict`, `upfl export-onnx`: from a run to a newcomer's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo
from upfl.cli.options import AsJson
from upfl.errors import ConfigError
from upfl.safe.text import counted

Data = Annotated[
    Path,
    typer.Argument(help="A folder of images, an image, .npy, .npz, idx, .csv or .parquet; no labels.", metavar="DATA"),
]


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle: a new folder, or a .zip.")],
    add: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Further personalizers; what they need is fitted now."),
    ] = None,
) -> None:
    """Make a bundle of a run: all that a newcomer needs to personalize, and nothing of the training clients' data.

    The state is that of the row with the best validation accuracy, whose personalizer becomes the default.

    Examples:

        upfl export runs/digits-fedtta-paper-s0 -o bundle

        upfl export runs/digits-fedavg-paper-s0 -o bundle --add label-shift,auto
    """
    from upfl import api, bundle
    from upfl.config import listed

    console = Console(soft_wrap=True)
    names = listed(add)
    with console.status("fitting what personalizers need" if names else "writing"):
        written = bundle.export(api.Run(run), out, names)
    manifest = written.manifest
    size = sum(file.stat().st_size for file in (out, *out.rglob("*")) if file.is_file())
    console.print(
        f"[bold]{escape(str(out))}[/bold]: {escape(written.training.title)} on {escape(manifest.task.name)}, "
        f"round {manifest.training.round}, {size / 1e6:.1f} MB"
    )
    console.print(f"personalizers: {', '.join(manifest.personalizers)} (default: {manifest.default})")
    if written.warning:
        console.print(f"[yellow]warning: {escape(written.warning)}[/yellow]")
    console.print(f"[dim]next: upfl personalize {escape(str(out))} DATA -o ME[/dim]")


def personalize(
    path: Annotated[Path, typer.Argument(help="A bundle: a folder or a .zip.", metavar="BUNDLE")],
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for your own model, a new one.")],
    personalizer: Annotated[str | None, typer.Option(help="One of the bundle's.", show_default="its own")] = None,
    architecture: Annotated[str | None, typer.Option(help="Of a federation with models of several sizes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model of your own of a bundle, from your samples, without labels. Nothing leaves this machine.

    ME is a bundle, too (`upfl predict` takes it), with predictions.csv and summary.html beside it.

    Examples:

        upfl personalize bundle photos/ -o me

        upfl personalize bundle images.npy -o me --personalizer tent --json
    """
    from upfl import bundle
    from upfl.cli import newcomer
    from upfl.report.personal import page

    if bundle.require_new(out).suffix == ".zip":
        raise ConfigError(f"--out {out}: your own model goes to a folder, with pages and tables beside it")
    federation = bundle.Bundle.load(path)
    samples = newcomer.read(data, federation.manifest.task)
    mine = federation.personalize(samples, personalizer, architecture=architecture)
    mine.save(out)
    probabilities = mine.label_distributions_
    newcomer.write(out / "predictions.csv", newcomer.as_csv(samples, mine.classes_, probabilities, mine.outlying_))
    newcomer.write(out / "summary.html", page(mine, samples))
    warnings = newcomer.warnings(samples, federation)
    if as_json:
        echo(json.dumps(newcomer.found(mine, samples, warnings, out), indent=2))
        return
    console = Console()
    for warning in warnings:
        console.print(f"[yellow]warning: {escape(warning)}[/yellow]")
    newcomer.show(mine, console)
    for name, what in (
        ("predictions.csv", "a class and its probability for each sample; outlying samples are marked"),
        ("summary.html", "all of this, to look at"),
    ):
        console.print(f"{escape(str(out / name))}: {what}", soft_wrap=True)
    console.print(f"[dim]next: upfl predict {escape(str(out))} DATA[/dim]", soft_wrap=True)


def predict(
    path: Annotated[Path, typer.Argument(help="Your own model: what `upfl personalize` made.", metavar="ME")],
    data: Data,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file.", show_default="standard output")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the classes of images by your own model. Data unlike the federation's are warned of.

    Example: upfl predict me photos/ -o predictions.csv
    """
    import numpy as np

    from upfl import bundle
    from upfl.bundle.in_words import in_words
    from upfl.cli import newcomer

    mine = bundle.PersonalModel.load(path)
    samples = newcomer.read(data, mine.manifest.task)
    probabilities = mine.predict_proba(samples)
    for name in samples.skipped:
        Console(stderr=True, soft_wrap=True).print(f"[yellow]left out: {escape(name)}[/yellow]")
    found, outlying = mine.check(samples) or (None, np.zeros(len(samples), np.bool_))
    if found is not None and found.unlike:
        told = f"warning: drift: {in_words(found, len(samples))}"
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{escape(told)}[/]")
    table = newcomer.as_csv(samples, mine.classes_, probabilities, outlying)
    if out is not None:
        newcomer.write(out, table)
    if as_json:
        rows = zip(samples.names, newcomer.best(mine.classes_, probabilities), outlying.tolist(), strict=True)
        told_rows = [{"sample": name, "class": c, "probability": p, "outlying": odd} for name, (c, p), odd in rows]
        echo(json.dumps(told_rows, indent=1))
    elif out is None:
        echo(table, nl=False)
    else:
        echo(f"{out}: {counted(len(samples), 'prediction')}")


def export_onnx(
    path: Annotated[Path, typer.Argument(help="Your own model: what `upfl personalize` made.", metavar="ME")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file.")],
) -> None:
    """Export your own model to ONNX, normalization included, and check it with ONNX Runtime.

    It takes `images`, floats in [0, 1] of shape [n, channels, height, width], `rows` of features or `texts` as tokens,
    and gives `probabilities`; the classes' names are in its metadata. Needs the extra: pip install 'upfl[onnx]'.

    Example: upfl export-onnx me -o me.onnx
    """
    from upfl import bundle
    from upfl.onnx_export import export as export_to

    difference = export_to(bundle.PersonalModel.load(path), out)
    echo(f"{out}: ONNX Runtime agrees to {difference:.1g} in probability")
