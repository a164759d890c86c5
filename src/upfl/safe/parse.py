"""Parsers for what others wrote. Whatever is wrong with it, they raise ValueError; who calls knows the file's name."""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from typing import Any, Literal, NamedTuple

import numpy as np

DEPTH = 24  # levels of nested lists and objects
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_MAGIC = b"\x93NUMPY"
_HEADER = 4096  # bytes of a NumPy header
_FIELDS = {"descr", "fortran_order", "shape"}


def read_json(content: bytes, depth: int = DEPTH) -> Any:
    """A JSON document. Its nesting is measured before it is parsed; no name may occur twice in an object."""
    check_depth(content, depth)
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(content: bytes, depth: int = DEPTH) -> dict[str, Any]:
    check_depth(content, depth)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:  # dotted names nest, too
        raise ValueError("it is nested too deeply") from None


def check_depth(content: bytes, most: int = DEPTH) -> None:
    """Measure how deeply lists and objects are nested before anything is made of them."""
    depth = 0
    for token in _TOKENS.finditer(content):
        kind = token[0][:1]
        depth += kind in b"[{"
        depth -= kind in b"]}"
        if depth > most:
            raise ValueError(f"it is nested deeper than {most} levels")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


class ArrayHeader(NamedTuple):
    """What stands before the values of an array in NumPy's format."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int  # of the values

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(content: bytes) -> ArrayHeader:
    """The header at the beginning of `content`; NumPy's own reader fails in many ways, and takes memory on trust."""
    if content[:6] != _MAGIC or len(content) < 10:
        raise ValueError("not a NumPy file")
    width = {1: 2, 2: 4, 3: 4}.get(content[6])
    if width is None or content[7]:
        raise ValueError(f"a NumPy file of the unknown version {content[6]}.{content[7]}")
    length, start = int.from_bytes(content[8 : 8 + width], "little"), 8 + width
    text = content[start : start + length]
    if length > _HEADER or len(text) < length:
        raise ValueError("its header is cut off, or longer than that of an array of numbers")
    try:
        fields = ast.literal_eval(text.decode("ascii").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("its header is damaged") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError("its header does not have the three fields of an array")
    descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if not isinstance(descr, str) or not re.fullmatch(r"[<>|=]?[?A-Za-z]\d{0,4}(\[\w{1,4}\])?", descr):
        raise ValueError("its values are of no type for numbers")
    if "O" in descr or "V" in descr:
        raise ValueError("it holds pickled objects, which are never read")
    if type(fortran) is not bool or type(shape) is not tuple or len(shape) > 32:
        raise ValueError("its header is damaged")
    if not all(type(side) is int and 0 <= side < 2**48 for side in shape):
        raise ValueError("its header has a shape that no array has")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError):
        raise ValueError(f"its values are of the unknown type {descr}") from None
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are never read")
    return ArrayHeader(dtype, shape, fortran, start + length)


HEADER = 10 + _HEADER  # bytes that are enough for any header that is read


def read_array(content: bytes | bytearray | memoryview, header: ArrayHeader | None = None) -> np.ndarray[Any, Any]:
    """The array that `content` is, which must hold exactly the values that its header announces."""
    header = header or read_array_header(bytes(content[:HEADER]))
    if len(content) - header.start != header.size:
        raise ValueError(f"its header announces {header.size} bytes, and {len(content) - header.start} follow")
    order: Literal["C", "F"] = "F" if header.fortran else "C"
    return np.ndarray(header.shape, header.dtype, buffer=content, offset=header.start, order=order)
