"""With what a run was made: versions, the commit, the machine's kind. It explains a result and takes no part in it."""

import importlib.metadata
import os
import platform
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import upfl
from upfl.models import compiled

UNKNOWN = "unknown"


def environment() -> dict[str, Any]:
    return {
        "upfl": upfl.__version__,
        "commit": commit(Path(upfl.__file__).parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def numba() -> str | None:
    """The version that training's loops are compiled with, if it is there (`models/compiled.py`)."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("numba") if compiled.installed() else None
    return None


def commit(root: Path) -> str:
    """The commit that the checkout in `root` is at, read from its files: git itself need not be there.

    An installed package has no checkout around it (`root` is then a folder of the interpreter): unknown.
    """
    try:
        if not (root / "src" / "upfl" / "__init__.py").is_file():
            return UNKNOWN
        git = root / ".git"
        if git.is_file():  # a worktree: the file names its folder
            git = root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _checked(head)
        name = head.removeprefix("ref:").strip()
        common = git / "commondir"
        shared = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
        for folder in (git, shared):
            if (folder / name).is_file():
                return _checked((folder / name).read_text(encoding="utf-8").strip())
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
        return _checked(next((line.split()[0] for line in packed if line.endswith(f" {name}")), ""))
    except (OSError, UnicodeDecodeError):
        return UNKNOWN


def _checked(text: str) -> str:
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else UNKNOWN
