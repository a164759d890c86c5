"""Runs that reports are made of, trained once."""

from pathlib import Path

import pytest

from tests.plugin_methods import small
from upfl import api
from upfl.report.page import write_report


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings with two seeds each, on all clients of a small federation."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for method, score in (("fedavg", ["tent"]), ("fedtta", [])):
            config = small(method, "iterations=5", score=score, seed=seed, rounds=6, clients_per_round=8)
            api.train(config, folder / f"{method}-{seed}", workers=1)
    return folder


@pytest.fixture(scope="session")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    write_report([runs], out)
    return out
