"""The clients of a run, as the engine's rounds see them: here worker processes train them, in `flower/` nodes do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.contract import CrossFitted
from upfl.engine.clients import LocalClient
from upfl.engine.evaluate import Scores, evaluate
from upfl.engine.fitting import Schedule, run_fits
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import Progress, RunFolder
from upfl.engine.group import Group
from upfl.engine.local import train_clients
from upfl.engine.recorded import steps_of
from upfl.engine.setup import Setup
from upfl.errors import BadClientError
from upfl.methods import row_name
from upfl.models import compiled
from upfl.randomness import generator
from upfl.state import State, all_aligned

LEFT_OUT = {1: "its loss is not finite", 2: "its update is not finite, too large, or not of the expected form"}
NEW_CLIENTS = frozenset({"test", "test_before", "test_last", "test_best", "steps"})  # figures about new clients
Tell = Callable[[str], None]


class Cohort(ABC):
    """Who takes part in a round, how clients train, how something is fitted on them, how they are scored."""

    withheld: frozenset[str] = frozenset()  # figures that these clients do not tell, by their names in the metrics
    waits = True  # whether a round begins only when the checkpoint of the one before it is written
    summed = False  # whether training clients' scores are known as sums only, each in the place of one client

    def __init__(self, setup: Setup, group: Group) -> None:
        self.setup, self.group = setup, group
        self.note: Tell = lambda text: None  # for whoever watches the run
        self.progress = Progress(server={})

    def begin(self, progress: Progress) -> None:
        """The run goes on from here. The engine advances this very object."""
        self.progress = progress

    def saved(self) -> None:  # noqa: B027 - few cohorts care
        """A checkpoint now holds the progress."""

    @abstractmethod
    def participants(self, round: int) -> list[int]:
        """The clients that take part in a round."""

    def order(self, round: int) -> tuple[NDArray[np.int64], int]:
        """All that may train, in the order in which they are chosen for a round, and how many of them are."""
        clients = np.flatnonzero(~self.setup.federation.training.held_out)
        count = self.setup.config.participants(len(clients))
        if self.setup.training.in_turn and count < len(clients):
            turn = np.array(self.setup.training.turn(round), np.int64)
            return turn, len(turn)
        drawn = torch.randperm(len(clients), generator=generator(self.setup.config.seed, "participants", round))
        return clients[drawn.numpy()], count

    @abstractmethod
    def train(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        """Have clients train, and form the sum of what they send; returns who was left out, and why."""

    @abstractmethod
    def fit(self, schedule: Schedule) -> None:
        """Run the rounds of all fits of a schedule."""

    @abstractmethod
    def score(self, given: CrossFitted, tell: Tell) -> dict[str, Scores]:
        """Every personalizer's scores on every client."""

    def members(self) -> Sequence[State]:
        """Training clients' own layers, for trainings that hand them out."""
        return ()

    def facts(self) -> dict[str, Any]:
        """What belongs into a round's metrics beside the engine's own figures."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What belongs into the run's result beside the engine's own figures."""
        return {}


