"""Statistics against known cases."""

import itertools
import math

import numpy as np
import pytest

from upfl.statistics import bootstrap, mcnemar, mean_over_seeds, paired, spread


def test_mcnemars_p_is_a_fair_coins() -> None:
    """Twice the tail of the binomial distribution, at most 1."""
    for lost, won in itertools.product(range(15), range(15)):
        n, least = lost + won, min(lost, won)
        tail = sum(math.comb(n, k) for k in range(least + 1)) / 2**n
        assert mcnemar(lost, won) == pytest.approx(min(1.0, 2 * tail)), (lost, won)


def test_a_constant_difference_has_no_spread() -> None:
    samples = np.array([10.0, 20.0, 40.0])
    interval = bootstrap([(0.05 * samples, samples)])
    assert (interval.value, interval.low, interval.high) == pytest.approx((5, 5, 5))
    assert interval.error == pytest.approx(0)


def test_the_interval_of_equal_clients_is_that_of_the_mean() -> None:
    """With clients of one size the bootstrap of the mean has the standard error sd / sqrt(n) (sd of the sample)."""
    rng = np.random.default_rng(0)
    accuracy = rng.normal(0.6, 0.1, 400)
    interval = bootstrap([(100 * accuracy, np.full(400, 100.0))])
    error = 100 * accuracy.std() / np.sqrt(400)
    assert interval.value == pytest.approx(100 * accuracy.mean())
    assert interval.error == pytest.approx(error, rel=0.03)
    assert interval.low == pytest.approx(interval.value - 1.96 * error, abs=0.08)
    assert interval.high == pytest.approx(interval.value + 1.96 * error, abs=0.08)


def test_two_clients_are_drawn_in_the_four_ways() -> None:
    """Of (0 of 10, 30 of 30): both first 0%, both second 100%, one of each 75%, twice as often."""
    interval = bootstrap([(np.array([0.0, 30.0]), np.array([10.0, 30.0]))])
    assert (interval.low, interval.high) == (0, 100)
    assert interval.error == pytest.approx(np.std([0, 75, 75, 100]), rel=0.02)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        sizes = rng.integers(20, 200, 60).astype(float)
        found = bootstrap([(rng.binomial(sizes.astype(int), 0.7).astype(float), sizes)], draws=500)
        covered += found.low <= 70 <= found.high
    assert 0.90 < covered / 300 < 0.985


def test_partitions_have_clients_of_their_own() -> None:
    """The error of a mean over two independent partitions is 1 / sqrt(2) of one's."""
    rng = np.random.default_rng(2)
    first, second = ((rng.normal(50, 10, 200), np.full(200, 100.0)) for _ in range(2))
    one, both = bootstrap([first]), bootstrap([first, second])
    assert both.value == pytest.approx((one.value + bootstrap([second]).value) / 2)
    assert both.error == pytest.approx(one.error / np.sqrt(2), rel=0.12)


def test_pairing_takes_away_what_clients_have_in_common() -> None:
    rng = np.random.default_rng(3)
    hard = {c: (float(rng.integers(20, 90)), 100) for c in range(50)}
    better = {c: (correct + 2 + c % 2, 100) for c, (correct, _) in hard.items()}
    difference = bootstrap([paired([better], [hard])])
    assert difference.value == pytest.approx(2.5)
    assert difference.error < 0.1 < bootstrap([mean_over_seeds([hard])]).error


def test_clients_that_only_one_row_has_do_not_count() -> None:
    correct, samples = paired([{0: (5, 10), 1: (9, 10)}], [{1: (4, 10), 2: (1, 10)}])
    assert (correct.tolist(), samples.tolist()) == ([5], [10])


def test_spread_is_the_sample_standard_deviation_and_one_run_has_none() -> None:
    assert spread([1.0, 3.0]) == pytest.approx(np.sqrt(2))
    assert spread([1.0]) is None
