"""A folder's files in one .zip: packed to the same bytes every time, unpacked with nothing taken on trust.

Names, kinds and sizes of all parts are checked before any is unpacked, and hold while it is: regular files below the
folder, each once, together no larger than the limit UNPACKED. A folder around all of them, as file managers make it, is
left away.
"""

from __future__ import annotations

import stat
import tempfile
import zipfile
import zlib
from pathlib import Path

from upfl.errors import UpflError
from upfl.safe.folder import Folder
from upfl.safe.limits import exceeded, limit

PARTS = 10_000
DEEP = 4  # folders in folders
_CHUNK = 2**20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Unpacked(Folder):
    """The files of a .zip, in a temporary folder that lasts as long as this object."""

    def __init__(self, archive: Path, error: type[UpflError]) -> None:
        self._lasts = tempfile.TemporaryDirectory(prefix="upfl-", ignore_cleanup_errors=True)
        super().__init__(Path(self._lasts.name), error, error)
        try:
            with zipfile.ZipFile(archive) as file:
                for name, part in _checked(file.infolist()).items():
                    self._unpack(file, name, part)
        except OSError as problem:
            raise error(f"{archive}: cannot be read: {problem.strerror or problem}") from problem
        except (ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as problem:
            raise error(f"{archive}: cannot be used: {problem}") from problem

    def _unpack(self, file: zipfile.ZipFile, name: str, part: zipfile.ZipInfo) -> None:
        left = part.file_size
        with file.open(part) as stream, self.replacing(name) as target:
            while chunk := stream.read(min(_CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    raise ValueError(f"{name[:80]!r} is larger than it says")
                target.write(chunk)
        if left:
            raise ValueError(f"{name[:80]!r} is shorter than it says")


def pack(folder: Path, archive: Path) -> None:
    """Put a folder's files into a .zip: neither times nor the order of the file system show in it."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                part = zipfile.ZipInfo(path.relative_to(folder).as_posix())
                part.external_attr = 0o644 << 16
                file.writestr(part, path.read_bytes())


def _checked(parts: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """The parts by the names that they get."""
    if len(parts) > PARTS:
        raise ValueError(f"it has {len(parts)} parts; more than {PARTS} are not unpacked")
    files = {part.filename: part for part in parts if not part.is_dir()}
    if len(files) < sum(not part.is_dir() for part in parts):
        raise ValueError("a name comes twice in it")
    for name, part in files.items():
        kind = stat.S_IFMT(part.external_attr >> 16)
        plain = kind in (0, stat.S_IFREG) and part.compress_type in _METHODS and not part.flag_bits & 1
        ways = name.split("/")
        if not plain or "\\" in name or len(ways) > DEEP or any(way in ("", ".", "..") for way in ways):
            raise ValueError(f"{name[:80]!r} is no plain file below the bundle, and nothing of it is unpacked")
    if (size := sum(part.file_size for part in files.values())) > limit("UNPACKED"):
        raise ValueError(f"unpacked: {exceeded('UNPACKED', size)}")
    around = {name.partition("/")[0] for name in files}
    if len(around) == 1 and all("/" in name for name in files):
        return {name.partition("/")[2]: part for name, part in files.items()}
    return files
