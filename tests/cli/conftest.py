"""A wide terminal, and a finished run."""

from pathlib import Path

import pytest

from tests.plugin_methods import small
from upfl import api


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is wide enough for tables and paths."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("good") / "good-run"
    api.train(small("fedavg", score=["tent"]), path, workers=1)
    return path
