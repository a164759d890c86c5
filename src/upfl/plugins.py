"""Modules of a user's own, that register methods and models: named by the user, never by a file.

The command line imports those that `--plugin` and the environment variable UPFL_PLUGINS name. Worker processes import
what their parent knows.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from upfl.errors import ConfigError

_known: dict[str, None] = {}  # modules that registered something, or that the user named


def note(module: str) -> None:
    """Have worker processes import a module."""
    _known[module] = None


def load(modules: Iterable[str]) -> None:
    """Import modules that the user named, from the current folder, too."""
    for module in modules:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)  # where `python -m` would find them, too
        try:
            importlib.import_module(module)
        except ImportError as error:
            where = f"--plugin, UPFL_PLUGINS, or --model {module}:FACTORY"
            raise ConfigError(f"plugin '{module}' ({where}) cannot be imported: {error}") from error
        note(module)


def from_environment() -> list[str]:
    return [name for name in os.environ.get("UPFL_PLUGINS", "").split(",") if name]


def named(module: str) -> ModuleType | None:
    """A module that the user named; None for all others, even if they are imported."""
    return sys.modules.get(module) if module in _known else None


def for_workers() -> list[str]:
    """The modules that a worker process must import to know the same methods and models."""
    if "__main__" in _known:
        raise ConfigError(
            "a method or a model that is defined in the script itself cannot reach worker processes: "
            "move it to a module of its own, or take workers=1"
        )
    return list(_known)
