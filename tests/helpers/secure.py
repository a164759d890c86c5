"""Secure sums in process: members and a collector, with whoever drops out and whatever a link changes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from upfl.flower.secure import Advert, Collector, Member, Session
from upfl.flower.secure.primitives import Vector

STEPS = ("advertise", "share", "mask", "agree", "unmask")


@cache
def registered(client: int) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public(clients: int) -> dict[int, ec.EllipticCurvePublicKey]:
    return {client: registered(client).public_key() for client in range(clients)}


def session(threshold: int, size: int, name: str = "train/0", attempt: int = 1) -> Session:
    return Session("run", name, attempt, threshold, size)


@dataclass
class Federation:
    """Members that remember between steps what a node would, and nothing else."""

    clients: int
    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def ask(self, client: int, step: str, *what: Any) -> Any:
        member = Member(client, registered(client), public(self.clients), self.states.get(client))
        try:
            return getattr(member, step)(*what)
        finally:
            self.states[client] = member.state

    def sum(
        self,
        about: Session,
        vectors: Mapping[int, Vector],
        drops: Mapping[int, str] | None = None,
        seen: dict[str, Any] | None = None,
    ) -> tuple[Vector, list[int]]:
        """The sum and whose it is, where each of `drops` does not come through a step or any later one."""
        gone, seen = drops or {}, {} if seen is None else seen

        def there(clients: Iterable[int], step: str) -> list[int]:
            return [
                client for client in clients if client not in gone or gone[client] in STEPS[STEPS.index(step) + 1 :]
            ]

        collector = Collector(about, vectors)
        adverts = collector.advertised(self.ask(c, "advertise", about) for c in there(vectors, "advertise"))
        boxes = collector.shared({c: self.ask(c, "share", adverts) for c in there(collector.keys, "share")})
        for client in there(boxes, "mask"):
            masked = self.ask(client, "mask", boxes[client], vectors[client])
            seen.setdefault("masked", {})[client] = masked
            collector.add(client, masked)
        live = collector.masked()
        signatures = collector.agreed({c: self.ask(c, "agree", live) for c in there(live, "agree")})
        total = collector.unmasked({c: self.ask(c, "unmask", signatures) for c in there(signatures, "unmask")})
        return total, live


def random_vectors(source: np.random.Generator, clients: int, size: int) -> dict[int, Vector]:
    return {c: source.integers(0, 2**64, size, np.uint64, endpoint=False) for c in range(clients)}


def advert_of(adverts: list[Advert], client: int) -> Advert:
    return next(advert for advert in adverts if advert.client == client)
