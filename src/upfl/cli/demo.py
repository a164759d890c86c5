"""`upfl demo`: the whole story on the embedded data, in less than two minutes.

One federation of digits is so small that luck has a hand in it: who holds what, and even how a processor rounds, moves
FedTTA's newcomers by some points. So the demo trains several, drawn independently, and shows the mean over them.

Every row has the same federations and the same number of steps, and is scored after the last round. The rates were
found with as many trials for each training, by the accuracy on training clients that were held out as newcomers, of
federations that results/digits.md does not report (`python -m benchmarks.demo rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upfl.cli.console import Console, lean_table
from upfl.cli.options import Workers
from upfl.errors import RunError

if TYPE_CHECKING:
    from upfl.config import Config

TRAININGS = {
    "fedavg": ("none", "tent", "label-shift", "refit+label-shift"),
    "fedtta": ("one-step",),
    "fedtta-prox": ("one-step", "early-stopped"),
}
ROUNDS = 40
FEDERATIONS = 5
# Four or five of a training client's 30 images train and the others validate. With many labels FedAvg leaves little to
# gain on digits, and rates chosen by few validation samples are a matter of luck (results/digits.md).
SCALE = ("partition.clients=60", "partition.validation=0.85", "training.iterations=5")
RATES: dict[str, dict[str, float]] = {
    "fedavg": {"lr": 0.6},
    "fedtta": {"inner_lr": 0.5, "outer_lr": 0.5, "adapt_lr": 0.1},
    "fedtta-prox": {"inner_lr": 0.5, "outer_lr": 0.8, "adapt_lr": 0.03},
}


def configuration(
    method: str,
    rounds: int = ROUNDS,
    seed: int = 0,
    partition_seed: int = 0,
    **options: Any,
) -> Config:
    """A training of the demo, scored once, after its last round."""
    from upfl.config import configure

    rates = [f"training.{key}={rate}" for key, rate in RATES[method].items()]
    return configure(
        method,
        "digits",
        rounds=rounds,
        seed=seed,
        partition_seed=partition_seed,
        evaluate_every=rounds,
        checkpoint_every=rounds,  # a run of seconds is begun anew rather than resumed
        **({"score": TRAININGS[method], "settings": (*SCALE, *rates)} | options),
    )


def partition_seeds(first: int, federations: int = FEDERATIONS) -> list[int]:
    """Of the federations of a demo."""
    return [first + 100 * number for number in range(federations)]


def together(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row over all federations: the means of its accuracies, and all clients."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            rows.setdefault(row["row"], []).append(row)
    return [
        {
            "row": name,
            "test_before": fmean(row["test_before"] for row in found),
            "test": fmean(row["test"] for row in found),
            "tests": [row["test"] for row in found],
            "clients": [client for row in found for client in row["clients"]],
        }
        for name, found in rows.items()
    ]


def demo(
    out: Annotated[
        Path, typer.Option(help="Where runs and picture go; what is finished there is not done again.")
    ] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = ROUNDS,
    seed: Annotated[int, typer.Option(min=0, help="Initialisation and batches.")] = 0,
    partition_seed: Annotated[int, typer.Option(min=0, help="Who holds which digits: P, P + 100, P + 200, ...")] = 0,
    federations: Annotated[int, typer.Option(min=1, help="How many are trained.")] = FEDERATIONS,
    workers: Workers = None,
) -> None:
    """Train small federations, let unlabelled newcomers join, show what personalization gives them.

    In each federation 60 clients share scikit-learn's digits, each with about 30 images of at most two
    classes. 30 of them train three federated models, on four or five labelled images each; the other 30 join
    afterwards with images but no labels, and personalize. Every figure is a mean over federations: one alone
    depends on who holds what (results/digits.md).

    Example: upfl demo
    """
    from upfl import api
    from upfl.cli.progress import watched
    from upfl.cli.tables import SPREAD, spread
    from upfl.methods import row_title

    console = Console()
    console.print(
        "[bold]In a federation 30 clients train, and 30 others join later without labels.[/bold] "
        "Every client has images of at most two of the ten digits."
    )
    runs = []
    for method in TRAININGS:
        for number, partition in enumerate(partition_seeds(partition_seed, federations), 1):
            config = configuration(method, rounds, seed, partition)
            path = out / f"{method}-p{partition}"
            with watched(path, f"{method:<11} {number}/{federations}", quiet=False, notes=False) as observer:
                if (path / "config.toml").exists():
                    if api.Run(path).config != config:
                        raise RunError(f"{path}: holds a run with other settings; choose another --out")
                    runs.append(api.resume(path, workers=workers, observer=observer))
                else:
                    runs.append(api.train(config, path, workers=workers, observer=observer))
    rows = together(run.result for run in runs)
    table = lean_table(f"New clients' accuracy, percent; federations: {federations}")
    table.add_column("method")
    for name in ("before", "after", "gain", SPREAD):
        table.add_column(name, justify="right")
    for row in rows:
        gain = row["test"] - row["test_before"]
        gained = f"{gain:+.1f}" if row["row"] != "fedavg" else "-"
        numbers = (f"{row['test_before']:.1f}", f"[bold]{row['test']:.1f}[/bold]", gained, spread(row))
        table.add_row(row_title(row["row"]), *numbers)
    console.print(table)
    picture = out / "demo.png"
    from upfl.report.demo_picture import draw  # here, because matplotlib takes a second to import
    from upfl.report.page import write_report

    draw(rows, picture)
    with console.status("writing the report"):
        write_report([run.path for run in runs], out / "report")
    console.print(
        f"Without a label, FedTTA's newcomers end {_from_fedavg(rows, 'fedtta')} points from FedAvg's, "
        f"those that correct the label shift {_from_fedavg(rows, 'label-shift')}, "
        f"with the last layer refitted {_from_fedavg(rows, 'refit-label-shift')}. "
        f"Picture: [bold]{picture}[/bold], report: [bold]{out / 'report' / 'index.html'}[/bold]",
        soft_wrap=True,
    )
    console.print("Next: [bold]upfl methods[/bold], [bold]upfl data show digits[/bold], [bold]upfl train --help[/bold]")


def _from_fedavg(rows: list[dict[str, Any]], name: str) -> str:
    """The mean distance of a row from FedAvg's, and that of the single federations."""
    tests = {row["row"]: row["tests"] for row in rows}
    single = [ours - theirs for ours, theirs in zip(tests[name], tests["fedavg"], strict=True)]
    return f"{fmean(single):+.1f} ({min(single):+.1f} to {max(single):+.1f})"
