"""Personalizers on a small trained state."""

import math
from typing import Any

from torch import Tensor

from tests.helpers.params import Params, doubled
from tests.reference import CLASSES, Case
from upfl.contract import Personalized, Published, Task, Training, Unlabelled
from upfl.methods import PERSONALIZERS, make_personalizer
from upfl.randomness import generator
from upfl.state import select
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.fedtta import FedTTA, FedTTAHyper


def fedavg(case: Case, **hyper: Any) -> FedAvg:
    return FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(**hyper))


def fedtta(case: Case, **hyper: Any) -> FedTTA:
    return FedTTA(Task(case.model, CLASSES, 3), FedTTAHyper(**hyper))


def publish(training: Training[Any], round: int, phi_scale: float = 1.0, psi_scale: float = 1.0) -> Published:
    """An untrained model, with its parts scaled so that a case is what it says."""
    state = training.init(generator(7))
    scaled = {name: value * (phi_scale if name.startswith("phi.") else psi_scale) for name, value in state.items()}
    return Published(training.publish(scaled), round)


def personalize(name: str, training: Training[Any], published: Published, x: Tensor, **hyper: Any) -> Personalized:
    personalizer = make_personalizer(name, training, PERSONALIZERS[name].Hyper(**hyper))
    return personalizer.personalize(published, Unlabelled(0, x))


def psi_of(published: Published) -> Params:
    return doubled(select(published.state, "psi"))


def assert_logits(ours: Tensor, expected: Tensor, before: Tensor) -> None:
    """The step's effect, not only the logits that it hardly moves, agrees."""
    moved = (expected - before).norm()
    assert moved > 0.01 * before.norm() / math.sqrt(len(before)), "the step does nothing"
    assert (ours.double() - expected).norm() < 1e-4 * moved
