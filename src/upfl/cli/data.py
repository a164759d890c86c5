"""`upfl data`: which data sets there are, getting and checking them, and who would hold what."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.columns import Columns
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
        return typer.echo(json.dumps(rows, indent=2))
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
        typer.echo(json.dumps(rows, indent=2))
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
        _draw(federation, partition, output)
    if as_json:
        return typer.echo(json.dumps(_summary(federation, partition, partition_seed)))
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
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word


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


# As a picture


def _draw(federation: Federation, partition: Partition, output: Path) -> None:
    from matplotlib.figure import Figure  # here, because it takes a second to import; no pyplot: no display needed

    names = federation.source.class_names
    roles = ((federation.training, "training", "Blues"), (federation.new, "new", "Oranges"))
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (class_counts(federation, c) for c, *_ in roles)]
    most = max(float(share.max()) for share in shares)
    width = 2 * min(1.6 + 0.28 * len(names), 9.0) + 2
    tallest = max(len(share) for share in shares)
    figure = Figure(figsize=(width, min(max(3.2, 1.4 + 0.13 * tallest), 12)), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(5, 1, 5, 1))
    for (clients, role, colours), share, (heat, bars) in zip(roles, shares, (axes[:2], axes[2:]), strict=True):
        _draw_shares(heat, share, colours, most)
        _draw_sizes(bars, clients.sizes(), heat.get_ylim())
        heat.set_title(f"{len(clients)} {role} clients", fontsize=9)
        heat.set_xticks(*_ticks(names), rotation=90 if max(map(len, names)) > 2 else 0)
    title = f"{federation.source.name}, {partition.kind}: the darker, the larger a class's share of a client's samples"
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise ConfigError(f"cannot write the picture {output}: {error}") from error


def _draw_shares(axes: Any, share: NDArray[np.float64], colours: str, most: float) -> None:
    held = np.ma.masked_equal(share, 0)  # few samples must look different from none
    axes.imshow(held, cmap=colours, vmin=-0.15 * most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set_facecolor("0.97")
    axes.set_ylabel("client", fontsize=8)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)


def _draw_sizes(axes: Any, sizes: NDArray[np.int64], limits: tuple[float, float]) -> None:
    axes.barh(np.arange(len(sizes)), sizes, height=0.8, color="0.75")
    axes.set_ylim(*limits)
    axes.set_yticks([])
    axes.set_title("samples", fontsize=8)
    axes.locator_params(axis="x", nbins=2)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _ticks(names: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Every class by name while there is room, every tenth by number beyond."""
    if len(names) <= 62:
        return list(range(len(names))), list(names)
    return list(range(0, len(names), 10)), [str(index) for index in range(0, len(names), 10)]
