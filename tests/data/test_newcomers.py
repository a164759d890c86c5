"""Who is a newcomer: a share, a list, a column; and newcomers without labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upfl
from upfl.data import Federation, Partition, Source, build_federation
from upfl.data import large as large_module
from upfl.data.forms import Pixels
from upfl.data.large import federation_of
from upfl.data.partition import Holdings, shard
from upfl.errors import ConfigError, DataError, RunError


def rows(clients: int = 12, each: int = 10, **changes: Any) -> Source:
    rng, count = np.random.default_rng(0), clients * each
    y = np.where(rng.random(count) < 0.5, "no", "yes").astype(object)
    y[list(changes.pop("unlabelled", ()))] = None
    x = rng.normal(size=(count, 3)) + (y == "yes")[:, None]
    who = np.array([f"c{i % clients}" for i in range(count)])
    return Source.from_arrays(x, y, who, **changes)


def new_names(federation: Federation) -> set[str | None]:
    return {federation.name("new", i) for i in range(len(federation.new))}


def test_a_share_a_list_or_a_column_says_who_is_new() -> None:
    source = rows()
    drawn = build_federation(source, Partition(kind="natural", clients=12, new=0.25), 0)
    assert (len(drawn.training), len(drawn.new)) == (9, 3)
    listed = build_federation(source, Partition(kind="natural", clients=12, new=("c3", "c7")), 0)
    assert new_names(listed) == {"c3", "c7"}
    marked = rows(newcomers=[i % 12 in (1, 2, 5) for i in range(120)])
    column = build_federation(marked, Partition(kind="natural", clients=12, new="column"), 0)
    assert new_names(column) == {"c1", "c2", "c5"}
    held = np.concatenate([column.training.indices, column.new.indices])
    assert sorted(held.tolist()) == list(range(120))
    for i in range(len(column.training)):
        names = {bytes(source.clients[source.groups[j]]).decode() for j in column.training.all(i)}  # type: ignore[index]
        assert names == {column.name("training", i)}


@pytest.mark.parametrize(
    ("partition", "word"),
    [
        ({"kind": "natural", "clients": 12, "new": ("nobody",)}, "nobody"),
        ({"kind": "natural", "clients": 12, "new": "column"}, "do not say who is new"),
        ({"kind": "natural", "clients": 13}, "13 clients"),
        ({"kind": "iid", "clients": 12, "new": ("c1",)}, "natural"),
        ({"kind": "dirichlet", "clients": 12, "new": 0.2}, "dirichlet"),
        ({"kind": "iid", "clients": 4, "new": 0.1}, "both kinds"),
        ({"kind": "iid", "clients": 4, "rotations_new": (30.0,)}, "images alone"),
    ],
)
def test_what_cannot_be_is_refused(partition: dict[str, Any], word: str) -> None:
    with pytest.raises((ConfigError, DataError, ValueError), match=word):
        build_federation(rows(), Partition(**partition), 0)


def test_earlier_runs_called_it_writer() -> None:
    assert Partition.model_validate({"kind": "writer", "clients": 4}) == Partition(kind="natural", clients=4)


@pytest.mark.bits
@settings(max_examples=50)
@given(st.lists(st.integers(0, 12), min_size=30, max_size=80), st.integers(0, 3), st.integers(0, 9))
def test_natural_gives_the_bits_that_writer_gave(groups: list[int], least: int, seed: int) -> None:
    array = np.array(groups)
    writers, sizes = np.unique(array, return_counts=True)
    eligible = np.flatnonzero(sizes >= least)
    clients = min(len(eligible), 5)
    if clients < 2:
        return
    held = Holdings.cut(np.argsort(array, kind="stable"), sizes)
    expected = held.chosen(np.random.default_rng(seed).choice(eligible, clients, replace=False))
    found, numbers = upfl.data.partition.by_client(array, clients, least, np.random.default_rng(seed))
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    assert [writers[i] for i in eligible] == sorted(set(writers[eligible]))
    assert all(array[found[i][0]] == number for i, number in enumerate(numbers))


@given(st.lists(st.integers(0, 4), min_size=24, max_size=60), st.integers(2, 6), st.integers(1, 3))
def test_shards_hold_everything_once_and_few_classes(labels: list[int], clients: int, each: int) -> None:
    array = np.array(labels)
    held = shard(array, clients, each, np.random.default_rng(0))
    assert len(held) == clients
    assert sorted(held.indices.tolist()) == list(range(len(array)))
    boundaries = len(np.unique(array)) - 1
    assert sum(len(np.unique(array[one])) for one in held) <= clients * each + boundaries


def test_who_has_no_labels_is_new_and_is_told_of_without_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    source = rows(unlabelled=[i for i in range(120) if i % 12 in (4, 9)], name="partly")
    federation = build_federation(source, Partition(kind="natural", clients=12, new=0.5), 0)
    assert {"c4", "c9"} <= new_names(federation)
    with pytest.raises(DataError, match="client 'c4' has samples without labels"):
        build_federation(source, Partition(kind="natural", clients=12, new=("c1",)), 0)
    with pytest.raises(DataError, match=r"raise partition\.new"):
        build_federation(source, Partition(kind="natural", clients=12, new=0.1), 0)
    with pytest.raises(DataError, match="take kind = 'natural'"):
        build_federation(source, Partition(kind="iid", clients=12), 0)
    little = ["iterations=5", "batch_size=5", "partition.new=0.25"]
    config = upfl.configure("label-shift", source, rounds=2, evaluate_every=2, settings=little)
    run = upfl.train(config, tmp_path / "run", source=source, workers=1)
    row = run.result["rows"][0]
    assert sum(client["kind"] == "new" for client in row["clients"]) == 1
    assert {client["name"] for client in row["unscored"]} == {"c4", "c9"}
    for client in row["unscored"]:
        assert sum(client["mix"].values()) == pytest.approx(1, abs=0.01)
        assert len(client["estimates"]) == 2
    nobody = upfl.configure(
        "label-shift", source, rounds=2, evaluate_every=2, settings=[*little, 'partition.new=["c4", "c9"]']
    )
    alone = upfl.train(nobody, tmp_path / "alone", source=source, workers=1).result["rows"][0]
    assert "test" not in alone
    assert len(alone["unscored"]) == 2


def test_a_source_in_memory_trains_resumes_and_exports_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    source = rows()
    config = upfl.configure("fedavg", source, rounds=2, evaluate_every=2, settings=["iterations=5"], model="linear")
    with pytest.raises(RunError, match="the source is"):
        upfl.train(config, tmp_path / "other", source=rows(clients=10))
    run = upfl.train(config, tmp_path / "run", source=source, workers=2)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["dataset"] == source.name
    bundle = upfl.export(upfl.Run(tmp_path / "run"), tmp_path / "bundle")
    x = np.asarray(source.x)[run.federation.new.all(0)]
    mine = bundle.personalize(x)
    direct = run.personalize(run.newcomer(0))
    np.testing.assert_array_equal(mine.personalized.logits.numpy(), direct.logits.numpy())  # type: ignore[union-attr]
    with pytest.raises(DataError, match="the model takes 3 features"):
        bundle.personalize(x[:, :2])


def test_many_clients_are_mapped_into_memory_and_are_those_that_are_worked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(large_module, "MANY", 10)
    source, partition = rows(name="many"), Partition(kind="natural", clients=12, new=0.25)
    upfl.data.kept.keep(source)
    expected = build_federation(source, partition, 3)
    for _ in range(2):
        found = federation_of(upfl.data.load("many"), partition, 3)
        assert found.source.form == expected.source.form
        assert found.notes == expected.notes
        assert new_names(found) == new_names(expected)
        for role in ("training", "new"):
            for name in ("indices", "offsets", "train_counts", "angles"):
                np.testing.assert_array_equal(
                    getattr(getattr(found, role), name), getattr(getattr(expected, role), name)
                )
    (kept,) = (tmp_path / "cache" / "own" / "many" / "federations").iterdir()
    (kept / "training.indices.npy").write_bytes(b"damaged")
    assert len(federation_of(upfl.data.load("many"), partition, 3).new) == 3


def test_images_of_ones_own_are_kept_as_bytes() -> None:
    x = np.random.default_rng(0).integers(0, 17, (40, 4, 4))
    source = Source.from_arrays(x, np.arange(40) % 2, scale=16)
    assert isinstance(source.form, Pixels)
    assert (source.x[:, 0] == x).all()
    with pytest.raises(DataError, match="image 1 has pixels"):
        Source.from_arrays(x + 1, np.arange(40) % 2, scale=10)
