"""Experiments: which trainings they need, that they can be stopped and go on, and what is scored after a training."""

import json
import signal
import subprocess
import sys
import tomllib
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.observers import Watching
from tests.plugin_methods import FAULTS, Said, assert_same, eventually, result, small, upfl
from upfl import api
from upfl.config import Config
from upfl.engine.rounds import Observer, one_thread
from upfl.environment import commit
from upfl.errors import ConfigError
from upfl.experiments import runner
from upfl.experiments.definitions import EXPERIMENTS
from upfl.experiments.diary import write_diary
from upfl.experiments.newcomers import newcomers_file, score_on_newcomers
from upfl.experiments.plan import Job, plan
from upfl.personalize.fedtta import EarlyStopped, EarlyStoppedHyper, GuidedHyper, OneStep
from upfl.personalize.tent import Tent, TentHyper

pytestmark = pytest.mark.usefixtures("methods", "wide")

SETTINGS = ("--set", "iterations=2", "--set", "model.hidden=16")
SCALE = ("--profile", "smoke", "--data", "digits", "--workers", "1", *SETTINGS)


def experiment(out: Path, name: str, methods: str, *more: str | Path) -> Said:
    return upfl("experiment", name, "--methods", methods, "--out", out, *SCALE, *more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("overal",), ["overall"]),
        (("overall", "--methods", "fedtaa"), ["fedtta"]),
        (("overall", "--methods", "scaffold+tnet"), ["tent"]),
        (("overall", "--data", "mnits"), ["mnist"]),
        (("overall", "--profile", "smok"), ["smoke"]),
        (("overall", "--seeds", "0;1"), ["--seeds", "0,1,2"]),
        (("overall", "--track", "tensorbord"), ["tensorboard"]),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    upfl("experiment", *arguments, "--out", tmp_path / "out").ended(2, *words)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_would_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    said = experiment(tmp_path / "out", "overall", "fedavg,tent,fedtta", "--seeds", "0,1", "--dry-run").ended()
    assert "6 rows from 4 trainings" in said.out
    assert "digits-fedavg-s1-p0" in said.out
    assert "Measured" not in said.out
    said = experiment(tmp_path / "out", "overall", "fedavg,tent", "--forecast").ended()
    assert "about" in said.out
    assert "Measured" in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_forecast_does_not_multiply_what_a_round_costs_beside_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan(EXPERIMENTS["overall"], datasets=["digits"], methods=["fedavg"], profile="smoke", rounds=1000)
    trials, train = [], api.train

    def timed(config: Config, path: Path, workers: int | None) -> Any:
        """A clock by which a round takes a second, and a hundredth for each client."""
        done = train(config, path, workers=workers)
        trials.append(config.participants(len(done.federation.training)))
        line = {"train_s": beside + trials[-1] / 100, "evaluate_s": 0.0, "round_s": 0.0}
        return SimpleNamespace(federation=done.federation, metrics=[line, line])

    monkeypatch.setattr(api, "train", timed)
    beside = 1.0
    (said,) = runner.estimate([job], workers=1)
    assert trials == [2, 4]
    assert said.seconds == pytest.approx(1040, abs=300)  # and what the trial itself took; 2040 by two clients
    beside = 100.0  # too long for a second trial
    next(runner.estimate([job], workers=1))
    assert trials == [2, 4, 2]


# Running


def test_what_does_not_fit_into_the_hours_is_listed_and_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = plan(EXPERIMENTS["overall"], datasets=["digits"], methods=["fedavg", "fedtta"], seeds=[0], profile="smoke")
    runner.prepare([EXPERIMENTS["overall"]], jobs, tmp_path / "out")

    def watch(job: Job) -> AbstractContextManager[Observer]:
        return nullcontext(Watching())

    with monkeypatch.context() as clock:  # every look at it takes a second
        clock.setattr("upfl.experiments.runner.time.monotonic", count().__next__)
        outcomes = list(runner.run(jobs, tmp_path / "out", 1, watch, seconds=1.5))
    assert [outcome.state for outcome in outcomes] == ["begun", "not begun"]
    assert len(api.Run(tmp_path / "out" / jobs[0].name).metrics) == 1
    forecast = {job.name: 60.0 for job in jobs}
    late = runner.run(jobs, tmp_path / "out", 1, watch, forecast, seconds=30)
    assert [outcome.state for outcome in late] == ["not begun", "not begun"]
    assert [outcome.state for outcome in runner.run(jobs[:1], tmp_path / "out", 1, watch)] == ["done"]
    whole = api.train(jobs[0].config, tmp_path / "whole", workers=1)
    assert api.Run(tmp_path / "out" / jobs[0].name).result == whole.result


