"""What was made before is found by its contents, and the oldest is given up first."""

import torch
from torch import Tensor

from upfl.models.remembered import Remembered, digest


class Counting:
    """Makes ten numbers of each sample, and says of which."""

    def __init__(self) -> None:
        self.made: list[float] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.made += x[:, 0].tolist()
        return x.repeat(1, 10)


def column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_each_sample_is_made_once_whatever_comes_with_it() -> None:
    remembered, make = Remembered(), Counting()
    for values in ((1.0, 2.0), (2.0, 3.0, 1.0), (3.0,), (4.0, 4.0), (4.0, 1.0)):
        x = column(*values)
        assert torch.equal(remembered(make, x), x.repeat(1, 10))
    assert make.made == [1, 2, 3, 4, 4]
    remembered(make, column(1.0), torch.ones(3))
    assert make.made[5:] == [1], "other parameters, other features"


def test_the_oldest_is_given_up_first() -> None:
    remembered, make = Remembered(limit=2 * 40), Counting()
    for value in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        remembered(make, column(value))
    assert make.made == [1, 2, 3, 2], "1 was asked for again before 3 came, 2 was not"
    assert remembered.size == 80
    assert torch.equal(remembered(make, column(5.0, 6.0, 7.0)), column(5.0, 6.0, 7.0).repeat(1, 10)), (
        "more than it keeps"
    )
    assert remembered.size == 80


def test_a_digest_is_of_contents_shape_and_type() -> None:
    x = torch.arange(12.0).view(1, 3, 2, 2)
    assert digest(b"", x) == digest(b"", x.contiguous(memory_format=torch.channels_last).clone())
    others = [x.view(3, 1, 2, 2), x.int(), x + 1, x.double()]
    assert len({digest(b"", one) for one in (x, *others)}) == 5
    assert digest(b"", x, x[:, :1]) != digest(b"", x[:, :1], x)
