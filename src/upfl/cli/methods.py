"""`upfl methods`: the table of rows, and what each training and personalizer takes."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo, lean_table
from upfl.cli.options import AsJson
from upfl.rows import FURTHER, ROWS, Method

if TYPE_CHECKING:
    from upfl.contract import Personalizer, Training

ADVICE = (
    "Where to begin: [bold]closed-form-label-shift[/bold], for small images. It has no learning rate and no "
    "number of rounds to choose, and its result does not depend on who holds what. Measured "
    "(the site's page Closed form): CIFAR-10, two classes a client, 93.6 on new clients (three partitions), "
    "where refit-label-shift has 86.0 and 82.6 (two), the paper's best 83.3; Fashion-MNIST 97.7, the paper 96.5. Not "
    "measured: large images, hundreds of classes. Set mirror=true where a class's mirror images are of that class. "
    "Label-shift helps newcomers that hold few classes; where training clients do not justify it, it stays out. "
    "[bold]refit-label-shift[/bold], on a network of FedAvg, is what to compare it with, and what to take for "
    "tokens, which closed form does not read. For vectors (tables, embeddings) try both: on four tables they were "
    "within 0.8 points where clients hold few classes, and closed form took a fourth of the seconds; where all hold "
    "the same mix it was 0.4 points ahead to 2.1 behind, and 5.7 behind on a table of 569 rows. Validation accuracy "
    "says which one suits your clients."
)


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A row, a training or a personalizer: its equations and hyper-parameters.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which methods take this model, and why others do not.", show_default=False)
    ] = None,
    dataset: Annotated[str, typer.Option(help="With --model: the data set that it is for.")] = "digits",
    as_json: AsJson = False,
) -> None:
    """The methods: rows of the paper's table, each a training paired with a personalizer.

    Examples:

        upfl methods

        upfl methods fedtta++

        upfl methods --model my_models:Net --dataset cifar10
    """
    if model is not None:
        return _fitting(name, model, dataset, as_json)
    if name is not None:
        return _details(name, as_json)
    if as_json:
        return echo(json.dumps([asdict(row) for row in ROWS], indent=2))
    console = Console(highlight=False)
    table = lean_table("Methods")
    table.add_column("row", no_wrap=True)
    table.add_column("what it does")
    for row in ROWS:
        table.add_row(f"[bold]{row.row}[/bold]", described(row))
    table.add_section()
    for further, summary in FURTHER.items():
        table.add_row(further, f"for --score: {summary}")
    console.print(table)
    console.print(ADVICE)
    console.print("Equations and hyper-parameters: [bold]upfl methods NAME[/bold]")
    return None


def _fitting(name: str | None, model: str, dataset: str, as_json: bool) -> None:
    """Which rows take a model for a data set, and why the others do not."""
    from upfl import models
    from upfl.config import configure
    from upfl.contract import Architecture
    from upfl.engine.setup import assemble
    from upfl.methods import why_not
    from upfl.suggest import unknown

    setup = assemble(configure("fedavg", dataset, model=models.load(model)))
    public = setup.inputs.x(setup.federation.new.all(0)[:2])
    task = replace(setup.training.task, architectures={"": Architecture(setup.training.model)}, public=public)
    rows = [row for row in ROWS if name in (None, row.row, row.training, row.personalizer)]
    if not rows:
        raise unknown("method", str(name), [row.row for row in ROWS])
    reasons = {row: why_not(row, task) for row in rows}
    if as_json:
        return echo(json.dumps([asdict(row) | {"why_not": reason} for row, reason in reasons.items()], indent=2))
    table = lean_table(f"Methods for {escape(model)} on {escape(dataset)}")
    table.add_column("row", no_wrap=True)
    table.add_column("does it fit?")
    for row, reason in reasons.items():
        table.add_row(f"[bold]{row.row}[/bold]", "yes" if reason is None else f"no: {escape(reason)}")
    return Console(highlight=False).print(table)


def described(row: Method) -> str:
    return f"{row.summary} [yellow]({row.warning})[/yellow]" if row.warning else row.summary


def _details(name: str, as_json: bool) -> None:
    """What a row is made of. Imports PyTorch: the classes know their hyper-parameters."""
    from upfl.methods import PERSONALIZERS, TRAININGS, personalizer_class
    from upfl.suggest import unknown

    row = next((row for row in ROWS if row.row == name), None)
    kinds: list[type[Training[Any]] | type[Personalizer[Any]]]
    if row is not None:
        kinds = [TRAININGS[row.training], *(PERSONALIZERS[part] for part in row.personalizer.split("+"))]
    elif name in TRAININGS:
        kinds = [TRAININGS[name]]
    elif all(part in PERSONALIZERS for part in name.split("+")):
        personalizer_class(name)  # whether one can stand on the other
        kinds = [PERSONALIZERS[part] for part in name.split("+")]
    else:
        raise unknown("method", name, dict.fromkeys([*(row.row for row in ROWS), *TRAININGS, *PERSONALIZERS]))
    if as_json:
        parts = [{"name": kind.name, "hyper": kind.Hyper().model_dump(mode="json")} for kind in kinds]
        return echo(json.dumps((asdict(row) if row else {}) | {"parts": parts}, indent=2))
    console = Console(highlight=False)
    if row is not None:
        console.print(f"[bold]{row.row}[/bold]: {described(row)}")
        console.print(f"training {row.training}, personalizer {row.personalizer}\n")
        where = f"the site's page methods/{row.row}. Files that are named below are of upfl's source."
        console.print(f"[dim]Results, and when to take it: {where}[/dim]\n")
    for kind in kinds:
        console.print(f"[bold]{kind.name}[/bold] ({escape(kind.title)})")
        console.print(escape(inspect.getdoc(inspect.getmodule(kind)) or ""))
        if kind.Hyper.model_fields:
            table = lean_table("")
            for column in ("hyper-parameter", "default"):
                table.add_column(column, no_wrap=True)
            table.add_column("")
            for key, field in kind.Hyper.model_fields.items():
                default = "-" if field.default is None else str(field.default)
                table.add_row(key, escape(default), escape(field.description or ""))
            console.print(table)
        console.print()
    return None