def test_a_campaign_lists_what_did_not_fit(tmp_path: Path) -> None:
    said = experiment(tmp_path / "out", "overall", "fedavg,fedtta", "--hours", "0").ended()
    assert "2 did not fit into 0 hours" in said.out
    assert "digits-fedtta-s0-p0 (not begun), about" in said.out


def test_an_experiment_joins_another_ones_folder_if_both_are_named(tmp_path: Path) -> None:
    experiment(tmp_path, "overall", "tent").ended()
    trained = (tmp_path / "digits-fedavg-s0-p0" / "metrics.jsonl").read_bytes()
    experiment(tmp_path, "dataset-size", "tent").ended(4, "'overall'", "upfl experiment overall,dataset-size")
    experiment(tmp_path, "overall,dataset-size", "tent").ended()
    assert (tmp_path / "digits-fedavg-s0-p0" / "metrics.jsonl").read_bytes() == trained
    assert newcomers_file(tmp_path / "digits-fedavg-s0-p0", {"new_fraction": 0.1}).exists()


def test_a_row_more_for_a_finished_training_is_refused_with_the_command_that_scores_it(tmp_path: Path) -> None:
    experiment(tmp_path, "overall", "fedavg").ended()
    run = tmp_path / "digits-fedavg-s0-p0"
    experiment(tmp_path, "overall", "fedavg,tent").ended(4, f"upfl score {run} --score tent")
    upfl("score", run, "--score", "tent").ended()
    experiment(tmp_path, "overall", "fedavg", "--rounds", "7").ended(4, "and 7 was asked for")


def test_rows_that_share_a_training_are_trained_once_and_done_ones_are_skipped(tmp_path: Path) -> None:
    experiment(tmp_path, "overall", "fedavg,tent,fedtta-prox,fedtta++").ended()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["digits-fedavg-s0-p0", "digits-fedtta-prox-s0-p0", "experiment.toml"]
    rows = [row["row"] for path in sorted(tmp_path.glob("digits*")) for row in result(path)["rows"]]
    assert rows == ["fedavg", "tent", "fedtta-prox", "fedtta++"]
    described = tomllib.loads((tmp_path / "experiment.toml").read_text())
    assert described["name"] == "overall"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    again = experiment(tmp_path, "overall", "fedavg,tent,fedtta-prox,fedtta++")
    assert "0 trainings done, 2 were done before, 0 failed" in again.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == before


def test_a_training_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "counting+none,fedavg"
    assert experiment(tmp_path / "whole", "overall", rows).code == 0
    monkeypatch.setenv(FAULTS, "begin-raise:1:*")
    said = experiment(tmp_path / "out", "overall", rows).ended(4, "digits-counting-s0-p0")
    assert "told to fail at begin in round 1" in said.out
    assert "told to fail" in (tmp_path / "out" / "failures" / "digits-counting-s0-p0.txt").read_text()
    assert_same(tmp_path / "out" / "digits-fedavg-s0-p0", tmp_path / "whole" / "digits-fedavg-s0-p0")

    monkeypatch.delenv(FAULTS)
    said = experiment(tmp_path / "out", "overall", rows).ended()
    assert "1 trainings done, 1 were done before" in said.out
    assert not list((tmp_path / "out" / "failures").iterdir())
    for name in ("digits-fedavg-s0-p0", "digits-counting-s0-p0"):
        assert_same(tmp_path / "out" / name, tmp_path / "whole" / name)


