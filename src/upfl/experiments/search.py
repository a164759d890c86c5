"""Search for hyper-parameters, by validation accuracy alone: the paper's grids, or freely within ranges.

    FOLDER/search.toml        what is searched
    FOLDER/search.db          Optuna's storage
    FOLDER/trials/NAME/       a run folder for each trial, named by its values
    FOLDER/best.toml          the values of the best trial so far; `upfl train --config` takes it

Trials run side by side, each as a process of its own with one worker; this process alone speaks to Optuna. A trial that
was cut off is tried again and goes on from its checkpoint. What new clients' labels say plays no part: only validation
accuracies are read from a trial.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from upfl import plugins
from upfl.config import Config, configure, read_toml
from upfl.engine.folder import RunFolder
from upfl.errors import ConfigError, RunError, UpflError
from upfl.methods import personalizer_class, resolve, row_name, training_class
from upfl.randomness import generator, seed_of
from upfl.safe.folder import write_file
from upfl.safe.text import counted
from upfl.suggest import unknown

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class SearchValues:
    """The paper's grid for a hyper-parameter, and the range that a free search takes instead."""

    grid: tuple[float, ...]
    low: float
    high: float
    log: bool = True

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (*self.grid, self.low, self.high))


RATE = SearchValues((0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5), 1e-4, 1.0)
MU = SearchValues((0.001, 0.01, 0.1, 1.0), 1e-4, 10.0)
SPACES: dict[str, dict[str, SearchValues]] = {
    "fedavg": {"lr": RATE},
    "fedprox": {"lr": RATE, "mu": MU},
    "scaffold": {"lr": RATE, "server_lr": SearchValues(RATE.grid, 1e-2, 3.0)},
    "afl": {"lr": RATE, "mixture_lr": RATE},
    "fedgma": {
        "lr": RATE,
        "server_lr": SearchValues((0.01, 0.1, 1.0, 1.5, 2.0), 1e-2, 3.0),
        "threshold": SearchValues((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), 0.0, 1.0, log=False),
    },
    "fedadg": {"lr": RATE},
    "fedsr": {"lr": RATE},
    "fedper": {"lr": RATE},
    "odpfl-hn": {"lr": RATE, "encoder_lr": RATE, "hypernet_lr": RATE},
    "fedtta": {"inner_lr": RATE, "outer_lr": RATE, "adapt_lr": RATE},
    "fedtta-prox": {"inner_lr": RATE, "outer_lr": RATE, "adapt_lr": RATE, "mu": MU},
    "hetero-fedtta": {"inner_lr": RATE, "outer_lr": RATE, "adapt_lr": RATE},
    "hetero-tent": {"lr": RATE},
    "early-stopped": {"patience": SearchValues((1, 3, 5), 1, 10)},
}


