"""Cells of a table to samples: numbers, texts, tokens and images of a part of it; rows that do not fit are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.forms import Tokens, Vectors
from upfl.data.images import Encoded
from upfl.data.own.arrays import finite
from upfl.errors import DataError


def rows(part: Any, start: int, form: Vectors, where: str) -> NDArray[np.float32]:
    """Features of a part of a table, in single precision."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if part.num_columns == 1 and is_list(part.schema.field(0).type):
        lengths = pc.fill_null(pc.list_value_length(part.column(0)), 0).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(lengths != len(form.features))).size:
            raise DataError(
                f"{where}: row {start + wrong[0] + 1}: a list of {lengths[wrong[0]]} numbers, and others have "
                f"{len(form.features)}"
            )
        flat = pc.list_flatten(part.column(0)).to_numpy(zero_copy_only=False)
        return finite(flat.reshape(-1, len(form.features)), start, where, form.features)
    values = np.empty((part.num_rows, part.num_columns), np.float64)
    for i in range(part.num_columns):
        column = part.column(i)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = _parsed(column, start, form.features[i], where)
        values[:, i] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return finite(values, start, where, form.features)


def _parsed(column: Any, start: int, name: str, where: str) -> Any:
    """A column of texts as numbers, or an error that names the first that is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(column)
    try:
        return pc.cast(trimmed, pa.float64())
    except pa.ArrowInvalid:
        for row, value in enumerate(trimmed.to_pylist()):
            try:
                float(value if value is not None else "nan")
            except ValueError:
                raise DataError(
                    f"{where}: row {start + row + 1}, feature '{name}': {value!r:.60} is not a number; correct it, or "
                    "name the columns that are features (--features)"
                ) from None
        return pa.array([float(value if value is not None else "nan") for value in trimmed.to_pylist()])


def texts(part: Any, start: int, form: Tokens, where: str) -> NDArray[np.int32]:
    found = part.column(0).to_pylist()
    for row, text in enumerate(found):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: row {start + row + 1}: there is no text; leave the row out")
    return form.padded([form.tokens(text) for text in found])


def tokens(part: Any, start: int, form: Tokens, where: str) -> NDArray[np.int32]:
    found = part.column(0).to_pylist()
    for row, one in enumerate(found):
        if not one or not all(isinstance(token, int) and 0 <= token < form.vocabulary for token in one):
            raise DataError(
                f"{where}: row {start + row + 1}: tokens are whole numbers from 0 (padding) to {form.vocabulary - 1}, "
                "and a row has one at least"
            )
    return form.padded(found)


def images(part: Any, start: int, told: str, folder: Path) -> Iterator[Path | Encoded]:
    """The images of a column: bytes, structs with bytes as Hugging Face has them, or files beside the table."""
    for row, value in enumerate(part.column(0).to_pylist()):
        where = f"{told}: row {start + row + 1}"
        content = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            yield Encoded(content, where)
        elif isinstance(content, str) and content:
            inside = Path(content)
            if inside.is_absolute() or ".." in inside.parts:
                raise DataError(f"{where}: {content!r:.80} is not a file below the table's folder")
            yield folder / inside
        else:
            raise DataError(f"{where}: there is no image")


def is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
