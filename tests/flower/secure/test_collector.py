"""The sum of those that remain, exactly, whoever drops out when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.secure import STEPS, Federation, random_vectors, session
from upfl.errors import BadClientError
from upfl.flower.secure import Collector, TooFewError
from upfl.flower.secure.primitives import Vector


def added(vectors: dict[int, Vector], who: list[int]) -> Vector:
    return sum((vectors[client] for client in who), np.zeros_like(vectors[0]))


def follow(seed: int, most: int) -> str:
    """One random schedule: the sum is that of those that remain, or it stops where too few are left."""
    source = np.random.default_rng(seed)
    clients = int(source.integers(2, most + 1))
    threshold = int(source.integers(clients // 2 + 1, clients + 1))
    vectors = random_vectors(source, clients, int(source.integers(1, 40)))
    share = source.choice([0.0, 0.1, 0.3])
    drops = {c: str(source.choice(STEPS)) for c in range(clients) if source.random() < share}
    left = [sum(STEPS.index(drops.get(c, "unmask")) > at or c not in drops for c in range(clients)) for at in range(5)]
    if 2 * threshold <= left[0]:
        threshold = left[0] // 2 + 1
    federation = Federation(clients)
    short = next((step for step, count in zip(STEPS, left, strict=True) if count < threshold), None)
    if short is not None:
        with pytest.raises(TooFewError) as stopped:
            federation.sum(session(max(threshold, 2), len(vectors[0])), vectors, drops)
        missing = {c for c, step in drops.items() if step == short}
        assert missing <= set(stopped.value.missing)
        return "too few"
    total, live = federation.sum(session(max(threshold, 2), len(vectors[0])), vectors, drops)
    assert live == [c for c in range(clients) if STEPS.index(drops.get(c, "unmask")) > 2 or c not in drops]
    assert np.array_equal(total, added(vectors, live))
    return "sum"


def test_any_schedule_of_drop_outs_gives_the_sum_of_those_that_remain_or_names_who_is_missing() -> None:
    ends = [follow(seed, 9) for seed in range(60)]
    assert min(ends.count("sum"), ends.count("too few")) > 5, "both ends must have been seen"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_schedules_with_up_to_a_hundred_members() -> None:
    ends = [follow(seed, 12) for seed in range(1000, 1980)] + [follow(seed, 100) for seed in range(2000, 2020)]
    assert len(ends) == 1000
    assert min(ends.count("sum"), ends.count("too few")) > 100


@pytest.mark.parametrize("step", STEPS)
def test_a_member_that_drops_out_at_a_step_costs_its_own_part_at_most(step: str) -> None:
    vectors = random_vectors(np.random.default_rng(1), 5, 1000)
    total, live = Federation(5).sum(session(4, 1000), vectors, {2: step})
    assert live == ([0, 1, 3, 4] if step in STEPS[:3] else [0, 1, 2, 3, 4])
    assert np.array_equal(total, added(vectors, live))


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_there_is_no_sum_and_the_missing_are_named(step: str) -> None:
    vectors = random_vectors(np.random.default_rng(2), 4, 10)
    with pytest.raises(TooFewError, match="missing: 1, 3") as stopped:
        Federation(4).sum(session(3, 10), vectors, {1: step, 3: step})
    assert stopped.value.there == [0, 2]


def test_a_failed_attempt_is_repeated_under_the_same_name_by_those_that_are_left() -> None:
    vectors = random_vectors(np.random.default_rng(3), 5, 100)
    for step in STEPS[:4]:
        federation = Federation(5)
        with pytest.raises(TooFewError):
            federation.sum(session(4, 100), vectors, {0: step, 4: step})
        left = {client: vectors[client] for client in (1, 2, 3)}
        total, live = federation.sum(session(2, 100, attempt=2), left)
        assert live == [1, 2, 3]
        assert np.array_equal(total, added(vectors, live))


def test_masks_longer_than_a_chunk_cancel() -> None:
    size = (1 << 17) + 3
    vectors = random_vectors(np.random.default_rng(4), 3, size)
    total, live = Federation(3).sum(session(2, size), vectors, {1: "mask"})
    assert np.array_equal(total, added(vectors, [0, 2]))
    assert live == [0, 2]


def test_a_vector_of_another_form_or_of_nobody_is_refused() -> None:
    collector = Collector(session(2, 4), {0, 1})
    collector.sharing = frozenset({0, 1})
    with pytest.raises(BadClientError, match="not 4 values"):
        collector.add(0, np.zeros(5, np.uint64))
    with pytest.raises(BadClientError, match="nobody waits"):
        collector.add(7, np.zeros(4, np.uint64))
    collector.add(0, np.zeros(4, np.uint64))
    with pytest.raises(BadClientError, match="nobody waits"):
        collector.add(0, np.zeros(4, np.uint64))


@pytest.mark.parametrize("key", [b"", bytes(32), bytes(31), bytes(33)])
def test_a_member_whose_keys_cannot_be_used_is_left_out_before_others_see_them(key: bytes) -> None:
    about, federation = session(2, 4), Federation(3)
    collector = Collector(about, range(3))
    adverts = [federation.ask(client, "advertise", about) for client in range(3)]
    left = collector.advertised([*adverts[:2], replace(adverts[2], mask_key=key)])
    assert [advert.client for advert in left] == [0, 1]


def test_a_wrong_share_of_a_dropped_members_key_is_found() -> None:
    vectors, federation = random_vectors(np.random.default_rng(5), 4, 8), Federation(4)
    about = session(3, 8)
    collector = Collector(about, vectors)
    adverts = collector.advertised([federation.ask(c, "advertise", about) for c in vectors])
    boxes = collector.shared({c: federation.ask(c, "share", adverts) for c in vectors})
    for client in (0, 1, 2):
        collector.add(client, federation.ask(client, "mask", boxes[client], vectors[client]))
    signatures = collector.agreed({c: federation.ask(c, "agree", [0, 1, 2]) for c in (0, 1, 2)})
    revealed = {c: federation.ask(c, "unmask", signatures) for c in (0, 1, 2)}
    revealed[1][3] = bytes(32)
    with pytest.raises(BadClientError, match="client 3 do not fit its public key"):
        collector.unmasked(revealed)
