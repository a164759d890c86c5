"""Mean and deviation of features: exact, from training clients alone, the same whoever holds which rows."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upfl.data import Partition, Source, build_federation, standardize
from upfl.data.cache import open_array
from upfl.data.forms import Vectors
from upfl.data.standardize import Sums, standardized, sums_of

rows = st.lists(st.lists(st.floats(-(2.0**49), 2.0**49, width=32), min_size=2, max_size=2), min_size=1, max_size=30)
FORM = Vectors(features=("a", "b"))


@given(rows)
def test_they_are_what_exact_arithmetic_gives(values: list[list[float]]) -> None:
    x = np.array(values, np.float32)
    form = standardized(FORM, sums_of(x, np.arange(len(x))))
    for i, column in enumerate(x.T.tolist()):
        exact = [Fraction(value) for value in column]
        mean = sum(exact, Fraction()) / len(exact)
        spread = math.sqrt(sum(((value - mean) ** 2 for value in exact), Fraction()) / len(exact))
        assert form.mean[i] == pytest.approx(float(mean), rel=1e-6, abs=1e-15)
        assert form.std[i] == pytest.approx(spread, rel=1e-6) if spread > 1e-9 else form.std[i] > 0


@given(rows, st.data())
def test_sums_of_parts_add_up_to_the_same_bits(values: list[list[float]], data: st.DataObject) -> None:
    x = np.array(values, np.float32)
    order = np.array(data.draw(st.permutations(range(len(x)))))
    cut = data.draw(st.integers(0, len(x)))
    whole, one, other = (sums_of(x, rows) for rows in (np.arange(len(x)), order[:cut], order[cut:]))
    parts = Sums(one.count + other.count, one.values + other.values, one.squares + other.squares)
    assert whole.plausible
    assert standardized(FORM, whole) == standardized(FORM, parts)
    assert (whole.values == parts.values).all()
    assert (whole.squares == parts.squares).all()


def test_a_file_that_is_mapped_gives_the_sums_of_its_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped, chosen = open_array(tmp_path / "x.npy"), np.array([3, 49, 7, 20])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standardize, "ROWS", 8)
        for given, expected in ((mapped, x), (mapped[::-1], x[::-1])):
            found = sums_of(given, chosen)
            assert (found.squares == sums_of(expected[chosen], np.arange(4)).squares).all()


def test_newcomers_and_validation_data_change_nothing() -> None:
    rng = np.random.default_rng(0)
    x, y, who = rng.normal(size=(200, 3)).astype(np.float32), rng.integers(0, 2, 200), np.arange(200) % 20
    source = Source.from_arrays(x, y, who, name="rows")
    partition = Partition(kind="natural", clients=20, new=0.4)
    first = build_federation(source, partition, 0)
    seen = np.concatenate([first.training.train(i) for i in range(len(first.training))])
    other = x.copy()
    other[np.setdiff1d(np.arange(200), seen)] += 1000
    second = build_federation(Source.from_arrays(other, y, who, name="rows"), partition, 0)
    assert first.source.form == second.source.form
    assert isinstance(first.source.form, Vectors)
    np.testing.assert_allclose(first.source.form.mean, x[seen].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.source.form.std, x[seen].std(0), rtol=1e-5)
