"""The canonical file formats: each decoder turns the content of one file into the columns that it holds.

A decoder raises ValueError with what is wrong; who calls it knows the file's name and what to do about it.
"""

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.safe.parse import check_depth

Shape = tuple[int, int, int]  # channels, height, width
Columns = dict[str, NDArray[Any]]  # "images" [n, *shape], "labels" [n], "groups" [n]; a file may hold only some of them


IDX_HEADER = 16  # bytes, at most


def idx_size(content: bytes) -> int:
    """How long a file with this beginning is, by its header."""
    sizes = _idx_sizes(content)
    return 4 * (1 + len(sizes)) + math.prod(sizes)


def _idx_sizes(content: bytes) -> tuple[int, ...]:
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    if dimensions not in (1, 3) or len(content) < 4 * (1 + dimensions):
        raise ValueError("it has no idx header for bytes in one dimension (labels) or three (images)")
    return tuple(int(size) for size in np.frombuffer(content, ">u4", offset=4, count=dimensions))


def idx(content: bytes, shape: Shape) -> Columns:
    """MNIST's format: a big-endian header (two zeros, type 8, the number of dimensions, the dimensions), then bytes."""
    sizes = _idx_sizes(content)
    dimensions, header = len(sizes), 4 * (1 + len(sizes))
    if math.prod(sizes) != len(content) - header:
        raise ValueError(f"its header announces {sizes} bytes, but {len(content) - header} follow")
    values = np.frombuffer(content, np.uint8, offset=header)
    if dimensions == 1:
        return {"labels": values}
    if sizes[1:] != shape[1:]:
        raise ValueError(f"its images are {sizes[1]} x {sizes[2]} pixels, not {shape[1]} x {shape[2]}")
    return {"images": values.reshape(-1, *shape)}


def cifar10(content: bytes, shape: Shape) -> Columns:
    """Rows of one label byte and the pixels."""
    rows = _rows(content, 1 + math.prod(shape))
    return {"labels": rows[:, 0], "images": rows[:, 1:].reshape(-1, *shape)}


def cifar100(content: bytes, shape: Shape) -> Columns:
    """Rows of the superclass's byte, the class's byte and the pixels."""
    rows = _rows(content, 2 + math.prod(shape))
    return {"groups": rows[:, 0], "labels": rows[:, 1], "images": rows[:, 2:].reshape(-1, *shape)}


def leaf(content: bytes, shape: Shape) -> Columns:
    """LEAF's JSON: `users`, `num_samples`, `user_data[user]` with `x` (values in [0, 1]) and `y`. Groups are users."""
    try:
        check_depth(content)
        document = json.loads(content, parse_constant=_no_constant)
    except ValueError as error:  # of the JSON and of its encoding alike
        raise ValueError(f"it is not valid JSON ({error})") from error
    match document:
        case {"users": list(users), "num_samples": list(counts), "user_data": dict(data)} if users:
            pass
        case _:
            raise ValueError("it is not LEAF's JSON with `users`, `num_samples` and `user_data`")
    if not all(isinstance(user, str) for user in users) or len(set(users)) != len(users):
        raise ValueError("`users` are not distinct names")
    if len(counts) != len(users) or data.keys() != set(users):
        raise ValueError("`users`, `num_samples` and `user_data` do not name the same writers")
    writers = [_writer(user, data[user], count, math.prod(shape)) for user, count in zip(users, counts, strict=True)]
    return {
        "images": np.concatenate([images for images, _ in writers]).reshape(-1, *shape),
        "labels": np.concatenate([labels for _, labels in writers]),
        "groups": np.repeat(np.array(users), [len(labels) for _, labels in writers]),
    }


def _rows(content: bytes, width: int) -> NDArray[np.uint8]:
    if not content or len(content) % width:
        raise ValueError(f"its {len(content)} bytes are not whole rows of {width}")
    return np.frombuffer(content, np.uint8).reshape(-1, width)


def _writer(user: str, data: object, count: object, width: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    match data:
        case {"x": list(pixels), "y": list(labels)} if len(pixels) == len(labels) == count:
            pass
        case _:
            raise ValueError(f"writer {user!r} does not have `num_samples` = {count!r} images in `x` and labels in `y`")
    try:
        intensities = np.array(pixels)
    except ValueError:  # lists of different lengths
        intensities = np.empty(0)
    if intensities.shape != (count, width) or intensities.dtype.kind not in "fi":
        raise ValueError(f"writer {user!r} has images that are not {width} numbers each")
    if not (intensities.min() >= 0 and intensities.max() <= 1):
        raise ValueError(f"writer {user!r} has pixels outside [0, 1]")
    if not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        raise ValueError(f"writer {user!r} has labels that are not whole numbers from 0")
    # LEAF divided 8-bit grey values by 255: this gives them back exactly.
    return np.rint(intensities * 255).astype(np.uint8), np.array(labels, np.int64)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")
