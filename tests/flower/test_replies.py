"""Replies that cannot be used, and nodes that come and go."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message

from tests.helpers.flower import BAD, CLIENTS, Watch, assert_same_run, bad_in, federated, nodes, spoiled
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import assert_memory_counted_once, lines, result, server, small
from upfl import api
from upfl.errors import StoppedError
from upfl.flower.messages import ARRAYS, FACTS


def with_array(reply: Message, array: Array) -> Message:
    record = reply.content.array_records[ARRAYS]
    reply.content[ARRAYS] = ArrayRecord({**record, "psi.fc1.bias": array})
    return reply


def npy(header: str, body: bytes = b"") -> Array:
    text = header.ljust(117).encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
    return Array("float32", (16,), "numpy.ndarray", content)


SPOILS = {
    "not finite or too large": spoiled(lambda state: state | {"psi.fc1.bias": state["psi.fc1.bias"] * math.nan}),
    "expected torch.float32 [16]": spoiled(lambda state: state | {"psi.fc1.bias": torch.zeros(17)}),
    "names differ": spoiled(lambda state: {name: value for name, value in state.items() if name != "weight"}),
    "is torch.float64": spoiled(lambda state: state | {"psi.fc1.bias": state["psi.fc1.bias"].double()}),
    "above 100": spoiled(lambda state: state | {"psi.fc1.bias": torch.full((16,), 1e5)}),
    "did not reply": lambda reply: None,
    "no arrays": lambda reply: make_message(reply.metadata, RecordDict({FACTS: ConfigRecord({})})),
    # A header that announces a terabyte must not have it allocated.
    "and 0 follow": lambda reply: with_array(
        reply, npy("{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000,), }")
    ),
    "objects": lambda reply: with_array(
        reply, npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"x" * 8)
    ),
    # NumPy's reader ends in SyntaxError or TokenError here, which once stopped the run.
    "cannot be read: its header": lambda reply: with_array(reply, npy("{'descr': (\n")),
}


def test_a_reply_that_cannot_be_used_is_left_out_and_named(tmp_path: Path) -> None:
    """Half of them in the second round, half in the third, each by a client of its own."""
    half = len(SPOILS) // 2
    reasons = {(1 + i // half, i % half): reason for i, reason in enumerate(SPOILS)}

    def tamper(node: int, asked: Message, reply: Message) -> Message | None:
        place = asked.content.config_records[FACTS].get("round"), nodes()[node]["client"]
        return SPOILS[reasons[place]](reply) if is_train(asked) and place in reasons else reply

    config = small("counting", rounds=4, clients_per_round=1.0)
    federated(config, tmp_path / "run", InProcessGrid(nodes(), tamper), timeout=0.5)
    left_out = [line["left_out"] for line in lines(tmp_path / "run")]
    assert [len(entries) for entries in left_out] == [0, half, half, 0]
    for (round, client), reason in reasons.items():
        (entry,) = [entry for entry in left_out[round] if entry["client"] == client]
        assert reason in entry["reason"]
    assert result(tmp_path / "run")["left_out"] == len(SPOILS)
    assert_memory_counted_once(tmp_path / "run")


def test_a_node_that_is_left_out_changes_nothing_but_its_absence(tmp_path: Path) -> None:
    config = small("scaffold", rounds=2, clients_per_round=1.0)
    nan = SPOILS["not finite or too large"]
    federated(config, tmp_path / "bad", InProcessGrid(nodes(), bad_in({0, 1}, nan)))
    absent = {node: about for node, about in nodes().items() if node != BAD}
    federated(config, tmp_path / "absent", InProcessGrid(absent))
    ours, theirs = server(tmp_path / "bad"), server(tmp_path / "absent")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_node_whose_code_fails_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_TEST_FAULTS", "finish-raise:1:2 loss:2:4")
    federated(small(clients_per_round=1.0), tmp_path / "run", InProcessGrid(nodes()))
    left_out = [line["left_out"] for line in lines(tmp_path / "run")]
    assert [[entry["client"] for entry in entries] for entries in left_out] == [[], [2], [4], []]
    assert left_out[1][0]["reason"] == "its code failed (ValueError); its own log says why"
    assert left_out[2][0]["reason"] == "its loss is not finite"
    assert_memory_counted_once(tmp_path / "run")


def test_a_round_with_too_few_good_replies_is_tried_again_and_then_stops_the_run(tmp_path: Path) -> None:
    config = small("counting", rounds=3, clients_per_round=1.0)
    asked: list[int] = []

    def fails_twice(node: int, message: Message, reply: Message) -> Message | None:
        if is_train(message, 1):
            asked.append(node)
            if len(asked) <= 2 * CLIENTS:  # two attempts
                return None
        return reply

    federated(config, tmp_path / "again", InProcessGrid(nodes(), fails_twice), timeout=0.3, min_nodes=5)
    api.train(config, tmp_path / "engine", workers=1)
    assert len(asked) == 3 * CLIENTS
    assert_same_run(tmp_path / "again", tmp_path / "engine")

    silent = InProcessGrid(nodes(), lambda node, message, reply: None if is_train(message, 1) else reply)
    with pytest.raises(StoppedError, match=r"round 2: 0 good replies .* 5 are needed"):
        federated(config, tmp_path / "stopped", silent, timeout=0.1, min_nodes=5)
    assert len(lines(tmp_path / "stopped")) == 1
    silent.tamper = lambda node, message, reply: reply
    federated(config, tmp_path / "stopped", silent, min_nodes=5)
    assert_same_run(tmp_path / "stopped", tmp_path / "engine")


def is_train(message: Message, round: int | None = None) -> bool:
    facts = message.content.config_records[FACTS]
    return message.metadata.message_type == "train" and round in (None, facts["round"])


def test_too_few_nodes_stop_the_run_with_the_reason_of_those_that_do_not_fit(tmp_path: Path) -> None:
    grid = InProcessGrid({1: {"client": 0}, 2: {"client": 99}})
    with pytest.raises(StoppedError, match=r"only 1 training node\(s\) .* 2 are needed .* node 2: .*client is 99"):
        federated(small("fedavg"), tmp_path / "run", grid, min_nodes=2)


def test_a_node_that_joins_later_takes_part_and_one_that_leaves_is_named(tmp_path: Path) -> None:
    grid = InProcessGrid(nodes())
    late = {node: grid.contexts.pop(node) for node in (1000, 993)}

    class Comings(Watch):
        def round(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 1:
                grid.contexts.update(late)
            if metrics["round"] == 2:
                del grid.contexts[BAD]

    federated(small("counting", clients_per_round=1.0), tmp_path / "run", grid, Comings())
    assert [line["clients"] for line in lines(tmp_path / "run")] == [6, 8, 7, 7]
    assert [line.get("absent") for line in lines(tmp_path / "run")] == [None, None, [3], [3]]
    assert_memory_counted_once(tmp_path / "run")
