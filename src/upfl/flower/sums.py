"""The link's side of secure sums over Flower: steps as messages, attempts, and what they cost.

A sum that too few nodes brought to its end is tried again: with those that were there at last, if that is enough, else
with all. What was unmasked cannot be tried again, because nodes give their part of a sum once: then those that did not
answer are asked once more, and the run stops where that does not help. The sum is checked as a whole; of a single node
there is nothing to check.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log

from upfl.errors import BadClientError, StoppedError
from upfl.flower.fits import Summed
from upfl.flower.masked import VECTOR, name_of
from upfl.flower.messages import ARRAYS, FACTS, OWN, SECURE, arrays_of, problem_in
from upfl.flower.secure import Advert, Collector, Session, TooFewError
from upfl.flower.secure.primitives import Vector

ATTEMPTS = 3
FEWEST = 2  # of one part there is no sum to hide it in
T = TypeVar("T")
Exchange = Callable[[Sequence[Message], str], Iterator[tuple[int, Message]]]


@dataclass(frozen=True)
class Work:
    """What nodes compute their parts of a sum from."""

    facts: Mapping[str, Any]  # for everybody; with `terms`, `work` and `round`
    arrays: ArrayRecord
    own: Callable[[int], Mapping[str, Any]] = lambda client: {}  # for one client alone
    title: str = ""  # for the log, where the sum's name says too little


class SecureSums:
    """Secure sums over the nodes of a run."""

    def __init__(
        self, run: str, threshold: float, ttl: float, exchange: Exchange, nodes: Callable[[], dict[int, int]]
    ) -> None:
        self.run, self.threshold, self.ttl, self.exchange, self.nodes = run, threshold, ttl, exchange, nodes
        self.seconds: dict[str, float] = {}  # of each step, since the costs were last told
        self.bytes_up: dict[str, int] = {}  # by what was added

    def costs(self) -> dict[str, Any]:
        """What secure sums took since the last question, for a round's metrics."""
        told = {
            "bytes_up": self.bytes_up.get("train", 0),
            "secure": {"seconds": self.seconds, "bytes_up": self.bytes_up},
        }
        self.seconds, self.bytes_up = {}, {}
        return told

    def add(self, work: Work, clients: Iterable[int], total: Summed, needed: int = FEWEST) -> dict[int, str]:
        """Form the sum of what clients have for some work; returns who is not in it, and why."""
        everybody = asked = sorted(clients)
        needed, name = max(needed, FEWEST), name_of(work.facts)
        for _ in range(ATTEMPTS):
            attempt = _Attempt(self, work, asked, total)
            try:
                if len(asked) < needed:
                    raise TooFewError("at the start", asked, set(), needed)
                left_out = attempt.run(needed)
                return dict.fromkeys(set(everybody) - set(asked), "was missing from an attempt") | left_out
            except TooFewError as few:
                said = f"{few}{attempt.reasons()}"
                log(WARNING, "the secure sum %s: %s", name, said)
                if few.step == "unmask":
                    break
                asked = few.there if len(few.there) >= needed else everybody
        raise StoppedError(f"the secure sum {name} failed: {said}")


