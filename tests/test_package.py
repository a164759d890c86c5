"""The package before anything is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
