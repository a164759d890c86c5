"""A node's side of secure sums over Flower: the protocol's steps as messages, and what is masked.

The node looks after its own part, because nobody else can: that it is finite, in range and of the form that is to be
added, clipped and with its share of the noise where the run is private, and that the sum's name is the name of what is
asked for. What it was asked for goes into what nodes sign, so that all are asked for the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from upfl.engine.fold import FixedPointSum
from upfl.errors import BadClientError, ConfigError
from upfl.flower.messages import ARRAYS, SECURE, facts_of, to_record
from upfl.flower.privacy import clipped
from upfl.flower.secure import Advert, Member, RefusedError, Session
from upfl.flower.secure.primitives import Vector
from upfl.flower.secure.session import AND, packed
from upfl.flower.terms import Node
from upfl.flower.training_node import TrainingNode

STATE = "secure"  # the record of a node's context that holds what it must remember between steps
VECTOR = "vector"


def answer(message: Message, context: Context) -> RecordDict:
    """Take a step of a secure sum."""
    node = Node.of(context.node_config, "node-config")
    if node.client is None or not node.secure:
        raise ConfigError("node-config: this node has no secure sums (secure)").public()
    key, peers = node.keys
    member = Member(node.client, key, peers, context.state.config_records.get(STATE), node.least)
    asked: Mapping[str, Any] = message.content.config_records.get(SECURE) or {}
    if (step := STEPS.get(str(asked.get("step")))) is None:
        raise RefusedError("it was asked for a step that no secure sum has")
    try:
        return step(member, asked, message, context)
    finally:
        context.state[STATE] = ConfigRecord(member.state)


def said(**what: Any) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord(what)})


def _advertise(member: Member, asked: Mapping[str, Any], message: Message, context: Context) -> RecordDict:
    names = {"run": str, "name": str, "attempt": int, "threshold": int, "size": int}
    advert = member.advertise(Session(**{name: kind(asked[name]) for name, kind in names.items()}))
    return said(cipher_key=advert.cipher_key, mask_key=advert.mask_key, signature=advert.signature)


def _share(member: Member, asked: Mapping[str, Any], message: Message, context: Context) -> RecordDict:
    rows = zip(asked["clients"], asked["cipher_keys"], asked["mask_keys"], asked["signatures"], strict=True)
    sealed = member.share(Advert(*row) for row in rows)
    return said(clients=list(sealed), sealed=list(sealed.values()))


def _mask(member: Member, asked: Mapping[str, Any], message: Message, context: Context) -> RecordDict:
    session, node = member.expected(), TrainingNode(message, context)
    if (session.run, session.name) != (node.terms.run, name_of(node.facts)):
        raise RefusedError(f"the sum {session.name} is not what it is asked for ({name_of(node.facts)})")
    vector = _vector(node, session)
    masked = member.mask(dict(zip(asked["clients"], asked["sealed"], strict=True)), vector, digest(message))
    return RecordDict({ARRAYS: to_record({VECTOR: torch.from_numpy(masked.view(np.int64))})})


def _agree(member: Member, asked: Mapping[str, Any], message: Message, context: Context) -> RecordDict:
    return said(signature=member.agree(asked["live"]))


def _unmask(member: Member, asked: Mapping[str, Any], message: Message, context: Context) -> RecordDict:
    shares = member.unmask(dict(zip(asked["clients"], asked["signatures"], strict=True)))
    return said(clients=list(shares), shares=list(shares.values()))


Step = Callable[[Member, Mapping[str, Any], Message, Context], RecordDict]
STEPS: dict[str, Step] = {
    "advertise": _advertise,
    "share": _share,
    "mask": _mask,
    "agree": _agree,
    "unmask": _unmask,
}


def name_of(facts: Mapping[str, Any]) -> str:
    """The name of a sum, by what is added: a node gives its part of a name once. Of fits it is all of their names."""
    name = f"{facts['work']}/{facts['round']}"
    if facts["work"] != "fit":
        return name
    return AND.join(f"{name}/{key}/{step}" for key, step in zip(facts["keys"], facts["fit_rounds"], strict=True))


def digest(message: Message) -> bytes:
    """Of what a message asks for, but for what concerns this node alone."""
    arrays = message.content.array_records.get(ARRAYS) or ArrayRecord()
    parts = [part for name, a in sorted(arrays.items()) for part in (name, a.dtype, json.dumps(a.shape), a.data)]
    return hashlib.sha256(packed(json.dumps(dict(facts_of(message)), sort_keys=True), *parts)).digest()


def _vector(node: TrainingNode, session: Session) -> Vector:
    """What this node adds, as the integers that the sum is made of; zeros, and no count, where it has no data."""
    work, up = node.facts["work"], None
    names = [str(name) for name in node.facts["names"]]
    if work == "fit":
        return _fits_vector(node, names)
    if work == "train":
        up = node.training.checked(node.trained())
        if node.terms.privacy:
            up = clipped(up, node.terms.privacy.clip)
    elif work == "features":
        up = node.feature_sums()
    elif work == "evaluate" and (scores := node.scored()):
        up = {name: rows_of(node, counts) for name, counts in scores.items()}
    if up is None:
        return np.zeros(session.size, np.uint64)
    total = _summed(node, up, names, node.training.scales if work == "train" else None)
    if work == "train" and node.terms.privacy:
        node.terms.privacy.check(up)
        node.terms.privacy.disturb(total, session.threshold)
    return total.buffer.numpy().view(np.uint64)


def _fits_vector(node: TrainingNode, names: Sequence[str]) -> Vector:
    """Its parts of several fits, side by side."""
    parts = []
    for (fit, up), key, size in zip(node.fitted(), node.facts["keys"], node.facts["sizes"], strict=True):
        own = [name.removeprefix(f"{key}/") for name in names if name.startswith(f"{key}/")]
        total = None if up is None else _summed(node, fit.checked(up), own, fit.scales).buffer
        parts.append(np.zeros(int(size), np.uint64) if total is None else total.numpy().view(np.uint64))
        if len(parts[-1]) != int(size):
            raise RefusedError(f"{key}: {len(parts[-1])} values, and {int(size)} are to be added")
    return np.concatenate(parts)


def _summed(
    node: TrainingNode, up: Mapping[str, Tensor], names: Sequence[str], scales: Mapping[str, int] | None
) -> FixedPointSum:
    """This node's part alone as a sum."""
    if up.keys() != set(names):
        raise RefusedError("what is to be added has other names than what it computed")
    total = FixedPointSum({name: up[name] for name in names}, int(node.facts["clients"]), scales)
    try:
        total.add(up)
    except BadClientError as error:  # whose message has values in it
        raise RefusedError("what it has to add is not finite, too large, or not of the expected form") from error
    return total


def rows_of(node: TrainingNode, counts: Tensor) -> Tensor:
    """A node's counts in the row of its kind: nodes are told apart by architecture and by whether they train."""
    kinds, mine = node.facts["kinds"], kind_of(node.setup.federation, node.id)
    rows = torch.zeros(len(kinds), 3, dtype=torch.int64)
    rows[kinds.index(mine)] = counts
    return rows


def kind_of(federation: Any, client: int) -> str:
    return f"{federation.architecture('training', client)}{' held out' if federation.training.held_out[client] else ''}"