class _Attempt:
    """One session of the protocol over messages."""

    def __init__(self, sums: SecureSums, work: Work, clients: Sequence[int], total: Summed) -> None:
        self.sums, self.work, self.clients, self.total = sums, work, clients, total
        self.why: dict[int, str] = {}  # why clients did not come through a step
        total.reset(len(clients))
        threshold = max(math.ceil(sums.threshold * len(clients) - 1e-9), len(clients) // 2 + 1, FEWEST)
        self.session = Session(sums.run, name_of(work.facts), secrets.randbits(62), threshold, len(total.buffer))

    def run(self, needed: int) -> dict[int, str]:
        collector = Collector(self.session, self.clients)
        adverts = collector.advertised(
            self.step("advertise", dict.fromkeys(self.clients, asdict(self.session)), _advert).values()
        )
        keys: dict[str, list[Any]] = {
            "clients": [advert.client for advert in adverts],
            "cipher_keys": [advert.cipher_key for advert in adverts],
            "mask_keys": [advert.mask_key for advert in adverts],
            "signatures": [advert.signature for advert in adverts],
        }
        boxes = collector.shared(self.step("share", dict.fromkeys(keys["clients"], keys), _table("sealed")))
        asked = {client: _columns(box, "sealed") for client, box in boxes.items()}
        for client, masked in self.steps("mask", asked, _vector):
            try:
                collector.add(client, masked)
            except BadClientError as error:
                self.why[client] = str(error)
        live = collector.masked()
        if len(live) < needed:
            raise TooFewError("masked input", live, set(self.clients) - set(live), needed)
        signatures = collector.agreed(self.step("agree", {client: {"live": live} for client in live}, _signature))
        revealed: dict[int, dict[int, bytes]] = {}
        for _ in range(ATTEMPTS):
            waiting = [client for client in signatures if client not in revealed]
            revealed |= self.step(
                "unmask", dict.fromkeys(waiting, _columns(signatures, "signatures")), _table("shares")
            )
            if len(revealed) >= self.session.threshold:
                break
        self.take(collector, revealed)
        return {client: self.why.get(client, "did not reply in time") for client in self.clients if client not in live}

    def take(self, collector: Collector, revealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """The sum into its place, if it can be one."""
        try:
            found = collector.unmasked(revealed)
        except BadClientError as error:
            raise StoppedError(f"the secure sum {self.session.name}: {error}") from error
        self.total.buffer.copy_(torch.from_numpy(found.view(np.int64)))
        self.total.merged()
        exact = self.work.facts["work"] == "train"
        count, live = self.total.count, len(collector.live)
        low, high = (int(bound) for bound in self.total.buffer.aminmax())
        if not (count == live if exact else 0 <= count <= live) or low < -(2**62) or high > 2**62:
            raise StoppedError(
                f"the secure sum {self.session.name} is out of range: a node among {sorted(collector.live)} lied about "
                "its shares or sent what it must not; of which one, nothing can be known"
            )

    def step(self, name: str, asked: Mapping[int, Mapping[str, Any]], read: Callable[[int, Any], T]) -> dict[int, T]:
        return dict(self.steps(name, asked, read))

    def steps(
        self, name: str, asked: Mapping[int, Mapping[str, Any]], read: Callable[[int, Any], T]
    ) -> Iterator[tuple[int, T]]:
        """Ask each client for a step, and yield what those say that can be read."""
        started, node_of = time.perf_counter(), {client: node for node, client in self.sums.nodes().items()}
        messages = [self._message(node_of[c], name, c, what) for c, what in asked.items() if c in node_of]
        self.why |= dict.fromkeys(asked, f"did not reply in time ({name})")
        kind = str(self.work.facts["work"])
        for node, reply in self.sums.exchange(messages, f"{self.work.title or self.session.name}: {name}"):
            client = self.sums.nodes().get(node)
            if client is None:
                continue
            self.sums.bytes_up[kind] = self.sums.bytes_up.get(kind, 0) + size_of(reply)
            try:
                if problem := problem_in(reply):
                    raise BadClientError(problem)
                found = read(client, reply if name == "mask" else reply.content.config_records[SECURE])
            except BadClientError as error:
                self.why[client] = str(error)
                continue
            except Exception:  # whatever it sent, it costs the node alone its part
                self.why[client] = f"sent nothing that can be read ({name})"
                continue
            self.why.pop(client, None)
            yield client, found
        spent = time.perf_counter() - started
        self.sums.seconds[name] = self.sums.seconds.get(name, 0.0) + spent

    def _message(self, node: int, step: str, client: int, what: Mapping[str, Any]) -> Message:
        content = RecordDict({SECURE: ConfigRecord({"step": step, **what})})
        if step == "mask":
            facts = {**self.work.facts, "names": list(self.total), "clients": len(self.clients)}
            content[FACTS], content[ARRAYS] = ConfigRecord(facts), self.work.arrays
            content[OWN] = ConfigRecord(dict(self.work.own(client)))
        return Message(content, node, "query.secure", ttl=self.sums.ttl)

    def reasons(self) -> str:
        return "".join(f". Client {client}: {why}" for client, why in sorted(self.why.items()))


def _signature(client: int, said: Any) -> bytes:
    return bytes(said["signature"])


def _columns(table: Mapping[int, bytes], name: str) -> dict[str, Any]:
    return {"clients": list(table), name: list(table.values())}


def _table(name: str) -> Callable[[int, Any], dict[int, bytes]]:
    def read(client: int, said: Any) -> dict[int, bytes]:
        return dict(zip(map(int, said["clients"]), map(bytes, said[name]), strict=True))

    return read


def _advert(client: int, said: Any) -> Advert:
    return Advert(client, bytes(said["cipher_key"]), bytes(said["mask_key"]), bytes(said["signature"]))


def _vector(client: int, reply: Message) -> Vector:
    found = arrays_of(reply)[VECTOR]
    if found.dtype != torch.int64:
        raise BadClientError(f"its masked vector is {found.dtype}")
    return found.numpy().view(np.uint64)


def size_of(reply: Message) -> int:
    """The bytes of values that a node sent."""
    if reply.has_error():
        return 0
    arrays = sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())
    values = (value for record in reply.content.config_records.values() for value in record.values())
    return arrays + sum(_bytes(value) for value in values)


def _bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes, value))
    return len(value) if isinstance(value, bytes | str) else 8
