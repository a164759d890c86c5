"""`upfl experiment`: the paper's tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo, lean_table
from upfl.cli.options import (
    PROFILE,
    ClientsPerRound,
    EvaluateEvery,
    Rounds,
    Track,
    Workers,
    numbers,
    participation,
)
from upfl.errors import ConfigError, RunError
from upfl.experiments import definitions

if TYPE_CHECKING:
    from upfl.engine.rounds import Observer
    from upfl.experiments import runner
    from upfl.experiments.plan import Job


def experiment(
    name: Annotated[
        str, typer.Argument(help=f"One or several, comma-separated: {', '.join(definitions.EXPERIMENTS)}.")
    ],
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Rows, comma-separated.", show_default="the paper's")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Data sets, comma-separated.", show_default="the paper's")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,...", help="Training seeds.", show_default="0,1,2; lite and smoke: 0")
    ] = None,
    partition_seeds: Annotated[
        str, typer.Option(metavar="N,...", help="Partition seeds: who holds which samples.")
    ] = "0",
    profile: Annotated[str, typer.Option(help=PROFILE)] = "paper",
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    evaluate_every: EvaluateEvery = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every training.")
    ] = None,
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="The folder.", show_default="runs/NAME-PROFILE")] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after so long: long trainings first, what does not fit is listed."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Only say what would run, and measure how long.")
    ] = False,
    track: Track = None,
) -> None:
    """Run the trainings behind the paper's tables and figures; then `upfl report` shows them.

    Rows that share a training share one run, also over several experiments. Started again, an experiment skips what is
    done and goes on with what was begun; a training that fails is reported and the others go on. Without options the
    rows, data sets and partition are the paper's.

    Examples:

        upfl experiment overall --profile smoke --data digits

        upfl experiment overall --data mnist --methods fedavg,fedtta --seeds 0

        upfl experiment distribution-shift --profile lite --forecast

        upfl experiment overall,dataset-size --profile study --hours 8
    """
    from upfl import api
    from upfl.cli.tables import show_runs
    from upfl.config import listed
    from upfl.engine.group import under_torchrun
    from upfl.experiments import runner
    from upfl.experiments.plan import campaign, plan
    from upfl.track import tracker

    chosen = [definitions.experiment(one) for one in dict.fromkeys(listed(name))]
    if under_torchrun():
        raise ConfigError("an experiment starts workers of its own: under torchrun, start single trainings")
    plans = {
        one.name: plan(
            one,
            methods=listed(methods),
            datasets=listed(data),
            seeds=numbers("--seeds", seeds),
            partition_seeds=numbers("--partition-seeds", partition_seeds),
            profile=profile,
            settings=settings or (),
            rounds=rounds,
            clients_per_round=participation(clients_per_round),
            evaluate_every=evaluate_every,
        )
        for one in chosen
    }
    jobs = campaign(plans)
    folder = out or Path("runs") / f"{'-'.join(plans)}-{profile}"
    for tool in listed(track):
        tracker(tool)  # whether it is there
    console = Console()
    for one in chosen:
        console.print(f"[bold]{one.title}[/bold] ({one.paper})", soft_wrap=True)
    console.print(
        f"{sum(len(job.rows) for job in jobs)} rows from {len(jobs)} trainings, in {escape(str(folder))}",
        soft_wrap=True,
    )
    if dry_run or forecast:
        return _show(jobs, _forecast(jobs, workers, folder, console) if forecast else None, workers, console)
    runner.prepare(chosen, jobs, folder)
    expected: dict[str, float] = {}
    if hours is not None:
        estimates = runner.longest_first(_forecast(jobs, workers, folder, console))
        jobs, expected = [one.job for one in estimates], {one.job.name: one.seconds for one in estimates}
    outcomes = []
    seconds = math.inf if hours is None else 3600 * hours
    try:
        watch = partial(_watched, jobs=jobs, track=listed(track))
        for outcome in runner.run(jobs, folder, workers, watch, expected, seconds):
            outcomes.append(outcome)
            if outcome.state == "failed":
                console.print(f"[red]failed:[/red] {escape(outcome.job.name)}: {escape(outcome.error)}", soft_wrap=True)
    except KeyboardInterrupt:
        echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130) from None
    done = [api.Run(folder / outcome.job.name) for outcome in outcomes if outcome.state in ("done", "was done")]
    if done:
        show_runs(done, as_json=False)
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in ("done", "was done", "failed")}
    console.print(
        f"{counts['done']} trainings done, {counts['was done']} were done before, {counts['failed']} failed. "
        f"Look at them: [bold]upfl report {escape(str(folder))} -o {escape(str(folder / 'report'))}[/bold]",
        soft_wrap=True,
    )
    if waiting := [outcome for outcome in outcomes if outcome.state in ("begun", "not begun")]:
        console.print(f"{len(waiting)} did not fit into {hours:g} hours; the same command goes on:", soft_wrap=True)
        for outcome in waiting:
            console.print(
                f"  {escape(outcome.job.name)} ({outcome.state}), about {duration(expected[outcome.job.name])}",
                soft_wrap=True,
            )
    if counts["failed"]:
        names = ", ".join(outcome.job.name for outcome in outcomes if outcome.state == "failed")
        raise RunError(
            f"{counts['failed']} of {len(jobs)} trainings failed: {names}; the same command tries them again"
        )
    return None


def _forecast(jobs: list[Job], workers: int | None, folder: Path, console: Console) -> list[runner.Estimate]:
    from upfl.experiments import runner

    with console.status("a short trial of each kind of training") as status:
        estimates = []
        for estimate in runner.estimate(jobs, workers, folder):
            estimates.append(estimate)
            status.update(f"a short trial of each kind of training: {len(estimates)} of {len(jobs)} known")
    return estimates


def _show(jobs: list[Job], estimates: list[runner.Estimate] | None, workers: int | None, console: Console) -> None:
    from upfl import api
    from upfl.experiments import runner

    table = lean_table("What would run")
    table.add_column("training", overflow="fold")
    table.add_column("rows")
    others = any(job.newcomers for job in jobs)
    for column in ("rounds", *(["other new clients"] if others else []), *(["about"] if estimates else [])):
        table.add_column(column, justify="right")
    seconds = {one.job.name: one.seconds for one in estimates or ()}
    for job in jobs:
        numbers = (job.config.rounds, *([len(job.newcomers) or ""] if others else []))
        times = [duration(seconds[job.name])] if estimates else []
        table.add_row(job.name, ", ".join(job.rows), *map(str, numbers), *times)
    console.print(table)
    if not estimates:
        console.print(f"{len(jobs)} trainings. [dim]--forecast measures how long they would take.[/dim]")
        return
    console.print(
        f"{len(jobs)} trainings, about [bold]{duration(sum(seconds.values()))}[/bold] "
        f"with {workers or api.cores()} worker(s).\n[dim]Measured: {runner.TRIAL_ROUNDS} rounds of each kind of "
        "training, with all clients where that is short and a few where not, and their scoring; scaled to all "
        "clients, rounds and evaluations. Early-stopped "
        "adaptation takes other numbers of steps later in training, so its share is rough.[/dim]"
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


@contextmanager
def _watched(job: Job, jobs: list[Job], track: list[str]) -> Iterator[Observer]:
    from upfl.cli.progress import ProgressBar
    from upfl.track import Several, tracker

    place = f"{jobs.index(job) + 1}/{len(jobs)}"
    with ProgressBar(f"{place} {job.name}") as bar:
        yield Several([bar, *(tracker(name) for name in track)])
