"""`upfl demo`."""

from __future__ import annotations

from pathlib import Path

from tests.plugin_methods import upfl


def test_demo_prints_its_table_draws_its_picture_and_does_nothing_twice(tmp_path: Path) -> None:
    said = upfl("demo", "--rounds", "1", "--workers", "1", "--out", tmp_path)
    assert said.code == 0
    assert all(title in said.out for title in ("FedAvg", "TENT", "FedTTA", "FedTTA-Prox", "FedTTA++"))
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json*")}
    assert upfl("demo", "--rounds", "1", "--workers", "1", "--out", tmp_path).code == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json*")} == before
    other = upfl("demo", "--rounds", "2", "--workers", "1", "--out", tmp_path)
    assert other.code == 4
    assert "--out" in other.err
