"""Arrays: `x` with a sample in each row, `y` with its class, perhaps `client` and `newcomer`.

    x [n, d]                          features, or tokens where these are asked for (`--tokens x`)
    x [n, h, w], [n, h, w, c], [n, c, h, w]   images: whole numbers up to `scale` (255), or floats in [0, 1]

A .npz holds them by these names. Beside a .npy file `NAME.npy`, `NAME_y.npy` and `NAME_client.npy` are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.arrays import arrays_in
from upfl.data.draft import MISSING, Column, Draft, classes_of, clients_of, newcomers_of
from upfl.data.forms import Form, Pixels, Tokens, Vectors
from upfl.data.own.options import Options, scale_of
from upfl.data.standardize import LARGEST
from upfl.errors import DataError

NAMES = ("x", "y", "client", "newcomer")
PART = 2**22  # values that are converted at once
HALF = 0.5  # images of one's own are brought to [-1, 1]


def read(path: Path, options: Options) -> Draft:
    options.only("arrays", "label", "client", "newcomer", "tokens", "length", "vocabulary", "scale", "allow_duplicates")
    if path.suffix == ".npy":
        stem = path.with_suffix("")
        beside = {name: stem.with_name(f"{stem.name}_{name}.npy") for name in NAMES[1:]}
        found: dict[str, Callable[[], NDArray[Any]]] = {"x": arrays_in(path)["x"]}
        found |= {name: arrays_in(file)["x"] for name, file in beside.items() if file.is_file()}
    else:
        found = dict(arrays_in(path))
    wanted = {"x": options.tokens or "x", "y": options.label or "y"}
    wanted |= {"client": options.client or "client", "newcomer": options.newcomer or "newcomer"}
    given = {role: found[name] for role, name in wanted.items() if name in found}
    for role in ("x", "y"):
        if role not in given:
            hint = f" (`{path.stem}_y.npy` beside it)" if path.suffix == ".npy" else ""
            others = ", ".join(sorted(found)) or "none"
            raise DataError(f"{path}: there is no array '{wanted[role]}'{hint}; it has {others}")
    for role, said in (("client", options.client), ("newcomer", options.newcomer)):
        if said and role not in given:
            raise DataError(f"{path}: there is no array '{said}'; it has {', '.join(sorted(found))}")
    extra = sorted(set(found) - set(wanted.values()))
    draft = of_arrays({role: make() for role, make in given.items()}, str(path), options)
    left = tuple(f"array '{name}' is not used" for name in extra)
    roles = {"samples": "x", "classes": "y", "clients": "client", "newcomers": "newcomer"}
    taken = tuple(f"{what}: array '{wanted[role]}'" for what, role in roles.items() if role in given)
    return replace(draft, left_out=left, taken=taken)


def of_arrays(given: Mapping[str, NDArray[Any]], where: str, options: Options) -> Draft:
    """A draft of arrays by their roles: x, y, client, newcomer."""
    x = given["x"]
    for role, values in given.items():
        if len(np.shape(values)) == 0 or len(values) != len(x):
            raise DataError(f"{where}: x has {np.shape(x)} and {role} {np.shape(values)}: as many of each are needed")
    if not len(x):
        raise DataError(f"{where}: there are no samples in it")
    columns = {role: Column.of(given[role], f"{where}: {role}") for role in NAMES[1:] if role in given}
    labels, names = classes_of(columns["y"])
    form, parts = samples_of(x, where, options)
    groups = clients = newcomers = None
    if "client" in columns:
        groups, clients = clients_of(columns["client"])
    if "newcomer" in columns:
        if groups is None or clients is None:
            raise DataError(f"{where}: newcomers are named by client; there is no array 'client'")
        newcomers = newcomers_of(columns["newcomer"], groups, clients)
    if groups is None and (labels == MISSING).any():
        raise DataError(
            f"{where}: {columns['y'].first(labels == MISSING)} of y has no label, and nothing says whose it is"
        )
    return Draft(form, labels, names, parts, groups, clients, newcomers)


def samples_of(x: NDArray[Any], where: str, options: Options) -> tuple[Form, Callable[[], Iterator[NDArray[Any]]]]:
    """The form of samples in an array, and a way to read them in parts."""
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where}: x has values of type {x.dtype}; numbers are needed")
    step = max(1, PART // max(1, int(np.prod(x.shape[1:]))))
    starts = range(0, len(x), step)
    if options.tokens:
        form = token_form(x, where, options)
        return form, lambda: (form.padded(np.asarray(x[i : i + step]).tolist()) for i in starts)
    if x.ndim == 2:
        vectors = Vectors(features=tuple(f"x{i}" for i in range(x.shape[1])))
        return vectors, lambda: (finite(x[i : i + step], i, where, vectors.features) for i in starts)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = np.moveaxis(x, 3, 1)
    elif x.ndim != 4:
        raise DataError(
            f"{where}: x has the shape {list(x.shape)}: give rows of features [n, d], or images [n, h, w, c]"
        )
    pixels = pixel_form(x.shape[1:], scale_of(options, where, 0) if x.dtype.kind != "f" else 255.0)
    return pixels, lambda: (as_bytes(x[i : i + step], i, where, pixels) for i in starts)


def pixel_form(shape: tuple[int, ...], scale: float = 255.0) -> Pixels:
    try:
        return Pixels(shape=shape, scale=scale, mean=(HALF,) * shape[0], std=(HALF,) * shape[0])
    except ValueError as error:
        raise DataError(f"images of the shape {list(shape)} cannot be used: {error}") from error


def token_form(x: NDArray[Any], where: str, options: Options) -> Tokens:
    if x.ndim != 2 or x.dtype.kind not in "iu" or not x.shape[1]:
        raise DataError(f"{where}: tokens are whole numbers [n, length]; found {x.dtype} {list(x.shape)}")
    low, high = int(x.min()), int(x.max())
    vocabulary = options.vocabulary or max(high + 1, 2)
    if low < 0 or high >= vocabulary:
        raise DataError(f"{where}: tokens from {low} to {high}; they must be from 0 (padding) to {vocabulary - 1}")
    try:
        return Tokens(length=options.length or x.shape[1], vocabulary=vocabulary)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def finite(part: NDArray[Any], start: int, where: str, names: tuple[str, ...]) -> NDArray[np.float32]:
    """Features in single precision, or an error that names the first that is no number."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(part, np.float32)
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        found = "is missing or not a number" if np.isnan(values[row, column]) else "is not finite in single precision"
        raise DataError(
            f"{where}: row {start + row + 1}, feature '{names[column]}' {found}: fill it in, or leave the row out"
        )
    if len(values) and max(values.max(), -values.min()) > LARGEST:
        row, column = np.argwhere(np.abs(values) > LARGEST)[0]
        raise DataError(
            f"{where}: row {start + row + 1}, feature '{names[column]}' is {values[row, column]:g}, beyond "
            f"{LARGEST:g}: an account's number is no feature (--features names those that are); else take larger units"
        )
    return values


def as_bytes(part: NDArray[Any], start: int, where: str, form: Pixels) -> NDArray[np.uint8]:
    largest, what = (1.0, "floats from 0 to 1") if part.dtype.kind == "f" else (form.scale, "whole numbers from 0")
    inside = ((part >= 0) & (part <= largest)).reshape(len(part), -1).all(1)  # false for NaN, too
    if not inside.all():
        raise DataError(
            f"{where}: image {start + int(np.argmin(inside)) + 1} has pixels that are not {what} to {largest:g}"
        )
    return np.ascontiguousarray(np.rint(part * 255) if part.dtype.kind == "f" else part).astype(np.uint8)
