"""Which reader a path is for."""

from __future__ import annotations

from pathlib import Path

from upfl.data.draft import Draft
from upfl.data.own import arrays, folders, huggingface, tables
from upfl.data.own.options import Options, existing
from upfl.errors import DataError


def read(path: str | Path, options: Options) -> Draft:
    """What a folder or a file of one's own holds."""
    path = existing(path)
    if path.is_dir():
        return huggingface.read(path, options) if huggingface.is_folder(path) else folders.read(path, options)
    if path.suffix in (".npz", ".npy"):
        return arrays.read(path, options)
    if path.suffix.lower() in tables.SUFFIXES:
        return tables.read(path, options)
    raise DataError(
        f"{path}: give a folder of images, an .npz or .npy file, a .csv or .parquet file, or a folder that Hugging "
        "Face's save_to_disk wrote"
    )
