"""The exact sum over clients."""

import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from upfl.engine.fold import CHUNK, FixedPointSum
from upfl.errors import BadClientError, ConfigError
from upfl.models import compiled
from upfl.randomness import generator
from upfl.state import Factored, State

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


def _summed(ups: Sequence[Mapping[str, Tensor]], like: Mapping[str, Tensor], clients: int) -> FixedPointSum:
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


needs_numba = pytest.mark.skipif(not compiled.installed(), reason="the loops need Numba")


@pytest.mark.bits
@needs_numba
@pytest.mark.parametrize("bits", [3, 40])
def test_the_loop_adds_to_the_same_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = list[bool](), compiled.worth_adding

    def noting(values: Tensor) -> bool:
        asked.append(real(values))
        return asked[-1]

    monkeypatch.setattr(compiled, "worth_adding", noting)
    spread = torch.randn(2**17, generator=generator(1)) * 2.0 ** torch.randint(-60, 3, (2**17,), generator=generator(2))
    halves = torch.arange(-(2**12), 2**12).float() * 2.0 ** -(bits + 1)  # every second one lies between two
    most = 2.0 ** (61 - bits)
    value = torch.cat([spread, halves, torch.tensor([most, -most, 0.0, -0.0, 1e-45])])
    up = {"many": value, "turned": value[:8192].view(64, 128).t(), "double": value.double(), "few": value[:10]}
    scales = dict.fromkeys(up, bits)
    ours, plain = FixedPointSum(up, 2, scales), FixedPointSum(up, 2, scales)
    for _ in range(2):
        plain.add(up)
    assert not asked  # nobody takes local steps
    with compiled.used():
        for _ in range(2):
            ours.add(up)
    assert asked == 2 * [True, True, False, False]
    assert torch.equal(ours.buffer, plain.buffer)


@needs_numba
def test_a_small_sum_compiles_nothing() -> None:
    with compiled.used():
        assert not compiled.adds(2**14)
        assert compiled.adds(2**17)


def test_loops_that_do_not_load_are_named_before_anything_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "adds", lambda count: True)
    monkeypatch.setitem(sys.modules, "upfl.models.loops", None)
    up = {"few": torch.ones(3), "many": torch.ones(2**13)}
    total = FixedPointSum(up, 1)
    with pytest.raises(ConfigError, match="UPFL_NUMBA=0"):
        total.add(up)
    assert not total.buffer.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits_are_added_as_what_they_are(dtype: torch.dtype) -> None:
    value = torch.tensor([1.0, 3.0, -0.5, 2.0**-9], dtype=dtype)
    total = _summed([{"x": value}, {"x": value}], {"x": value}, 2)
    assert total["x"].tolist() == [2.0, 6.0, -1.0, 2.0**-8]


def test_values_that_are_negated_when_they_are_read_are_added_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "adds", lambda count: compiled.installed())
    value = torch.randn(2**13, generator=generator(0))
    up = {"x": torch._neg_view(value)}
    assert torch.equal(_summed([up], up, 1)["x"], _summed([{"x": -value}], up, 1)["x"])


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


# Outer products that are left in their factors


def _factored(column: Tensor, row: Tensor) -> Factored:
    return Factored({"weight": torch.tensor(1.0)}, {"head": (column, row)})


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, CHUNK + 5), (2 * CHUNK + 1, 1), (1300, 100)])
@pytest.mark.parametrize("fast", [False, True])
def test_an_outer_product_is_added_to_the_bits_of_the_matrix(
    shape: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "adds", lambda count: fast and compiled.installed())
    source = generator(0, str(shape))
    column, row = (torch.randn(length, generator=source) for length in shape)
    up = _factored(column, row)
    whole = {"weight": torch.tensor(1.0), "head": torch.outer(column, row)}
    assert set(up) == set(whole)
    assert len(up) == 2
    assert torch.equal(_summed([up, up], up, 2).buffer, _summed([whole, whole], up, 2).buffer)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("where", [0, 1])
def test_an_outer_product_that_cannot_be_added_is_refused(odd: float, where: int) -> None:
    good = torch.ones(5), torch.full((4,), 2.0)
    total = _summed([_factored(*good)], _factored(*good), 2)
    before = total.buffer.clone()
    bad = [factor.clone() for factor in good]
    bad[where][2] = odd
    with pytest.raises(BadClientError, match="head is not finite or too large"):
        total.add(_factored(*bad))
    with pytest.raises(BadClientError, match=r"head is torch.float32 \[4, 5\], expected torch.float32 \[5, 4\]"):
        total.add(_factored(*reversed(good)))
    assert torch.equal(total.buffer, before)


def test_the_bounds_of_an_outer_product_are_those_of_its_values() -> None:
    column, row = torch.tensor([-3.0, 0.0, 2.0]), torch.tensor([-2.0, 1.0])
    most = 2.0 ** (62 - 40)
    like = _factored(column, row)
    FixedPointSum(like, 1).add(_factored(column, row * most / 6))  # the largest is 3 * 2, the limit itself
    with pytest.raises(BadClientError, match="too large"):
        FixedPointSum(like, 1).add(_factored(column, row * most / 5.99))
