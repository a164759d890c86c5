"""Stops at any moment, followed by `resume`."""

import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.engine import run
from tests.plugin_methods import FAULTS, Child, assert_memory_counted_once, assert_same, lines, result, small
from upfl import api
from upfl.errors import RunError

pytestmark = pytest.mark.usefixtures("methods")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("method", "every"), [("counting", 2), ("fedavg", 1)])  # the next round waits, or does not
def test_a_kill_before_any_operation_on_the_run_folder_changes_nothing(
    tmp_path: Path, method: str, every: int, part: int
) -> None:
    """A process is killed at every operation on a file in turn, with the file that it writes torn.

    The run is resumed, or begun anew in the same folder if there was none yet.
    """
    config = small(method, rounds=3, clients_per_round=2, checkpoint_every=every)
    reference, path = tmp_path / "reference", tmp_path / "run"
    operations = Child(reference, config).operations()
    assert operations > 30
    for number in range(1 + part, operations + 1, 4):
        assert Child(path, config, die_at=number, torn=True).end() == -9
        begun = (path / "config.toml").exists()
        assert Child(path, None if begun else config).end() == 0, f"killed at operation {number}: cannot go on"
        assert_same(path, reference)
        shutil.rmtree(path)
    if method == "counting":
        assert_memory_counted_once(reference)


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_run_killed_at_random_moments_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, checkpoint_every: int
) -> None:
    config = small(rounds=60, evaluate_every=3, checkpoint_every=checkpoint_every)
    reference, path = run(config, tmp_path / "reference"), tmp_path / "run"
    chance = random.Random(checkpoint_every)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        child = Child(path, None if (path / "config.toml").exists() else config)
        if len(codes) < 10:
            child.process.join(chance.uniform(0.05, 0.5))
            child.kill()
        codes.append(child.end())
        assert codes[-1] in (0, -9)
    assert -9 in codes, "it was never killed"
    assert_same(path, reference)
    assert_memory_counted_once(path)


def test_memory_that_was_rewritten_before_a_kill_does_not_count_twice(tmp_path: Path) -> None:
    config = small(clients_per_round=1.0, checkpoint_every=1)
    reference, path = run(config, tmp_path / "reference"), tmp_path / "run"
    assert Child(path, config, environment={FAULTS: "begin-kill:2:7"}).end() == -9
    assert len(lines(path)) == 2
    written = {file.name for file in path.rglob("memory/*/*")}
    assert len(written) > 8, "no client has rewritten its memory yet: the test shows nothing"
    for fault in ("aggregate-kill:2", "finish-kill:3:4"):
        assert Child(path, environment={FAULTS: fault}).end() == -9
    assert Child(path).end() == 0
    assert_memory_counted_once(path)
    assert_same(path, reference)
    assert len(list(path.rglob("memory/*/*"))) == 8, "old versions of memories are left"


def test_clients_left_out_before_a_kill_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = "loss:1:2 inf:2:3"
    config = small(clients_per_round=1.0, checkpoint_every=2)
    assert Child(tmp_path / "run", config, environment={FAULTS: f"{sick} aggregate-kill:3"}).end() == -9
    assert Child(tmp_path / "run", environment={FAULTS: sick}).end() == 0
    monkeypatch.setenv(FAULTS, sick)
    assert_same(tmp_path / "run", run(config, tmp_path / "reference"))
    assert result(tmp_path / "run")["left_out"] == 2


def test_a_python_error_in_a_method_leaves_a_run_that_can_be_resumed(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, "aggregate-raise:3")
    with pytest.raises(ValueError, match="told to fail"):
        run(small(checkpoint_every=2), tmp_path / "run")
    monkeypatch.delenv(FAULTS)
    api.resume(tmp_path / "run", workers=1)
    assert_same(tmp_path / "run", counted)


def test_resuming_a_finished_run_leaves_every_byte_as_it_is(counted: Path) -> None:
    before = {file: file.read_bytes() for file in counted.rglob("*") if file.is_file()}
    api.resume(counted, workers=1)
    assert {file: file.read_bytes() for file in counted.rglob("*") if file.is_file()} == before


def test_a_used_folder_is_refused_and_left_alone(counted: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in counted.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=f"resume {counted}"):
        run(small(), counted)
    assert {file: file.read_bytes() for file in counted.rglob("*") if file.is_file()} == before
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="not empty"):
        run(small(), tmp_path)
    with pytest.raises(RunError, match="thesis"):
        run(small(), tmp_path / "thesis.tex")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
