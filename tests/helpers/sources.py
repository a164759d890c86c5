"""Machines with a small data set and nothing else."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.small_data import write_small
from upfl.data import Source
from upfl.data.catalog import CATALOG

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


def assert_same(first: Source, second: Source) -> None:
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(first.groups, second.groups)


def flip(content: bytes, position: int, value: bytes) -> bytes:
    changed = bytes(a ^ b for a, b in zip(content[position:], value, strict=False))
    return content[:position] + changed + content[position + len(changed) :]


def truncate(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position]


def insert(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position] + value + content[position:]


def extend(content: bytes, position: int, value: bytes) -> bytes:
    return content + value
