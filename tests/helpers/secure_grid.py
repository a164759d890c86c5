"""Nodes with secure sums over an in-process grid, and links that lose nodes or cheat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from tests.helpers.flower import nodes
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, result, server
from upfl.flower.messages import ARRAYS, FACTS, SECURE, from_record


def secure_nodes(keys: Path, **more: Any) -> dict[int, dict[str, Any]]:
    own = {"secure": True, "peers": str(keys / "peers")}
    return {
        node: {**about, **own, "key": str(keys / f"node-{about['client'] + 1}.key"), **more}
        for node, about in nodes().items()
    }


class LinkGrid(InProcessGrid):
    """A grid whose nodes can be killed, and whose link can change what it sends."""

    def __init__(self, about: dict[int, dict[str, Any]]) -> None:
        super().__init__(about, self._after)
        self.kill: Callable[[int, dict[str, Any]], bool] = lambda node, asked: False
        self.cheat: Callable[[int, Message], None] = lambda node, message: None
        self.asked: list[tuple[int, str, str]] = []  # node, step, work or nothing
        self.masked: list[np.ndarray[Any, Any]] = []

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.cheat(node, message)
            ids += super().push_messages([message]) if node in self.contexts else [""]
        return ids

    def _after(self, node: int, message: Message, reply: Message) -> Message | None:
        asked = dict(message.content.config_records.get(SECURE) or {})
        work = dict(message.content.config_records.get(FACTS) or {}).get("work", "")
        self.asked.append((node, str(asked.get("step", message.metadata.message_type)), str(work)))
        if self.kill(node, asked | {"work": work}):
            del self.contexts[node]
            return None
        if asked.get("step") == "mask" and reply.has_content() and ARRAYS in reply.content.array_records:
            self.masked.append(from_record(reply.content.array_records[ARRAYS])["vector"].numpy())
        return reply


def comparable(line: dict[str, Any]) -> dict[str, Any]:
    """What a round's line says but for times and costs."""
    return {
        name: value for name, value in line.items() if not name.endswith("_s") and name not in ("secure", "bytes_up")
    }


def assert_same_but_for_costs(secure: Path, plain: Path) -> None:
    ours, theirs = lines(secure), lines(plain)
    assert [comparable(line) for line in ours] == [comparable(line) for line in theirs]
    states = server(secure), server(plain)
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    rows = [[{**row, "clients": None} for row in result(path)["rows"]] for path in (secure, plain)]
    assert rows[0] == rows[1]
