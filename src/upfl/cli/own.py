"""`upfl data add`, `upfl data remove`: data of one's own, checked once and known by name from then on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo
from upfl.cli.options import AsJson
from upfl.errors import DataError
from upfl.safe.text import counted

if TYPE_CHECKING:
    from upfl.data.draft import Draft

SHOWN = 5  # of what was left out


def add_command(
    name: Annotated[str, typer.Argument(help="What it is to be called.", show_default=False)],
    path: Annotated[
        Path,
        typer.Argument(
            help="A folder of images (client/class/image or class/image), .npz, .csv, .parquet, or a folder that "
            "Hugging Face's save_to_disk wrote.",
            show_default=False,
        ),
    ],
    label: Annotated[str | None, typer.Option(help="The column with the classes.")] = None,
    client: Annotated[str | None, typer.Option(help="The column that says whose a sample is.")] = None,
    newcomer: Annotated[str | None, typer.Option(help="The column that says which clients are newcomers.")] = None,
    features: Annotated[
        str | None, typer.Option(help="Columns of numbers, comma-separated.", show_default="all")
    ] = None,
    image: Annotated[str | None, typer.Option(help="The column with images: files beside the table, or bytes.")] = None,
    tokens: Annotated[str | None, typer.Option(help="The column (or array) with lists of tokens.")] = None,
    text: Annotated[str | None, typer.Option(help="The column with texts; words become tokens.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a text; the rest is cut.", show_default="64")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Different tokens.", show_default="10000")] = None,
    scale: Annotated[float | None, typer.Option(help="Full intensity of images in arrays.", show_default="255")] = None,
    resize: Annotated[
        tuple[int, int] | None, typer.Option(metavar="W H", help="Bring all images to this size.", show_default=False)
    ] = None,
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Take image files that are there twice.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check everything, keep nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add data of your own: checked, kept as arrays in the cache folder, and a data set like any other from then on.

    Examples:

        upfl data add xrays scans/ --resize 64 64

        upfl data add patients patients.parquet --label diagnosis --client hospital

        upfl data add notes notes.csv --label ward --client clinic --text note --dry-run
    """
    from rich.progress import Progress

    from upfl.config import listed
    from upfl.data import kept
    from upfl.data.own.options import Options
    from upfl.data.own.reading import read

    kept.require_name(name)
    if name in kept.names() and not dry_run:
        raise DataError(f"{name}: there is a data set of this name; `upfl data remove {name}` removes it")
    options = Options(
        *(label, client, newcomer, tuple(listed(features)), image, tokens, text, length, vocabulary, scale, resize),
        allow_duplicates,
    )
    console = Console(stderr=True)
    with console.status(f"looking at {escape(str(path))}"):
        draft = read(path, options)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as progress:
        task = progress.add_task("reading samples", total=len(draft))
        if dry_run:
            done = 0
            for part in draft.parts():
                done += len(part)
                progress.update(task, completed=done)
        else:
            kept.add(draft, name, lambda done: progress.update(task, completed=done))
    found = summary(draft, name)
    if as_json:
        return echo(json.dumps(found | {"added": not dry_run}, indent=2))
    _show(found, Console(soft_wrap=True))
    if dry_run:
        echo("Nothing was kept (--dry-run).")
    else:
        method = "closed-form-label-shift" if draft.form.kind == "pixels" else "refit-label-shift"
        echo(f"Next: upfl data show {name}; upfl train {method} {name}")
    return None


def remove_command(name: Annotated[str, typer.Argument(show_default=False, help="The data set's name.")]) -> None:
    """Remove a data set of your own from the cache folder. The files that it was made of stay.

    Example: upfl data remove patients
    """
    from upfl.data import kept

    kept.remove(name)
    echo(f"{name}: removed")


def summary(draft: Draft, name: str) -> dict[str, Any]:
    """What was found, and what was left out."""
    import numpy as np

    from upfl.data.draft import MISSING

    held = draft.labels[draft.labels != MISSING]
    counts = np.bincount(held, minlength=len(draft.class_names)).tolist()
    found: dict[str, Any] = {
        "name": name,
        "samples": len(draft),
        "form": draft.form.in_words,
        "shape": list(draft.form.shape),
        "classes": dict(zip(draft.class_names, counts, strict=True)),
        "unlabelled": len(draft) - len(held),
        "taken": list(draft.taken),
        "left_out": list(draft.left_out),
        "notes": _notes(draft),
    }
    if draft.groups is not None and draft.clients is not None:
        sizes = np.bincount(draft.groups, minlength=len(draft.clients))
        found["clients"] = len(draft.clients)
        found["sizes"] = {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())}
        if draft.newcomers is not None:
            found["newcomers"] = int(draft.newcomers.sum())
    if "newcomers" not in found:
        found["default"] = _default(len(draft), found.get("clients", 0))
    return found


def _default(samples: int, named: int) -> str:
    """Who is a client and who is new, where nobody says it."""
    from upfl.data.partition import own_partition

    partition = own_partition(samples, named, None)
    new = f"{partition.new_clients} of the {partition.clients} clients, drawn at random, are newcomers"
    if named:
        return f"{new} (--set partition.new=0.2, or a list of names)"
    return f"no clients are named, and samples are dealt out in equal shares; {new} (--set partition.kind=...)"


def _notes(draft: Draft) -> list[str]:
    """Classes that no training client holds, where the data say who is new."""
    import numpy as np

    from upfl.data.draft import MISSING

    if draft.newcomers is None or draft.groups is None:
        return []
    new = draft.newcomers[draft.groups]
    only = np.setdiff1d(draft.labels[new], draft.labels[~new])
    names = [draft.class_names[label] for label in only.tolist() if label != MISSING]
    return [f"classes that only newcomers hold, and no model can know: {', '.join(names)}"] if names else []


def _show(found: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{escape(found['name'])}[/bold]: {found['samples']} samples. {escape(found['form'])}.")
    classes = [f"{name} {count}" for name, count in found["classes"].items()]
    more = f", and {len(classes) - 20} more" if len(classes) > 20 else ""
    console.print(f"{len(classes)} classes: {escape(', '.join(classes[:20]))}{more}")
    if "clients" in found:
        sizes = found["sizes"]
        new = f", {found['newcomers']} of them newcomers" if "newcomers" in found else ""
        console.print(
            f"{found['clients']} clients{new}, with {sizes['least']} to {sizes['most']} samples each "
            f"(median {sizes['median']:g})"
        )
    if found["taken"]:
        console.print(f"Taken: {escape('; '.join(found['taken']))}")
    if "default" in found:
        console.print(f"Unless told otherwise: {escape(found['default'])}")
    if found["unlabelled"]:
        console.print(f"without a label: {counted(found['unlabelled'], 'sample')}, whose clients can only be newcomers")
    for line in found["left_out"][:SHOWN]:
        console.print(f"[yellow]left out: {escape(line)}[/yellow]")
    if len(found["left_out"]) > SHOWN:
        console.print(f"[yellow]left out: {len(found['left_out']) - SHOWN} more[/yellow]")
    for note in found["notes"]:
        console.print(f"[yellow]note: {escape(note)}[/yellow]")
