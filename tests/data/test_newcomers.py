"""Who is a newcomer: a share, a list, a column; and newcomers without labels."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import upfl
from tests.helpers.cli import done
from tests.plugin_methods import upfl as command
from upfl.data import Federation, Partition, Source, build_federation
from upfl.data import large as large_module
from upfl.data.forms import Pixels
from upfl.data.large import federation_of
from upfl.data.partition import Holdings, shard
from upfl.errors import ConfigError, DataError, RunError
from upfl.experiments.newcomers import score_on_newcomers
from upfl.report.page import write_report


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


LITTLE = ["iterations=5", "batch_size=5", "partition.new=0.25"]


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs on clients of whom c4 and c9 have no labels: `run`, where one more is new, and `alone`, where none is."""
    folder = tmp_path_factory.mktemp("partly")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPFL_CACHE", str(folder / "cache"))
        source = rows(clients=16, unlabelled=[i for i in range(160) if i % 16 in (4, 9)], name="partly")
        for name, new in (("run", "0.2"), ("alone", '["c4", "c9"]')):
            settings = [*LITTLE, f"partition.new={new}"]
            config = upfl.configure("label-shift", source, rounds=2, evaluate_every=1, settings=settings)
            upfl.train(config, folder / name, source=source, workers=1)
        yield folder


def test_who_has_no_labels_can_only_be_new() -> None:
    source = rows(unlabelled=[i for i in range(120) if i % 12 in (4, 9)])
    federation = build_federation(source, Partition(kind="natural", clients=12, new=0.5), 0)
    assert {"c4", "c9"} <= new_names(federation)
    with pytest.raises(DataError, match="client 'c4' has samples without labels"):
        build_federation(source, Partition(kind="natural", clients=12, new=("c1",)), 0)
    with pytest.raises(DataError, match=r"raise partition\.new"):
        build_federation(source, Partition(kind="natural", clients=12, new=0.1), 0)
    with pytest.raises(DataError, match="take kind = 'natural'"):
        build_federation(source, Partition(kind="iid", clients=12), 0)


@pytest.mark.parametrize(("name", "scored"), [("run", 1), ("alone", 0)])
def test_who_has_no_labels_is_told_of_without_a_score(partly: Path, name: str, scored: int) -> None:
    row = upfl.Run(partly / name).result["rows"][0]
    assert sum(client["kind"] == "new" for client in row["clients"]) == scored
    assert ("test" in row) == bool(scored)
    assert {client["name"] for client in row["unscored"]} == {"c4", "c9"}
    for client in row["unscored"]:
        assert sum(client["mix"].values()) == pytest.approx(1, abs=0.01)
        assert len(client["estimates"]) == 2


@pytest.mark.parametrize(("name", "scored"), [("run", 1), ("alone", 0)])
def test_a_report_has_the_clients_that_cannot_be_scored(partly: Path, tmp_path: Path, name: str, scored: int) -> None:
    report = write_report([partly / name], tmp_path / "page")
    assert report.collected.left_out == []
    page = (tmp_path / "page" / "index.html").read_text()
    assert ("no labels" in page) == (not scored)
    with (tmp_path / "page" / "tables" / "partly-unscored.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert [client["Client"] for client in listed] == ["c4", "c9"]
    for client in listed:
        assert re.fullmatch(r"\d+% \(\d+% to \d+%\)", client["Estimated accuracy"])
        assert "yes " in client["Class mix"]


@pytest.mark.parametrize(("name", "scored"), [("run", 1), ("alone", 0)])
def test_clients_without_labels_have_no_part_in_a_score(partly: Path, name: str, scored: int) -> None:
    found = done("score", partly / name, "--score", "none,label-shift", "--oracles", "all", "--inductive", "--json")
    for row in json.loads(found.out)["rows"]:
        assert len(row["clients"]) == scored
        assert ("test" in row) == bool(scored)
        assert row["bound"] or [client["name"] for client in row["unscored"]] == ["c4", "c9"]
    shown = done("score", partly / name, "--score", "none")
    assert "New clients without labels: none" in shown.out
    run = upfl.Run(partly / name)
    other = score_on_newcomers(run, {"new_fraction": 0.5})["rows"][0]
    assert (len(other["clients"]), len(other["unscored"]), "test" in other) == (scored, 2, bool(scored))
    drawn = command("score", partly / name, "--score", "none", "--sizes", "4", "--classes", "2")
    assert (drawn.code == 0) == bool(scored), drawn.err
    assert scored or "new clients hold 0 classes" in drawn.err


def test_partitions_are_shown_by_the_clients_names(partly: Path, tmp_path: Path) -> None:
    shown = done("data", "show", "partly", "--set", "new=0.25", "-o", tmp_path / "who.svg")
    assert re.search(r"c4 .* 10 no labels", shown.out)
    assert "<!-- c9 -->" in (tmp_path / "who.svg").read_text()
    names = json.loads(done("data", "show", "partly", "--set", "new=0.25", "--json").out)
    assert sorted(names["training"]["names"] + names["new"]["names"]) == sorted(f"c{i}" for i in range(16))


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
