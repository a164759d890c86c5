"""Flower's Grid in this process: messages are copied as if they had travelled, and the ClientApp answers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from upfl.flower.client import app

Tamper = Callable[[int, Message, Message], Message | None]  # node, what it was asked, its reply -> what arrives, if so


class InProcessGrid(Grid):
    def __init__(self, nodes: dict[int, dict[str, Any]], tamper: Tamper = lambda node, asked, reply: reply) -> None:
        self.tamper, self.sent, self.replies = tamper, 0, {}  # type: ignore[var-annotated]
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a ServerApp's process has them set
        self.contexts = {node: Context(1, node, config, RecordDict(), {}) for node, config in nodes.items()}

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in deepcopy(list(messages)):
            ids.append(str(self.sent))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent += 1
            node = message.metadata.dst_node_id
            try:
                reply = app(deepcopy(message), self.contexts[node])
            except Exception as error:  # as Flower has it
                reply = Message(Error(2, str(error)), reply_to=message)
            if (arriving := self.tamper(node, message, deepcopy(reply))) is not None:
                self.replies[ids[-1]] = arriving
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    create_message = run = set_run = send_and_receive  # type: ignore[assignment]
