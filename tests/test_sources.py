"""Data sets are found, checked, decoded and cached; damaged ones are named, whatever the damage."""

import gzip
import io
import json
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from tests.small_data import TEST, TRAIN, md5, write_small
from upfl.data import Source, load, sources
from upfl.data.catalog import CATALOG, Download, Specification
from upfl.data.sources import check, fetch, locate
from upfl.errors import ConfigError, DataError

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

FILE_SETS = ["mnist", "fashion_mnist", "cifar10", "cifar100", "femnist"]


@contextmanager
def machine(name: str, *, compressed: bool = True) -> Iterator[Path]:
    """A machine with a small data set and nothing else; gives the folder with its files."""
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        root = Path(temporary)
        specification = write_small(name, root / "data", compressed=compressed)
        patch.setitem(CATALOG, name, replace(specification, system_folders=()))
        patch.setenv("UPFL_DATA", str(root / "data"))
        patch.setenv("UPFL_CACHE", str(root / "cache"))
        yield root / "data" / specification.folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data; gives its cache folder."""
    monkeypatch.delenv("UPFL_DATA", raising=False)
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    for name in FILE_SETS:
        monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], system_folders=()))
    return tmp_path / "cache"


def assert_same(first: Source, second: Source) -> None:
    np.testing.assert_array_equal(first.images, second.images)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(first.groups, second.groups)


# What is decoded


def test_digits_are_scikit_learns_and_in_range() -> None:
    digits, theirs = load("digits", download=False), load_digits()
    assert np.array_equal(digits.images[:, 0], theirs.images)
    assert np.array_equal(digits.labels, theirs.target)
    assert digits.class_names == tuple(map(str, theirs.target_names))
    assert digits.images.shape == (1797, 1, 8, 8)
    assert digits.images.max() == digits.scale == 16
    assert digits.train_count == len(digits.labels) == 1797
    assert set(digits.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("name", ["digits", *FILE_SETS])
def test_arrays_are_read_only_and_of_the_promised_types(name: str) -> None:
    with machine(name) if name in CATALOG else tempfile.TemporaryDirectory():
        source = load(name, download=False)
        n, channels = source.images.shape[:2]
        assert source.images.dtype == np.uint8
        for column in (source.labels, source.labels if source.groups is None else source.groups):
            assert column.dtype == np.int64
            assert column.shape == (n,)
        assert len(source.mean) == len(source.std) == channels
        assert source.labels.max() < len(source.class_names)
        with pytest.raises(ValueError, match="read-only"):
            source.images[0] = 0


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_decoded_in_order(compressed: bool) -> None:
    with machine("mnist", compressed=compressed) as folder:
        source = load("mnist")
        name = "t10k-images-idx3-ubyte"
        content = gzip.decompress((folder / f"{name}.gz").read_bytes()) if compressed else (folder / name).read_bytes()
        assert (len(source.images), source.train_count) == (TRAIN + TEST, TRAIN)
        assert source.images[TRAIN:].tobytes() == content[16:]
        assert isinstance(source.images, np.memmap)


def test_cifar100_has_fine_labels_and_superclasses() -> None:
    with machine("cifar100") as folder:
        source = load("cifar100")
        rows = np.frombuffer((folder / "train.bin").read_bytes(), np.uint8).reshape(-1, 3074)
        assert source.groups is not None
        np.testing.assert_array_equal(source.groups[:TRAIN], rows[:, 0])
        np.testing.assert_array_equal(source.labels[:TRAIN], rows[:, 1])
        np.testing.assert_array_equal(source.images[:TRAIN].reshape(TRAIN, -1), rows[:, 2:])


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
            np.testing.assert_array_equal(source.images[held].reshape(-1, 784) / 255, writers[writer]["x"])


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


# Damage


def flip(content: bytes, position: int, value: bytes) -> bytes:
    changed = bytes(a ^ b for a, b in zip(content[position:], value, strict=False))
    return content[:position] + changed + content[position + len(changed) :]


def truncate(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position]


def insert(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position] + value + content[position:]


def extend(content: bytes, position: int, value: bytes) -> bytes:
    return content + value


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


def change_labels(document: Any) -> None:
    document["user_data"]["f0002_b"]["y"][0] = 62


def change_count(document: Any) -> None:
    document["num_samples"][0] += 1


def change_pixel(document: Any) -> None:
    document["user_data"]["f0002_b"]["x"][0][5] = 1.5


def make_nan(document: Any) -> None:
    document["user_data"]["f0002_b"]["x"][0][5] = float("nan")


def make_text(document: Any) -> None:
    document["user_data"]["f0002_b"]["x"][0] = ["0.5"] * 784


def shorten_image(document: Any) -> None:
    document["user_data"]["f0002_b"]["x"][0].pop()


def repeat_user(document: Any) -> None:
    document["users"] = ["f0002_b", "f0002_b"]


def drop_user(document: Any) -> None:
    del document["user_data"]["f0001_a"]


def fractional_label(document: Any) -> None:
    document["user_data"]["f0002_b"]["y"][0] = 1.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_labels, "labels beyond the 62 classes"),
        (change_count, "num_samples"),
        (change_pixel, r"outside \[0, 1\]"),
        (make_nan, "not valid JSON"),
        (make_text, "784 numbers"),
        (shorten_image, "784 numbers"),
        (repeat_user, "distinct"),
        (drop_user, "same writers"),
        (fractional_label, "whole numbers"),
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


def test_a_writer_in_two_files_is_refused() -> None:
    with machine("femnist") as folder:
        (folder / "copy.json").write_bytes((folder / "all_data_0.json").read_bytes())
        with pytest.raises(DataError, match="several files"):
            load("femnist")


def test_a_truncated_file_is_named_with_what_to_do() -> None:
    with machine("cifar10") as folder:
        path = folder / "test_batch.bin"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(DataError, match=r"test_batch\.bin cannot be used: .* truncated.*Replace it"):
            load("cifar10")


def test_a_missing_file_of_a_set_is_named() -> None:
    with machine("cifar10") as folder:
        (folder / "data_batch_3.bin").unlink()
        with pytest.raises(DataError, match=r"data_batch_3\.bin missing"):
            load("cifar10")


def test_another_data_set_under_this_name_is_refused() -> None:
    with machine("mnist") as folder:
        write_small("fashion_mnist", folder.parent, seed=1)
        for path in folder.iterdir():
            path.write_bytes((folder.parent / "fashion_mnist" / path.name).read_bytes())
        with pytest.raises(DataError, match="not the canonical MNIST"):
            load("mnist")


def test_a_small_file_that_decompresses_without_end_is_refused() -> None:
    with machine("mnist") as folder:
        path = folder / "train-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(bytes(10_000_000)))
        with pytest.raises(DataError, match="more than 32 bytes"):
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
        images = np.array(original.images)
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
            np.testing.assert_array_equal(again.images, images)
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
        assert sorted(path.name for path in folder.parent.parent.glob("cache/decoded/*/*")) == [
            "images.npy",
            "labels.npy",
        ]
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


# Downloads


class Publisher:
    """A web server on this machine; `pages` maps a path to a status, a body and the length that it claims to have."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes, int]] = {}
        self.asked: list[str] = []
        publisher = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                publisher.asked.append(self.path)
                status, body, length = publisher.pages.get(self.path, (404, b"", 0))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body.decode())
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def publish(self, name: str, body: bytes) -> Download:
        self.pages[f"/{name}"] = (200, body, len(body))
        return Download((f"{self.address}/{name}",), len(body), md5(body))


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    thread = threading.Thread(target=partial(publisher.server.serve_forever, poll_interval=0.01))
    thread.start()
    yield publisher
    publisher.server.shutdown()
    publisher.server.server_close()
    thread.join()


