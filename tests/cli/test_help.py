"""Help: every command has it, at once and complete, with an example that is a valid command."""

import os
import re
import shlex
import subprocess
import sys
from typing import Any, get_type_hints

import click
import pytest
import typer

from tests.plugin_methods import upfl
from upfl import models
from upfl.cli import app
from upfl.config import PROFILES
from upfl.experiments.definitions import EXPERIMENTS
from upfl.experiments.score import USUAL
from upfl.personalize.oracle import ORACLES
from upfl.track import TRACKERS

pytestmark = pytest.mark.usefixtures("methods")


def commands(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(command, click.Group):
        return [found for name, inner in command.commands.items() for found in commands(inner, *path, name)]
    return [(path, command)]


COMMANDS = commands(typer.main.get_command(app))


MODELS = [name for name in models.names() if models.entry(name).factory.__module__.startswith("upfl.")]


def test_the_commands_of_the_specification_are_there() -> None:
    assert {path[0] for path, _ in COMMANDS} >= {"demo", "train", "resume", "show", "methods", "data"}


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    said = upfl(*path, "--help").ended()
    assert "Example" in said.out
    assert f"upfl {' '.join(path)}" in said.out.split("Example", 1)[1]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_the_examples_in_help_are_valid_commands(path: tuple[str, ...], command: Any) -> None:
    examples = re.findall(rf"upfl {' '.join(path)}\b[^;\n]*", command.callback.__doc__.split("Example", 1)[1])
    assert examples
    for example in examples:
        command.make_context("upfl", shlex.split(example)[1 + len(path) :])  # raises for what does not parse


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_help_says_all_that_arguments_and_options_say(
    path: tuple[str, ...], command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = upfl(*path, "--help").out
    words = " ".join(said.split())
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "\\" not in said
    assert said.count("Arguments:") == any(isinstance(parameter, click.Argument) for parameter in command.params)
    hints = get_type_hints(command.callback, include_extras=True)
    for parameter in command.params:
        (meant,) = hints[parameter.name].__metadata__
        assert meant.help, f"{parameter.name} has no help"
        assert " ".join(meant.help.split()) in words
        if isinstance(meant.show_default, str):
            assert f"[default: ({meant.show_default})" in words


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("train", [*PROFILES, *TRACKERS, *MODELS]),
        ("search", [*PROFILES]),
        ("experiment", [*EXPERIMENTS, *PROFILES, *TRACKERS]),
        ("score", [*USUAL, *ORACLES]),
    ],
)
def test_help_lists_the_names_that_a_table_has(path: str, names: list[str]) -> None:
    said = upfl(path, "--help").out
    assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said)] == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--help", "personalize"),
        ("train --help", "--profile"),
        ("methods", "fedtta"),
        ("methods --json", "fedtta"),
        ("data list", "cifar10"),
        ("", "--profile"),  # completion
    ],
)
def test_pytorch_is_not_imported_for_what_should_be_there_at_once(arguments: str, word: str) -> None:
    program = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("PyTorch is imported")
sys.meta_path.insert(0, Refused())
sys.argv[0] = "upfl"
from upfl.__main__ import main
main()
"""
    shell = {"_UPFL_COMPLETE": "complete_bash", "COMP_WORDS": "upfl train --pro", "COMP_CWORD": "2"}
    environment = {key: value for key, value in os.environ.items() if key != "UPFL_PLUGINS"}
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        env=environment | (shell if not arguments else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert word in ended.stdout


@pytest.mark.parametrize("path", [(), ("data",)])
def test_groups_of_commands_have_help(path: tuple[str, ...]) -> None:
    said = upfl(*path, "--help").ended()
    assert all(
        inner in said.out for full, _ in COMMANDS for inner in full[len(path) :][:1] if full[: len(path)] == path
    )


def test_version_is_printed() -> None:
    said = upfl("--version").ended()
    assert re.fullmatch(r"upfl \d+\.\d+\.\d+\S*\n", said.out)
