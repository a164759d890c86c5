"""Flower's app without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.flower import CLIENTS, load
from tests.plugin_methods import entered
from upfl import data
from upfl.flower import cohort, handout, messages
from upfl.flower.keys import make_keys


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(messages, "POLL", 0.01)
    monkeypatch.setattr(cohort, "STEP", 0.01)
    monkeypatch.setattr(handout, "STEP", 0.01)
    monkeypatch.setattr(data, "load", load)  # every message would load the data anew
    with entered():
        yield


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secure") / "keys"
    make_keys(folder, ["localhost"], CLIENTS, "127.0.0.1:1")
    return folder
