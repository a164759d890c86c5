"""A client more or a client less: sums taken away and added to the bit; nothing of whoever left in what is fitted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugin_methods import upfl
from tests.runs import Interrupter, StopError, begun, outcome
from upfl.config import Config, configure
from upfl.engine import members
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_client
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import ConfigError, RunError
from upfl.state import State

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(*settings: str, method: str = "closed-form", **options: Any) -> Config:
    small = ("filters=6", "iterations=1", "patches=4") if method == "closed-form" else ("iterations=1",)
    options = {"score": ["none", "calibrated"]} | options
    return configure(method, "digits", settings=["partition.clients=12", *small, *settings], **options)


def ran(config: Config, path: Path) -> Path:
    Engine.local(RunFolder.create(path, config)).run()
    return path


def server(path: Path) -> State:
    return outcome(RunFolder.open(path)).server


def assert_same(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(config_of(), tmp_path_factory.mktemp("members") / "run")


def test_forgetting_a_client_gives_the_bits_of_a_last_pass_without_it(run: Path, tmp_path: Path) -> None:
    members.forget(run, 2, tmp_path / "out")
    setup = assemble(RunFolder.open(run).config())
    training: Any = setup.training
    before, round = server(run), training.last_round
    sent = training.sent(before, round)
    total: FixedPointSum | None = None
    with torch.no_grad():
        for id in (0, 1, 3, 4, 5):
            up, _ = train_client(training, sent, {}, setup.client(id, round))
            total = total or FixedPointSum(up, 5)
            total.add(up)
    assert total is not None
    expected = training.aggregate(dict(before), total, round)
    assert_same(server(tmp_path / "out"), expected)
    assert not torch.equal(expected["psi.last.weight"], before["psi.last.weight"])
    assert torch.equal(expected["filters"], before["filters"]), "these still owe something to the client"


def test_forgetting_and_joining_again_changes_no_bit(run: Path, tmp_path: Path) -> None:
    members.forget(run, 2, tmp_path / "without")
    members.forget(tmp_path / "without", 4, tmp_path / "without both")
    members.join(tmp_path / "without both", 2, tmp_path / "one back")
    members.join(tmp_path / "one back", 4, tmp_path / "both back")
    assert_same(server(tmp_path / "both back"), server(run))
    ours, theirs = (RunFolder.open(path).result()["rows"] for path in (tmp_path / "both back", run))
    assert ours == theirs


def test_forgetting_one_that_joined_late_changes_no_bit(tmp_path: Path) -> None:
    begun_without = ran(config_of("partition.without=[2]"), tmp_path / "without")
    members.join(begun_without, 2, tmp_path / "with")
    members.forget(tmp_path / "with", 2, tmp_path / "without again")
    assert_same(server(tmp_path / "without again"), server(begun_without))
    assert not torch.equal(server(tmp_path / "with")["psi.last.weight"], server(begun_without)["psi.last.weight"])
    ours, theirs = (RunFolder.open(path).result()["rows"] for path in (tmp_path / "without again", begun_without))
    assert ours == theirs


def test_what_is_fitted_anew_knows_nothing_of_the_client_that_left(run: Path, tmp_path: Path) -> None:
    """Neither its train split nor its validation labels: it has none any more."""
    members.forget(run, 2, tmp_path / "out")
    folder = RunFolder.open(tmp_path / "out")
    assert folder.config().partition.without == (2,)
    federation = assemble(folder.config()).federation
    assert len(federation.training) == 6, "numbers stay, and so do the folds"
    assert len(federation.training.all(2)) == 0
    (row, _) = folder.result()["rows"]
    assert 2 not in [client["client"] for client in row["clients"] if client["kind"] == "training"]
    ours, theirs = (RunFolder.open(path).load_best(row["best_round"]).fitted for path in (folder.path, run))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] != []


def test_from_scratch_is_a_training_without_the_client(run: Path, tmp_path: Path) -> None:
    upfl("forget", run, "--client", "2", "--from-scratch", "--out", tmp_path / "out", "--workers", "1").ended()
    anew = ran(config_of("partition.without=[2]"), tmp_path / "anew")
    assert_same(server(tmp_path / "out"), server(anew))
    assert not torch.equal(server(anew)["filters"], server(run)["filters"])


def test_the_commands_say_what_stays(run: Path, tmp_path: Path) -> None:
    said = upfl("forget", run, "--client", "1", "--out", tmp_path / "without").ended()
    assert "Whitening and filters are the run's" in said.out
    assert "still holds its part" in said.out
    upfl("join", tmp_path / "without", "--client", "1", "--out", tmp_path / "with").ended()
    assert_same(server(tmp_path / "with"), server(run))


def test_what_cannot_be_recounted_is_refused_in_words(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are 6 training clients"):
        members.forget(run, 6, tmp_path / "out")
    with pytest.raises(ConfigError, match="is part of this run"):
        members.join(run, 1, tmp_path / "out")
    with pytest.raises(ConfigError, match="comes from steps"):
        members.forget(ran(config_of(method="fedavg", rounds=1), tmp_path / "fedavg"), 1, tmp_path / "out")
    with pytest.raises(StopError):
        begun(config_of(), tmp_path / "short").run(Interrupter("round", 2))
    with pytest.raises(RunError, match="has not come to its last pass"):
        members.forget(tmp_path / "short", 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="no training client is left"):
        assemble(config_of("partition.without=[0, 1, 2, 3, 4, 5]"))


def test_any_training_runs_without_some_clients(tmp_path: Path) -> None:
    path = ran(config_of("partition.without=[0, 3]", method="fedavg", rounds=2, clients_per_round=4), tmp_path / "run")
    lines = RunFolder.open(path).metrics()
    assert all(line["left_out"] == [] and 2 <= line["clients"] <= 4 for line in lines)
