"""Small data sets in the canonical file formats, for tests."""

import gzip
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upfl.data.catalog import CATALOG, File, Specification

TRAIN, TEST = 24, 12  # samples; cifar10 has its training samples in files of their own size


def write_small(name: str, root: Path, *, compressed: bool = True, seed: int = 0) -> Specification:
    """Write a small `name` below `root` as its publisher would; its specification has the canonical one's place."""
    specification = CATALOG[name]
    rng = np.random.default_rng(seed)
    contents = {
        "mnist": _idx_files,
        "fashion_mnist": _idx_files,
        "cifar10": _cifar10_files,
        "cifar100": _cifar100_files,
        "femnist": _leaf_files,
    }[name](rng)
    folder = root / specification.folder
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        if compressed and name in ("mnist", "fashion_mnist"):
            (folder / f"{file}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / file).write_bytes(content)
    if name == "femnist":
        return specification
    files = tuple(File(file, len(content), md5(content)) for file, content in contents.items())
    return replace(specification, files=files, train_count=TRAIN, downloads=())


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _pixels(rng: np.random.Generator, count: int, width: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (count, width), np.uint8)


def _labels(rng: np.random.Generator, count: int, classes: int) -> NDArray[np.uint8]:
    return rng.integers(0, classes, count, np.uint8)


def _idx_files(rng: np.random.Generator) -> dict[str, bytes]:
    files = {}
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        images, labels = _pixels(rng, count, 784), _labels(rng, count, 10)
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.tobytes()
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes()
    return files


def _cifar10_files(rng: np.random.Generator) -> dict[str, bytes]:
    counts = {
        **{f"data_batch_{batch}.bin": size for batch, size in enumerate((4, 5, 6, 5, 4), 1)},
        "test_batch.bin": TEST,
    }
    return {
        file: np.column_stack([_labels(rng, count, 10), _pixels(rng, count, 3072)]).tobytes()
        for file, count in counts.items()
    }


def _cifar100_files(rng: np.random.Generator) -> dict[str, bytes]:
    return {
        file: np.column_stack([_labels(rng, n, 20), _labels(rng, n, 100), _pixels(rng, n, 3072)]).tobytes()
        for file, n in (("train.bin", TRAIN), ("test.bin", TEST))
    }


def _leaf_files(rng: np.random.Generator) -> dict[str, bytes]:
    files = {}
    for part, writers in enumerate((["f0002_b", "f0001_a"], ["f0000_c"])):
        counts = [int(count) for count in rng.integers(1, 4, len(writers))]
        data = {
            writer: {"x": (_pixels(rng, count, 784) / 255).tolist(), "y": _labels(rng, count, 62).tolist()}
            for writer, count in zip(writers, counts, strict=True)
        }
        document = {"users": writers, "num_samples": counts, "user_data": data}
        files[f"all_data_{part}.json"] = json.dumps(document).encode()
    return files
