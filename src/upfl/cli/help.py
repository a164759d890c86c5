"""Help as plain text, with all that commands, arguments and options say.

With typer's own, arguments lose their help (Click 8.5 has one of its own for them, and forgets typer's), brackets are
taken for markup, summaries are cut off, and names break at hyphens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_type_hints

import click
from typer.core import TyperCommand, TyperGroup

WHOLE = 200  # characters of a command's summary that are shown
HYPHEN = "\N{NON-BREAKING HYPHEN}"  # while lines are broken


class Command(TyperCommand):
    def __init__(self, *args: Any, params: list[click.Parameter], callback: Any, **others: Any) -> None:
        super().__init__(*args, params=params, callback=callback, **others)
        hints = get_type_hints(callback, include_extras=True)
        for parameter in params:
            if isinstance(parameter, click.Argument) and getattr(parameter, "help", None) is None:
                parameter.help = hints[parameter.name].__metadata__[0].help
            if isinstance(parameter.type, click.IntRange | click.FloatRange) and not parameter.metavar:
                parameter.metavar = "N"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _parameters(self, ctx, formatter)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """They stand with the options."""


class Group(TyperGroup):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _parameters(self, ctx, formatter)
        rows = [(name, command.get_short_help_str(WHOLE)) for name, command in self.commands.items()]
        _section("Commands", rows, formatter)


def _parameters(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
        records = [each.get_help_record(ctx) for each in command.get_params(ctx) if isinstance(each, kind)]
        _section(title, filter(None, records), formatter)


def _section(title: str, records: Iterable[tuple[str, str]], formatter: click.HelpFormatter) -> None:
    rows = [(names, text.replace("\\[", "[").replace("-", HYPHEN)) for names, text in records]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
        formatter.buffer = [text.replace(HYPHEN, "-") for text in formatter.buffer]
