"""Damaged data sets are named, whatever the damage."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.sources import assert_same, extend, flip, insert, machine, truncate
from tests.sealed import put
from tests.small_data import TEST, TRAIN, write_small
from upfl.data import load
from upfl.data.sources import check
from upfl.errors import DataError

damages = st.tuples(
    st.sampled_from([flip, truncate, insert, extend]), st.floats(0, 1), st.binary(min_size=1, max_size=8)
)


@pytest.mark.parametrize(
    ("name", "compressed"),
    [("mnist", True), ("mnist", False), ("fashion_mnist", True), ("cifar10", False), ("cifar100", False)],
)
def test_a_damaged_file_is_named_and_never_gives_other_data(name: str, compressed: bool) -> None:
    with machine(name, compressed=compressed) as folder:
        original = load(name)
        paths = sorted(folder.iterdir())
        contents = {path: path.read_bytes() for path in paths}

        @settings(max_examples=60)
        @given(st.sampled_from(paths), damages)
        def damage(path: Path, how: tuple[Any, float, bytes]) -> None:
            change, place, value = how
            path.write_bytes(change(contents[path], int(place * len(contents[path])), value))
            with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
                patch.setenv("UPFL_CACHE", cache)
                try:
                    assert_same(load(name), original)  # a changed comment in a gzip header does no harm
                except DataError as error:
                    assert str(path) in str(error)  # noqa: PT017
                finally:
                    path.write_bytes(contents[path])

        damage()


def test_damaged_json_gives_a_data_error_that_names_it_or_still_valid_samples() -> None:
    with machine("femnist") as folder:
        path = folder / "all_data_0.json"
        content = path.read_bytes()

        @settings(max_examples=100)
        @given(damages)
        def damage(how: tuple[Any, float, bytes]) -> None:
            change, place, value = how
            path.write_bytes(change(content, int(place * len(content)), value))
            with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
                patch.setenv("UPFL_CACHE", cache)
                try:
                    source = load("femnist")
                except DataError as error:
                    assert str(folder) in str(error)  # noqa: PT017
                else:
                    assert 0 <= source.labels.min() <= source.labels.max() < 62

        damage()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put("user_data", "f0002_b", "y", 0, value=62), "labels beyond the 62 classes"),
        (put("user_data", "f0002_b", "y", 0, value=1.0), "whole numbers"),
        (put("user_data", "f0002_b", "x", 0, 5, value=1.5), r"outside \[0, 1\]"),
        (put("user_data", "f0002_b", "x", 0, 5, value=float("nan")), "not valid JSON"),
        (put("user_data", "f0002_b", "x", 0, value=["0.5"] * 784), "784 numbers"),
        (put("user_data", "f0002_b", "x", 0, value=[0.5] * 783), "784 numbers"),
        (put("num_samples", 0, value=9), "num_samples"),
        (put("users", value=["f0002_b", "f0002_b"]), "distinct"),
        (lambda document: document["user_data"].pop("f0001_a"), "same writers"),
    ],
)
def test_json_that_contradicts_itself_is_refused_with_the_reason(change: Any, problem: str) -> None:
    with machine("femnist") as folder:
        path = folder / "all_data_0.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
        with pytest.raises(DataError, match=f"all_data_0.json cannot be used: .*{problem}"):
            load("femnist")


@pytest.mark.parametrize(
    "content", ["[]", "{}", "[" * 100_000, "null", '{"users": [], "num_samples": [], "user_data": {}}']
)
def test_other_json_is_refused(content: str) -> None:
    with machine("femnist") as folder:
        (folder / "all_data_0.json").write_text(content)
        with pytest.raises(DataError, match=r"all_data_0\.json"):
            load("femnist")


@pytest.mark.parametrize(
    ("name", "file", "content", "says"),
    [
        ("cifar10", "test_batch.bin", b"short", r"test_batch\.bin cannot be used: .* truncated.*Replace it"),
        ("cifar10", "data_batch_3.bin", None, r"data_batch_3\.bin missing"),
        ("mnist", "train-labels-idx1-ubyte.gz", gzip.compress(bytes(10_000_000)), "more than 32 bytes"),
        ("femnist", "all_data_1.json", "all_data_0.json", "several files"),
    ],
    ids=["truncated", "missing", "decompressed without end", "a writer in two files"],
)
def test_what_is_wrong_with_a_file_is_said(name: str, file: str, content: bytes | str | None, says: str) -> None:
    with machine(name) as folder:
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes((folder / content).read_bytes() if isinstance(content, str) else content)
        with pytest.raises(DataError, match=says):
            load(name)


def test_another_data_set_under_this_name_is_refused() -> None:
    with machine("mnist") as folder:
        write_small("fashion_mnist", folder.parent, seed=1)
        for path in folder.iterdir():
            path.write_bytes((folder.parent / "fashion_mnist" / path.name).read_bytes())
        with pytest.raises(DataError, match="not the canonical MNIST"):
            load("mnist")


def test_a_broken_file_is_not_passed_over_for_a_good_one_elsewhere() -> None:
    with machine("cifar100") as folder, pytest.MonkeyPatch.context() as patch:
        write_small("cifar100", Path(folder.parent.parent / "cache" / "datasets"))
        (folder / "train.bin").write_bytes(b"")
        with pytest.raises(DataError, match=str(folder / "train.bin")):
            load("cifar100")
        patch.delenv("UPFL_DATA")
        assert len(load("cifar100").labels) == TRAIN + TEST


def test_check_tells_good_files_from_bad_ones() -> None:
    with machine("cifar10") as folder:
        assert all(item.problem is None for item in check("cifar10"))
        (folder / "data_batch_2.bin").write_bytes(b"short")
        bad = [item for item in check("cifar10") if item.problem]
        assert [item.path.name for item in bad] == ["data_batch_2.bin"]
    assert check("digits") == []
