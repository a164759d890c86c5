"""The ClientApp: what a node answers when it is asked. What it computes for that is in training_node.py."""

from __future__ import annotations

import tempfile
import traceback
from collections import ChainMap
from collections.abc import Callable
from logging import ERROR, INFO
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
from upfl.engine.rounds import one_thread
from upfl.engine.setup import named_federation
from upfl.errors import ConfigError, RunError, UpflError
from upfl.flower import masked
from upfl.flower.messages import ARRAYS, FACTS, FIT, NO_DATA, SCORES, facts_of, from_record, refusal, to_record
from upfl.flower.privacy import clipping
from upfl.flower.terms import Node
from upfl.flower.training_node import TrainingNode
from upfl.state import prefixed

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
    return RecordDict({ARRAYS: to_record(plain(message, context).trained())})


@app.train("fit")
@answering
def fit(message: Message, context: Context) -> RecordDict:
    """A round of each fit that it is asked for."""
    found = [up for _, up in plain(message, context).fitted()]
    parts = [prefixed(f"{FIT}-{place}", up) for place, up in enumerate(found) if up is not None]
    without = [place for place, up in enumerate(found) if up is None]
    facts = ConfigRecord({NO_DATA: without} if without else {})
    return RecordDict({ARRAYS: to_record(dict(ChainMap(*parts))), FACTS: facts})


@app.query("features")
@answering
def features(message: Message, context: Context) -> RecordDict:
    return RecordDict({ARRAYS: to_record(plain(message, context).feature_sums())})


@app.evaluate()
@answering
def evaluate(message: Message, context: Context) -> RecordDict:
    scores: dict[str, Any] = {name: counts.tolist() for name, counts in plain(message, context).scored().items()}
    return RecordDict({SCORES: MetricRecord(scores)})


def plain(message: Message, context: Context) -> TrainingNode:
    """A node that may send what is its own as it is."""
    node = TrainingNode(message, context)
    if node.terms.secure:
        raise ConfigError("this run's sums are secure: nothing goes up in the clear").public()
    return node


@app.query("secure")
@answering
def secure(message: Message, context: Context) -> RecordDict:
    """A step of a secure sum."""
    return masked.answer(message, context)


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
    log(INFO, "%s", mine.summary)
    facts: dict[str, Any] = {"samples": mine.manifest.samples}
    if node.share == "estimates":
        diary = mine.diary
        facts |= {"personalizer": mine.manifest.personalizer, "steps": diary.steps}
        facts |= {"entropy": [diary.entropy[0], diary.entropy[-1]]} if diary.entropy else {}
        facts |= {"likeness": diary.likeness.verdict} if diary.likeness else {}
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
        samples: Images = federation.source.x[federation.new.all(node.newcomer)]
    elif node.data is not None:
        samples = node.data
    else:
        raise ConfigError("node-config: a newcomer needs data, a folder or a file without labels")
    return received.personalize(samples, node.personalizer, architecture=node.architecture)
