"""`upfl score`: a trained run under further personalizers, beside bounds, on later data and on other newcomers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo, lean_table
from upfl.cli.options import AsJson, RunPath, numbers
from upfl.errors import ConfigError


def score(
    run: RunPath,
    names: Annotated[
        str | None,
        typer.Option(
            "--score",
            metavar="NAMES",
            help="Personalizers or BASE+CORRECTION, comma-separated.",
            show_default="none, calibrated, label-shift, tent, and the run's own",
        ),
    ] = None,
    oracles: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Bounds that know the labels: oracle-prior, oracle-labels, oracle-step, oracle-half; or all.",
        ),
    ] = None,
    inductive: Annotated[bool, typer.Option("--inductive", help="Personalize on one half, score the other.")] = False,
    newcomers: Annotated[
        list[str] | None,
        typer.Option(
            "--new", help="Other new clients, by a field of the partition: alpha_new=0.5.", metavar="KEY=VALUE"
        ),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Samples of drawn newcomers: 5,20,60,600.")] = None,
    classes: Annotated[str | None, typer.Option(help="Classes of drawn newcomers: 2,5,10.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Newcomers drawn for each size and number of classes.")] = 50,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file for all of it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a run's last state under any personalizers, without training anew.

    Examples:

        upfl score runs/digits-fedavg-paper-s0 --oracles all --inductive

        upfl score runs/digits-fedavg-paper-s0 --sizes 5,20,60 --classes 2,5,10

        upfl score runs/cifar10-fedavg-dirichlet --new alpha_new=0.5
    """
    from upfl.config import listed
    from upfl.engine.folder import RunFolder
    from upfl.experiments.comparison import summaries
    from upfl.experiments.score import Newcomers, Scorer
    from upfl.personalize.oracle import ORACLES

    wanted = listed(names)
    if names is not None and not wanted:
        raise ConfigError("--score: name at least one personalizer, such as none,label-shift")
    if out and out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; give the name of a file")
    asked_sizes, asked_classes = numbers("--sizes", sizes, least=1), numbers("--classes", classes, least=1)
    kinds = [
        Newcomers(count, size, draws)
        for count in asked_classes or ([2] if asked_sizes else [])
        for size in asked_sizes or [600]
    ]
    changes = _changes(newcomers or [])
    console = Console(stderr=True)
    with console.status("reading the run") as status:

        def tell(what: str) -> None:
            status.update(escape(what))

        bounds = list(ORACLES) if oracles == "all" else listed(oracles)
        scorer = Scorer(RunFolder.open(run), wanted, bounds, tell, changes, kinds)
        scores = scorer.score(inductive, tell)
        curves = []
        for kind in kinds:
            tell(f"newcomers with {kind.classes} classes and {kind.samples} samples")
            drawn = scorer.score_drawn(kind)
            held = fmean(len(right) for right in drawn[0].right)  # fewer, where there are no more
            figures = {"classes": kind.classes, "samples": kind.samples, "mean_samples": held}
            curves.append(figures | {"rows": summaries(drawn)})
    found: dict[str, Any] = {
        "run": str(run),
        "dataset": scorer.config.dataset,
        "training": scorer.engine.training.name,
        "round": scorer.engine.progress.round,
        "seed": scorer.config.seed,
        "partition_seed": scorer.config.partition_seed,
        "new": changes,
        "fits": scorer.facts,
        "rows": summaries(scores, clients=True),
        "newcomers": curves,
    }
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    _show(found)


def _changes(settings: list[str]) -> dict[str, Any]:
    """Fields of the partition."""
    from upfl.config import toml_value

    changes = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--new {setting}: write key=value, for example alpha_new=0.5")
        changes[key.removeprefix("partition.")] = toml_value(text)
    return changes


def _show(found: dict[str, Any]) -> None:
    from upfl.cli.tables import unscored_table
    from upfl.experiments.comparison import HARM, LARGE

    console = Console()
    table = lean_table(f"{found['training']}, {found['dataset']}, round {found['round']}: accuracy in percent")
    later = any("inductive" in row for row in found["rows"])
    table.add_column("personalizer", no_wrap=True)
    for name in ("validation", "new", *(["later"] if later else []), "against none", "harmed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("estimate\noff by", justify="right", no_wrap=True)
    last: dict[str, Any] = {"bound": False}
    for row in found["rows"]:
        if row["bound"] and not last["bound"]:
            table.add_section()
        last = row
        against = row.get("against_none")
        table.add_row(
            escape(row["name"]),
            _figure(row.get("validation")),
            f"[bold]{_figure(row.get('test'))}[/bold]",
            *([_figure(row.get("inductive"))] if later else []),
            f"{against['difference']:+.1f} [{against['low']:+.1f}, {against['high']:+.1f}]".replace("[", "\\[")
            if against
            else "",
            f"{against['harmed_large_clients']} of {against['large_clients']}" if against else "",
            _figure(row.get("estimate", {}).get("mean_absolute_error")),
        )
    console.print(table)
    console.print(
        f"[dim]new: new clients{'; later: the half that they did not personalize on' if later else ''}; against none: "
        f"with its 95% interval over clients; harmed: those of the clients with at least {LARGE} samples that lost "
        f"more than {HARM:g} points, p < 0.05; estimate: the newcomers' own, label-free, mean error in points"
        f"{'; oracle: bounds that know the labels' if last['bound'] else ''}.[/dim]"
    )
    for row in found["rows"]:
        if row.get("unscored"):
            console.print(unscored_table(row["name"], row["unscored"]))
    for curve in found["newcomers"]:
        figures = ", ".join(f"{row['name']} {row['test']:.1f}" for row in curve["rows"])
        samples = f"{curve['mean_samples']:.4g} samples" + (
            f" ({curve['samples']} asked for)" if curve["mean_samples"] < curve["samples"] else ""
        )
        console.print(f"{curve['classes']} classes, {samples}: {figures}", highlight=False)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
