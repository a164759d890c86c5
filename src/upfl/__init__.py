"""upfl: a model of its own for every unlabelled newcomer of a federation."""

__version__ = "0.1.0"

from upfl.api import Run, accuracy, resume, train
from upfl.config import Config, configure
from upfl.data import Federation, Partition, build_federation
from upfl.personalize.base import Personalized, Unlabelled

__all__ = [
    "Config",
    "Federation",
    "Partition",
    "Personalized",
    "Run",
    "Unlabelled",
    "__version__",
    "accuracy",
    "build_federation",
    "configure",
    "resume",
    "train",
]
