"""The ClientApp: what a node does when it is asked.

A node keeps no state in the process: every message brings the run's terms and the server's state. A training whose
clients remember keeps each version of a node's memory under the round that made it, in Flower's context or, if the
owner names a folder, on disk. The server says which version counts, by which a reply that was lost, came late or was
refused leaves no trace, and a resumed run finds the memory that its checkpoint means.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from upfl import plugins
from upfl.bundle import Bundle, Images, PersonalModel
from upfl.bundle.manifest import CARD, MANIFEST, SUMS, WEIGHTS
from upfl.config import Config
from upfl.contract import needs_of
from upfl.engine.clients import LocalClient
from upfl.engine.evaluate import score_validation, shown_to
from upfl.engine.fitting import fit_client
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_client
from upfl.engine.rounds import matrix_precision, one_thread
from upfl.engine.setup import assemble, named_federation
from upfl.errors import ConfigError, RunError, UpflError
from upfl.flower.messages import ARRAYS, FACTS, NO_DATA, SCORES, facts_of, from_record, refusal, to_record, unpack
from upfl.flower.privacy import clipping
from upfl.flower.terms import Node, Terms, node_federation
from upfl.state import State, all_aligned, select, to_device

Handler = Callable[[Message, Context], RecordDict]

app = ClientApp()


def answering(handler: Handler) -> Callable[[Message, Context], Message]:
    """One thread, no gradients; what went wrong goes into the node's log, and back what others may know of it."""

    def answer(message: Message, context: Context) -> Message:
        try:
            plugins.load(plugins.from_environment())
            with one_thread(), torch.no_grad():
                content = handler(message, context)
        except UpflError as error:
            log(ERROR, "%s", error)
            content = refusal(error.reason)
        except Exception as error:  # Flower would send its text, which may name files and data
            log(ERROR, "%s", traceback.format_exc())
            content = refusal(f"its code failed ({type(error).__name__}); its own log says why")
        return Message(content, reply_to=message)

    return answer


@app.query("introduce")
@answering
def introduce(message: Message, context: Context) -> RecordDict:
    """Which client this node is; a training node has looked at its data by then."""
    node = Node.of(context.node_config, "node-config")
    if node.client is None:
        return RecordDict({FACTS: ConfigRecord({NO_DATA: True})})
    TrainingNode(message, context)
    return RecordDict({FACTS: ConfigRecord({"client": node.client})})


@app.train(mods=[clipping])
@answering
def train(message: Message, context: Context) -> RecordDict:
    """One round of this node's client."""
    node = TrainingNode(message, context)
    round, server = int(node.facts["round"]), from_record(message.content.array_records[ARRAYS])
    with node.precision():
        up, memory = train_client(node.training, server, node.memory(), node.client(round))
    if node.training.remembers:
        node.store.save(round, memory)
        node.store.forget_before(int(node.facts["memory_saved"]), but=round)
    return RecordDict({ARRAYS: to_record(up)})


@app.train("fit")
@answering
def fit(message: Message, context: Context) -> RecordDict:
    """One round of a fit that personalizers need: on this node's validation data, or its training data."""
    node = TrainingNode(message, context)
    arrays, key = from_record(message.content.array_records[ARRAYS]), str(node.facts["key"])
    stage = needs_of(list(node.setup.personalizers.values()))[key].stage(unpack(arrays, int(node.facts["round"])))
    if not node.setup.federation.training.counts(stage.split)[node.id]:
        return RecordDict({FACTS: ConfigRecord({NO_DATA: True})})
    round, store = int(node.facts["fit_round"]), ContextMemory(context.state, f"fit-{key}")
    with node.precision():
        memory = stage.memory(node.client(0)) if node.facts["memory"] < 0 else store.load(int(node.facts["memory"]))
        up, memory = fit_client(stage, select(arrays, "fit"), memory, node.client(round))
    store.save(round, memory)
    store.forget_before(round, but=round)
    return RecordDict({ARRAYS: to_record(up)})


