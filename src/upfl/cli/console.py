"""The terminal, for text that others wrote: control characters in it are spelled out, not obeyed."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
import typer
from rich import box
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from upfl.safe.text import plain


class Console(rich.console.Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What everything that is printed goes through, a table's cells, too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def echo(text: object, err: bool = False, nl: bool = True) -> None:
    """A line without markup."""
    typer.echo(plain(str(text)), err=err, nl=nl)


def lean_table(title: str) -> Table:
    """A table without borders, so that rows of figures fit a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
