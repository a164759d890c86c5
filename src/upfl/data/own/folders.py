"""Image folders: `client/class/image`, or `class/image` for data that a partition deals out.

Where there are clients, an image directly in a client's folder has no label: such clients can only be newcomers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.draft import Column, Draft, classes_of, clients_of
from upfl.data.images import Encoded, NotAnImageError, files_below, looked_at, pixels
from upfl.data.own.arrays import pixel_form
from upfl.data.own.options import Options
from upfl.errors import DataError

PART = 256  # images that are decoded together
SHOWN = 3  # of many problems


def read(path: Path, options: Options) -> Draft:
    options.only("image folders", "resize", "allow_duplicates")
    files, left_out, looks = list[Path](), list[str](), list[tuple[tuple[int, int], bool]]()
    wrong = list[str]()
    for file in files_below(path):
        try:
            looks.append(looked_at(file))
            files.append(file)
        except NotAnImageError:
            left_out.append(f"{file.relative_to(path)}: no image")
        except DataError as error:
            wrong.append(str(error))
    refuse(wrong, "images cannot be read; mend or remove them")
    if not files:
        found = f" (found {left_out[0]})" if left_out else ""
        raise DataError(f"{path}: there are no images in it{found}")
    parts = [file.relative_to(path).parts for file in files]
    depth = max(map(len, parts))
    if depth not in (2, 3):
        raise DataError(f"{path}: put images at client/class/image or class/image; found {files[0].relative_to(path)}")
    wanted = (depth,) if depth == 2 else (2, 3)
    if odd := [file for file, part in zip(files, parts, strict=True) if len(part) not in wanted]:
        raise DataError(f"{odd[0]}: is neither in a class's folder nor in a client's")
    labels, names = classes_of(
        Column.of(np.array([part[-2] if len(part) == depth else "" for part in parts]), f"{path}: class folders")
    )
    groups = clients = None
    if depth == 3:
        require_samples(path, {part[0] for part in parts})
        groups, clients = clients_of(Column.of(np.array([part[0] for part in parts]), f"{path}: client folders"))
    if not options.allow_duplicates:
        refuse_duplicates(files)
    shape = common_shape(files, looks, options.resize)
    form, resize = pixel_form(shape), options.resize is not None

    def read_parts() -> Iterator[NDArray[Any]]:
        return decoded(files, shape, resize)

    taken = ("classes: the names of the images' folders", "clients: the names of the folders above these")
    return Draft(form, labels, names, read_parts, groups, clients, left_out=tuple(left_out), taken=taken[: depth - 1])


def refuse(wrong: Sequence[str], what: str) -> None:
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more {what}"] if len(wrong) > SHOWN else []
        raise DataError("\n".join([*wrong[:SHOWN], *more]))


def require_samples(path: Path, found: set[str]) -> None:
    """Refuse a client's folder, or a class's in it, that holds no image: it may have been forgotten."""
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith(".") and folder.name not in found:
            raise DataError(f"{folder}: client '{folder.name}' has no images; remove the folder, or fill it")


def refuse_duplicates(files: Iterable[Path]) -> None:
    """Refuse a file that is there twice: what one client trains on would be another's test."""
    sizes: dict[int, list[Path]] = {}
    for file in files:
        sizes.setdefault(file.stat().st_size, []).append(file)
    for same in sizes.values():
        seen: dict[bytes, Path] = {}
        for file in same if len(same) > 1 else ():
            digest = hashlib.blake2b(file.read_bytes(), digest_size=16).digest()
            if digest in seen:
                raise DataError(f"{file}: is the same file as {seen[digest]}; remove one, or say --allow-duplicates")
            seen[digest] = file


def common_shape(
    files: Sequence[Path | Encoded], looks: Sequence[tuple[tuple[int, int], bool]], resize: tuple[int, int] | None
) -> tuple[int, int, int]:
    """Channels, height and width of all images: in colour if any is; of one size, unless they are to be resized."""
    channels = 3 if any(colour for _, colour in looks) else 1
    if resize is not None:
        return channels, resize[1], resize[0]
    sizes = Counter(size for size, _ in looks)
    (usual, count), *others = sizes.most_common()
    if others:
        odd = next(file for file, (size, _) in zip(files, looks, strict=True) if size != usual)
        size = next(size for size, _ in looks if size != usual)
        raise DataError(
            f"{odd}: has {size[0]} x {size[1]} pixels, and {count} images have {usual[0]} x {usual[1]} "
            f"({len(sizes)} sizes in all): bring them to one size, for example by --resize {usual[0]} {usual[1]}"
        )
    return channels, usual[1], usual[0]


def decoded(files: Sequence[Path | Encoded], shape: tuple[int, int, int], resize: bool) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(files), PART):
        some = files[start : start + PART]
        part = np.empty((len(some), *shape), np.uint8)
        wrong = list[str]()
        for place, file in enumerate(some):
            try:
                part[place] = pixels(file, shape, resize)
            except NotAnImageError:
                wrong.append(f"{file}: is no image any more")
            except DataError as error:
                wrong.append(str(error))
        refuse(wrong, "images cannot be used")
        yield part
