"""A partition in the terminal: a row for each client, a column for each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from upfl.data import Clients, Federation, Partition, class_counts
from upfl.data.federation import ROLES, Role

_SHADES = "░▒▓█"
_MOST_ROWS = 50
_MOST_COLUMNS = 66  # what fits 80 characters, with the clients' names
_LONGEST = 16  # of a name


def picture(federation: Federation, partition: Partition, seed: int) -> Group:
    names = federation.source.class_names
    called = {role: _names(federation, role) for role in ROLES}
    widest = max(len(name) for some in called.values() for name in some)
    together = -(-len(names) // (_MOST_COLUMNS - widest))
    column = "a class" if together == 1 else f"{together} classes, headed by their tens"
    title = Text.from_markup(f"[bold]{federation.source.name}[/bold], {partition.kind}, partition seed {seed}")
    legend = Text(f"A row is a client, a column {column}; {_SHADES} from few to most of its samples.", "dim")
    if len(names) <= 20 and any(len(name) > 1 for name in names):
        legend.append("\nClasses: " + ", ".join(f"{index} {name}" for index, name in enumerate(names)))
    if len(federation.public):
        legend.append(f"\nPublic, unlabelled: {len(federation.public)} samples.")
    panels = [
        _panel(federation, federation.training, "training", "cyan", together, called["training"]),
        _panel(federation, federation.new, "new", "magenta", together, called["new"]),
    ]
    notes = [Text(f"Note: {note}", "yellow") for note in federation.notes]
    return Group(title, legend, Columns(panels), *notes)


def _names(federation: Federation, role: Role) -> list[str]:
    """Clients as the data name them, or their numbers."""
    count = min(len(getattr(federation, role)), _MOST_ROWS)
    found = federation.names(role, count) or [f"{client:4}" for client in range(count)]
    plain = ["".join(c if c.isprintable() else "?" for c in name) for name in found]
    return [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in plain]


def _panel(
    federation: Federation, clients: Clients, role: str, colour: str, together: int, called: Sequence[str]
) -> Panel:
    names = federation.source.class_names
    firsts = np.arange(0, len(names), together)
    counts = np.add.reduceat(class_counts(federation, clients)[:_MOST_ROWS], firsts, axis=1)
    cell = 2 if len(firsts) <= 20 else 1
    single = all(len(name) == 1 for name in names)
    heads = [names[first] if single else str(first if together == 1 else first // 10)[-1] for first in firsts]
    text = Text(no_wrap=True)
    width, sizes = max(map(len, called)), clients.sizes()
    text.append(" " * (width + 1) + "".join(head.ljust(cell) for head in heads) + " samples\n", "bold")
    for client, row in enumerate(counts):
        text.append(f"{called[client]:{width}} ", "dim")
        for share in row / max(row.max(), 1):
            if share:
                text.append(_SHADES[int(np.ceil(share * len(_SHADES))) - 1] * cell, colour)
            else:
                text.append("·".ljust(cell), "dim")
        turned = f" {clients.angles[client]:g}°" if clients.angles.any() else ""
        unlabelled = "" if row.any() else " no labels"
        text.append(f"{sizes[client]:8}{turned}{unlabelled}\n")
    if len(clients) > _MOST_ROWS:
        text.append(f"{'':{width}} and {len(clients) - _MOST_ROWS} more\n", "dim")
    text.append(f"{sizes.min()} to {sizes.max()} each, {sizes.sum()} in all", "dim")
    return Panel(text, title=f"{len(clients)} {role} clients", border_style=colour, expand=False)
