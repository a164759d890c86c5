"""Damage by a seed: a few hundred cases here, many thousands in `make test-all`."""

from pathlib import Path

import pytest

from tests.fuzz.families import FAMILIES
from tests.fuzz.run import run

CASES = {"bundles": 120, "run folders": 60, "arrays": 150, "messages": 300, "own data": 200}


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_damaged_is_taken_or_refused_and_nothing_outside_is_touched(family: str, tmp_path: Path) -> None:
    if family == "messages":
        pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    said = run(family, CASES[family], 1, tmp_path)
    refused = sum(count for what, count in said.items() if what.startswith("refused"))
    assert refused > CASES[family] // 4, f"changes that change nothing: {said}"


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_damage_at_length(family: str, tmp_path: Path) -> None:
    run(family, 5000, 0, tmp_path)
