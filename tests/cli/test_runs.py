"""Training, resuming and showing on the command line: what people read and what scripts take from it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.cli import refused, train
from tests.plugin_methods import FAULTS, ROOT, arguments, assert_same, lines, result, upfl

pytestmark = pytest.mark.usefixtures("methods")


# Training


def test_json_of_train_is_all_of_standard_output_and_has_the_fields_of_the_specification(tmp_path: Path) -> None:
    said = train(tmp_path / "run", "--score", "tent", "--seed", "5", "--json").ended()
    (printed,) = json.loads(said.out)
    written = result(tmp_path / "run")
    assert printed == {"run": str(tmp_path / "run"), **written, "warnings": []}
    assert (written["method"], written["dataset"], written["seed"]) == ("fedavg", "digits", 5)
    assert [row["row"] for row in written["rows"]] == ["fedavg", "tent"]
    for row in written["rows"]:
        for field in ("validation", "test", "test_last", "test_best"):
            assert 0 <= row[field] <= 100
        assert row["test_best"] >= max(row["test"], row["test_last"])
        assert all(0 <= client["accuracy"] <= 100 and client["size"] >= 1 for client in row["clients"])


def test_json_of_resume_and_show_is_that_of_train(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained, resumed, shown = train(path, "--json"), upfl("resume", path, "--json"), upfl("show", path, "--json")
    assert json.loads(trained.out) == json.loads(resumed.out) == json.loads(shown.out)
    assert trained.code == resumed.code == shown.code == 0


def test_the_command_line_and_python_give_the_same_run_and_best_states_to_the_byte(good: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--score", "tent").code == 0
    assert_same(tmp_path / "run", good)
    names = sorted(file.relative_to(good) for file in good.glob("best/*.safetensors"))
    assert names
    assert [name for name in names if (tmp_path / "run" / name).read_bytes() != (good / name).read_bytes()] == []


def test_settings_reach_the_run(tmp_path: Path) -> None:
    settings = ("lr=0.02", "tent.lr=0.003", "partition.validation=0.3", "model.hidden=9", "training.decay=0.5")
    options = [part for setting in settings for part in ("--set", setting)]
    assert train(tmp_path / "run", "--score", "tent", *options).code == 0
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["training"]["lr"], config["training"]["decay"]) == (0.02, 0.5)
    assert config["personalize"]["tent"]["lr"] == 0.003
    assert (config["partition"]["validation"], config["model"]["hidden"]) == (0.3, 9)


@pytest.mark.parametrize(("asked", "expected"), [("5", 5), ("0.5", 4), ("1.0", 8), ("1", 1)])
def test_clients_per_round_takes_a_number_and_a_fraction(tmp_path: Path, asked: str, expected: int) -> None:
    assert train(tmp_path / "run", "--clients-per-round", asked, "--rounds", "2").code == 0
    assert [line["clients"] for line in lines(tmp_path / "run")] == [expected] * 2


@pytest.mark.parametrize("method", ["fedtta++", "fedtta-prox", "tent", "counting"])
def test_a_runs_own_configuration_gives_the_run_again(tmp_path: Path, method: str) -> None:
    options = ["--score", "none", "--clients-per-round", "0.4", "--seed", "3", "--set", "clip=0.7"]
    assert train(tmp_path / "first", *options, method=method).code == 0
    config = tmp_path / "first" / "config.toml"
    out = tmp_path / "second"
    assert upfl("train", method, "digits", "--config", config, "--out", out, "--workers", "1").code == 0
    assert_same(out, tmp_path / "first")


def test_options_win_over_a_configuration_file(tmp_path: Path, good: Path) -> None:
    out, config = tmp_path / "run", good / "config.toml"
    upfl("train", "fedavg", "digits", "--config", config, "--rounds", "1", "--out", out, "--workers", "1").ended()
    assert [line["loss"] for line in lines(out)] == [lines(good)[0]["loss"]]


def test_a_configuration_of_another_method_is_refused(tmp_path: Path, good: Path) -> None:
    out, config = tmp_path / "run", good / "config.toml"
    refused(upfl("train", "fedtta", "digits", "--config", config, "--out", out), out, str(config), "fedavg")


@pytest.mark.parametrize(("text", "words"), [("\x00", ()), ("training = {lrr = 3}", ("lrr", "lr"))])
def test_a_configuration_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """`tests/test_config.py` has all that can be wrong with one."""
    file, out = tmp_path / "my.toml", tmp_path / "run"
    file.write_text(text)
    refused(upfl("train", "fedavg", "digits", "--config", file, "--out", out, "--workers", "1"), out, *words)


def test_without_out_a_folder_below_runs_is_taken_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = upfl(*arguments("fedavg"), "--workers", "1", "--seed", "7").ended()
    (path,) = (tmp_path / "runs").iterdir()
    assert f"runs/{path.name}" in said.out
    assert all(word in path.name for word in ("digits", "fedavg", "7"))
    upfl(*arguments("fedavg"), "--workers", "1", "--seed", "7").ended(4, f"upfl resume runs/{path.name}")


def test_an_existing_run_is_refused_with_the_way_to_go_on(good: Path) -> None:
    before = {file: file.read_bytes() for file in good.rglob("*") if file.is_file()}
    train(good).ended(4, f"upfl resume {good}")
    assert {file: file.read_bytes() for file in good.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["run[red]", "run[/red]", "with space", "ünï"])
def test_any_folder_name_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    said = train(tmp_path / name).ended()
    assert f"run folder: {tmp_path / name}" in said.out
    shown = upfl("show", tmp_path / name, tmp_path / "not there[/x]")
    assert re.search(rf"^{re.escape(Path(name).name)}, \d+ rounds", shown.out, re.MULTILINE), shown.out
    assert "not there[/x]" in shown.err
    assert f"upfl resume {tmp_path / name}" in train(tmp_path / name).err


# What went wrong on the way


def test_clients_left_out_are_counted_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "loss:1:2 inf:2:3")
    said = train(tmp_path / "run", "--clients-per-round", "1.0", method="counting").ended()
    assert re.search(r"\b2 client.*left out", said.out), said.out
    assert re.search(r"round 2: client 2 left out.*loss", said.err), said.err
    assert re.search(r"round 3: client 3 left out.*update", said.err), said.err
    assert re.search(r"\b2 client.*left out", upfl("show", tmp_path / "run").out)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_round_without_any_good_client_ends_with_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv(FAULTS, "loss:2:*")
    path = tmp_path / "run"
    said = train(path, *more, method="counting").ended(4, "round 3: every", f"upfl resume {path}")
    assert said.out == ""


def test_more_clients_in_a_round_than_there_are_is_said(tmp_path: Path) -> None:
    said = train(tmp_path / "run", "--clients-per-round", "1000", "--rounds", "1")
    said.ended(0, "clients_per_round = 1000: there are 8")
    assert any("there are 8" in note for note in result(tmp_path / "run")["notes"])
    assert result(tmp_path / "run")["rounds"] == 1
    assert "run, 1 round" in said.out
    assert "1 rounds" not in said.out


def test_progress_shows_the_methods_own_row_and_names_it(tmp_path: Path) -> None:
    said = train(tmp_path / "run", "--score", "tent", "--evaluate-every", "1")
    told = re.findall(r"^round (\d+): .*? (\S+): validation (\S+) test (\S+)$", said.err, re.MULTILINE)
    rows = [line["rows"]["fedavg"] for line in lines(tmp_path / "run")]
    assert len(rows) > 1
    assert told == [
        (str(number), "fedavg", f"{row['validation']:.1f}", f"{row['test']:.1f}") for number, row in enumerate(rows, 1)
    ]


def test_a_run_of_a_plugin_names_the_variable_that_makes_it_known(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(re.sub(r'^(method|name) = "fedavg"', r'\1 = "of-my-own"', config.read_text(), flags=re.MULTILINE))
    upfl("resume", tmp_path / "run").ended(2, "of-my-own", "UPFL_PLUGINS")


def test_an_unfinished_run_of_a_flower_federation_is_not_sent_to_resume(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "terms.json").write_text("{}")
    for command in ("resume", "show"):
        assert "upfl resume" not in upfl(command, tmp_path / "run").ended(4, "flwr run").err


# Damaged run folders


def test_show_has_a_line_for_every_row_of_every_run(good: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "other").code == 0
    said = upfl("show", good, tmp_path / "other")
    for row in (*result(good)["rows"], *result(tmp_path / "other")["rows"]):
        assert f"{row['test']:.2f}" in said.out
    heads = re.findall(r"^(\S+), \d+ rounds", said.out, re.MULTILINE)
    assert heads == ["good-run", "other"]


# A process of its own


def test_a_script_finds_nothing_but_json_on_standard_output_and_no_colours_anywhere(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [Path(sys.executable).with_name("upfl"), *arguments("counting"), "--workers", "1", "--out", "run", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)[0]["run"] == "run"
    assert "\x1b" not in ended.stdout + ended.stderr
