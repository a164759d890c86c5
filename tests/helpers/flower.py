"""Runs of the Flower app over an in-process grid."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from tests.in_process_grid import InProcessGrid, Tamper
from tests.observers import Watching
from tests.plugin_methods import lines, result, tensors, timeless
from upfl import data
from upfl.config import Config
from upfl.data.forms import Pixels
from upfl.engine.rounds import Engine
from upfl.flower import server as flower_server
from upfl.flower.messages import ARRAYS, FACTS, from_record, to_record
from upfl.flower.server import train
from upfl.flower.terms import Settings
from upfl.state import State

CLIENTS = 8


load = functools.cache(data.load)


def nodes(**more: Any) -> dict[int, dict[str, Any]]:
    """A node for each training client; its Flower number says nothing about its client's."""
    return {1000 - 7 * client: {"client": client, **more} for client in range(CLIENTS)}


def federated(
    config: Config, out: Path, grid: InProcessGrid, observer: Any = None, compared: bool = False, **more: Any
) -> Path:
    """A run of the Flower app that is described by a configuration as it is.

    What newcomers compare their data with takes longer than the run. It is fitted where it is asked for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower_server, "describe", lambda settings: config)
        if not compared:
            patch.setattr(flower_server, "_checked", lambda engine, published, private: published)
        train(grid, Settings(**{"out": out, "min_nodes": 1, "timeout": 5, "wait": 0.2} | more), observer)
    return out


def assert_same_run(flower: Path, engine: Path) -> None:
    """The same metrics, result and tensors; nodes keep the memories that the engine keeps in the folder."""
    assert timeless(lines(flower)) == timeless(lines(engine))
    assert result(flower) == result(engine)
    best = [path.relative_to(engine) for path in engine.glob("best/*.safetensors")]
    assert best
    for name in [*best, Path("checkpoint.safetensors")]:
        ours, theirs = tensors(flower / name), tensors(engine / name)
        if ours.pop("memory_digests", None):
            theirs.pop("memory_digests")  # of files that nodes have
        assert ours == theirs


class Watch(Watching):
    """The server's state after every round."""

    def __init__(self, stop_after: int = 0) -> None:
        self.states: list[State] = []
        self.stop_after = stop_after

    def begin(self, run: Engine[Any]) -> None:
        self.run = run

    def round(self, metrics: dict[str, Any]) -> None:
        self.states.append({name: value.clone() for name, value in self.run.progress.server.items()})
        if metrics["round"] == self.stop_after:
            raise KeyboardInterrupt


def own_data(folder: Path, sizes: list[int], seed: int = 0) -> tuple[Path, list[Path]]:
    """Digits in files of one's own, and the task that they belong to."""
    source, rng = data.load("digits"), np.random.default_rng(seed)
    files = []
    for client, size in enumerate(sizes):
        chosen = rng.choice(len(source.labels), size, replace=False)
        files.append(folder / f"node-{client}.npz")
        np.savez(files[-1], x=source.x[chosen], y=source.labels[chosen])
    task, form = folder / "task.toml", source.form
    assert isinstance(form, Pixels)
    task.write_text(
        f'name = "my digits"\nclasses = {json.dumps(source.class_names)}\nclients = {len(sizes)}\n'
        f"[input]\nshape = [1, 8, 8]\nscale = {form.scale}\nmean = {list(form.mean)}\nstd = {list(form.std)}\n"
    )
    return task, files


BAD = 1000 - 7 * 3


def bad_in(rounds: set[int], spoil: Any) -> Tamper:
    def tamper(node: int, asked: Message, reply: Message) -> Message | None:
        kind, facts = asked.metadata.message_type, asked.content.config_records[FACTS]
        return spoil(reply) if (node, kind) == (BAD, "train") and facts["round"] in rounds else reply

    return tamper


def spoiled(change: Any) -> Any:
    """A reply whose arrays were changed."""

    def spoil(reply: Message) -> Message:
        state = from_record(reply.content.array_records[ARRAYS])
        reply.content[ARRAYS] = to_record(change(state))
        return reply

    return spoil
