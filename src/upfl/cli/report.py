"""`upfl report`: run folders as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo
from upfl.safe.text import counted


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, experiments, or folders with some.", metavar="RUNS...")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where page, tables and figures go.")] = Path("report"),
    reference: Annotated[
        str | None, typer.Option(help="The row that others are compared with, client by client.", show_default="fedavg")
    ] = None,
) -> None:
    """Make one self-contained page of runs: tables, learning curves, who gained and who lost, costs, configurations.

    The tables are also written as Markdown, LaTeX and CSV, the figures as SVG and PNG. Folders that are broken,
    unfinished or not runs are named and left out.

    Examples:

        upfl report runs/overall-lite -o report

        upfl report runs/* --reference tent
    """
    from upfl.report.page import write_report  # here, because matplotlib takes a second to import

    console = Console(stderr=True)
    with console.status("reading runs, drawing figures"):
        made = write_report(runs, out, reference)
    for path, reason in made.collected.left_out:
        console.print(f"[yellow]left out:[/yellow] {escape(path)}: {escape(reason)}", soft_wrap=True)
    lines = sum(len(setting.lines) for setting in made.settings)
    console.print(
        f"{counted(len(made.collected.runs), 'run')}, {counted(lines, 'row')}, "
        f"{counted(len(made.tables), 'table')}, {counted(len(made.figures), 'figure')}",
        soft_wrap=True,
    )
    echo(out / "index.html")
