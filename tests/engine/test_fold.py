"""The exact sum over clients."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from upfl.engine.fold import FixedPointSum
from upfl.errors import BadClientError
from upfl.models import compiled
from upfl.randomness import generator
from upfl.state import State

pytestmark = pytest.mark.usefixtures("one_thread")


finite = st.floats(-1e4, 1e4, width=32)


def _ups(data: list[list[float]], counts: list[int]) -> list[State]:
    return [
        {
            "a.weight": torch.tensor(values[:6]).reshape(2, 3),
            "b": torch.tensor(values[6], dtype=torch.float64),
            "n": torch.tensor([count, -count]),
        }
        for values, count in zip(data, counts, strict=True)
    ]


uploads = st.integers(1, 8).flatmap(
    lambda k: st.builds(
        _ups,
        st.lists(st.lists(finite, min_size=7, max_size=7), min_size=k, max_size=k),
        st.lists(st.integers(-(2**40), 2**40), min_size=k, max_size=k),
    )
)


def _summed(ups: Sequence[State], like: State, clients: int) -> FixedPointSum:
    total = FixedPointSum(like, clients)
    for up in ups:
        total.add(up)
    return total


@settings(deadline=None, max_examples=60)
@given(uploads, st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_sum_depends_neither_on_order_nor_on_who_forms_which_part(ups: list[State], random: Any, k: int) -> None:
    whole = _summed(ups, ups[0], len(ups))
    shuffled = list(ups)
    random.shuffle(shuffled)
    parts = [_summed(shuffled[rank::k], ups[0], len(ups)) for rank in range(k)]
    merged = FixedPointSum(ups[0], len(ups))
    for part in parts:
        merged.buffer += part.buffer
    merged.merged()
    assert merged.count == whole.count == len(ups)
    assert set(merged) == set(ups[0])
    for name in ups[0]:
        assert torch.equal(merged[name], whole[name])
        assert merged[name].shape == ups[0][name].shape


@settings(deadline=None, max_examples=60)
@given(uploads)
def test_the_sum_is_exact_to_its_last_bit_a_client(ups: list[State]) -> None:
    total = _summed(ups, ups[0], len(ups))
    for name in ups[0]:
        for position in range(ups[0][name].numel()):
            values = [up[name].flatten()[position].item() for up in ups]
            exact = sum(map(Fraction, values), Fraction())
            got = Fraction(total[name].flatten()[position].item())
            if name == "n":
                assert got == exact
            else:  # reading it as a float64 rounds once more
                assert abs(got - exact) <= len(ups) * Fraction(1, 2**41) + abs(exact) * Fraction(1, 2**52)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 58), st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
def test_a_declared_scale_sets_the_precision(bits: int, values: list[float]) -> None:
    total = FixedPointSum({"x": torch.tensor(0.0)}, len(values), {"x": bits})
    for value in values:
        total.add({"x": torch.tensor(value)})
    exact = sum(map(Fraction, values), Fraction())
    allowed = len(values) * Fraction(1, 2 ** (bits + 1)) + abs(exact) * Fraction(1, 2**52)
    assert abs(Fraction(float(total["x"])) - exact) <= allowed


def test_a_sum_of_many_values_is_formed_in_chunks_without_seams() -> None:
    n = 3 * (1 << 16) + 5
    value = torch.randn(n, generator=generator(0))
    total = _summed([{"x": value}, {"x": value}], {"x": value}, 2)
    torch.testing.assert_close(total["x"], 2 * value.double(), rtol=0, atol=2.0**-39)


@pytest.mark.bits
@pytest.mark.parametrize("bits", [3, 40])
def test_the_loop_adds_to_the_same_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = list[bool](), compiled.adds

    def noting(values: Tensor, together: int) -> bool:
        asked.append(real(values, together))
        return asked[-1]

    monkeypatch.setattr(compiled, "adds", noting)
    spread = torch.randn(2**17, generator=generator(1)) * 2.0 ** torch.randint(-60, 3, (2**17,), generator=generator(2))
    halves = torch.arange(-(2**12), 2**12).float() * 2.0 ** -(bits + 1)  # every second one lies between two
    most = 2.0 ** (61 - bits)
    value = torch.cat([spread, halves, torch.tensor([most, -most, 0.0, -0.0, 1e-45])])
    up = {"many": value, "turned": value[:8192].view(64, 128).t(), "double": value.double(), "few": value[:10]}
    scales = dict.fromkeys(up, bits)
    ours, plain = FixedPointSum(up, 2, scales), FixedPointSum(up, 2, scales)
    for _ in range(2):
        plain.add(up)
    assert not any(asked)  # nobody takes local steps
    with compiled.used():
        for _ in range(2):
            ours.add(up)
    assert asked[-4:] == [True, True, False, False]
    assert torch.equal(ours.buffer, plain.buffer)


def test_a_small_sum_compiles_nothing() -> None:
    with compiled.used():
        assert not compiled.adds(torch.zeros(2**13), 2**14)
        assert compiled.adds(torch.zeros(2**13), 2**17)


LIKE: State = {"x": torch.zeros(3), "y": torch.zeros(2, 2), "n": torch.tensor(0)}


def _up(**changes: Tensor) -> State:
    return {"x": torch.ones(3), "y": torch.ones(2, 2), "n": torch.tensor(1)} | changes


@pytest.mark.parametrize(
    "bad",
    [
        _up(y=torch.tensor([[1.0, 1.0], [1.0, math.nan]])),
        _up(y=torch.tensor([[1.0, math.inf], [1.0, 1.0]])),
        _up(y=torch.tensor([[1.0, 1.0], [-math.inf, 1.0]])),
        _up(y=torch.full((2, 2), 1e30)),
        _up(y=torch.full((2, 2), -(2.0**22))),
        _up(y=torch.ones(2, 3)),
        _up(y=torch.ones(4)),
        _up(y=torch.ones(2, 2, dtype=torch.float64)),
        _up(n=torch.tensor(2**62)),  # four of these do not fit in 64 bits
        _up(n=torch.tensor(-(2**63))),
        _up(n=torch.tensor(1, dtype=torch.int32)),
        _up(n=torch.tensor(1.0)),
        _up(z=torch.ones(1)),
        {"x": torch.ones(3), "n": torch.tensor(1)},
        {},
    ],
    ids=lambda up: ",".join(f"{name}:{value.dtype}{value.flatten()[-1:].tolist()}" for name, value in up.items()),
)
def test_a_bad_upload_is_refused_whole(bad: State) -> None:
    total = FixedPointSum(LIKE, 4)
    total.add(_up())
    before = total.buffer.clone()
    with pytest.raises(BadClientError):
        total.add(bad)
    assert torch.equal(total.buffer, before)
    assert total.count == 1
    total.add(_up())
    assert torch.equal(total["x"], torch.full((3,), 2.0, dtype=torch.float64))
    assert int(total["n"]) == 2


@pytest.mark.parametrize("clients", [1, 3, 64])
def test_the_largest_values_that_are_accepted_do_not_overflow(clients: int) -> None:
    total = FixedPointSum({"x": torch.zeros(2)}, clients)
    largest = math.floor(2.0**22 / clients)
    for _ in range(clients):
        total.add({"x": torch.tensor([largest, -largest], dtype=torch.float32)})
    assert total["x"].tolist() == [largest * clients, -largest * clients]


def test_a_mean_divides_by_the_sum_of_weights() -> None:
    total = FixedPointSum({"x": torch.zeros(2), "weight": torch.tensor(0.0)}, 2)
    total.add({"x": torch.tensor([2.0, 4.0]), "weight": torch.tensor(2.0)})
    total.add({"x": torch.tensor([9.0, -3.0]), "weight": torch.tensor(3.0)})
    assert total.mean("x").tolist() == pytest.approx([2.2, 0.2])
