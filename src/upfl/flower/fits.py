"""Fits over Flower's nodes: each message asks for a round of every fit whose turn it is.

So an evaluation takes as many messages as its longest chain of sums, and not as many as all of its sums. A node that
fails is left out of all that is fitted after that, until the next evaluation. The sums of a fit's rounds are compared
with each other, so they must be over the same nodes: the fits that are under way begin anew without it. Secure sums do
not: two sums of the same over different nodes would tell their difference. And whether a node has a part in a fit, its
own data decide, never a word of the server, which could make a sum of one out of a sum of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, Message
from flwr.common.logger import log

from upfl.contract import Fit
from upfl.engine.fitting import Fitting, Schedule, clients_of
from upfl.engine.fold import FixedPointSum
from upfl.engine.setup import Setup
from upfl.errors import BadClientError, StoppedError
from upfl.flower.messages import FIT, NO_DATA, arrays_of, facts_of, pack, problem_in, to_record
from upfl.state import State, prefixed, select


class Nodes(Protocol):
    """The nodes of a run, as fits see them."""

    setup: Setup
    nodes: dict[int, int]  # each connected training node's client
    sums: Any  # SecureSums, where sums are secure

    @property
    def late(self) -> str: ...

    def message(self, node: int, kind: str, facts: Mapping[str, Any], arrays: ArrayRecord | None = None) -> Message: ...

    def exchange(self, sent: Sequence[Message], what: str) -> Iterator[tuple[int, Message]]: ...

    def work(self, work: str, round: int, facts: Mapping[str, Any], arrays: ArrayRecord, title: str = "") -> Any: ...


class NodeFitting(Fitting):
    """A fit under way over nodes, by the numbers of their clients."""

    def __init__(self, key: str, fit: Fit, schedule: Schedule, cohort: Nodes, gone: Mapping[int, str]) -> None:
        setup, self.schedule = cohort.setup, schedule
        example = setup.client(int(setup.federation.training.counts(fit.split).nonzero()[0][0]), 0)
        super().__init__(fit, example, fit.memory(example), setup.clients, setup.config.seed)
        asked = clients_of(type(fit), setup.federation, setup.config.evaluate_clients)
        self.key, self.left_out = key, 0
        self.members = set(asked) & set(cohort.nodes.values())
        self.lose(gone)

    def __str__(self) -> str:
        return f"{self.key} {self.round + 1} of {self.fit.rounds}" if self.fit.rounds > 1 else self.key

    def lose(self, failed: Mapping[int, str]) -> bool:
        """Go on without those that failed; says whether there were such."""
        for client in (gone := self.members & failed.keys()):
            log(WARNING, "%s is fitted without client %d: %s", self.key, client, failed[client])
        self.members -= gone
        self.left_out += len(gone)
        return bool(gone)


class SideBySide:
    """The sums of several fits in one buffer, as a secure sum needs them."""

    def __init__(self, fittings: Sequence[NodeFitting]) -> None:
        self.parts = {one.key: one.total for one in fittings}
        self.sizes = [len(part.buffer) for part in self.parts.values()]
        self.buffer = torch.zeros(sum(self.sizes), dtype=torch.int64)

    def reset(self, clients: int) -> None:
        self.buffer.zero_()
        for part in self.parts.values():
            part.reset(clients)

    def merged(self) -> None:
        for part, values in zip(self.parts.values(), torch.split(self.buffer, self.sizes), strict=True):
            part.buffer.copy_(values)
            part.merged()

    @property
    def count(self) -> int:
        """The largest of the counts; a negative one where there is one, which no sum can have."""
        counts = [part.count for part in self.parts.values()]
        return min(counts) if min(counts) < 0 else max(counts)

    def __iter__(self) -> Iterator[str]:
        return (f"{key}/{name}" for key, part in self.parts.items() for name in part)


class NodeFits:
    """What a schedule wants to have fitted, over the nodes of a cohort."""

    def __init__(self, cohort: Nodes) -> None:
        self.cohort = cohort
        self.gone: dict[int, str] = {}  # who failed, and why

    def run(self, schedules: Sequence[Schedule]) -> None:
        """All fits of these schedules, of which each stands for itself; what nodes are given is the first one's."""
        running: list[NodeFitting] = []
        collect: Callable[[State, list[NodeFitting], int], bool] = self._secure if self.cohort.sums else self._plain
        while True:
            for schedule in schedules:
                begun = schedule.ready().items()
                running += [NodeFitting(key, fit, schedule, self.cohort, self.gone) for key, fit in begun]
            if not running:
                return
            given = schedules[0].given
            others = collect(pack(given), running, given.published.round)
            for one in running:
                if not one.total.count:
                    raise StoppedError(f"{one.key} cannot be fitted: no node that is left has {one.fit.split} data")
                one.fit.given = one.schedule.given  # with what was fitted just now
                one.aggregate(others)
                if one.done:
                    one.schedule.finished(one.key, one.fit, one.server, one.left_out)
            running = [one for one in running if not one.done]

    def _asked(self, given: State, running: Sequence[NodeFitting]) -> tuple[dict[str, Any], State]:
        """What every node is asked for."""
        arrays = dict(given)
        for place, one in enumerate(running):
            arrays |= prefixed(f"{FIT}-{place}", one.server)
        return {"keys": [one.key for one in running], "fit_rounds": [one.round for one in running]}, arrays

    def _plain(self, given: State, running: list[NodeFitting], round: int) -> bool:
        while failed := self._ask(given, running, round):
            self.gone |= failed
            for one in running:
                if one.lose(failed):
                    one.restart()
        return False

    def _ask(self, given: State, running: list[NodeFitting], round: int) -> dict[int, str]:
        """One exchange of messages; returns who failed, and why."""
        cohort = self.cohort
        facts, arrays = self._asked(given, running)
        record = to_record(arrays)
        messages = [
            cohort.message(node, "train.fit", {"round": round, **facts}, record)
            for node, client in cohort.nodes.items()
            if any(client in one.members for one in running)
        ]
        failed = {cohort.nodes[message.metadata.dst_node_id]: cohort.late for message in messages}
        for one in running:
            one.total.reset(cohort.setup.clients)
        for node, reply in cohort.exchange(messages, _title(running)):
            client = cohort.nodes[node]
            try:
                _add(reply, client, running)
                del failed[client]
            except BadClientError as error:
                failed[client] = str(error)
        return failed

    def _secure(self, given: State, running: list[NodeFitting], round: int) -> bool:
        sums, cohort = self.cohort.sums, self.cohort
        assert sums is not None
        facts, arrays = self._asked(given, running)
        total = SideBySide(running)
        work = cohort.work("fit", round, facts | {"sizes": total.sizes}, to_record(arrays), _title(running))
        left_out: dict[int, str] = sums.add(work, set().union(*(one.members for one in running)), total)
        self.gone |= left_out
        lost = [one.lose(left_out) for one in running]
        return any(lost)


def _title(running: Sequence[NodeFitting]) -> str:
    """What a message is about, for the log: each fit, and which of its rounds at most it is."""
    return f"fit {', '.join(map(str, running))}"


def _add(reply: Message, client: int, running: Sequence[NodeFitting]) -> None:
    """A node's parts into the sums; a fit that it has no data for goes on without it."""
    if problem := problem_in(reply):
        raise BadClientError(problem)
    without = facts_of(reply).get(NO_DATA, [])
    if not isinstance(without, list):
        raise BadClientError("it did not say for which fits it has no data")
    asked = [(place, one) for place, one in enumerate(running) if client in one.members]
    arrays = arrays_of(reply) if any(place not in without for place, _ in asked) else {}
    for place, one in asked:
        if place in without:
            one.members.remove(client)
        else:
            one.total.add(one.fit.checked(select(arrays, f"{FIT}-{place}")))


Summed = FixedPointSum | SideBySide
