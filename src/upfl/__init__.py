"""upfl: a model of its own for every unlabelled newcomer of a federation.

Names are imported when they are first used. PyTorch takes seconds to import, and the command line must answer to
Ctrl-C from the start.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from upfl.api import Run, accuracy, resume, train
    from upfl.bundle import Bundle, PersonalModel, export
    from upfl.config import Config, configure
    from upfl.contract import Personalized, Unlabelled
    from upfl.data import Federation, Partition, Source, build_federation

__all__ = [
    "Bundle",
    "Config",
    "Federation",
    "Partition",
    "PersonalModel",
    "Personalized",
    "Run",
    "Source",
    "Unlabelled",
    "__version__",
    "accuracy",
    "build_federation",
    "configure",
    "export",
    "resume",
    "train",
]

_MODULES = {
    "api": ("Run", "accuracy", "resume", "train"),
    "bundle": ("Bundle", "PersonalModel", "export"),
    "config": ("Config", "configure"),
    "data": ("Federation", "Partition", "Source", "build_federation"),
    "contract": ("Personalized", "Unlabelled"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"upfl.{module}"), name)
    if find_spec(f"upfl.{name}"):
        return import_module(f"upfl.{name}")
    raise AttributeError(f"module 'upfl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
