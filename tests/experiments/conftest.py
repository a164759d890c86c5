"""A small run that is scored anew."""

from pathlib import Path

import pytest

from tests.helpers.scored import small
from upfl import api


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on pathological digits: ten training clients, ten new ones, at most two classes each."""
    path = tmp_path_factory.mktemp("score") / "run"
    api.train(small(score=["tent"]), path, workers=1)
    return path
