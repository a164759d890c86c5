"""The data sets: found or downloaded, checked against their digests, decoded once, memory-mapped from then on."""

import gzip
import hashlib
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from upfl.data import kept
from upfl.data.cache import cache_folder, open_array, rename_unless_there, save_array
from upfl.data.catalog import CATALOG, File, Specification
from upfl.data.download import download as download_files
from upfl.data.formats import Columns
from upfl.data.forms import Form, Pixels
from upfl.data.partition import Partition, default_partition, own_partition
from upfl.data.source import Source
from upfl.errors import DataError
from upfl.safe import limits
from upfl.suggest import unknown

EMBEDDED = "digits"
NAMES = (EMBEDDED, *CATALOG)
DIGITS = Pixels(shape=(1, 8, 8), scale=16.0, mean=(0.3053,), std=(0.3761,))  # its own, as MNIST has its own

_DECODER_VERSION = 1  # raise it when decoded arrays change: old caches are then left alone and not read


@dataclass(frozen=True)
class FileCheck:
    path: Path
    problem: str | None  # what is wrong with it, if anything


def load(name: str, *, download: bool = True) -> Source:
    """Open a data set by its name; a built-in one that is not on this machine is downloaded first."""
    if name == EMBEDDED:
        return _digits()
    if name not in CATALOG:
        return kept.load(name)
    specification = _specification(name)
    folder = locate(name)
    if folder is None:
        if not download:
            raise _missing(name, specification)
        folder = fetch(name)
    columns = _decoded(name, specification, folder)
    return Source(
        name=name,
        x=columns["images"],
        labels=columns["labels"],
        class_names=specification.class_names,
        train_count=specification.train_count or len(columns["labels"]),
        groups=columns.get("groups"),
        form=_form(specification),
    )


@dataclass(frozen=True)
class Facts:
    """What is known of a data set before its samples are opened."""

    name: str
    form: Form
    classes: int
    samples: int | None = None  # of data of one's own
    clients: int = 0  # that the samples name
    newcomers: int | None = None  # how many of them are new, where the data say so
    own: bool = False


def describe(dataset: str | Source) -> Facts:
    """What a data set is: a built-in one, one that was added, or one in memory."""
    if isinstance(dataset, Source):
        clients = 0 if dataset.clients is None else len(dataset.clients)
        new = None if dataset.newcomers is None else int(dataset.newcomers.sum())
        return Facts(
            dataset.name, dataset.form, len(dataset.class_names), len(dataset), clients, new, bool(dataset.digest)
        )
    if dataset == EMBEDDED:
        return Facts(EMBEDDED, DIGITS, 10)
    if dataset in CATALOG:
        return Facts(dataset, _form(CATALOG[dataset]), len(CATALOG[dataset].class_names))
    if dataset not in kept.names():
        raise unknown("data set", dataset, (*NAMES, *kept.names()))
    told = kept.about(dataset)
    return Facts(dataset, told.input, len(told.classes), told.samples, told.clients, told.newcomers, own=True)


def partition_of(facts: Facts) -> Partition:
    """How a data set is split unless told otherwise."""
    if facts.own:
        return own_partition(facts.samples or 0, facts.clients, facts.newcomers)
    return default_partition(facts.name)


def training_clients(partition: Partition, facts: Facts) -> int:
    """How many clients of a partition train."""
    return partition.clients - (facts.newcomers or 0 if partition.new_clients is None else partition.new_clients)


def _form(specification: Specification) -> Pixels:
    return Pixels(shape=specification.shape, scale=255.0, mean=specification.mean, std=specification.std)


def locate(name: str) -> Path | None:
    """The folder that holds a data set's files, or none if they have to be downloaded (or are embedded)."""
    if name == EMBEDDED:
        return None
    if name in kept.names():
        return kept.folder_of(name)
    specification = _specification(name)
    return next((folder for folder in _folders(specification) if _present(specification, folder)), None)


def fetch(name: str) -> Path:
    """Download a data set into the user's cache folder, unless it is on this machine already; return its folder."""
    specification = _specification(name)
    if (folder := locate(name)) is not None:
        return folder
    if not specification.downloads:
        raise _missing(name, specification)
    target = cache_folder() / "datasets" / specification.folder
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as temporary:
            complete = Path(temporary) / "complete"
            complete.mkdir()
            download_files(specification.downloads, [file.name for file in specification.files], complete)
            rename_unless_there(complete, target)
    except (OSError, DataError) as error:
        raise DataError(f"cannot fetch {specification.title}: {error}. {_by_hand(specification)}") from error
    return target


