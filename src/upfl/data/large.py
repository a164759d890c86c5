"""Federations of very many clients: who holds what is worked out once, kept beside the data set, mapped into memory.

Every worker then reads the same pages, and a run starts without going through a million clients. The folder is named
by all that the result follows from: the data's digest, the partition, the seed. `upfl data remove` removes it, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upfl.data.cache import open_array, rename_unless_there, save_array
from upfl.data.federation import ROLES, Clients, Federation, build_federation
from upfl.data.forms import Vectors
from upfl.data.kept import folder_of
from upfl.data.partition import Partition
from upfl.data.source import Source

MANY = 20_000  # clients from which on it pays
VERSION = 1  # raise it when partitions change
FACTS = "facts.json"


def federation_of(source: Source, partition: Partition, seed: int, architectures: Iterable[str] = ()) -> Federation:
    """As `build_federation`; of many clients of data of one's own, kept for the next time."""
    if partition.clients < MANY or not source.digest:
        return build_federation(source, partition, seed, architectures)
    described = repr((VERSION, source.digest, partition.model_dump_json(), seed))
    folder = folder_of(source.name) / "federations" / hashlib.sha256(described.encode()).hexdigest()[:24]
    if (found := _opened(folder, source, seed)) is None:
        _keep(folder, build_federation(source, partition, seed))
        found = _opened(folder, source, seed)
    built = found or build_federation(source, partition, seed)  # where nothing can be written
    return replace(built, architectures=tuple(architectures))


def _arrays(federation: Federation) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {"public": federation.public}
    for role in ROLES:
        clients: Clients = getattr(federation, role)
        arrays |= {f"{role}.{field.name}": getattr(clients, field.name) for field in fields(Clients)}
        if role in federation.named:
            arrays[f"{role}.named"] = federation.named[role]
    return arrays


def _keep(folder: Path, federation: Federation) -> None:
    form, beside = federation.source.form, folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
    except OSError:  # not ours to write: whoever asks again will work it out again
        return
    try:
        arrays = _arrays(federation)
        for name, values in arrays.items():
            save_array(beside / f"{name}.npy", values)
        facts: dict[str, Any] = {"notes": federation.notes, "arrays": list(arrays)}
        if isinstance(form, Vectors):
            facts |= {"mean": form.mean, "std": form.std}
        (beside / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been opened
        rename_unless_there(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _opened(folder: Path, source: Source, seed: int) -> Federation | None:
    """What was kept; none where nothing was, or it is damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        # As plain arrays: indexing a memory-mapped one goes through Python for each client.
        arrays = {str(name): np.asarray(open_array(folder / f"{name}.npy")) for name in facts["arrays"]}
        parts = {role: Clients(*(arrays[f"{role}.{field.name}"] for field in fields(Clients))) for role in ROLES}
        form = source.form
        if isinstance(form, Vectors):
            form = form.model_copy(update={"mean": tuple(facts["mean"]), "std": tuple(facts["std"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    named = {role: arrays[f"{role}.named"] for role in ROLES if f"{role}.named" in arrays}
    notes = tuple(map(str, facts["notes"]))
    return Federation(
        replace(source, form=form), parts["training"], parts["new"], arrays["public"], notes, seed, named=named
    )
