"""Help: every command has it, with an example that is a valid command."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest
import typer

from tests.plugin_methods import upfl
from upfl.cli import app

pytestmark = pytest.mark.usefixtures("methods")


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
