"""Each peer's own environment, made from its own pinned requirement file (`requirements/NAME.txt`)."""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


class UnavailableError(Exception):
    """A peer cannot be installed or run; the message says why."""


def interpreter(name: str, cache: Path) -> Path:
    """The Python of a peer's environment, which is made unless it is there as the requirement file has it now."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    folder = cache / name
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"installing {name} into {folder}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS / f"{name}.txt")])
    installed.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(last_line(done.stderr) or f"exit code {done.returncode}")


def last_line(text: str) -> str:
    """What a traceback or pip says in the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1][:300] if lines else ""
