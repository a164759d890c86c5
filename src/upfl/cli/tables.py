"""Results of runs as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from upfl import api
from upfl.cli.console import Console, echo, lean_table
from upfl.methods import ROWS, row_title
from upfl.safe.text import counted, markdown

SPREAD = "10% - median - 90%"
MOST_UNSCORED = 20
WIDTHS = {"validation": 10, "before": 6, "after": 6, "gain": 6, SPREAD.replace(" ", ""): 17}
OWN = "those who train"  # where others, which are held out, validate
NOT_SCORED = "-"  # what a federation of other people's machines cannot know, it does not say


def show_runs(runs: list[api.Run], as_json: bool) -> None:
    if as_json:
        results = [{"run": str(run.path), **run.result, "warnings": warnings([run])} for run in runs]
        echo(json.dumps(results, indent=2))
        return
    console = Console()
    table = lean_table("Accuracy on unlabelled new clients, percent")
    widest = max((len(cells[0]) for run in runs for cells, _ in _rows(run.result)), default=0)
    for run in (None, *runs):  # a table for each, so that a run's name may be as long as it is
        if run is not None:
            console.print(
                f"[bold]{escape(run.path.name)}[/bold], {counted(run.result['rounds'], 'round')}", soft_wrap=True
            )
            table = lean_table("")
            table.show_header = False
        table.add_column(width=max(widest, 20))
        for name, width in WIDTHS.items():
            table.add_column(name, justify="right", width=width)
        for cells, style in _rows(run.result) if run else ():
            table.add_row(*(escape(cell.replace(" - ", "-")) for cell in cells), style=style)
        console.print(table)
    for run in runs:
        if left_out := run.result["left_out"]:
            where = escape(str(run.path))
            console.print(f"[yellow]{where}: {left_out} client(s) were left out of rounds: see metrics.jsonl[/yellow]")
    for warning in warnings(runs):
        console.print(f"[yellow]{warning}[/yellow]")
    for run in runs:
        for row in run.result["rows"]:
            if row.get("unscored"):
                console.print(unscored_table(f"{run.path.name}, {row_title(row['row'])}", row["unscored"]))
    console.print(
        "[dim]before, after: the model before and after personalization, at the round of best validation; for rows "
        "that refit the last layer, before is the model as it was trained, without that layer; "
        f"{SPREAD}: of the new clients' accuracies after.[/dim]"
    )


def unscored_table(title: str, clients: list[dict[str, Any]]) -> Table:
    """New clients without labels: what is told of them without a score."""
    table = lean_table(f"New clients without labels: {escape(title)}")
    table.add_column("client", overflow="fold")
    for name in ("samples", "estimated accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("class mix", overflow="fold")
    for client in clients[:MOST_UNSCORED]:
        likeliest = sorted(client["mix"].items(), key=lambda one: -one[1])[:3]
        mix = ", ".join(f"{name} {share:.0%}" for name, share in likeliest)
        estimates = client["estimates"]
        estimate = "{:.0%} ({:.0%}-{:.0%})".format(*estimates[-1]) if estimates else NOT_SCORED
        called = str(client["client"] if client["name"] is None else client["name"])
        table.add_row(escape(called), str(client["samples"]), estimate, escape(mix))
    if (more := len(clients) - MOST_UNSCORED) > 0:
        table.add_row(f"and {more} more", "", "", "all of them: --json")
    return table


def _rows(result: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    """A run's rows as cells, and how they are drawn."""
    for row in result["rows"]:
        gain = f"{row['test'] - row['test_before']:+.2f}" if "test" in row else NOT_SCORED
        figures = [score(row, key) for key in ("validation", "test_before", "test")]
        yield [f"  {row_title(row['row'])}", *figures, gain, spread(row)], ""
        for label, scores, clients in by_architecture(row):
            figures = [_percent(scores[key]) for key in ("validation", "test_before", "test")]
            known = scores["test"] is not None
            gain = f"{scores['test'] - scores['test_before']:+.2f}" if known else NOT_SCORED
            yield [f"    {label}", *figures, gain, clients], "dim"
        if "validation_own" in row:  # others, which are held out, choose the round
            yield [f"    {OWN}", score(row, "validation_own"), "", "", "", ""], "dim"


def markdown_table(runs: list[api.Run]) -> str:
    lines = [
        f"| run | row | rounds | seed | partition | validation | before | after | last | best | clients {SPREAD} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        result = run.result
        facts = [result["rounds"], result["seed"], result["partition_seed"]]
        for row in result["rows"]:
            scores = [score(row, key) for key in ("validation", "test_before", "test", "test_last", "test_best")]
            cells = [markdown(run.path.name), markdown(row_title(row["row"])), *facts, *scores, spread(row)]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            for label, part, clients in by_architecture(row):
                scores = [_percent(part[key]) for key in ("validation", "test_before", "test")]
                cells = [markdown(run.path.name), f"- {markdown(label)}", *facts, *scores, "", "", clients]
                lines.append(f"| {' | '.join(map(str, cells))} |")
            if "validation_own" in row:
                cells = [markdown(run.path.name), f"- {OWN}", *facts, score(row, "validation_own"), *[""] * 5]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, *(f"\n{warning}" for warning in warnings(runs))])


def warnings(runs: list[api.Run]) -> list[str]:
    """What everyone who sees these runs' rows should know."""
    shown = dict.fromkeys(row["row"] for run in runs for row in run.result["rows"])
    return [f"{method.title} {method.warning}." for method in ROWS if method.row in shown and method.warning]


def by_architecture(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where clients have different models: each architecture with its new clients, its scores, its clients' spread."""
    for name, scores in row.get("architectures", {}).items():
        clients = [client for client in row["clients"] if client["architecture"] == name]
        yield f"{name} ({scores['clients']})", scores, spread({"clients": clients}) if scores["clients"] else "-"


def score(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else NOT_SCORED


def spread(row: dict[str, Any]) -> str:
    accuracies = [client["accuracy"] for client in row["clients"] if client["kind"] == "new"]
    if not accuracies:
        return NOT_SCORED
    low, middle, high = np.percentile(accuracies, [10, 50, 90])
    return f"{low:.1f} - {middle:.1f} - {high:.1f}"


def _percent(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
