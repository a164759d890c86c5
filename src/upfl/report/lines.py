"""Runs put in order: settings (what may be compared), lines (a row in a setting) and their seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.config import ModelConfig, paper, paper_model
from upfl.data.partition import Partition
from upfl.methods import ROWS, row_name, row_title, training_class
from upfl.report.collect import Collected, NewRow, Row, RunData
from upfl.report.paper import Figure, paper_figure
from upfl.safe.text import counted
from upfl.statistics import Interval, Scores, bootstrap, mean_over_seeds, paired, spread

FEW = 10  # new clients below which there is no interval over them
Seeds = tuple[int, int]  # partition seed, training seed
Value = Callable[[Row], float | None]


@dataclass
class Line:
    """A row in a setting, over its seeds."""

    row: str
    label: str
    hyper: dict[str, Any]
    runs: dict[Seeds, tuple[RunData, Row]] = field(default_factory=dict)

    def mean(self, value: Value) -> float | None:
        """Over the seeds that have the value."""
        return float(np.mean(values)) if (values := self._values(value)) else None

    def spread(self, value: Value) -> float | None:
        return spread(self._values(value))

    def _values(self, value: Value) -> list[float]:
        found = (value(row) for _, row in self.runs.values())
        return [one for one in found if one is not None]

    def scores(self) -> dict[Seeds, Scores]:
        return {seeds: scores_of(row) for seeds, (_, row) in self.runs.items() if row.new_clients}

    @cached_property
    def test(self) -> Interval | None:
        """New clients' accuracy, with the interval over clients; none where none of them has labels."""
        by_partition = _by_partition(self.scores())
        strata = [mean_over_seeds(list(seeds.values())) for seeds in by_partition.values()]
        return bootstrap(strata) if strata else None

    def against(self, other: Line) -> Interval | None:
        """The difference to another line on the same clients, over the seeds that both have."""
        if not (differences := self._paired(other)):
            return None
        return bootstrap(differences)

    def client_differences(self, other: Line) -> NDArray[np.float64]:
        """Each new client's difference in accuracy to another line, percent."""
        pieces = [100 * correct / samples for correct, samples in self._paired(other)]
        return np.concatenate([np.empty(0), *pieces])

    def _paired(self, other: Line) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        ours, theirs = _by_partition(self.scores()), _by_partition(other.scores())
        pairs = []
        for partition, seeds in ours.items():
            common = [seed for seed in seeds if seed in theirs.get(partition, {})]
            if common:
                pairs.append(paired([seeds[s] for s in common], [theirs[partition][s] for s in common]))
        return [pair for pair in pairs if len(pair[0])]

    def clients(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Each new client's accuracy before and after, a mean over training seeds, over all partitions."""
        before, after = [], []
        for seeds in _by_partition(self.runs).values():
            rows = [row.new_clients for _, row in seeds.values()]
            for client in sorted(set.intersection(*(set(row) for row in rows))):
                before.append(np.mean([row[client].before for row in rows]))
                after.append(np.mean([row[client].accuracy for row in rows]))
        return np.array(before), np.array(after)


@dataclass
class Setting:
    """Runs that differ in method and seeds only: the same data set, partition, model and scale."""

    key: str
    config: Any
    lines: list[Line] = field(default_factory=list)

    @property
    def dataset(self) -> str:
        return str(self.config.dataset)

    @property
    def partition(self) -> Partition:
        partition: Partition = self.config.partition
        return partition

    @property
    def runs(self) -> list[RunData]:
        return list({run.path: run for line in self.lines for run, _ in line.runs.values()}.values())

    @property
    def held_out(self) -> bool:
        """Whether training clients that never train validate."""
        return self.partition.held_out > 0

    @property
    def new_clients(self) -> int:
        """How many new clients every line was scored on, over all partitions."""
        return min(len(line.clients()[0]) for line in self.lines)

    @property
    def few(self) -> bool:
        """Whether a bootstrap over so few clients would say more than they know."""
        return 0 < self.new_clients < FEW

    @property
    def title(self) -> str:
        return DATASETS.get(self.dataset, self.dataset)

    @property
    def description(self) -> str:
        """The setting in words."""
        config = self.config
        part = "all clients" if config.clients_per_round is None else f"{config.clients_per_round} clients"
        own = all(training_class(run.config.training_name).refuses_models for run in self.runs)
        model = "a model of the method's own" if own else describe_model(config.model)
        words = [describe(self.partition), model, f"{counted(config.rounds, 'round')} of {part}"]
        if config.evaluate_clients:
            words.append(f"only the first {config.evaluate_clients} clients of each kind are scored")
        return "; ".join(words)

    @property
    def is_the_papers(self) -> bool:
        """Whether the scale is that of the paper's experiments, so that its figures may be compared with."""
        config = self.config
        scale = (config.clients_per_round, config.evaluate_clients, config.rounds, config.model)
        return scale == (None, None, paper()["rounds"].get(self.dataset), paper_model(self.dataset))

    def figure(self, row: str) -> Figure | None:
        return paper_figure(self.dataset, self.partition, row)

    def reference(self, name: str | None) -> Line | None:
        """The line of a row; without a name, the first of the plain ones that there is."""
        named = {line.row: line for line in reversed(self.lines)}
        return next((named[row] for row in ([name] if name else PLAIN) if row in named), None)


PLAIN = ("fedavg", "hetero-tent", "tent")
DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "femnist": "FEMNIST",
}


