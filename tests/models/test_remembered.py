"""What was made before is found by its contents, and the oldest is given up first."""

from __future__ import annotations

from functools import partial

import torch

from upfl.models.remembered import Remembered, digest


def test_the_oldest_is_given_up_first() -> None:
    remembered = Remembered(limit=2 * 40)
    made: list[float] = []

    def make(value: float) -> torch.Tensor:
        made.append(value)
        return torch.full((10,), value)

    for value in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        remembered(partial(make, value), torch.tensor(value))
    assert made == [1, 2, 3, 2], "1 was asked for again before 3 came, 2 was not"
    assert remembered.size == 80


def test_a_digest_is_of_contents_shape_and_type() -> None:
    x = torch.arange(12.0).view(1, 3, 2, 2)
    assert digest(x) == digest(x.contiguous(memory_format=torch.channels_last).clone())
    others = [x.view(3, 1, 2, 2), x.int(), x + 1, x.double()]
    assert len({digest(x), *map(digest, others)}) == 5
    assert digest(x, x[:, :1]) != digest(x[:, :1], x)
