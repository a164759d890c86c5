# ruff: noqa: RUF001 - signs of equations
"""The documentation site: it builds, its links lead somewhere, its reference is complete, and its tutorials run."""

import configparser
import os
import re
import shutil
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from docs import build, generate
from docs.equations import mathml, page_of

import upfl
from tests.helpers import pages
from upfl.cli import COMMANDS
from upfl.config import Config
from upfl.data import Partition
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS

ROOT = Path(__file__).parents[1]
SHELL = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build.build(folder / "site", folder / "work")  # in no folder that another process builds in, too
    return folder / "site"


def read(page: Path) -> str:
    """A page's text, without marks."""
    return unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert build.check(site) == []


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text("<p id=here>")
    (tmp_path / "page.html").write_text(
        '<a href="nowhere.html">a</a><a href="other.html#there">b</a><a href="other.html#here">c</a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org/">d</a>'
    )
    wrong = build.check(tmp_path)
    assert len(wrong) == 3
    assert [any(word in line for line in wrong) for word in ("nowhere", "#there", "x.js")] == [True] * 3


def test_the_python_reference_has_the_public_names_and_no_others(site: Path) -> None:
    text = (site / "reference" / "python.html").read_text(encoding="utf-8")
    headed = re.findall(r'<h2 id="upfl\.(?:\w+\.)*(\w+)"', text)
    assert sorted([*headed, "__version__"]) == sorted(upfl.__all__)


def test_commands_keys_and_methods_are_all_there(site: Path) -> None:
    commands = read(site / "reference" / "command-line.html")
    assert [name for name in COMMANDS if f"Usage: upfl {name}" not in commands] == []
    keys = read(site / "reference" / "configuration.html")
    assert [name for kind in (Config, Partition) for name in kind.model_fields if name not in keys] == []
    built_in = [row for row in ROWS if TRAININGS[row.training].__module__.startswith("upfl.")]
    for row in built_in:
        page = read(site / "methods" / f"{generate.stem(row.row)}.html")
        kinds: list[Any] = [TRAININGS[row.training], *(PERSONALIZERS[part] for part in row.personalizer.split("+"))]
        assert [key for kind in kinds for key in kind.Hyper.model_fields if key not in page] == []
    assert generate.ADVICE.keys() == {row.row for row in built_in}


def test_equations_are_drawn_by_the_browser(site: Path) -> None:
    text = (site / "methods" / "fedtta.html").read_text(encoding="utf-8")
    assert text.count("<math") > 5
    assert "<mi>ψ</mi>" in text
    assert "<msub>" in text


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (
            "psi_i <- psi - lr * u",
            ("<msub><mi>ψ</mi><mrow><mi>i</mi></mrow></msub>", "<mo>←</mo>", "<mtext>lr</mtext>"),
        ),
        ("S'^-1", ("′</mo></mrow>", "<msup>", "<mo>−</mo><mn>1</mn>")),
        ("grad_psi l_per", ("<msub><mo>∇</mo><mrow><mi>ψ</mi></mrow></msub>", "<mtext>per</mtext>")),
        ("<u, J d>", (">⟨</mo>", ">⟩</mo>")),
        ("r_i,d_k", ("<mi>r</mi><mrow><mi>i</mi><mo>,</mo><msub><mi>d</mi>",)),
    ],
)
def test_plain_equations_become_mathml(plain: str, words: tuple[str, ...]) -> None:
    made = mathml(plain)
    assert [word for word in words if word not in made] == []


def test_a_docstring_keeps_its_prose_and_its_lists() -> None:
    page = page_of(
        "First: a <H(e), x> line.\n\n    a = b_i      remark\n\n    name   what it is\n    other  what that is\n"
    )
    assert "a &lt;H(e), x> line" in page
    assert "<span>remark</span>" in page
    assert "    name   what it is" in page


TUTORIALS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "```sh\n" in path.read_text(encoding="utf-8"))


def test_the_unit_of_a_node_starts_it_again_until_the_link_has_forgotten_the_one_that_crashed() -> None:
    """The link refuses it for about a minute; systemd gives up after five starts unless told otherwise."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    unit = configparser.ConfigParser(strict=False)  # Environment= stands there twice
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(re.findall(r"```ini\n(.*?)```", page, re.DOTALL)[0].replace("\\\n", ""))
    assert unit["Service"]["Restart"] == "always"
    assert int(unit["Service"]["RestartSec"]) <= 10
    assert int(unit["Unit"]["StartLimitIntervalSec"]) == 0
    assert "python -m upfl.flower.node --superlink " in unit["Service"]["ExecStart"]
    assert "it is refused with 305, too" in " ".join(page.split())


def test_there_are_tutorials() -> None:
    assert {path.stem for path in TUTORIALS} >= {"first-federation", "a-row-of-the-paper", "newcomer", "add-a-method"}


@pytest.mark.parametrize("page", [page for page in TUTORIALS if page.stem != "flower"], ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    pages.run(pages.blocks(page), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tutorial_on_flower_runs_as_it_stands(tmp_path: Path) -> None:
    """With ports that are free, in a folder that has the app; whatever goes wrong, its processes end."""
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    shutil.copytree(ROOT / "flower", tmp_path / "flower")
    text = script(ROOT / "docs" / "tutorials" / "flower.md")
    for port, free in zip(("8000", "901$I"), (str(free_port()), "$((FIRST + I))"), strict=True):
        text = text.replace(port, free)
    bounded = "trap 'kill $(cat *.pid) 2>/dev/null || true' EXIT\n"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | SHELL | {"PYTHONPATH": path, "UPFL_PLUGINS": "", "UPFL_CACHE": str(tmp_path / "cache")}
    command = ["bash", "-c", f"FIRST={free_port()}\n{bounded}{text}"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "personalized by" in ended.stdout


def script(page: Path) -> str:
    """A page's blocks as one program of the shell: Python that begins with a file's name becomes that file."""
    parts = ["set -e"]
    for kind, code in pages.blocks(page):
        named = re.match(r"# (\w+\.py)\n", code)
        program = f"cat > {named[1]}" if named else "python -"
        parts.append(f"{program} <<'END-OF-BLOCK'\n{code}END-OF-BLOCK" if kind == "python" else code)
    return "\n".join(parts)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
