"""Which row to take for vectors, measured: `python -m benchmarks.vectors --runs FOLDER`.

Tables of numbers: scikit-learn's digits as 64 values, breast cancer as 30, and, where the data folder has them, 6,000
images of MNIST and Fashion-MNIST as 196 (means of 2 x 2 pixels). 40 clients with two classes each (one for breast
cancer, which has two), or dealt out at random; half of them are new. Closed form against FedAvg with a small network
and with a linear model, refitted, each with label shift. Everything else is upfl's default for own data. Validation:
training clients', cross-fitted. Processor seconds are of training and scoring in this process; runs that are there
already have none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits

import upfl
from upfl.data import Source
from upfl.errors import UpflError
from upfl.methods import row_name

SAMPLES = 6000
ROWS: dict[str, tuple[str, str | None, int | None, str]] = {  # training, model, rounds, what it is scored under
    "closed form": ("closed-form", None, None, "label-shift"),
    "FedAvg, small network, 20 rounds": ("fedavg", "mlp", 20, "refit+label-shift"),
    "FedAvg, linear, 1 round": ("fedavg", "linear", 1, "refit+label-shift"),
}


def sources() -> Iterator[tuple[Source, int]]:
    """Each with how many classes a client holds."""
    digits, cancer = load_digits(), load_breast_cancer()
    yield Source.from_arrays(digits.data.astype(np.float32), digits.target, name="vectors-digits"), 2
    yield Source.from_arrays(cancer.data.astype(np.float32), cancer.target, name="vectors-cancer"), 1
    for name in ("mnist", "fashion_mnist"):
        try:
            whole = upfl.data.load(name)
        except UpflError as missing:
            print(f"{name} is left out: {missing}")
            continue
        chosen = np.random.default_rng(0).permutation(len(whole.labels))[:SAMPLES]
        images = whole.x[np.sort(chosen)].reshape(SAMPLES, 14, 2, 14, 2).astype(np.float32).mean((2, 4))
        labels = whole.labels[np.sort(chosen)]
        yield Source.from_arrays(images.reshape(SAMPLES, -1), labels, name=f"vectors-{name.replace('_', '-')}"), 2


def measured(source: Source, kind: tuple[str, ...], partition: int, row: str, path: Path) -> tuple[float, ...]:
    """New clients without and with label shift, validation without and with; processor seconds."""
    method, model, rounds, shifted = ROWS[row]
    plain = "none" if method == "closed-form" else "refit"
    given = ("partition.clients=40", f"partition_seed={partition}", *kind)
    options: dict[str, Any] = {"model": model, "rounds": rounds, "evaluate_every": rounds}
    config = upfl.configure(method, source, settings=given, score=[plain, shifted], **options)
    there, started = path.exists(), time.process_time()
    run = upfl.resume(path, workers=1) if there else upfl.train(config, path, source=source, workers=1)
    seconds = np.nan if there else time.process_time() - started
    scored = {entry["row"]: entry for entry in run.result["rows"]}
    rows = [scored[row_name(method, name)] for name in (plain, shifted)]
    return *(one[what] for what in ("test", "validation") for one in rows), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path, default=Path("runs/vectors"))
    parser.add_argument("--partitions", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    print("| data | clients | row | plain | label shift (each partition) | validation | with | processor seconds |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for source, classes in sources():
        few = ("partition.kind=pathological", f"partition.labels_per_client={classes}")
        for words, kind in (("few classes", few), ("i.i.d.", ("partition.kind=iid",))):
            for row in ROWS:
                name = f"{source.name}-{words}-{row}".replace(" ", "-").replace(",", "")
                paths = [(p, given.runs / f"{name}-p{p}") for p in given.partitions]
                found = np.array([measured(source, kind, partition, row, path) for partition, path in paths])
                means, each = found.mean(0), " ".join(f"{one:.1f}" for one in found[:, 1])
                figures = f"{means[0]:.1f} | {means[1]:.1f} ({each}) | {means[2]:.1f} | {means[3]:.1f}"
                cells = f"{figures} | {np.nanmean(found[:, 4]):.1f}"
                print(f"| {source.name.removeprefix('vectors-')} | {words} | {row} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
