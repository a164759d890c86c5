"""What a reader of a user's own data has found: all that is known before the samples themselves are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.forms import Form
from upfl.errors import DataError

CLASSES = 2**17
MISSING = -1  # the label of a sample that has none


@dataclass(frozen=True)
class Draft:
    """Samples of one's own: what they are, their labels and clients, and a way to read them part by part."""

    form: Form
    labels: NDArray[np.int64]  # MISSING where there is none
    class_names: tuple[str, ...]
    parts: Callable[[], Iterator[NDArray[Any]]]  # the samples in order, a part at a time, as the form keeps them
    groups: NDArray[np.int64] | None = None  # each sample's client, numbered in the order of `clients`
    clients: NDArray[np.bytes_] | None = None  # their names
    newcomers: NDArray[np.bool_] | None = None  # whether a client is one, where the data say so
    left_out: tuple[str, ...] = ()  # what was found and is not used, with the reason
    taken: tuple[str, ...] = ()  # where classes, clients and samples were taken from, told or found

    def __len__(self) -> int:
        return len(self.labels)

    def gathered(self) -> NDArray[Any]:
        """All samples in memory."""
        x = np.empty((len(self), *self.form.shape), self.form.dtype)
        for start, part in placed(self.parts(), len(self)):
            x[start : start + len(part)] = part
        return x


