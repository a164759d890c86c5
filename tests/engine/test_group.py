"""How work is dealt out to workers."""

from pathlib import Path

import pytest

from tests.helpers.rounds import small_config
from tests.runs import begun
from upfl.engine.group import Group


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_workers_shares_are_all_the_items_and_nothing_twice(size: int) -> None:
    items = list(range(10))
    for cost in (None, [0] * 10, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]):
        shares = [Group(rank, size).share(items, cost) for rank in range(size)]
        assert sorted(item for share in shares for item in share) == items
        work = [sum(cost[item] if cost and any(cost) else 1 for item in share) for share in shares]
        assert max(work) - min(work) <= (max(cost) if cost and any(cost) else 1)


def test_a_costly_item_is_one_workers_only_one_while_the_others_share_the_rest() -> None:
    shares = [Group(rank, 2).share("abcd", [1, 6, 2, 3]) for rank in range(2)]
    assert shares == [["b"], ["d", "c", "a"]]


def test_a_clients_expected_work_is_the_samples_it_takes_gradients_of(tmp_path: Path) -> None:
    cohort = begun(small_config("fedprox", "batch_size=40", "partition.kind=dirichlet"), tmp_path / "run").cohort
    counts = cohort.setup.federation.training.train_counts.tolist()
    assert min(counts) < 40 < max(counts), "all clients have as much to do"
    (phase,) = cohort.setup.training.phases(0)
    expected = [phase.cost * 3 * min(count, 40) for count in counts]  # three steps
    assert cohort._work(list(range(len(counts))), 0) == expected
