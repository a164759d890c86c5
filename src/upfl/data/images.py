"""Image files: looked at before they are decoded, decoded to the bytes that a model's form asks for."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.formats import Shape
from upfl.errors import DataError

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm"}
GREYS = ("1", "L", "LA")
ROTATED = (5, 6, 7, 8)  # orientations in a photograph's metadata by which its sides change places
ORIENTATION = 0x0112


class NotAnImageError(Exception):
    """A file of another kind."""


@dataclass(frozen=True)
class Encoded:
    """An image inside another file."""

    content: bytes
    name: str

    def __str__(self) -> str:
        return self.name


def looks_like_image(file: Path | Encoded) -> bool:
    return isinstance(file, Encoded) or file.suffix.lower() in SUFFIXES


def files_below(folder: Path) -> Iterator[Path]:
    """All files, sub-folders' too, in the order of their names; not those that begin with a dot."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(parent, name).is_symlink()]
        yield from (Path(parent, name) for name in sorted([*files, *links]) if not name.startswith("."))


@contextmanager
def opened(file: Path | Encoded) -> Iterator[Any]:
    """An image whose pixels are not decoded yet; whatever goes wrong inside is told by the file's name."""
    from PIL import Image, UnidentifiedImageError  # here, because arrays do not need it

    try:
        if isinstance(file, Path) and not stat.S_ISREG(file.stat().st_mode):
            raise NotAnImageError
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # odd metadata; the pixels are what counts
            given = io.BytesIO(file.content) if isinstance(file, Encoded) else file
            with Image.open(given, formats=FORMATS) as image:
                yield image
    except UnidentifiedImageError as error:
        if looks_like_image(file):
            raise DataError(f"{file}: is not the image that its name says, or is damaged") from error
        raise NotAnImageError from error
    except FileNotFoundError as error:  # a link to nothing
        raise NotAnImageError from error
    except (DataError, NotAnImageError):
        raise
    except Exception as error:  # Pillow's readers fail in many ways on damaged bytes, and refuse bombs
        raise DataError(f"{file}: cannot be read: it is truncated, damaged or far too large ({error})") from error


def looked_at(file: Path | Encoded) -> tuple[tuple[int, int], bool]:
    """An image's width and height, upright, and whether it is in colour: from its header alone."""
    with opened(file) as image:
        width, height = image.size
        turned = image.getexif().get(ORIENTATION) in ROTATED if image.format in ("JPEG", "TIFF", "WEBP") else False
        return ((height, width) if turned else (width, height)), image.mode not in GREYS


def pixels(file: Path | Encoded, shape: Shape, resize: bool = False) -> NDArray[np.uint8]:
    """An image as [channels, height, width]; one of another size is refused, or resized where that is asked for."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    with opened(file) as image:
        # Turned photographs say so in their metadata; sides may change places.
        if not resize and sorted(image.size) != sorted((width, height)):
            raise _unlike(file, image.size, shape)
        if getattr(image, "n_frames", 1) > 1:
            raise DataError(f"{file}: has several frames; save the one that is meant as an image of its own")
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{file}: has more than 8 bits a channel ({image.mode}); save it with 8")
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.size != (width, height) and not resize:
            raise _unlike(file, upright.size, shape)
        if upright.has_transparency_data and np.asarray(upright.convert("RGBA"))[..., 3].min() < 255:
            raise DataError(f"{file}: is transparent in parts; save it without transparency")
        grey = channels == 1 and upright.mode in GREYS
        plain = upright.convert("L" if grey else "RGB")
        if plain.size != (width, height):
            plain = plain.resize((width, height), Image.Resampling.BILINEAR)
        values = np.asarray(plain)
    if values.ndim == 2:
        return values[None]
    if channels == 1:
        if (values != values[..., :1]).any():
            raise DataError(f"{file}: is in colour; the model takes grey images")
        return np.ascontiguousarray(values[None, ..., 0])
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def _unlike(file: Path | Encoded, size: tuple[int, int], shape: Shape) -> DataError:
    return DataError(
        f"{file}: has {size[0]} x {size[1]} pixels (width x height); the model takes {shape[2]} x {shape[1]}"
    )
