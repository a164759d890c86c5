"""Downloads, from a server on this machine."""

import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sources import flip
from tests.small_data import TEST, TRAIN, md5, write_small
from upfl.data import load
from upfl.data.catalog import CATALOG, Download, Specification
from upfl.data.sources import fetch, locate
from upfl.errors import DataError


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


@pytest.fixture
def mnist(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Specification:
    """As it is published there."""
    specification, files = write_small("mnist", tmp_path), sorted((tmp_path / "mnist").iterdir())
    downloads = tuple(publisher.publish(path.name, path.read_bytes()) for path in files)
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


def test_a_missing_set_is_downloaded_once(bare: Path, publisher: Publisher, mnist: Specification) -> None:
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


def test_an_archive_that_would_unpack_to_more_than_the_limit_is_refused(
    bare: Path, tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    specification = write_small("cifar100", tmp_path)
    body = archive(tmp_path / specification.folder, {"padding": bytes(10_000_000)})
    assert len(body) < 1_000_000
    changed = replace(specification, downloads=(publisher.publish("cifar-100-binary.tar.gz", body),))
    monkeypatch.setitem(CATALOG, "cifar100", changed)
    monkeypatch.setenv("UPFL_LIMIT_UNPACKED", "5MB")
    with pytest.raises(DataError, match=r"is not unpacked: 9.5.* MiB are more than 5 MiB"):
        fetch("cifar100")
    assert locate("cifar100") is None


@pytest.mark.usefixtures("mnist")
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
    answer: tuple[int, bytes, int], problem: str, bare: Path, publisher: Publisher
) -> None:
    publisher.pages["/train-labels-idx1-ubyte.gz"] = answer
    with pytest.raises(DataError, match=rf"cannot fetch MNIST: .*{problem}.*By hand: get .* into {bare}"):
        load("mnist")
    assert locate("mnist") is None
    assert list((bare / "datasets").iterdir()) == []


@pytest.mark.usefixtures("bare", "mnist")
def test_a_download_with_another_checksum_is_refused(publisher: Publisher) -> None:
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


@pytest.mark.usefixtures("bare")
def test_the_next_mirror_is_tried(publisher: Publisher, mnist: Specification, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"{publisher.address}/gone"
    urls = [(item.urls[0].replace(publisher.address, gone), *item.urls) for item in mnist.downloads]
    downloads = tuple(replace(item, urls=both) for item, both in zip(mnist.downloads, urls, strict=True))
    monkeypatch.setitem(CATALOG, "mnist", replace(mnist, downloads=downloads))
    assert len(load("mnist").labels) == TRAIN + TEST


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x.gz", "no address"])
def test_only_http_is_spoken(url: str, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(CATALOG["mnist"], downloads=(Download((url,), 1, ""),))
    monkeypatch.setitem(CATALOG, "mnist", changed)
    with pytest.raises(DataError, match="cannot fetch MNIST"):
        load("mnist")
