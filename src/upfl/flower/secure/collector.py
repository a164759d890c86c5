"""The server's side of a secure sum: it passes on what members send each other, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from upfl.errors import BadClientError, UpflError
from upfl.flower.secure.member import pair_mask_key, self_mask_key
from upfl.flower.secure.primitives import SECRET, Vector, add_mask, combine, is_usable, public_of
from upfl.flower.secure.session import Advert, Session, transcript


class TooFewError(UpflError):
    """Fewer members than the threshold came through a step."""

    def __init__(self, step: str, there: Iterable[int], missing: Iterable[int], threshold: int) -> None:
        self.step, self.there, self.missing = step, sorted(there), sorted(missing)
        who = ", ".join(map(str, self.missing))
        super().__init__(f"{step}: {len(self.there)} of {threshold} clients that are needed; missing: {who or 'none'}")


class Collector:
    """One session. Each step is told what came in, and says what goes out."""

    def __init__(self, session: Session, asked: Iterable[int]) -> None:
        self.session, self.asked = session, frozenset(asked)
        self.keys: dict[int, Advert] = {}  # U1
        self.sharing: frozenset[int] = frozenset()  # U2
        self.live: frozenset[int] = frozenset()  # U3
        self.total = np.zeros(session.size, np.uint64)

    def advertised(self, adverts: Iterable[Advert]) -> list[Advert]:
        """All keys, for everybody of U1."""
        usable = (advert for advert in adverts if is_usable(advert.cipher_key) and is_usable(advert.mask_key))
        found = {advert.client: advert for advert in usable if advert.client in self.asked}
        self._enough("advertise keys", found, self.asked)
        self.keys = dict(sorted(found.items()))
        return list(self.keys.values())

    def shared(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """For each of U2 the shares that the others sealed for it."""
        members = self.keys.keys()
        complete = {u for u, texts in sealed.items() if u in members and texts.keys() == members - {u}}
        self._enough("share keys", complete, members)
        self.sharing = frozenset(complete)
        return {v: {u: sealed[u][v] for u in sorted(complete - {v})} for v in sorted(complete)}

    def add(self, client: int, masked: Vector) -> None:
        """Count a masked vector in; U3 are those whose vectors are."""
        if client not in self.sharing or client in self.live:
            raise BadClientError("a masked vector that nobody waits for")
        if masked.dtype != np.uint64 or masked.shape != self.total.shape:
            raise BadClientError(
                f"its masked vector is {masked.dtype} {list(masked.shape)}, not {len(self.total)} values"
            )
        self.total += masked
        self.live |= {client}

    def masked(self) -> list[int]:
        """Who remains, for everybody of U3."""
        self._enough("masked input", self.live, self.sharing)
        return sorted(self.live)

    def agreed(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Everybody's signatures of U3, for those that signed: U4."""
        found = {client: signature for client, signature in signatures.items() if client in self.live}
        self._enough("agree on who remains", found, self.live)
        return found

    def unmasked(self, revealed: Mapping[int, Mapping[int, bytes]]) -> Vector:
        """The sum over U3."""
        good = {
            u: shares
            for u, shares in revealed.items()
            if u in self.live
            and shares.keys() == self.sharing
            and all(len(share) == SECRET for share in shares.values())
        }
        self._enough("unmask", good, self.live)
        helpers = sorted(good)[: self.session.threshold]
        numbers = {member: number for number, member in enumerate(self.keys, 1)}
        context = transcript(self.session, self.keys.values())
        for member in sorted(self.sharing):
            secret = combine([(numbers[helper], good[helper][member]) for helper in helpers])
            if member in self.live:
                add_mask(self.total, self_mask_key(secret, context, member), -1)
                continue
            if public_of(secret) != self.keys[member].mask_key:
                raise BadClientError(f"shares of the key of client {member} do not fit its public key")
            for other in self.live:  # whose vectors hold a mask that the dropped member would have cancelled
                key = pair_mask_key(secret, self.keys[other].mask_key, context, member, other)
                add_mask(self.total, key, 1 if member < other else -1)
        return self.total

    def _enough(self, step: str, there: Iterable[int], of: Iterable[int]) -> None:
        there = set(there)
        if len(there) < self.session.threshold:
            raise TooFewError(step, there, set(of) - there, self.session.threshold)
