"""Runs in one process: what a run folder says, what is left out, and stops at any moment followed by `resume`."""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.observers import Interrupting
from tests.plugin_methods import (
    FAULTS,
    ROOT,
    Child,
    assert_memory_counted_once,
    assert_same,
    entered,
    lines,
    result,
    server,
    small,
    tensors,
    timeless,
)
from upfl import accuracy, api, data
from upfl.config import Config
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import one_thread
from upfl.errors import ConfigError, DataError, RunError, UpflError


@pytest.fixture(scope="module", autouse=True)
def methods() -> Iterator[None]:
    with entered():
        yield


def run(config: Config, path: Path) -> Path:
    api.train(config, path, workers=1)
    return path


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, never interrupted, whose clients remember."""
    return run(small(checkpoint_every=2), tmp_path_factory.mktemp("counted") / "run")


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several evaluations under two personalizers."""
    config = small("fedtta-prox", "iterations=5", rounds=7, score=["early-stopped"])
    return run(config, tmp_path_factory.mktemp("rows") / "run")


# What a run folder says


def test_metrics_have_one_object_a_round(two_rows: Path) -> None:
    assert [line["round"] for line in lines(two_rows)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(line["clients"] == 3 and line["left_out"] == [] for line in lines(two_rows))
    assert all(np.isfinite(line["loss"]) for line in lines(two_rows))


def test_every_kth_round_and_the_last_are_evaluated(two_rows: Path) -> None:
    assert [line["round"] for line in lines(two_rows) if "rows" in line] == [2, 4, 6, 7]


def test_result_names_the_run(two_rows: Path) -> None:
    found = result(two_rows)
    assert {key: found[key] for key in ("method", "dataset", "seed")} == {
        "method": "fedtta-prox",
        "dataset": "digits",
        "seed": 0,
    }
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


def test_another_seed_gives_another_run_and_the_same_seed_the_same(tmp_path: Path) -> None:
    first, again, other, dealt = (
        run(small(seed=seed, partition_seed=partition_seed), tmp_path / str(number))
        for number, (seed, partition_seed) in enumerate([(1, 0), (1, 0), (2, 0), (1, 1)])
    )
    assert_same(again, first)
    assert timeless(lines(other)) != timeless(lines(first)) != timeless(lines(dealt))


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
    assert all("finite" in client["reason"] for line in lines(path) for client in line["left_out"])
    assert result(path)["left_out"] == 3
    state = server(path)
    assert state["took"][:8].tolist() == [4, 4, 3, 4, 4, 2, 4, 4]
    assert_memory_counted_once(path)
    assert all(value.isfinite().all() for value in state.values())
    assert all(np.isfinite(line["loss"]) for line in lines(path))


def test_whatever_a_client_that_is_left_out_sent_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for sickness in ("loss", "inf", "huge"):
        monkeypatch.setenv(FAULTS, f"{sickness}:1:5 {sickness}:2:0")
        path = run(small(clients_per_round=1.0), tmp_path / sickness)
        states.append(tensors(path / "checkpoint.safetensors"))
    assert states[0] == states[1] == states[2]
    monkeypatch.delenv(FAULTS)
    well = tensors(run(small(clients_per_round=1.0), tmp_path / "well") / "checkpoint.safetensors")
    assert well != states[0]


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
    with pytest.raises(RunError, match=f"round {bad_round + 1}: every .*client"):
        run(config, path)
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


@pytest.mark.parametrize(("checkpoint_every", "bad_round", "kept"), [(1, 3, 3), (2, 3, 2), (1, 0, 0), (4, 2, 0)])
def test_the_error_of_a_round_without_any_good_client_says_what_the_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int, bad_round: int, kept: int
) -> None:
    monkeypatch.setenv(FAULTS, f"loss:{bad_round}:*")
    with pytest.raises(RunError) as stopped:
        run(small(checkpoint_every=checkpoint_every), tmp_path / "run")
    claimed = [int(number) for number in re.findall(r"checkpoint holds round (\d+)", str(stopped.value))]
    assert claimed == ([kept] if kept else []), str(stopped.value)


def test_clients_without_training_samples_do_not_stop_a_run(tmp_path: Path) -> None:
    settings = ("partition.kind=dirichlet", "partition.alpha_training=0.01", "partition.clients=60")
    path = run(small("fedavg", *settings, clients_per_round=1.0, rounds=2), tmp_path / "run")
    assert len(lines(path)) == 2


# Stops