def check(name: str) -> list[FileCheck]:
    """Read all files of a data set again and compare them with what they should be."""
    if name == EMBEDDED:
        _digits()
        return []
    if name not in CATALOG:
        try:
            kept.check(name)
        except DataError as error:
            return [FileCheck(kept.folder_of(name), str(error))]
        return [FileCheck(kept.folder_of(name), None)]
    specification = _specification(name)
    if (folder := locate(name)) is None:
        raise _missing(name, specification)
    checks, parts = [], []
    for file, path in _files(name, specification, folder):
        try:
            parts.append(_decode(name, specification, file, path))
            checks.append(FileCheck(path, None))
        except DataError as error:
            checks.append(FileCheck(path, str(error)))
    if len(parts) == len(checks):
        _assemble(specification, folder, parts)
    return checks


def _digits() -> Source:
    # scikit-learn's own file, read without scikit-learn, which would take a second of every process to import.
    found = find_spec("sklearn")
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise DataError("digits: they come with scikit-learn, which is not installed here; pip install scikit-learn")
    path = Path(folders[0], "datasets", "data", "digits.csv.gz")
    try:
        with gzip.open(path) as file:
            rows = np.loadtxt(file, np.uint8, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: damaged or missing ({error}); install scikit-learn anew") from error
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    for array in (images, labels):
        array.flags.writeable = False
    return Source(
        name=EMBEDDED,
        x=images,
        labels=labels,
        class_names=tuple(map(str, range(10))),
        train_count=len(labels),
        groups=None,
        form=DIGITS,
    )


def _specification(name: str) -> Specification:
    if name not in CATALOG:
        raise unknown("data set", name, (*NAMES, *kept.names()))
    return CATALOG[name]


# Where files are


def _folders(specification: Specification) -> Iterator[Path]:
    if root := os.environ.get("UPFL_DATA"):
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise DataError(f"UPFL_DATA is {root!r}, which is not a folder: correct it or unset it")
        yield folder / specification.folder
    yield cache_folder() / "datasets" / specification.folder
    yield from specification.system_folders


def _present(specification: Specification, folder: Path) -> list[tuple[File | None, Path]]:
    if not specification.files:
        return [(None, path) for path in sorted(folder.glob(specification.pattern))]
    candidates = ((file, folder / name) for file in specification.files for name in (file.name, f"{file.name}.gz"))
    found = {file.name: (file, path) for file, path in candidates if path.exists()}
    return list(found.values())


def _files(name: str, specification: Specification, folder: Path) -> list[tuple[File | None, Path]]:
    found = _present(specification, folder)
    here = {file.name for file, _ in found if file}
    if missing := [file.name for file in specification.files if file.name not in here]:
        raise DataError(
            f"{folder} holds {specification.title} in part: {', '.join(missing)} missing. Put it there, or delete "
            f"the folder's other files and run `upfl data fetch {name}`"
        )
    return found


def _missing(name: str, specification: Specification) -> DataError:
    looked = ", ".join(str(folder) for folder in _folders(specification))
    offer = f"Run `upfl data fetch {name}`. " if specification.downloads else ""
    return DataError(
        f"{specification.title} is not on this machine (looked in {looked}). {offer}{_by_hand(specification)}"
    )


def _by_hand(specification: Specification) -> str:
    folder = next(_folders(specification))
    if specification.by_hand:
        return f"{specification.by_hand} to {folder}"
    urls = ", ".join(item.urls[0] for item in specification.downloads)
    names = ", ".join(file.name for file in specification.files)
    return f"By hand: get {urls} and put {names} into {folder}"


# From files to columns


def _decode(name: str, specification: Specification, file: File | None, path: Path) -> Columns:
    """The columns of one file, after everything that it alone can show to be wrong is checked."""
    try:
        content = _content(path, file.size + 1 if file else -1)
        if file and len(content) != file.size:
            size = len(content) if len(content) < file.size else f"more than {file.size}"
            raise ValueError(f"it holds {size} bytes instead of {file.size}: truncated, or another file")
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest() if file else None
        if file and digest != file.md5:
            raise ValueError(f"it is not the canonical {specification.title} (md5 {digest} instead of {file.md5})")
        columns = specification.decode(content, specification.shape)
        if "labels" in columns and columns["labels"].max(initial=0) >= len(specification.class_names):
            raise ValueError(f"it has labels beyond the {len(specification.class_names)} classes")
        return columns
    except (OSError, EOFError, zlib.error, ValueError) as error:
        fetch_again = f"delete the set's files and run `upfl data fetch {name}`"
        remedy = f"Replace it, or {fetch_again}" if specification.downloads else f"Replace it. {specification.by_hand}"
        raise DataError(f"{path} cannot be used: {error}. {remedy}") from error


def _content(path: Path, limit: int) -> bytes:
    """A file's content, as far as it may go: what a small compressed file yields is bounded, too."""
    kind = "UNPACKED" if path.suffix == ".gz" else "FILE"
    most = limit if limit >= 0 else limits.limit(kind) + 1
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = stream.read(most)
    if limit < 0 and len(content) == most:
        raise ValueError(limits.exceeded(kind))
    return content


def _assemble(specification: Specification, folder: Path, parts: list[Columns]) -> Columns:
    """One array for each column. Writers are numbered by name, however LEAF dealt them out to files."""
    columns = {
        column: np.concatenate([part[column] for part in parts if column in part]) for column in _columns(specification)
    }
    if specification.grouped and columns["groups"].dtype.kind == "U":
        names, groups = np.unique(columns["groups"], return_inverse=True)
        if len(names) != sum(len(np.unique(part["groups"])) for part in parts):
            raise DataError(f"{folder}: a writer occurs in several files; keep the JSON files of one LEAF run only")
        order = np.argsort(groups, kind="stable")
        columns = {column: values[order] for column, values in (columns | {"groups": groups}).items()}
    columns = {column: columns[column].astype(dtype, copy=False) for column, dtype in _columns(specification).items()}
    if not _consistent(specification, columns):
        raise DataError(f"{folder}: the files of {specification.title} do not belong together")
    return columns


def _columns(specification: Specification) -> dict[str, type[np.integer[Any]]]:
    grouped: dict[str, type[np.integer[Any]]] = {"groups": np.int64} if specification.grouped else {}
    return {"images": np.uint8, "labels": np.int64, **grouped}


def _consistent(specification: Specification, columns: Columns) -> bool:
    images, labels = columns["images"], columns["labels"]
    return (
        all(columns[column].dtype == dtype for column, dtype in _columns(specification).items())
        and all(len(values) == len(labels) for values in columns.values())
        and images.shape[1:] == specification.shape
        and len(labels) >= (specification.train_count or 1)
        and 0 <= labels.min() <= labels.max() < len(specification.class_names)
    )


# Decoded arrays, kept for the next time


def _decoded(name: str, specification: Specification, folder: Path) -> Columns:
    files = _files(name, specification, folder)
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for _, path in files]
    key = hashlib.sha256(repr((_DECODER_VERSION, specification.files, states)).encode()).hexdigest()[:16]
    target = _writable_folder() / f"{name}-{key}"
    open_target = partial(_open_arrays, specification, target)
    if (columns := open_target()) is not None:
        return columns
    console = Console(stderr=True)
    title = f"reading {specification.title}, once"
    steps = track(files, title, console=console, transient=True, disable=not console.is_terminal)
    decoded = _assemble(specification, folder, [_decode(name, specification, file, path) for file, path in steps])
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as temporary:
            complete = Path(temporary) / "complete"
            complete.mkdir()
            for column, values in decoded.items():
                save_array(complete / f"{column}.npy", values)
            if not rename_unless_there(complete, target) and open_target() is None:
                shutil.rmtree(target)  # damaged, or it would have been opened
                rename_unless_there(complete, target)
    except OSError as error:
        raise DataError(f"cannot keep the decoded {specification.title} in {target.parent}: {error}") from error
    if (columns := open_target()) is None:
        raise DataError(f"{target} is damaged again just after it was written: is the disk full or failing?")
    return columns


def _open_arrays(specification: Specification, folder: Path) -> Columns | None:
    """The arrays in `folder`, memory-mapped, or none if they are missing or damaged in any way."""
    try:
        columns = {column: open_array(folder / f"{column}.npy") for column in _columns(specification)}
    except Exception:  # NumPy's reader fails in many ways on damaged bytes; all of them mean: decode again
        return None
    return columns if _consistent(specification, columns) else None


def _writable_folder() -> Path:
    """Where decoded arrays go: the cache folder, or a private temporary one if that cannot be written."""
    folder = cache_folder() / "decoded"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _private_temporary_folder()
    return folder if os.access(folder, os.W_OK | os.X_OK) else _private_temporary_folder()


def _private_temporary_folder() -> Path:
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"upfl-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    # Someone else could have made it first, to slip in data of their own.
    if not stat.S_ISDIR(state.st_mode) or (owner != "user" and (state.st_uid != owner or state.st_mode & 0o022)):
        raise DataError(f"{folder} belongs to others or is open to them: set UPFL_CACHE to a folder that you can write")
    return folder
