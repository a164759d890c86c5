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
        (("fedavgg", "digits"), "fedavg"),
        (("fedta++", "digits"), "fedtta++"),
        (("FedTTA", "digits"), "fedtta"),
        (("fedavg", "digitz"), "digits"),
        (("fedavg", "cifar-10"), "cifar10"),
        (("fedavg", "digits", "--profile", "smok"), "smoke"),
        (("fedavg", "digits", "--score", "none,tnet"), "tent"),
        (("fedtta", "digits", "--score", "early_stopped"), "early-stopped"),
        (("fedavg", "digits", "--set", "lrr=0.1"), "lr"),
        (("fedtta", "digits", "--set", "iner_lr=0.1"), "inner_lr"),
        (("fedavg", "digits", "--set", "round=4"), "rounds"),
        (("fedavg", "digits", "--set", "training.lrr=0.1"), "lr"),
        (("fedavg", "digits", "--set", "model.widht=0.1"), "width"),
        (("fedavg", "digits", "--set", "partition.client=40"), "clients"),
        (("fedavg", "digits", "--set", "partition.kind=patological"), "pathological"),
        (("fedavg", "digits", "--set", "modle.width=0.1"), "model"),
        (("fedavg", "digits", "--set", "tnet.lr=0.1"), "tent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_an_unknown_name_gets_the_nearest_valid_one(tmp_path: Path, typed: tuple[str, ...], nearest: str) -> None:
    out = tmp_path / "run"
    said = upfl("train", *typed, "--rounds", "1", "--workers", "1", "--out", out)
    refused(said, out)
    assert re.search(rf"(?<![\w+-]){re.escape(nearest)}(?![\w+-])", said.err), said.err


@pytest.mark.parametrize(
    "setting", ["method=fedavgg", "method=fedtta", "dataset=digitz", "profile=smok", "training.name=fedavgg"]
)
def test_a_run_cannot_be_called_what_it_is_not(tmp_path: Path, setting: str) -> None:
    refused(train(tmp_path / "run", "--set", setting), tmp_path / "run", setting.partition("=")[2])


def test_a_training_that_makes_its_own_model_takes_no_other(tmp_path: Path) -> None:
    said = upfl("train", "closed-form", "digits", "--model", "resnet8", "--out", tmp_path / "run")
    refused(said, tmp_path / "run", "closed-form: no model can be chosen for it; it makes a model of its own")


def test_an_unknown_command_is_refused_with_exit_code_2() -> None:
    said = upfl("trian")
    assert said.code == 2
    assert "train" in said.err


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_PLUGINS", "no_such_module")
    said = upfl("methods")
    assert said.code == 2
    assert "no_such_module" in said.err


@pytest.mark.parametrize(
    "setting",
    [
        "lr=abc",
        "lr=-1",
        "lr=nan",
        "lr=[1]",
        "rounds=0",
        "rounds=2.5",
        "rounds=inf",
        "seed=-1",
        "clients_per_round=0",
        "clients_per_round=1.5",
        "clients_per_round=all",
        "training=3",
        "personalize=3",
        "personalize=[]",
        "personalize.none=3",
        "partition=3",
        "partition.clients=1",
        "partition.clients=many",
        "partition.samples.x=3",
        "model=3",
        "model.hidden=0",
        "model.width=0",
        "training.name=3",
        "device=3",
        "method=3",
        "no equals sign",
        "=3",
        "lr=",
        ".=3",
        "lr.x=3",
        "training..lr=3",
    ],
)
def test_a_setting_that_does_not_fit_is_refused(tmp_path: Path, setting: str) -> None:
    out = tmp_path / "run"
    refused(train(out, "--set", setting), out)
    first = upfl("train", "fedavg", "digits", "--set", setting, "--set", "iterations=2", "--out", out, "--workers", "1")
    refused(first, out)


@pytest.mark.parametrize(
    "options",
    [
        ("--rounds", "0"),
        ("--seed", "-1"),
        ("--workers", "0"),
        ("--evaluate-every", "0"),
        ("--checkpoint-every", "0"),
        ("--clients-per-round", "0"),
        ("--clients-per-round", "-3"),
        ("--clients-per-round", "1.5"),
        ("--clients-per-round", "some"),
        ("--clients-per-round", "nan"),
        ("--nonsense",),
        ("--config", "nowhere.toml"),
        ("--config", "."),
        ("--score", "one-step"),
    ],
    ids=" ".join,
)
def test_an_option_that_does_not_fit_is_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    refused(train(tmp_path / "run", *options), tmp_path / "run")


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(tmp_path: Path, device: str) -> None:
    said = train(tmp_path / "run", "--device", device)
    refused(said, tmp_path / "run", f"'{device}'")
    assert len(said.err) < 600, "a wall of text"
