"""What the contract asks of a training, each a function of `Parts` that raises `CheckError`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from upfl.contract import Published, Training
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine, one_thread
from upfl.engine.setup import assemble
from upfl.methods import TRAININGS
from upfl.safe.tensors import read_file
from upfl.state import State
from upfl.testing.parts import Parts, folded, parts_of, require, same_bits, small, snapshot, storable, train_one


def check_training(training: str | type[Training[Any]], *, model: Any = None, settings: Sequence[str] = ()) -> None:
    """Check a registered training, by its name or its class, on a model that fits it."""
    name = training if isinstance(training, str) else training.name
    require(TRAININGS.get(name) is training or isinstance(training, str), f"{name}: register it first")
    config = small(name, model, settings)
    with one_thread():
        parts = parts_of(config)
        for check in TRAINING_CHECKS:
            check(parts)
        a_run_that_was_stopped_has_the_bits_of_one_that_was_not(parts)


def state_stays_storable_and_of_the_same_names(parts: Parts) -> None:
    training, server = parts.training, parts.server
    storable(server, "init")
    for round in range(2):
        clients = [parts.client(i, round) for i in range(3)]
        after = training.aggregate(snapshot(server), folded(training, server, clients), round)
        storable(after, "aggregate")
        forms = [{key: value.shape for key, value in state.items()} for state in (after, server)]
        require(forms[0] == forms[1], "aggregate: the state has other names or shapes than before")
        moved = not all(torch.equal(after[key], server[key]) for key in server)
        require(moved, "aggregate: three clients trained, and the state is as it was")
        server = after
    storable(training.publish(server), "publish")


def what_goes_up_is_finite_or_integers_and_of_one_form(parts: Parts) -> None:
    training, forms = parts.training, []
    for i in range(2):
        up, _ = train_one(training, parts.server, training.memory(parts.client(i)), parts.client(i))
        require(up, "finish: nothing goes up")
        for key, value in up.items():
            require(value.is_contiguous() and not value.requires_grad, f"finish: '{key}' is not a plain tensor")
            integers = value.dtype in (torch.int8, torch.int64)
            require(integers or value.is_floating_point(), f"finish: '{key}' is of type {value.dtype}")
            require(integers or value.isfinite().all(), f"finish: '{key}' is not finite")
        forms.append({key: (value.shape, value.dtype) for key, value in up.items()})
    require(forms[0] == forms[1], "finish: two clients send tensors of other names, shapes or types")


def a_clients_round_changes_neither_the_server_nor_its_memory(parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    memory = training.memory(client)
    server_before, memory_before = snapshot(parts.server), snapshot(memory)
    up, kept = train_one(training, parts.server, memory, client)
    same_bits(parts.server, server_before, "a client's round changed the server's state (begin must copy it)")
    same_bits(memory, memory_before, "a client's round changed the memory that it was given")
    sent, remembered = snapshot(up), snapshot(kept)
    total = FixedPointSum(up, 1, training.scales)
    total.add(up)
    training.aggregate(snapshot(parts.server), total, 0)
    training.publish(parts.server)
    same_bits(parts.server, server_before, "publish changed the server's state")
    same_bits(up, sent, "aggregate changed what a client sent")
    same_bits(kept, remembered, "aggregate changed what a client keeps")


def a_clients_round_is_a_function_of_its_arguments(parts: Parts) -> None:
    """Trained again, after another client, and by another object: the same bits."""
    first, first_kept = train_one(parts.training, parts.server, parts.training.memory(parts.client(1)), parts.client(1))
    train_one(parts.training, parts.server, parts.training.memory(parts.client(2)), parts.client(2))
    for training in (parts.training, assemble(parts.config).training):
        up, kept = train_one(training, parts.server, training.memory(parts.client(1)), parts.client(1))
        same_bits(up, first, "a client's round, again (a training must not remember anything itself)")
        same_bits(kept, first_kept, "a client's memory, again")


def a_state_that_went_through_a_file_trains_to_the_same_bits(parts: Parts) -> None:
    """A file may order names anew."""
    training, client = parts.training, parts.client(1)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create(Path(path) / "run", parts.config)
        folder.save_best(Published(parts.server, 1))
        state = folder.load_best(1).state
    memory = training.memory(client)
    ours, kept = train_one(training, state, memory, client)
    expected, expected_kept = train_one(training, parts.server, memory, client)
    same_bits(ours, expected, "a round from a stored state (do not depend on the order of names)")
    same_bits(kept, expected_kept, "a memory from a stored state")


def only_trainings_that_say_so_remember(parts: Parts) -> None:
    training = parts.training
    memory = training.memory(parts.client(1))
    _, kept = train_one(training, parts.server, memory, parts.client(1))
    says = f"remembers = {training.remembers}"
    require(bool(memory) == training.remembers, f"{says}, and a client's first memory has {len(memory)} tensors")
    require(bool(kept) == training.remembers, f"{says}, and a client keeps {len(kept)} tensors")
    require(memory.keys() <= kept.keys() or not training.remembers, "a client forgets what it began with")
    storable(memory, "memory")
    storable(kept, "finish")


def the_local_rate_is_positive_and_does_not_grow(parts: Parts) -> None:
    rates = [parts.training.local_rate(round) for round in (0, 1, 50)]
    require(rates[0] >= rates[1] >= rates[2] >= 0, f"local_rate grows or is negative: {rates}")
    require((rates[2] > 0) == parts.training.takes_steps, f"takes_steps = {parts.training.takes_steps}, rates {rates}")


def a_run_that_was_stopped_has_the_bits_of_one_that_was_not(parts: Parts) -> None:
    half = parts.config.model_copy(update={"rounds": parts.config.rounds // 2})
    with tempfile.TemporaryDirectory() as path:
        whole, stopped = (RunFolder.create(Path(path) / name, parts.config) for name in ("whole", "stopped"))
        Engine.local(whole).run()
        Engine.local(stopped, setup=assemble(half)).run()
        Engine.local(stopped).run()
        ends = [_tensors(folder) for folder in (whole, stopped)]
    for file, state in ends[0].items():
        same_bits(ends[1].get(file, {}), state, f"after a stop, {file}")


def _tensors(folder: RunFolder) -> dict[str, State]:
    files = sorted(folder.path.rglob("*.safetensors"))
    return {str(file.relative_to(folder.path)): read_file(file) for file in files}


TRAINING_CHECKS: tuple[Callable[[Parts], None], ...] = (
    state_stays_storable_and_of_the_same_names,
    what_goes_up_is_finite_or_integers_and_of_one_form,
    a_clients_round_changes_neither_the_server_nor_its_memory,
    a_clients_round_is_a_function_of_its_arguments,
    a_state_that_went_through_a_file_trains_to_the_same_bits,
    only_trainings_that_say_so_remember,
    the_local_rate_is_positive_and_does_not_grow,
)
