"""Newcomers with a class mix of their own."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.synthetic import Floats, World, draw, even
from upfl.contract import Personalized, Unlabelled
from upfl.state import select

STRENGTHS = (0.15, 0.5, 1.5, 5, 15, 50, 150, 500, 1500)  # the method card's


def calibrated_as(classes: int, scale: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """A calibration and a gate without limits, as they are published."""
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 0.3, classes)
    pi = rng.dirichlet(np.full(classes, 4.0))
    confusion = 0.7 * np.diag(pi) + 0.3 * np.outer(even(classes), pi)
    calibration = {"scale": scale, "bias": bias - bias.mean(), "prior": pi, "confusion": confusion}
    calibration |= {"clients": 20, "labels": 200, "few": 0}
    return {f"calibration.none.{name}": torch.tensor(value).double() for name, value in calibration.items()} | {
        "gate.label-shift.menu": torch.tensor(0)
    }


def posterior_of(logits: Tensor, fitted: dict[str, Tensor]) -> tuple[Floats, Floats]:
    """softmax(Z / T + b), and pi."""
    known = select(fitted, "calibration.none")
    p = (known["scale"] * logits.double() + known["bias"]).softmax(1)
    return p.numpy(), known["prior"].numpy()


def newcomer(classes: int = 4, samples: int = 25, seed: int = 1) -> Tensor:
    mix = np.array([0.8, 0.2, *[0.0] * (classes - 2)])
    return draw(np.random.default_rng(seed), mix, samples, even(classes), 1.5)[0]


def only_new(x: Tensor) -> World:
    y = torch.zeros(len(x), dtype=torch.int64)
    return World([x], [y], [x], [y])


def personalize(name: str, x: Tensor, fitted: dict[str, Tensor], **hyper: Any) -> Personalized:
    here = only_new(x)
    return here.personalizer(name, **hyper).personalize(here.published(**fitted), Unlabelled(0, x))
