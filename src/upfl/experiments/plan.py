"""From an experiment to its trainings: rows that share a training share one run folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from upfl.config import PROFILES, Config, configure
from upfl.experiments.definitions import SEEDS, Experiment
from upfl.methods import ROWS, TRAININGS, personalizer_class, row_name
from upfl.suggest import unknown


@dataclass(frozen=True)
class Job:
    """One training: the folder's name, the run, and what is to be scored when it is done."""

    name: str
    config: Config
    newcomers: tuple[Mapping[str, Any], ...]  # changes of the partition that concern new clients only
    diary_steps: int

    @property
    def rows(self) -> list[str]:
        return [row_name(self.config.training_name, name) for name in self.config.personalize]


def plan(
    experiment: Experiment,
    *,
    methods: Sequence[str] = (),
    datasets: Sequence[str] = (),
    seeds: Sequence[int] = (),
    partition_seeds: Sequence[int] = (0,),
    profile: str = "paper",
    settings: Iterable[str] = (),
    **options: Any,
) -> list[Job]:
    """The trainings of an experiment, each once."""
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    grouped = _by_training(methods or experiment.rows)
    options["partition"] = dict(experiment.partition) or None
    options["evaluate_every"] = options.get("evaluate_every") or experiment.evaluate_every.get(profile)
    jobs = []
    for dataset, partition_seed, seed in product(
        dict.fromkeys(datasets or experiment.datasets),
        dict.fromkeys(partition_seeds),
        dict.fromkeys(seeds or SEEDS[profile]),
    ):
        for training, rows in grouped.items():
            for swept in _settings(experiment, rows):
                config = configure(
                    _method(training, rows),
                    dataset,
                    profile=profile,
                    settings=[*settings, *swept],
                    score=rows.values(),
                    seed=seed,
                    partition_seed=partition_seed,
                    **options,
                )
                name = "-".join(
                    [dataset, training, *(s.replace("_=", "=") for s in swept), f"s{seed}", f"p{partition_seed}"]
                )
                jobs.append(Job(name, config, _other_newcomers(experiment, config), experiment.diary_steps))
    return jobs


def campaign(plans: Mapping[str, Sequence[Job]]) -> list[Job]:
    """The trainings of several experiments, each once: what two of them train alike is scored for both."""
    jobs: dict[str, Job] = {}  # by what is trained
    for experiment, planned in plans.items():
        for job in planned:
            trained = job.config.model_dump_json(exclude={"method", "personalize"})
            if (first := jobs.get(trained)) is not None:
                rows = {**first.config.personalize, **job.config.personalize}
                newcomers = (*first.newcomers, *(new for new in job.newcomers if new not in first.newcomers))
                config = first.config.model_copy(update={"personalize": rows})
                jobs[trained] = replace(
                    first, config=config, newcomers=newcomers, diary_steps=max(first.diary_steps, job.diary_steps)
                )
            elif any(job.name == other.name for other in jobs.values()):
                jobs[trained] = replace(job, name=f"{experiment}-{job.name}")
            else:
                jobs[trained] = job
    return list(jobs.values())


def _by_training(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """training -> {row: personalizer}. A name is a row of the table, or any pair: `scaffold+tent`."""
    grouped: dict[str, dict[str, str]] = {}
    for name in names:
        listed = next((method for method in ROWS if method.row == name), None)
        training, plus, personalizer = name.partition("+")
        if listed is not None:
            training, personalizer = listed.training, listed.personalizer
        elif training not in TRAININGS or not plus:
            raise unknown("row", name, [method.row for method in ROWS])
        personalizer_class(personalizer)  # raises for what there is not
        grouped.setdefault(training, {})[name] = personalizer
    return grouped


def _method(training: str, rows: Iterable[str]) -> str:
    """What the run is called: its first row that the table has, or its training."""
    listed = {method.row for method in ROWS}
    return next((row for row in rows if row in listed), training)


def _settings(experiment: Experiment, rows: Iterable[str]) -> list[list[str]]:
    """What is set for each training of these rows: nothing, or one value of the sweep each."""
    sweep = experiment.sweep
    return [[f"{sweep.key}={value}"] for value in sweep.values] if sweep and sweep.row in rows else [[]]


def _other_newcomers(experiment: Experiment, config: Config) -> tuple[Mapping[str, Any], ...]:
    """The experiment's new clients, without those that the training itself is scored on."""
    partition = dict(config.partition)
    return tuple(changes for changes in experiment.newcomers if partition | dict(changes) != partition)
