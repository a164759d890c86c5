"""Rows of the table of methods: the paper's hyper-parameters of its other baselines."""

import pytest

from upfl.config import configure

pytestmark = pytest.mark.usefixtures("one_thread")


DATASETS = ("mnist", "cifar10", "femnist", "cifar100", "fashion_mnist")
PAPER: dict[str, dict[str, float | tuple[float, ...]]] = {  # copied by hand; one value, or one for each data set
    "fedprox": {"lr": (0.3, 0.1, 0.3, 0.1, 0.3), "mu": 0.001},
    "scaffold": {"lr": 0.1, "server_lr": 1.5},
    "afl": {"lr": (0.3, 0.1, 0.1, 0.1, 0.3), "mixture_lr": (0.001, 0.3, 0.5, 0.3, 0.001)},
    "fedgma": {"lr": (0.3, 0.1, 0.3, 0.1, 0.3), "server_lr": (1.0, 1.5, 1.0, 1.5, 1.5), "threshold": 0.1},
    "fedadg": {
        "lr": (0.3, 0.1, 0.3, 0.1, 0.3),
        "features": (128, 512, 512, 512, 512),
        "noise": 10,
        "adversarial_lr": 0.1,
        "alignment": 0.15,
    },
    "fedsr": {"lr": (0.3, 0.05, 0.3, 0.1, 0.3), "l2r": 0.01, "cmi": 0.0005, "momentum": 0.9},
    "pfl-sampled": {"lr": (0.1, 0.1, 0.1, 0.1, 0.3)},
    "pfl-ensemble": {"lr": (0.1, 0.1, 0.1, 0.1, 0.3)},
    # CIFAR-100's are not printed in the paper: CIFAR-10's
    "odpfl-hn": {
        "lr": (0.3, 0.05, 0.01, 0.05, 0.1),
        "encoder_lr": (0.5, 0.1, 0.1, 0.1, 0.5),
        "hypernet_lr": 0.5,
        "embedding": 32,
        "hidden": 100,
        "server_clip": 50,
    },
}


@pytest.mark.parametrize("row", PAPER)
def test_a_baselines_hyper_parameters_are_the_papers(row: str) -> None:
    for i, dataset in enumerate(DATASETS):
        config = configure(row, dataset)
        hyper = config.training_hyper().model_dump()
        expected = {name: value[i] if isinstance(value, tuple) else value for name, value in PAPER[row].items()}
        expected |= {"iterations": 20, "batch_size": 64, "clip": 10.0, "decay": 0.99, "weight_decay": 1e-4}
        assert {name: hyper[name] for name in expected} == expected, dataset
        assert hyper["aggregation"] == ("samples" if row == "odpfl-hn" else "uniform")
        assert config.participants(50) == 50
    assert configure(row, "digits").training == configure(row, "mnist").training
