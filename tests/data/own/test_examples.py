"""Images, a table and texts of one's own, from their files to a newcomer's predictions, on the command line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cli import done
from tests.helpers.own import notes, patients, scans
from tests.plugin_methods import FAULTS, assert_same, result, upfl

EXAMPLES: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "patients": (patients, ["--label", "diagnosis", "--client", "hospital"], "rows"),
    "scans": (scans, [], "images"),
    "notes": (notes, ["--label", "topic", "--client", "writer", "--text", "note"], "texts"),
}
LITTLE = ["--rounds", "3", "--evaluate-every", "3", "--set", "iterations=5", "--set", "batch_size=10"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "own"


@pytest.mark.parametrize("name", EXAMPLES)
def test_from_files_of_ones_own_to_predictions(name: str, tmp_path: Path, cache: Path) -> None:
    make, options, noun = EXAMPLES[name]
    path = make(tmp_path)
    assert "Nothing was kept" in done("data", "add", name, path, *options, "--dry-run").out
    assert not cache.exists() or list(cache.iterdir()) == []
    done("data", "add", name, path, *options)
    assert [one.name for one in cache.iterdir()] == [name]
    done("data", "check", name)
    done("data", "show", name)
    assert name in done("data", "list").out
    run = tmp_path / "run"
    done("train", "refit-label-shift", name, *LITTLE, "--workers", "1", "--out", run)
    assert 0 < result(run)["rows"][0]["test"] <= 100
    done("report", run, "-o", tmp_path / "page")
    done("export", run, "-o", tmp_path / "bundle")
    mine = path / "clinic-0" if path.is_dir() else path
    said = json.loads(done("personalize", tmp_path / "bundle", mine, "-o", tmp_path / "me", "--json").out)
    assert sum(said["mix"].values()) == pytest.approx(1, abs=1e-3)
    assert f"{said['samples']} {noun}" in (tmp_path / "me" / "summary.html").read_text()
    done("predict", tmp_path / "me", mine, "-o", tmp_path / "later.csv")
    with (tmp_path / "later.csv").open() as file:
        assert len(list(csv.DictReader(file))) == said["samples"]
    done("data", "remove", name)
    assert list(cache.iterdir()) == []
    assert name not in done("data", "list").out


@pytest.mark.bits
@pytest.mark.usefixtures("methods")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "notes" else pytest.mark.full) for name in EXAMPLES]
)
def test_two_workers_that_were_killed_give_the_bits_of_one(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, _ = EXAMPLES[name]
    done("data", "add", name, make(tmp_path), *options)
    train = ["train", "counting", name, *LITTLE]
    done(*train, "--workers", "1", "--out", tmp_path / "one")
    monkeypatch.setenv(FAULTS, "finish-kill:1:*:1")
    killed = upfl(*train, "--workers", "2", "--out", tmp_path / "killed")
    assert killed.code != 0
    assert "SIGKILL" in killed.err
    monkeypatch.delenv(FAULTS)
    done("resume", tmp_path / "killed", "--workers", "2")
    assert_same(tmp_path / "killed", tmp_path / "one")