def arrange(collected: Collected) -> list[Setting]:
    """Settings with their lines, in the table's order; a run that repeats another one is named and left out."""
    settings: dict[str, Setting] = {}
    lines: dict[tuple[str, str, str], Line] = {}
    for run in collected.runs:
        config = run.config
        same = {"dataset", "partition", "model", "rounds", "clients_per_round", "evaluate_clients"}
        key = config.model_dump_json(include=same)
        setting = settings.setdefault(key, Setting(key, config))
        for row in run.result.rows:
            hyper = _hyper(run, row.row)
            identity = (key, row.row, repr(hyper))
            if identity not in lines:
                lines[identity] = Line(row.row, row_title(row.row), hyper)
                setting.lines.append(lines[identity])
            line = lines[identity]
            seeds = (config.partition_seed, config.seed)
            if seeds in line.runs:
                first = line.runs[seeds][0].path
                reason = f"its row {row.row} repeats {first} (the same setting and seeds)"
                collected.left_out.append((str(run.path), reason))
            else:
                line.runs[seeds] = (run, row)
    order = {method.row: place for place, method in enumerate(ROWS)}
    for setting in settings.values():
        setting.lines.sort(key=lambda line: (order.get(line.row, len(order)), line.row, repr(line.hyper)))
        _label(setting.lines)
    return [setting for setting in settings.values() if setting.lines]


def titles(settings: Sequence[Setting]) -> list[str]:
    """What to call each setting: its data set, with (a), (b), ... where there are several on it."""
    names = [setting.title for setting in settings]
    return [
        f"{name} ({chr(ord('a') + names[:place].count(name))})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def scores_of(row: NewRow) -> Scores:
    """Correct predictions and samples of each new client."""
    return {id: (client.accuracy * client.size / 100, client.size) for id, client in row.new_clients.items()}


def _hyper(run: RunData, row: str) -> dict[str, Any]:
    """All hyper-parameters behind a row."""
    config = run.config
    values = {key: value for key, value in config.training.items() if key != "name"}
    for name, table in config.personalize.items():
        if row_name(config.training_name, name) == row:
            values |= {f"{name}.{key}": value for key, value in table.items()}
    return values


def _label(lines: Sequence[Line]) -> None:
    """Where a row comes with several hyper-parameters, those that differ stand behind its name."""
    for line in lines:
        others = [other for other in lines if other.row == line.row]
        different = [key for key in line.hyper if any(other.hyper.get(key) != line.hyper[key] for other in others)]
        if different:
            values = ", ".join(f"{key.rpartition('.')[2].rstrip('_')} {line.hyper[key]}" for key in different)
            line.label = f"{row_title(line.row)} ({values})"


def _by_partition(values: dict[Seeds, Any]) -> dict[int, dict[int, Any]]:
    result: dict[int, dict[int, Any]] = {}
    for (partition, seed), value in sorted(values.items()):
        result.setdefault(partition, {})[seed] = value
    return result


def describe_model(model: ModelConfig) -> str:
    if model.sizes:
        return f"models of the sizes {', '.join(model.sizes)}"
    options = model.options
    if model.name == "mlp":
        return f"MLP with {options['hidden']} hidden units"
    width = f"{options['width']:g} times the channels" if options.get("width", 1) != 1 else ""
    if model.name == "convnet":
        return f"ConvNet with {options['hidden']} hidden units{', ' if width else ''}{width}"
    own = [f"{key} {value}" for key, value in options.items() if key != "width"]
    return ", ".join([model.name, *own, *([width] if width else [])])


def describe(partition: Partition) -> str:
    """A partition in words."""
    kinds = {
        "pathological": f"at most {partition.labels_per_client} classes a client",
        "superclass": "a superclass's classes a client",
        "natural": "clients as the data name them",
        "shard": "shards of the data sorted by label",
        "dirichlet": f"class proportions Dirichlet({partition.alpha_training:g}) in training, "
        f"({partition.alpha_new:g}) among new clients",
        "iid": "all classes alike",
    }
    words = [kinds[partition.kind], f"{partition.clients} clients"]
    if partition.rotations_training or partition.rotations_new:
        turned = [
            ", ".join(f"{a:g}" for a in angles) for angles in (partition.rotations_training, partition.rotations_new)
        ]
        words.append(f"turned by {turned[0] or 0} degrees in training, {turned[1] or 0} among new clients")
    if partition.samples:
        words.append(f"{partition.samples} samples")
    if partition.new_fraction < 1:
        words.append(f"new clients keep {partition.new_fraction:.0%} of their data")
    if partition.public:
        words.append(f"{partition.public:.0%} of the data public")
    if partition.held_out:
        words.append(f"{partition.held_out:.0%} of the training clients held out")
    return ", ".join(words)
