"""`upfl train`, `upfl resume`, `upfl show`: runs and their results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from upfl.cli.console import Console, echo
from upfl.cli.options import (
    PROFILE,
    AsJson,
    ClientsPerRound,
    DatasetName,
    EvaluateEvery,
    MethodName,
    PartitionSeed,
    Rounds,
    RunPath,
    Track,
    Workers,
    participation,
)
from upfl.errors import RunError, UpflError

if TYPE_CHECKING:
    from upfl import api
    from upfl.config import Config


def train(
    method: MethodName,
    dataset: DatasetName,
    profile: Annotated[str | None, typer.Option(help=PROFILE, show_default="paper")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings, such as a run's config.toml.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="mlp, convnet, linear, resnet8, resnet18, embedding, one of your own, or MODULE:FACTORY.",
            show_default="the data set's",
        ),
    ] = None,
    rounds: Rounds = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Initialisation, participation, batches.", show_default="0")
    ] = None,
    partition_seed: PartitionSeed = None,
    clients_per_round: ClientsPerRound = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Rounds between checkpoints.")] = None,
    score: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Further personalizers to score, comma-separated.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any hyper-parameter: inner_lr=0.3.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.", show_default="cpu")] = None,
    vectorize: Annotated[
        int | None, typer.Option(metavar="N", help="Clients trained side by side, on an accelerator.")
    ] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder.", show_default="runs/DATASET-METHOD-PROFILE-sSEED")
    ] = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Train a federation and score it on new, unlabelled clients.

    Hyper-parameters are the paper's for the method and the data set, unless set otherwise.

    Examples:

        upfl train closed-form-label-shift digits

        upfl train fedtta mnist --rounds 40 --score none,early-stopped

        upfl train fedavg cifar10 --set partition.kind=dirichlet

        torchrun --nproc-per-node 2 -m upfl train fedavg digits
    """
    from upfl import api, models
    from upfl.cli.progress import watched
    from upfl.config import configure, listed

    described = configure(
        method,
        dataset,
        profile=profile,
        file=config,
        settings=settings or (),
        score=listed(score),
        model=models.load(model) if model else None,
        rounds=rounds,
        seed=seed,
        partition_seed=partition_seed,
        clients_per_round=participation(clients_per_round),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        device=device,
        vectorize=vectorize,
    )
    path = out or default_folder(described)
    with watched(path, f"{described.method}, {described.dataset}", as_json, listed(track)) as observer:
        run = api.train(described, path, workers=workers, observer=observer)
    _finish([run], as_json)


def resume(
    run: RunPath,
    workers: Workers = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="End after so many, more or fewer than the run was begun with.")
    ] = None,
    track: Track = None,
    from_previous: Annotated[
        bool, typer.Option("--from-previous", help="From the checkpoint before the last one, if that is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, from its last checkpoint, to the same bits as if it had not been.

    With --rounds a finished run trains on, as if it had been begun with so many.

    Examples:

        upfl resume runs/digits-fedtta-paper-s0

        upfl resume runs/digits-fedtta-paper-s0 --rounds 100
    """
    from upfl import api
    from upfl.cli.progress import watched
    from upfl.config import listed
    from upfl.engine.folder import RunFolder

    folder = RunFolder.open(run)
    config = folder.config()
    if from_previous:
        with folder.lock():
            folder.go_back()
    with watched(run, f"{config.method}, {config.dataset}", as_json, listed(track)) as observer:
        resumed = api.resume(run, workers=workers, observer=observer, rounds=rounds)
    _finish([resumed], as_json)


def show(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
) -> None:
    """The scores of one or more runs; what cannot be read is named.

    Example: upfl show runs/*
    """
    from upfl import api
    from upfl.cli.tables import markdown_table, show_runs

    readable, problems = [], []
    for path in runs:
        try:
            run = api.Run(path)
            run.result  # noqa: B018 - raises for a run that has none
            readable.append(run)
        except UpflError as error:
            problems.append(str(error))
    if markdown:
        echo(markdown_table(readable))
    elif readable or as_json:
        show_runs(readable, as_json)
    for problem in problems:
        Console(stderr=True, soft_wrap=True).print(f"[yellow]left out:[/yellow] {escape(problem)}")
    if problems and not readable:
        raise RunError("none of these can be shown")


def default_folder(config: Config) -> Path:
    parts = [config.dataset, config.method, config.profile, f"s{config.seed}"]
    if config.partition_seed:
        parts.append(f"p{config.partition_seed}")
    return Path("runs") / "-".join(parts)


def _finish(runs: list[api.Run], as_json: bool) -> None:
    from upfl.cli.tables import show_runs
    from upfl.engine.group import under_torchrun

    if under_torchrun() and os.environ["RANK"] != "0":
        return
    show_runs(runs, as_json)
    if not as_json:
        for run in runs:
            echo(f"run folder: {run.path}")
