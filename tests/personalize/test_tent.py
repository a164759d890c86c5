"""TENT: entropy minimisation against plain autograd."""

import math
from typing import Any

import pytest
import torch

from tests.helpers.params import difference, distance
from tests.helpers.personalize import assert_logits, fedavg, personalize, psi_of, publish
from tests.reference import CASES, Case, entropy_step
from upfl.contract import Published
from upfl.errors import ConfigError
from upfl.randomness import generator

pytestmark = pytest.mark.usefixtures("one_thread")


HYPERS = [{}, {"steps": 3}, {"clip": 0.01}, {"weight_decay": 0.05}, {"lr": 0.7}, {"parameters": "last"}]


@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize("n", [1, 20, 600])
def test_tent_descends_the_mean_entropy_in_bits(case: Case, n: int, hyper: dict[str, Any]) -> None:
    training = fedavg(case, lr=0.9)
    published = publish(training, 33, psi_scale=3.0)
    x = case.x(n, 1)
    psi = psi_of(published)
    rate = (hyper.get("lr") or 0.9) * (1 if "lr" in hyper else 0.99**3.3)
    decay, clip = hyper.get("weight_decay", 1e-4), hyper.get("clip", 10.0)
    only = ("fc3" if case is CASES["mlp"] else "fc2") if "parameters" in hyper else ""
    adapted = psi
    for _ in range(hyper.get("steps", 1)):
        adapted = entropy_step(case.forward, adapted, x, rate, decay, clip, only)
    personalized = personalize("tent", training, published, x.float(), **hyper)
    before, expected = case.forward(psi, x), case.forward(adapted, x)
    assert (personalized.logits.double() - expected).norm() < 1e-3 * (expected - before).norm() + 1e-6
    assert personalized.diary.steps == hyper.get("steps", 1)


def test_tents_gradient_is_clipped_to_ten_by_default() -> None:
    """Large features and a last layer small enough for soft predictions: the entropy is steep."""
    case = CASES["mlp"]
    training = fedavg(case, lr=0.01)
    factors = {"fc1": 20.0, "fc2": 20.0, "fc3": 0.02}
    state = training.init(generator(7))
    published = Published({name: value * factors[name.split(".")[1]] for name, value in state.items()}, 0)
    x, psi = case.x(30, 1), psi_of(published)
    clipped = entropy_step(case.forward, psi, x, 0.01, 1e-4, 10.0)
    unclipped = entropy_step(case.forward, psi, x, 0.01, 1e-4, math.inf)
    assert distance(difference(clipped, psi), difference(unclipped, psi)) > 0.1, "the case does not clip"
    personalized = personalize("tent", training, published, x.float())
    assert_logits(personalized.logits, case.forward(clipped, x), case.forward(psi, x))


def test_tent_with_no_step_is_no_personalization(case: Case) -> None:
    training = fedavg(case)
    x = case.x(20, 1, torch.float32)
    personalized = personalize("tent", training, publish(training, 0), x, steps=0)
    assert torch.equal(personalized.logits, personalized.before)


def test_tent_says_that_there_are_no_normalisation_layers_to_adapt(case: Case) -> None:
    training = fedavg(case)
    with pytest.raises(ConfigError, match="norm"):
        personalize("tent", training, publish(training, 0), case.x(3, 1, torch.float32), parameters="norm")
