"""Runs over several processes: the same bits as over one, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import run
from tests.plugin_methods import (
    FAULTS,
    MARK,
    PLUGIN,
    ROOT,
    Child,
    arguments,
    assert_memory_counted_once,
    assert_same,
    eventually,
    lines,
    marked,
    result,
    small,
    start_fork_server,
    upfl,
)
from upfl import api
from upfl.config import Config
from upfl.methods import ROWS

pytestmark = pytest.mark.usefixtures("methods")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A mark that every process started here carries; none may be left at the end, nor a temporary folder."""
    start_fork_server()
    value = uuid.uuid4().hex
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv(MARK, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the engine sets it: put back at the end
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield value
    gone = eventually(lambda: not marked(value))
    left = marked(value)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert gone, f"processes are left: {left}"
    assert list(temporary.glob("upfl*")) == [], "temporary files are left"


# The same bits


def test_two_workers_give_the_bits_of_one_with_memory_and_clients_left_out(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, "loss:1:2 inf:1:3 nan:2:6")
    config = small(clients_per_round=1.0, checkpoint_every=3)
    api.train(config, tmp_path / "two", workers=2)
    assert_same(tmp_path / "two", run(config, tmp_path / "one"))
    assert_memory_counted_once(tmp_path / "two")
    assert result(tmp_path / "two")["left_out"] == 3


def test_two_workers_give_the_bits_of_one_with_a_single_client_a_round(tmp_path: Path, mark: str) -> None:
    config = small("fedtta-prox", clients_per_round=1, score=["early-stopped", "none"])
    api.train(config, tmp_path / "two", workers=2)
    assert [line["clients"] for line in lines(tmp_path / "two")] == [1] * 4
    assert_same(tmp_path / "two", run(config, tmp_path / "one"))


def environment(mark: str, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, MARK: mark, "UPFL_PLUGINS": PLUGIN, "COLUMNS": "200", **more}


def torchrun(mark: str, folder: Path, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`torchrun` with two processes; a port of its own, because tests run side by side."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "upfl"]
    return subprocess.run(
        [*start, *map(str, command)],
        cwd=folder,
        env=environment(mark, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_torchrun_gives_the_bits_of_one_process(tmp_path: Path, mark: str) -> None:
    ended = torchrun(mark, tmp_path, *arguments(), "--out", "run", "--json")
    assert ended.returncode == 0, ended.stderr
    assert_same(tmp_path / "run", run(small(), tmp_path / "one"))
    assert json.loads(ended.stdout)[0]["rows"] == result(tmp_path / "run")["rows"]


def test_a_process_of_torchrun_that_dies_ends_the_run_which_one_worker_finishes(tmp_path: Path, mark: str) -> None:
    ended = torchrun(mark, tmp_path, *arguments(), "--out", "run", **{FAULTS: "finish-kill:2:*:1"})
    assert ended.returncode != 0
    assert len(lines(tmp_path / "run")) == 2
    assert eventually(lambda: not marked(mark)), "the other process goes on"
    api.resume(tmp_path / "run", workers=1)
    assert_same(tmp_path / "run", run(small(), tmp_path / "one"))
    assert_memory_counted_once(tmp_path / "run")


# A worker dies


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("import-kill:0:*:*", ("worker 1 ", "SIGKILL")),
        ("finish-kill:2:*:1", ("worker 1 ", "SIGKILL", "upfl resume")),
        pytest.param("score-kill:1:*:1", ("worker 1 ", "SIGKILL", "upfl resume"), marks=pytest.mark.full),
        ("begin-raise:2:*:1", ("worker 1 ", "told to fail at begin in round 2", "upfl resume")),
        ("loss:2:*:*", ("round 3: every", "left out", "upfl resume")),
    ],
)
def test_a_worker_that_dies_or_a_round_that_fails_ends_the_run_which_can_be_resumed(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, fault: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "run"
    monkeypatch.setenv(FAULTS, fault)
    upfl(*arguments(), "--score", "fragile", "--workers", "2", "--out", path).ended(4, *words)
    assert eventually(lambda: not marked(mark)), "a worker is left"
    monkeypatch.delenv(FAULTS)
    assert upfl("resume", path, "--workers", "1").code == 0
    assert_same(path, run(small(score=["fragile"]), tmp_path / "one"))
    assert_memory_counted_once(path)


def test_the_second_of_three_workers_is_named_when_it_dies(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, "aggregate-kill:1:*:2")
    said = upfl(*arguments(), "--workers", "3", "--out", tmp_path / "run").ended(4)
    assert re.search(r"worker 2 .*SIGKILL", said.err), said.err
    assert "worker 1 " not in said.err


def test_workers_end_when_a_method_fails_in_the_first_process(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, "begin-raise:1:*:0")
    with pytest.raises(ValueError, match="told to fail at begin in round 1"):
        api.train(small(), tmp_path / "run", workers=2)
    assert eventually(lambda: not marked(mark)), "a worker is left"
    assert "begin-raise" in os.environ[FAULTS]


# The first process dies, or is asked to stop


@dataclass
class Command:
    """`upfl` in a process of its own, at the head of a process group as a shell would start it."""

    mark: str
    process: subprocess.Popen[bytes]
    errors: Path

    @classmethod
    def start(cls, mark: str, folder: Path, *command: str | Path) -> Command:
        temporary = folder / "its-temporary"
        temporary.mkdir(exist_ok=True)
        errors = folder / "errors"
        with errors.open("wb") as err, (folder / "output").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "upfl", *map(str, command)],
                cwd=folder,
                env=environment(mark, TMPDIR=str(temporary)),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return cls(mark, process, errors)

    def workers(self) -> list[int]:
        return [process for process, command in marked(self.mark).items() if "upfl.engine.worker" in command]

    def wait_for(self, run: Path, rounds: int) -> None:
        assert eventually(lambda: rounds_done(run) >= rounds, 120), self.errors.read_text()

    def end(self) -> int:
        return self.process.wait(120)


def long_arguments() -> list[str]:
    return arguments("counting", "--rounds", "60", "--evaluate-every", "50", "--set", "iterations=10")


def long() -> Config:
    """A run that is long enough to be stopped on its way."""
    return small("counting", "iterations=10", rounds=60, evaluate_every=50)


def own(mark: str, folder: Path) -> dict[str, str]:
    """The environment of a process that may be killed: its temporary files are left in the test's folder."""
    return {MARK: mark, "TMPDIR": str(folder)}


def rounds_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(run: Path, rounds: int, child: Child) -> None:
    assert eventually(lambda: not child.process.is_alive() or rounds_done(run) >= rounds, 120)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run, not stopped."""
    return run(long(), tmp_path_factory.mktemp("long") / "run")


def assert_resumes(path: Path, reference: Path, workers: int = 1) -> None:
    assert not (path / "result.json").exists(), "it had finished before it was stopped: the test shows nothing"
    api.resume(path, workers=workers)
    assert_same(path, reference)
    assert_memory_counted_once(path)


@pytest.mark.parametrize(("kill", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_an_interrupted_run_says_how_to_go_on_and_can_be_resumed(
    tmp_path: Path, mark: str, long_run: Path, kill: Any, number: signal.Signals
) -> None:
    """Ctrl-C reaches every process of the terminal's group, SIGTERM usually the first alone."""
    path = tmp_path / "run"
    command = Command.start(mark, tmp_path, *long_arguments(), "--out", path, "--workers", "2", "--json")
    command.wait_for(path, 3)
    kill(command.process.pid, number)
    assert command.end() == 130
    said = command.errors.read_text()
    assert "Traceback" not in said
    assert f"upfl resume {path}" in said
    assert (tmp_path / "output").read_text() == ""
    assert list((tmp_path / "its-temporary").glob("upfl*")) == []
    assert_resumes(path, long_run)


def test_ctrl_c_while_workers_start_ends_them(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "run"
    command = Command.start(mark, tmp_path, *long_arguments(), "--out", path, "--workers", "2")
    assert eventually(lambda: bool(command.workers()), 120)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130
    assert "Traceback" not in command.errors.read_text()
    assert list((tmp_path / "its-temporary").glob("upfl*")) == []


@pytest.mark.parametrize(("rounds", "workers", "later"), [pytest.param(0, 2, 1, marks=pytest.mark.full), (3, 3, 1)])
def test_workers_end_with_a_first_process_that_is_killed(
    tmp_path: Path, mark: str, long_run: Path, rounds: int, workers: int, later: int
) -> None:
    """Before its first round, when workers are starting or waiting, and in the midst of rounds."""
    path = tmp_path / "run"
    first = Child(path, long(), workers=workers, environment=own(mark, tmp_path))
    assert eventually(lambda: len(marked(mark)) == workers - 1, 120)
    wait_for(path, rounds, first)
    first.kill()
    assert first.end() == -9
    assert eventually(lambda: not marked(mark)), "workers outlive the first process"
    assert_resumes(path, long_run, later)


# Who can reach it


def sockets(processes: list[int]) -> list[tuple[Any, bool]]:
    """The local addresses of the processes' TCP sockets, and whether they listen."""
    owned = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    owned.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in owned:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address: Any = ipaddress.ip_address(b"".join(words))
                found.append((getattr(address, "ipv4_mapped", None) or address, fields[3] == "0A"))
    return found


def test_workers_of_one_machine_use_the_loopback_interface_only(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "run"
    first = Child(path, long(), workers=2, environment=own(mark, tmp_path))
    assert eventually(lambda: len(marked(mark)) == 1, 120)
    pids, seen = [*marked(mark), int(first.process.pid or 0)], set()

    def look() -> bool:
        with contextlib.suppress(OSError):  # one has just ended
            seen.update(sockets(pids))
        return rounds_done(path) > 5

    assert eventually(look, 120)
    first.kill()
    assert seen, "no socket was seen: the test shows nothing"
    assert [address for address, _ in seen if not address.is_loopback] == []


def test_the_look_at_sockets_sees_one_that_listens_everywhere() -> None:
    code = "import socket, sys; s = socket.create_server(('', 0)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (ipaddress.ip_address("0.0.0.0"), True) in sockets([process.pid])
        process.communicate(b"")


# The whole matrix


@pytest.mark.full
@pytest.mark.parametrize("how", ["2", "3", "torchrun"])
@pytest.mark.parametrize("row", [row.row for row in ROWS])
def test_every_row_has_the_same_bits_over_several_processes(tmp_path: Path, mark: str, row: str, how: str) -> None:
    if how == "torchrun":
        ended = torchrun(mark, tmp_path, *arguments(row), "--out", "run")
        assert ended.returncode == 0, ended.stderr
    else:
        api.train(small(row), tmp_path / "run", workers=int(how))
    assert_same(tmp_path / "run", run(small(row), tmp_path / "one"))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_and_resumed_with_other_numbers_of_workers_ends_with_the_same_bits(
    tmp_path: Path, mark: str, long_run: Path, seed: int
) -> None:
    path, chance = tmp_path / "run", random.Random(seed)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        begun = (path / "config.toml").exists()
        workers = chance.choice([1, 2, 3])
        child = Child(path, None if begun else long(), workers=workers, environment=own(mark, tmp_path))
        if len(codes) < 6:
            wait_for(path, rounds_done(path) + chance.randrange(1, 10), child)
            child.process.join(chance.uniform(0, 0.05))
            child.kill()
        codes.append(child.end())
        assert eventually(lambda: not marked(mark)), "workers outlive the first process"
    assert codes.count(-9) >= 3
    assert_same(path, long_run)
    assert_memory_counted_once(path)
