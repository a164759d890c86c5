"""A client's batches: their order, and how samples become tensors."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from upfl.contract import Batch, Phase
from upfl.data import Clients, Partition, build_federation, load
from upfl.data.forms import Pixels
from upfl.data.inputs import Inputs
from upfl.engine.clients import AHEAD, LocalClient
from upfl.engine.local import ahead
from upfl.state import State

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("batch_size", "iterations"), [(16, 5), (7, 3), (1000, 2)])
def test_a_clients_shuffled_pass_goes_on_across_rounds(batch_size: int, iterations: int) -> None:
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    inputs = Inputs(federation.source)
    own = federation.training.train(1)
    phase = Phase(_no_step, iterations, batch_size)
    in_pass = math.ceil(len(own) / batch_size)
    rounds = math.ceil(3 * in_pass / iterations)
    seen = [batch for round in range(rounds) for batch in LocalClient(federation, inputs, 5, 1, round).phase(phase)]
    assert len(seen) == rounds * iterations
    passes = [seen[i * in_pass : (i + 1) * in_pass] for i in range(3)]
    expected = _rows(inputs.x(own))
    orders = []
    for one in passes:
        assert [len(batch.x) for batch in one[:-1]] == [batch_size] * (in_pass - 1)
        x = torch.cat([batch.x for batch in one])
        assert sorted(_rows(x)) == sorted(expected)  # every sample once; the partial last batch is kept
        assert all(batch.mask is None or bool((batch.mask == 1).all()) for batch in one)
        orders.append(_rows(x))
    assert orders[0] != orders[1] != orders[2]


def _no_step(carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
    return carry, torch.zeros(())


def _rows(x: Tensor) -> list[bytes]:
    return [sample.contiguous().numpy().tobytes() for sample in x]


def test_a_clients_order_of_samples_follows_from_seed_and_client() -> None:
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    own = federation.training.train(0)
    twins = Clients(np.tile(own, 2), np.array([0, len(own), 2 * len(own)]), np.full(2, len(own)), np.zeros(2))
    shared = replace(federation, training=twins)
    inputs, phase = Inputs(federation.source), Phase(_no_step, 3, 16)

    def order(seed: int, client: int) -> list[bytes]:
        return [row for batch in LocalClient(shared, inputs, seed, client, 0).phase(phase) for row in _rows(batch.x)]

    assert order(5, 0) == order(5, 0)
    assert order(5, 0) != order(6, 0)
    assert order(5, 0) != order(5, 1)


def test_batches_keep_samples_and_labels_together() -> None:
    source = load("digits")
    federation = build_federation(source, Partition(kind="iid", clients=20), 0)
    inputs = Inputs(source)
    client = LocalClient(federation, inputs, 5, 1, 0)
    own = federation.training.train(1)
    label_of = dict(zip(_rows(inputs.x(own)), source.labels[own].tolist(), strict=True))
    assert len(label_of) == len(own)
    for batch in client.phase(Phase(_no_step, 4, 16)):
        assert [label_of[row] for row in _rows(batch.x)] == batch.y.tolist()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kept", [np.uint8, np.float32])
def test_images_are_normalized_by_channel_to_the_same_bits_however_many_there_are(channels: int, kept: Any) -> None:
    form = Pixels(shape=(channels, 5, 7), scale=255.0, mean=(0.2, 0.5, 0.7)[:channels], std=(0.3, 0.25, 0.9)[:channels])
    pixels = np.random.default_rng(0).integers(0, 256, (150, *form.shape)).astype(kept)
    before, x = pixels.copy(), form.reader()(pixels, 0.0)
    factor, offset = form.affine(255.0)
    assert torch.equal(x, torch.from_numpy(pixels).float() * factor + offset)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(pixels, before), "what was given was changed"


def test_batches_that_are_made_ahead_are_the_same_in_the_same_order() -> None:
    wide = [Batch(torch.full((2, AHEAD // 16), float(i)), torch.tensor([i, i])) for i in range(9)]
    assert [int(batch.y[0]) for some in ahead(iter(wide)) for batch in some] == list(range(9))
    assert list(ahead(iter(()))) == []
