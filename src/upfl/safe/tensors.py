"""Named tensors in a file: the safetensors format, read and written strictly, in order, with a digest.

    8 bytes      the length of the header
    header       JSON: for each tensor its type, shape and place, and `__metadata__`: texts by name
    values       one tensor after another, without gaps

The header is checked as a whole before memory is taken for a value: names, types, shapes, that places are without gaps
and end where the file ends, and what the reader expects. `order` is the order that the state had (the file sorts by
the size of types, for alignment), on which the order of floating-point sums may depend. `digest`, the first text of a
sealed file, is the SHA-256 of the file with zeros in the digest's place: a flipped bit is found when the file is read.
Values are read straight into tensors of PyTorch's own, so they lie in memory as computed ones do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from upfl.safe.folder import Folder
from upfl.safe.limits import exceeded, limit
from upfl.safe.parse import read_json
from upfl.state import State, aligned

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in TYPES.items()}
_HEADER = 2**24  # bytes
_NAME = 512  # characters
_SEALED = b'{"__metadata__":{"digest":"'
_ZEROS = b"0" * 64


@dataclass(frozen=True)
class Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds, before any of it is read."""

    tensors: Mapping[str, Place]  # in the state's order
    metadata: Mapping[str, str]
    content: bytes  # with its length before it

    @property
    def digest(self) -> str | None:
        """The digest that the file says it has, where it is sealed."""
        sealed = self.content[8:].startswith(_SEALED)
        return self.metadata.get("digest", "") if sealed else None


def save(folder: Folder, name: str, state: State, metadata: Mapping[str, str], sealed: bool = True) -> str:
    """Write a state; returns its digest, or nothing of a file that is not sealed."""
    values = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    texts = ({"digest": _ZEROS.decode()} if sealed else {}) | dict(metadata) | {"order": json.dumps(list(state))}
    header: dict[str, Any] = {"__metadata__": texts}
    end = 0
    ordered = sorted(values, key=lambda key: (-values[key].element_size(), key))
    for key in ordered:
        value = values[key]
        start, end = end, end + value.numel() * value.element_size()
        header[key] = {"dtype": _CODES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    with folder.replacing(name) as file:
        file.write(head)
        for key in ordered:
            content = _bytes(values[key])
            file.write(content)
            if sealed:
                digest.update(content)
        if not sealed:
            return ""
        file.seek(8 + len(_SEALED))
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def read_header(folder: Folder, name: str) -> Header:
    with folder.opened(name) as file:
        return _header(folder, name, file)


def load(
    folder: Folder,
    name: str,
    check: Callable[[Header], None] | None = None,
    digest: str | None = None,
    bounded: bool = True,
) -> tuple[State, Header]:
    """The tensors of a file in their order, and its header; `check` raises for a header that does not fit.

    A sealed file must have its digest, and where one is given, that. `bounded` files may not exceed the limit FILE.
    """
    with folder.opened(name) as file:
        header = _header(folder, name, file)
        if check is not None:
            check(header)
        size = sum(place.end - place.start for place in header.tensors.values())
        if bounded and size > limit("FILE"):
            raise folder.error(f"{folder.path / name}: too large: {exceeded('FILE', size)}")
        found = hashlib.sha256(_unsealed(header.content))
        tensors: State = {}
        for key, place in sorted(header.tensors.items(), key=lambda item: item[1].start):
            tensors[key] = torch.empty(place.shape, dtype=place.dtype)
            content = _bytes(tensors[key])
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise folder.error(f"{folder.path / name}: damaged (it was cut off while it was read)")
            if header.digest is not None:
                found.update(content)
            if place.dtype == torch.bool and bool((tensors[key].view(torch.uint8) > 1).any()):
                raise folder.error(
                    f"{folder.path / name}: damaged (tensor {key} has values that are not true or false)"
                )
    if header.digest is not None and found.hexdigest() != header.digest:
        raise folder.error(f"{folder.path / name}: damaged (its content does not have its digest)")
    if digest is not None and header.digest != digest:
        raise folder.error(f"{folder.path / name}: is not the file that the checkpoint names (its digest differs)")
    return {key: aligned(tensors[key]) for key in header.tensors}, header


def reseal(content: bytes) -> bytes:
    """A sealed file's content with the digest that it has; one that is not sealed stays as it is."""
    start = 8 + len(_SEALED)
    if content[8:start] != _SEALED:
        return content
    found = hashlib.sha256(_unsealed(content)).hexdigest()
    return content[:start] + found.encode() + content[start + len(_ZEROS) :]


def read_file(path: Path) -> State:
    """The tensors of a file on its own."""
    return load(Folder(path.parent), path.name)[0]


def _header(folder: Folder, name: str, file: BinaryIO) -> Header:
    try:
        return _parsed(file)
    except ValueError as error:
        raise folder.error(f"{folder.path / name}: damaged ({error})") from None


def _parsed(file: BinaryIO) -> Header:
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(size - 8, _HEADER):
        raise ValueError("it has no header")
    content = head + file.read(length)
    document = read_json(content[8:])
    if not isinstance(document, dict):
        raise ValueError("its header is no object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts")
    places = {key: _place(key, value) for key, value in document.items()}
    end = 0
    for place in sorted(places.values(), key=lambda place: (place.start, place.end)):
        if place.start != end:
            raise ValueError("its tensors overlap, or leave gaps")
        end = place.end
    if end != size - 8 - length:
        raise ValueError(f"its header announces {end} bytes, and {size - 8 - length} follow")
    order = read_json(metadata["order"].encode("utf-8", "surrogatepass")) if "order" in metadata else list(places)
    named = isinstance(order, list) and all(isinstance(key, str) for key in order)
    if not named or len(order) != len(places) or set(order) != places.keys():
        raise ValueError("the order of its tensors is missing or wrong")
    return Header({key: places[key] for key in order}, metadata, content)


def _place(name: str, value: Any) -> Place:
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(end)]} if len(value) == 3:
            pass
        case _:
            raise ValueError(f"tensor {name[:80]!r} is not described")
    if len(name) > _NAME or code not in TYPES or len(shape) > 16:
        raise ValueError(f"tensor {name[:80]!r} has a name, type or shape that is not read")
    if not all(type(side) is int and 0 <= side < 2**48 for side in shape):
        raise ValueError(f"tensor {name!r} has a shape that no tensor has")
    if not 0 <= start <= end or end - start != math.prod(shape) * TYPES[code].itemsize:
        raise ValueError(f"tensor {name!r} does not have the bytes that its shape needs")
    return Place(TYPES[code], tuple(shape), start, end)


def _unsealed(content: bytes) -> bytes:
    """A header as it was before its digest was known."""
    start = 8 + len(_SEALED)
    return content[:start] + _ZEROS + content[start + len(_ZEROS) :]


def _bytes(value: Tensor) -> memoryview:
    """A tensor's own memory."""
    return memoryview(value.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
