"""No personalization."""

import pytest
import torch

from tests.helpers.personalize import fedavg, personalize, publish
from tests.reference import Case
from upfl.state import select

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
