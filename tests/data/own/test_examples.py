"""Images, a table and texts of one's own, from their files to a newcomer's predictions, on the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.own import notes, patients, scans
from tests.plugin_methods import FAULTS, Said, assert_same, result, upfl

EXAMPLES: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "patients": (patients, ["--label", "diagnosis", "--client", "hospital"], "rows"),
    "scans": (scans, [], "images"),
    "notes": (notes, ["--label", "topic", "--client", "writer", "--text", "note"], "texts"),
}
LITTLE = ["--rounds", "3", "--evaluate-every", "3", "--set", "iterations=5", "--set", "batch_size=10"]


def good(*words: str | Path) -> Said:
    said = upfl(*words)
    assert said.code == 0, said.err
    return said


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "own"


@pytest.mark.parametrize("name", EXAMPLES)
def test_from_files_of_ones_own_to_predictions(name: str, tmp_path: Path, cache: Path) -> None:
    make, options, noun = EXAMPLES[name]
    path = make(tmp_path)
    assert "Nothing was kept" in good("data", "add", name, path, *options, "--dry-run").out
    assert not cache.exists() or list(cache.iterdir()) == []
    good("data", "add", name, path, *options)
    assert [one.name for one in cache.iterdir()] == [name]
    good("data", "check", name)
    good("data", "show", name)
    assert name in good("data", "list").out
    run = tmp_path / "run"
    good("train", "refit-label-shift", name, *LITTLE, "--workers", "1", "--out", run)
    assert 0 < result(run)["rows"][0]["test"] <= 100
    good("report", run, "-o", tmp_path / "page")
    good("export", run, "-o", tmp_path / "bundle")
    mine = path / "clinic-0" if path.is_dir() else path
    said = json.loads(good("personalize", tmp_path / "bundle", mine, "-o", tmp_path / "me", "--json").out)
    assert sum(said["mix"].values()) == pytest.approx(1, abs=1e-3)
    assert f"{said['samples']} {noun}" in (tmp_path / "me" / "summary.html").read_text()
    good("predict", tmp_path / "me", mine, "-o", tmp_path / "later.csv")
    with (tmp_path / "later.csv").open() as file:
        assert len(list(csv.DictReader(file))) == said["samples"]
    good("data", "remove", name)
    assert list(cache.iterdir()) == []
    assert name not in good("data", "list").out


@pytest.mark.bits
@pytest.mark.usefixtures("methods")
@pytest.mark.parametrize("name", ["patients", "notes"])
def test_own_data_give_the_same_bits_for_one_and_two_workers_and_after_a_kill(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, _ = EXAMPLES[name]
    good("data", "add", name, make(tmp_path), *options)
    train = ["train", "counting", name, *LITTLE]
    good(*train, "--workers", "1", "--out", tmp_path / "one")
    good(*train, "--workers", "2", "--out", tmp_path / "two")
    monkeypatch.setenv(FAULTS, "finish-kill:1:*:1")
    killed = upfl(*train, "--workers", "2", "--out", tmp_path / "killed")
    assert killed.code != 0
    assert "SIGKILL" in killed.err
    monkeypatch.delenv(FAULTS)
    good("resume", tmp_path / "killed", "--workers", "1")
    for other in ("two", "killed"):
        assert_same(tmp_path / other, tmp_path / "one")
