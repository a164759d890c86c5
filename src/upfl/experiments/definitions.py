"""The paper's tables and figures, as data: which rows on which data sets, under which partition, scored on whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upfl.suggest import unknown

TABLE_1 = (
    "fedavg",
    "fedprox",
    "scaffold",
    "afl",
    "fedgma",
    "fedadg",
    "fedsr",
    "pfl-sampled",
    "pfl-ensemble",
    "odpfl-hn",
    "tent",
    "fedtta",
    "fedtta-prox",
    "fedtta++",
)


@dataclass(frozen=True)
class Sweep:
    """A row that is trained once for each value of a hyper-parameter."""

    row: str
    key: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    paper: str  # the paper's table or figure
    datasets: tuple[str, ...]
    rows: tuple[str, ...]
    partition: Mapping[str, Any] = field(default_factory=dict)
    newcomers: tuple[Mapping[str, Any], ...] = ()  # other new clients to score the same trainings on
    sweep: Sweep | None = None
    evaluate_every: Mapping[str, int] = field(default_factory=dict)  # by profile, where not the profile's own
    diary_steps: int = 0  # adaptation steps to record of one client


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "overall",
            "Overall performance",
            "Table 1",
            ("mnist", "cifar10", "femnist", "cifar100", "fashion_mnist"),
            TABLE_1,
        ),
        Experiment(
            "distribution-shift",
            "New clients' class proportions unlike the training clients'",
            "Table 2",
            ("cifar10",),
            TABLE_1,
            partition={"kind": "dirichlet", "alpha_training": 0.1, "alpha_new": 0.1},
            newcomers=tuple({"alpha_new": alpha} for alpha in (0.01, 0.03, 0.05, 0.1, 0.3, 0.5)),
        ),
        Experiment(
            "dataset-size",
            "New clients with less data",
            "the figure of data set sizes",
            ("cifar10",),
            ("tent", "odpfl-hn", "fedtta", "fedtta-prox", "fedtta++"),
            newcomers=tuple({"new_fraction": tenth / 10} for tenth in range(1, 11)),
        ),
        Experiment(
            "concept-shift",
            "New clients whose images are turned by other angles",
            "the figure of concept shift",
            ("mnist",),
            TABLE_1,
            partition={
                "kind": "iid",
                "samples": 1000,
                "clients": 50,
                "rotations_training": [0.0, 30.0, 60.0],
                "rotations_new": [15.0, 45.0],
            },
        ),
        Experiment(
            "heterogeneous",
            "Clients with models of three sizes: the weight lambda of the base models' distillation",
            "the figure of heterogeneous models",
            ("cifar10",),
            ("hetero-tent", "hetero-fedtta"),
            partition={"public": 0.1},
            sweep=Sweep("hetero-fedtta", "lambda_", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ),
        Experiment(
            "learning-curves",
            "Accuracy against rounds and gradient work",
            "the figure of learning curves",
            ("mnist", "cifar10", "femnist", "cifar100", "fashion_mnist"),
            TABLE_1,
            evaluate_every={"paper": 5, "study": 10, "lite": 2, "smoke": 1},
        ),
        Experiment(
            "adaptation-diary",
            "One client's accuracy, personalization loss and entropy against adaptation steps",
            "the figure of the mismatch",
            ("cifar10",),
            ("fedtta",),
            diary_steps=50,
        ),
    )
}
SEEDS = {"paper": (0, 1, 2), "study": (0,), "lite": (0,), "smoke": (0,)}


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]
