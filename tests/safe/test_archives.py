"""A bundle as a .zip: the same bundle, and what others put into an archive leads nowhere."""

import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.bundles import small_convnet
from upfl.bundle import Bundle, load
from upfl.errors import BundleError
from upfl.safe.archive import PARTS, pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle")
    small_convnet(path)
    return path / "animals"


@pytest.mark.parametrize("around", ["", "bundle/"])
def test_a_zip_is_the_same_bundle_as_its_folder(made: Path, tmp_path: Path, around: str) -> None:
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in made.iterdir():
            file.write(path, around + path.name)
    unpacked, folder = Bundle.load(archive), Bundle.load(made)
    assert unpacked.manifest == folder.manifest
    assert all(bool((value == folder.published.state[key]).all()) for key, value in unpacked.published.state.items())


def test_packing_twice_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    pack(made, tmp_path / "one.zip")
    pack(made, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert Bundle.load(tmp_path / "one.zip").manifest == Bundle.load(made).manifest


def _name(name: str, mode: int = 0) -> Callable[[zipfile.ZipFile], None]:
    def add(file: zipfile.ZipFile) -> None:
        part = zipfile.ZipInfo(name)
        part.external_attr = mode << 16
        file.writestr(part, b"x")

    return add


def _many(file: zipfile.ZipFile) -> None:
    for number in range(PARTS + 1):
        file.writestr(f"part-{number}", b"")


def _large(file: zipfile.ZipFile) -> None:
    with file.open(zipfile.ZipInfo("large"), "w") as part:
        for _ in range(600):
            part.write(bytes(2**20))


@pytest.mark.parametrize(
    ("add", "word"),
    [
        (_name("../outside"), "no plain file"),
        (_name("/absolute"), "no plain file"),
        (_name("a/../../outside"), "no plain file"),
        (_name("a\\..\\outside"), "no plain file"),
        (_name("a/b/c/d/e"), "no plain file"),
        (_name("link", stat.S_IFLNK | 0o777), "no plain file"),
        (_name("device", stat.S_IFCHR | 0o777), "no plain file"),
        (_many, "parts"),
        (_large, "UPFL_LIMIT_UNPACKED"),
    ],
    ids=["up", "absolute", "up below", "backslash", "deep", "link", "device", "many", "large"],
)
def test_an_archive_that_leads_elsewhere_or_is_too_large_is_refused(
    tmp_path: Path, add: Callable[[zipfile.ZipFile], None], word: str
) -> None:
    archive = tmp_path / "here" / "bundle.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        add(file)
    with pytest.raises(BundleError, match=word) as refused:
        load(archive)
    assert str(archive) in str(refused.value)
    assert list(tmp_path.iterdir()) == [archive.parent]


def test_damage_is_named_by_the_archive(made: Path, tmp_path: Path) -> None:
    archive = tmp_path / "bundle.zip"
    pack(made, archive)
    content = bytearray(archive.read_bytes())
    place = content.index(b'"schema_version"')
    content[place + 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle\.zip"):
        load(archive)
    archive.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(BundleError, match=r"bundle\.zip: cannot be used"):
        load(archive)


def test_a_member_that_yields_more_than_it_says_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", bytes(5000))
    content = bytearray(archive.read_bytes())
    size = (5000).to_bytes(4, "little")
    while (place := content.find(size)) >= 0:
        content[place : place + 4] = (10).to_bytes(4, "little")
    archive.write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle\.zip: cannot be used"):
        load(archive)
