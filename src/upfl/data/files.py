"""A user's own files: images in a folder, NumPy arrays, idx files; with labels or without.

    folder of images    PNG, JPEG, GIF, BMP, TIFF, WebP, PPM; sub-folders too; with labels: one sub-folder a class
    a single image      one sample
    .npy, .npz          [n, h, w], [n, h, w, c], [n, c, h, w], or rows of h * w grey values; never pickled objects. An
                        .npz holds them as `x` (or as its only array), and labels as `y`
    idx, idx.gz         MNIST's format; with labels: the file, or a folder with it, and `...labels-idx1-ubyte` beside

Integers run from 0 to `scale` (255 unless the data set says otherwise), floats from 0 to 1, image files from 0 to 255.

Every image must have the model's size: nothing is resized. Grey images serve a model of colours, as grey is a colour;
colours are refused by a model of greys, unless red, green and blue are equal. A file that is no image is left out and
named; an image that is damaged or does not fit is an error. Names that begin with a dot do not count, links to files
are followed, links to folders are not. What is read is bounded: the size in an image's header is checked before its
pixels are decoded, an array's in its own before it is read or unpacked (`upfl.safe.limits`).
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.progress import track

from upfl.data.arrays import arrays_in
from upfl.data.formats import IDX_HEADER, Shape, idx, idx_size
from upfl.data.images import NotAnImageError, files_below, looks_like_image, pixels
from upfl.data.samples import Numbers, Samples
from upfl.errors import DataError, RunError
from upfl.safe.folder import expanded
from upfl.safe.limits import exceeded, limit
from upfl.suggest import unknown

PART = 2**22  # values that are looked at together
IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def load_unlabelled(path: str | Path, shape: Shape, scale: float = 255.0) -> Samples:
    """The samples in a file or a folder, for a model that takes images of a shape (channels, height, width)."""
    path = _existing(path)
    if path.is_dir():
        images = list(files_below(path))
        if not any(looks_like_image(file) for file in images) and (found := _idx_images(path)):
            return _load_idx(found, shape, scale)
        return _load_images(path, images, shape)
    if path.suffix in (".npy", ".npz"):
        arrays = arrays_in(path)
        name = "x" if "x" in arrays else next(iter(arrays), None) if len(arrays) == 1 else None
        if name is None:
            raise DataError(f"{path}: has the arrays {', '.join(sorted(arrays)) or '(none)'}; name the images `x`")
        return from_array(arrays[name](), shape, scale, str(path))
    if _is_idx(path):
        return _load_idx(path, shape, scale)
    return _load_images(path, [path], shape)


def load_labelled(path: str | Path, shape: Shape, class_names: Sequence[str], scale: float = 255.0) -> Samples:
    """The samples with their labels, as numbers in the order of `class_names`."""
    path = _existing(path)
    if path.is_dir() and (found := _idx_images(path)):
        path = found
    if path.is_dir():
        samples = _load_images(path, list(files_below(path)), shape)
        numbers = {name: number for number, name in enumerate(class_names)}
        labels = []
        for name in samples.names:
            folder, below, _ = name.partition("/")
            if not below:
                raise DataError(f"{path / name}: has no label; put every image into a sub-folder with its class's name")
            if folder not in numbers:
                raise DataError(f"{path / folder}: {unknown('class', folder, class_names)}")
            labels.append(numbers[folder])
        return replace(samples, labels=np.array(labels, np.int64))
    if path.suffix == ".npz":
        arrays = arrays_in(path)
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(f"{path}: there is no array {' and no array '.join(sorted(missing))}")
        samples, labels_file, given = from_array(arrays["x"](), shape, scale, str(path)), path, arrays["y"]()
    elif path.suffix != ".npy" and _is_idx(path):
        samples, labels_file = _load_idx(path, shape, scale), _beside(path)
        given = _idx_columns(labels_file, shape).get("labels", np.empty(0, np.uint8))
    else:
        raise DataError(f"{path}: holds no labels; give a folder with a sub-folder a class, an .npz, or idx files")
    return replace(samples, labels=checked_labels(given, len(samples), len(class_names), labels_file))


def from_array(array: ArrayLike, shape: Shape, scale: float = 255.0, where: str = "x") -> Samples:
    """Samples from an array of integers in [0, scale] or floats in [0, 1]; `where` names it in errors."""
    values = np.asarray(array)
    channels, height, width = shape
    if values.ndim == 4 and values.shape[1:] == (height, width, channels):
        images = np.moveaxis(values, 3, 1)
    elif values.ndim == 4 and values.shape[1:] == shape:
        images = values
    elif channels == 1 and values.shape[1:] in ((height, width), (height * width,)) and values.ndim > 1:
        images = values.reshape(-1, 1, height, width)
    else:
        of = "grey values" if channels == 1 else f"{channels} channels"
        raise DataError(
            f"{where}: an array of shape {list(values.shape)}; the model takes images of {height} x {width} pixels "
            f"with {of}: {_shapes_in_words(shape)}"
        )
    if not len(images):
        raise DataError(f"{where}: there are no samples in it")
    if values.dtype.kind in "iu":
        dtype: np.dtype[Any] = np.dtype(np.uint8)
        largest, kind = scale, f"integers from 0 to {scale:g}"
    elif values.dtype.kind == "f":
        largest, dtype = 1.0, np.dtype(np.float32)
        kind = f"floats from 0 to 1, or integers from 0 to {scale:g} (of an integer type: x.astype('uint8'))"
    else:
        raise DataError(f"{where}: values of type {values.dtype}; give integers from 0 to {scale:g}, or floats to 1")
    if wrong := _outside(images, largest):
        sample = images[wrong[0]]
        found = "a value that is not a number" if np.isnan(sample).any() else f"[{sample.min():g}, {sample.max():g}]"
        raise DataError(f"{where}: sample {wrong[0]} has {found}, and {len(wrong)} do not fit: give {kind}")
    return Samples(np.array(images, dtype, order="C"), largest, Numbers(len(images)))


def _outside(images: NDArray[Any], largest: float) -> list[int]:
    """The samples with values that are not from 0 to `largest`, or not numbers; a part of them at a time."""
    step, wrong = max(1, PART // max(1, images[0].size)), list[int]()
    for start in range(0, len(images), step):
        part = images[start : start + step]
        wrong += (start + np.flatnonzero(~((part >= 0) & (part <= largest)).all(axis=(1, 2, 3)))).tolist()
    return wrong


def _shapes_in_words(shape: Shape) -> str:
    channels, height, width = shape
    both = f"[n, {height}, {width}, {channels}] or [n, {channels}, {height}, {width}]"
    return f"[n, {height}, {width}], [n, {height * width}], {both}" if channels == 1 else both


def _existing(path: str | Path) -> Path:
    try:
        path = expanded(path)
        mode = path.stat().st_mode
    except RunError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise DataError(f"{path}: neither a file nor a folder")
    return path


# Images


def _load_images(path: Path, files: list[Path], shape: Shape) -> Samples:
    """The images among the files in a folder; or the one that `path` itself is."""
    if shape[0] not in (1, 3):
        raise DataError(f"{path}: image files have one channel or three, the model takes {shape[0]}: give an .npy file")
    folder = path.parent if path in files else path
    console = Console(stderr=True)
    quiet = len(files) < 1000 or not console.is_terminal
    found, names, skipped, wrong = [], [], [], []
    for file in track(files, "reading images", console=console, transient=True, disable=quiet):
        name = file.relative_to(folder).as_posix()
        try:
            found.append(pixels(file, shape))
            names.append(name)
        except NotAnImageError:
            skipped.append(name)
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        more = [f"and {len(wrong) - 3} more images do not fit"] if len(wrong) > 3 else []
        raise DataError("\n".join([*wrong[:3], *more]))
    if not found and path in files:
        raise DataError(f"{path}: neither an image nor an .npy, .npz or idx file")
    if not found:
        others = f" (found {', '.join(skipped[:3])}{', ...' if len(skipped) > 3 else ''})" if skipped else ""
        raise DataError(f"{folder}: there are no images in it{others}")
    return Samples(np.stack(found), 255.0, tuple(names), skipped=tuple(skipped))


# Arrays


def checked_labels(labels: NDArray[Any], count: int, classes: int, path: Path) -> NDArray[np.int64]:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {count} images need as many whole numbers as labels; found {labels.dtype} {list(labels.shape)}"
        )
    if count and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise DataError(f"{path}: labels from {labels.min()} to {labels.max()}; there are {classes} classes, from 0")
    return labels.astype(np.int64)


# idx files


def _idx_images(folder: Path) -> Path | None:
    """The one file of idx images in a folder, if there is one."""
    found = sorted(path for path in folder.iterdir() if IDX_IMAGES in path.name and path.is_file())
    if len(found) > 1:
        raise DataError(f"{folder}: has several files of images; name one: {', '.join(path.name for path in found)}")
    return found[0] if found else None


def _beside(images: Path) -> Path:
    labels = images.with_name(images.name.replace(IDX_IMAGES, IDX_LABELS))
    if labels == images or not labels.is_file():
        raise DataError(f"{images}: its labels are not beside it ({labels.name if labels != images else IDX_LABELS})")
    return labels


def _is_idx(path: Path) -> bool:
    if IDX_IMAGES in path.name:
        return True
    try:
        with _opened(path) as stream:
            return bool(stream.read(3) == b"\0\0\x08")
    except (OSError, EOFError, zlib.error):
        return False


def _load_idx(path: Path, shape: Shape, scale: float) -> Samples:
    columns = _idx_columns(path, shape)
    if "images" not in columns:
        raise DataError(f"{path}: holds labels, not images")
    return from_array(columns["images"], shape, scale, str(path))


def _idx_columns(path: Path, shape: Shape) -> dict[str, NDArray[Any]]:
    """A file's columns. Its header says how much follows: so much, and one byte more, is read at most."""
    kind = "UNPACKED" if path.suffix == ".gz" else "FILE"
    try:
        with _opened(path) as stream:
            start = stream.read(IDX_HEADER)
            size = idx_size(start)
            if size > limit(kind):
                raise ValueError(exceeded(kind, size))
            content = start + stream.read(size + 1 - len(start))
        return idx(content, (1, *shape[1:]))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: cannot be used: {error}") from error


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
