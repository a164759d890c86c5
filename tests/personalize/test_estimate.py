"""Estimated accuracy and how far it can be relied upon."""

import numpy as np
import pytest
import scipy.stats
import torch

from tests.helpers.shifts import overconfident, uneven
from tests.synthetic import World, pairs, world
from upfl.contract import CrossFitted, Unlabelled
from upfl.personalize.estimate import estimates, student, thinness, total_variation
from upfl.state import select

pytestmark = pytest.mark.usefixtures("alone")

CERTAIN = {
    "offset": torch.zeros(3, 2),
    "scatter": torch.zeros(3, 2),
    "mixed": torch.zeros(3, 2),
    "clients": torch.full((3,), 1000),
    "few": torch.tensor(0),
    "size": torch.tensor(60.0),
}


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
        for k, (estimate, d) in enumerate(zip(estimates(before, z, posterior, CERTAIN), (before, z), strict=True)):
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
            covered[k] += estimate.low <= float((d.argmax(1) == y).double().mean()) <= estimate.high
    assert (covered / trials > 0.92).all()


def test_posteriors_that_rounding_took_past_one_are_no_more_than_certain() -> None:
    posterior = torch.tensor([[1 + 2**-52, 0.0]]).double().repeat(3, 1)
    assert all((one.value, one.high) == (1, 1) for one in estimates(posterior, posterior, posterior, CERTAIN))


def test_a_single_sample_has_an_interval_that_says_nothing() -> None:
    posterior = torch.tensor([[1.0, 0.0]]).double()
    assert all((one.low, one.high) == (0, 1) for one in estimates(posterior, posterior, posterior, CERTAIN))
    widths = [estimates(p := posterior.repeat(n, 1), p, p, CERTAIN)[1].low for n in (3, 10, 100, 1000)]
    assert widths == sorted(widths)
    assert widths[-1] > 0.99


def test_predictions_that_did_not_change_have_one_accuracy() -> None:
    posterior = torch.tensor([[0.8, 0.2]]).double().repeat(50, 1)
    known = CERTAIN | {"offset": torch.tensor([[-0.1, 0.1]] * 3), "scatter": torch.tensor([[0.01, 0.0]] * 3)}
    before, after = estimates(3 * posterior, posterior, posterior, known)
    assert before == after
    before, after = estimates(-posterior, posterior, posterior, known)
    assert before.value == pytest.approx(0.1)
    assert after.value == pytest.approx(0.9)


def test_few_clients_estimate_nothing() -> None:
    posterior = torch.tensor([[1.0, 0.0]]).double().repeat(50, 1)
    assert estimates(posterior, posterior, posterior, CERTAIN | {"few": torch.tensor(1)}) == []


def test_students_quantile() -> None:
    for freedom in (6, 9, 19, 49, 1000):
        assert student(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), abs=2e-3)


def test_reliability_is_the_offset_and_the_components_of_the_clients_errors(shifted: World, fits: CrossFitted) -> None:
    personalizer = shifted.personalizer("label-shift")
    errors, mixed = [], []
    for i, (x, y) in enumerate(zip(shifted.logits, shifted.labels, strict=True)):
        found = personalizer.personalize(fits.without(i), Unlabelled(i, x))
        r = found.logits.double().softmax(1)
        predicted = torch.stack([found.before.argmax(1), r.argmax(1)])
        errors.append(((predicted == y).double() - r[torch.arange(len(y)), predicted]).numpy())
        truth = torch.bincount(y, minlength=shifted.classes) / len(y)
        mixed.append(len(y) * float(total_variation(r.mean(0), truth)))
    known = select(fits.published.fitted, "reliability.label-shift")
    sizes = np.array([one.shape[1] for one in errors])
    n, k = sizes.sum(), len(sizes)
    offset = np.concatenate(errors, 1).mean(1)
    within = (sum(((one - one.mean(1, keepdims=True)) ** 2).sum(1) for one in errors) + 2) / (n - k + 4)
    between = sum(size * (one.mean(1) - offset) ** 2 for size, one in zip(sizes, errors, strict=True))
    size = n - (sizes**2).sum() / n
    between = ((between - (k - 1) * within) / size).clip(0)
    between += np.sqrt(2 / (k - 1)) * (between + (k - 1) * within / size)
    np.testing.assert_allclose(known["offset"][-1], offset, atol=1e-6)
    np.testing.assert_allclose(
        known["scatter"][-1], between * (1 + (sizes**2).sum() / n**2) + within / n, rtol=1e-3, atol=1e-6
    )
    assert float(known["mixed"][-1, 0]) == pytest.approx(sum(mixed) / n, abs=1e-4)
    assert float(known["size"]) == pytest.approx(sizes.mean())


@pytest.mark.parametrize(
    ("samples", "players", "level"),
    [(3, 9, 0), (5, 9, 0), (19, 9, 0), (20, 9, 1), (59, 9, 1), (60, 9, 2), (600, 9, 2), (3, 6, 1), (30, 6, 1)],
)
def test_a_newcomer_is_judged_as_training_clients_with_as_few_samples(samples: int, players: int, level: int) -> None:
    known = CERTAIN | {"scatter": torch.tensor([[0.03, 0.03], [0.02, 0.02], [0.01, 0.01]]).double()}
    known |= {"clients": torch.tensor([players, 9, 9])}
    posterior = torch.tensor([[0.5, 0.5]]).double().repeat(samples, 1)
    found = estimates(posterior, posterior, posterior, known)[0]
    own = (0.25 * samples + 2) / (samples + 4) / samples
    assert found.high == pytest.approx(min(0.5 + student(8) * (own + 0.03 - 0.01 * level) ** 0.5, 1))
    assert thinness(known, samples) == pytest.approx(3 - level)


def test_few_samples_of_a_weak_model_are_told_so() -> None:
    """Training clients have 90 samples each. With 20 a newcomer's class mix, and so its posteriors, are further off."""
    here = world(pairs(6, 30), pairs(6, 60), 90, 1.2)
    personalizer = here.personalizer("label-shift")
    fitted = here.fit(personalizer)
    inside, told, off = [], [], []
    for i, (x, y) in enumerate(zip(here.new_logits, here.new_labels, strict=True)):
        found = personalizer.personalize(fitted.published, Unlabelled(i, x[:20]))
        estimate = found.diary.accuracy[1]
        right = float((found.logits.argmax(1) == y[:20]).double().mean())
        inside.append(estimate.low <= right <= estimate.high)
        truth = torch.bincount(y[:20], minlength=here.classes) / 20
        off.append(float(total_variation(torch.tensor(found.diary.mix), truth)))
        told.append(found.diary.mix_error or 0.0)
    assert np.mean(inside) >= 0.9
    assert np.mean(told) == pytest.approx(np.mean(off), rel=0.35)


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
