"""The rounds: deal the clients out, train, sum, aggregate, evaluate, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from upfl.config import Config
from upfl.contract import Published, Training
from upfl.data.federation import ROLES, Federation
from upfl.engine.cohort import Cohort, LocalCohort
from upfl.engine.evaluate import Scores, by_architecture, held_out, unscored
from upfl.engine.fitting import fit_by
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import Best, Progress, RunFolder
from upfl.engine.group import Group
from upfl.engine.local import LOSS, upload_like
from upfl.engine.setup import Setup, assemble
from upfl.environment import environment
from upfl.errors import RunError, StoppedError
from upfl.methods import row_name
from upfl.randomness import generator
from upfl.state import all_aligned, byte_size, to_device

LARGE = 2**26  # bytes of a server's state that is not copied for a checkpoint


class Observer(Protocol):
    """Who watches a run: a progress bar, a tracker, a test."""

    def begin(self, run: Engine[Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None: ...


C = TypeVar("C", bound=Cohort)


class Engine(Generic[C]):
    """A run at work in one worker. Every worker has one, with the same server state in it."""

    def __init__(self, folder: RunFolder, cohort: C) -> None:
        self.folder, self.cohort, self.group = folder, cohort, cohort.group
        self.progress = cohort.progress
        self._saved = 0  # the round that the checkpoint holds
        self._superseded: list[tuple[int, int]] = []
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None  # the checkpoint that is being written

    @classmethod
    def local(cls, folder: RunFolder, group: Group | None = None, setup: Setup | None = None) -> Engine[LocalCohort]:
        """A run whose clients' data is on this machine."""
        return Engine(folder, LocalCohort(setup or assemble(folder.config()), folder, group or Group()))

    @property
    def setup(self) -> Setup:
        return self.cohort.setup

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def training(self) -> Training[Any]:
        return self.setup.training

    @property
    def federation(self) -> Federation:
        return self.setup.federation

    @classmethod
    def standing(cls, folder: RunFolder) -> Engine[LocalCohort]:
        """A run as its last checkpoint has it, to look at: nothing is changed or removed."""
        engine = cls.local(folder)
        found = folder.load(engine.setup.device, engine.setup.training)
        if found is None:
            raise RunError(f"{folder.path}: there is no checkpoint yet; {folder.go_on} goes on")
        engine._go_on_from(found)
        return engine

    def run(self, observer: Observer | None = None) -> None:
        """From wherever the run stands to its end."""
        precision = matrix_precision(self.config.precision)
        with self.folder.lock() if self.group.leads else nullcontext(), one_thread(), precision, torch.no_grad():
            self._start()
            if observer:
                self.cohort.note = observer.note
                observer.begin(self)
            try:
                self._rounds(observer)
            finally:
                self._written()
            if self.group.leads:
                self.folder.save_result(self.result())
            self.group.barrier()

    def _rounds(self, observer: Observer | None) -> None:
        form, total = None, None
        while self.progress.round < self.config.rounds:
            if total is None or self.training.form(self.progress.round) != form:
                form, total = self.training.form(self.progress.round), self._empty_sum()
            metrics = self._round(total, observer)
            if self.group.leads:
                self._record(metrics)
            else:
                self._superseded.clear()  # the leader removes the files
            if observer:
                observer.round(metrics)

    def end_with(self, progress: Progress, facts: dict[str, Any], observer: Observer | None = None) -> None:
        """Take a state that was not trained here for that of the last round: score it, record it, end the run."""
        precision = matrix_precision(self.config.precision)
        with self.folder.lock(), one_thread(), precision, torch.no_grad():
            self.folder.add_session(environment() | {"workers": self.group.size, "after": progress.round})
            self._go_on_from(progress)
            if observer:
                observer.begin(self)
            metrics = facts | self._evaluate(observer)
            self._record(metrics)
            self._written()
            if observer:
                observer.round(metrics)
            self.folder.save_result(self.result())

    def _start(self) -> None:
        device = self.setup.device
        found = self.folder.load(device, self.setup.training)
        self.group.barrier()
        if self.group.leads:
            self.folder.roll_back(found)
            self.folder.add_session(environment() | {"workers": self.group.size, "after": found.round if found else 0})
        self.group.barrier()
        if found is None:
            server = self.training.init(generator(self.config.seed, "init"))
            found = Progress(to_device(server, device))
        if self.training.remembers and not len(found.memory_rounds):
            found.memory_rounds = torch.full((self.setup.clients,), -1)
        self._saved = found.round
        self._go_on_from(found)

    def _go_on_from(self, progress: Progress) -> None:
        self.progress = progress
        self.cohort.begin(progress)

    def _empty_sum(self) -> FixedPointSum:
        """A sum of what clients send in the next round."""
        round = self.progress.round
        server = self.training.sent(self.progress.server, round)
        like = upload_like(self.training, server, self.setup.client(0, round))
        return FixedPointSum(like, self.setup.clients, self.training.scales)

    def _round(self, total: FixedPointSum, observer: Observer | None) -> dict[str, Any]:
        started, round, progress = time.perf_counter(), self.progress.round, self.progress
        participants = self.cohort.participants(round)
        if not participants:
            raise StoppedError(
                f"round {round + 1}: of the clients that were chosen none has data; raise clients_per_round"
            )
        if observer:
            observer.stage("training")
        left_out = self.cohort.train(participants, round, total)
        if not total.count:
            self._written()
            raise StoppedError(
                f"round {round + 1}: every one of the {len(participants)} clients had to be left out "
                f"(the first: {next(iter(left_out.values()))}); "
                + (f"the checkpoint holds round {self._saved}. " if self._saved else "there is no checkpoint yet. ")
                + "A lower learning rate is the usual cure"
            )
        received = self.training.bytes_down(progress.server, round)
        progress.server = all_aligned(self.training.aggregate(progress.server, total, round))
        progress.round = round + 1
        progress.left_out += len(left_out)
        self._commit_memory([client for client in participants if client not in left_out], round)
        metrics: dict[str, Any] = {
            "round": progress.round,
            "clients": total.count,
            "left_out": [{"client": client, "reason": reason} for client, reason in left_out.items()],
            "loss": float(total[LOSS]) / total.count,
            "gradients": total.count
            * sum((phase.iterations or 0) * phase.cost for phase in self.training.phases(round)),
            "bytes_up": total.count * self.training.bytes_up({k: v for k, v in total.sizes.items() if k != LOSS}),
            "bytes_down": len(participants) * received,
            **self.training.facts(progress.server),
            "train_s": time.perf_counter() - started,
        }
        if progress.round % self.config.evaluate_every == 0 or progress.round == self.config.rounds:
            metrics |= self._evaluate(observer)
        return self._without_withheld(metrics) | {"round_s": time.perf_counter() - started} | self.cohort.facts()

    def _commit_memory(self, counted: list[int], round: int) -> None:
        if not self.training.remembers:
            return
        for client in counted:
            if (old := int(self.progress.memory_rounds[client])) >= 0:
                self._superseded.append((client, old))
            self.progress.memory_rounds[client] = round

    def _evaluate(self, observer: Observer | None) -> dict[str, Any]:
        started = time.perf_counter()
        tell = observer.stage if observer else lambda what: None
        given, facts = fit_by(self.cohort.fit, list(self.setup.personalizers.values()), self.published(), tell)
        improved, rows = False, {}
        for name, scores in self.cohort.score(given, tell).items():
            row = row_name(self.training.name, name)
            figures = {
                "validation": scores.validation,
                **scores.validation_own,
                "test": scores.test,
                "test_before": scores.before,
                "steps": scores.mean_steps,
                **by_architecture(self.federation, scores.training, scores.new),
            }
            rows[row] = self._without_withheld(figures)
            improved |= self._keep_best(row, scores)
        if improved and self.group.leads:
            self._written()
            self.folder.save_best(given.published)
        return {"rows": rows, **({"fits": facts} if facts else {}), "evaluate_s": time.perf_counter() - started}

    def published(self) -> Published:
        """What newcomers receive of the state as it is, before anything is fitted over it."""
        return Published(self.training.publish(self.progress.server), self.progress.round, self.cohort.members())

    def _keep_best(self, row: str, scores: Scores) -> bool:
        best = self.progress.best.setdefault(row, Best())
        best.test_last = scores.test
        best.test_best = max(best.test_best, scores.test)
        # Where nobody validates, nothing tells rounds apart: the last one counts.
        if scores.training[:, 2].any() and scores.validation <= best.validation:
            return False
        best.round, best.validation, best.test = self.progress.round, scores.validation, scores.test
        best.before = scores.before
        self.progress.correct |= {f"{row}.training": scores.training, f"{row}.new": scores.new}
        return True

    def _record(self, metrics: dict[str, Any]) -> None:
        self._written()
        progress = self.progress
        progress.metrics_bytes = self.folder.append_metrics(metrics)
        if progress.round % self.config.checkpoint_every == 0 or progress.round == self.config.rounds:
            if self.cohort.waits or self.training.remembers or byte_size(progress.server) > LARGE:
                self._save(progress)
            else:  # the next round touches no file that counts before it asks whether this one is written
                self._writing = self._writer.submit(self._save, progress.copied())

    def _save(self, progress: Progress) -> None:
        self.folder.save(progress)
        self._saved = progress.round
        self.folder.supersede_memory(self._superseded)
        self._superseded.clear()
        self.cohort.saved()

    def _written(self) -> None:
        """Wait for the checkpoint that is being written: where it cannot be, the run ends here."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def result(self) -> dict[str, Any]:
        """The scores, as `result.json` has them."""
        rows, metrics = [], self.folder.metrics()
        for row, best in self.progress.best.items():
            correct = {kind: self.progress.correct[f"{row}.{kind}"] for kind in ROLES}
            aside = held_out(self.federation, correct["training"])
            clients = [
                {"client": i, "kind": kind, "accuracy": 100 * after / size, "before": 100 * before / size, "size": size}
                | ({"architecture": self.federation.architecture(kind, i)} if self.federation.architectures else {})
                | ({"held_out": True} if kind == "training" and aside[i] else {})
                for kind in ROLES
                if kind == "new" or not self.cohort.summed
                for i, (before, after, size) in enumerate(correct[kind].tolist())
                if size
            ]
            figures = {
                "row": row,
                "validation": best.validation,
                **Scores(correct["training"], correct["new"], torch.empty(0), aside).validation_own,
                "test": best.test,
                "test_before": best.before,
                "test_last": best.test_last,
                "test_best": best.test_best,
                "best_round": best.round,
                **by_architecture(self.federation, correct["training"], correct["new"]),
                "clients": clients,
                **self._unscored(row, best.round),
            }
            rows.append(self._without_withheld(figures))
        return {
            "method": self.config.method,
            "dataset": self.config.dataset,
            "seed": self.config.seed,
            "partition_seed": self.config.partition_seed,
            "rounds": self.progress.round,
            "left_out": self.progress.left_out,
            **{sent: sum(line.get(sent, 0) for line in metrics) for sent in ("bytes_up", "bytes_down")},
            "notes": list(self.setup.notes),
            "rows": rows,
            **self.cohort.summary(),
        }

    def _unscored(self, row: str, round: int) -> dict[str, Any]:
        """Of new clients without labels, what can be told without them."""
        setup, limit = self.setup, self.config.evaluate_clients
        if (setup.federation.source.labels >= 0).all():
            return {}
        name = next(name for name in setup.personalizers if row_name(self.training.name, name) == row)
        published = self.folder.load_best(round)
        told = unscored(setup.population, setup.personalizers[name], published, limit)
        return {"unscored": told} if told else {}

    def _without_withheld(self, figures: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in figures.items() if name not in self.cohort.withheld}


@contextmanager
def matrix_precision(name: str) -> Iterator[None]:
    """How products of float32 matrices may be computed, where the device has a faster way; all else stays float32."""
    backends: Any = torch.backends  # whose stubs do not know the field
    before, wanted = backends.fp32_precision, "ieee" if name == "float32" else name
    if wanted == "ieee" and before == "none":  # PyTorch's own, and the same: once set, its exporter refuses to work
        yield
        return
    backends.fp32_precision = wanted
    try:
        yield
    finally:
        backends.fp32_precision = before


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread a worker: the only way to the same bits for any number of workers, and the fastest here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
