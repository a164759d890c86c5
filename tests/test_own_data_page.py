"""docs/own-data.md and the tutorial on embeddings: their examples run as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.cli import done

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TUTORIAL = DOCS / "own-data.md", DOCS / "tutorials" / "embeddings.md"
NOT_CORRECTED = "newcomers are not corrected"  # what a federation is told that has too few training clients
Block = tuple[str, str]


def blocks(text: str) -> list[Block]:
    """Blocks of a page: language, text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def examples() -> dict[str, list[Block]]:
    """The page's blocks by the section that they stand in; the tutorial is one example."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    found = {section.splitlines()[0]: blocks(section) for section in sections}
    return {name: some for name, some in found.items() if some} | {
        "Tutorial": blocks(TUTORIAL.read_text(encoding="utf-8"))
    }


def test_the_page_has_its_examples() -> None:
    chain = {"data", "train", "report", "export", "personalize", "predict"}
    for name in ("A table", "Images", "Texts"):
        commands = [
            line.split()[1] for language, text in examples()[name] if not language for line in text.splitlines()
        ]
        assert chain <= set(commands), name
    assert {"Python", "Tutorial"} <= examples().keys()


@pytest.mark.parametrize("section", examples())
def test_an_example_runs_as_it_stands(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for language, text in examples()[section]:
        if language == "python":
            exec(compile(text, f"{PAGE.name}: {section}", "exec"), {})
        for line in text.splitlines() if not language else ():
            _, *words = shlex.split(line)
            quick = ["--workers", "1"] if words[0] == "train" else []
            quick += ["--set", "iterations=5"] if quick and not words[1].startswith("closed-form") else []
            said = done(*words, *quick)
            assert NOT_CORRECTED not in said.out + said.err, line
