"""A small run whose clients remember, trained once."""

from pathlib import Path

import pytest

from tests.helpers.engine import run
from tests.plugin_methods import entered, small


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, never interrupted, whose clients remember."""
    with entered():
        return run(small(checkpoint_every=2), tmp_path_factory.mktemp("counted") / "run")