@pytest.mark.parametrize("part", range(4))
def test_a_kill_before_any_operation_on_the_run_folder_changes_nothing(tmp_path: Path, part: int) -> None:
    """A process is killed at every operation on a file in turn, with the file that it writes torn."""
    config = small(rounds=3, clients_per_round=2, checkpoint_every=2)
    reference, path = tmp_path / "reference", tmp_path / "run"
    operations = Child(reference, config).operations()
    assert operations > 40
    for number in range(1 + part, operations + 1, 4):
        assert Child(path, config, die_at=number, torn=True).end() == -9
        if (path / "config.toml").exists():
            assert Child(path).end() == 0, f"killed at operation {number}: cannot be resumed"
            assert_same(path, reference)
        if path.exists():
            shutil.rmtree(path)
    assert_memory_counted_once(reference)


def test_a_kill_before_there_is_a_run_does_not_take_the_folder(tmp_path: Path) -> None:
    config, reference = small(), tmp_path / "reference"
    operations = Child(reference, config).operations()
    for number in range(1, operations):
        path = tmp_path / str(number)
        assert Child(path, config, die_at=number, torn=True).end() == -9
        if (path / "config.toml").exists():
            break
        assert Child(path, config).end() == 0, f"killed at operation {number}: cannot start anew"
        assert_same(path, reference)
    else:
        pytest.fail("there never was a run")


@pytest.mark.parametrize("clip", [10.0, 0.05])
@pytest.mark.parametrize("method", ["fedavg", "fedtta", "fedtta-prox"])
def test_a_resumed_run_has_the_same_bits_with_and_without_clipped_gradients(
    tmp_path: Path, method: str, clip: float
) -> None:
    config = small(method, f"clip={clip}", "iterations=8", rounds=5)
    reference, path = run(config, tmp_path / "reference"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        api.train(config, path, workers=1, observer=Interrupting(3))
    assert len(lines(path)) == 3
    api.resume(path, workers=1)
    assert_same(path, reference)


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
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match="run"):
        run(small(), tmp_path / "run")
    assert (tmp_path / "run").read_text() == "a file"


# Damaged run folders


@pytest.fixture
def stopped(counted: Path, tmp_path: Path) -> Path:
    """The run as it was when everything but the result had been written."""
    path = tmp_path / "stopped"
    shutil.copytree(counted, path)
    (path / "result.json").unlink()
    return path


def test_a_run_that_lost_nothing_but_its_result_gets_it_back(stopped: Path, counted: Path) -> None:
    api.resume(stopped, workers=1)
    assert_same(stopped, counted)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 1000, -1])
def test_a_truncated_checkpoint_is_named(stopped: Path, length: int) -> None:
    checkpoint = stopped / "checkpoint.safetensors"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:length])
    with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
        api.resume(stopped, workers=1)


def rewrite(checkpoint: Path, facts: Any, drop: str = "") -> None:
    kept = {name: value for name, value in load_file(checkpoint).items() if not drop or not name.startswith(drop)}
    save_file(kept, checkpoint, {"upfl": json.dumps(facts)})


def facts_of(checkpoint: Path) -> dict[str, Any]:
    with safe_open(checkpoint, "pt") as file:
        facts = json.loads(file.metadata()["upfl"])
    assert isinstance(facts, dict)
    return facts


