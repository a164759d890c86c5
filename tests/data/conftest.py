"""A machine without data."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.sources import FILE_SETS
from upfl.data.catalog import CATALOG


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data; gives its cache folder."""
    monkeypatch.delenv("UPFL_DATA", raising=False)
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    for name in FILE_SETS:
        monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], system_folders=()))
    return tmp_path / "cache"
