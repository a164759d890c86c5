"""Handing a bundle to nodes that are newcomers."""

from __future__ import annotations

import json
import time
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from upfl.bundle import Bundle
from upfl.bundle.manifest import SUMS
from upfl.errors import ConfigError, StoppedError
from upfl.flower.cohort import STEP
from upfl.flower.messages import ARRAYS, FACTS, NO_DATA, exchange, facts_of, problem_in
from upfl.flower.terms import Settings, describe


def personalize(grid: Grid, settings: Settings) -> list[dict[str, Any]]:
    """Hand the bundle to nodes that are newcomers; returns what they let us know."""
    if settings.bundle is None:
        raise ConfigError("bundle: give the path of a bundle on the SuperLink's machine (a training run's OUT/bundle)")
    manifest = Bundle.load(settings.bundle).manifest  # checks it
    if manifest.members:
        raise ConfigError(f"{settings.bundle}: holds training clients' own layers; hand it on yourself, if they agree")
    files = {name: (settings.bundle / name).read_bytes() for name in [*manifest.files(), SUMS]}
    arrays = ArrayRecord({name: Array(np.frombuffer(content, np.uint8)) for name, content in files.items()})
    facts = ConfigRecord({"config": describe(settings).model_dump_json()})
    asked: set[int] = set()
    answers: list[dict[str, Any]] = []
    end = time.monotonic() + settings.wait
    while sum("samples" in newcomer for newcomer in answers) < settings.min_nodes and time.monotonic() < end:
        if asked:
            time.sleep(STEP)
        nodes = sorted(set(grid.get_node_ids()) - asked)
        messages = [
            Message(RecordDict({FACTS: facts, ARRAYS: arrays}), node, "query.personalize", ttl=settings.timeout)
            for node in nodes
        ]
        asked |= set(nodes)
        for node, reply in exchange(grid, messages, settings.timeout, "personalize"):
            if problem := problem_in(reply):
                answers.append({"node": node, "problem": problem})
            elif not facts_of(reply).get(NO_DATA):
                answers.append({"node": node, **facts_of(reply)})
    for newcomer in answers:
        log(INFO, "%s", json.dumps(newcomer))
    if not any("samples" in newcomer for newcomer in answers):
        raise StoppedError(f"no newcomer personalized within {settings.wait:g} s (of {len(asked)} nodes asked)")
    return answers
