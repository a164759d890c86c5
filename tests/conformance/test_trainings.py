"""What the contract asks of a training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conformance.common import (
    CLIENTS,
    CPU,
    Parts,
    briefly,
    of_every_training,
    of_remembering_trainings,
    storable,
    train_one,
)
from tests.helpers.rounds import total_of
from tests.runs import assert_same_bits, begun
from tests.shifted import ShiftedInputs, shifted_state
from upfl.contract import Batch
from upfl.engine.clients import LocalClient
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_client
from upfl.randomness import generator
from upfl.state import State
from upfl.testing import TRAINING_CHECKS


@of_every_training
@pytest.mark.parametrize("check", TRAINING_CHECKS, ids=lambda check: check.__name__)
def test_a_training_keeps_to_the_contract(name: str, check: Callable[[Parts], None], parts: Parts) -> None:
    check(parts)


@of_every_training
def test_a_clients_round_does_not_depend_on_where_things_lie_in_memory(name: str, parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    moved = replace(client, inputs=ShiftedInputs(parts.federation.source))
    with torch.no_grad():
        up, kept = train_client(training, parts.server, training.memory(client), client)
        server, memory = shifted_state(parts.server), shifted_state(training.memory(moved))
        ours, our_kept = train_client(training, server, memory, moved)
    assert_same_bits(dict(ours), dict(up))
    assert_same_bits(our_kept, kept)


@of_every_training
def test_padding_counts_in_no_training(name: str, parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    ends = []
    for padded in (False, True):
        carry = training.begin(parts.server, training.memory(client), client)
        with torch.no_grad():
            for phase in training.phases(0):
                for batch in client.phase(phase):
                    carry, _ = phase.step(carry, _with_padding(batch) if padded else batch, 0)
            ends.append(training.finish(parts.server, carry, client)[0])
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-3, atol=1e-5, msg=key)


def _with_padding(batch: Batch) -> Batch:
    mask = torch.ones(len(batch.x)) if batch.mask is None else batch.mask
    noise = torch.randn(batch.x[:3].shape, generator=generator(0, "noise"))
    x, y = torch.cat([noise, batch.x]), torch.cat([batch.y[:3], batch.y])
    drawn = {name: torch.cat([value[:3], value]) for name, value in batch.noise.items()}
    assert batch.index is not None
    index = torch.cat([batch.index[:3], batch.index])
    mask = torch.cat([torch.zeros(len(noise)), mask])
    return Batch(x.contiguous(memory_format=torch.channels_last), y, mask, drawn, index)


@of_remembering_trainings
def test_memory_comes_back_from_the_run_folder_as_it_went(name: str, parts: Parts, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", parts.config)
    memory = parts.training.memory(parts.client(1))
    for round in range(3):
        _, memory = train_one(parts.training, parts.server, memory, parts.client(1, round))
        storable(memory, "memory")
        folder.save_memory(1, round, memory)
        assert_same_bits(folder.load_memory(1, round, CPU), memory)


@of_remembering_trainings
def test_a_first_memory_is_the_seeds_and_the_clients_whenever_it_is_made(name: str, tmp_path: Path) -> None:
    """A client that has not taken part yet is scored in several rounds: each time with the same memory."""
    engine = begun(briefly(name, rounds=1, clients_per_round=1), tmp_path / "run")
    engine.run()
    idle = next(i for i in range(CLIENTS) if int(engine.progress.memory_rounds[i]) < 0)
    assert_same_bits(engine.cohort.memory(idle), engine.training.memory(engine.setup.client(idle, 0)))
    storable(engine.cohort.memory(idle), "memory")


@of_remembering_trainings
def test_each_client_has_the_memory_of_its_own_last_round(name: str, tmp_path: Path) -> None:
    """The run's memories are those of clients trained by the contract, one round after another."""
    config = briefly(name, clients_per_round=2)
    engine = begun(config, tmp_path / "run")
    training, server = engine.training, engine.training.init(generator(config.seed, "init"))
    memories: dict[int, State] = {}
    for round in range(config.rounds):
        ups = []
        for id in engine.cohort.participants(round):
            client = LocalClient(engine.federation, engine.setup.inputs, config.seed, id, round)
            memory = memories[id] if id in memories else training.memory(replace(client, round=0))
            up, memories[id] = train_one(training, server, memory, client)
            ups.append(up)
        server = training.aggregate(server, total_of(training, ups), round)
    engine.run()
    assert_same_bits(engine.progress.server, server)
    assert {id for id in range(CLIENTS) if int(engine.progress.memory_rounds[id]) >= 0} == memories.keys()
    for id, memory in memories.items():
        assert_same_bits(engine.cohort.memory(id), memory)
