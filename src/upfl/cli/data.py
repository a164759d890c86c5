"""`upfl data`: which data sets there are, getting and checking them, and who would hold what."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.columns import Columns
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from upfl.cli.console import Console, echo
from upfl.config import toml_value
from upfl.data import Clients, Federation, Partition, build_federation, class_counts, default_partition, load
from upfl.data.catalog import CATALOG
from upfl.data.sources import EMBEDDED, NAMES, check, locate
from upfl.errors import ConfigError, DataError
from upfl.suggest import unknown

app = typer.Typer(no_args_is_help=True, help="List, fetch and check data sets; show who holds which classes.")

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """The data sets, and where they are on this machine.

    Example: upfl data list
    """
    rows = [_description(name) for name in NAMES]
    if as_json:
        return echo(json.dumps(rows, indent=2))
    table = Table("data set", "images", "classes", "clients", title="Data sets", title_justify="left")
    table.add_column("where", overflow="fold")
    for row in rows:
        where = escape(row["folder"] or "embedded") if row["available"] else "[dim]not here yet[/dim]"
        size = " x ".join(map(str, row["shape"]))
        table.add_row(row["name"], size, str(row["classes"]), f"{row['clients']}, {row['partition']}", where)
    console = Console()
    console.print(table)
    if not all(row["available"] for row in rows):
        console.print("Get what is missing with [bold]upfl data fetch NAME[/bold]; training fetches it by itself too.")
    return None


@app.command("fetch")
def fetch_command(names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)]) -> None:
    """Download data sets into the cache folder (UPFL_CACHE moves it), unless they are on this machine already.

    Example: upfl data fetch mnist cifar10
    """
    _known(names)
    console = Console()
    for name in names:
        source = load(name)  # downloads if need be, and checks every file
        where = locate(name) or "embedded"
        console.print(f"[green]{name}[/green]: {len(source.labels)} samples, {escape(str(where))}", soft_wrap=True)


@app.command("check")
def check_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Read data sets' files again and compare them with their digests; without names, all that are on this machine.

    Example: upfl data check cifar10
    """
    _known(names or [])
    chosen = names or [name for name in NAMES if name == EMBEDDED or locate(name)]
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


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(show_default=False)],
    partition_seed: Annotated[int, typer.Option(help="Who holds which samples.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help=f"Change the partition: {', '.join(Partition.model_fields)}."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a picture (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a partition: which client holds how much of which class.

    Examples: upfl data show digits;
    upfl data show cifar10 --set kind=dirichlet --set alpha_new=0.01 -o shift.png
    """
    _known([name])
    partition = default_partition(name).revised(dict(_setting(text) for text in settings or []))
    federation = build_federation(load(name), partition, partition_seed)
    if output is not None:
        from upfl.report.partition_picture import draw  # here, because matplotlib takes a second to import

        draw(federation, partition, output)
    if as_json:
        return echo(json.dumps(_summary(federation, partition, partition_seed)))
    console = Console()
    console.print(_terminal_picture(federation, partition, partition_seed))
    if output is not None:
        console.print(f"Picture: {escape(str(output))}", soft_wrap=True)
    return None


def _description(name: str) -> dict[str, Any]:
    shape, classes = ((1, 8, 8), 10) if name == EMBEDDED else (CATALOG[name].shape, len(CATALOG[name].class_names))
    folder = locate(name)
    return {
        "name": name,
        "shape": list(shape),
        "classes": classes,
        "partition": default_partition(name).kind,
        "clients": default_partition(name).clients,
        "available": name == EMBEDDED or folder is not None,
        "folder": str(folder) if folder else None,
    }


def _known(names: list[str]) -> None:
    for name in names:
        if name not in NAMES:
            raise unknown("data set", name, NAMES)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write key=value, for example clients=40")
    return key.strip(), toml_value(value.strip())


def _summary(federation: Federation, partition: Partition, seed: int) -> dict[str, Any]:
    return {
        "dataset": federation.source.name,
        "partition": partition.model_dump(mode="json"),
        "partition_seed": seed,
        "class_names": federation.source.class_names,
        "public": len(federation.public),
        "notes": federation.notes,
        **{
            role: {"class_counts": class_counts(federation, clients).tolist(), "angles": clients.angles.tolist()}
            for role, clients in (("training", federation.training), ("new", federation.new))
        },
    }


# In the terminal

_SHADES = "░▒▓█"
_MOST_ROWS = 50
_MOST_COLUMNS = 62  # what fits 80 characters


def _terminal_picture(federation: Federation, partition: Partition, seed: int) -> Group:
    names = federation.source.class_names
    together = -(-len(names) // _MOST_COLUMNS)
    column = "a class" if together == 1 else f"{together} classes, headed by their tens"
    title = Text.from_markup(f"[bold]{federation.source.name}[/bold], {partition.kind}, partition seed {seed}")
    legend = Text(f"A row is a client, a column {column}; {_SHADES} from few to most of its samples.", "dim")
    if len(names) <= 20 and any(len(name) > 1 for name in names):
        legend.append("\nClasses: " + ", ".join(f"{index} {name}" for index, name in enumerate(names)))
    if len(federation.public):
        legend.append(f"\nPublic, unlabelled: {len(federation.public)} samples.")
    panels = [
        _panel(federation, federation.training, "training", "cyan", together),
        _panel(federation, federation.new, "new", "magenta", together),
    ]
    notes = [Text(f"Note: {note}", "yellow") for note in federation.notes]
    return Group(title, legend, Columns(panels), *notes)


def _panel(federation: Federation, clients: Clients, role: str, colour: str, together: int) -> Panel:
    names = federation.source.class_names
    firsts = np.arange(0, len(names), together)
    counts = np.add.reduceat(class_counts(federation, clients)[:_MOST_ROWS], firsts, axis=1)
    cell = 2 if len(firsts) <= 20 else 1
    single = all(len(name) == 1 for name in names)
    heads = [names[first] if single else str(first if together == 1 else first // 10)[-1] for first in firsts]
    text = Text(no_wrap=True)
    text.append("     " + "".join(head.ljust(cell) for head in heads) + " samples\n", "bold")
    for client, row in enumerate(counts):
        text.append(f"{client:4} ", "dim")
        for share in row / row.max():
            if share:
                text.append(_SHADES[int(np.ceil(share * len(_SHADES))) - 1] * cell, colour)
            else:
                text.append("·".ljust(cell), "dim")
        turned = f" {clients.angles[client]:g}°" if clients.angles.any() else ""
        text.append(f"{row.sum():8}{turned}\n")
    if len(clients) > _MOST_ROWS:
        text.append(f"     and {len(clients) - _MOST_ROWS} more\n", "dim")
    sizes = clients.sizes()
    text.append(f"{sizes.min()} to {sizes.max()} each, {sizes.sum()} in all", "dim")
    return Panel(text, title=f"{len(clients)} {role} clients", border_style=colour, expand=False)
