"""`upfl data`: which data sets there are, getting and checking them, and who would hold what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo, lean_table
from upfl.cli.help import Command, Group
from upfl.cli.options import AsJson
from upfl.cli.own import add_command, remove_command
from upfl.errors import ConfigError, DataError
from upfl.suggest import unknown

if TYPE_CHECKING:
    from upfl.data import Federation, Partition

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, add, fetch and check data sets; show who holds which classes.",
)
app.command("add", cls=Command)(add_command)
app.command("remove", cls=Command)(remove_command)
Names = typer.Argument(metavar="NAME...", help="Data sets: see `upfl data list`.", show_default=False)


@app.command("list", cls=Command)
def list_command(as_json: AsJson = False) -> None:
    """The data sets, and where they are on this machine.

    Example: upfl data list
    """
    rows = [_description(name) for name in _all()]
    if as_json:
        return echo(json.dumps(rows, indent=2))
    table = lean_table("Data sets")
    for column in ("data set", "samples", "classes", "clients", "where"):
        table.add_column(column, no_wrap=True)
    folders = list(dict.fromkeys(Path(row["folder"]).parent for row in rows if row["folder"]))
    for row in rows:
        where = "embedded" if row["available"] else "[dim]not here yet[/dim]"
        if row["folder"]:
            where = f"folder {folders.index(Path(row['folder']).parent) + 1}"
        size = " x ".join(map(str, row["shape"]))
        table.add_row(row["name"], size, str(row["classes"]), f"{row['clients']}, {row['partition']}", where)
    console = Console()
    console.print(table)
    for number, folder in enumerate(folders, 1):
        console.print(f"folder {number}: {escape(str(folder))}", soft_wrap=True)
    if not all(row["available"] for row in rows):
        console.print("Get what is missing with [bold]upfl data fetch NAME[/bold]; training fetches it by itself too.")
    return None


@app.command("fetch", cls=Command)
def fetch_command(names: Annotated[list[str], Names]) -> None:
    """Download data sets into the cache folder (UPFL_CACHE moves it), unless they are on this machine already.

    Example: upfl data fetch mnist cifar10
    """
    from upfl.data.sources import load, locate

    _known(names)
    console = Console()
    for name in names:
        source = load(name)  # downloads if need be, and checks every file
        where = locate(name) or "embedded"
        console.print(f"[green]{name}[/green]: {len(source.labels)} samples, {escape(str(where))}", soft_wrap=True)


@app.command("check", cls=Command)
def check_command(
    names: Annotated[list[str] | None, Names] = None,
    as_json: AsJson = False,
) -> None:
    """Read data sets' files again and compare them with their digests; without names, all that are on this machine.

    Example: upfl data check cifar10
    """
    from upfl.data.sources import EMBEDDED, check, locate

    _known(names or [])
    chosen = names or [name for name in _all() if name == EMBEDDED or locate(name)]
    results = [(name, item) for name in chosen for item in check(name)]
    if as_json:
        rows = [{"name": name, "path": str(item.path), "problem": item.problem} for name, item in results]
        echo(json.dumps(rows, indent=2))
    else:
        console = Console()
        for name in chosen:
            problems = [item.problem for checked, item in results if checked == name]
            good = len(problems) - sum(problem is not None for problem in problems)
            mark = "[green]good[/green]" if good == len(problems) else "[red]bad[/red]"
            files = f"{good} of {len(problems)} files as they should be" if problems else "embedded"
            console.print(f"{mark} {name}: {files}")
    if bad := [item.problem for _, item in results if item.problem]:
        raise DataError("\n".join(bad))


@app.command("show", cls=Command)
def show_command(
    name: Annotated[str, typer.Argument(help="A data set: see `upfl data list`.", show_default=False)],
    partition_seed: Annotated[int, typer.Option(help="Who holds which samples.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A field of the partition."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a picture (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a partition: which client holds how much of which class.

    Examples:

        upfl data show digits

        upfl data show cifar10 --set kind=dirichlet --set alpha_new=0.01 -o shift.png
    """
    from upfl.cli.partition_text import picture
    from upfl.data import load
    from upfl.data.large import federation_of
    from upfl.data.sources import describe, partition_of

    _known([name])
    partition = partition_of(describe(name)).revised(dict(_setting(text) for text in settings or []))
    federation = federation_of(load(name), partition, partition_seed)
    if output is not None:
        from upfl.report.partition_picture import draw  # here, because matplotlib takes a second to import

        draw(federation, partition, output)
    if as_json:
        return echo(json.dumps(_summary(federation, partition, partition_seed)))
    console = Console()
    console.print(picture(federation, partition, partition_seed))
    if output is not None:
        console.print(f"Picture: {escape(str(output))}", soft_wrap=True)
    return None


def _description(name: str) -> dict[str, Any]:
    from upfl.data.sources import EMBEDDED, describe, locate, partition_of

    facts, folder = describe(name), locate(name)
    partition = partition_of(facts)
    return {
        "name": name,
        "form": facts.form.kind,
        "shape": list(facts.form.shape),
        "classes": facts.classes,
        "partition": partition.kind,
        "clients": partition.clients,
        "available": name == EMBEDDED or folder is not None,
        "folder": str(folder) if folder else None,
    }


def _all() -> tuple[str, ...]:
    """The built-in data sets, and those that were added."""
    from upfl.data import kept
    from upfl.data.sources import NAMES

    return (*NAMES, *kept.names())


def _known(names: list[str]) -> None:
    for name in names:
        if name not in (known := _all()):
            raise unknown("data set", name, known)


def _setting(text: str) -> tuple[str, Any]:
    from upfl.config import toml_value

    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write key=value, for example clients=40")
    return key.strip(), toml_value(value.strip())


def _summary(federation: Federation, partition: Partition, seed: int) -> dict[str, Any]:
    from upfl.data import class_counts

    return {
        "dataset": federation.source.name,
        "partition": partition.model_dump(mode="json"),
        "partition_seed": seed,
        "class_names": federation.source.class_names,
        "public": len(federation.public),
        "notes": federation.notes,
        **{
            role: {"class_counts": class_counts(federation, clients).tolist(), "angles": clients.angles.tolist()}
            | ({"names": federation.names(role)} if federation.names(role) else {})
            for role, clients in federation.roles()
        },
    }
