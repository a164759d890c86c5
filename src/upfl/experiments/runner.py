"""Run the trainings of one experiment or several in one folder, to be stopped at any time and started again.

    FOLDER/experiment.toml        what the experiment is
    FOLDER/NAME/                  a run folder for each training
    FOLDER/failures/NAME.txt      why a training failed, until it succeeds

What is finished is not done again, what was begun goes on from its checkpoint, and what fails is reported without
keeping the others from running. With a time limit, a training that would not end in time is not begun, and one that
is under way stops after a round.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from upfl import api
from upfl.config import Config, read_toml
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Observer
from upfl.errors import RunError, UpflError
from upfl.experiments.definitions import Experiment
from upfl.experiments.diary import FILE as DIARY
from upfl.experiments.diary import write_diary
from upfl.experiments.newcomers import newcomers_file, score_on_newcomers
from upfl.experiments.plan import Job
from upfl.safe.folder import write_file

Watch = Callable[[Job], AbstractContextManager[Observer]]


@dataclass(frozen=True)
class Outcome:
    job: Job
    state: Literal["done", "was done", "failed", "begun", "not begun"]
    error: str = ""


def prepare(experiments: Sequence[Experiment], jobs: Sequence[Job], folder: Path) -> None:
    """Describe the experiments in their folder; what lies there already must belong to them."""
    names = [experiment.name for experiment in experiments]
    description = folder / "experiment.toml"
    runs: dict[str, list[str]] = {}
    if description.exists():
        found = read_toml(description)
        kept = str(found.get("name")).split(",")
        if not set(kept) <= set(names):
            raise RunError(
                f"{folder}: holds the experiment {found.get('name')!r}; choose another --out, or have both there: "
                f"upfl experiment {','.join([*kept, *(name for name in names if name not in kept)])}"
            )
        runs = dict(found.get("runs", {}))
    for job in jobs:
        if (folder / job.name / "config.toml").exists():
            _check_same(RunFolder.open(folder / job.name).config(), job.config, folder / job.name)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": ",".join(names),
        "title": "; ".join(experiment.title for experiment in experiments),
        "paper": "; ".join(experiment.paper for experiment in experiments),
        "runs": runs | {job.name: job.rows for job in jobs},
    }
    write_file(description, tomli_w.dumps(content).encode())


class _OutOfTimeError(Exception):
    """The time limit has passed."""


class _Until:
    """An observer that ends a training after the round in which its time is up."""

    def __init__(self, observer: Observer, end: float) -> None:
        self._observer, self._end = observer, end
        self.begin, self.note, self.stage = observer.begin, observer.note, observer.stage

    def round(self, metrics: dict[str, Any]) -> None:
        self._observer.round(metrics)
        if time.monotonic() > self._end:
            raise _OutOfTimeError


def run(
    jobs: Sequence[Job],
    folder: Path,
    workers: int | None,
    watch: Watch,
    forecast: Mapping[str, float] | None = None,
    seconds: float = math.inf,
) -> Iterator[Outcome]:
    """Run what is not done yet, one training after the other; yields what became of each.

    Within so many seconds: by a forecast for each job's name, what would not end in time is not begun.
    """
    end = time.monotonic() + seconds
    for job in jobs:
        failure = folder / "failures" / f"{job.name}.txt"
        if _complete(job, folder / job.name):
            failure.unlink(missing_ok=True)
            yield Outcome(job, "was done")
            continue
        if time.monotonic() + (forecast or {}).get(job.name, 0.0) > end:
            yield Outcome(job, "not begun")
            continue
        try:
            with watch(job) as observer:
                _run(job, folder / job.name, workers, _Until(observer, end))
        except _OutOfTimeError:
            yield Outcome(job, "begun")
        except Exception as error:
            failure.parent.mkdir(exist_ok=True)
            expected = isinstance(error, UpflError)
            write_file(failure, (str(error) if expected else traceback.format_exc()).encode())
            text = str(error) if expected else f"{type(error).__name__}: {error} (the whole of it: {failure})"
            yield Outcome(job, "failed", text)
        else:
            failure.unlink(missing_ok=True)
            yield Outcome(job, "done")


def _run(job: Job, path: Path, workers: int | None, observer: Observer) -> None:
    if (path / "config.toml").exists():
        done = api.resume(path, workers=workers, observer=observer)
    else:
        done = api.train(job.config, path, workers=workers, observer=observer)
    threads = api.worker_count(job.config, done.training, workers)
    for changes in job.newcomers:
        observer.stage(f"scoring new clients, {changes}")
        score_on_newcomers(done, changes, threads)
    if job.diary_steps and not (path / DIARY).exists():
        write_diary(done, job.diary_steps)


def _complete(job: Job, path: Path) -> bool:
    return (
        RunFolder(path).finished
        and all(newcomers_file(path, changes).exists() for changes in job.newcomers)
        and (not job.diary_steps or (path / DIARY).exists())
    )


def _check_same(found: Config, wanted: Config, path: Path) -> None:
    there, asked = found.model_dump(), wanted.model_dump()
    different = [key for key in there if there[key] != asked[key]]
    if different == ["personalize"] and (
        more := [name for name in wanted.personalize if name not in found.personalize]
    ):
        raise RunError(
            f"{path}: holds this training with other rows; choose another --out, or score what it has trained: "
            f"upfl score {path} --score {','.join(more)}"
        )
    if different:
        key = different[0]
        raise RunError(
            f"{path}: holds a run with other settings ({key} is {there[key]}, and {asked[key]} was asked for); "
            "choose another --out"
        )


# How long it would take


@dataclass(frozen=True)
class Estimate:
    """Seconds that a job would take, from a trial."""

    job: Job
    seconds: float


TRIAL_ROUNDS = 2  # the second one counts: the first one warms caches up
SHORT = 30.0  # seconds: a trial with all clients that is forecast to take no longer is worth its time


def estimate(jobs: Sequence[Job], workers: int | None, folder: Path | None = None) -> Iterator[Estimate]:
    """Measure each kind of training once, on a few clients, and scale to all clients, rounds and evaluations.

    Of what was begun in a folder, the rest counts.
    """
    measured: dict[str, float] = {}
    for job in jobs:
        if folder and _complete(job, folder / job.name):
            yield Estimate(job, 0.0)
            continue
        if (cost := _cost(job.config)) not in measured:
            measured[cost] = _trial(job, workers)
        yield Estimate(job, measured[cost] * (1 - _rounds_done(job, folder) / job.config.rounds))


def longest_first(estimates: Iterable[Estimate]) -> list[Estimate]:
    """The order in which a limited time is used best: short trainings fill what long ones leave."""
    return sorted(estimates, key=lambda one: -one.seconds)


def _rounds_done(job: Job, folder: Path | None) -> int:
    if folder is None or not (folder / job.name / "config.toml").exists():
        return 0
    return min(len(RunFolder.open(folder / job.name).metrics()), job.config.rounds - 1)


def _cost(config: Config) -> str:
    """What decides about the time: everything but seeds, and values that only steer the optimisation."""
    same = {"dataset", "rounds", "clients_per_round", "evaluate_every", "evaluate_clients", "model", "partition"}
    work = [config.training[key] for key in ("name", "iterations", "batch_size") if key in config.training]
    return f"{config.model_dump_json(include=same)} {work} {list(config.personalize)}"


def _trial(job: Job, workers: int | None) -> float:
    """Seconds that the job would take, by a trial of few clients, and by one of all where that is short.

    What a round costs beside its clients is scaled up with them by the first; it matters where they take little time.
    """
    few = max(2, workers or api.cores())
    seconds, once = _scaled(job, workers, few)
    return seconds if once > SHORT else _scaled(job, workers, None)[0]


def _scaled(job: Job, workers: int | None, few: int | None) -> tuple[float, float]:
    """Seconds of the job, and of a trial with all clients, from a trial with a few of them."""
    config = job.config
    scale = {"clients_per_round": few, "evaluate_clients": few} if few else {}
    with tempfile.TemporaryDirectory(prefix="upfl-trial-") as folder:
        started = time.perf_counter()
        small = config.model_copy(update={"rounds": TRIAL_ROUNDS, "evaluate_every": TRIAL_ROUNDS, **scale})
        done = api.train(small, Path(folder) / "trial", workers=workers)
        around = time.perf_counter() - started - sum(float(line["round_s"]) for line in done.metrics)
        last = done.metrics[-1]
        federation = done.federation
        clients = len(federation.training)
        held = federation.training.sizes() - federation.training.train_counts, federation.new.sizes()
        scored = sum(int(sizes[: config.evaluate_clients].sum()) for sizes in held)
        tried = sum(int(sizes[: small.evaluate_clients].sum()) for sizes in held)
        training: float = last["train_s"] * config.participants(clients) / small.participants(clients)
        scoring: float = last["evaluate_s"] * scored / tried
        evaluations = -(-config.rounds // config.evaluate_every) + len(job.newcomers)
        return around + config.rounds * training + evaluations * scoring, TRIAL_ROUNDS * training + scoring
