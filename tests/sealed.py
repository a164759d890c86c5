"""Bundles that somebody changed, with checksums that fit again: whoever changes one can write these, too."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from upfl.state import State


def resealed(folder: Path) -> Path:
    names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return resealed(folder)


def retensored(folder: Path, change: Callable[[State], Any], file: str = "weights.safetensors") -> Path:
    state = load_file(folder / file)
    change(state)
    save_file(state, folder / file, {"order": json.dumps(list(state))})
    return resealed(folder)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change