@app.evaluate()
@answering
def evaluate(message: Message, context: Context) -> RecordDict:
    """How well each personalizer does on this node's validation data: correct before, correct after, samples."""
    node = TrainingNode(message, context)
    given, setup = unpack(from_record(message.content.array_records[ARRAYS]), int(node.facts["round"])), node.setup
    shown = shown_to(node.id, setup.federation, given)
    trains = not setup.federation.training.held_out[node.id]
    memory = node.memory() if node.training.starts_from_memory and trains else None
    validates = setup.federation.training.counts("validation")[node.id] > 0
    scores: dict[str, Any] = {}
    with node.precision():
        for name, personalizer in setup.personalizers.items() if validates else ():
            counts = score_validation(
                setup.federation, setup.inputs, personalizer, shown, setup.config.seed, node.id, memory
            )
            scores[name] = counts.tolist()
    return RecordDict({SCORES: MetricRecord(scores)})


@app.query("personalize")
@answering
def personalize(message: Message, context: Context) -> RecordDict:
    """Make a newcomer's own model of the bundle; what goes back is what the owner allows, by default a count."""
    node = Node.of(context.node_config, "node-config")
    if node.client is not None:
        return RecordDict({FACTS: ConfigRecord({NO_DATA: True})})
    try:
        mine = _personal_model(message, node)
        if node.out is not None:
            mine.save(node.out)
    except UpflError as error:
        log(ERROR, "%s", error)  # it may name files: for the owner alone
        raise RunError("it could not personalize; its own log says why").public() from error
    facts: dict[str, Any] = {"samples": mine.manifest.samples}
    if node.share == "estimates":
        diary = mine.diary
        facts |= {"personalizer": mine.manifest.personalizer, "steps": diary.steps}
        facts |= {"entropy": [diary.entropy[0], diary.entropy[-1]]} if diary.entropy else {}
        facts |= {"accuracy": [estimate.value for estimate in diary.accuracy]} if diary.accuracy else {}
    return RecordDict({FACTS: ConfigRecord(facts)})


def _personal_model(message: Message, node: Node) -> PersonalModel:
    files = message.content.array_records[ARRAYS]
    with tempfile.TemporaryDirectory(prefix="upfl-bundle-") as folder:
        for name in (MANIFEST, WEIGHTS, CARD, SUMS):  # no other file is written, whatever was sent
            if name in files:
                Path(folder, name).write_bytes(from_record(ArrayRecord({name: files[name]}))[name].numpy().tobytes())
        received = Bundle.load(folder)
    if node.newcomer is not None:
        federation = named_federation(Config.model_validate_json(str(facts_of(message)["config"])))
        if node.newcomer >= len(federation.new):
            raise ConfigError(f"node-config: newcomer is {node.newcomer}; there are {len(federation.new)}")
        if federation.new.angles[node.newcomer]:
            raise ConfigError("node-config: newcomer: images of this partition are turned; give data")
        samples: Images = federation.source.images[federation.new.all(node.newcomer)]
    elif node.data is not None:
        samples = node.data
    else:
        raise ConfigError("node-config: a newcomer needs data, a folder or a file without labels")
    return received.personalize(samples, node.personalizer, architecture=node.architecture)


class TrainingNode:
    """A node with what a message says: its client's data and the training."""

    def __init__(self, message: Message, context: Context) -> None:
        self.facts: dict[str, Any] = dict(facts_of(message))
        self.terms = Terms.received(self.facts["terms"])
        self.node: Node = Node.of(context.node_config, "node-config")
        self.setup = assemble(self.terms.config, node_federation(self.terms, self.node), self.node.device)
        self.training = self.setup.training
        assert self.node.client is not None
        self.id = self.node.client
        self.store: ContextMemory | DiskMemory
        if self.node.state is None:
            self.store = ContextMemory(context.state, f"client-{self.id}")
        else:
            self.store = DiskMemory(RunFolder(self.node.state.expanduser() / self.terms.run), self.id)

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
