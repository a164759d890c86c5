"""Fitting over a trained model: the fold of a training's round, with what clients remember kept in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from upfl.contract import CrossFitted, Fit, HasNeeds, Published, needs_of
from upfl.data.federation import Federation
from upfl.engine.clients import LocalClient, Population
from upfl.engine.fold import FixedPointSum
from upfl.engine.group import Group
from upfl.errors import BadClientError, ConfigError, StoppedError
from upfl.randomness import generator
from upfl.state import State, all_aligned


class Schedule:
    """What is to be fitted, in an order in which it can be; and what was fitted so far, with facts for the metrics."""

    def __init__(self, personalizers: Sequence[HasNeeds], published: Published, tell: Callable[[str], None]) -> None:
        self.given, self.facts, self.tell = CrossFitted(published), dict[str, dict[str, float]](), tell
        self._waiting = needs_of(personalizers)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        """How many fits have not begun."""
        return len(self._waiting)

    def first(self) -> tuple[str, Fit] | None:
        """The next fit by itself: all that it stands on must have been finished."""
        return self._begun(next(iter(self._waiting))) if self._waiting else None

    def ready(self) -> dict[str, Fit]:
        """All fits whose clients' part can be computed by now; their sums are to be read in this order."""
        chosen: list[str] = []
        for key, need in self._waiting.items():
            # What tells how to read the sums must be there by then: from before, or from the same round.
            known = {*self.facts, *(other for other in chosen if self._waiting[other].kind.rounds == 1)}
            if known >= set(need.read_by) and self.facts.keys() >= set(need.after or ()):
                chosen.append(key)
        return dict(self._begun(key) for key in chosen)

    def _begun(self, key: str) -> tuple[str, Fit]:
        self.tell(f"fitting {key}")
        return key, self._waiting.pop(key).stage(self.given)

    def finished(self, key: str, fit: Fit, server: State, left_out: int) -> None:
        self.given = self.given.plus(fit.results(server))
        self.facts[key] = fit.facts(server) | ({"left_out": left_out} if left_out else {})


def fit_needs(
    personalizers: Sequence[HasNeeds],
    published: Published,
    population: Population,
    group: Group,
    tell: Callable[[str], None] = lambda what: None,
) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
    """Fit what the personalizers need on the training clients of a federation that is here."""
    require_data(personalizers, population.federation)

    def by_workers(schedule: Schedule) -> None:
        run_fits(schedule, population.training, population.federation, None, population.seed, group)

    return fit_by(by_workers, personalizers, published, tell)


def fit_by(
    run: Callable[[Schedule], None],
    personalizers: Sequence[HasNeeds],
    published: Published,
    tell: Callable[[str], None],
) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
    """Fit what the personalizers need. Returns what was fitted, with facts about each fit for the metrics."""
    schedule = Schedule(personalizers, published, tell)
    run(schedule)
    return schedule.given, schedule.facts


def run_fits(
    schedule: Schedule,
    client: Callable[[int], LocalClient],
    federation: Federation,
    limit: int | None,
    seed: int,
    group: Group,
) -> None:
    """All fits of a schedule on clients that are here, one after the other: so only one has its memories."""
    while (begun := schedule.first()) is not None:
        key, fit = begun
        clients = [client(id) for id in clients_of(type(fit), federation, limit)]
        schedule.finished(key, fit, *run_fit(fit, clients, seed, group))


def require_data(personalizers: Sequence[HasNeeds], federation: Federation, limit: int | None = None) -> None:
    """Refuse personalizers for which something must be fitted on data that no client has."""
    for key, need in needs_of(personalizers).items():
        if not clients_of(need.kind, federation, limit):
            other = "larger" if need.kind.split == "validation" else "smaller"
            raise ConfigError(
                f"'{key}' is fitted on training clients' {need.kind.split} data, and there is none: "
                f"take a {other} partition.validation, or personalizers that need no fit"
            )


def clients_of(kind: type[Fit], federation: Federation, limit: int | None = None) -> list[int]:
    """The clients that a fit is made on: all that trained, or of the first `limit` those that validate.

    Clients that are held out have a part in no fit: their labels choose the round, and nothing else.
    """
    held = federation.training.counts(kind.split) * ~federation.training.held_out
    return [int(i) for i in np.flatnonzero(held[: kind.most(limit)])]


def run_fit(fit: Fit, clients: list[LocalClient], seed: int, group: Group) -> tuple[State, int]:
    """A fit's rounds over clients that are dealt out among the workers once; and how many clients were left out."""
    counts = clients[0].federation.training.counts(fit.split)
    ours = group.share(clients, [int(counts[client.id]) for client in clients])
    memories = {client.id: fit.memory(client) for client in ours}
    refused: set[int] = set()

    example = ours[0] if ours else clients[0]
    fitting = Fitting(fit, example, memories.get(example.id) or fit.memory(example), len(clients), seed)
    total = fitting.total
    while not fitting.done:
        total.reset(len(clients))
        for client in ours:
            group.check()
            asked = replace(client, round=fitting.round)
            up, memories[client.id] = fit_client(fit, fitting.server, memories[client.id], asked)
            try:
                total.add(fit.checked(up))
            except BadClientError:
                refused.add(client.id)
        group.sum_(total.buffer)
        total.merged()
        if not total.count:
            raise StoppedError(f"{fit.key}: what every client sent was not finite or too large; the model has diverged")
        fitting.aggregate()
    left_out = torch.tensor([len(refused)])
    group.sum_(left_out)
    return fitting.server, int(left_out)


class Fitting:
    """A fit under way, over at most so many clients: the server's state, and the sum that a round's parts go into.

    What clients send has the form of what the example, with its memory, would send.
    """

    def __init__(self, fit: Fit, example: LocalClient, memory: State, clients: int, seed: int) -> None:
        self.fit = fit
        self._start = fit.init(generator(seed, "fit", fit.key))
        like, _ = fit.finish(self._start, fit.begin(self._start, memory, example), example)
        self.total = FixedPointSum(like, clients, fit.scales)
        self.restart()

    def restart(self) -> None:
        self.server, self.round, self.done = self._start, 0, False

    def aggregate(self, others: bool = False) -> None:
        """The end of a round, whose sum may be over others than those of the rounds before."""
        server = self.fit.over_others(self.server) if others else self.server
        self.server = self.fit.aggregate(server, self.total, self.round)
        self.round += 1
        self.done = self.round == self.fit.rounds or self.fit.done(self.server)


def fit_client(fit: Fit, server: State, memory: State, client: LocalClient) -> tuple[Mapping[str, Tensor], State]:
    """A client's part in a round of a fit: what goes up, what it keeps."""
    server = all_aligned(server)
    carry = all_aligned(fit.begin(server, all_aligned(memory), client))
    for phase in fit.phases(client.round):
        for batch in client.phase(phase):
            carry, _ = phase.step(carry, batch, client.round)
    return fit.finish(server, carry, client)