@dataclass
class Search:
    """A search in its folder."""

    folder: Path
    method: str
    dataset: str
    space: str = "paper"  # or "free"
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the trials' configuration
    settings: Sequence[str] = ()  # `key=value`, the same in every trial

    def __post_init__(self) -> None:
        if self.space not in ("paper", "free"):
            raise unknown("space", self.space, ("paper", "free"))
        self.training, (self.personalizer, *_) = resolve(self.method)
        self.row = row_name(self.training, self.personalizer)
        self.choices = self._choices()
        self.config({})  # raises for what does not fit

    def _choices(self) -> dict[str, SearchValues]:
        """What is searched, by the place of the hyper-parameter: `training.lr`, `early-stopped.patience`."""
        known = {
            f"{place}.{key}": choice
            for place, name in (("training", self.training), (self.personalizer, self.personalizer))
            for key, choice in SPACES.get(name, {}).items()
        }
        if not self.ranges:
            if not known:
                raise ConfigError(
                    f"no search space is known for '{self.method}': give ranges, such as --range lr=0.001:1"
                )
            return known
        places = {
            self.personalizer: personalizer_class(self.personalizer).Hyper,
            "training": training_class(self.training).Hyper,
        }
        # By its name alone a hyper-parameter is the training's where both have one, as with `--set`.
        fields = {
            name: f"{place}.{key}"
            for place, hyper in places.items()
            for key in hyper.model_fields
            for name in (key, f"{place}.{key}")
        }
        for key in self.ranges:
            if key not in fields:
                raise unknown("hyper-parameter", key, fields)
        return {fields[key]: SearchValues((), low, high, log=low > 0) for key, (low, high) in self.ranges.items()}

    def config(self, values: Mapping[str, Any]) -> Config:
        settings = [*self.settings, *(f"{key}={value}" for key, value in values.items())]
        return configure(self.method, self.dataset, settings=settings, **self.options)

    @property
    def size(self) -> int | None:
        """The number of points of the grid; None for a free search."""
        if self.space == "free" or self.ranges:
            return None
        size = 1
        for choice in self.choices.values():
            size *= len(choice.grid)
        return size

    def describe(self) -> dict[str, Any]:
        """What must be the same when a search is started again."""
        return {
            "method": self.method,
            "dataset": self.dataset,
            "space": self.space,
            "ranges": {key: list(limits) for key, limits in self.ranges.items()},
            "options": {key: value for key, value in self.options.items() if value is not None},
            **({"settings": list(self.settings)} if self.settings else {}),
        }

    # Optuna

    def study(self) -> Any:
        """The study in the folder, begun or taken up again; trials that were cut off are waiting to be tried again."""
        optuna = import_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        description = self.folder / "search.toml"
        if description.exists():
            if (found := read_toml(description)) != self.describe():
                raise RunError(
                    f"{self.folder}: holds another search ({_difference(found, self.describe())}); choose another --out"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise RunError(f"{self.folder}: the folder is not empty; choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(description, tomli_w.dumps(self.describe()).encode())
        study: Any = optuna.create_study(
            study_name="search",
            storage=f"sqlite:///{(self.folder / 'search.db').resolve()}",
            direction="maximize",
            load_if_exists=True,
        )
        # A sampler that started from the same seed again would propose what it has proposed before.
        seed = seed_of(self.options.get("seed") or 0, "search", len(study.get_trials(deepcopy=False))) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.params.keys() == self.choices.keys():
                study.enqueue_trial(trial.params)
        return study

    def ask(self, study: optuna.Study) -> tuple[optuna.Trial, dict[str, Any]]:
        """The next trial: one that waits to be tried again, a point of the grid, or what Optuna proposes."""
        if self.size is not None:
            trials = study.get_trials(deepcopy=False)
            if not any(trial.state == import_optuna().trial.TrialState.WAITING for trial in trials):
                tried = [trial.params for trial in trials]
                study.enqueue_trial(next(point for point in self._grid() if point not in tried))
        trial = study.ask()
        return trial, {key: self._suggest(trial, key, choice) for key, choice in self.choices.items()}

    def _grid(self) -> Iterator[dict[str, Any]]:
        """The points of the grid, in an order drawn from the seed: a search that is cut short has looked everywhere."""
        points = list(product(*(choice.grid for choice in self.choices.values())))
        draw = generator(self.options.get("seed") or 0, "grid")
        for place in torch.randperm(len(points), generator=draw).tolist():
            yield dict(zip(self.choices, points[place], strict=True))

    def _suggest(self, trial: optuna.Trial, key: str, choice: SearchValues) -> Any:
        if self.size is not None:
            return trial.suggest_categorical(key, choice.grid)
        if choice.whole:
            return trial.suggest_int(key, int(choice.low), int(choice.high), log=choice.log)
        # Six digits are enough, and make names that can be read.
        return float(f"{trial.suggest_float(key, choice.low, choice.high, log=choice.log):.6g}")

    def trial_folder(self, values: Mapping[str, Any]) -> Path:
        return self.folder / "trials" / ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


ERROR = "error"  # what went wrong in a trial that failed by itself; one that was cut off has none


@dataclass(frozen=True)
class Tried:
    number: int
    values: dict[str, Any]
    validation: float | None  # None: the trial failed
    error: str = ""


def run(search: Search, trials: int, parallel: int = 1) -> Iterator[Tried]:
    """Try until so many trials are done, counting those from before and those that failed; yields each as it ends."""
    if trials < 1 or parallel < 1:
        raise ConfigError("--trials and --parallel are at least 1")
    optuna = import_optuna()
    search.folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(search.folder).lock(), ThreadPoolExecutor(parallel) as pool, _Processes() as processes:
        study = search.study()
        wanted = min(trials, search.size or trials)
        running: dict[Future[str], tuple[Any, dict[str, Any]]] = {}
        while True:
            tried = study.get_trials(deepcopy=False)
            done = sum(trial.value is not None or ERROR in trial.user_attrs for trial in tried)
            while len(running) < parallel and done + len(running) < wanted:
                trial, values = search.ask(study)
                running[pool.submit(processes.train, search, values)] = (trial, values)
            if not running:
                break
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                trial, values = running.pop(future)
                if error := future.result():
                    trial.set_user_attr(ERROR, error)
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    yield Tried(trial.number, values, None, error)
                    continue
                value = best_validation(search.trial_folder(values), search.row)
                study.tell(trial, value)
                write_best(search, study)
                yield Tried(trial.number, values, value)


def best_validation(run: Path, row: str) -> float:
    """The best validation accuracy of a row. What the metrics say about new clients is not looked at."""
    return max(float(line["rows"][row]["validation"]) for line in RunFolder(run).metrics() if "rows" in line)


def write_best(search: Search, study: optuna.Study) -> None:
    """The hyper-parameters of the best trial, for `upfl train --config`: not its scale, which is the search's."""
    done = sum(trial.value is not None for trial in study.get_trials(deepcopy=False))
    config = search.config({key: _plain(value) for key, value in study.best_params.items()})
    content = tomli_w.dumps(
        {
            "method": search.method,
            "dataset": search.dataset,
            "training": config.training,
            "personalize": {search.personalizer: config.personalize[search.personalizer]},
        }
    )
    scale = [f"{key} {value}" for key, value in search.options.items() if value is not None]
    options = ", ".join([*scale, *search.settings])
    head = f"# Validation accuracy {study.best_value:.2f}, the best of {counted(done, 'trial')}: {options}.\n"
    write_file(search.folder / "best.toml", (head + content).encode())


def _plain(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


class _Processes:
    """Trials at work in processes of their own, which end with this one however it ends."""

    def __init__(self) -> None:
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.lock, self.stopped = Lock(), False

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.stopped = True
            for process in self.processes:
                process.terminate()

    def train(self, search: Search, values: Mapping[str, Any]) -> str:
        """Train a trial to its end, from wherever it stands; returns what went wrong, or nothing."""
        path = search.trial_folder(values)
        try:
            if not (path / "config.toml").exists():
                RunFolder.create(path, search.config(values))
        except UpflError as error:
            return str(error)
        command = [sys.executable, "-m", "upfl.experiments.trial", str(path), *plugins.for_workers()]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with tempfile.TemporaryFile() as output:
            with self.lock:
                if self.stopped:
                    return "stopped"
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
                )
                self.processes.add(process)
            code = process.wait()
            with self.lock:
                self.processes.discard(process)
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        return "" if code == 0 else said or f"the trial's process ended with exit code {code}"


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError('a search needs Optuna: pip install "upfl[search]"') from error
    return optuna


def _difference(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    key = next(key for key in {**found, **asked} if found.get(key) != asked.get(key))
    return f"{key} is {found.get(key)}, and {asked.get(key)} was asked for"