def test_an_experiment_that_was_killed_gives_the_same_tables_when_started_again(tmp_path: Path) -> None:
    arguments = ["fedavg,fedtta", "--rounds", "40", "--evaluate-every", "20"]
    assert experiment(tmp_path / "whole", "distribution-shift", *arguments).code == 0
    out = tmp_path / "out"
    command = ["experiment", "distribution-shift", "--methods", *arguments, "--out", str(out), *SCALE]
    metrics = out / "digits-fedtta-s0-p0" / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "upfl", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert eventually(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3, 200)
        process.send_signal(signal.SIGKILL)
    assert not (out / "digits-fedtta-s0-p0" / "result.json").exists()
    assert experiment(out, "distribution-shift", *arguments).code == 0
    for name in ("digits-fedavg-s0-p0", "digits-fedtta-s0-p0"):
        assert_same(out / name, tmp_path / "whole" / name)
        for file in sorted((tmp_path / "whole" / name / "newcomers").iterdir()):
            assert (out / name / "newcomers" / file.name).read_text() == file.read_text()
    for folder in ("whole", "out"):
        assert upfl("report", tmp_path / folder, "-o", tmp_path / f"{folder}-report").code == 0
    for table in sorted((tmp_path / "whole-report" / "tables").glob("digits*")):
        assert (tmp_path / "out-report" / "tables" / table.name).read_text() == table.read_text()


def test_a_folder_with_another_experiment_or_other_settings_is_refused(tmp_path: Path) -> None:
    assert experiment(tmp_path, "overall", "fedavg").code == 0
    experiment(tmp_path, "learning-curves", "fedavg").ended(4, "'overall'")
    experiment(tmp_path, "overall", "fedavg", "--rounds", "5").ended(4, "rounds is 3, and 5 was asked for")


# New clients


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.train(dirichlet(0.1), tmp_path_factory.mktemp("shifted") / "run", workers=1)


def dirichlet(alpha_new: float) -> Config:
    shift = ("partition.kind=dirichlet", f"partition.alpha_new={alpha_new}")
    return small("fedtta", *shift, score=["early-stopped", "label-shift"])


def test_other_new_clients_score_as_in_a_training_of_their_own(shifted: api.Run, tmp_path: Path) -> None:
    changes = {"alpha_new": 0.5}
    scored = score_on_newcomers(shifted, changes, workers=2)
    own = api.train(dirichlet(0.5), tmp_path / "own", workers=1).result
    for ours, theirs in zip(scored["rows"], own["rows"], strict=True):
        new = [client for client in theirs["clients"] if client["kind"] == "new"]
        assert (ours["row"], ours["clients"]) == (theirs["row"], new)
        assert ours["test"] == pytest.approx(theirs["test"])
    assert (
        score_on_newcomers(shifted, changes) == json.loads(newcomers_file(shifted.path, changes).read_text()) == scored
    )
    assert shifted.result["rows"] != scored["rows"]


def test_changes_that_reach_training_clients_are_refused(shifted: api.Run) -> None:
    with pytest.raises(ConfigError, match="training clients"):
        score_on_newcomers(shifted, {"alpha_training": 0.5})


# The diary


def test_the_diary_follows_the_personalizers_own_steps(shifted: api.Run) -> None:
    one, early = write_diary(shifted, steps=6)
    assert (one["row"], early["row"]) == ("fedtta", "fedtta+early-stopped")
    client, labels = shifted.newcomer(0), shifted.labels(0)
    hyper = EarlyStoppedHyper(steps=6, patience=7)
    with one_thread(), torch.no_grad():
        patient = EarlyStopped(shifted.training, hyper).personalize(shifted.published("early-stopped"), client)
        single = OneStep(shifted.training, GuidedHyper()).personalize(shifted.published("one-step"), client)
    assert early["entropy"] == pytest.approx(patient.diary.entropy, abs=1e-7)
    assert early["loss"] == patient.diary.loss
    assert one["accuracy"][0] == api.accuracy(single.before, labels)
    assert one["accuracy"][1] == api.accuracy(single.logits, labels)
    assert len(one["accuracy"]) == 7


