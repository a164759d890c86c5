"""The ServerApp: the engine's rounds, with Flower's nodes in place of worker processes.

A training run writes the run folder that the engine writes, to the same bits if every node answers, and is resumed by
running the app again with the same `out`. A node that fails, is late, or sends what does not fit is left out of the
round and named in the metrics; a round needs `min-nodes` good replies, and is tried again before the run stops.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from upfl import bundle, plugins
from upfl.bundle import Bundle
from upfl.config import Config
from upfl.contract import Published, needs_of
from upfl.data.forms import Vectors
from upfl.data.standardize import standardized
from upfl.engine.fitting import fit_by, require_data
from upfl.engine.folder import RunFolder
from upfl.engine.local import upload_like
from upfl.engine.rounds import Engine, Observer
from upfl.engine.setup import Setup, assemble, named_federation
from upfl.errors import ConfigError, StoppedError
from upfl.flower.cohort import NodeCohort
from upfl.flower.handout import personalize
from upfl.flower.privacy import Privacy, require_private
from upfl.flower.terms import FederationTask, Settings, Terms, describe, require_no_public_set, unseen_federation
from upfl.methods import row_name
from upfl.personalize.likeness import LikenessCheck
from upfl.randomness import generator

BUNDLE = "bundle"  # in the run folder: what newcomers receive

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = Settings.of(context.run_config, "run-config")
    plugins.load(plugins.from_environment())
    if settings.mode == "train":
        train(grid, settings)
    else:
        personalize(grid, settings)


def train(grid: Grid, settings: Settings, observer: Observer | None = None) -> RunFolder:
    """Train a federation of nodes into the run folder `out`, from wherever the run in it stands; make its bundle."""
    if settings.out is None or not settings.out.is_absolute():
        raise ConfigError("out: give the run folder as an absolute path on the SuperLink's machine")
    config = describe(settings)
    if settings.task:
        task = FederationTask.read(settings.task)
        require_no_public_set(config)
        config, federation = config.model_copy(update={"dataset": task.name}), unseen_federation(task)
    else:
        federation = named_federation(config)
        task = FederationTask.of(federation.source, len(federation.training))
    setup = assemble(config, federation)
    require_fit(setup, settings.privacy)
    if task.open and settings.privacy:
        raise ConfigError(f"{settings.task}: clip and noise do not cover sums of features: give input.mean, input.std")
    folder = _folder(settings, config, task)
    terms = Terms.model_validate_json(folder.terms())
    if task.open:
        terms = _standardized(NodeCohort(setup, grid, settings, terms), folder)
        setup = assemble(config, unseen_federation(terms.task))
    engine = Engine(folder, NodeCohort(setup, grid, settings, terms))
    engine.run(observer or _Log())
    if not (settings.out / BUNDLE).exists():
        write_bundle(engine, terms.task, settings.out / BUNDLE, private=terms.privacy is not None)
    return folder


def require_fit(setup: Setup, private: Privacy | None) -> None:
    """Refuse what cannot run over nodes, or not with the privacy that was asked for."""
    config, training, personalizers = setup.config, setup.training, list(setup.personalizers.values())
    if training.publishes_memory:
        raise ConfigError(
            f"{training.name} cannot run on Flower: newcomers would receive training clients' own layers, "
            "which stay on the nodes; the server sees sums alone"
        )
    if config.vectorize > 1:
        raise ConfigError(f"vectorize = {config.vectorize}: a node trains one client; leave it at 1")
    require_data(personalizers, setup.federation, config.evaluate_clients)
    if not private:
        return
    if config.checkpoint_every != 1:
        raise ConfigError("clip and noise need checkpoint_every=1: a round that ran twice would be released twice")
    if needs := needs_of(personalizers):
        raise ConfigError(
            f"clip and noise do not cover what is fitted on nodes' labels ({', '.join(needs)}): "
            "score personalizers that need no fit"
        )
    server = training.init(generator(config.seed, "init"))
    require_private(upload_like(training, server, setup.client(0, 0)), server, training.name)


def _folder(settings: Settings, config: Config, task: FederationTask) -> RunFolder:
    """A new run folder, or the one that is there if it holds this run."""
    path, private = settings.out, settings.privacy
    assert path is not None
    if not (path / "config.toml").exists():
        folder = RunFolder.create(path, config)
        terms = Terms(run=secrets.token_hex(16), config=config, task=task, privacy=private, secure=settings.secure)
        folder.save_terms(terms.model_dump_json(indent=1))
        return folder
    folder = RunFolder.open(path)
    terms = Terms.model_validate_json(folder.terms())
    described = (config.to_toml(), task, private, settings.secure)
    held = terms.task.unstandardized if task.open else terms.task
    if (terms.config.to_toml(), held, terms.privacy, terms.secure) != described:
        raise ConfigError(f"{path}: holds another run than the one described; choose another out")
    return folder


def _standardized(cohort: NodeCohort, folder: RunFolder) -> Terms:
    """The run's terms with mean and deviation of the nodes' features: found once, kept in the run folder."""
    terms = cohort.terms
    if not terms.task.open:
        return terms
    form, sums = terms.task.input, cohort.feature_sums()
    assert isinstance(form, Vectors)
    task = terms.task.model_copy(update={"input": standardized(form, sums)})
    log(INFO, "features are standardized by %d rows of %d nodes", sums.count, len(cohort.nodes))
    folder.save_terms(terms.model_copy(update={"task": task}).model_dump_json(indent=1))
    return Terms.model_validate_json(folder.terms())


def _checked(engine: Engine[Any], published: Published, private: bool) -> Published:
    """With what newcomers compare their data with; unless noise must cover all that nodes tell, or nodes are gone."""
    if private:
        return published
    cohort = engine.cohort
    assert isinstance(cohort, NodeCohort)
    if cohort.compared[0] == published.round:
        return replace(published, fitted=published.fitted | cohort.compared[1])
    try:
        return fit_by(cohort.fit, [LikenessCheck(engine.training)], published, lambda what: None)[0].published
    except StoppedError as error:
        log(WARNING, "newcomers will not be told whether their data are like the federation's: %s", error)
        return published


def write_bundle(engine: Engine[Any], task: FederationTask, path: Path, private: bool = False) -> Bundle:
    """What newcomers receive: the best row's state by validation accuracy, and all personalizers."""
    result = engine.result()
    rows = {row["row"]: row for row in result["rows"]}
    scored = {name: rows[row_name(engine.training.name, name)] for name in engine.setup.personalizers}
    default = max(scored, key=lambda name: float(scored[name].get("validation", 0)))
    summary = {key: value for key, value in result.items() if key not in ("rows", "left_out")}
    summary["validation"] = {name: row["validation"] for name, row in scored.items() if "validation" in row}
    return bundle.write(
        path,
        task=task.name,
        classes=task.classes,
        input=task.input,
        training=engine.training,
        published=_checked(engine, engine.folder.load_best(scored[default]["best_round"]), private),
        personalizers=engine.config.personalize,
        default=default,
        summary=summary,
    )


class _Log:
    """A run's progress as lines of Flower's log."""

    def begin(self, run: Engine[Any]) -> None:
        log(INFO, "%s, %d rounds, from round %d", run.training.title, run.config.rounds, run.progress.round + 1)

    def note(self, text: str) -> None:
        log(INFO, "%s", text)

    def stage(self, what: str) -> None:
        pass

    def round(self, metrics: dict[str, Any]) -> None:
        log(INFO, "%s", json.dumps(metrics))
