"""A bundle's folder, or a .zip of it, put in its place in one step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from upfl.bundle.manifest import CARD, MANIFEST, SUMS, WEIGHTS, Manifest, member_file
from upfl.bundle.read import check_finite, digest
from upfl.errors import BundleError, ConfigError
from upfl.safe import tensors as stored
from upfl.safe.archive import pack
from upfl.safe.folder import Folder, expanded
from upfl.state import State


def require_new(out: str | Path) -> Path:
    """The folder for a bundle, if there is nothing there yet."""
    target = expanded(out)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: is there already; choose another folder")
    except OSError as error:
        raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def write_folder(out: str | Path, manifest: Manifest, state: State, members: Sequence[State], card: str) -> None:
    """Put a complete bundle in its place, in one step."""
    target = require_new(out)
    check_finite(state, WEIGHTS)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".upfl-", dir=target.parent) as temporary:
            (Path(temporary) / "bundle").mkdir()
            folder = Folder(Path(temporary) / "bundle", BundleError, BundleError)
            folder.write(MANIFEST, manifest.to_json().encode())
            folder.write(CARD, card.encode())
            stored.save(folder, WEIGHTS, state, {}, sealed=False)
            for i in range(len(members)):
                stored.save(folder, member_file(i), members[i], {}, sealed=False)
            sums = [f"{digest(folder, name)}  {name}\n" for name in manifest.files()]
            folder.write(SUMS, "".join(sums).encode())
            if target.suffix == ".zip":
                pack(folder.path, Path(temporary) / target.name)
                (Path(temporary) / target.name).rename(target)
            else:
                folder.path.rename(target)
    except OSError as error:
        raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error
