"""Names and values that do not fit are refused, with the nearest that does."""

import re
from pathlib import Path

import pytest

from tests.helpers.cli import refused, train
from tests.plugin_methods import upfl

pytestmark = pytest.mark.usefixtures("methods")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("fedavgg digits", "fedavg"),
        ("fedavg digitz", "digits"),
        ("fedavg digits --score none,tnet", "tent"),
        ("fedavg digits --set tnet.lr=0.1", "tent"),
    ],
)
def test_an_unknown_name_gets_the_nearest_valid_one(tmp_path: Path, typed: str, nearest: str) -> None:
    """`tests/test_config.py` has all names."""
    out = tmp_path / "run"
    said = upfl("train", *typed.split(), "--rounds", "1", "--workers", "1", "--out", out)
    refused(said, out)
    assert re.search(rf"(?<![\w+-]){re.escape(nearest)}(?![\w+-])", said.err), said.err


def test_a_training_that_makes_its_own_model_takes_no_other(tmp_path: Path) -> None:
    said = upfl("train", "closed-form", "digits", "--model", "resnet8", "--out", tmp_path / "run")
    refused(said, tmp_path / "run", "closed-form: no model can be chosen for it; it makes a model of its own")


def test_an_unknown_command_is_refused_with_exit_code_2() -> None:
    upfl("trian").ended(2, "train")


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_PLUGINS", "no_such_module")
    upfl("methods").ended(2, "no_such_module")


@pytest.mark.parametrize("setting", ["lr=abc", "training=3", "no equals sign"])
def test_a_setting_that_does_not_fit_is_refused(tmp_path: Path, setting: str) -> None:
    """`tests/test_config.py` has all that can be wrong with one."""
    refused(train(tmp_path / "run", "--set", setting, "--set", "iterations=2"), tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [
        *("--rounds 0", "--seed -1", "--workers 0", "--evaluate-every 0", "--checkpoint-every 0"),
        *(f"--clients-per-round {number}" for number in ("0", "-3", "1.5", "some", "nan")),
        *("--nonsense", "--config nowhere.toml", "--config .", "--score one-step"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(tmp_path: Path, options: str) -> None:
    refused(train(tmp_path / "run", *options.split()), tmp_path / "run")


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(tmp_path: Path, device: str) -> None:
    said = train(tmp_path / "run", "--device", device)
    refused(said, tmp_path / "run", f"'{device}'")
    assert len(said.err) < 600, "a wall of text"