class Digest:
    """Of all that a data set consists of: its form, classes, columns and, last, samples."""

    def __init__(self, form: Form, class_names: tuple[str, ...]) -> None:
        self._total = hashlib.sha256(form.model_dump_json().encode() + repr(class_names).encode())

    def update(self, values: NDArray[Any] | None) -> None:
        if values is not None:
            step = max(1, 2**24 // max(1, values[:1].nbytes))
            for start in range(0, len(values), step):
                self._total.update(np.ascontiguousarray(values[start : start + step]).view(np.uint8).data)

    def __str__(self) -> str:
        return self._total.hexdigest()


def placed(parts: Iterator[NDArray[Any]], count: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Each part with the place of its first sample; there must be as many samples as were announced."""
    start = 0
    for part in parts:
        if start + len(part) > count:
            break
        yield start, part
        start += len(part)
    if start != count:
        raise DataError(f"{count} samples were announced, and others came: the file changes while it is read")


@dataclass(frozen=True)
class Column:
    """A column of names or numbers: its different values, and which of them each row has."""

    values: NDArray[Any]  # different ones: whole numbers, floats, booleans or texts
    codes: NDArray[np.int64]  # MISSING where a row has none
    where: str  # the file and the column
    rows: Callable[[int], str] = field(default=lambda row: f"row {row + 1}")

    @classmethod
    def of(cls, values: NDArray[Any], where: str) -> Column:
        """Of an array as NumPy has it; None, NaN and empty texts are missing."""
        if values.ndim != 1:
            raise DataError(f"{where}: has the shape {list(values.shape)}; one value for each sample is needed")
        if values.dtype.kind == "O":
            missing = np.array([value is None for value in values], np.bool_)
            kinds = {type(value) for value in values[~missing]}
            if not kinds <= {str} and not kinds <= {int, bool}:
                raise DataError(f"{where}: has values of type {', '.join(sorted(k.__name__ for k in kinds))}")
            values = np.array(["" if value is None else str(value) for value in values], np.str_)
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8", "surrogateescape")
        if values.dtype.kind not in "biufU":
            raise DataError(f"{where}: values of type {values.dtype}; give whole numbers or texts")
        unique, codes = np.unique(values, return_inverse=True)
        return cls(unique, codes.astype(np.int64), where).without_missing()

    def without_missing(self) -> Column:
        """The same with NaN and empty texts as missing values."""
        if self.values.dtype.kind == "f":
            gone = np.isnan(self.values)
        elif self.values.dtype.kind == "U":
            gone = np.char.strip(self.values) == ""
        else:
            return self
        if not gone.any():
            return self
        kept = np.where(gone, MISSING, np.cumsum(~gone) - 1)
        codes = np.where(self.codes == MISSING, MISSING, kept[self.codes])
        return Column(self.values[~gone], codes, self.where, self.rows)

    def sorted(self) -> Column:
        """The same, values in order: numbers by size, also where they are written as texts."""
        values = self.values
        if values.dtype.kind == "U" and len(values) and _all_whole(values):
            order = np.argsort(np.array([int(value) for value in values], np.object_), kind="stable")
        else:
            order = np.argsort(values, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        codes = np.where(self.codes == MISSING, MISSING, rank[self.codes] if len(rank) else MISSING)
        return Column(values[order], codes, self.where, self.rows)

    def first(self, rows: NDArray[np.bool_]) -> str:
        return self.rows(int(np.flatnonzero(rows)[0]))


def _all_whole(values: NDArray[np.str_]) -> bool:
    return all(len(value) < 19 and value.isascii() and value.removeprefix("-").isdigit() for value in values.tolist())


def _measurements(values: NDArray[np.str_]) -> NDArray[np.float64] | None:
    """Texts as numbers, if all are and some are not whole; else they are names, which stay as they are written."""
    if not len(values) or _all_whole(values):
        return None
    try:
        numbers = np.array([float(value) for value in values.tolist()])
    except ValueError:
        return None
    return None if (numbers == np.rint(numbers)).all() and np.isfinite(numbers).all() else numbers


def classes_of(column: Column) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as numbers, and the classes' names in order; refuses what cannot be classes."""
    values, where = column.values, column.where
    if values.dtype.kind == "U" and (numbers := _measurements(values)) is not None:
        column = Column(numbers, column.codes, where, column.rows)  # as CSV has them
        values = numbers
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            bad = np.isin(column.codes, np.flatnonzero(~np.isfinite(values)))
            raise DataError(
                f"{where}: {column.first(bad)} has a label that is not finite; leave it empty or correct it"
            )
        if (values != np.rint(values)).any():
            bad = np.isin(column.codes, np.flatnonzero(values != np.rint(values)))
            raise DataError(
                f"{where}: {column.first(bad)} has {values[column.codes[np.flatnonzero(bad)[0]]]:g}: a measurement, "
                "not a class; name a column of classes, or make ranges of its values"
            )
        column = Column(values.astype(np.int64), column.codes, where, column.rows)
    column = column.sorted()
    labelled = int((column.codes != MISSING).sum())
    if not labelled:
        raise DataError(f"{where}: there is no label in it")
    count = len(column.values)
    if count == labelled > 2:
        raise DataError(f"{where}: all {count} labels are different: it names samples, not classes")
    if count < 2:
        raise DataError(f"{where}: there is one class alone ({column.values[0]}); two are the least to tell apart")
    if count > CLASSES:
        raise DataError(f"{where}: {count} classes are more than the {CLASSES} that are possible")
    names = tuple(str(value) for value in column.values.tolist())
    if len(set(names)) < len(names):
        raise DataError(f"{where}: two classes have the same name")
    if long := [name for name in names if len(name) > 200]:
        raise DataError(f"{where}: a label has {len(long[0])} characters; a class's name has 200 at most")
    if odd := [name for name in names if not name.isprintable()]:
        raise DataError(f"{where}: the label {odd[0]!r} has characters that cannot be printed; clean it")
    return column.codes, names


def clients_of(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bytes_]]:
    """Clients as numbers, and their names in order."""
    if (column.codes == MISSING).any():
        raise DataError(
            f"{column.where}: {column.first(column.codes == MISSING)} has no client; name it, or leave it out"
        )
    column = column.sorted()
    values = column.values
    if values.dtype.kind == "f":
        if not (np.isfinite(values).all() and (values == np.rint(values)).all()):
            raise DataError(f"{column.where}: clients are named by texts or whole numbers, not by measurements")
        values = values.astype(np.int64)
    if len(values) < 2:
        raise DataError(f"{column.where}: there is only one client; a federation needs at least two")
    return column.codes, names_array(values)


def names_array(values: NDArray[Any] | Sequence[str]) -> NDArray[np.bytes_]:
    """Names as bytes in UTF-8, in one array: a million of them are not a million objects."""
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return array.astype(np.bytes_)
    encoded: NDArray[np.bytes_] = np.char.encode(array.astype(np.str_), "utf-8", "surrogateescape")
    return encoded


def newcomers_of(column: Column, groups: NDArray[np.int64], clients: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """Whether each client is a newcomer, by a column that says the same for all of a client's samples."""
    words = {"true": True, "yes": True, "1": True, "new": True, "newcomer": True, "": False}
    words |= {"false": False, "no": False, "0": False, "training": False, "train": False}
    meaning = []
    for value in column.values.tolist():
        word = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip().lower()
        if word not in words:
            raise DataError(f"{column.where}: {value!r} does not say who is a newcomer; write true or false")
        meaning.append(words[word])
    said = np.array([*meaning, False], np.bool_)[column.codes]  # a missing value is the last
    new, old = (np.bincount(groups[said == word], minlength=len(clients)) > 0 for word in (True, False))
    if (both := new & old).any():
        name = clients[np.flatnonzero(both)[0]].decode("utf-8", "replace")
        raise DataError(f"{column.where}: says of client '{name}' both that it is a newcomer and that it is not")
    return new
