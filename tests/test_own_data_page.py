"""docs/own-data.md: its examples run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.plugin_methods import upfl

PAGE = Path(__file__).parents[1] / "docs" / "own-data.md"


def examples() -> dict[str, list[tuple[str, str]]]:
    """The page's blocks (language, text), by the section that they stand in."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.splitlines()[0]] = blocks
    return found


def test_the_page_has_its_examples() -> None:
    assert {"A table", "Images", "Texts", "Python"} <= examples().keys()


@pytest.mark.parametrize("section", examples())
def test_an_example_runs_as_it_stands(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for language, text in examples()[section]:
        if language == "python":
            exec(compile(text, f"{PAGE.name}: {section}", "exec"), {})
            continue
        for line in text.splitlines():
            _, *words = shlex.split(line)
            quick = ["--workers", "1", "--set", "iterations=5"] if words[0] == "train" else []
            said = upfl(*words, *quick)
            assert said.code == 0, f"{line}: {said.err}"
