"""A folder written by Hugging Face's `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, read with pyarrow alone.

`state.json` names the Arrow files, `dataset_info.json` the classes; of a `DatasetDict`, all splits are taken together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upfl.data.draft import Draft
from upfl.data.own.options import Options
from upfl.data.own.tables import Table, _types, read_table, reading, require_arrow
from upfl.errors import DataError, RunError
from upfl.safe.folder import Folder
from upfl.safe.parse import read_json

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_folder(path: Path) -> bool:
    return path.is_dir() and ((path / STATE).is_file() or (path / SPLITS).is_file())


def read(path: Path, options: Options) -> Draft:
    table = open_folder(path)
    if options.label is None and "label" in table.types:
        options = replace(options, label="label")
    images = [name for name, kind in table.types.items() if str(kind).startswith("struct<bytes: binary")]
    if len(images) == 1 and not (options.image or options.features or options.tokens or options.text):
        options = replace(options, image=images[0])
    return read_table(table, options)


def open_folder(path: Path) -> Table:
    require_arrow()
    import pyarrow as pa

    folders = [path / name for name in _splits(path)] if (path / SPLITS).is_file() else [path]
    files = [folder / name for folder in folders for name in _files(folder)]

    def batches() -> Iterator[Any]:
        for file in files:
            # Not mapped into memory: in a damaged file lengths may lead past its end, which would end the process.
            with reading(str(file)), pa.OSFile(str(file)) as content, pa.ipc.open_stream(content) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    yield batch

    with reading(str(files[0])), pa.OSFile(str(files[0])) as content, pa.ipc.open_stream(content) as stream:
        schema = stream.schema

    def parts(names: Sequence[str]) -> Iterator[Any]:
        for batch in batches():
            if batch.schema.names != schema.names:
                raise DataError(f"{path}: its Arrow files have different columns")
            yield batch.select(list(names))

    return Table(str(path), path, _types(schema, str(path)), parts, class_names=_class_names(folders[0]))


def _json(folder: Path, name: str) -> Any:
    try:
        return read_json(Folder(folder).read(name, "MANIFEST"))
    except (ValueError, RunError) as error:
        raise DataError(f"{folder / name}: cannot be read: {error}") from error


def _splits(path: Path) -> list[str]:
    found = _json(path, SPLITS)
    splits = found.get("splits") if isinstance(found, dict) else None
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) and _plain(name) for name in splits):
        raise DataError(f"{path / SPLITS}: does not name the splits")
    return splits


def _files(folder: Path) -> list[str]:
    state = _json(folder, STATE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("filename", "")) for entry in entries if isinstance(entry, dict)]
    if not names or not all(map(_plain, names)):
        raise DataError(f"{folder / STATE}: does not name the data set's Arrow files")
    if isinstance(state, dict) and state.get("_indices_data_files"):
        raise DataError(f"{folder}: holds a selection by index; save it after `flatten_indices()`")
    return names


def _plain(name: str) -> bool:
    return bool(name) and Path(name).name == name


def _class_names(folder: Path) -> dict[str, tuple[str, ...]]:
    """Names of classes, by column, where the features say that a column is a `ClassLabel`."""
    if not (folder / INFO).is_file():
        return {}
    info = _json(folder, INFO)
    features = info.get("features") if isinstance(info, dict) else None
    found = {}
    for column, told in features.items() if isinstance(features, dict) else ():
        names = told.get("names") if isinstance(told, dict) and told.get("_type") == "ClassLabel" else None
        if isinstance(names, list) and len(names) > 1 and all(isinstance(name, str) for name in names):
            if len(set(names)) < len(names):
                raise DataError(f"{folder / INFO}: two classes of '{column}' have the same name")
            found[column] = tuple(names)
    return found
