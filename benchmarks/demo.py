"""The demo over many partitions, and how its rates were found: tables as Markdown.

    python -m benchmarks.demo table --partition-seeds 0-9 --out runs/demo-table
    python -m benchmarks.demo rates --partition-seeds 10-18 --out runs/demo-rates

`table` trains what `upfl demo --partition-seed P` trains, for each P, and shows every row's accuracy on new clients.
`rates` tries twelve settings of each method's rates on a third of the partitions, and the best four of them on all.
Half of the training clients stand aside as validation newcomers: they choose. New clients' labels are not looked at
(there is one such client), and the partitions are others than the table's. Finished runs in the folder are not done
again, so a command that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from upfl import api
from upfl.cli.demo import FEDERATIONS, ROUNDS, SCALE, TRAININGS, configuration, partition_seeds, together
from upfl.config import Config
from upfl.experiments.search import best_validation
from upfl.methods import row_title

ASIDE = ("partition.clients=61", "partition.new=0.02", "partition.held_out=0.5")  # 30 train, 30 choose, one is new
# Twelve each. FedTTA's first nine are a Latin square: each value of a rate meets each value of the two others once.
# Three more lie around the middle.
INNER, OUTER, ADAPT = (0.2, 0.5, 1.0), (0.3, 0.5, 0.8), (0.01, 0.03, 0.1)
GUIDED = [(INNER[i], OUTER[j], ADAPT[(i + j) % 3]) for i in range(3) for j in range(3)]
GUIDED += [(0.5, 0.5, 0.03), (0.5, 0.8, 0.03), (0.3, 0.5, 0.03)]
GUIDED_RATES = [dict(zip(("inner_lr", "outer_lr", "adapt_lr"), rates, strict=True)) for rates in GUIDED]
BEST = 4  # of them are tried on all partitions
TRIED: dict[str, list[dict[str, float]]] = {
    "fedavg": [{"lr": lr} for lr in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 0.25, 0.35, 0.45)],
    "fedtta": GUIDED_RATES,
    "fedtta-prox": GUIDED_RATES,
}


def trained(config: Config, path: Path) -> api.Run:
    """The run in a folder, brought to its end."""
    if (path / "config.toml").exists():
        return api.resume(path, workers=1)
    return api.train(config, path, workers=1)


def table(
    methods: list[str], partitions: list[int], out: Path, rounds: int = ROUNDS, federations: int = FEDERATIONS
) -> Iterator[str]:
    """Before and after of every row on every partition, their mean and spread, and the distance from FedAvg."""
    found: dict[str, list[tuple[float, float]]] = {}
    for first in partitions:
        runs = [
            trained(configuration(method, rounds, partition_seed=partition), out / f"{method}-p{partition}")
            for method in methods
            for partition in partition_seeds(first, federations)
        ]
        for row in together(run.result for run in runs):
            found.setdefault(row["row"], []).append((row["test_before"], row["test"]))
    yield "| partition seed | " + " | ".join(row_title(row) for row in found) + " |"
    yield "|---:|" + "---:|" * len(found)
    for place, partition in enumerate(partitions):
        yield f"| {partition} | " + " | ".join(_cell(*scores[place]) for scores in found.values()) + " |"
    after = {row: np.array([test for _, test in scores]) for row, scores in found.items()}
    yield "| mean | " + " | ".join(_cell(*np.mean(scores, axis=0)) for scores in found.values()) + " |"
    yield "| standard deviation | " + " | ".join(f"{tests.std(ddof=1):.1f}" for tests in after.values()) + " |"
    for word, of in (("mean", np.mean), ("least", np.min), ("greatest", np.max)):
        yield f"| from FedAvg: {word} | " + " | ".join(f"{of(v - after['fedavg']):+.1f}" for v in after.values()) + " |"
    three = [int((tests - after["fedavg"] >= 3).sum()) for tests in after.values()]
    yield "| partitions with +3.0 or more | " + " | ".join(map(str, three)) + " |"


def rates(methods: list[str], partitions: list[int], out: Path) -> Iterator[str]:
    """The validation accuracy of everything that was tried, the best first: a third of the partitions for all settings,
    then all of them for the best four."""
    for method in methods:

        def tried(rates: Mapping[str, float], partitions: list[int], method: str = method) -> list[float]:
            return [_validation(method, rates, one, out / method / _name(rates)) for one in partitions]

        first = sorted(TRIED[method], key=lambda rates: -fmean(tried(rates, partitions[: len(partitions) // 3])))
        best = {_name(rates): tried(rates, partitions) for rates in first[:BEST]}
        rest = {_name(rates): tried(rates, partitions[: len(partitions) // 3]) for rates in first[BEST:]}
        for found in (best, rest):
            for name, values in sorted(found.items(), key=lambda item: -fmean(item[1])):
                yield f"{method}: {fmean(values):.2f} ({name}: {', '.join(f'{value:.1f}' for value in values)})"


def _name(rates: Mapping[str, float]) -> str:
    return ",".join(f"{key}={rate}" for key, rate in rates.items())


def _validation(method: str, tried: Mapping[str, float], partition: int, path: Path) -> float:
    settings = (*SCALE, *ASIDE, *(f"training.{key}={rate}" for key, rate in tried.items()))
    # Clients side by side: faster here, and another rounding.
    config = configuration(method, partition_seed=partition, settings=settings, score=(), vectorize=30)
    run = trained(config, path / f"p{partition}")
    return best_validation(run.path, method)


def _cell(before: float, after: float) -> str:
    return f"{after:.1f}" if before == after else f"{before:.1f} → {after:.1f}"


def _seeds(text: str) -> list[int]:
    low, _, high = text.partition("-")
    return list(range(int(low), int(high or low) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "rates"))
    parser.add_argument("--methods", default="", help="of the trainings, with commas; all where silent")
    parser.add_argument("--partition-seeds", type=_seeds, required=True, help="FIRST-LAST")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    make, known = (table, TRAININGS) if options.what == "table" else (rates, TRIED)
    methods = options.methods.split(",") if options.methods else list(known)
    for line in make(methods, options.partition_seeds, options.out):
        print(line, flush=True)


if __name__ == "__main__":
    main()
