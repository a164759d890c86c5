"""The package before anything is imported."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import upfl

ROOT = Path(__file__).parents[1]


def test_an_interrupt_while_pytorch_is_imported_is_quiet() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["upfl", "methods", "fedavg"]
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


def test_the_wheel_has_every_file_of_the_package_and_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("upfl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (points,) = [archive.read(name).decode() for name in held if name.endswith("entry_points.txt")]
    package = ROOT / "src" / "upfl"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [path for path in files if f"upfl/{path.relative_to(package).as_posix()}" not in held] == []
    assert "upfl = upfl.__main__:main" in points


def test_the_package_is_a_command_under_python_too() -> None:
    ended = subprocess.run([sys.executable, "-m", "upfl", "--version"], capture_output=True, text=True, check=False)
    assert ended.stdout == f"upfl {upfl.__version__}\n"


def test_the_citation_has_the_version() -> None:
    assert f"version: {upfl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