class LocalCohort(Cohort):
    """Clients of a federation whose data is on this machine, dealt out among the workers of a group."""

    waits = False

    def __init__(self, setup: Setup, folder: RunFolder, group: Group) -> None:
        super().__init__(setup, group)
        self.folder = folder
        limit, federation = setup.config.evaluate_clients, setup.federation
        if not any(federation.has_labels(i) for i in range(len(federation.new))[:limit]):
            self.withheld = NEW_CLIENTS
        self.steps = steps_of(setup.training, setup.device, lambda text: self.note(text))

    def participants(self, round: int) -> list[int]:
        held = self.setup.federation.training.train_counts
        return [client for client in self._chosen(round) if held[client]]

    def _chosen(self, round: int) -> list[int]:
        """Those whose turn it is; clients that have left may be among them."""
        order, count = self.order(round)
        return sorted(order[:count].tolist())  # a list of all of a million clients would cost as much as many rounds

    def train(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        failures = torch.zeros(len(participants), dtype=torch.int64)
        total.reset(len(participants))
        together = self.setup.config.vectorize  # groups do not depend on the number of workers, nor do their bits
        starts = range(0, len(participants), together)
        work = self._work(participants, round)
        for start in self.group.share(starts, [sum(work[start : start + together]) for start in starts]):
            self.group.check()
            members = participants[start : start + together]
            failures[start : start + together] = torch.tensor(self._train_clients(members, round, total))
        self.group.sum_(total.buffer)
        self.group.sum_(failures)
        total.merged()
        return {client: LEFT_OUT[int(code)] for client, code in zip(participants, failures, strict=True) if code}

    def _work(self, clients: list[int], round: int) -> list[float]:
        """About how much each client has to do: how many samples it takes a gradient of."""
        phases = [(phase.iterations, phase.batch_size, phase.cost) for phase in self.setup.training.phases(round)]
        return [
            sum(cost * (iterations * min(count, size) if iterations else count) for iterations, size, cost in phases)
            for count in self.setup.federation.training.train_counts[clients].tolist()
        ]

    def _train_clients(self, ids: Sequence[int], round: int, total: FixedPointSum) -> list[int]:
        """Train clients and add what they send to the sum; for each 0, or the reason why it was left out."""
        clients = [self.setup.client(id, round) for id in ids]
        memories = [self.memory(id) for id in ids]
        server = self.setup.training.sent(self.progress.server, round)
        results = train_clients(self.setup.training, server, memories, clients, self.steps)
        return [self._count_in(client, result, total) for client, result in zip(clients, results, strict=True)]

    def _count_in(
        self, client: LocalClient, result: tuple[Mapping[str, Tensor], State] | BadClientError, total: FixedPointSum
    ) -> int:
        if isinstance(result, BadClientError):
            return 1
        up, memory = result
        try:
            with compiled.used():
                total.add(self.setup.training.checked(up))
        except BadClientError:
            return 2
        if self.setup.training.remembers:
            self.folder.save_memory(client.id, client.round, memory)
        return 0

    def memory(self, id: int) -> State:
        """What a client remembers; before it first takes part, what it starts with."""
        training = self.setup.training
        if not training.remembers:
            return {}
        version = int(self.progress.memory_rounds[id])
        if version >= 0:
            return self.folder.load_memory(id, version, self.setup.device)
        return all_aligned(training.memory(self.setup.client(id, 0)))

    def own_memory(self, id: int) -> State | None:
        """What a training client's own model is made of, where that is its memory."""
        if not self.setup.training.starts_from_memory or self.setup.federation.training.held_out[id]:
            return None
        return self.memory(id)

    def members(self) -> Sequence[State]:
        return _Members(self) if self.setup.training.publishes_memory else ()

    def fit(self, schedule: Schedule) -> None:
        setup = self.setup
        limit, seed = setup.config.evaluate_clients, setup.config.seed
        run_fits(schedule, lambda id: setup.client(id, 0), setup.federation, limit, seed, self.group)

    def score(self, given: CrossFitted, tell: Tell) -> dict[str, Scores]:
        scores = {}
        for name, personalizer in self.setup.personalizers.items():
            tell(f"scoring {row_name(self.setup.training.name, name)}")
            limit = self.setup.config.evaluate_clients
            scores[name] = evaluate(self.setup.population, personalizer, given, self.group, self.own_memory, limit)
        return scores


class _Members(Sequence[State]):
    """The memories of all training clients that have trained, each read when it is asked for."""

    def __init__(self, cohort: LocalCohort) -> None:
        self.cohort = cohort
        self.trained = (cohort.progress.memory_rounds >= 0).nonzero().flatten().tolist()

    def __len__(self) -> int:
        return len(self.trained)

    def __getitem__(self, member: Any) -> Any:
        return self.cohort.memory(self.trained[member])
