"""Flower's nodes as the clients of a run: each trains, fits and validates on its own machine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from upfl.contract import CrossFitted
from upfl.data.standardize import Sums
from upfl.engine.cohort import NEW_CLIENTS, Cohort, Tell
from upfl.engine.evaluate import Scores, held_out, newcomer_counts, no_counts, validating
from upfl.engine.fitting import Schedule
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import Progress
from upfl.engine.group import Group
from upfl.engine.setup import Setup
from upfl.errors import BadClientError, StoppedError
from upfl.flower import features, messages
from upfl.flower.fits import NodeFits
from upfl.flower.masked import kind_of
from upfl.flower.messages import (
    ARRAYS,
    FACTS,
    SCORES,
    arrays_of,
    facts_of,
    pack,
    problem_in,
    to_record,
)
from upfl.flower.privacy import CLIP, floating
from upfl.flower.sums import SecureSums, Work
from upfl.flower.terms import Settings, Terms
from upfl.personalize import likeness
from upfl.state import State, norm

ATTEMPTS = 3  # at a round in which too few nodes gave good replies
STEP = 2.0  # seconds between looks for nodes


class NodeCohort(Cohort):
    """The training nodes of a Flower federation."""

    def __init__(self, setup: Setup, grid: Grid, settings: Settings, terms: Terms) -> None:
        super().__init__(setup, Group())
        self.grid, self.settings, self.terms, self.privacy = grid, settings, terms, terms.privacy
        self.nodes: dict[int, int] = {}  # each connected training node's client
        self.seen: set[int] = set()  # clients that were connected once
        self.idle: dict[int, str] = {}  # connected nodes that do not train, and why
        self._kept_memory = self._saved_memory = torch.empty(0)  # of the checkpoint before the last one, and of that
        # Privacy allows no word about a node's own figures; the server may know of no new clients.
        private = {"loss", "validation"} if self.privacy else set()
        self.withheld = frozenset(private) | (NEW_CLIENTS if not len(setup.federation.new) else frozenset())
        self.compared: tuple[int, State] = -1, {}  # a round, and what newcomers compare their data with after it
        self.sums: SecureSums | None = None
        if terms.secure:
            about = terms.run, settings.threshold, settings.timeout
            self.sums = SecureSums(*about, self.exchange, lambda: self.nodes)
            self.summed = True

    @property
    def late(self) -> str:
        return f"did not reply within {self.settings.timeout:g} s"

    def begin(self, progress: Progress) -> None:
        super().begin(progress)
        self.saved()
        self.saved()

    def saved(self) -> None:
        self._kept_memory, self._saved_memory = self._saved_memory, self.progress.memory_rounds.clone()

    # Nodes

    def participants(self, round: int) -> list[int]:
        """The engine's choice among all clients; those that are not connected have the next ones in their place."""
        self._meet()
        order, count = self.order(round)
        held, connected = self.setup.federation.training.train_counts, set(self.nodes.values())
        return sorted([client for client in order.tolist() if client in connected and held[client]][:count])

    def _meet(self) -> None:
        """Look who is connected, ask strangers who they are, and wait until there are enough."""
        end = time.monotonic() + self.settings.wait
        while True:
            self._look()
            if len(self.nodes) >= self.settings.min_nodes:
                return
            if time.monotonic() > end:
                others = "; ".join(f"node {node}: {why}" for node, why in self.idle.items())
                raise StoppedError(
                    f"only {len(self.nodes)} training node(s) connected within {self.settings.wait:g} s, and "
                    f"{self.settings.min_nodes} are needed (min-nodes){'. Others: ' + others if others else ''}"
                )
            time.sleep(STEP)

    def _look(self) -> None:
        present = set(self.grid.get_node_ids())
        self.nodes = {node: client for node, client in self.nodes.items() if node in present}
        self.idle = {node: why for node, why in self.idle.items() if node in present}
        strangers = sorted(present - self.nodes.keys() - self.idle.keys())
        asked = [self.message(node, "query.introduce", {}) for node in strangers]
        # Sorted: which of two nodes with one number trains must not depend on who answers first.
        replies = self.exchange(asked, "introduce")
        for node, reply in sorted(replies, key=lambda answer: answer[0]):
            client = None if problem_in(reply) else facts_of(reply).get("client")
            if not isinstance(client, int) or not 0 <= client < self.setup.clients:
                self.idle[node] = problem_in(reply) or "a newcomer: it has no client number"
            elif client in self.nodes.values():
                self.idle[node] = f"client {client} is there already"
            else:
                self.nodes[node] = client
            if why := self.idle.get(node):
                log(WARNING, "node %d does not train: %s", node, why)
        self.seen |= set(self.nodes.values())

    def message(self, node: int, kind: str, facts: Mapping[str, Any], arrays: ArrayRecord | None = None) -> Message:
        content = RecordDict({FACTS: ConfigRecord({"terms": self.terms.model_dump_json(), **facts})})
        if arrays is not None:
            content[ARRAYS] = arrays
        return Message(content, node, kind, ttl=self.settings.timeout)

    def exchange(self, sent: Sequence[Message], what: str) -> Iterator[tuple[int, Message]]:
        return messages.exchange(self.grid, sent, self.settings.timeout, what)

    def feature_sums(self) -> Sums:
        """Sums of features over the training nodes that are there, before the first round."""
        self._meet()
        clients, width = sorted(self.nodes.values()), self.setup.federation.source.form.shape[0]
        total = features.empty_sum(width, len(clients))
        if self.sums:
            work = Work({"terms": self.terms.model_dump_json(), "work": "features", "round": 0}, ArrayRecord())
            self.sums.add(work, clients, total, self.settings.min_nodes)
        else:
            asked = [self.message(node, "query.features", {}) for node in self.nodes]
            for node, reply in self.exchange(asked, "features"):
                try:
                    total.check(up := arrays_of(reply))
                    if not features.from_state(up).plausible:
                        raise BadClientError("its sums of features cannot be such")
                    total.add(up)
                except BadClientError as error:
                    log(WARNING, "features are standardized without client %d: %s", self.nodes[node], error)
        found = features.from_state({name: total[name] for name in total})
        if total.count < self.settings.min_nodes or not found.plausible:
            raise StoppedError(
                f"{total.count} nodes gave good sums of features, and {self.settings.min_nodes} are needed (min-nodes)"
            )
        return found

    # Rounds

    def train(self, participants: list[int], round: int, total: FixedPointSum) -> dict[int, str]:
        needed = min(self.settings.min_nodes, self.setup.config.participants(self.setup.clients))
        if self.sums:
            left_out = self.sums.add(self.work("train", round, {}, self._server(round)), participants, total, needed)
            if not self.privacy and (rms := _mean_square(total)) > self.settings.largest_rms:
                raise StoppedError(f"round {round + 1}: the sum's root mean square is {rms:g}: a node sent too much")
            return left_out
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
        arrays = self._server(round)
        asked = [
            self.message(node_of[client], "train", facts | self._memory_facts(client), arrays)
            for client in participants
        ]
        left_out = dict.fromkeys(participants, self.late)
        for node, reply in self.exchange(asked, f"train, round {round + 1}"):
            client = self.nodes[node]
            try:
                self._add(reply, total)
                del left_out[client]
            except BadClientError as error:
                left_out[client] = str(error)
        return left_out

    def _server(self, round: int) -> ArrayRecord:
        return to_record(self.setup.training.sent(self.progress.server, round))

    def work(self, work: str, round: int, facts: Mapping[str, Any], arrays: ArrayRecord, title: str = "") -> Work:
        """What nodes compute their parts of a secure sum from."""
        known = {"terms": self.terms.model_dump_json(), "work": work, "round": round, **facts}
        return Work(known, arrays, self._memory_facts, title)

    def _add(self, reply: Message, total: FixedPointSum) -> None:
        """Add what a node sent to the sum, or refuse it and change nothing."""
        up = arrays_of(reply)
        total.check(up)
        self.setup.training.checked(up)
        if self.privacy:
            self.privacy.check(up)
        elif (rms := root_mean_square(up)) > self.settings.largest_rms:
            raise BadClientError(f"its values have the root mean square {rms:g}, above {self.settings.largest_rms:g}")
        total.add(up)

    def _memory_facts(self, client: int) -> dict[str, int]:
        if not self.setup.training.remembers:
            return {}
        return {"memory": int(self.progress.memory_rounds[client]), "memory_saved": int(self._kept_memory[client])}

    def facts(self) -> dict[str, Any]:
        spent = {"epsilon": self._epsilon(), "delta": self.privacy.delta} if self.privacy else {}
        absent = sorted(self.seen - set(self.nodes.values()))
        costs = self.sums.costs() if self.sums else {}
        return spent | costs | ({"absent": absent} if absent else {})

    def summary(self) -> dict[str, Any]:
        if not self.privacy:
            return {}
        spent = {"epsilon": self._epsilon(), "rounds": self.progress.round}
        return {"privacy": {**self.privacy.model_dump(), **spent}}

    def _epsilon(self) -> float:
        assert self.privacy is not None
        return self.privacy.epsilon(self.progress.round)

    # Fits and scores

    def fit(self, schedule: Schedule) -> None:
        """The fits of a schedule; with those of the last round, what newcomers compare their data with.

        It goes in the same messages, and would take four of its own when the bundle is written.
        """
        schedules, published = [schedule], schedule.given.published
        if len(schedule) and likeness.KEY not in schedule and self.progress.round == self.setup.config.rounds:
            schedules.append(Schedule([likeness.LikenessCheck(self.setup.training)], published, schedule.tell))
        NodeFits(self).run(schedules)
        if len(schedules) > 1:
            self.compared = published.round, dict(schedules[1].given.published.fitted)

    def score(self, given: CrossFitted, tell: Tell) -> dict[str, Scores]:
        """Validation on the nodes, unless privacy forbids it; new clients of a named data set here."""
        tell("scoring")
        setup = self.setup
        chosen = validating(setup.federation, setup.config.evaluate_clients)
        validation = {name: no_counts(chosen) for name in setup.personalizers}
        if not self.privacy:
            validate = self._secure_validation if self.sums else self._validate
            for client, counts in validate(given):
                for name, count in counts.items():
                    validation[name][client] = torch.tensor(count)
        scores = {}
        for name, personalizer in setup.personalizers.items():
            new, steps = newcomer_counts(
                setup.population, personalizer, given.published, self.group, setup.config.evaluate_clients
            )
            scores[name] = Scores(validation[name], new, steps, held_out(setup.federation, validation[name]))
        return scores

    def _validate(self, given: CrossFitted) -> Iterator[tuple[int, dict[str, list[int]]]]:
        arrays, scored = to_record(pack(given)), validating(self.setup.federation, self.setup.config.evaluate_clients)
        asked = [
            self.message(node, "evaluate", {"round": given.published.round} | self._memory_facts(client), arrays)
            for node, client in self.nodes.items()
            if client in scored
        ]
        for node, reply in self.exchange(asked, "evaluate"):
            counts = {} if problem_in(reply) else dict(reply.content.metric_records.get(SCORES) or {})
            if counts.keys() == self.setup.personalizers.keys() and all(map(_are_counts, counts.values())):
                yield self.nodes[node], counts  # type: ignore[misc]
            elif counts or problem_in(reply):
                log(
                    WARNING,
                    "client %d has no validation scores: %s",
                    self.nodes[node],
                    problem_in(reply) or "no counts",
                )

    def _secure_validation(self, given: CrossFitted) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """The sum over all clients of a kind, under the number of the first of them."""
        federation, limit = self.setup.federation, self.setup.config.evaluate_clients
        scored = validating(federation, limit)
        first = {kind_of(federation, client): client for client in reversed(scored)}
        like = {name: torch.zeros(len(first), 3, dtype=torch.int64) for name in self.setup.personalizers}
        total = FixedPointSum(like, self.setup.clients)
        work = self.work("evaluate", given.published.round, {"kinds": list(first)}, to_record(pack(given)))
        assert self.sums is not None
        for client, why in self.sums.add(work, set(scored) & set(self.nodes.values()), total).items():
            log(WARNING, "client %d has no part in the validation scores: %s", client, why)
        sums = {name: total[name].tolist() for name in like}
        for row, client in enumerate(first.values()):
            counts = {name: rows[row] for name, rows in sums.items()}
            if not all(map(_are_counts, counts.values())):
                raise StoppedError("the sum of validation counts cannot be one: a node sent what it must not")
            yield client, counts


def _mean_square(total: FixedPointSum) -> float:
    """The root mean square of the mean of what was sent, but for integers, as `root_mean_square` has it."""
    sums = {name: total[name] for name in total}
    return root_mean_square({name: v / max(total.count, 1) for name, v in sums.items() if v.is_floating_point()})


def root_mean_square(up: State) -> float:
    if not (values := floating(up)):
        return 0.0
    return float(norm(values)) / math.sqrt(max(sum(value.numel() for value in values), 1))


def _are_counts(counts: Any) -> bool:
    whole = isinstance(counts, list) and len(counts) == 3 and all(type(count) is int for count in counts)
    return whole and 0 <= counts[0] <= counts[2] < 2**32 and 0 <= counts[1] <= counts[2]
