"""The documents' code runs, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import pages

ROOT = Path(__file__).parent.parent


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readme_python_code_runs(tmp_path: Path) -> None:
    said = pages.run(pages.blocks(ROOT / "README.md", "python"), tmp_path)
    assert said.strip(), "it prints what was decided"


def test_the_tutorials_personalizer_passes_the_conformance_suite(tmp_path: Path) -> None:
    block, *_ = code_blocks("docs/tutorials/add-a-method.md")
    (tmp_path / "balanced.py").write_text(block)
    environment = os.environ | {"UPFL_PLUGINS": "balanced", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    chosen = "balanced and (fedavg or scaffold or hetero-fedtta)"  # alike, with a memory, with models of several sizes
    command = [sys.executable, "-m", "pytest", "-q", "tests/conformance", "-k", chosen, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 3


def test_the_tutorials_training_as_a_loss_agrees_with_its_trace(tmp_path: Path) -> None:
    _, *blocks = code_blocks("docs/tutorials/add-a-method.md")
    script = (
        "import my_method, my_fast_method, upfl\n"
        "for name in ('smooth-fedavg', 'fast-smooth-fedavg'):\n"
        "    config = upfl.configure(name, 'digits', profile='smoke', settings=['smoothing=0.2'])\n"
        "    print(upfl.train(config, name).metrics[-1]['loss'])\n"
    )
    loss, fast = map(float, pages.run([*(("python", block) for block in blocks), ("python", script)], tmp_path).split())
    assert fast == pytest.approx(loss, rel=1e-4)


def test_the_tutorial_on_a_model_of_ones_own_runs_from_its_code_to_a_newcomers_predictions(tmp_path: Path) -> None:
    """Its blocks share their names, as those of a notebook."""
    said = pages.run(pages.blocks(ROOT / "docs" / "own-model.md", "python|"), tmp_path, shared={})
    for words in ("not for ODPFL-HN", "no: a hypernetwork", "refit-label-shift", "fedtta\n"):
        assert words in said


def test_the_readme_is_of_one_or_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
