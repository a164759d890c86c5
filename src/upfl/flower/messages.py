"""State to Flower's records and back.

A state is one array of bytes: the length of each name and of each tensor as a file of NumPy's, and these. Flower brings
every array of a message by requests of its own over each of four connections, of which a hundred small tensors would
take a thousand. Nothing that arrives is trusted: no pickled object is read, and no
header decides how much memory is taken. Replies are read as they come, so that the server holds one at a time.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from logging import INFO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from upfl.contract import FOLDS, CrossFitted, Published
from upfl.errors import BadClientError
from upfl.safe.parse import read_array
from upfl.safe.text import one_line
from upfl.state import State, aligned, prefixed, select

ARRAYS, FACTS, SCORES = "arrays", "facts", "scores"  # the records of a message
OWN, SECURE = "own", "secure"  # facts for one node alone; a step of a secure sum
PROBLEM, NO_DATA = "problem", "no_data"  # facts by which a node says why it has nothing to send
FIT = "fit"  # what belongs to a fit is under this word, with its place among the fits of a message
TOGETHER, LENGTHS = "*", struct.Struct("<IQ")  # the name of the array that holds all; what stands before each
POLL = 0.5  # seconds between looks for replies
LONGEST = 300  # characters of a reason


def to_record(state: Mapping[str, Tensor]) -> ArrayRecord:
    parts = []
    for name, value in state.items():
        text, content = name.encode(), Array(value.detach().cpu().contiguous().numpy()).data
        parts += [LENGTHS.pack(len(text), len(content)), text, content]
    return ArrayRecord({TOGETHER: Array(np.frombuffer(b"".join(parts), np.uint8))} if parts else {})


def from_record(record: ArrayRecord) -> State:
    """What a record holds, together or by itself."""
    state: State = {}
    for name, array in record.items():
        state |= _separated(array) if name == TOGETHER else {name: _tensor(name, array)}
    return state


def _separated(array: Array) -> State:
    content, state, start = memoryview(_tensor(TOGETHER, array).numpy().tobytes()), State(), 0
    try:
        while start < len(content):
            name_length, length = LENGTHS.unpack_from(content, start)
            start += LENGTHS.size
            if start + name_length + length > len(content):
                raise ValueError("it ends too early")
            name = str(content[start : start + name_length], "utf-8")
            start += name_length
            state[name] = _tensor(name, Array("", (), "numpy.ndarray", bytes(content[start : start + length])))
            start += length
    except (ValueError, struct.error) as error:
        raise BadClientError(f"its arrays cannot be told apart: {one_line(str(error), LONGEST)}") from error
    return state


def _tensor(name: str, array: Array) -> Tensor:
    """An array as it was sent."""
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError("not an array of NumPy's")
        values = read_array(array.data)
        if not values.flags.c_contiguous:
            raise ValueError("its values are out of order")
        return aligned(torch.from_numpy(values.copy()))
    except Exception as error:  # whatever a node sends, it costs that node alone its part in the round
        raise BadClientError(f"{name[:80]!r} cannot be read: {one_line(str(error), LONGEST)}") from error


def pack(given: CrossFitted) -> State:
    """What newcomers receive with what was fitted without each fold, as one state. What is one tensor is sent once."""
    fitted = given.published.fitted
    state = prefixed("state", given.published.state) | prefixed("fitted", fitted)
    for fold, without in enumerate(given.folds):
        own = {name: value for name, value in without.items() if value is not fitted[name]}
        state |= prefixed(f"without-{fold}", own)
    return state


def unpack(state: State, round: int) -> CrossFitted:
    published = Published(select(state, "state"), round, fitted=select(state, "fitted"))
    return CrossFitted(published, tuple(published.fitted | select(state, f"without-{fold}") for fold in range(FOLDS)))


def arrays_of(reply: Message) -> State:
    """What a node sent, as far as it can be read."""
    if problem := problem_in(reply):
        raise BadClientError(problem)
    if ARRAYS not in reply.content.array_records:
        raise BadClientError("its reply has no arrays")
    return from_record(reply.content.array_records[ARRAYS])


def facts_of(message: Message) -> ConfigRecord:
    return message.content.config_records.get(FACTS) or ConfigRecord()


def refusal(problem: str) -> RecordDict:
    """What a node sends when it has nothing else to send."""
    return RecordDict({FACTS: ConfigRecord({PROBLEM: problem[:LONGEST]})})


def problem_in(reply: Message) -> str | None:
    """Why a node did not do what it was asked for, in one line; none if it did."""
    if reply.has_error():
        reason = (reply.error.reason or "").strip().splitlines()
        return f"failed: {one_line(reason[0], LONGEST) if reason else f'error {reply.error.code}'}"
    problem = facts_of(reply).get(PROBLEM)
    return None if problem is None else one_line(str(problem), LONGEST)


def exchange(grid: Grid, messages: Sequence[Message], timeout: float, what: str) -> Iterator[tuple[int, Message]]:
    """Send messages and yield each reply as it comes, with the node that was asked, until the time is over.

    A line in the log says how long it took: with `--stream`, that is what shows that a run goes on.
    """
    if not messages:
        return
    started, replies = time.monotonic(), 0
    ids = grid.push_messages(messages)
    waiting = {id: message.metadata.dst_node_id for id, message in zip(ids, messages, strict=False) if id}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        for reply in grid.pull_messages(set(waiting)):
            if (node := waiting.pop(reply.metadata.reply_to_message_id, None)) is not None:
                replies += 1
                yield node, reply
        if waiting:
            time.sleep(POLL)
    log(INFO, "%s: %d of %d replies in %.1f s", what, replies, len(messages), time.monotonic() - started)
