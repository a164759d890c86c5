"""`upfl methods`: the table of rows, and what each training and personalizer takes."""

import json
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.table import Table

from upfl.cli.console import Console, echo
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, Method

ADVICE = (
    "Where to begin: [bold]closed-form-label-shift[/bold], for small images (digits to CIFAR). It has no learning rate "
    "and no number of rounds to choose, and its result does not depend on who holds what. Label-shift helps newcomers "
    "that hold few classes; where training clients do not justify it, it stays out. [bold]refit-label-shift[/bold], on "
    "a network that FedAvg trained, is what to compare it with: validation accuracy says which one suits your clients."
)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    hyper: Annotated[bool, typer.Option("--hyper", help="Also every hyper-parameter, with its default.")] = False,
) -> None:
    """The methods: rows of the paper's table, each a training paired with a personalizer.

    Example: upfl methods --hyper
    """
    if as_json:
        rows = [
            {
                "row": row.row,
                "title": row.title,
                "training": row.training,
                "personalizer": row.personalizer,
                "summary": row.summary,
                "warning": row.warning,
            }
            for row in ROWS
        ]
        echo(json.dumps(rows, indent=2))
        return
    console = Console()
    table = Table("row", "training", "personalizer", "what it does", title="Methods", title_justify="left")
    for row in ROWS:
        table.add_row(f"[bold]{row.row}[/bold]", row.training, row.personalizer, described(row))
    console.print(table)
    console.print(f"Personalizers for --score: {', '.join(PERSONALIZERS)}")
    console.print(ADVICE)
    if hyper:
        for title, kinds in (("training", TRAININGS), ("personalizer", PERSONALIZERS)):
            for name, kind in kinds.items():
                _show_hyper(console, f"{title} {name}", kind.Hyper)


def described(row: Method) -> str:
    return f"{row.summary} [yellow]({row.warning})[/yellow]" if row.warning else row.summary


def _show_hyper(console: Console, title: str, hyper: type[BaseModel]) -> None:
    if not hyper.model_fields:
        return
    table = Table("hyper-parameter", "default", "", title=title, title_justify="left")
    for name, field in hyper.model_fields.items():
        table.add_row(name, _shown(field.default), field.description or "")
    console.print(table)


def _shown(default: Any) -> str:
    return "-" if default is None else str(default)
