"""Checks for models and methods of one's own: what this project's suite asks of its own, for anybody's plugin.

    from upfl.testing import check_model, check_personalizer, check_training

    check_model(MyNet, shape=(3, 32, 32), classes=10)
    check_training("my-training", model="resnet8")
    check_personalizer("my-personalizer", training="fedavg")

Each runs in seconds, on scikit-learn's digits where it needs data, and raises `CheckError`, which says what does not
hold. They find what breaks a federation: bits that depend on what was done before, state that changes under one's
hands, labels that leak. Whether a method is right, only a comparison with something independent can tell.
"""

from upfl.testing.models import check_model
from upfl.testing.parts import CheckError
from upfl.testing.personalizers import PERSONALIZER_CHECKS, check_personalizer
from upfl.testing.trainings import TRAINING_CHECKS, check_training

__all__ = [
    "PERSONALIZER_CHECKS",
    "TRAINING_CHECKS",
    "CheckError",
    "check_model",
    "check_personalizer",
    "check_training",
]
