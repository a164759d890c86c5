"""A node's side of a secure sum: each step once, in order, and nothing that an honest server would not ask for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from upfl.errors import BadClientError
from upfl.flower.secure.primitives import (
    SECRET,
    Vector,
    add_mask,
    derived,
    is_signed,
    new_key,
    seal,
    shared,
    sign,
    split,
    unseal,
)
from upfl.flower.secure.session import Advert, Session, packed, signed_live, transcript

ADVERTISED, SHARED, MASKED, AGREED = "advertised", "shared", "masked", "agreed"


class RefusedError(BadClientError):
    """The server asked for what an honest one would not, or let through what another node must not have sent."""


@dataclass(frozen=True)
class State:
    """What a member remembers between steps; flat, so that it fits into any record."""

    stage: str = ""
    session: Session | None = None
    cipher_secret: bytes = b""
    mask_secret: bytes = b""
    seed: bytes = b""
    transcript: bytes = b""
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # U1: public keys for shares and for masks
    shares: dict[int, bytes] = field(default_factory=dict)  # U2: of each one's mask key and seed
    about: bytes = b""  # a digest of what the vector was computed from
    live: tuple[int, ...] = ()  # U3, as signed
    spent: tuple[str, ...] = ()  # names of sums whose masks this member helped to take off

    def flat(self) -> dict[str, Any]:
        values = {name.name: getattr(self, name.name) for name in fields(self)}
        for name in ("keys", "shares"):
            table = values.pop(name)
            values[f"{name}.of"], values[name] = list(table), [b"".join(row) for row in map(_row, table.values())]
        session = values.pop("session")
        values |= {f"session.{name}": value for name, value in asdict(session).items()} if session else {}
        return values | {"live": list(self.live), "spent": list(self.spent)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> State:
        if not values:
            return cls()
        known = {name: value for name, value in values.items() if "." not in name}
        about = {name.removeprefix("session."): value for name, value in values.items() if name.startswith("session.")}
        keys = dict(zip(values["keys.of"], ((row[:SECRET], row[SECRET:]) for row in values["keys"]), strict=True))
        shares = dict(zip(values["shares.of"], values["shares"], strict=True))
        live, spent = tuple(values["live"]), tuple(values["spent"])
        session = Session(**about) if about else None
        return cls(**known | {"keys": keys, "shares": shares, "live": live, "spent": spent, "session": session})


def _row(value: bytes | tuple[bytes, bytes]) -> tuple[bytes, ...]:
    return (value,) if isinstance(value, bytes) else value


class Member:
    """Client `client`, with its registered key and the registered public keys of all that it may add up with.

    `least` is its owner's word: no sum over fewer members.
    """

    def __init__(
        self,
        client: int,
        key: ec.EllipticCurvePrivateKey,
        peers: Mapping[int, ec.EllipticCurvePublicKey],
        state: Mapping[str, Any] | None = None,
        least: int = 2,
    ) -> None:
        self.client, self.key, self.peers, self.least = client, key, peers, least
        self._state = State.of(state or {})

    @property
    def state(self) -> dict[str, Any]:
        """What to give a member of the next step, on the same node. It holds secrets."""
        return self._state.flat()

    def advertise(self, session: Session) -> Advert:
        """Begin a session. Whatever was under way is forgotten, so that its masks can no longer be taken off."""
        if set(session.parts) & set(self._state.spent):
            raise RefusedError(f"it has given its part of the sum {session.name} already, and gives it once")
        if session.threshold < 2:
            raise RefusedError("a secure sum needs a threshold of at least 2")
        (cipher_secret, cipher_key), (mask_secret, mask_key) = new_key(), new_key()
        advert = Advert(self.client, cipher_key, mask_key)
        own, spent = {self.client: (cipher_key, mask_key)}, self._state.spent
        self._state = State(ADVERTISED, session, cipher_secret, mask_secret, keys=own, spent=spent)
        return replace(advert, signature=sign(self.key, advert.signed(session)))

    def share(self, adverts: Iterable[Advert]) -> dict[int, bytes]:
        """Check everybody's keys; returns for each other member its shares of this one's secrets, sealed."""
        (state, session), adverts = self._at(ADVERTISED), list(adverts)
        found = {advert.client: advert for advert in adverts}
        mine = found.get(self.client)
        if mine is None or (mine.cipher_key, mine.mask_key) != state.keys[self.client]:
            raise RefusedError("its own keys are not among those that it was shown")
        self._enough(found, "keys")
        if 2 * session.threshold <= len(found):
            raise RefusedError(f"a threshold of {session.threshold} is no majority of {len(found)}")
        if len(found) < len(adverts) or len({key for a in adverts for key in (a.cipher_key, a.mask_key)}) < 2 * len(
            found
        ):
            raise RefusedError("a client or a key is there twice")
        for client, advert in found.items():
            if client not in self.peers:
                raise RefusedError(f"it has no registered key of client {client}")
            if not is_signed(self.peers[client], advert.signature, advert.signed(session)):
                raise RefusedError(f"the keys of client {client} are not signed by its registered key")
        context, seed = transcript(session, found.values()), os.urandom(SECRET)
        members = sorted(found)
        halves = (split(secret, session.threshold, len(members)) for secret in (state.mask_secret, seed))
        shares = {member: key + of_seed for member, key, of_seed in zip(members, *halves, strict=True)}
        self._state = replace(
            state,
            stage=SHARED,
            seed=seed,
            transcript=context,
            keys={client: (advert.cipher_key, advert.mask_key) for client, advert in found.items()},
            shares={self.client: shares[self.client]},
        )
        return {
            peer: seal(self._cipher(peer, self.client, peer), shares[peer], packed(context, self.client, peer))
            for peer in members
            if peer != self.client
        }

    def expected(self) -> Session:
        """The session that waits for this member's vector."""
        return self._at(SHARED)[1]

    def mask(self, sealed: Mapping[int, bytes], vector: Vector, about: bytes = b"") -> Vector:
        """This member's vector under its masks, with those of all whose shares it was given.

        `about` is a digest of what the vector was computed from, so far as it must be the same for everybody.
        """
        state, session = self._at(SHARED)
        self._enough({self.client, *sealed}, "shares")
        if len(vector) != session.size:
            raise RefusedError(f"it has {len(vector)} values, and {session.size} are to be added")
        shares = dict(state.shares)
        for peer, text in sealed.items():
            if peer not in state.keys or peer == self.client:
                raise RefusedError(f"shares of client {peer}, which advertised no keys")
            opened = unseal(self._cipher(peer, peer, self.client), text, packed(state.transcript, peer, self.client))
            if opened is None or len(opened) != 2 * SECRET:
                raise RefusedError(f"the shares from client {peer} were not sealed for it in this session")
            shares[peer] = opened
        masked = vector.astype(np.uint64)  # a copy
        add_mask(masked, self_mask_key(state.seed, state.transcript, self.client), 1)
        for peer in sealed:
            key = pair_mask_key(state.mask_secret, state.keys[peer][1], state.transcript, self.client, peer)
            add_mask(masked, key, 1 if self.client < peer else -1)
        kept = replace(state, stage=MASKED, shares=shares, about=about)
        self._state = replace(kept, cipher_secret=b"", mask_secret=b"", seed=b"")
        return masked

    def agree(self, live: Iterable[int]) -> bytes:
        """Sign the set of those whose masked vectors count, once."""
        state, _ = self._at(MASKED)
        live = sorted(set(live))
        self._enough(live, "masked vectors")
        if len(live) < self.least:
            raise RefusedError(f"a sum over {len(live)} nodes: its owner allows none over fewer than {self.least}")
        if self.client not in live or not set(live) <= state.shares.keys():
            raise RefusedError("the set of those that remain is not a part of those before, or leaves this one out")
        self._state = replace(state, stage=AGREED, live=tuple(live))
        return sign(self.key, signed_live(state.transcript, state.about, live))

    def unmask(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """If enough signed the same set: a share of each one's seed if it is in it, else of its mask key."""
        state, session = self._at(AGREED)
        self._enough(signatures, "signatures")
        signed = signed_live(state.transcript, state.about, state.live)
        for peer, signature in signatures.items():
            if peer not in state.live:
                raise RefusedError(f"a signature of client {peer}, which is not one of those that remain")
            if not is_signed(self.peers[peer], signature, signed):
                raise RefusedError(
                    f"client {peer} did not sign what this one signed: it was shown another set of those that remain, "
                    "or asked for something else"
                )
        self._state = replace(state, spent=tuple(dict.fromkeys((*state.spent, *session.parts))))
        return {peer: share[SECRET:] if peer in state.live else share[:SECRET] for peer, share in state.shares.items()}

    def _at(self, stage: str) -> tuple[State, Session]:
        if self._state.stage != stage or self._state.session is None:
            raise RefusedError(f"it was asked out of turn: it is {self._state.stage or 'in no sum'}, not {stage}")
        return self._state, self._state.session

    def _enough(self, found: Iterable[int], what: str) -> None:
        assert self._state.session is not None
        if (count := len(set(found))) < self._state.session.threshold:
            raise RefusedError(f"{what} of {count} clients are below the threshold {self._state.session.threshold}")

    def _cipher(self, peer: int, sender: int, recipient: int) -> bytes:
        state = self._state
        return _agreed(
            state.cipher_secret, state.keys[peer][0], state.transcript, packed("shares", sender, recipient), peer
        )


def self_mask_key(seed: bytes, transcript: bytes, client: int) -> bytes:
    return derived(seed, transcript, packed("self", client))


def pair_mask_key(secret: bytes, public: bytes, transcript: bytes, client: int, peer: int) -> bytes:
    return _agreed(secret, public, transcript, packed("pair", min(client, peer), max(client, peer)), peer)


def _agreed(secret: bytes, public: bytes, transcript: bytes, purpose: bytes, peer: int) -> bytes:
    try:
        return shared(secret, public, transcript, purpose)
    except ValueError as error:
        raise RefusedError(f"the public key of client {peer} cannot be used") from error
