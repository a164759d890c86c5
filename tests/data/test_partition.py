"""Partitions and federations: nothing lost, nothing twice, limits hold, and the seed fixes everything."""

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from upfl.data import Federation, Partition, Source, build_federation, class_counts, default_partition, load
from upfl.data.forms import Pixels
from upfl.data.partition import Holdings, by_client, dirichlet, iid, pathological, superclass
from upfl.errors import ConfigError, DataError, UpflError

Indices = NDArray[np.int64]
seeds = st.integers(0, 2**32)


@st.composite
def labelled(draw: st.DrawFn, *, classes: int = 12, samples: int = 200) -> Indices:
    """Labels of a small data set in which every class of the first few occurs."""
    width = draw(st.integers(1, classes))
    extra = draw(st.lists(st.integers(0, width - 1), max_size=samples))
    return np.array([*range(width), *extra], np.int64)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_each_once(holdings: Holdings, count: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(list(holdings))), np.arange(count))


def small_source(labels: Indices, *, train_count: int | None = None, groups: Indices | None = None) -> Source:
    return Source(
        name="small",
        x=np.zeros((len(labels), 1, 2, 2), np.uint8),
        labels=labels,
        class_names=tuple(f"class {label}" for label in range(int(labels.max()) + 1)),
        train_count=len(labels) if train_count is None else train_count,
        groups=groups,
        form=Pixels(shape=(1, 2, 2), scale=255.0, mean=(0.0,), std=(1.0,)),
    )


def same(first: Federation, second: Federation) -> bool:
    def arrays(federation: Federation) -> list[NDArray[Any]]:
        both = (federation.training, federation.new)
        return [federation.public, *(array for clients in both for array in vars(clients).values())]

    return all(np.array_equal(a, b) for a, b in zip(arrays(first), arrays(second), strict=True))


@given(labelled(), st.integers(2, 40), st.integers(1, 5), st.booleans(), seeds)
def test_pathological_clients_hold_everything_once_within_their_label_limit(
    labels: Indices, clients: int, limit: int, distinct: bool, seed: int
) -> None:
    classes = len(np.unique(labels))
    if clients * limit < classes or (distinct and limit > classes):
        with pytest.raises(DataError):
            pathological(labels, clients, limit, distinct, rng(seed))
        return
    holdings = pathological(labels, clients, limit, distinct, rng(seed))
    assert len(holdings) == clients
    assert_each_once(holdings, len(labels))
    assert max(len(np.unique(labels[holding])) for holding in holdings) <= limit


@given(st.integers(2, 60), st.integers(1, 10), st.integers(1, 10), seeds)
def test_distinct_labels_are_exactly_as_many_as_asked_for(clients: int, classes: int, limit: int, seed: int) -> None:
    limit = min(limit, classes)
    if clients * limit < classes:
        return
    labels = np.repeat(np.arange(classes), clients)  # enough for no shard to be empty
    holdings = pathological(labels, clients, limit, True, rng(seed))
    assert {len(np.unique(labels[holding])) for holding in holdings} == {limit}


@given(seeds)
def test_shards_of_a_class_are_of_equal_size(seed: int) -> None:
    labels = np.repeat(np.arange(10), 60)
    holdings = pathological(labels, 100, 2, True, rng(seed))
    assert {len(holding) for holding in holdings} == {6}
    assert {int(np.bincount(labels[holding]).max()) for holding in holdings} == {3}


def test_distinct_pairs_are_varied() -> None:
    labels = np.repeat(np.arange(10), 200)
    holdings = pathological(labels, 100, 2, True, rng(0))
    pairs = {tuple(np.unique(labels[holding]).tolist()) for holding in holdings}
    assert len(pairs) > 30  # of 45


def test_too_many_distinct_labels_are_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="3 distinct labels: there are 2 classes"):
        pathological(np.array([0, 1, 0, 1]), 2, 3, True, rng(0))


