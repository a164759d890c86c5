"""A training node's work: what it computes when it is asked, wherever the result then goes.

A node keeps no state in the process: every message brings the run's terms and the server's state. A training whose
clients remember keeps each version of a node's memory under the round that made it, in Flower's context or, if the
owner names a folder, on disk. The server says which version counts, by which a reply that was lost, came late or was
refused leaves no trace, and a resumed run finds the memory that its checkpoint means.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from logging import ERROR
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.logger import log
from torch import Tensor

from upfl.contract import Fit, HasNeeds, needs_of
from upfl.data.forms import Vectors
from upfl.data.standardize import sums_of
from upfl.engine.clients import LocalClient
from upfl.engine.evaluate import score_validation, shown_to
from upfl.engine.fitting import clients_of, fit_client
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_client
from upfl.engine.rounds import matrix_precision
from upfl.engine.setup import assemble
from upfl.errors import ConfigError, RunError
from upfl.flower import features
from upfl.flower.messages import ARRAYS, FIT, OWN, facts_of, from_record, to_record, unpack
from upfl.flower.terms import Node, Terms, node_federation
from upfl.personalize.likeness import LikenessCheck
from upfl.state import State, all_aligned, select, to_device


class TrainingNode:
    """A node with what a message says: its client's data and the training."""

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.context = message, context
        self.facts: dict[str, Any] = {**facts_of(message), **(message.content.config_records.get(OWN) or {})}
        self.terms = Terms.received(self.facts["terms"])
        self.node: Node = Node.of(context.node_config, "node-config")
        if self.node.secure != self.terms.secure:
            does = "takes part in secure sums only, and this run has none" if self.node.secure else "has no secure sums"
            raise ConfigError(f"node-config: this node {does} (secure)").public()
        self.setup = assemble(self.terms.config, node_federation(self.terms, self.node), self.node.device)
        self.training = self.setup.training
        assert self.node.client is not None
        self.id = self.node.client
        self.store: ContextMemory | DiskMemory
        if self.node.state is None:
            self.store = ContextMemory(context.state, f"client-{self.id}")
        else:
            self.store = DiskMemory(RunFolder(self.node.state.expanduser() / self.terms.run), self.id)

    @property
    def arrays(self) -> State:
        return from_record(self.message.content.array_records[ARRAYS])

    def precision(self) -> AbstractContextManager[None]:
        return matrix_precision(self.terms.config.precision)

    def client(self, round: int) -> LocalClient:
        return self.setup.client(self.id, round)

    def memory(self) -> State:
        """The memory that counts, by the server's word; before the client first took part, what it starts with."""
        if not self.training.remembers:
            return {}
        version = int(self.facts["memory"])
        memory = self.training.memory(self.client(0)) if version < 0 else self.store.load(version)
        return all_aligned(to_device(memory, self.setup.device))

    # Work

    def feature_sums(self) -> State:
        """Sums of its train split's features as they are, from which all nodes' features are standardized."""
        source, own = self.setup.federation.source, self.setup.federation.training.train(self.id)
        if not isinstance(source.form, Vectors):
            raise ConfigError("this run's samples are no rows of features").public()
        return features.to_state(sums_of(np.asarray(source.x), own))

    def trained(self) -> Mapping[str, Tensor]:
        """One round of this node's client: what goes up."""
        round = int(self.facts["round"])
        with self.precision():
            up, memory = train_client(self.training, self.arrays, self.memory(), self.client(round))
        if self.training.remembers:
            self.store.save(round, memory)
            self.store.forget_before(int(self.facts["memory_saved"]), but=round)
        return up

    def fitted(self) -> list[tuple[Fit, Mapping[str, Tensor] | None]]:
        """One round of each fit that a message is about; nothing for those that this node has no part in."""
        arrays, limit = self.arrays, self.terms.config.evaluate_clients
        given = unpack(arrays, int(self.facts["round"]))
        needed: list[HasNeeds] = [*self.setup.personalizers.values(), LikenessCheck(self.training)]
        needs, found = needs_of(needed), list[tuple[Fit, Mapping[str, Tensor] | None]]()
        for place, (key, round) in enumerate(zip(self.facts["keys"], self.facts["fit_rounds"], strict=True)):
            fit = needs[str(key)].stage(given)
            takes_part = self.id in clients_of(type(fit), self.setup.federation, limit)
            up = self._fit_round(str(key), fit, select(arrays, f"{FIT}-{place}"), int(round)) if takes_part else None
            found.append((fit, up))
        return found

    def _fit_round(self, key: str, fit: Fit, server: State, round: int) -> Mapping[str, Tensor]:
        store = ContextMemory(self.context.state, f"fit-{key}")
        with self.precision():
            memory = store.load(round - 1) if round else fit.memory(self.client(0))
            up, memory = fit_client(fit, server, memory, self.client(round))
        if round + 1 < fit.rounds:
            store.save(round, memory)
        store.forget_before(round - 1, but=round)  # the one before, too, is needed where a round is tried again
        return up

    def scored(self) -> dict[str, Tensor]:
        """How each personalizer does on its validation data: correct before, correct after, samples. None: no data."""
        setup, federation = self.setup, self.setup.federation
        shown = shown_to(self.id, federation, unpack(self.arrays, int(self.facts["round"])))
        trains = not federation.training.held_out[self.id]
        memory = self.memory() if self.training.starts_from_memory and trains else None
        if not federation.training.counts("validation")[self.id]:
            return {}
        with self.precision():
            return {
                name: score_validation(setup.population, one, shown, self.id, memory)
                for name, one in setup.personalizers.items()
            }


class ContextMemory:
    """Versions of a memory in Flower's context: they last as long as the SuperNode and the Flower run."""

    def __init__(self, state: RecordDict, whose: str) -> None:
        self.state, self.prefix = state, f"memory-{whose}-"

    def save(self, round: int, memory: State) -> None:
        self.state[f"{self.prefix}{round}"] = to_record(memory)

    def load(self, round: int) -> State:
        name = f"{self.prefix}{round}"
        if name not in self.state.array_records:
            raise RunError(
                f"its memory of round {round + 1} is gone: it was in a SuperNode or a Flower run that has ended. "
                "Give a folder as `state` in node-config"
            ).public()
        return from_record(self.state.array_records[name])

    def forget_before(self, round: int, but: int) -> None:
        for name in list(self.state.array_records):
            version = name.removeprefix(self.prefix)
            if version != name and not round <= int(version) <= but:
                del self.state[name]


class DiskMemory:
    """Versions of a client's memory on the node's disk: they last."""

    def __init__(self, folder: RunFolder, client: int) -> None:
        self.folder, self.client = folder, client

    def save(self, round: int, memory: State) -> None:
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder.path}: `state` in node-config cannot be made: {error.strerror}") from error
        self.folder.save_memory(self.client, round, memory)

    def load(self, round: int) -> State:
        try:
            return self.folder.load_memory(self.client, round, torch.device("cpu"))
        except RunError as error:
            log(ERROR, "%s", error)
            missing = f"its memory of round {round + 1} is missing or damaged; its own log says why"
            raise RunError(missing).public() from error

    def forget_before(self, round: int, but: int) -> None:
        versions = self.folder.memory_versions(self.client)
        self.folder.remove_memory((self.client, version) for version in versions if not round <= version <= but)
