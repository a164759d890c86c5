"""`upfl demo`: the whole story on the embedded data, in less than two minutes.

Every row has the same federation and the same number of steps, and is scored after the last round. The rates were found
by validation accuracy, twelve settings for each training, on partitions that results/digits.md does not report
(`python -m benchmarks.demo rates`).
"""

from __future__ import annotations

from pathlib import Path
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
# Four or five of a training client's 30 images train and the others validate. With many labels FedAvg leaves little to
# gain on digits, and rates chosen by few validation samples are a matter of luck (results/digits.md).
SCALE = ("partition.clients=60", "partition.validation=0.85", "training.iterations=5")
RATES: dict[str, dict[str, float]] = {
    "fedavg": {"lr": 0.5},
    "fedtta": {"inner_lr": 0.5, "outer_lr": 0.5, "adapt_lr": 0.03},
    "fedtta-prox": {"inner_lr": 0.5, "outer_lr": 0.5, "adapt_lr": 0.1},
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
        **({"score": TRAININGS[method], "settings": (*SCALE, *rates)} | options),
    )


def demo(
    out: Annotated[
        Path, typer.Option(help="Where runs and picture go; what is finished there is not done again.")
    ] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = ROUNDS,
    seed: Annotated[int, typer.Option(min=0, help="Initialisation and batches.")] = 0,
    partition_seed: Annotated[int, typer.Option(min=0, help="Who holds which digits.")] = 0,
    workers: Workers = None,
) -> None:
    """Train a small federation, let unlabelled newcomers join, show what personalization gives them.

    60 clients share scikit-learn's digits, each with about 30 images of at most two classes. 30 of them train three
    federated models, on four or five labelled images each; the other 30 join afterwards with images but no labels, and
    personalize. So small a federation depends on who holds what: results/digits.md has partition seeds 0 to 9.

    Example: upfl demo
    """
    from upfl import api
    from upfl.cli.progress import watched
    from upfl.cli.tables import SPREAD, spread
    from upfl.methods import row_title

    console = Console()
    console.print(
        "[bold]30 clients train, 30 others join later without labels.[/bold] "
        "Every client has images of at most two of the ten digits."
    )
    runs = []
    for method in TRAININGS:
        config = configuration(method, rounds, seed, partition_seed)
        path = out / method
        with watched(path, f"{method:<11}", quiet=False) as observer:
            if (path / "config.toml").exists():
                if api.Run(path).config != config:
                    raise RunError(f"{path}: holds a run with other settings; choose another --out")
                runs.append(api.resume(path, workers=workers, observer=observer))
            else:
                runs.append(api.train(config, path, workers=workers, observer=observer))
    rows = [row for run in runs for row in run.result["rows"]]
    table = lean_table("Accuracy on the 30 new clients' unlabelled data, percent")
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
    by_row = {row["row"]: row["test"] for row in rows}
    console.print(
        f"Without a label, FedTTA's newcomers end {by_row['fedtta'] - by_row['fedavg']:+.1f} points from FedAvg's, "
        f"those that correct the label shift {by_row['label-shift'] - by_row['fedavg']:+.1f}, "
        f"with the last layer refitted {by_row['refit-label-shift'] - by_row['fedavg']:+.1f}. "
        f"Picture: [bold]{picture}[/bold], report: [bold]{out / 'report' / 'index.html'}[/bold]",
        soft_wrap=True,
    )
    console.print("Next: [bold]upfl methods[/bold], [bold]upfl data show digits[/bold], [bold]upfl train --help[/bold]")
