"""Pages that are made from the program: methods, commands, configuration keys, the Python interface."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from pydantic import BaseModel

import upfl
from docs.equations import page_of
from upfl.cli import app
from upfl.config import PROFILES, Config
from upfl.data import Partition
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS
from upfl.model_config import ModelConfig
from upfl.rows import FURTHER, Method

ROOT = Path(__file__).parents[1]
ADVICE = tomllib.loads((ROOT / "docs" / "methods.toml").read_text(encoding="utf-8"))
SHOWN = 4  # tables of results on a method's page


def pages() -> dict[str, str]:
    """All made pages, by their place in the site."""
    made = {f"methods/{stem(row.row)}.md": _method(row) for row in ROWS}
    return made | {
        "methods/index.md": _methods(),
        "reference/command-line.md": _commands(),
        "reference/configuration.md": _configuration(),
        "reference/python.md": _python(),
    }


def stem(row: str) -> str:
    """A row's name as that of a file."""
    return row.replace("++", "-plus-plus")


# Methods


def _methods() -> str:
    rows = "\n".join(
        f"| [`{row.row}`]({stem(row.row)}.md) | {row.training} | {row.personalizer} | {row.summary} |" for row in ROWS
    )
    further = "\n".join(f"| `{name}` | {summary} |" for name, summary in FURTHER.items())
    return f"""# Methods

A method is a training paired with a personalizer ([why](../explanation/pairs.md)). `upfl train ROW DATASET` runs one;
`--score` adds personalizers to a run, which then shares the training.

| row | training | personalizer | what it does |
|---|---|---|---|
{rows}

Personalizers without a row of their own, for `--score`:

| personalizer | what it does |
|---|---|
{further}

`BASE+CORRECTION`, as in `one-step+label-shift`, corrects one's predictions by another. Where to begin:
[choosing without labels](../explanation/choosing.md).
"""


def _method(row: Method) -> str:
    advice = ADVICE[row.row]
    kinds: list[type[Any]] = [TRAININGS[row.training], *(PERSONALIZERS[part] for part in row.personalizer.split("+"))]
    warning = f"\n!!! warning\n    {row.title} {row.warning}.\n" if row.warning else ""
    parts = "\n".join(_part(kind) for kind in kinds if kind.name != "none")
    return f"""# {row.title}

{row.summary[0].upper()}{row.summary[1:]}.

    upfl train {row.row} digits --profile lite

**Take it** when {advice["when"]}.

**Rather not** when {advice["not"]}.
{warning}
## Results

{_results(row)}
{parts}"""


def _part(kind: type[Any]) -> str:
    module = inspect.getmodule(kind)
    text = page_of(inspect.getdoc(module) or "")
    what = "training" if kind.name in TRAININGS and TRAININGS[kind.name] is kind else "personalizer"
    return f"## The {what} `{kind.name}`\n\n{text}\n{_fields(kind.Hyper)}"


def _fields(kind: type[BaseModel]) -> str:
    if not kind.model_fields:
        return "No hyper-parameters.\n"
    rows = "\n".join(
        f"| `{name}` | {_default(field)} | {field.description or ''} |" for name, field in kind.model_fields.items()
    )
    return f"| key | default | |\n|---|---|---|\n{rows}\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "needed"
    return "" if field.default is None or field.default_factory else f"`{field.default!r}`".replace("|", "\\|")


def _results(row: Method) -> str:
    """The row as it stands in the pages of results."""
    found = [block for page in sorted((ROOT / "results").glob("*.md")) for block in _rows_in(page, row)]
    page = ROOT / "results" / f"{row.training}.md"
    if not found and page.exists():
        return f"[results/{page.name}](../results/{page.name}) is about it.\n"
    if not found:
        return "No page of [results](../results/README.md) has it yet.\n"
    return "\n\n".join(found[:SHOWN]) + "\n"


def _rows_in(page: Path, row: Method) -> Iterator[str]:
    heading, text = "", page.read_text(encoding="utf-8")
    for block in re.split(r"\n\n+|\n(?=#)", text):
        if block.startswith("#"):
            heading, _, block = block.partition("\n")
        table = [line for line in block.splitlines() if line.startswith("|")]
        if len(table) < 3:
            continue
        cells = [line.split("|")[1].strip(" *\\`") for line in table]
        own = [line for cell, line in zip(cells, table, strict=True) if cell in (row.title, row.row)]
        if own:
            title = heading.lstrip("# ") or page.stem
            yield f"[{title}](../results/{page.name}):\n\n" + "\n".join([*table[:2], *own])


# Commands


def _commands() -> str:
    root = typer.main.get_command(app)
    parts = "\n".join(_command(root, ("upfl",)))
    return f"""# Command line

Made from the commands themselves; `upfl COMMAND --help` says the same. `upfl --install-completion` makes the Tab key
know commands and options.

{parts}"""


def _command(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path), max_content_width=80, terminal_width=80)
    yield f"## {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, (*path, name))


# Configuration


def _configuration() -> str:
    scale = "\n".join(f"| `{name}` | `{values}` |" for name, values in PROFILES.items())
    return f"""# Configuration keys

A run is described by a TOML file: every run folder has one (`config.toml`), and `upfl train --config` takes it. `--set
key=value` sets any key; that of a table with a dot, as in `--set partition.clients=40`. What comes later wins: the
paper's values, the profile, the file, options, `--set`.

## The run

{_fields(Config)}
## `[partition]`

{_fields(Partition)}
## `[model]`

{_fields(ModelConfig)}
## `[training]` and `[personalize.NAME]`

The hyper-parameters of the training and of each personalizer: see their [pages](../methods/index.md), or
`upfl methods NAME`.

## Profiles

| profile | sets |
|---|---|
{scale}
"""


# Python


def _python() -> str:
    modules = {name: module for module, names in upfl._MODULES.items() for name in names}
    parts = "\n".join(f"::: upfl.{modules[name]}.{name}\n" for name in upfl.__all__ if name in modules)
    return f"""# Python

What `import upfl` offers. Everything else may change without notice. `upfl.__version__` is the version; errors are
`upfl.errors.UpflError`s, whose messages say what to do. `upfl.models.register`, `upfl.methods.register` and
`upfl.testing` are for [models](../own-model.md) and [methods](../tutorials/add-a-method.md) of your own.

{parts}"""
