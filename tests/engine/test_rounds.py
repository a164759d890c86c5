"""Runs in one process: what a run folder says, who takes part, and who is left out."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine import run
from tests.plugin_methods import (
    FAULTS,
    assert_memory_counted_once,
    assert_same,
    lines,
    result,
    server,
    small,
)
from upfl import accuracy, api, data
from upfl.engine.rounds import one_thread
from upfl.errors import DataError, RunError, UpflError

pytestmark = pytest.mark.usefixtures("methods")


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several evaluations under two personalizers."""
    config = small("fedtta-prox", "iterations=5", rounds=7, score=["early-stopped"])
    return run(config, tmp_path_factory.mktemp("rows") / "run")


# What a run folder says


def test_metrics_have_one_object_a_round_and_every_kth_and_the_last_are_evaluated(two_rows: Path) -> None:
    assert [line["round"] for line in lines(two_rows)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(line["clients"] == 3 and line["left_out"] == [] for line in lines(two_rows))
    assert all(np.isfinite(line["loss"]) for line in lines(two_rows))
    assert [line["round"] for line in lines(two_rows) if "rows" in line] == [2, 4, 6, 7]


def test_result_names_the_run(two_rows: Path) -> None:
    found = result(two_rows)
    assert (found["method"], found["dataset"], found["seed"]) == ("fedtta-prox", "digits", 0)
    assert [row["row"] for row in found["rows"]] == ["fedtta-prox", "fedtta++"]


def test_reported_accuracy_is_that_of_the_round_with_the_best_validation(two_rows: Path) -> None:
    scored = [line for line in lines(two_rows) if "rows" in line]
    for row in result(two_rows)["rows"]:
        series = [line["rows"][row["row"]] for line in scored]
        best = max(series, key=lambda entry: entry["validation"])  # the first of equals
        assert (row["validation"], row["test"]) == (best["validation"], best["test"])
        assert row["test_last"] == series[-1]["test"]
        assert row["test_best"] == max(entry["test"] for entry in series)


def test_clients_accuracies_make_up_the_reported_ones(two_rows: Path) -> None:
    for row in result(two_rows)["rows"]:
        for kind, total in (("new", row["test"]), ("training", row["validation"])):
            clients = [client for client in row["clients"] if client["kind"] == kind]
            size = sum(client["size"] for client in clients)
            correct = sum(client["accuracy"] * client["size"] / 100 for client in clients)
            assert 100 * correct / size == pytest.approx(total, rel=1e-12)


def test_published_state_scores_what_the_result_says(two_rows: Path) -> None:
    trained = api.Run(two_rows)
    for name, row in zip(("one-step", "early-stopped"), trained.result["rows"], strict=True):
        for client in row["clients"]:
            if client["kind"] == "new":
                with one_thread():
                    own = trained.personalize(trained.newcomer(client["client"]), name)
                assert accuracy(own.logits, trained.labels(client["client"])) == client["accuracy"]


def test_personalizers_scored_in_one_run_score_as_in_runs_of_their_own(two_rows: Path, tmp_path: Path) -> None:
    for method, row in (("fedtta-prox", "fedtta-prox"), ("fedtta++", "fedtta++")):
        config = small(method, "iterations=5", rounds=7)
        personalizer = "one-step" if method == "fedtta-prox" else "early-stopped"
        alone = run(
            config.model_copy(update={"personalize": {personalizer: config.personalize[personalizer]}}), tmp_path / row
        )
        together = [entry for entry in result(two_rows)["rows"] if entry["row"] == row]
        assert result(alone)["rows"] == together
        for line, both in zip(lines(alone), lines(two_rows), strict=True):
            assert line["loss"] == both["loss"]
            assert line.get("rows", {}).get(row) == both.get("rows", {}).get(row)


# Participation


@pytest.mark.parametrize(("asked", "expected"), [(3, 3), (0.5, 4), (1, 1), (1.0, 8), (0.01, 1), (99, 8), (None, 8)])
def test_as_many_clients_take_part_as_asked(tmp_path: Path, asked: float | None, expected: int) -> None:
    config = small(rounds=6, evaluate_every=9).model_copy(update={"clients_per_round": asked})
    path = run(config, tmp_path / "run")
    assert [line["clients"] for line in lines(path)] == [expected] * 6
    took = server(path)["took"]
    assert int(took.sum()) == 6 * expected
    assert int(took.max()) <= 6
    if expected == 1:
        assert int((took > 0).sum()) > 1, "always the same client"
    assert_memory_counted_once(path)


def test_every_client_has_its_turn(tmp_path: Path) -> None:
    path = run(small(rounds=40, evaluate_every=40, checkpoint_every=40), tmp_path / "run")
    assert (server(path)["took"][:8] > 0).all()
    assert_memory_counted_once(path)


# Clients that are left out


@pytest.mark.parametrize("sickness", ["loss", "inf", "nan", "huge"])
def test_a_client_without_a_finite_loss_or_update_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sickness: str
) -> None:
    monkeypatch.setenv(FAULTS, f"{sickness}:1:5 {sickness}:1:2 {sickness}:3:5")
    path = run(small(clients_per_round=1.0), tmp_path / "run")
    assert [line["clients"] for line in lines(path)] == [8, 6, 8, 7]
    assert [[client["client"] for client in line["left_out"]] for line in lines(path)] == [[], [2, 5], [], [5]]
    what = "its loss is not finite" if sickness == "loss" else "its update is not finite"
    assert all(client["reason"].startswith(what) for line in lines(path) for client in line["left_out"])
    assert result(path)["left_out"] == 3
    state = server(path)
    assert state["took"][:8].tolist() == [4, 4, 3, 4, 4, 2, 4, 4]
    assert_memory_counted_once(path)
    assert all(value.isfinite().all() for value in state.values())
    assert all(np.isfinite(line["loss"]) for line in lines(path))


