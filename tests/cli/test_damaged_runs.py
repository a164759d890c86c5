"""What `resume` and `show` say of damaged run folders."""

import json
import shutil
from pathlib import Path

import pytest

from tests.plugin_methods import upfl

pytestmark = pytest.mark.usefixtures("methods")


def unfinished(good: Path, path: Path) -> Path:
    shutil.copytree(good, path)
    (path / "result.json").unlink()
    return path


@pytest.mark.parametrize(
    ("named", "content", "code"),
    [
        ("checkpoint.safetensors", b"truncated", 4),
        ("metrics.jsonl", None, 4),
        ("metrics.jsonl", b"", 4),
        ("config.toml", b"\xff\x00garbage", 2),
        ("config.toml", None, 4),
    ],
)
def test_resume_names_what_is_damaged_and_does_not_say_that_it_can_be_resumed(
    tmp_path: Path, good: Path, named: str, content: bytes | None, code: int
) -> None:
    path = unfinished(good, tmp_path / "run")
    (path / named).unlink()
    if content is not None:
        (path / named).write_bytes(content)
    said = upfl("resume", path, "--workers", "1").ended(code, named)
    assert ("can be resumed" in said.err, said.out) == (False, "")


def mixture(good: Path, folder: Path) -> dict[str, Path]:
    """Folders that cannot be shown, by what is wrong with them."""
    damage = {"unfinished": None, "truncated": b'{"rows": [', "binary": b"\xff\xfe\x00", "empty": b"{}"}
    bad = {name: folder / name for name in (*damage, "foreign", "absent")}
    for name, content in damage.items():
        unfinished(good, bad[name])
        if content is not None:
            (bad[name] / "result.json").write_bytes(content)
    bad["foreign"].mkdir()
    (bad["foreign"] / "thesis.tex").write_text("years of work")
    return bad


@pytest.mark.parametrize("kind", ["unfinished", "truncated", "binary", "foreign", "absent", "empty"])
def test_show_shows_what_is_good_and_names_what_is_not(tmp_path: Path, good: Path, kind: str) -> None:
    bad = mixture(good, tmp_path)[kind]
    assert "good-run" in upfl("show", bad, good).ended(0, str(bad)).out
    as_json = upfl("show", bad, good, "--json").ended(0, str(bad))
    assert [run["run"] for run in json.loads(as_json.out)] == [str(good)]


def test_show_of_nothing_good_is_an_error(tmp_path: Path, good: Path) -> None:
    bad = mixture(good, tmp_path)
    said = upfl("show", bad["unfinished"], bad["foreign"])
    said.ended(4, f"upfl resume {bad['unfinished']}", str(bad["foreign"]))
