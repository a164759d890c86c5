"""Data sets of one's own, added once and known by name from then on: arrays in the cache folder, and a `source.toml`.

    NAME/source.toml     what the samples are; `digest` is that of the arrays
    NAME/x.npy           samples as their form keeps them
    NAME/labels.npy      -1 where there is none
    NAME/groups.npy, clients.npy, newcomers.npy    each sample's client, their names, which of them are newcomers

A data set is written beside its place and renamed into it: there is a whole one or none.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from upfl.data.cache import cache_folder, open_array, rename_unless_there, save_array
from upfl.data.catalog import CATALOG
from upfl.data.draft import CLASSES, Digest, Draft, placed
from upfl.data.forms import Form
from upfl.data.source import Source
from upfl.errors import DataError
from upfl.suggest import unknown

FILE = "source.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
COLUMNS = ("labels", "groups", "clients", "newcomers")


class About(BaseModel):
    """What a data set of one's own is: `source.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(max_length=64)
    classes: tuple[str, ...] = Field(min_length=1, max_length=CLASSES)
    samples: int = Field(0, ge=0)
    clients: int = Field(0, ge=0, description="that the samples name; 0 where a partition deals them out")
    newcomers: int | None = Field(None, ge=0, description="clients that are newcomers, where the data say so")
    unlabelled: int = Field(0, ge=0, description="samples without a label")
    digest: str = ""
    input: Form


def folder_of(name: str) -> Path:
    return cache_folder() / "own" / name


def names() -> tuple[str, ...]:
    """The data sets that were added, in order."""
    folder = cache_folder() / "own"
    if not folder.is_dir():
        return ()
    return tuple(
        sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / FILE).is_file())
    )


def require_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise DataError(f"{name!r}: a data set's name has letters, digits and _ . - only, 64 at most")
    if name in CATALOG or name == "digits":
        raise DataError(f"{name}: is a data set of upfl's own; choose another name")
    return name


def about(name: str) -> About:
    """What a data set is, without its samples."""
    path = folder_of(name) / FILE
    try:
        return About(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise DataError(f"{path}: damaged ({first}); `upfl data remove {name}` and add it anew") from error
        raise unknown("data set", name, (*CATALOG, "digits", *names())) from None


def load(name: str) -> Source:
    """A data set that was added, its arrays mapped into memory."""
    told, folder = about(name), folder_of(name)
    arrays: dict[str, NDArray[Any]] = {}
    for column in ("x", *COLUMNS):
        if column in ("x", "labels") or (folder / f"{column}.npy").exists():
            try:
                arrays[column] = open_array(folder / f"{column}.npy")
            except Exception as error:  # NumPy's reader fails in many ways on damaged bytes
                raise _damaged(name, folder / f"{column}.npy", error) from error
    x, labels = arrays["x"], arrays["labels"]
    good = x.shape == (told.samples, *told.input.shape) and x.dtype == told.input.dtype
    good &= labels.shape == (told.samples,) and labels.dtype == np.int64
    good &= ("groups" in arrays) == ("clients" in arrays) == (told.clients > 0)
    if "groups" in arrays:
        good &= arrays["groups"].shape == (told.samples,) and arrays["groups"].dtype == np.int64
        good &= arrays["clients"].shape == (told.clients,)
    if "newcomers" in arrays:
        good &= arrays["newcomers"].shape == (told.clients,) and arrays["newcomers"].dtype == np.bool_
    if not good:
        raise _damaged(name, folder, "its arrays do not fit together")
    return Source(
        name=name,
        x=x,
        labels=labels,
        class_names=told.classes,
        train_count=told.samples,
        groups=arrays.get("groups"),
        form=told.input,
        clients=arrays.get("clients"),
        newcomers=arrays.get("newcomers"),
        digest=told.digest,
    )


def _damaged(name: str, path: Path, error: object) -> DataError:
    return DataError(f"{path}: damaged ({error}); `upfl data remove {name}` and add it anew")


def check(name: str) -> None:
    """Read all of a data set again and compare it with its digest."""
    source, told = load(name), about(name)
    digest, low, high = Digest(told.input, told.classes), source.labels.min(), source.labels.max()
    for column in (*COLUMNS, "x"):
        digest.update(getattr(source, column))
    if str(digest) != told.digest or not -1 <= low <= high < len(told.classes):
        raise _damaged(name, folder_of(name), "its content is not what was added")


def add(draft: Draft, name: str, progress: Callable[[int], None] = lambda done: None) -> About:
    """Keep what a reader has found under a name. The samples are read now, a part at a time."""
    require_name(name)
    target = folder_of(name)
    with _complete(target) as folder:
        digest = Digest(draft.form, draft.class_names)
        for column in COLUMNS:
            if (values := getattr(draft, column)) is not None:
                save_array(folder / f"{column}.npy", values)
                digest.update(values)
        shape = (len(draft), *draft.form.shape)
        x = np.lib.format.open_memmap(folder / "x.npy", "w+", draft.form.dtype, shape)
        for start, part in placed(draft.parts(), len(draft)):
            x[start : start + len(part)] = part
            digest.update(part)
            progress(start + len(part))
        x.flush()
        del x
        told = About(
            name=name,
            classes=draft.class_names,
            samples=len(draft),
            clients=0 if draft.clients is None else len(draft.clients),
            newcomers=None if draft.newcomers is None else int(draft.newcomers.sum()),
            unlabelled=int((draft.labels < 0).sum()),
            digest=str(digest),
            input=draft.form,
        )
        with (folder / FILE).open("wb") as file:
            tomli_w.dump(told.model_dump(mode="json", exclude_none=True), file)
            file.flush()
            os.fsync(file.fileno())
    return told


def keep(source: Source) -> str:
    """Add a data set that is in memory, unless it is there already; returns its name."""
    if source.name in names() and about(source.name).digest == source.digest:
        return source.name
    draft = Draft(
        source.form,
        source.labels,
        source.class_names,
        lambda: iter([source.x]),
        source.groups,
        source.clients,
        source.newcomers,
    )
    add(draft, source.name)
    return source.name


def remove(name: str) -> None:
    about_any = folder_of(require_name(name))
    if not about_any.is_dir():
        raise unknown("data set", name, names())
    gone = about_any.with_name(f".{name}-removed-{os.getpid()}")
    try:
        about_any.rename(gone)  # in one step: it is there or it is not
        shutil.rmtree(gone)
    except OSError as error:
        raise DataError(f"{about_any}: cannot be removed: {error.strerror}") from error


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """A folder that takes its place when it is complete; what does not get so far leaves nothing behind."""
    if target.exists():
        raise DataError(f"{target.name}: there is a data set of this name; `upfl data remove {target.name}` removes it")
    beside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        beside.mkdir()
        try:
            yield beside
            if not rename_unless_there(beside, target):
                raise DataError(f"{target.name}: another process has added a data set of this name meanwhile")
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error


def _sweep(target: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for path in target.parent.glob(f".{target.name}-*"):
        owner = path.name.rpartition("-")[2]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
