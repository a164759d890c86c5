"""No personalization."""

import pytest
import torch

from tests.helpers.personalize import fedavg, fedtta, personalize, publish
from tests.reference import CASES, Case, forward_mlp
from upfl.state import State, select

pytestmark = pytest.mark.usefixtures("one_thread")


def test_none_returns_the_published_models_logits(case: Case) -> None:
    training = fedavg(case)
    published = publish(training, 5)
    x = case.x(600, 1, torch.float32)
    personalized = personalize("none", training, published, x)
    expected = case.forward(select(published.state, "psi"), x)
    torch.testing.assert_close(personalized.logits, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(personalized.before, expected, rtol=1e-5, atol=1e-6)
    assert personalized.diary.steps == 0


def test_logits_before_and_after_are_the_clients_own_in_order() -> None:
    case = CASES["mlp"]
    training = fedtta(case, inner_lr=0.5)
    published = publish(training, 0)
    x = case.x(300, 1, torch.float32)
    personalized = personalize("one-step", training, published, x)
    alone: State = select(published.state, "psi")
    torch.testing.assert_close(personalized.before[270:], forward_mlp(alone, x[270:]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(personalized.logits[270:], personalized.predict_logits(x[270:]), rtol=1e-4, atol=1e-5)
    assert torch.equal(personalized.predict(x), personalized.logits.argmax(1))
