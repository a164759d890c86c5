"""Where data sets are kept between runs, and how arrays are written there and mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_dir


def cache_folder() -> Path:
    return Path(os.environ.get("UPFL_CACHE") or user_cache_dir("upfl")).expanduser()


def open_array(path: Path) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if path.stat().st_size != array.offset + array.nbytes or not array.flags.c_contiguous:
        raise ValueError("not as it was written")
    return array  # type: ignore[no-any-return]


def save_array(path: Path, values: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(values), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def rename_unless_there(folder: Path, target: Path) -> bool:
    """Put a complete folder in its place in one step; another process may have been first, which is as good."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    return True
