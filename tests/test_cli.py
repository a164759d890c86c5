"""The command line: what people type and read, what scripts take from it, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from tests.plugin_methods import (
    FAULTS,
    PLUGIN,
    ROOT,
    Said,
    arguments,
    assert_same,
    entered,
    lines,
    result,
    small,
    upfl,
)
from upfl import api
from upfl.cli import app
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, personalizer_class


@pytest.fixture(scope="module", autouse=True)
def methods() -> Iterator[None]:
    with entered():
        yield


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is wide enough for tables and paths."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("UPFL_PLUGINS", PLUGIN)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("good") / "good-run"
    api.train(small("fedavg", score=["tent"]), path, workers=1)
    return path


def train(out: Path, *more: str, method: str = "fedavg") -> Said:
    return upfl(*arguments(method), "--workers", "1", "--out", out, *more)


def refused(said: Said, out: Path, *words: str) -> None:
    """A wrong command: exit code 2, a message that has these words, nothing on standard output, no run folder."""
    assert said.code == 2, said.err
    assert [word for word in words if word not in said.err] == [], said.err
    assert said.out == ""
    assert not out.exists(), "a run folder is left, which blocks the next try"


# Help


def commands(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(command, click.Group):
        return [found for name, inner in command.commands.items() for found in commands(inner, *path, name)]
    return [(path, command)]


COMMANDS = commands(typer.main.get_command(app))


def test_the_commands_of_the_specification_are_there() -> None:
    assert {path[0] for path, _ in COMMANDS} >= {"demo", "train", "resume", "show", "methods", "data"}


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    said = upfl(*path, "--help")
    assert said.code == 0
    assert "Example" in said.out
    assert f"upfl {' '.join(path)}" in said.out.split("Example", 1)[1]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_the_examples_in_help_are_valid_commands(path: tuple[str, ...], command: Any) -> None:
    examples = re.findall(rf"upfl {' '.join(path)}\b[^;\n]*", command.callback.__doc__.split("Example", 1)[1])
    assert examples
    for example in examples:
        command.make_context("upfl", shlex.split(example)[1 + len(path) :])  # raises for what does not parse


@pytest.mark.parametrize("path", [(), ("data",)])
def test_groups_of_commands_have_help(path: tuple[str, ...]) -> None:
    said = upfl(*path, "--help")
    assert said.code == 0
    assert all(
        inner in said.out for full, _ in COMMANDS for inner in full[len(path) :][:1] if full[: len(path)] == path
    )


def test_version_is_printed() -> None:
    said = upfl("--version")
    assert said.code == 0
    assert re.fullmatch(r"upfl \d+\.\d+\.\d+\S*\n", said.out)


# Names that do not exist


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


def test_an_unknown_command_is_refused_with_exit_code_2() -> None:
    said = upfl("trian")
    assert said.code == 2
    assert "train" in said.err


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_PLUGINS", "no_such_module")
    said = upfl("methods")
    assert said.code == 2
    assert "no_such_module" in said.err


# Values that do not fit


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


# Training


def test_json_of_train_is_all_of_standard_output_and_has_the_fields_of_the_specification(tmp_path: Path) -> None:
    said = train(tmp_path / "run", "--score", "tent", "--seed", "5", "--json")
    assert said.code == 0
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


def test_the_command_line_and_python_give_the_same_run(good: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--score", "tent").code == 0
    assert_same(tmp_path / "run", good)


def test_settings_reach_the_run(tmp_path: Path) -> None:
    settings = ("lr=0.02", "tent.lr=0.003", "partition.validation=0.3", "model.hidden=9", "training.decay=0.5")
    options = [part for setting in settings for part in ("--set", setting)]
    assert train(tmp_path / "run", "--score", "tent", *options).code == 0
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["training"]["lr"], config["training"]["decay"]) == (0.02, 0.5)
    assert config["personalize"]["tent"]["lr"] == 0.003
    assert (config["partition"]["validation"], config["model"]["hidden"]) == (0.3, 9)


def test_a_setting_changes_the_result(tmp_path: Path, good: Path) -> None:
    assert train(tmp_path / "run", "--score", "tent", "--set", "lr=0.9").code == 0
    assert lines(tmp_path / "run")[-1]["loss"] != lines(good)[-1]["loss"]


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
    said = upfl("train", "fedavg", "digits", "--config", config, "--rounds", "1", "--out", out, "--workers", "1")
    assert said.code == 0
    assert [line["loss"] for line in lines(out)] == [lines(good)[0]["loss"]]


def test_a_configuration_of_another_method_is_refused(tmp_path: Path, good: Path) -> None:
    out, config = tmp_path / "run", good / "config.toml"
    refused(upfl("train", "fedtta", "digits", "--config", config, "--out", out), out, str(config), "fedavg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\x00", ()),
        ("rounds =", ()),
        ("rounds = 'many'", ("rounds",)),
        ("roundz = 3", ("'roundz'", "rounds")),
        ("training = 3", ("training",)),
        ("training = {lrr = 3}", ("lrr", "lr")),
        ("personalize = 3", ("personalize",)),
        ("personalize = 'none'", ("personalize",)),
        ("personalize = {nane = {}}", ("nane", "none")),
        ("personalize = {none = 3}", ("personalize",)),
        ("partition = 3", ("partition",)),
        ("partition = {client = 3}", ("client",)),
        ("model = []", ("model",)),
        ("[[training]]", ("training",)),
    ],
)
def test_a_configuration_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file, out = tmp_path / "my.toml", tmp_path / "run"
    file.write_text(text)
    said = upfl("train", "fedavg", "digits", "--config", file, "--profile", "lite", "--out", out, "--workers", "1")
    refused(said, out, *words)


def test_without_out_a_folder_below_runs_is_taken_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = upfl(*arguments("fedavg"), "--workers", "1", "--seed", "7")
    assert said.code == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert f"runs/{path.name}" in said.out
    assert all(word in path.name for word in ("digits", "fedavg", "7"))
    again = upfl(*arguments("fedavg"), "--workers", "1", "--seed", "7")
    assert again.code == 4
    assert f"upfl resume runs/{path.name}" in again.err


def test_an_existing_run_is_refused_with_the_way_to_go_on(good: Path) -> None:
    before = {file: file.read_bytes() for file in good.rglob("*") if file.is_file()}
    said = train(good)
    assert said.code == 4
    assert f"upfl resume {good}" in said.err
    assert {file: file.read_bytes() for file in good.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["run[red]", "run[/red]", "with space", "ünï"])
def test_any_folder_name_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    said = train(tmp_path / name)
    assert said.code == 0
    assert f"run folder: {tmp_path / name}" in said.out
    shown = upfl("show", tmp_path / name, tmp_path / "not there[/x]")
    assert re.search(rf"^{re.escape(Path(name).name)} +\d+ rounds", shown.out, re.MULTILINE), shown.out
    assert "not there[/x]" in shown.err
    assert f"upfl resume {tmp_path / name}" in train(tmp_path / name).err


# What went wrong on the way


def test_clients_left_out_are_counted_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "loss:1:2 inf:2:3")
    said = train(tmp_path / "run", "--clients-per-round", "1.0", method="counting")
    assert said.code == 0
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
    said = train(path, *more, method="counting")
    assert said.code == 4
    assert said.out == ""
    assert "round 3: every" in said.err
    assert f"upfl resume {path}" in said.err
    monkeypatch.delenv(FAULTS)
    assert upfl("resume", path, "--workers", "1").code == 0
    api.train(small("counting"), tmp_path / "well", workers=1)
    assert_same(path, tmp_path / "well")


# Damaged run folders


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


def test_show_has_a_line_for_every_row_of_every_run(good: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "other").code == 0
    said = upfl("show", good, tmp_path / "other")
    for row in (*result(good)["rows"], *result(tmp_path / "other")["rows"]):
        assert f"{row['test']:.2f}" in said.out
    heads = re.findall(r"^(\S+) +\d+ rounds", said.out, re.MULTILINE)
    assert heads == ["good-run", "other"]


# Methods


def test_methods_as_json_are_the_table() -> None:
    said = upfl("methods", "--json")
    rows = json.loads(said.out)
    assert said.code == 0
    assert isinstance(rows, list)
    assert [row["row"] for row in rows] == [row.row for row in ROWS]
    assert all(row["training"] in TRAININGS and personalizer_class(row["personalizer"]) for row in rows)
    table = {row["row"]: (row["training"], row["personalizer"]) for row in rows}
    assert table["fedtta++"] == ("fedtta-prox", "early-stopped")
    assert table["tent"] == ("fedavg", "tent")
    assert table["fedavg"] == ("fedavg", "none")


@pytest.mark.parametrize("options", [(), ("--hyper",)])
def test_methods_name_every_row_and_personalizer(options: tuple[str, ...]) -> None:
    said = upfl("methods", *options)
    assert all(row.row in said.out for row in ROWS)
    assert all(name in said.out for name in PERSONALIZERS)
    assert ("inner_lr" in said.out) == bool(options)


def test_an_interrupt_while_pytorch_is_imported_is_quiet() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["upfl", "methods"]
from upfl.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["errors.UpflError", "data.Federation", "Federation"])
def test_the_package_has_its_modules_and_names_before_anything_is_imported(name: str) -> None:
    command = [sys.executable, "-c", f"import upfl; upfl.{name}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'upfl' has no attribute 'nothing'"):
        getattr(sys.modules["upfl"], "nothing")  # noqa: B009


# The demonstration


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
