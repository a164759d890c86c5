"""`upfl train`, `upfl resume`, `upfl show`: runs and their results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from upfl import api, models
from upfl.cli.console import Console, echo
from upfl.cli.progress import ProgressBar
from upfl.config import PROFILES, Config, configure, listed, rounds_needed
from upfl.engine.folder import RunFolder
from upfl.engine.group import under_torchrun
from upfl.engine.rounds import Observer
from upfl.errors import ConfigError, RunError, StoppedError, UpflError
from upfl.methods import ROWS, row_title, training_class
from upfl.safe.text import markdown
from upfl.track import TRACKERS, Several, tracker

Workers = Annotated[
    int | None,
    typer.Option("--workers", "-w", min=1, help="Worker processes; by default one a core.", show_default=False),
]
SPREAD = "10% - median - 90%"
NOT_SCORED = "-"  # what a federation of other people's machines cannot know, it does not say
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Track = Annotated[
    str | None, typer.Option(help=f"Live views, written to local files: {', '.join(TRACKERS)}.", show_default=False)
]


def train(
    method: Annotated[str, typer.Argument(help="A row of the table or a training: see `upfl methods`.")],
    dataset: Annotated[str, typer.Argument(help="A data set: see `upfl data list`.")],
    profile: Annotated[str | None, typer.Option(help=f"Scale: {', '.join(PROFILES)}.  [default: paper]")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings, such as a run's config.toml.")] = None,
    model: Annotated[str | None, typer.Option(help=f"{', '.join(models.names())}, or MODULE:FACTORY.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Initialisation, participation, batches.")] = None,
    partition_seed: Annotated[int | None, typer.Option(min=0, help="Who holds which samples.")] = None,
    clients_per_round: Annotated[str | None, typer.Option(help="A number (20) or a fraction (0.4).")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Rounds between evaluations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Rounds between checkpoints.")] = None,
    score: Annotated[str | None, typer.Option(help="Further personalizers to score, comma-separated.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any hyper-parameter: inner_lr=0.3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    vectorize: Annotated[int | None, typer.Option(help="Clients trained side by side, on an accelerator.")] = None,
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.  [default: runs/DATASET-METHOD-...]")] = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Train a federation and score it on new, unlabelled clients.

    Hyper-parameters are the paper's for the method and the data set, unless set otherwise.

    Examples:

        upfl train fedtta digits --profile lite

        upfl train fedtta mnist --rounds 40 --score none,early-stopped

        upfl train fedavg cifar10 --clients-per-round 20 --set partition.kind=dirichlet --set partition.alpha_new=0.01

        torchrun --nproc-per-node 2 -m upfl train fedavg digits
    """
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
    require_enough_rounds(described)
    path = out or default_folder(described)
    with watched(path, f"{described.method}, {described.dataset}", as_json, listed(track)) as observer:
        run = api.train(described, path, workers=workers, observer=observer)
    _finish([run], as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    workers: Workers = None,
    track: Track = None,
    from_previous: Annotated[
        bool, typer.Option("--from-previous", help="From the checkpoint before the last one, if that is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, from its last checkpoint, to the same bits as if it had not been.

    Example: upfl resume runs/digits-fedtta-paper-s0
    """
    folder = RunFolder.open(run)
    config = folder.config()
    if from_previous:
        with folder.lock():
            folder.go_back()
    with watched(run, f"{config.method}, {config.dataset}", as_json, listed(track)) as observer:
        resumed = api.resume(run, workers=workers, observer=observer)
    _finish([resumed], as_json)


def show(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
) -> None:
    """The scores of one or more runs; what cannot be read is named.

    Example: upfl show runs/*
    """
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


def require_enough_rounds(config: Config) -> None:
    """Refuse a run that would end before every client was asked as often as the training needs."""
    if not training_class(config.training_name).in_turn:
        return
    needed = rounds_needed(config.model_dump(), config.partition.clients)
    if config.rounds < needed:
        raise ConfigError(
            f"rounds = {config.rounds}: {config.training_name} asks every client in turn, and with so many in a round "
            f"that takes {needed} rounds; leave --rounds out, or raise --clients-per-round"
        )


def default_folder(config: Config) -> Path:
    parts = [config.dataset, config.method, config.profile, f"s{config.seed}"]
    if config.partition_seed:
        parts.append(f"p{config.partition_seed}")
    return Path("runs") / "-".join(parts)


@contextmanager
def watched(path: Path, title: str, quiet: bool, track: Sequence[str] = ()) -> Iterator[Observer | None]:
    """A progress bar and trackers around a run, and the way back into it when it is interrupted."""
    follows = under_torchrun() and os.environ["RANK"] != "0"
    trackers = [] if follows else [tracker(name) for name in track]
    try:
        if quiet or follows:
            yield Several(trackers) if trackers else None
        else:
            with ProgressBar(title) as bar:
                yield Several([bar, *trackers])
    except KeyboardInterrupt:
        if not follows:
            echo(f"stopped; go on with upfl resume {path}", err=True)
        raise typer.Exit(130) from None
    except StoppedError as error:
        raise StoppedError(f"{error}\nThe run can be resumed: upfl resume {path}") from error


def show_runs(runs: list[api.Run], as_json: bool) -> None:
    if as_json:
        results = [{"run": str(run.path), **run.result, "warnings": warnings([run])} for run in runs]
        echo(json.dumps(results, indent=2))
        return
    table = lean_table("Accuracy on unlabelled new clients, percent")
    table.add_column("run, row", overflow="fold")
    for name in ("validation", "before", "after", "gain", SPREAD):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        result = run.result
        table.add_row(f"[bold]{escape(run.path.name)}[/bold]", f"{result['rounds']} rounds")
        for row in result["rows"]:
            table.add_row(
                f"  {escape(row_title(row['row']))}",
                score(row, "validation"),
                score(row, "test_before"),
                f"[bold]{score(row, 'test')}[/bold]",
                f"{row['test'] - row['test_before']:+.2f}" if "test" in row else NOT_SCORED,
                spread(row),
            )
            for label, scores, clients in by_architecture(row):
                validation, before, after = (_percent(scores[key]) for key in ("validation", "test_before", "test"))
                known = scores["test"] is not None
                gain = f"{scores['test'] - scores['test_before']:+.2f}" if known else "-"
                table.add_row(f"    {escape(label)}", validation, before, after, gain, clients, style="dim")
    console = Console()
    console.print(table)
    for run in runs:
        if left_out := run.result["left_out"]:
            where = escape(str(run.path))
            console.print(f"[yellow]{where}: {left_out} client(s) were left out of rounds: see metrics.jsonl[/yellow]")
    for warning in warnings(runs):
        console.print(f"[yellow]{warning}[/yellow]")
    console.print(
        "[dim]before, after: the model before and after personalization, at the round of best validation; "
        f"{SPREAD}: of the new clients' accuracies after.[/dim]"
    )


def lean_table(title: str) -> Table:
    """A table without borders, so that rows of figures fit a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


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


def _finish(runs: list[api.Run], as_json: bool) -> None:
    if under_torchrun() and os.environ["RANK"] != "0":
        return
    show_runs(runs, as_json)
    if not as_json:
        for run in runs:
            echo(f"run folder: {run.path}")


def numbers(option: str, text: str | None, least: int = 0) -> list[int]:
    """The whole numbers in a comma-separated option."""
    try:
        found = [int(number) for number in listed(text)]
        if any(number < least for number in found):
            raise ValueError
    except ValueError:
        example = f"{least},{least + 1},{least + 2}"
        raise ConfigError(f"{option} {text}: give whole numbers from {least}, comma-separated: {example}") from None
    return found


def participation(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        given = float(text) if "." in text else int(text)
        if given <= 0 or (isinstance(given, float) and not given <= 1):
            raise ValueError
        return given
    except ValueError:
        raise ConfigError(f"--clients-per-round {text}: give a number (20) or a fraction (0.4)") from None
