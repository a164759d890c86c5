"""Estimated accuracy and how far it can be relied upon."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.shifts import overconfident, uneven
from tests.synthetic import World, world
from upfl.contract import CrossFitted, Unlabelled
from upfl.personalize.estimate import estimates
from upfl.state import select

pytestmark = pytest.mark.usefixtures("alone")


def test_the_interval_covers_the_accuracy_of_calibrated_predictions() -> None:
    """Labels are drawn from the posteriors themselves, so that these are right by construction."""
    rng = np.random.default_rng(0)
    covered = np.zeros(2)
    trials = 600
    for _ in range(trials):
        z = torch.tensor(rng.normal(0, 1.5, (60, 5)))
        posterior = z.softmax(1)
        y = torch.multinomial(posterior, 1, generator=torch.Generator().manual_seed(int(rng.integers(2**31))))[:, 0]
        before = z + torch.tensor([2.0, 0, 0, 0, 0])
        for k, (estimate, d) in enumerate(zip(estimates(before, posterior, {}), (before, z), strict=True)):
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
            covered[k] += estimate.low <= float((d.argmax(1) == y).double().mean()) <= estimate.high
    assert (covered / trials > 0.92).all()
    assert (covered / trials < 0.985).all()


def test_posteriors_that_rounding_took_past_one_are_certain() -> None:
    posterior = torch.tensor([[1 + 2**-52, 0.0]]).double().repeat(3, 1)
    assert all((one.value, one.low, one.high) == (1, 1, 1) for one in estimates(posterior, posterior, {}))


def test_reliability_is_the_mean_and_the_scatter_of_the_clients_errors(shifted: World, fits: CrossFitted) -> None:
    personalizer = shifted.personalizer("label-shift")
    errors, variances = [], []
    for i, (x, y) in enumerate(zip(shifted.logits, shifted.labels, strict=True)):
        found = personalizer.personalize(fits.without(i), Unlabelled(i, x))
        r = found.logits.double().softmax(1)
        predicted = torch.stack([found.before.argmax(1), r.argmax(1)])
        right = r[torch.arange(len(y)), predicted]
        errors.append((right.mean(1) - (predicted == y).double().mean(1)).numpy())
        variances.append((right * (1 - right)).mean(1).numpy() / len(y))
    known = select(fits.published.fitted, "reliability.label-shift")
    np.testing.assert_allclose(known["offset"], np.mean(errors, 0), atol=1e-6)
    excess = np.mean(np.square(errors) - variances, 0) - np.mean(errors, 0) ** 2
    np.testing.assert_allclose(known["scatter"], excess.clip(0), atol=1e-6)


@pytest.mark.parametrize("name", ["calibrated", "label-shift"])
def test_new_clients_accuracy_is_within_the_estimated_interval_mostly(name: str) -> None:
    here = overconfident(world(uneven(4, 25), uneven(4, 60, 1), 40, 1.2), 2.0, [0.5, 0.0, 0.0, 0.0])
    personalizer = here.personalizer(name)
    fitted = here.fit(personalizer)
    inside, off = [], []
    for i, (x, y) in enumerate(zip(here.new_logits, here.new_labels, strict=True)):
        found = personalizer.personalize(fitted.published, Unlabelled(i, x))
        for estimate, logits in zip(found.diary.accuracy, (found.before, found.logits), strict=True):
            truth = float((logits.argmax(1) == y).double().mean())
            inside.append(estimate.low <= truth <= estimate.high)
            off.append(estimate.value - truth)
    assert np.mean(inside) > 0.88
    assert abs(np.mean(off)) < 0.03