def test_a_client_left_out_of_its_first_round_starts_with_a_new_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, "loss:0:3 inf:1:3")
    path = run(small(clients_per_round=1.0), tmp_path / "run")
    assert server(path)["took"][3] == 2
    assert_memory_counted_once(path)


@pytest.mark.parametrize(("checkpoint_every", "bad_round", "kept"), [(1, 3, 3), (2, 3, 2), (1, 0, 0), (4, 2, 0)])
def test_a_round_without_any_good_client_stops_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int, bad_round: int, kept: int
) -> None:
    config = small(checkpoint_every=checkpoint_every)
    reference = run(config, tmp_path / "reference")
    monkeypatch.setenv(FAULTS, f"loss:{bad_round}:*")
    path = tmp_path / "run"
    with pytest.raises(RunError, match=f"round {bad_round + 1}: every .*client") as stopped:
        run(config, path)
    assert re.findall(r"checkpoint holds round (\d+)", str(stopped.value)) == ([str(kept)] if kept else [])
    with pytest.raises(RunError, match=f"round {bad_round + 1}: every"):  # and again: nothing is lost meanwhile
        api.resume(path, workers=1)
    assert (path / "checkpoint.safetensors").exists() == bool(kept)
    if kept:
        assert int(server(path)["took"].sum()) == kept * 3
    with pytest.raises(RunError, match="resume"):
        _ = api.Run(path).result
    monkeypatch.delenv(FAULTS)
    api.resume(path, workers=1)
    assert_same(path, reference)
    assert_memory_counted_once(path)


def test_clients_without_training_samples_do_not_stop_a_run(tmp_path: Path) -> None:
    settings = ("partition.kind=dirichlet", "partition.alpha_training=0.01", "partition.clients=60")
    path = run(small("fedavg", *settings, clients_per_round=1.0, rounds=2), tmp_path / "run")
    assert len(lines(path)) == 2


# What cannot start


@pytest.mark.parametrize("update", [{"device": "nonsense"}, {"personalize": {"one-step": {}}}, {"dataset": "mnist"}])
def test_a_run_that_cannot_start_does_not_take_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: dict[str, Any]
) -> None:
    """The next try, put right, goes to the same folder."""

    def nowhere(name: str) -> data.Source:
        raise DataError("not here")

    if "dataset" in update:
        monkeypatch.setattr(data, "load", nowhere)
    with pytest.raises(UpflError):
        run(small().model_copy(update=update), tmp_path / "run")
    monkeypatch.undo()
    assert len(lines(run(small(), tmp_path / "run"))) == 4
