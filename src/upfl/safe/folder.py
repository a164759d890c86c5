"""Files of a folder that others may have filled: a run folder, a bundle.

Only regular files are opened, only below the folder, and no link is followed, at any level: each part of a name is
opened in the one above it (`openat`). So a folder from elsewhere can point neither at a device nor at other files, to
read, to overwrite or to remove. What is removed is the link, never what it points at. A file that has another name (a
hard link) is not changed in place.

A file is written under another name, flushed and renamed: it is there as a whole or not at all, with the permissions
that the user's umask gives. Every change is announced as Python's audit event `upfl.folder` (operation, path) before it
is made; tests stop a process, or refuse to write, at any of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from upfl.errors import RunError, UpflError, WriteError
from upfl.safe.limits import exceeded, limit
from upfl.safe.parse import read_json

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO or a device must not keep us waiting
PART = ".part"  # the end of the name of a file that is being written


class Folder:
    def __init__(
        self, path: Path, error: type[UpflError] = RunError, write_error: type[UpflError] = WriteError, advice: str = ""
    ) -> None:
        self.path, self.error, self.write_error, self.advice = path, error, write_error, advice

    # Reading

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """A file to read."""
        with self._reading(name), self._above(name) as (parent, last):
            descriptor = os.open(last, os.O_RDONLY | _FILE, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self.error(f"{self.path / name}: not a regular file")
        with os.fdopen(descriptor, "rb") as file, self._reading(name):
            yield file

    def read(self, name: str, kind: str = "TEXT") -> bytes:
        """The content of a file, if it is not larger than a limit allows."""
        with self.opened(name) as file:
            if (size := os.fstat(file.fileno()).st_size) > limit(kind):
                raise self.error(f"{self.path / name}: too large: {exceeded(kind, size)}")
            return file.read(size)

    def size(self, name: str) -> int:
        with self.opened(name) as file:
            return os.fstat(file.fileno()).st_size

    def json(self, name: str) -> Any:
        try:
            return read_json(self.read(name))
        except ValueError as error:
            raise self.error(f"{self.path / name}: damaged ({error})") from None

    def exists(self, name: str) -> bool:
        """Whether there is something of this name, if only a link."""
        return self._status(name) is not None

    def is_file(self, name: str) -> bool:
        found = self._status(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def _status(self, name: str) -> os.stat_result | None:
        try:
            with self._above(name) as (parent, last):
                return os.stat(last, dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(name, error) from error

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder below this one, or in this one; none if it is not there."""
        try:
            with self._above(f"{folder}/x" if folder else "x") as (parent, _):
                return sorted(os.listdir(parent))  # noqa: PTH208 - of an open folder
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(folder, error) from error

    # Changing

    @contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A new file that takes the name's place when it is complete; folders on the way to it are made."""
        with self._changing(name), self._above(name, make=True) as (parent, last):
            part = last + PART
            self._remove_at(parent, part)
            self._announce("create", name)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=parent)
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    self._announce("write", name)
                    yield file
                    file.flush()
                    self._announce("flush", name)
                    os.fsync(descriptor)
                self._announce("rename", name)
                os.rename(part, last, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                self._remove_at(parent, part)  # a full disk needs the room
                raise
            os.fsync(parent)

    def write(self, name: str, content: bytes) -> None:
        with self.replacing(name) as file:
            file.write(content)

    def append(self, name: str, content: bytes) -> int:
        """Add to a file, which need not be there; returns its length."""
        with self._in_place(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            self._announce("write", name)
            with os.fdopen(os.dup(descriptor), "ab") as file:
                file.write(content)
            return os.fstat(descriptor).st_size

    def truncate(self, name: str, length: int) -> None:
        with self._in_place(name, os.O_WRONLY) as descriptor:
            if os.fstat(descriptor).st_size != length:
                self._announce("truncate", name)
                os.ftruncate(descriptor, length)

    def flush(self, name: str) -> None:
        """Make sure that what was added to a file survives a power cut."""
        with self._in_place(name, os.O_WRONLY) as descriptor:
            self._announce("flush", name)
            os.fsync(descriptor)

    def keep(self, name: str, other: str) -> bool:
        """Give a file a second name in the same folder, which outlasts its replacement; False where that cannot be."""
        with self._changing(other), self._above(other) as (parent, last):
            first, part = name.rpartition("/")[2], last + PART
            self._remove_at(parent, part)
            self._announce("link", other)
            try:
                os.link(first, part, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.ENOENT):
                    return False
                raise
            self._announce("rename", other)
            os.rename(part, last, src_dir_fd=parent, dst_dir_fd=parent)
            return True

    def rename(self, name: str, to: str) -> None:
        """Within one folder."""
        with self._changing(to), self._above(to) as (parent, last):
            self._announce("rename", to)
            os.rename(name.rpartition("/")[2], last, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)

    def remove(self, name: str) -> None:
        """Remove a file, a link (not what it points at), or a folder with all that is in it, if it is there."""
        try:
            with self._changing(name), self._above(name) as (parent, last):
                self._announce("remove", name)
                self._remove_at(parent, last)
        except self.write_error as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _remove_at(self, parent: int, name: str) -> None:
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=parent)  # does not follow links either
            else:
                os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass

    @contextmanager
    def _in_place(self, name: str, flags: int) -> Iterator[int]:
        with self._changing(name), self._above(name) as (parent, last):
            descriptor = os.open(last, flags | _FILE, 0o666, dir_fd=parent)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                    raise self.error(f"{self.path / name}: not a regular file, or one with a second name: not changed")
                yield descriptor
            finally:
                os.close(descriptor)

    # Names and errors

    @contextmanager
    def _above(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder that a name is in, open, and the last part of the name."""
        *folders, last = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in (*folders, last)):
            raise self.error(f"{self.path}: {name!r} is not the name of a file in it")
        descriptor = os.open(self.path, _FOLDER)
        try:
            for folder in folders:
                if make:
                    self._make_at(descriptor, folder, name)
                below = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor, last
        finally:
            os.close(descriptor)

    def _make_at(self, parent: int, folder: str, name: str) -> None:
        try:
            os.stat(folder, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            self._announce("mkdir", name)
            with suppress(FileExistsError):  # another worker was first
                os.mkdir(folder, dir_fd=parent)

    def _announce(self, operation: str, name: str) -> None:
        sys.audit("upfl.folder", operation, str(self.path / name))

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: OSError) -> UpflError:
        return self.error(f"{self.path / name}: cannot be read: {reason(error)}")

    @contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = f". {self.advice}" if self.advice else ""
            raise self.write_error(f"{self.path / name}: cannot be written: {reason(error)}{advice}") from error


def reason(error: OSError) -> str:
    """What the system says, and of a link that it is one."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "it is a link, or below one, and links are not followed"
    return error.strerror or str(error)


def write_file(path: Path, content: bytes) -> None:
    """Write one file so that it is there as a whole or not at all, whatever happens."""
    Folder(path.parent).write(path.name, content)


def expanded(path: str | Path) -> Path:
    """A path with `~` and `~user` as the shell would have them."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RunError(f"{path}: {error}") from error
