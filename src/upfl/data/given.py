"""Samples that somebody brings to a model whose form is known: a newcomer without labels, a node's owner with them.

Images are read by `files`. Rows of features and texts come as arrays ([n, d], in the order of the features). All come
as tables, too (CSV, Parquet, a Hugging Face folder): columns have the features' names; of texts and images, the column
that the form names, `image`, or the only one there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upfl.data import files
from upfl.data.arrays import arrays_in
from upfl.data.draft import MISSING
from upfl.data.forms import Form, Pixels, Tokens, Vectors
from upfl.data.own import cells, huggingface, tables
from upfl.data.own.arrays import finite
from upfl.data.own.folders import decoded
from upfl.data.own.options import existing
from upfl.data.samples import Numbers, Samples
from upfl.errors import DataError
from upfl.suggest import unknown

Given: TypeAlias = ArrayLike | Samples | Sequence[str] | str | Path


def unlabelled(x: Given, form: Form) -> Samples:
    """Samples for a model of a form: an array, texts, or the path of a file or a folder."""
    if isinstance(x, Samples):
        return x
    if isinstance(x, (str, Path)):
        path = existing(x)
        if (table := _table(path)) is not None:
            return _from_table(table, form)
        if isinstance(form, Pixels):
            return files.load_unlabelled(x, form.image, form.scale)
        return _from_array(_array(path), form, str(path))
    if isinstance(form, Pixels):
        return files.from_array(x, form.image, form.scale)
    if isinstance(form, Tokens) and form.words:
        return _from_texts(x, form)
    return _from_array(np.asarray(x), form, "x")


def labelled(path: str | Path, form: Form, class_names: Sequence[str], label: str = "label") -> Samples:
    """Samples with their labels, as numbers in the order of `class_names`: of tables, those in the column `label`."""
    path = existing(path)
    if (table := _table(path)) is not None:
        column = table.column(label)
        names = [str(value) for value in column.values.tolist()]
        if known := (table.class_names or {}).get(label):
            names = [known[int(name)] if name.isdigit() and int(name) < len(known) else name for name in names]
        numbers = {name: number for number, name in enumerate(class_names)}
        if strange := [name for name in names if name not in numbers]:
            raise DataError(f"{column.where}: {unknown('class', strange[0], class_names)}")
        if (missing := column.codes == MISSING).any():
            raise DataError(f"{column.where}: {column.first(missing)} has no label; who trains needs labels")
        labels = np.array([numbers[name] for name in names], np.int64)[column.codes]
        return replace(_from_table(table, form), labels=labels)
    if isinstance(form, Pixels):
        return files.load_labelled(path, form.image, class_names, form.scale)
    arrays = arrays_in(path) if path.suffix == ".npz" else {}
    if missing_arrays := {"x", "y"} - arrays.keys():
        raise DataError(f"{path}: there is no array {' and no array '.join(sorted(missing_arrays))}")
    samples, y = _from_array(arrays["x"](), form, str(path)), arrays["y"]()
    return replace(samples, labels=files.checked_labels(y, len(samples), len(class_names), path))


def _array(path: Path) -> NDArray[Any]:
    if path.suffix not in (".npy", ".npz"):
        raise DataError(f"{path}: give a .csv or .parquet file, or an .npy or .npz file")
    arrays = arrays_in(path)
    name = "x" if "x" in arrays else next(iter(arrays), None) if len(arrays) == 1 else None
    if name is None:
        raise DataError(f"{path}: has the arrays {', '.join(sorted(arrays)) or '(none)'}; name the samples `x`")
    return arrays[name]()


def _from_array(values: NDArray[Any], form: Form, where: str) -> Samples:
    if values.ndim != 2 or values.dtype.kind not in "biuf" or not len(values):
        raise DataError(
            f"{where}: an array of {values.dtype} {list(values.shape)}; the model takes [n, {form.shape[0]}]"
        )
    if isinstance(form, Tokens):
        if values.dtype.kind == "f" or values.min() < 0 or values.max() >= form.vocabulary:
            raise DataError(f"{where}: tokens are whole numbers from 0 (padding) to {form.vocabulary - 1}")
        return Samples(form.padded(values.tolist()), 1.0, Numbers(len(values)))
    assert isinstance(form, Vectors)
    if values.shape[1] != form.shape[0]:
        raise DataError(f"{where}: rows of {values.shape[1]} numbers; the model takes {form.shape[0]} features")
    return Samples(finite(values, 0, where, form.features), 1.0, Numbers(len(values)))


def _from_texts(x: Any, form: Tokens) -> Samples:
    texts = list(x)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError("x: give texts, none of them empty")
    return Samples(form.padded([form.tokens(text) for text in texts]), 1.0, Numbers(len(texts)))


def _table(path: Path) -> tables.Table | None:
    """A table that is not read yet, if a path is one."""
    if path.suffix.lower() in tables.SUFFIXES:
        return tables.open_table(path)
    return huggingface.open_folder(path) if huggingface.is_folder(path) else None


def _from_table(table: tables.Table, form: Form) -> Samples:
    names = _feature_columns(table, form) if isinstance(form, Vectors) else [_column(table, form)]

    def convert(part: Any, start: int) -> NDArray[Any]:
        if isinstance(form, Vectors):
            return cells.rows(part, start, form, table.where)
        if isinstance(form, Tokens):
            return (cells.texts if form.words else cells.tokens)(part, start, form, table.where)
        images = list(cells.images(part, start, table.where, table.folder))
        return np.concatenate([np.empty((0, *form.shape), np.uint8), *decoded(images, form.image, resize=False)])

    parts = list(tables.converted(table, names, convert))
    if not sum(map(len, parts)):
        raise DataError(f"{table.where}: there are no rows in it")
    x = np.concatenate(parts)
    skipped = tuple(f"column '{name}'" for name in table.types if name not in names)
    return Samples(x, 255.0 if isinstance(form, Pixels) else 1.0, Numbers(len(x)), skipped=skipped)


def _feature_columns(table: tables.Table, form: Vectors) -> list[str]:
    first = form.features[0].removesuffix("[0]")
    if first != form.features[0] and first in table.types:
        return [first]
    if missing := [name for name in form.features if name not in table.types]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{table.where}: there is no column '{missing[0]}'{more}; the model takes {form.in_words.lower()}"
        )
    return list(form.features)


def _column(table: tables.Table, form: Tokens | Pixels) -> str:
    """The column with the texts or the images."""
    usual = form.column if isinstance(form, Tokens) else "image"
    if usual in table.types:
        return usual
    if isinstance(form, Tokens):
        wanted = [name for name, kind in table.types.items() if (str(kind) == "string") == form.words]
    else:
        wanted = [name for name, kind in table.types.items() if "binary" in str(kind)]
    if len(wanted) != 1:
        raise DataError(
            f"{table.where}: name the column with the {form.noun} `{usual}`; it has {', '.join(table.types)}"
        )
    return wanted[0]