@given(labelled(), st.integers(2, 40), seeds)
def test_superclass_clients_hold_everything_once_and_one_superclass_each(
    groups: Indices, clients: int, seed: int
) -> None:
    if clients < len(np.unique(groups)):
        with pytest.raises(DataError, match="superclasses"):
            superclass(groups, clients, rng(seed))
        return
    holdings = superclass(groups, clients, rng(seed))
    assert len(holdings) == clients
    assert_each_once(holdings, len(groups))
    assert max(len(np.unique(groups[holding])) for holding in holdings) == 1


@given(labelled(), st.integers(2, 8), st.integers(0, 10), seeds)
def test_a_natural_client_holds_all_of_one_group(groups: Indices, clients: int, minimum: int, seed: int) -> None:
    sizes = np.bincount(groups)
    if (sizes >= minimum).sum() < clients:
        with pytest.raises(DataError, match=f"at least {minimum} samples"):
            by_client(groups, clients, minimum, rng(seed))
        return
    holdings, drawn = by_client(groups, clients, minimum, rng(seed))
    owners = [np.unique(groups[holding]).item() for holding in holdings]
    assert len(set(owners)) == clients
    assert owners == drawn.tolist()
    for owner, holding in zip(owners, holdings, strict=True):
        assert len(np.unique(holding)) == len(holding) == sizes[owner] >= minimum


@given(labelled(), st.integers(1, 40), st.floats(1e-3, 1e6), seeds)
def test_dirichlet_clients_hold_everything_once(labels: Indices, clients: int, alpha: float, seed: int) -> None:
    holdings = dirichlet(labels, clients, alpha, rng(seed))
    assert len(holdings) == clients
    assert_each_once(holdings, len(labels))


def test_a_larger_dirichlet_concentration_spreads_classes_more_evenly() -> None:
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        holdings = [holding for holding in dirichlet(labels, 20, alpha, rng(0)) if len(holding)]
        return float(np.mean([np.bincount(labels[holding]).max() / len(holding) for holding in holdings]))

    assert largest_share(0.01) > largest_share(0.5) > largest_share(1000) > 0.09
    assert largest_share(1000) < 0.2


@given(st.integers(1, 300), st.integers(1, 40), seeds)
def test_iid_clients_hold_everything_once_in_equal_parts(count: int, clients: int, seed: int) -> None:
    holdings = iid(count, clients, rng(seed))
    assert_each_once(holdings, count)
    sizes = [len(holding) for holding in holdings]
    assert max(sizes) - min(sizes) <= 1


