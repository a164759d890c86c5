"""`upfl search`: hyper-parameters by validation accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo
from upfl.cli.options import (
    PROFILE,
    ClientsPerRound,
    DatasetName,
    EvaluateEvery,
    MethodName,
    PartitionSeed,
    Rounds,
    participation,
)
from upfl.errors import ConfigError, RunError


def search(
    method: MethodName,
    dataset: DatasetName,
    space: Annotated[str, typer.Option(help="paper: the paper's grid; free: anywhere within ranges.")] = "paper",
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="KEY=LOW:HIGH", help="Search this hyper-parameter, and no others but such."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many in all; a grid may have fewer.")] = 20,
    parallel: Annotated[int, typer.Option(min=1, help="Trials side by side, each with one worker.")] = 1,
    profile: Annotated[str, typer.Option(help=PROFILE)] = "paper",
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    evaluate_every: EvaluateEvery = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the trainings and of the search.", show_default="0")
    ] = None,
    partition_seed: PartitionSeed = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every trial.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder.", show_default="runs/search-DATASET-METHOD-PROFILE")
    ] = None,
) -> None:
    """Search for a method's hyper-parameters by validation accuracy; the best go to best.toml.

    New clients' accuracies play no part. Started again, a search goes on; a trial that was cut off is tried again from
    its checkpoint. Needs Optuna: pip install "upfl[search]".

    Examples:

        upfl search fedavg digits --profile lite --trials 9 --parallel 2

        upfl search fedtta mnist --space free --rounds 40 --trials 50

        upfl search fedtta digits --range inner_lr=0.01:1 --rounds 20

        upfl search hetero-tent digits --set partition.new=0.1 --set partition.held_out=0.4
    """
    from upfl.experiments.search import Search, Tried, import_optuna, run

    import_optuna()
    made = Search(
        out or Path("runs") / f"search-{dataset}-{method}-{profile}",
        method,
        dataset,
        space,
        dict(_range(text) for text in ranges or ()),
        {
            "profile": profile,
            "rounds": rounds,
            "clients_per_round": participation(clients_per_round),
            "evaluate_every": evaluate_every,
            "seed": seed,
            "partition_seed": partition_seed,
        },
        tuple(settings or ()),
    )
    console = Console()
    grid = f"a grid of {made.size} points" if made.size else "freely within ranges"
    console.print(
        f"[bold]{escape(method)}, {escape(dataset)}[/bold]: {', '.join(made.choices)}, {grid}", soft_wrap=True
    )
    tried: list[Tried] = []
    try:
        with console.status("searching") as status:
            for trial in run(made, trials, parallel):
                tried.append(trial)
                values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in trial.values.items())
                said = f"failed: {escape(trial.error)}" if trial.error else f"validation {trial.validation:.2f}"
                console.print(f"trial {trial.number}: {escape(values)}: {said}", soft_wrap=True)
                status.update(f"searching, {len(tried)} tried")
    except KeyboardInterrupt:
        echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130) from None
    best = made.folder / "best.toml"
    if not best.exists():
        raise RunError(f"{made.folder}: no trial succeeded")
    console.print(best.read_text(encoding="utf-8"), markup=False)
    console.print(
        f"Train with it: [bold]upfl train {escape(method)} {escape(dataset)} --config {escape(str(best))}[/bold]",
        soft_wrap=True,
    )
    if failed := sum(bool(trial.error) for trial in tried):
        console.print(f"[yellow]{failed} of {len(tried)} trials failed and do not count[/yellow]")


def _range(text: str) -> tuple[str, tuple[float, float]]:
    key, equals, limits = text.partition("=")
    try:
        low, high = (float(part) if not part.strip().isdigit() else int(part) for part in limits.split(":"))
        if not equals or not low < high:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--range {text}: write KEY=LOW:HIGH, such as inner_lr=0.01:1 or patience=1:10") from None
    return key, (low, high)
