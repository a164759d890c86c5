"""The documents' code runs, as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readme_python_code_runs(tmp_path: Path) -> None:
    script = "\n".join(code_blocks("README.md"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints what was decided"


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
    for name, block in zip(("my_method", "my_fast_method"), blocks, strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    script = (
        "import my_method, my_fast_method, upfl\n"
        "for name, workers in (('smooth-fedavg', 2), ('fast-smooth-fedavg', 1)):\n"
        "    config = upfl.configure(name, 'digits', profile='smoke', settings=['smoothing=0.2'])\n"
        "    print(upfl.train(config, name, workers=workers).metrics[-1]['loss'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss, fast = map(float, done.stdout.split())
    assert fast == pytest.approx(loss, rel=1e-4)


def test_the_tutorial_on_a_model_of_ones_own_runs_from_its_code_to_a_newcomers_predictions(tmp_path: Path) -> None:
    """Code and commands of the page in their order, in one process; commands as they are written."""
    text = (ROOT / "docs" / "own-model.md").read_text()
    (kind, module), *blocks = re.findall(r"```(python|)\n(.*?)```", text, re.DOTALL)
    assert kind == "python"
    (tmp_path / "my_models.py").write_text(module)
    script = "from tests.plugin_methods import upfl as command\n"
    for kind, block in blocks:
        for line in [block] if kind else block.splitlines():
            said = f"said = command(*{shlex.split(line)[1:]})\nassert said.code == 0, said.err\nprint(said.out)\n"
            script += line if kind else said
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in ("not for ODPFL-HN", "no: a hypernetwork", "refit-label-shift", "fedtta\n"):
        assert words in done.stdout


def test_the_readme_is_of_one_or_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
