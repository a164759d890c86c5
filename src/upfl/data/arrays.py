"""NumPy's files, read without NumPy's reader: no pickled object, and nothing allocated that a header only announces."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upfl.errors import DataError
from upfl.safe.limits import exceeded, limit
from upfl.safe.parse import HEADER, read_array, read_array_header

MEMBERS = 1000  # arrays of an .npz


def arrays_in(path: Path) -> dict[str, Callable[[], NDArray[Any]]]:
    """The arrays of an .npy (as `x`) or an .npz file, each read when it is asked for."""
    if path.suffix == ".npy":
        return {"x": lambda: _mapped(path)}
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MEMBERS:
            raise ValueError(f"it has {len(members)} parts; more than {MEMBERS} are not read")
        names = [member.filename.removesuffix(".npy") for member in members]
    return {name: partial(_unpacked, path, member.filename) for name, member in zip(names, members, strict=True)}


def _mapped(path: Path) -> NDArray[Any]:
    """An array in a file of its own, mapped into memory."""
    with _reading(path), path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit("FILE"):
            raise ValueError(exceeded("FILE", size))
        header = read_array_header(file.read(HEADER))
        if size - header.start != header.size:
            raise ValueError(f"its header announces {header.size} bytes, and {size - header.start} follow")
        if not header.size:
            return np.empty(header.shape, header.dtype)
        order: Literal["C", "F"] = "F" if header.fortran else "C"
        return np.memmap(file, header.dtype, "r", header.start, header.shape, order)


def _unpacked(path: Path, name: str) -> NDArray[Any]:
    """An array of an .npz file. What it will take is known before it is unpacked, and holds while it is."""
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(name) as stream:
        declared = archive.getinfo(name).file_size
        if declared > limit("UNPACKED"):
            raise ValueError(f"{name} unpacked: {exceeded('UNPACKED', declared)}")
        start = stream.read(HEADER)
        header = read_array_header(start)
        if declared - header.start != header.size:
            raise ValueError(f"the header of {name} announces {header.size} bytes, and others follow")
        content = start + stream.read(declared - len(start) + 1)
        return read_array(content, header)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a file of arrays is read is told by the file's name."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be used: {error}") from error
