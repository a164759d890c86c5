"""Commands that succeed, that train, and that are refused."""

from pathlib import Path

from tests.plugin_methods import Said, arguments, upfl


def train(out: Path, *more: str, method: str = "fedavg") -> Said:
    return upfl(*arguments(method), "--workers", "1", "--out", out, *more)


def done(*words: str | Path) -> Said:
    """What a command said that succeeded."""
    return upfl(*words).ended()


def refused(said: Said, out: Path, *words: str) -> None:
    """A wrong command: exit code 2, a message that has these words, nothing on standard output, no run folder."""
    assert said.ended(2, *words).out == ""
    assert not out.exists(), "a run folder is left, which blocks the next try"
