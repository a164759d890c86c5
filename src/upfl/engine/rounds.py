"""The rounds: deal the clients out, train, sum, aggregate, evaluate, commit."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from upfl import data
from upfl.config import Config
from upfl.contract import CrossFitted, Personalizer, Published, Task, Training
from upfl.data.federation import ROLES, Federation
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.evaluate import Scores, by_architecture, evaluate
from upfl.engine.fitting import fit_needs, plan
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import Best, Progress, RunFolder
from upfl.engine.group import Group
from upfl.engine.local import LOSS, train_clients, upload_like
from upfl.engine.recorded import steps_of
from upfl.environment import environment
from upfl.errors import BadClientError, ConfigError, RunError, StoppedError
from upfl.methods import make_personalizer, make_training, personalizer_class, row_name, training_class
from upfl.randomness import generator
from upfl.state import State, all_aligned

LEFT_OUT = {1: "its loss is not finite", 2: "its update is not finite, too large, or not of the expected form"}


class Observer(Protocol):
    """Who watches a run: a progress bar, a tracker, a test."""

    def begin(self, run: Engine) -> None: ...

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None: ...


class Engine:
    """A run at work in one worker. Every worker has one, with the same server state in it."""

    def __init__(
        self, folder: RunFolder, group: Group, config: Config | None = None, federation: Federation | None = None
    ) -> None:
        self.folder, self.group = folder, group
        self.config = config or folder.config()
        self.device = checked_device(self.config.device)
        self.federation, self.inputs, self.training, self.personalizers = assemble(self.config, self.device, federation)
        self.clients = len(self.federation.training)
        self.steps = steps_of(self.training, self.device)
        self.progress = Progress(server={})
        self._saved = 0  # the round that the checkpoint holds
        self._superseded: list[tuple[int, int]] = []

    @classmethod
    def standing(cls, folder: RunFolder) -> Engine:
        """A run as its last checkpoint has it, to look at: nothing is changed or removed."""
        engine = cls(folder, Group())
        found = folder.load(engine.device)
        if found is None:
            raise RunError(f"{folder.path}: there is no checkpoint yet; `upfl resume {folder.path}` goes on")
        engine.progress = found
        return engine

    def run(self, observer: Observer | None = None) -> None:
        """From wherever the run stands to its end."""
        precision = matrix_precision(self.config.precision)
        with self.folder.lock() if self.group.leads else nullcontext(), one_thread(), precision, torch.no_grad():
            self._start()
            if observer:
                observer.begin(self)
            like = upload_like(self.training, self.progress.server, self._client(0, 0))
            total = FixedPointSum(like, self.clients, self.training.scales)
            while self.progress.round < self.config.rounds:
                metrics = self._round(total, observer)
                if self.group.leads:
                    self._record(metrics)
                else:
                    self._superseded.clear()  # the leader removes the files
                if observer:
                    observer.round(metrics)
            if self.group.leads:
                self.folder.save_result(self.result())
            self.group.barrier()

    def _start(self) -> None:
        found = self.folder.load(self.device)
        self.group.barrier()
        if self.group.leads:
            self.folder.roll_back(found)
            self.folder.add_session(environment() | {"workers": self.group.size, "after": found.round if found else 0})
        self.group.barrier()
        if found is None:
            server = self.training.init(generator(self.config.seed, "init"))
            found = Progress({name: value.to(self.device) for name, value in server.items()})
        if self.training.remembers and not len(found.memory_rounds):
            found.memory_rounds = torch.full((self.clients,), -1)
        self.progress, self._saved = found, found.round

    def _round(self, total: FixedPointSum, observer: Observer | None) -> dict[str, Any]:
        started, round, progress = time.perf_counter(), self.progress.round, self.progress
        participants = self.participants(round)
        if observer:
            observer.stage("training")
        left_out = self._train(participants, round, total)
        if not total.count:
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
            "gradients": total.count * sum(phase.iterations * phase.cost for phase in self.training.phases(round)),
            "bytes_up": total.count * self.training.bytes_up({k: v for k, v in total.sizes.items() if k != LOSS}),
            "bytes_down": len(participants) * received,
            **self.training.facts(progress.server),
            "train_s": time.perf_counter() - started,
        }
        if progress.round % self.config.evaluate_every == 0 or progress.round == self.config.rounds:
            metrics |= self._evaluate(observer)
        return metrics | {"round_s": time.perf_counter() - started}

    def participants(self, round: int) -> list[int]:
        count = self.config.participants(self.clients)
        if count == self.clients:
            return list(range(self.clients))
        chosen = torch.randperm(self.clients, generator=generator(self.config.seed, "participants", round))[:count]
        return sorted(chosen.tolist())

    def _train(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        """Have clients train, and form the sum of what they send; returns who was left out, and why."""
        failures = torch.zeros(len(participants), dtype=torch.int64)
        total.reset(len(participants))
        together = self.config.vectorize  # groups do not depend on the number of workers, nor do their bits
        for start in self.group.share(range(0, len(participants), together)):
            self.group.check()
            members = participants[start : start + together]
            failures[start : start + together] = torch.tensor(self._train_clients(members, round, total))
        self.group.sum_(total.buffer)
        self.group.sum_(failures)
        total.merged()
        return {client: LEFT_OUT[int(code)] for client, code in zip(participants, failures, strict=True) if code}

    def _train_clients(self, ids: Sequence[int], round: int, total: FixedPointSum) -> list[int]:
        """Train clients and add what they send to the sum; for each 0, or the reason why it was left out."""
        clients = [self._client(id, round) for id in ids]
        memories = [self.memory(id) for id in ids]
        results = train_clients(self.training, self.progress.server, memories, clients, self.steps)
        return [self._count_in(client, result, total) for client, result in zip(clients, results, strict=True)]

    def _count_in(
        self, client: LocalClient, result: tuple[Mapping[str, Tensor], State] | BadClientError, total: FixedPointSum
    ) -> int:
        if isinstance(result, BadClientError):
            return 1
        up, memory = result
        try:
            total.add(up)
        except BadClientError:
            return 2
        if self.training.remembers:
            self.folder.save_memory(client.id, client.round, memory)
        return 0

    def memory(self, id: int) -> State:
        """What a client remembers; before it first takes part, what it starts with."""
        if not self.training.remembers:
            return {}
        version = int(self.progress.memory_rounds[id])
        if version >= 0:
            return self.folder.load_memory(id, version, self.device)
        return all_aligned(self.training.memory(self._client(id, 0)))

    def _commit_memory(self, counted: list[int], round: int) -> None:
        if not self.training.remembers:
            return
        for client in counted:
            if (old := int(self.progress.memory_rounds[client])) >= 0:
                self._superseded.append((client, old))
            self.progress.memory_rounds[client] = round

    def _evaluate(self, observer: Observer | None) -> dict[str, Any]:
        started = time.perf_counter()
        given, facts = self._fit(observer.stage if observer else lambda what: None)
        improved, rows = False, {}
        for name, scores in self._score(given, observer).items():
            row = row_name(self.training.name, name)
            rows[row] = {
                "validation": scores.validation,
                "test": scores.test,
                "test_before": scores.before,
                "steps": scores.mean_steps,
                **by_architecture(self.federation, scores.training, scores.new),
            }
            improved |= self._keep_best(row, scores)
        if improved and self.group.leads:
            self.folder.save_best(given.published)
        return {"rows": rows, **({"fits": facts} if facts else {}), "evaluate_s": time.perf_counter() - started}

    def _fit(self, tell: Callable[[str], None]) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
        """What newcomers receive, with what the personalizers need to have fitted, and facts about the fits."""
        return fit_needs(
            list(self.personalizers.values()),
            self.published(),
            self.federation,
            self.inputs,
            self.config.seed,
            self.group,
            self.config.evaluate_clients,
            tell,
        )

    def _score(self, given: CrossFitted, observer: Observer | None) -> dict[str, Scores]:
        """Every personalizer's scores on every client."""
        scores = {}
        for name, personalizer in self.personalizers.items():
            if observer:
                observer.stage(f"scoring {row_name(self.training.name, name)}")
            scores[name] = evaluate(
                self.federation,
                self.inputs,
                personalizer,
                given,
                self.config.seed,
                self.group,
                lambda id: self.memory(id) if self.training.starts_from_memory else None,
                self.config.evaluate_clients,
            )
        return scores

    def published(self) -> Published:
        """What newcomers receive of the state as it is, before anything is fitted over it."""
        members = _Members(self) if self.training.publishes_memory else ()
        return Published(self.training.publish(self.progress.server), self.progress.round, members)

    def _keep_best(self, row: str, scores: Scores) -> bool:
        best = self.progress.best.setdefault(row, Best())
        best.test_last = scores.test
        best.test_best = max(best.test_best, scores.test)
        if scores.validation <= best.validation:
            return False
        best.round, best.validation, best.test = self.progress.round, scores.validation, scores.test
        best.before = scores.before
        self.progress.correct |= {f"{row}.training": scores.training, f"{row}.new": scores.new}
        return True

    def _record(self, metrics: dict[str, Any]) -> None:
        progress = self.progress
        progress.metrics_bytes = self.folder.append_metrics(metrics)
        if progress.round % self.config.checkpoint_every == 0 or progress.round == self.config.rounds:
            self.folder.save(progress)
            self._saved = progress.round
            self.folder.remove_memory(self._superseded)
            self._superseded.clear()

    def result(self) -> dict[str, Any]:
        """The scores, as `result.json` has them."""
        rows, metrics = [], self.folder.metrics()
        for row, best in self.progress.best.items():
            correct = {kind: self.progress.correct[f"{row}.{kind}"] for kind in ROLES}
            clients = [
                {"client": i, "kind": kind, "accuracy": 100 * after / size, "before": 100 * before / size, "size": size}
                | ({"architecture": self.federation.architecture(kind, i)} if self.federation.architectures else {})
                for kind in ROLES
                for i, (before, after, size) in enumerate(correct[kind].tolist())
                if size
            ]
            rows.append(
                {
                    "row": row,
                    "validation": best.validation,
                    "test": best.test,
                    "test_before": best.before,
                    "test_last": best.test_last,
                    "test_best": best.test_best,
                    "best_round": best.round,
                    **by_architecture(self.federation, correct["training"], correct["new"]),
                    "clients": clients,
                }
            )
        return {
            "method": self.config.method,
            "dataset": self.config.dataset,
            "seed": self.config.seed,
            "partition_seed": self.config.partition_seed,
            "rounds": self.progress.round,
            "left_out": self.progress.left_out,
            **{sent: sum(line[sent] for line in metrics) for sent in ("bytes_up", "bytes_down")},
            "notes": list(self.federation.notes),
            "rows": rows,
        }

    def _client(self, id: int, round: int) -> LocalClient:
        return LocalClient(self.federation, self.inputs, self.config.seed, id, round)


