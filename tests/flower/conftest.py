"""Flower's app without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.flower import load
from tests.plugin_methods import entered
from upfl import data
from upfl.flower import cohort, handout, messages


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(messages, "POLL", 0.01)
    monkeypatch.setattr(cohort, "STEP", 0.01)
    monkeypatch.setattr(handout, "STEP", 0.01)
    monkeypatch.setattr(data, "load", load)  # every message would load the data anew
    with entered():
        yield
