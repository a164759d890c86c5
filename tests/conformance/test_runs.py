"""Runs of every training: the same bits for any number of workers and after a stop, and clients that go wrong."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.conformance.common import (
    CLIENTS,
    CPU,
    KINDS,
    SCORED,
    Parts,
    briefly,
    config_of,
    folded,
    of_every_training,
    rounds_of,
    train_one,
    until,
)
from tests.runs import (
    Interrupter,
    Outcome,
    StopError,
    assert_same,
    assert_same_bits,
    begun,
    outcome,
    ran,
    ran_by_workers,
)
from upfl.contract import Client
from upfl.data import Source
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.cohort import LocalCohort
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import RunError
from upfl.models import mlp
from upfl.randomness import generator
from upfl.state import State, byte_size


@of_every_training
def test_a_run_has_all_its_rounds_rows_and_memories(name: str, reference: Outcome) -> None:
    assert len(reference.metrics) == rounds_of(name)
    assert all(math.isfinite(line["loss"]) for line in reference.metrics)
    assert len(reference.metrics[-1]["rows"]) == len(reference.result["rows"]) == len(SCORED[name])
    assert any(file.startswith("memory/") for file in reference.tensors) == KINDS[name].remembers


@of_every_training
def test_another_seed_gives_other_bits(name: str, reference: Outcome, tmp_path: Path) -> None:
    other = ran(briefly(name, seed=1), tmp_path / "run")
    assert [line["loss"] for line in reference.metrics] != [line["loss"] for line in other.metrics]
    moving = [key for key, value in reference.server.items() if value.is_floating_point()]
    assert not any(torch.equal(reference.server[key], other.server[key]) for key in moving)


@of_every_training
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_any_number_of_workers_gives_the_same_bits(name: str, reference: Outcome, size: int, tmp_path: Path) -> None:
    assert_same(ran_by_workers(config_of(name), tmp_path / "run", size), reference)


@of_every_training
@pytest.mark.parametrize(
    ("checkpoint_every", "stops"),
    [(2, {"round": 3, "scoring": -1}), pytest.param(1, {"scoring": 1, "round": 1}, marks=pytest.mark.full)],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_that_never_stopped(
    name: str, reference: Outcome, checkpoint_every: int, stops: dict[str, int], tmp_path: Path
) -> None:
    """-1: a scoring's end, when the round's training and memories are done and nothing of it is committed."""
    folder = RunFolder.create(tmp_path / "run", config_of(name, checkpoint_every=checkpoint_every))
    for what, number in {**stops, "training": 1}.items():
        with pytest.raises(StopError):
            Engine.local(folder).run(Interrupter(what, len(SCORED[name]) if number < 0 else number))
        assert not folder.finished
    Engine.local(folder).run()
    assert_same(outcome(folder), reference)


@of_every_training
def test_bytes_sent_in_a_round_are_those_of_the_tensors(name: str, reference: Outcome, parts: Parts) -> None:
    """Of what a client really sends, in its own types; where a training counts otherwise, the next test has it."""
    training = parts.training
    for line in reference.metrics:
        client = parts.client(1, line["round"] - 1)
        server = training.sent(parts.server, client.round)
        up, _ = train_one(training, server, training.memory(client), client)
        down, asked = training.bytes_down(parts.server, client.round), 4
        if training.in_turn and line["round"] % 2 == 0:
            asked = CLIENTS - 4  # the others of the pass
        assert line["bytes_down"] == asked * down
        if name != "odpfl-hn":
            assert line["bytes_up"] == line["clients"] * byte_size(up)
            assert down == (byte_size(server) if line["round"] > 1 or not training.heterogeneous else 0)
    for sent in ("bytes_up", "bytes_down"):
        assert reference.result[sent] == sum(line[sent] for line in reference.metrics)


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedavg", 1, 1),
        ("scaffold", 2, 2),  # with the control variates
        ("fedgma", 1.25, 1),  # with signs of one byte
        ("odpfl-hn", 1, 1),  # and the encoder's: the hypernetwork stays at the server
        ("hetero-fedtta", 0, 0),  # logits on the public set alone
    ],
)
def test_a_client_sends_and_receives_so_many_models(name: str, reference: Outcome, up: float, down: float) -> None:
    config, line = config_of(name), reference.metrics[-1]
    training = assemble(config).training
    model, weight = 4 * mlp(64, (16, 16), 10).size, 4
    beside = {
        "odpfl-hn": 4 * (mlp(64, (16,), 32).size + 32),
        "hetero-fedtta": 4 * 2 * 10 * round(config.partition.public * 1797),
    }.get(name, 0)
    assert line["bytes_up"] / line["clients"] == up * model + beside + weight
    assert line["bytes_down"] / 4 == down * model + beside
    assert training.model.size * 4 == model


class Poisoned(Inputs):
    """Inputs of which some samples are not numbers."""

    def __init__(self, source: Source, bad: NDArray[np.int64]) -> None:
        super().__init__(source)
        self.bad = bad

    def x(self, indices: NDArray[np.int64], angle: float = 0.0) -> Tensor:
        x = super().x(indices, angle)
        x[torch.from_numpy(np.isin(indices, self.bad))] = math.nan
        return x


def spoil_data(engine: Engine[Any], clients: Iterable[int]) -> None:
    bad = np.concatenate([engine.federation.training.train(client) for client in clients])
    engine.cohort.setup = replace(engine.setup, inputs=Poisoned(engine.federation.source, bad))


def spoil_upload(engine: Engine[Any], clients: Iterable[int]) -> None:
    """One value of what these clients send is infinite, or an integer that no sum can hold."""
    finish: Callable[[State, State, Client], tuple[Mapping[str, Tensor], State]] = engine.training.finish
    spoiled = set(clients)

    def finish_badly(server: State, carry: State, client: Client) -> tuple[Mapping[str, Tensor], State]:
        up, memory = finish(server, carry, client)
        if client.id in spoiled:
            first = max((name for name in up if up[name].dim()), key=lambda name: up[name].is_floating_point())
            up[first].view(-1)[-1] = math.inf if up[first].is_floating_point() else 2**62
        return up, memory

    engine.training.finish = finish_badly  # type: ignore[method-assign]


@of_every_training
@pytest.mark.parametrize("spoil", [spoil_data, spoil_upload])
def test_a_client_that_goes_wrong_is_left_out_and_counted_and_does_no_harm(
    name: str, spoil: Callable[[Engine[LocalCohort], Iterable[int]], None], tmp_path: Path
) -> None:
    config, bad = briefly(name, clients_per_round=1.0), 2
    engine = Engine.local(RunFolder.create(tmp_path / "run", config), setup=until(config, 1))
    server = engine.training.init(generator(config.seed, "init"))
    good = [LocalClient(engine.federation, engine.setup.inputs, config.seed, i, 0) for i in range(CLIENTS) if i != bad]
    expected = engine.training.aggregate(server, folded(engine.training, server, good), 0)
    spoil(engine, [bad])
    engine.run()
    (line,) = engine.folder.metrics()
    assert [left["client"] for left in line["left_out"]] == [bad]
    assert line["left_out"][0]["reason"]
    assert line["clients"] == CLIENTS - 1
    assert math.isfinite(line["loss"])
    assert engine.folder.result()["left_out"] == 1
    assert_same_bits(outcome(engine.folder).server, expected)
    if engine.training.remembers:
        remembering = {int(path.stem.split("-")[0]) for path in engine.folder.path.glob("memory/*/*.safetensors")}
        assert remembering == {client.id for client in good}


@of_every_training
def test_a_round_without_a_good_client_stops_the_run_at_the_last_good_checkpoint(name: str, tmp_path: Path) -> None:
    config = briefly(name, rounds=3 if KINDS[name].in_turn else 2, clients_per_round=1.0)
    engine = begun(config, tmp_path / "run")

    class Spoiler(Interrupter):
        def round(self, metrics: dict[str, Any]) -> None:
            spoil_data(engine, range(CLIENTS))

    with pytest.raises(RunError, match="round 2"):
        engine.run(Spoiler("never", 1))
    progress = engine.folder.load(CPU)
    assert progress is not None
    assert progress.round == 1
    Engine.local(engine.folder).run()
    assert_same(outcome(engine.folder), ran(config, tmp_path / "untroubled"))