def test_the_diary_of_entropy_minimisation_follows_its_steps(tmp_path: Path) -> None:
    run = api.train(small("tent"), tmp_path / "run", workers=1)
    (diary,) = write_diary(run, steps=4)
    with one_thread(), torch.no_grad():
        three = Tent(run.training, TentHyper(steps=3)).personalize(run.published("tent"), run.newcomer(0))
    assert diary["entropy"][:4] == pytest.approx(three.diary.entropy, abs=1e-6)
    assert diary["accuracy"][3] == api.accuracy(three.logits, run.labels(0))


def test_labels_decide_about_nothing_in_the_diary_but_the_accuracy(
    shifted: api.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = write_diary(shifted, steps=3)
    turned = (shifted.labels(0) + 1) % 10
    monkeypatch.setattr(api.Run, "labels", lambda self, client: turned)
    for before, after in zip(honest, write_diary(shifted, steps=3), strict=True):
        assert before.pop("accuracy") != after.pop("accuracy")
        assert before == after


def test_a_diary_needs_a_personalizer_that_takes_steps(tmp_path: Path) -> None:
    run = api.train(small("fedavg"), tmp_path / "run", workers=1)
    with pytest.raises(ConfigError, match="takes steps"):
        write_diary(run, steps=3)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("dataset-size", "digits-new_fraction-curves-figure"),
        ("concept-shift", "turned by 0, 30, 60 degrees in training, 15, 45 among new clients"),
        ("learning-curves", "digits-curves-figure"),
        ("adaptation-diary", "digits-diary-figure"),
    ],
)
def test_the_other_experiments_run_and_report(tmp_path: Path, name: str, shown: str) -> None:
    assert experiment(tmp_path / "out", name, "fedtta").code == 0
    assert upfl("report", tmp_path / "out", "-o", tmp_path / "report").code == 0
    assert shown in (tmp_path / "report" / "index.html").read_text()


def test_the_heterogeneous_experiment_sweeps_lambda() -> None:
    jobs = plan(EXPERIMENTS["heterogeneous"], profile="smoke")
    assert len(jobs) == 7
    assert len({job.config.training_hyper() for job in jobs if "fedtta" in job.name}) == 6


# Where a run was made


def test_a_run_names_version_and_commit(tmp_path: Path) -> None:
    run = api.train(small("fedavg"), tmp_path / "run", workers=1)
    (session,) = json.loads((run.path / "environment.json").read_text())
    assert session["upfl"]
    assert session["workers"] == 1
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert session["commit"] == (git.stdout.strip() if git.returncode == 0 else "unknown")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("worktree", [False, True])
def test_the_commit_is_read_without_git(tmp_path: Path, packed: bool, worktree: bool) -> None:
    head = "0123456789abcdef0123456789abcdef01234567"
    root, git = tmp_path / "work", tmp_path / "git"
    (root / "src" / "upfl").mkdir(parents=True)
    (root / "src" / "upfl" / "__init__.py").touch()
    assert commit(root) == "unknown"
    (git / "refs" / "heads").mkdir(parents=True)
    if packed:
        (git / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/other\n{head} refs/heads/main\n")
    else:
        (git / "refs" / "heads" / "main").write_text(f"{head}\n")
    own = git
    if worktree:
        own = git / "worktrees" / "work"
        own.mkdir(parents=True)
        (own / "commondir").write_text("../..\n")
        (root / ".git").write_text(f"gitdir: {own}\n")
    else:
        (root / ".git").symlink_to(git)
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit(root) == head
    (own / "HEAD").write_text(f"{'a' * 40}\n")
    assert commit(root) == "a" * 40
    (own / "HEAD").write_text("nonsense\n")
    assert commit(root) == "unknown"


def test_gradient_work_is_counted(tmp_path: Path) -> None:
    """3 clients of 2 steps a round: a FedTTA step is four gradient evaluations, FedTTA-Prox's a forward pass more."""
    for method, cost in (("fedavg", 1), ("fedtta", 4), ("fedtta-prox", 4 + 1 / 3)):
        run = api.train(small(method), tmp_path / method, workers=1)
        assert [line["gradients"] for line in run.metrics] == pytest.approx([3 * 2 * cost] * 4)
