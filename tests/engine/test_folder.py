"""Damaged run folders are named."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.engine import run
from tests.plugin_methods import assert_same, small
from upfl import api
from upfl.config import configure
from upfl.engine.folder import RunFolder
from upfl.errors import ConfigError, RunError

pytestmark = pytest.mark.usefixtures("methods")


@pytest.fixture
def stopped(counted: Path, tmp_path: Path) -> Path:
    """The run as it was when everything but the result had been written."""
    path = tmp_path / "stopped"
    shutil.copytree(counted, path)
    (path / "result.json").unlink()
    return path


def test_a_run_that_lost_nothing_but_its_result_gets_it_back(stopped: Path, counted: Path) -> None:
    api.resume(stopped, workers=1)
    assert_same(stopped, counted)


def test_a_finished_run_trains_on_as_if_it_had_been_begun_with_so_many_rounds(tmp_path: Path) -> None:
    short, long = (run(small("counting", rounds=rounds, evaluate_every=2), tmp_path / str(rounds)) for rounds in (4, 6))
    (short / "newcomers").mkdir()
    with pytest.raises(RunError, match="4 rounds are done already"):
        api.resume(short, workers=1, rounds=3)
    assert api.resume(short, workers=1, rounds=4).result["rounds"] == 4
    api.resume(short, workers=1, rounds=6)
    assert_same(short, long)
    assert not (short / "newcomers").exists(), "scores at the old end"


def test_rounds_of_clients_that_are_asked_in_turn_are_settled(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, configure("closed-form", "digits"))
    with pytest.raises(RunError, match="in turn"):
        api.resume(path, rounds=100)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 1000, -1])
def test_a_truncated_checkpoint_is_named(stopped: Path, length: int) -> None:
    checkpoint = stopped / "checkpoint.safetensors"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:length])
    with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize("damage", ["no facts", "another model", "no memory"])
def test_a_checkpoint_that_is_not_this_runs_is_named(stopped: Path, tmp_path: Path, damage: str) -> None:
    checkpoint = stopped / "checkpoint.safetensors"
    if damage == "no facts":
        save_file(load_file(checkpoint), checkpoint)
    elif damage == "another model":
        other = run(small("counting", "model.hidden=17", checkpoint_every=2), tmp_path / "other")
        for name in (checkpoint.name, "metrics.jsonl"):
            (stopped / name).write_bytes((other / name).read_bytes())
    else:
        for file in stopped.rglob("memory/*/*"):
            file.unlink()
    more = (stopped / "config.toml").read_text().replace("rounds = 4", "rounds = 6")
    (stopped / "config.toml").write_text(more)
    with pytest.raises(RunError, match=r"\.safetensors"):
        api.resume(stopped, workers=1)


def test_missing_or_shortened_metrics_are_named(stopped: Path) -> None:
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        api.resume(stopped, workers=1)
    metrics.unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"rounds = ", b"rounds = 3", b"", b'method = "counting"\nx = 1\n']
)
def test_a_damaged_configuration_is_named(stopped: Path, content: bytes) -> None:
    (stopped / "config.toml").write_bytes(content)
    with pytest.raises((ConfigError, RunError), match=r"config\.toml"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize(
    ("old", "new"),
    [('= "digits"', '= "digitz"'), ("[personalize.none]", "[personalize.nane]"), ("counting", "countin")],
)
def test_names_in_a_configuration_that_this_version_does_not_know_are_refused(
    stopped: Path, old: str, new: str
) -> None:
    text = (stopped / "config.toml").read_text()
    assert old in text
    (stopped / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match="unknown"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize("path", ["", "nothing/there"])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path, path: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(RunError, match="not a run folder"):
        api.resume(tmp_path / path, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("content", [b"", b'{"rows": [', b"\xff\xfe", b"{}"])
def test_a_damaged_result_is_named_and_resume_writes_it_anew(stopped: Path, counted: Path, content: bytes) -> None:
    (stopped / "result.json").write_bytes(content)
    with pytest.raises(RunError, match=r"result\.json"):
        _ = api.Run(stopped).result
    api.resume(stopped, workers=1)
    assert_same(stopped, counted)


@pytest.mark.parametrize("content", [b'{"round": 1', b"\xff\xfe\n"])
def test_damaged_metrics_are_named_when_they_are_read(stopped: Path, content: bytes) -> None:
    (stopped / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        _ = api.Run(stopped).metrics


def test_a_missing_best_state_is_named(stopped: Path) -> None:
    api.resume(stopped, workers=1)
    for file in (stopped / "best").iterdir():
        file.unlink()
    with pytest.raises(RunError, match="best"):
        api.Run(stopped).published("none")


def test_a_run_that_is_under_way_cannot_be_resumed_a_second_time(stopped: Path) -> None:
    with RunFolder(stopped).lock(), pytest.raises(RunError, match="another process is at work"):
        api.resume(stopped, workers=1)