class _Members(Sequence[State]):
    """The memories of all training clients that have trained, each read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trained = (engine.progress.memory_rounds >= 0).nonzero().flatten().tolist()

    def __len__(self) -> int:
        return len(self.trained)

    def __getitem__(self, member: Any) -> Any:
        return self.engine.memory(self.trained[member])


def assemble(
    config: Config, device: torch.device, federation: Federation | None = None
) -> tuple[Federation, Inputs, Training[Any], dict[str, Personalizer[Any]]]:
    """What a configuration describes, as objects; refuses what could not be scored after the training.

    A federation whose data come from elsewhere is given; whoever gives it knows who can be scored.
    """
    given = federation
    if federation is None:
        source = data.load(config.dataset)
        federation = data.build_federation(source, config.partition, config.partition_seed, config.model.sizes)
    source = federation.source
    inputs = Inputs(source, device)
    (_, channels, height, breadth), classes = source.images.shape, len(source.class_names)
    shape, kind = (channels, height, breadth), training_class(config.training_name)
    task = Task(
        model=config.model.build(shape, classes),
        classes=classes,
        clients=len(federation.training),
        architectures=config.model.architectures(shape, classes),
        public=inputs.x(federation.public).contiguous() if kind.heterogeneous else None,
    )
    training = make_training(config.training_name, task, config.training_hyper())
    if config.vectorize > 1 and not training.vectorizes:
        raise ConfigError(f"vectorize = {config.vectorize}: {training.name} trains one client at a time; leave it at 1")
    personalizers = {
        name: make_personalizer(name, training, personalizer_class(name).Hyper(**values))
        for name, values in config.personalize.items()
    }
    if given is None:
        plan(list(personalizers.values()), federation, config.evaluate_clients)
    return federation, inputs, training, personalizers


def checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError("not a device that computes")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{name}' cannot be used on this machine: {reason}. Take --device cpu") from error
    return device


@contextmanager
def matrix_precision(name: str) -> Iterator[None]:
    """How products of float32 matrices may be computed, where the device has a faster way; all else stays float32."""
    backends: Any = torch.backends  # whose stubs do not know the field
    before = backends.fp32_precision
    backends.fp32_precision = "ieee" if name == "float32" else name
    try:
        yield
    finally:
        backends.fp32_precision = before


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread a worker: the only way to the same bits for any number of workers, and the fastest here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have glibc reuse freed blocks: a step's tensors would be mapped and zeroed anew by the kernel each time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
