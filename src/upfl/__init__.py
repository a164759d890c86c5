"""upfl: a model of its own for every unlabelled newcomer of a federation."""

__version__ = "0.1.0"

from upfl.api import Run, accuracy, resume, train
from upfl.bundle import Bundle, PersonalModel, export
from upfl.config import Config, configure
from upfl.data import Federation, Partition, build_federation
from upfl.personalize.base import Personalized, Unlabelled

__all__ = [
    "Bundle",
    "Config",
    "Federation",
    "Partition",
    "PersonalModel",
    "Personalized",
    "Run",
    "Unlabelled",
    "__version__",
    "accuracy",
    "build_federation",
    "configure",
    "export",
    "resume",
    "train",
]
