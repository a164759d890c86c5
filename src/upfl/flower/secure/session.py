"""What a secure sum is, and what is signed and hashed of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

PROTOCOL = b"upfl secure sum 1"
AND = " and "  # between the names of what is added side by side


def packed(*parts: bytes | str | int) -> bytes:
    """Parts as bytes, each with its length before it: no two lists of parts have the same bytes."""
    encoded = (
        part.to_bytes(8, "little") if isinstance(part, int) else part.encode() if isinstance(part, str) else part
        for part in parts
    )
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


@dataclass(frozen=True)
class Session:
    """One attempt at one sum."""

    run: str  # no other run has this name
    name: str  # which of the run's sums it is, or which several
    attempt: int
    threshold: int  # t: so many must stay to the end
    size: int  # of the vectors

    @property
    def parts(self) -> tuple[str, ...]:
        """The whole name of each thing that is added: a member gives its part of it once, whatever stands beside it."""
        return tuple(f"{self.run}/{part}" for part in self.name.split(AND))

    def packed(self) -> bytes:
        return packed(PROTOCOL, self.run, self.name, self.attempt, self.threshold, self.size)


@dataclass(frozen=True)
class Advert:
    """A member's public keys for a session, signed by the key that it is registered with."""

    client: int
    cipher_key: bytes
    mask_key: bytes
    signature: bytes = b""

    def signed(self, session: Session) -> bytes:
        return packed("keys", session.packed(), self.client, self.cipher_key, self.mask_key)


def transcript(session: Session, adverts: Iterable[Advert]) -> bytes:
    """A hash of the session and of all public keys in it."""
    keys = [part for a in sorted(adverts, key=lambda a: a.client) for part in (a.client, a.cipher_key, a.mask_key)]
    return hashlib.sha256(packed("transcript", session.packed(), *keys)).digest()


def signed_live(transcript: bytes, about: bytes, live: Iterable[int]) -> bytes:
    """What a member signs: a digest of what was asked for, and those whose masked vectors count."""
    return packed("live", transcript, about, *sorted(live))
