"""The documents' code runs, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readme_python_code_runs(tmp_path: Path) -> None:
    script = "\n".join(code_blocks("README.md"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"^(\d+\.\d+) -> (\d+\.\d+)$", done.stdout, re.MULTILINE)[0]
    assert all(50 < float(one) <= 100 for one in (before, after))  # which is higher, rounding may decide


def test_the_contributing_personalizer_passes_the_conformance_suite(tmp_path: Path) -> None:
    block, _ = code_blocks("CONTRIBUTING.md")
    (tmp_path / "balanced.py").write_text(block)
    environment = os.environ | {"UPFL_PLUGINS": "balanced", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/conformance",
        "-k",
        "balanced and fed",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 5, "it was checked with every training that it fits"


def test_the_contributing_example_trains_with_two_workers(tmp_path: Path) -> None:
    _, block = code_blocks("CONTRIBUTING.md")
    (tmp_path / "my_method.py").write_text(block)
    script = (
        "import my_method, upfl\n"
        "config = upfl.configure('smooth-fedavg', 'digits', profile='smoke', settings=['smoothing=0.2'])\n"
        "print(upfl.train(config, 'run', workers=2).result['rows'][0]['row'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "smooth-fedavg"


def test_the_readme_table_lists_every_row() -> None:
    from upfl.methods import ROWS

    readme = (ROOT / "README.md").read_text()
    assert [row.row for row in ROWS if f"| `{row.row}` |" not in readme] == []
