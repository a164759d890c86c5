"""The command line: a thin shell over the library."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape

from upfl import __version__, plugins
from upfl.cli import bundle, data, demo, experiments, members, methods, report, runs, scores, search
from upfl.cli.console import Console, echo
from upfl.cli.help import Command, Group
from upfl.engine.allocator import keep_freed_memory
from upfl.errors import DataError, RunError, UpflError

app = typer.Typer(
    name="upfl",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,  # it would take [brackets] in help texts for markup
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Unsupervised personalized federated learning: a model of its own for every unlabelled newcomer.

    Start with `upfl demo`. Exit codes: 0 done, 2 wrong command or configuration, 3 data missing or damaged,
    4 the run stopped, 130 interrupted (go on with `upfl resume`).""",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "train": runs.train,
    "resume": runs.resume,
    "show": runs.show,
    "score": scores.score,
    "join": members.join,
    "forget": members.forget,
    "export": bundle.export,
    "personalize": bundle.personalize,
    "predict": bundle.predict,
    "export-onnx": bundle.export_onnx,
    "experiment": experiments.experiment,
    "search": search.search,
    "report": report.report,
    "methods": methods.methods,
}
for name, function in COMMANDS.items():
    app.command(name, cls=Command)(function)
app.add_typer(data.app, name="data")


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE", help="Import a module of your own that registers models or methods; as UPFL_PLUGINS does."
        ),
    ] = None,
) -> None:
    plugins.load(plugin or ())


def _version(on: bool) -> None:
    if on:
        echo(f"upfl {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors that a user can act on are shown as one message."""
    signal.signal(signal.SIGTERM, _interrupt)
    keep_freed_memory()
    try:
        plugins.load(plugins.from_environment())
        app(_plugins_first(sys.argv[1:]))
    except UpflError as error:
        _say(str(error))
        sys.exit(3 if isinstance(error, DataError) else 4 if isinstance(error, RunError) else 2)
    except OSError as error:  # the system refused something: a full disk, a folder without permission
        _say(f"{error.filename or 'the system'}: {error.strerror or error}")
        sys.exit(4)
    except MemoryError:
        _say("there is not enough memory for this")
        sys.exit(4)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/red] {escape(text)}")


def _plugins_first(arguments: list[str]) -> list[str]:
    """`--plugin MODULE` may stand anywhere; the commands need not know it."""
    first, rest, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if word == "--":
            return [*first, *rest, word, *words]
        if word == "--plugin":
            first += [word, *([following] if (following := next(words, None)) is not None else [])]
        else:
            (first if word.startswith("--plugin=") else rest).append(word)
    return [*first, *rest]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
