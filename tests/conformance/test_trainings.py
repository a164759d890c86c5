"""What the contract asks of a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.conformance.common import (
    CLIENTS,
    CPU,
    Parts,
    assert_storable,
    briefly,
    folded,
    of_every_training,
    of_remembering_trainings,
    snapshot,
    train_one,
)
from tests.runs import assert_same_bits, begun
from tests.shifted import ShiftedInputs, shifted_state
from upfl.contract import Batch, Published
from upfl.engine.clients import LocalClient
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_client
from upfl.engine.setup import assemble
from upfl.randomness import generator
from upfl.state import State


@of_every_training
def test_state_stays_contiguous_single_precision_of_the_same_names(name: str, parts: Parts) -> None:
    training, server = parts.training, parts.server
    assert_storable(server)
    for round in range(2):
        clients = [parts.client(i, round) for i in range(3)]
        after = training.aggregate(snapshot(server), folded(training, server, clients), round)
        assert_storable(after)
        assert {key: value.shape for key, value in after.items()} == {key: v.shape for key, v in server.items()}
        assert not all(torch.equal(after[key], server[key]) for key in server)
        server = after
    assert_storable(training.publish(server))


@of_every_training
def test_what_goes_up_is_finite_or_integers_and_contiguous(name: str, parts: Parts) -> None:
    ups = [
        train_one(parts.training, parts.server, parts.training.memory(parts.client(i)), parts.client(i))[0]
        for i in range(2)
    ]
    for up in ups:
        assert up
        for key, value in up.items():
            assert value.is_contiguous(), key
            assert not value.requires_grad, key
            assert value.is_floating_point() or value.dtype in (torch.int8, torch.int64), key
            assert not value.is_floating_point() or value.isfinite().all(), key
    forms = [{key: (value.shape, value.dtype) for key, value in up.items()} for up in ups]
    assert forms[0] == forms[1]


@of_every_training
def test_a_clients_round_changes_neither_the_server_nor_its_memory(name: str, parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    memory = training.memory(client)
    server_before, memory_before = snapshot(parts.server), snapshot(memory)
    up, kept = train_one(training, parts.server, memory, client)
    assert_same_bits(parts.server, server_before)
    assert_same_bits(memory, memory_before)
    sent, remembered = snapshot(up), snapshot(kept)
    total = FixedPointSum(up, 1, training.scales)
    total.add(up)
    training.aggregate(snapshot(parts.server), total, 0)
    training.publish(parts.server)
    assert_same_bits(parts.server, server_before)
    assert_same_bits(up, sent)
    assert_same_bits(kept, remembered)


@of_every_training
def test_a_clients_round_is_a_function_of_its_arguments(name: str, parts: Parts) -> None:
    """Trained again, after another client, and by another object: the same bits."""
    first, first_kept = train_one(parts.training, parts.server, parts.training.memory(parts.client(1)), parts.client(1))
    train_one(parts.training, parts.server, parts.training.memory(parts.client(2)), parts.client(2))
    other = assemble(parts.config).training
    for training in (parts.training, other):
        up, kept = train_one(training, parts.server, training.memory(parts.client(1)), parts.client(1))
        assert_same_bits(up, first)
        assert_same_bits(kept, first_kept)


@of_every_training
def test_a_state_that_went_through_a_file_trains_to_the_same_bits(name: str, parts: Parts, tmp_path: Path) -> None:
    """A file may order names anew."""
    folder, training, client = RunFolder.create(tmp_path / "run", parts.config), parts.training, parts.client(1)
    folder.save_best(Published(parts.server, 1))
    memory = training.memory(client)
    ours, kept = train_one(training, folder.load_best(1).state, memory, client)
    expected, expected_kept = train_one(training, parts.server, memory, client)
    assert_same_bits(ours, expected)
    assert_same_bits(kept, expected_kept)


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


@of_every_training
def test_the_local_rate_is_positive_and_does_not_grow(name: str, parts: Parts) -> None:
    rates = [parts.training.local_rate(round) for round in (0, 1, 50)]
    assert rates[0] >= rates[1] >= rates[2] >= 0
    assert (rates[2] > 0) == parts.training.takes_steps


@of_every_training
def test_only_trainings_that_say_so_remember(name: str, parts: Parts) -> None:
    memory = parts.training.memory(parts.client(1))
    _, kept = train_one(parts.training, parts.server, memory, parts.client(1))
    assert bool(kept) == bool(memory) == parts.training.remembers
    assert memory.keys() <= kept.keys() or not parts.training.remembers


@of_remembering_trainings
def test_memory_comes_back_from_the_run_folder_as_it_went(name: str, parts: Parts, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", parts.config)
    memory = parts.training.memory(parts.client(1))
    for round in range(3):
        _, memory = train_one(parts.training, parts.server, memory, parts.client(1, round))
        assert_storable(memory)
        folder.save_memory(1, round, memory)
        assert_same_bits(folder.load_memory(1, round, CPU), memory)


@of_remembering_trainings
def test_a_first_memory_is_the_seeds_and_the_clients_whenever_it_is_made(name: str, tmp_path: Path) -> None:
    """A client that has not taken part yet is scored in several rounds: each time with the same memory."""
    engine = begun(briefly(name, rounds=1, clients_per_round=1), tmp_path / "run")
    engine.run()
    idle = next(i for i in range(CLIENTS) if int(engine.progress.memory_rounds[i]) < 0)
    assert_same_bits(engine.cohort.memory(idle), engine.training.memory(engine.setup.client(idle, 0)))
    assert_storable(engine.cohort.memory(idle))


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
        total = FixedPointSum(ups[0], len(ups), training.scales)
        for up in ups:
            total.add(up)
        server = training.aggregate(server, total, round)
    engine.run()
    assert_same_bits(engine.progress.server, server)
    assert {id for id in range(CLIENTS) if int(engine.progress.memory_rounds[id]) >= 0} == memories.keys()
    for id, memory in memories.items():
        assert_same_bits(engine.cohort.memory(id), memory)