def publish_mnist(publisher: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Specification:
    specification = write_small("mnist", folder)
    downloads = tuple(publisher.publish(path.name, path.read_bytes()) for path in sorted((folder / "mnist").iterdir()))
    specification = replace(specification, downloads=downloads)
    monkeypatch.setitem(CATALOG, "mnist", specification)
    return specification


def archive(folder: Path, extra: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("cifar-100-binary/test.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.add(folder, arcname=folder.name)
    return buffer.getvalue()


def test_a_missing_set_is_downloaded_once(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist(publisher, tmp_path, monkeypatch)
    assert len(load("mnist").labels) == TRAIN + TEST
    assert locate("mnist") == bare / "datasets" / "mnist"
    load("mnist")
    fetch("mnist")
    assert len(publisher.asked) == 4
    assert [path.name for path in (bare / "datasets").iterdir()] == ["mnist"]


def test_of_an_archive_only_the_sets_own_files_are_unpacked(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    specification = write_small("cifar100", tmp_path)
    body = archive(tmp_path / specification.folder, {"../../evil": b"x", "/evil": b"x", "cifar-100-binary/other": b"x"})
    download = publisher.publish("cifar-100-binary.tar.gz", body)
    monkeypatch.setitem(CATALOG, "cifar100", replace(specification, downloads=(download,)))
    assert len(load("cifar100").labels) == TRAIN + TEST
    files = sorted(path.relative_to(bare / "datasets") for path in (bare / "datasets").rglob("*") if path.is_file())
    assert [str(file) for file in files] == ["cifar-100-binary/test.bin", "cifar-100-binary/train.bin"]
    assert not (bare / "datasets" / "cifar-100-binary" / "test.bin").is_symlink()


def test_an_archive_without_the_files_is_refused(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    for name, body in (("empty.tar.gz", archive(tmp_path / "cifar-100-binary", {})), ("no.tar.gz", b"no archive")):
        changed = replace(CATALOG["cifar100"], downloads=(publisher.publish(name, body),))
        monkeypatch.setitem(CATALOG, "cifar100", changed)
        with pytest.raises(DataError, match=rf"cannot fetch CIFAR-100: {name} .*By hand"):
            fetch("cifar100")
    assert locate("cifar100") is None


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((200, b"short", 5), "5 bytes came instead of"),
        ((200, b"short", 100_000), "5 bytes came instead of"),
        ((200, b"x" * 100_000, 100_000), "more than"),
        ((404, b"", 0), "404"),
        ((503, b"", 0), "503"),
        ((302, b"file:///etc/passwd", 18), "302"),
        ((302, b"ftp://127.0.0.1/x", 17), "ftp"),
    ],
)
def test_a_download_that_fails_says_why_and_leaves_nothing(
    answer: tuple[int, bytes, int],
    problem: str,
    bare: Path,
    tmp_path: Path,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish_mnist(publisher, tmp_path, monkeypatch)
    publisher.pages["/train-labels-idx1-ubyte.gz"] = answer
    with pytest.raises(DataError, match=rf"cannot fetch MNIST: .*{problem}.*By hand: get .* into {bare}"):
        load("mnist")
    assert locate("mnist") is None
    assert list((bare / "datasets").iterdir()) == []


def test_a_download_with_another_checksum_is_refused(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist(publisher, tmp_path, monkeypatch)
    status, body, length = publisher.pages["/t10k-images-idx3-ubyte.gz"]
    publisher.pages["/t10k-images-idx3-ubyte.gz"] = (status, flip(body, 30, b"\1"), length)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: its md5 is"):
        load("mnist")
    assert locate("mnist") is None


def test_nobody_answering_is_said(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        free_port = server.server_address[1]
    nobody = Download((f"http://127.0.0.1:{free_port}/a.gz",), 1, "")
    monkeypatch.setitem(CATALOG, "mnist", replace(CATALOG["mnist"], downloads=(nobody,)))
    with pytest.raises(DataError, match="refused"):
        load("mnist")


def test_the_next_mirror_is_tried(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    specification = publish_mnist(publisher, tmp_path, monkeypatch)
    gone = [item.urls[0].replace(publisher.address, f"{publisher.address}/gone") for item in specification.downloads]
    downloads = tuple(
        replace(item, urls=(url, *item.urls)) for url, item in zip(gone, specification.downloads, strict=True)
    )
    monkeypatch.setitem(CATALOG, "mnist", replace(specification, downloads=downloads))
    assert len(load("mnist").labels) == TRAIN + TEST


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x.gz", "no address"])
def test_only_http_is_spoken(url: str, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(CATALOG["mnist"], downloads=(Download((url,), 1, ""),))
    monkeypatch.setitem(CATALOG, "mnist", changed)
    with pytest.raises(DataError, match="cannot fetch MNIST"):
        load("mnist")
