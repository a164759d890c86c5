"""What `resume` and `show` say of damaged run folders."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.plugin_methods import upfl

pytestmark = pytest.mark.usefixtures("methods")


def unfinished(good: Path, path: Path) -> Path:
    shutil.copytree(good, path)
    (path / "result.json").unlink()
    return path


@pytest.mark.parametrize(
    ("damage", "named", "code"),
    [
        ("truncated checkpoint", "checkpoint.safetensors", 4),
        ("missing metrics", "metrics.jsonl", 4),
        ("short metrics", "metrics.jsonl", 4),
        ("garbage config", "config.toml", 2),
        ("no config", "config.toml", 4),
    ],
)
def test_resume_names_what_is_damaged_and_does_not_say_that_it_can_be_resumed(
    tmp_path: Path, good: Path, damage: str, named: str, code: int
) -> None:
    path = unfinished(good, tmp_path / "run")
    if damage == "truncated checkpoint":
        (path / named).write_bytes((path / named).read_bytes()[:-100])
    elif damage == "garbage config":
        (path / named).write_bytes(os.urandom(64))
    elif damage == "short metrics":
        (path / named).write_bytes(b"")
    else:
        (path / named).unlink()
    said = upfl("resume", path, "--workers", "1")
    assert said.code == code
    assert named in said.err
    assert "can be resumed" not in said.err
    assert said.out == ""


def test_resume_of_a_run_by_an_unknown_plugin_names_the_training(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unfinished(good, tmp_path / "run")
    text = (path / "config.toml").read_text().replace('"fedavg"', '"my-method"')
    (path / "config.toml").write_text(text)
    said = upfl("resume", path, "--workers", "1")
    assert said.code == 2
    assert "my-method" in said.err


def mixture(good: Path, folder: Path) -> dict[str, Path]:
    """Folders that cannot be shown, by what is wrong with them."""
    bad = {name: folder / name for name in ("unfinished", "truncated", "binary", "foreign", "absent", "empty")}
    for name in ("truncated", "binary", "empty"):
        unfinished(good, bad[name])
    unfinished(good, bad["unfinished"])
    (bad["truncated"] / "result.json").write_bytes((good / "result.json").read_bytes()[:200])
    (bad["binary"] / "result.json").write_bytes(b"\xff\xfe\x00")
    (bad["empty"] / "result.json").write_bytes(b"{}")
    bad["foreign"].mkdir()
    (bad["foreign"] / "thesis.tex").write_text("years of work")
    return bad


@pytest.mark.parametrize("kind", ["unfinished", "truncated", "binary", "foreign", "absent", "empty"])
def test_show_shows_what_is_good_and_names_what_is_not(tmp_path: Path, good: Path, kind: str) -> None:
    bad = mixture(good, tmp_path)[kind]
    said = upfl("show", bad, good)
    assert said.code == 0
    assert "good-run" in said.out
    assert str(bad) in said.err
    as_json = upfl("show", bad, good, "--json")
    assert [run["run"] for run in json.loads(as_json.out)] == [str(good)]
    assert str(bad) in as_json.err


def test_show_of_nothing_good_is_an_error(tmp_path: Path, good: Path) -> None:
    bad = mixture(good, tmp_path)
    said = upfl("show", bad["unfinished"], bad["foreign"])
    assert said.code == 4
    assert f"upfl resume {bad['unfinished']}" in said.err
    assert str(bad["foreign"]) in said.err
