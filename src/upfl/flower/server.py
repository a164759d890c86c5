"""The ServerApp: the engine's rounds, with Flower's nodes in place of worker processes.

A training run writes the run folder that the engine writes, to the same bits if every node answers, and is resumed by
running the app again with the same `out`. A node that fails, is late, or sends what does not fit is left out of the
round and named in the metrics; a round needs `min-nodes` good replies, and is tried again before the run stops.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from pydantic import Field, model_validator

from upfl import bundle
from upfl.bundle import Bundle
from upfl.config import Config, configure
from upfl.contract import CrossFitted, Fit, needs_of
from upfl.data.federation import Federation
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.evaluate import Scores, evaluate
from upfl.engine.fitting import fit_by, plan
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.local import upload_like
from upfl.engine.rounds import Engine, Observer, assemble
from upfl.errors import BadClientError, ConfigError, StoppedError
from upfl.flower.messages import (
    ARRAYS,
    FACTS,
    NO_DATA,
    SCORES,
    arrays_of,
    exchange,
    facts_of,
    pack,
    problem_in,
    to_record,
)
from upfl.flower.privacy import CLIP, Privacy, floating, require_private
from upfl.flower.terms import (
    FederationTask,
    Table,
    Terms,
    named_federation,
    require_no_public_set,
    unseen_federation,
    without_training_clients,
)
from upfl.manifest import SUMS
from upfl.methods import load_plugins, row_name
from upfl.randomness import generator
from upfl.state import State, norm, prefixed

ATTEMPTS = 3  # at a round in which too few nodes gave good replies
BUNDLE = "bundle"  # in the run folder: what newcomers receive
STEP = 2.0  # seconds between looks for nodes

app = ServerApp()


class Settings(Table):
    """What `flwr run -c` says: the run's description is the engine's, the rest is about nodes."""

    mode: Literal["train", "personalize"] = "train"
    method: str = "fedtta"
    dataset: str = Field("digits", description="a named data set; with `task`, the one whose hyper-parameters to take")
    profile: str = "paper"
    config: Path | None = Field(None, description="a TOML file of settings, as `upfl train --config` takes it")
    set: str = Field("", description="hyper-parameters, as --set takes them, separated by spaces")
    score: str = Field("", description="further personalizers, separated by commas")
    task: Path | None = Field(None, description="a TOML file that says what nodes' own samples are")
    out: Path | None = Field(None, description="the run folder, on the SuperLink's machine; a run in it is resumed")
    min_nodes: int = Field(2, ge=1, description="fewest training nodes to begin with, and good replies to a round")
    wait: float = Field(600, gt=0, description="seconds to wait for so many nodes")
    timeout: float = Field(600, gt=0, description="seconds for a node's reply")
    largest_rms: float = Field(100, gt=0, description="a node whose values have a larger root mean square is left out")
    clip: float = Field(0, ge=0, description="differential privacy: largest norm of an update; 0 for none")
    noise: float = Field(0, ge=0, description="differential privacy: noise on the sum, in units of clip")
    delta: float = Field(1e-5, gt=0, lt=1)
    bundle: Path | None = Field(None, description="personalize: what newcomers receive, on the SuperLink's machine")

    @model_validator(mode="after")
    def _private_or_not(self) -> Settings:
        if bool(self.clip) != bool(self.noise):
            raise ConfigError("clip and noise belong together: give both, or neither")
        return self

    @property
    def privacy(self) -> Privacy | None:
        return Privacy(clip=self.clip, noise=self.noise, delta=self.delta) if self.clip else None


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = Settings.of(context.run_config, "run-config")
    load_plugins(name for name in os.environ.get("UPFL_PLUGINS", "").split(",") if name)
    if settings.mode == "train":
        train(grid, settings)
    else:
        personalize(grid, settings)


def describe(settings: Settings) -> Config:
    return configure(
        settings.method,
        settings.dataset,
        profile=settings.profile,
        file=settings.config,
        settings=settings.set.split(),
        score=[name.strip() for name in settings.score.split(",") if name.strip()],
    )


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
    require_fit(config, federation, settings.privacy)
    run = FederatedRun(_folder(settings, config, task), grid, settings, federation)
    run.run(observer or _Log())
    if not (settings.out / BUNDLE).exists():
        run.write_bundle(settings.out / BUNDLE)
    return run.folder


def require_fit(config: Config, federation: Federation, private: Privacy | None) -> None:
    """Refuse what cannot run over nodes, or not with the privacy that was asked for."""
    _, _, training, personalizers = assemble(config, torch.device("cpu"), federation)
    if training.publishes_memory:
        raise ConfigError(
            f"{training.name} cannot run on Flower: newcomers would receive training clients' own layers, "
            "which stay on the nodes; the server sees sums alone"
        )
    if config.vectorize > 1:
        raise ConfigError(f"vectorize = {config.vectorize}: a node trains one client; leave it at 1")
    plan(list(personalizers.values()), federation, config.evaluate_clients)
    if not private:
        return
    if config.checkpoint_every != 1:
        raise ConfigError("clip and noise need checkpoint_every=1: a round that ran twice would be released twice")
    if needs := needs_of(list(personalizers.values())):
        raise ConfigError(
            f"clip and noise do not cover what is fitted on nodes' labels ({', '.join(needs)}): "
            "score personalizers that need no fit"
        )
    server, client = (
        training.init(generator(config.seed, "init")),
        LocalClient(federation, Inputs(federation.source), 0, 0, 0),
    )
    require_private(upload_like(training, server, client), server, training.name)


def _folder(settings: Settings, config: Config, task: FederationTask) -> RunFolder:
    """A new run folder, or the one that is there if it holds this run."""
    path, private = settings.out, settings.privacy
    assert path is not None
    if not (path / "config.toml").exists():
        folder = RunFolder.create(path, config)
        terms = Terms(run=secrets.token_hex(16), config=config, task=task, privacy=private)
        folder.save_terms(terms.model_dump_json(indent=1))
        return folder
    folder = RunFolder.open(path)
    terms = Terms.model_validate_json(folder.terms())
    if (terms.config.to_toml(), terms.task, terms.privacy) != (config.to_toml(), task, private):
        raise ConfigError(f"{path}: holds another run than the one described; choose another out")
    return folder


class FederatedRun(Engine):
    """A run whose clients are Flower's nodes."""

    def __init__(self, folder: RunFolder, grid: Grid, settings: Settings, federation: Federation) -> None:
        super().__init__(folder, Group(), federation=federation)
        self.grid, self.settings = grid, settings
        self.terms = Terms.model_validate_json(folder.terms())
        self.privacy = self.terms.privacy
        self.nodes: dict[int, int] = {}  # each connected training node's client
        self.seen: set[int] = set()  # clients that were connected once
        self.strange: dict[int, str] = {}  # connected nodes that do not train, and why
        self._saved_memory = torch.empty(0)

    def _start(self) -> None:
        super()._start()
        self._saved_memory = self.progress.memory_rounds.clone()

    # Nodes

    def participants(self, round: int) -> list[int]:
        """The engine's choice among all clients; those that are not connected have the next ones in their place."""
        self._meet()
        order = torch.arange(self.clients)
        if (count := self.config.participants(self.clients)) < self.clients:
            order = torch.randperm(self.clients, generator=generator(self.config.seed, "participants", round))
        connected = set(self.nodes.values())
        return sorted([client for client in order.tolist() if client in connected][:count])

    def _meet(self) -> None:
        """Look who is connected, ask strangers who they are, and wait until there are enough."""
        end = time.monotonic() + self.settings.wait
        while True:
            self._look()
            if len(self.nodes) >= self.settings.min_nodes:
                return
            if time.monotonic() > end:
                others = "; ".join(f"node {node}: {why}" for node, why in self.strange.items())
                raise StoppedError(
                    f"only {len(self.nodes)} training node(s) connected within {self.settings.wait:g} s, and "
                    f"{self.settings.min_nodes} are needed (min-nodes){'. Others: ' + others if others else ''}"
                )
            time.sleep(STEP)

    def _look(self) -> None:
        present = set(self.grid.get_node_ids())
        self.nodes = {node: client for node, client in self.nodes.items() if node in present}
        self.strange = {node: why for node, why in self.strange.items() if node in present}
        strangers = sorted(present - self.nodes.keys() - self.strange.keys())
        messages = [self._message(node, "query.introduce", {}) for node in strangers]
        # Sorted: which of two nodes with one number trains must not depend on who answers first.
        for node, reply in sorted(exchange(self.grid, messages, self.settings.timeout), key=lambda answer: answer[0]):
            client = None if problem_in(reply) else facts_of(reply).get("client")
            if not isinstance(client, int) or not 0 <= client < self.clients:
                self.strange[node] = problem_in(reply) or "a newcomer: it has no client number"
            elif client in self.nodes.values():
                self.strange[node] = f"client {client} is there already"
            else:
                self.nodes[node] = client
            if why := self.strange.get(node):
                log(WARNING, "node %d does not train: %s", node, why)
        self.seen |= set(self.nodes.values())

    def _message(self, node: int, kind: str, facts: Mapping[str, Any], arrays: ArrayRecord | None = None) -> Message:
        content = RecordDict({FACTS: ConfigRecord({"terms": self.terms.model_dump_json(), **facts})})
        if arrays is not None:
            content[ARRAYS] = arrays
        return Message(content, node, kind, ttl=self.settings.timeout)

    # Rounds

    def _train(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        needed = min(self.settings.min_nodes, self.config.participants(self.clients))
        for attempt in range(1, ATTEMPTS + 1):
            total.reset(len(participants))
            left_out = self._ask(participants, round, total)
            if total.count >= needed:
                if self.privacy:
                    self.privacy.disturb(total)
                return left_out
            log(WARNING, "round %d, attempt %d: %d good replies", round + 1, attempt, total.count)
        reasons = "; ".join(f"client {client}: {why}" for client, why in left_out.items())
        raise StoppedError(
            f"round {round + 1}: {total.count} good replies at the last of {ATTEMPTS} attempts, and {needed} are "
            f"needed (min-nodes). {reasons}"
        )

    def _ask(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        node_of = {client: node for node, client in self.nodes.items()}
        facts = {"round": round} | ({CLIP: self.privacy.clip} if self.privacy else {})
        arrays = to_record(self.progress.server)
        messages = [
            self._message(node_of[client], "train", facts | self._memory_facts(client), arrays)
            for client in participants
        ]
        left_out = dict.fromkeys(participants, f"did not reply within {self.settings.timeout:g} s")
        for node, reply in exchange(self.grid, messages, self.settings.timeout):
            client = self.nodes[node]
            try:
                self._add(reply, total)
                del left_out[client]
            except BadClientError as error:
                left_out[client] = str(error)
        return left_out

    def _add(self, reply: Message, total: FixedPointSum) -> None:
        """Add what a node sent to the sum, or refuse it and change nothing."""
        up = arrays_of(reply)
        total.check(up)
        if self.privacy:
            self.privacy.check(up)
        elif (rms := root_mean_square(up)) > self.settings.largest_rms:
            raise BadClientError(f"its values have the root mean square {rms:g}, above {self.settings.largest_rms:g}")
        total.add(up)

    def _memory_facts(self, client: int) -> dict[str, int]:
        if not self.training.remembers:
            return {}
        return {"memory": int(self.progress.memory_rounds[client]), "memory_saved": int(self._saved_memory[client])}

    def _round(self, total: FixedPointSum, observer: Observer | None) -> dict[str, Any]:
        metrics = super()._round(total, observer)
        if self.privacy:
            metrics |= {"epsilon": self.privacy.epsilon(self.progress.round), "delta": self.privacy.delta}
            del metrics["loss"]  # nodes do not tell it
        absent = sorted(self.seen - set(self.nodes.values()))
        return metrics | ({"absent": absent} if absent else {})

    def _record(self, metrics: dict[str, Any]) -> None:
        super()._record(metrics)
        if self._saved == self.progress.round:
            self._saved_memory = self.progress.memory_rounds.clone()

    # Fits and scores

    def _fit(self, tell: Callable[[str], None]) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
        return fit_by(self._run_fit, list(self.personalizers.values()), self.published(), tell)

    def _run_fit(self, key: str, fit: Fit) -> tuple[State, int]:
        """The fit's rounds over the nodes: as in the engine, a fold of what they send.

        Its rounds compare sums, so they must be over the same nodes: where one fails, all is done again without it.
        """
        nodes = {node for node, client in self.nodes.items() if client < (fit.most(self._scored) or self.clients)}
        missing = 0
        while True:
            server, failed = self._try_fit(key, fit, nodes)
            if not failed:
                return server, missing
            nodes, missing = nodes - failed.keys(), missing + len(failed)
            for node, why in failed.items():
                log(WARNING, "%s is fitted without client %d: %s", key, self.nodes[node], why)

    def _try_fit(self, key: str, fit: Fit, nodes: set[int]) -> tuple[State, dict[int, str]]:
        counts = self.federation.training.counts(fit.split)
        example = self._client(next(i for i in range(self.clients) if counts[i]), 0)
        server = fit.init(generator(self.config.seed, "fit", fit.key))
        like, _ = fit.finish(server, fit.begin(server, fit.memory(example), example), example)
        total = FixedPointSum(like, self.clients, fit.scales)
        given, versions = pack(fit.given), dict.fromkeys(sorted(nodes), -1)
        for round in range(fit.rounds):
            facts = {"key": key, "round": fit.given.published.round, "fit_round": round}
            arrays = to_record(given | prefixed("fit", server))
            messages = [
                self._message(node, "train.fit", facts | {"memory": version}, arrays)
                for node, version in versions.items()
            ]
            failed = dict.fromkeys(versions, f"did not reply within {self.settings.timeout:g} s")
            total.reset(self.clients)
            for node, reply in exchange(self.grid, messages, self.settings.timeout):
                if not problem_in(reply) and facts_of(reply).get(NO_DATA):
                    del versions[node], failed[node]
                    continue
                try:
                    total.add(fit.checked(arrays_of(reply)))
                    versions[node] = round
                    del failed[node]
                except BadClientError as error:
                    failed[node] = str(error)
            if failed:
                return server, failed
            if not total.count:
                raise StoppedError(f"{key} cannot be fitted: no node that is left has {fit.split} data")
            server = fit.aggregate(server, total, round)
            if fit.done(server):
                break
        return server, {}

    @property
    def _scored(self) -> int:
        """Clients below this number are scored."""
        return self.config.evaluate_clients or self.clients

    def _score(self, given: CrossFitted, observer: Observer | None) -> dict[str, Scores]:
        """Validation on the nodes, unless privacy forbids it; new clients of a named data set here."""
        if observer:
            observer.stage("scoring")
        validation = {name: torch.zeros(self.clients, 3, dtype=torch.int64) for name in self.personalizers}
        if not self.privacy:
            for client, counts in self._validate(given):
                for name, count in counts.items():
                    validation[name][client] = torch.tensor(count)
        new = without_training_clients(self.federation)
        scores = {}
        for name, personalizer in self.personalizers.items():
            found = evaluate(
                new,
                self.inputs,
                personalizer,
                given,
                self.config.seed,
                self.group,
                limit=self.config.evaluate_clients,
            )
            scores[name] = Scores(validation[name], found.new, found.steps)
        return scores

    def _validate(self, given: CrossFitted) -> Iterator[tuple[int, dict[str, list[int]]]]:
        arrays = to_record(pack(given))
        messages = [
            self._message(node, "evaluate", {"round": given.published.round} | self._memory_facts(client), arrays)
            for node, client in self.nodes.items()
            if client < self._scored
        ]
        for node, reply in exchange(self.grid, messages, self.settings.timeout):
            counts = {} if problem_in(reply) else dict(reply.content.metric_records.get(SCORES) or {})
            if counts.keys() == self.personalizers.keys() and all(map(_are_counts, counts.values())):
                yield self.nodes[node], counts  # type: ignore[misc]
            elif counts or problem_in(reply):
                log(
                    WARNING,
                    "client %d has no validation scores: %s",
                    self.nodes[node],
                    problem_in(reply) or "no counts",
                )

    def _keep_best(self, row: str, scores: Scores) -> bool:
        if not int(scores.training[:, 2].sum()):
            self.progress.best.pop(row, None)  # nothing tells rounds apart: the last one counts
        return super()._keep_best(row, scores)

    def _unscored(self) -> tuple[str, ...]:
        unseen = not len(self.federation.new)
        return (*(["validation"] if self.privacy else []), *(NEW_CLIENTS if unseen else []))

    def _evaluate(self, observer: Observer | None) -> dict[str, Any]:
        metrics = super()._evaluate(observer)
        for row in metrics["rows"].values():
            for key in self._unscored():
                row.pop(key, None)
        return metrics

    def result(self) -> dict[str, Any]:
        result = super().result()
        for row in result["rows"]:
            for key in self._unscored():
                row.pop(key, None)
        if self.privacy:
            spent = self.privacy.epsilon(self.progress.round)
            result["privacy"] = {**self.privacy.model_dump(), "epsilon": spent, "rounds": self.progress.round}
        return result

    def write_bundle(self, path: Path) -> Bundle:
        """What newcomers receive: the best row's state by validation accuracy, and all personalizers."""
        result = self.result()
        rows = {row["row"]: row for row in result["rows"]}
        scored = {name: rows[row_name(self.training.name, name)] for name in self.personalizers}
        default = max(scored, key=lambda name: float(scored[name].get("validation", 0)))
        summary = {key: value for key, value in result.items() if key not in ("rows", "left_out")}
        summary["validation"] = {name: row["validation"] for name, row in scored.items() if "validation" in row}
        return bundle.write(
            path,
            task=self.terms.task.name,
            classes=self.terms.task.classes,
            input=self.terms.task.input,
            training=self.training,
            published=self.folder.load_best(scored[default]["best_round"]),
            personalizers=self.config.personalize,
            default=default,
            summary=summary,
        )


def personalize(grid: Grid, settings: Settings) -> list[dict[str, Any]]:
    """Hand the bundle to nodes that are newcomers; returns what they let us know."""
    if settings.bundle is None:
        raise ConfigError("bundle: give the path of a bundle on the SuperLink's machine (a training run's OUT/bundle)")
    manifest = Bundle.load(settings.bundle).manifest  # checks it
    if manifest.members:
        raise ConfigError(f"{settings.bundle}: holds training clients' own layers; hand it on yourself, if they agree")
    files = {name: (settings.bundle / name).read_bytes() for name in [*manifest.files(), SUMS]}
    arrays = ArrayRecord({name: Array(np.frombuffer(content, np.uint8)) for name, content in files.items()})
    facts = ConfigRecord({"config": describe(settings).model_dump_json()})
    asked: set[int] = set()
    told: list[dict[str, Any]] = []
    end = time.monotonic() + settings.wait
    while sum("samples" in newcomer for newcomer in told) < settings.min_nodes and time.monotonic() < end:
        if asked:
            time.sleep(STEP)
        nodes = sorted(set(grid.get_node_ids()) - asked)
        messages = [
            Message(RecordDict({FACTS: facts, ARRAYS: arrays}), node, "query.personalize", ttl=settings.timeout)
            for node in nodes
        ]
        asked |= set(nodes)
        for node, reply in exchange(grid, messages, settings.timeout):
            if problem := problem_in(reply):
                told.append({"node": node, "problem": problem})
            elif not facts_of(reply).get(NO_DATA):
                told.append({"node": node, **facts_of(reply)})
    for newcomer in told:
        log(INFO, "%s", json.dumps(newcomer))
    if not any("samples" in newcomer for newcomer in told):
        raise StoppedError(f"no newcomer personalized within {settings.wait:g} s (of {len(asked)} nodes asked)")
    return told


NEW_CLIENTS = ("test", "test_before", "test_last", "test_best", "steps")


def root_mean_square(up: State) -> float:
    values = floating(up)
    return float(norm(values)) / math.sqrt(max(sum(value.numel() for value in values), 1))


def _are_counts(counts: Any) -> bool:
    whole = isinstance(counts, list) and len(counts) == 3 and all(type(count) is int for count in counts)
    return whole and 0 <= counts[0] <= counts[2] < 2**32 and 0 <= counts[1] <= counts[2]


class _Log:
    """A run's progress as lines of Flower's log."""

    def begin(self, run: Engine) -> None:
        log(INFO, "%s, %d rounds, from round %d", run.training.title, run.config.rounds, run.progress.round + 1)

    def note(self, text: str) -> None:
        log(INFO, "%s", text)

    def stage(self, what: str) -> None:
        pass

    def round(self, metrics: dict[str, Any]) -> None:
        log(INFO, "%s", json.dumps(metrics))
