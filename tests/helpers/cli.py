"""Commands that succeed, that train, and that are refused."""

from pathlib import Path

from tests.plugin_methods import Said, arguments, upfl


def train(out: Path, *more: str, method: str = "fedavg") -> Said:
    return upfl(*arguments(method), "--workers", "1", "--out", out, *more)


def done(*words: str | Path) -> Said:
    """What a command said that succeeded."""
    said = upfl(*words)
    assert said.code == 0, said.err
    return said


def refused(said: Said, out: Path, *words: str) -> None:
    """A wrong command: exit code 2, a message that has these words, nothing on standard output, no run folder."""
    assert said.code == 2, said.err
    assert [word for word in words if word not in said.err] == [], said.err
    assert said.out == ""
    assert not out.exists(), "a run folder is left, which blocks the next try"