@st.composite
def partitions(draw: st.DrawFn, clients: int = 20) -> Partition:
    kind = draw(st.sampled_from(["pathological", "shard", "superclass", "natural", "dirichlet", "iid"]))
    fractions = st.floats(0, 0.9)
    values: dict[str, Any] = {
        "kind": kind,
        "clients": 2 * draw(st.integers(1, clients // 2)) + (kind != "dirichlet") * draw(st.integers(0, 1)),
        "public": draw(fractions),
        "validation": draw(fractions),
        "new_fraction": draw(st.floats(0.01, 1)),
        "rotations_training": draw(st.lists(st.floats(-360, 360), max_size=3)),
        "rotations_new": draw(st.lists(st.floats(-360, 360), max_size=3)),
    }
    if kind == "pathological":
        values |= {"labels_per_client": draw(st.integers(1, 4)), "distinct_labels": draw(st.booleans())}
    if kind == "dirichlet":
        values |= {"alpha_training": draw(st.floats(1e-3, 10)), "alpha_new": draw(st.floats(1e-3, 10))}
    if kind == "natural":
        values |= {"minimum_samples": draw(st.integers(0, 5))}
    values["samples"] = draw(st.none() | st.integers(values["clients"], 40))
    return Partition.model_validate(values)


@settings(max_examples=300)
@given(st.integers(40, 300), st.integers(1, 8), st.floats(0.2, 1), partitions(), seeds, st.data())
def test_a_federation_holds_no_sample_twice_and_splits_as_described(
    count: int, classes: int, train_share: float, partition: Partition, seed: int, data: st.DataObject
) -> None:
    labels, groups = rng(seed).integers(0, classes, (2, count))
    source = small_source(labels, train_count=round(train_share * count), groups=groups)
    try:
        federation = build_federation(source, partition, seed)
    except DataError:
        event("refused")  # too few samples, classes or writers for what was asked
        return
    training, new = federation.training, federation.new
    held = np.concatenate([training.indices, new.indices, federation.public])
    assert len(np.unique(held)) == len(held)
    assert held.min() >= 0
    assert held.max() < len(labels)
    everything = partition.samples or len(labels)
    assert len(federation.public) == round(partition.public * everything)
    if partition.kind != "natural" and partition.new_fraction == 1:
        assert len(held) == everything

    for client in range(len(training)):
        n, validated = len(training.all(client)), len(training.validation(client))
        assert len(training.train(client)) >= 1
        assert len(training.train(client)) + validated == n
        assert validated == min(n - 1, max(int(np.rint(partition.validation * n)), int(partition.validation > 0)))
    assert new.sizes().min() >= 1
    assert not new.train_counts.any()
    for clients, angles in ((training, partition.rotations_training), (new, partition.rotations_new)):
        assert set(clients.angles.tolist()) <= set(angles or (0.0,))
        counts = class_counts(federation, clients)
        np.testing.assert_array_equal(counts.sum(axis=1), clients.sizes())
        client = data.draw(st.integers(0, len(clients) - 1))
        expected = np.bincount(labels[clients.all(client)], minlength=counts.shape[1])
        np.testing.assert_array_equal(counts[client], expected)
    if partition.kind == "dirichlet" and source.train_count < len(labels):
        assert training.indices.max() < source.train_count <= new.indices.min()
    assert same(federation, build_federation(source, partition, seed))


@pytest.fixture(scope="module")
def digits() -> Source:
    return load("digits")


def test_another_seed_gives_another_federation(digits: Source) -> None:
    partition = default_partition("digits")
    assert not same(build_federation(digits, partition, 0), build_federation(digits, partition, 1))


def test_the_partition_of_a_seed_stays_what_it_was(digits: Source) -> None:
    federation = build_federation(digits, default_partition("digits"), 0)
    assert federation.training.all(0)[:5].tolist() == [1232, 1703, 891, 152, 695]
    assert federation.new.all(0)[:5].tolist() == [4, 840, 241, 830, 1289]


def test_digits_become_twenty_training_and_twenty_new_clients_and_an_odd_client_trains(digits: Source) -> None:
    federation = build_federation(digits, default_partition("digits"), 0)
    assert (len(federation.training), len(federation.new)) == (20, 20)
    assert len(federation.training.indices) + len(federation.new.indices) == 1797
    for clients in (federation.training, federation.new):
        assert np.count_nonzero(class_counts(federation, clients), axis=1).max() <= 2
    odd = build_federation(digits, Partition(kind="iid", clients=7), 0)
    assert (len(odd.training), len(odd.new)) == (4, 3)


def test_a_larger_fraction_of_a_new_client_contains_the_smaller_and_changes_nobody_else(digits: Source) -> None:
    small, large = (
        build_federation(digits, default_partition("digits").revised({"new_fraction": fraction}), 0)
        for fraction in (0.1, 0.6)
    )
    np.testing.assert_array_equal(small.training.indices, large.training.indices)
    for client in range(len(small.new)):
        assert 1 <= len(small.new.all(client)) < len(large.new.all(client))
        assert set(small.new.all(client)) < set(large.new.all(client))


def test_new_clients_concentration_leaves_training_clients_alone(digits: Source) -> None:
    base = Partition(kind="dirichlet", clients=20)
    first, second = (build_federation(digits, base.revised({"alpha_new": alpha}), 0) for alpha in (0.1, 0.5))
    np.testing.assert_array_equal(first.training.indices, second.training.indices)
    assert not np.array_equal(first.new.indices, second.new.indices)


def test_concept_shift_draws_a_thousand_samples_and_one_angle_a_client(digits: Source) -> None:
    angles = {"rotations_training": (0, 30, 60), "rotations_new": (15, 45)}
    partition = Partition.model_validate({"kind": "iid", "clients": 50, "samples": 1000, **angles})
    federation = build_federation(digits, partition, 0)
    assert set(federation.training.sizes()) == set(federation.new.sizes()) == {20}
    assert set(federation.training.angles) == {0, 30, 60}
    assert set(federation.new.angles) == {15, 45}


def test_empty_clients_are_left_out_and_counted() -> None:
    labels = np.repeat(np.arange(2), 20)
    partition = Partition(kind="dirichlet", clients=40, alpha_training=0.01, alpha_new=0.01)
    federation = build_federation(small_source(labels, train_count=20), partition, 0)
    left_out = 20 - len(federation.new)
    assert left_out > 0
    assert f"{left_out} of 20 new clients hold no samples and are left out" in federation.notes
    assert federation.training.sizes().min() >= 1


def test_superclasses_that_only_new_clients_hold_are_named() -> None:
    groups = np.repeat(np.arange(2), 10)
    federation = build_federation(small_source(groups, groups=groups), Partition(kind="superclass", clients=2), 0)
    only = groups[federation.new.indices[0]]
    assert f"superclasses that only new clients hold: number {only}" in federation.notes
    assert f"classes that only new clients hold: class {only}" in federation.notes


def test_order_does_not_give_a_new_clients_labels_away(digits: Source) -> None:
    federation = build_federation(digits, default_partition("digits"), 0)
    orders = [digits.labels[federation.new.all(client)] for client in range(len(federation.new))]
    assert not any((np.diff(labels) != 0).sum() == 1 for labels in orders)


@pytest.mark.parametrize(
    ("partition", "seed", "says"),
    [
        (Partition(kind="natural", clients=4), 0, "digits has no clients"),
        (Partition(kind="iid", clients=4, samples=2000), 0, "samples = 2000 is more than the 1797"),
        (Partition(kind="superclass", clients=2, samples=2, public=0.75), 0, "partition.public takes all 2 samples"),
        (default_partition("digits"), -1, "-1"),
    ],
)
def test_a_federation_that_cannot_be_is_refused(digits: Source, partition: Partition, seed: int, says: str) -> None:
    with pytest.raises(UpflError, match=says):
        build_federation(digits, partition, seed)


def test_arrays_of_a_federation_are_read_only(digits: Source) -> None:
    federation = build_federation(digits, default_partition("digits"), 0)
    with pytest.raises(ValueError, match="read-only"):
        federation.training.indices[0] = 1


@given(partitions())
def test_a_partition_survives_being_written_and_read(partition: Partition) -> None:
    assert Partition.model_validate_json(partition.model_dump_json()) == partition


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clients": 1}, "clients"),
        ({"labels_per_client": 0}, "labels_per_client"),
        ({"validation": 1.0}, "validation"),
        ({"validation": float("nan")}, "validation"),
        ({"public": -0.1}, "public"),
        ({"new_fraction": 0}, "new_fraction"),
        ({"rotations_new": [float("inf")]}, "rotations_new"),
        ({"samples": 3}, "samples = 3 cannot give each of 40 clients one"),
        ({"alpha_new": 0.5}, "alpha_new applies to kind = 'dirichlet' only"),
        ({"kind": "dirichlet", "clients": 5}, "clients must be even"),
        ({"kind": "dirichlet", "alpha_new": 0}, "alpha_new"),
        ({"kind": "sorted"}, "kind"),
        ({"label_per_client": 3}, "did you mean labels_per_client"),
    ],
)
def test_a_value_that_does_not_fit_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        default_partition("digits").revised(changes)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        Partition.model_validate({"kind": "iid", "clients": 2, "colour": 1})


def test_a_change_of_kind_takes_back_what_only_the_former_kind_used() -> None:
    revised = default_partition("cifar10").revised({"kind": "dirichlet", "alpha_new": 0.3})
    assert revised == Partition(kind="dirichlet", clients=100, alpha_new=0.3)


@given(
    st.dictionaries(
        st.sampled_from(sorted(Partition.model_fields)),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text("ab01.-", max_size=5)
        | st.lists(st.floats(), max_size=3),
    )
)
def test_any_change_gives_a_partition_or_a_configuration_error(changes: dict[str, Any]) -> None:
    try:
        revised = default_partition("digits").revised(changes)
    except ConfigError:
        return
    assert Partition.model_validate(revised.model_dump()) == revised
