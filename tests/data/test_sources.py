"""Data sets are found, checked, decoded and cached."""

import gzip
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from tests.helpers.sources import FILE_SETS, assert_same, extend, flip, insert, machine, truncate
from tests.small_data import TEST, TRAIN, write_small
from upfl.data import load, sources
from upfl.data.catalog import CATALOG
from upfl.data.forms import Pixels
from upfl.data.sources import locate
from upfl.errors import ConfigError, DataError

# What is decoded


def test_digits_are_scikit_learns_and_in_range() -> None:
    digits, theirs = load("digits", download=False), load_digits()
    assert np.array_equal(digits.x[:, 0], theirs.images)
    assert np.array_equal(digits.labels, theirs.target)
    assert digits.class_names == tuple(map(str, theirs.target_names))
    assert digits.x.shape == (1797, 1, 8, 8)
    assert isinstance(digits.form, Pixels)
    assert digits.x.max() == digits.form.scale == 16
    assert digits.train_count == len(digits.labels) == 1797
    assert set(digits.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("name", ["digits", *FILE_SETS])
def test_arrays_are_read_only_and_of_the_promised_types(name: str) -> None:
    with machine(name) if name in CATALOG else tempfile.TemporaryDirectory():
        source = load(name, download=False)
        n, channels = source.x.shape[:2]
        assert source.x.dtype == np.uint8
        for column in (source.labels, source.labels if source.groups is None else source.groups):
            assert column.dtype == np.int64
            assert column.shape == (n,)
        assert isinstance(source.form, Pixels)
        assert len(source.form.mean) == len(source.form.std) == channels
        assert source.labels.max() < len(source.class_names)
        with pytest.raises(ValueError, match="read-only"):
            source.x[0] = 0


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_decoded_in_order(compressed: bool) -> None:
    with machine("mnist", compressed=compressed) as folder:
        source = load("mnist")
        name = "t10k-images-idx3-ubyte"
        content = gzip.decompress((folder / f"{name}.gz").read_bytes()) if compressed else (folder / name).read_bytes()
        assert (len(source.x), source.train_count) == (TRAIN + TEST, TRAIN)
        assert source.x[TRAIN:].tobytes() == content[16:]
        assert isinstance(source.x, np.memmap)


def test_cifar100_has_fine_labels_and_superclasses() -> None:
    with machine("cifar100") as folder:
        source = load("cifar100")
        rows = np.frombuffer((folder / "train.bin").read_bytes(), np.uint8).reshape(-1, 3074)
        assert source.groups is not None
        np.testing.assert_array_equal(source.groups[:TRAIN], rows[:, 0])
        np.testing.assert_array_equal(source.labels[:TRAIN], rows[:, 1])
        np.testing.assert_array_equal(source.x[:TRAIN].reshape(TRAIN, -1), rows[:, 2:])


def test_writers_are_numbered_by_name_and_pixels_come_back_exactly() -> None:
    with machine("femnist") as folder:
        source = load("femnist")
        writers: dict[str, Any] = {}
        for path in folder.glob("*.json"):
            writers |= json.loads(path.read_text())["user_data"]
        assert source.groups is not None
        for number, writer in enumerate(sorted(writers)):
            held = source.groups == number
            np.testing.assert_array_equal(source.labels[held], writers[writer]["y"])
            np.testing.assert_array_equal(source.x[held].reshape(-1, 784) / 255, writers[writer]["x"])


@pytest.mark.parametrize("name", FILE_SETS)
def test_the_catalog_agrees_with_itself(name: str) -> None:
    specification = CATALOG[name]
    assert len(set(specification.class_names)) == len(specification.class_names)
    assert len(specification.mean) == len(specification.std) == specification.shape[0]
    assert all(url.startswith("https://") for item in specification.downloads for url in item.urls)
    assert specification.downloads or specification.by_hand


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'minst'; did you mean mnist"):
        load("minst")


# Where files are


def test_a_data_folder_that_does_not_exist_is_an_error(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_DATA", str(bare / "nowhere"))
    with pytest.raises(DataError, match="UPFL_DATA"):
        load("mnist")


def test_the_cache_folder_and_the_systems_are_searched_too(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("fashion_mnist") is None
    debian = bare.parent / "usr" / "fashion_mnist"
    specification = write_small("fashion_mnist", debian.parent)
    monkeypatch.setitem(CATALOG, "fashion_mnist", replace(specification, system_folders=(debian,)))
    assert locate("fashion_mnist") == debian
    write_small("fashion_mnist", bare / "datasets")
    assert locate("fashion_mnist") == bare / "datasets" / "fashion_mnist"


@pytest.mark.parametrize("name", FILE_SETS)
def test_what_is_missing_says_how_to_get_it(name: str, bare: Path) -> None:
    with pytest.raises(DataError, match=str(bare / "datasets" / CATALOG[name].folder)):
        load(name, download=False)


def test_femnist_says_how_leaf_makes_it(bare: Path) -> None:
    with pytest.raises(DataError, match=r"LEAF .*preprocess\.sh"):
        load("femnist")


# The decoded cache


def decoded_arrays(folder: Path) -> list[Path]:
    return sorted((folder.parent.parent / "cache" / "decoded").glob("*/*.npy"))


def test_decoding_is_done_once_and_again_when_a_file_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine("cifar10") as folder:
        first = load("cifar10")
        (folder / "test_batch.bin").touch()
        load("cifar10")
        monkeypatch.setattr(sources, "_decode", None)
        assert_same(first, load("cifar10"))
        (folder / "test_batch.bin").touch()
        with pytest.raises(TypeError):
            load("cifar10")


def test_a_damaged_decoded_cache_is_rebuilt() -> None:
    with machine("cifar100") as folder:
        original = load("cifar100")
        images = np.array(original.x)
        paths = decoded_arrays(folder)
        contents = {path: path.read_bytes() for path in paths}
        assert [path.name for path in paths] == ["groups.npy", "images.npy", "labels.npy"]

        @settings(max_examples=60)
        @given(
            st.sampled_from(paths), st.sampled_from([flip, truncate, insert, extend]), st.floats(0, 0.999), st.data()
        )
        def damage(path: Path, change: Any, place: float, data: st.DataObject) -> None:
            # A changed pixel cannot be seen without reading everything; header, length and labels are looked at.
            length = 128 if change is flip else len(contents[path])
            value = data.draw(st.binary(min_size=1, max_size=4).filter(any))
            path.unlink()  # or the arrays that are open would change
            path.write_bytes(change(contents[path], int(place * length), value))
            again = load("cifar100")
            np.testing.assert_array_equal(again.x, images)
            np.testing.assert_array_equal(again.labels, original.labels)

        damage()


def test_a_missing_decoded_array_is_rebuilt() -> None:
    with machine("cifar100") as folder:
        load("cifar100")
        for path in decoded_arrays(folder):
            path.unlink()
            assert load("cifar100").groups is not None


def test_many_may_decode_at_the_same_time() -> None:
    with machine("mnist") as folder, ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(load, ["mnist"] * 8)
        for other in others:
            assert_same(first, other)
        decoded = sorted(path.name for path in folder.parent.parent.glob("cache/decoded/*/*"))
        assert decoded == ["images.npy", "labels.npy"]
        assert not list(folder.parent.parent.glob("cache/decoded/.*"))


def test_without_a_writable_cache_a_private_temporary_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine("mnist"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "file").touch()
        monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "file" / "cache"))
        first = load("mnist")
        (private,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert private.stat().st_mode & 0o777 == 0o700
        assert_same(first, load("mnist"))
        private.chmod(0o777)
        with pytest.raises(DataError, match="UPFL_CACHE"):
            load("mnist")