@pytest.mark.parametrize("version", [999, "2.0", None])
def test_a_checkpoint_of_another_format_is_named(stopped: Path, version: Any) -> None:
    checkpoint = stopped / "checkpoint.safetensors"
    rewrite(checkpoint, facts_of(checkpoint) | {"format": version})
    with pytest.raises(RunError, match=r"checkpoint\.safetensors.*format"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize(
    "damage", ["no facts", "not an object", "a field less", "no server", "another model", "memory"]
)
def test_a_checkpoint_that_is_not_this_runs_is_named(stopped: Path, tmp_path: Path, damage: str) -> None:
    checkpoint = stopped / "checkpoint.safetensors"
    facts = facts_of(checkpoint)
    if damage == "no facts":
        save_file(load_file(checkpoint), checkpoint)
    elif damage == "not an object":
        rewrite(checkpoint, [1])
    elif damage == "a field less":
        rewrite(checkpoint, {key: value for key, value in facts.items() if key != "metrics_bytes"})
    elif damage == "no server":
        rewrite(checkpoint, facts, "server.")
    elif damage == "another model":
        other = run(small("counting", "model.hidden=17", checkpoint_every=2), tmp_path / "other")
        checkpoint.write_bytes((other / "checkpoint.safetensors").read_bytes())
        (stopped / "metrics.jsonl").write_bytes((other / "metrics.jsonl").read_bytes())
    else:
        for file in stopped.rglob("memory/*/*"):
            file.unlink()
    more = (stopped / "config.toml").read_text().replace("rounds = 4", "rounds = 6")
    (stopped / "config.toml").write_text(more)
    with pytest.raises(RunError, match=r"\.safetensors"):
        api.resume(stopped, workers=1)


def test_missing_or_shortened_metrics_are_named(stopped: Path) -> None:
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        api.resume(stopped, workers=1)
    metrics.unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"rounds = ", b"rounds = 3", b"", b'method = "counting"\nx = 1\n']
)
def test_a_damaged_configuration_is_named(stopped: Path, content: bytes) -> None:
    (stopped / "config.toml").write_bytes(content)
    with pytest.raises((ConfigError, RunError), match=r"config\.toml"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize("field", ["dataset", "personalize", "training"])
def test_names_in_a_configuration_that_this_version_does_not_know_are_refused(stopped: Path, field: str) -> None:
    old, new = {
        "dataset": ('dataset = "digits"', 'dataset = "digitz"'),
        "personalize": ("[personalize.none]", "[personalize.nane]"),
        "training": ('name = "counting"', 'name = "countin"'),
    }[field]
    text = (stopped / "config.toml").read_text()
    assert old in text
    (stopped / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match="unknown"):
        api.resume(stopped, workers=1)


@pytest.mark.parametrize("path", ["", "nothing/there"])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path, path: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(RunError, match="not a run folder"):
        api.resume(tmp_path / path, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("content", [b"", b'{"rows": [', b"\xff\xfe", b"{}"])
def test_a_damaged_result_is_named_and_resume_writes_it_anew(stopped: Path, counted: Path, content: bytes) -> None:
    (stopped / "result.json").write_bytes(content)
    with pytest.raises(RunError, match=r"result\.json"):
        _ = api.Run(stopped).result
    api.resume(stopped, workers=1)
    assert_same(stopped, counted)


@pytest.mark.parametrize("content", [b'{"round": 1', b"\xff\xfe\n"])
def test_damaged_metrics_are_named_when_they_are_read(stopped: Path, content: bytes) -> None:
    (stopped / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        _ = api.Run(stopped).metrics


def test_a_missing_best_state_is_named(stopped: Path) -> None:
    api.resume(stopped, workers=1)
    for file in (stopped / "best").iterdir():
        file.unlink()
    with pytest.raises(RunError, match="best"):
        api.Run(stopped).published("none")


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


# Many clients


def test_clients_that_exist_cost_no_files_and_next_to_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    size = 80_000
    images = rng.integers(0, 256, (size, 1, 2, 2), np.uint8)
    source = data.Source("digits", images, rng.integers(0, 3, size), ("a", "b", "c"), size, None, 255.0, (0.5,), (0.3,))
    monkeypatch.setattr(data, "load", lambda name: source)
    folders = {}
    for clients in (40, 40_000):
        settings = ("partition.kind=iid", f"partition.clients={clients}", "batch_size=4", "evaluate_clients=2")
        config = small("counting", *settings, rounds=6, clients_per_round=5, evaluate_every=6)
        folders[clients] = run(config, tmp_path / str(clients))
    few, many = folders.values()
    took = int(server(many)["took"].sum())
    assert took == 6 * 5
    assert len(list(many.rglob("memory/*/*"))) <= took
    assert_memory_counted_once(few)
    small_state, large_state = ({name: value.numel() for name, value in server(path).items()} for path in (few, many))
    assert small_state == large_state
    grown = (many / "checkpoint.safetensors").stat().st_size - (few / "checkpoint.safetensors").stat().st_size
    assert grown < 64 * 40_000, "more than a few numbers for every client that exists"


# No pickle

OBJECTS = ("_object", "_object_list", "_objects")


def unsafe_uses(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None)
            for name in [*names, *([module] if module else [])]:
                if name.split(".")[0] in ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"):
                    found.append(name)
            if module and module.startswith("torch"):
                found += [name for name in names if name in ("load", "save") or name.endswith(OBJECTS)]
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr.endswith(OBJECTS) or (owner == "torch" and node.attr in ("load", "save", "package")):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def test_the_source_uses_no_pickle() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert len(files) > 20
    assert {str(file): uses for file in files if (uses := unsafe_uses(ast.parse(file.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_search_for_pickle_finds_it(code: str) -> None:
    assert unsafe_uses(ast.parse(code))


def test_a_run_unpickles_nothing(tmp_path: Path) -> None:
    assert Child(tmp_path / "one", small()).end() == 0
    assert Child(tmp_path / "other", small(), environment={FAULTS: "begin-unpickle:1:*"}).end() == 1


def test_a_run_that_is_under_way_cannot_be_resumed_a_second_time(stopped: Path) -> None:
    with RunFolder(stopped).lock(), pytest.raises(RunError, match="another process is at work"):
        api.resume(stopped, workers=1)
