"""Runs that bundles are made of, trained once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from upfl import api
from upfl.bundle import export
from upfl.config import configure
from upfl.methods import ROWS, TRAININGS

EXTRA = {"fedavg": ["tent", "label-shift", "auto"], "fedtta": ["one-step+label-shift"]}  # beside the table's


@pytest.fixture(autouse=True)
def _alike(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


_runs: dict[str, api.Run] = {}


@pytest.fixture
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], api.Run]:
    """A finished run of a training on digits, made once."""

    def run(name: str) -> api.Run:
        if name not in _runs:
            table = [row.personalizer for row in ROWS if row.training == name]
            kind = TRAININGS[name]
            scale: dict[str, Any] = {} if kind.in_turn else {"rounds": 2, "evaluate_every": 2}
            config = configure(
                name,
                "digits",
                profile="smoke",
                score=dict.fromkeys([*table, *EXTRA.get(name, [])]),
                settings=["iterations=4", "batch_size=16"],
                **scale,
                clients_per_round=3,
                model=None if kind.refuses_models else {"hidden": 12},
                partition={"clients": 16},
            )
            _runs[name] = api.train(config, tmp_path_factory.mktemp("runs") / name, workers=1)
        return _runs[name]

    return run


@pytest.fixture
def fedavg(run_of: Callable[[str], api.Run], tmp_path: Path) -> Path:
    export(run_of("fedavg"), tmp_path / "bundle")
    return tmp_path / "bundle"
