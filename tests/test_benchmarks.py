"""The peer comparison compares like with like."""

import sys
from pathlib import Path

import pytest
import torch
from benchmarks import newcomers
from benchmarks.peers.__main__ import ROOT, Contender, calm, operations
from benchmarks.peers.environments import UnavailableError
from benchmarks.peers.ours import prepare
from benchmarks.peers.process import Process, Sample
from benchmarks.peers.work import Work, mapped

WORK = Work("mlp", "fedavg", clients=3, iterations=3, samples=128)


def update(module: str, folder: Path, *arguments: str) -> torch.Tensor:
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", str(folder), *arguments]
    with Process(command, folder / "log", [str(ROOT), *sys.path]) as process:
        process.wait_until_ready()
        process.round(save=folder / module)
    size = (folder / module).stat().st_size // 4
    return mapped(folder / module, (size,)).double() - mapped(folder / "start", (size,)).double()


def test_the_plain_loop_and_upfl_make_the_same_update_of_the_same_federation(tmp_path: Path) -> None:
    prepare(WORK, tmp_path)
    ours = update("ours", tmp_path, "--workers", "1")
    assert torch.linalg.vector_norm(ours) > 1e-3
    for processes in ("1", "2"):
        plain = update("plain_loop", tmp_path, processes)
        assert torch.linalg.vector_norm(ours - plain) < 1e-4 * torch.linalg.vector_norm(ours)


def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    with (
        Process(
            [sys.executable, "-m", "benchmarks.peers.plain_loop", str(tmp_path)], tmp_path / "log", sys.path
        ) as one,
        pytest.raises(UnavailableError, match=r"No such file.*work\.json"),
    ):
        one.wait_until_ready()


def test_a_stolen_core_shows_in_own_time_for_one_thread_and_in_the_others_time_for_several() -> None:
    one, several = Contender("one", "x", one_thread=True), Contender("several", "x")
    assert calm(one, Sample(1.0, own=0.96, others=1.0))
    assert not calm(one, Sample(1.0, own=0.9, others=0.0))
    assert calm(several, Sample(1.0, own=0.5, others=0.01))
    assert not calm(several, Sample(1.0, own=1.5, others=0.5))


def test_operations_of_a_round_grow_with_its_clients_and_iterations() -> None:
    one = operations(Work("mlp", "fedavg", clients=1, iterations=1), False)
    weights = 784 * 200 + 200 * 200 + 200 * 10
    assert one == 2 * 64 * (2 * 784 * 200 + 3 * (weights - 784 * 200))
    assert operations(Work("mlp", "fedavg", clients=5, iterations=4), False) == 20 * one


def test_what_newcomers_were_told_is_counted_as_it_is_said() -> None:
    told = [
        {"samples": n, "verdict": verdict, "estimates": [(0.5, 0.4, 0.6), (0.8, 0.7, 1.0)], "accuracy": [truth, 0.9]}
        for n, verdict, truth in ((40, "alike", 0.5), (20, "unlike", 0.7), (40, "alike", 0.6), (3, "too few", 0.4))
    ]
    assert newcomers.verdicts(told) == ["67%", "33%"], "of those with enough samples"
    assert newcomers.covered(told) == ["75%", "100%"]
    assert newcomers.width(told) == "30.0"
    assert newcomers.right(told, 1) == "90.0"
    assert newcomers.covered([told[0] | {"estimates": []}]) == ["", ""]
    assert len({setting.name for setting in newcomers.SETTINGS}) == len(newcomers.SETTINGS)
