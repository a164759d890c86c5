"""Calibration over clients, against plain computations on pooled data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.shifts import overconfident, pooled_calibration, uneven
from tests.synthetic import World, draw, even, world
from upfl.contract import Unlabelled
from upfl.personalize.newton import newton_sums
from upfl.state import select

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("classes", [2, 7])
def test_newtons_sums_are_the_derivatives_of_the_loss(classes: int) -> None:
    rng = np.random.default_rng(classes)
    scores = torch.tensor(rng.normal(size=(3, 11, classes))).log_softmax(2)
    y = torch.tensor(rng.integers(0, classes, 11))
    thetas = torch.tensor(rng.normal(size=(3, 1 + classes)))
    shared = newton_sums(thetas, scores[:1], y)
    for fit, (theta, own) in enumerate(zip(thetas, scores, strict=True)):

        def loss(theta: Tensor, own: Tensor = own) -> Tensor:
            return torch.nn.functional.cross_entropy(theta[0] * own + theta[1:], y, reduction="sum")

        sums = {name: value[fit] for name, value in newton_sums(thetas, scores, y).items()}
        torch.testing.assert_close(sums["loss"], loss(theta))
        torch.testing.assert_close(sums["gradient"], torch.func.grad(loss)(theta))
        torch.testing.assert_close(sums["hessian"], torch.func.hessian(loss)(theta))
        torch.testing.assert_close(shared["loss"][fit], loss(theta, scores[0]))
        p = (theta[0] * own + theta[1:]).softmax(1)
        confusion = torch.zeros(classes, classes, dtype=torch.int64)
        for d, c in zip(p.argmax(1).tolist(), y.tolist(), strict=True):
            confusion[d, c] += 1
        assert torch.equal(sums["confusion"], confusion)


def all_right() -> World:
    """Every prediction is right, with room to spare: without a bound the temperature would fall for ever."""
    rng = np.random.default_rng(0)
    labels = [torch.tensor(rng.integers(0, 4, 20)) for _ in range(8)]
    logits = [3 * torch.nn.functional.one_hot(y, 4).float() for y in labels]
    return World(logits, labels, logits, labels)


def a_class_missing() -> World:
    mixes = [np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.4, 0.5, 0.0])] * 4
    rng = np.random.default_rng(0)
    drawn = [draw(rng, mix, 30, even(4), 1.5) for mix in mixes]
    logits, labels = [z for z, _ in drawn], [y for _, y in drawn]
    return World(logits, labels, logits, labels)


WORLDS: dict[str, Callable[[], World]] = {
    "shifted": lambda: overconfident(world(uneven(5, 9), uneven(5, 2)), 2.5, [1.0, 0.0, -0.5, 0.0, 0.3]),
    "timid": lambda: overconfident(world(uneven(3, 8), uneven(3, 2)), 0.2, [0.0, 0.4, 0.0]),
    "two classes": lambda: world(uneven(2, 8), uneven(2, 2)),
    "all right": all_right,
    "a class missing": a_class_missing,
    "many classes": lambda: overconfident(world(uneven(62, 8), uneven(62, 2), 60, 3.0), 2.0, [0.1] * 31 + [0.0] * 31),
}


@pytest.mark.parametrize("which", WORLDS)
def test_the_federations_calibration_is_that_of_pooled_data_and_its_mean_the_labels(which: str) -> None:
    here = WORLDS[which]()
    fitted = select(here.fit("calibrated").published.fitted, "calibration.none")
    a, b = pooled_calibration(here.logits, here.labels)
    assert float(fitted["scale"]) == pytest.approx(a, rel=2e-3)
    assert float(fitted["bias"].mean()) == pytest.approx(0, abs=1e-6)
    scores = torch.cat(here.logits).double().log_softmax(1)
    ours = (fitted["scale"] * scores + fitted["bias"]).softmax(1)
    np.testing.assert_allclose(ours, (a * scores + torch.tensor(b)).softmax(1), atol=2e-3)
    y, mean = torch.cat(here.labels), ours.mean(0)
    smoothing = 1e-4 if here.classes >= 62 else 1e-6
    # The last step was taken without asking again.
    torch.testing.assert_close(fitted["prior"], (mean + smoothing) / (1 + here.classes * smoothing), atol=1e-6, rtol=0)
    frequencies = torch.bincount(y, minlength=here.classes).double() / len(y)
    held = max(0.5, 1e-3 * len(y) if here.classes >= 62 else 0.0) * fitted["bias"]  # what draws b to 0 keeps them apart
    torch.testing.assert_close(len(y) * (mean - frequencies), -held, atol=1e-3, rtol=0)
    assert fitted["prior"].min() > 0
    assert float(fitted["prior"].sum()) == pytest.approx(1)
    confusion = torch.zeros(here.classes, here.classes).double()
    confusion.index_put_((ours.argmax(1), y), torch.tensor(1 / len(y)).double(), accumulate=True)
    torch.testing.assert_close(fitted["confusion"], confusion)


@pytest.mark.parametrize("clients", [1, 2, 6])
def test_few_clients_calibrate_nothing_and_the_diary_says_so(clients: int) -> None:
    here = overconfident(world(uneven(4, clients), uneven(4, 3)), 2.0, [2.0, 0.0, 0.0, 0.0])
    for name in ("calibrated", "label-shift", "em", "tent+label-shift"):
        personalizer, base = here.personalizer(name), here.personalizer("tent" if "tent" in name else "none")
        given = here.fit(personalizer, "calibrated")
        fitted = select(given.published.fitted, "calibration.none")
        assert (float(fitted["scale"]), fitted["bias"].tolist()) == (1, [0] * 4)
        for published in (given.published, given.without(0)):
            found = personalizer.personalize(published, Unlabelled(0, here.new_logits[0]))
            plain = base.personalize(published, Unlabelled(0, here.new_logits[0]))
            assert torch.equal(found.logits, plain.logits)
            assert torch.equal(found.predict_logits(here.new_logits[1]), plain.predict_logits(here.new_logits[1]))
            assert "too few" in found.diary.decision
            assert "too few" in found.diary.no_accuracy
            assert found.diary.accuracy == []
            assert found.diary.mix_error is None


def test_predictions_that_mislead_are_calibrated_to_the_label_frequencies() -> None:
    """Where a larger score means a smaller probability, the best a >= 0 is nearly none, and b does all."""
    rng = np.random.default_rng(0)
    labels = [torch.tensor(rng.choice(3, 40, p=[0.6, 0.3, 0.1])) for _ in range(8)]
    logits = [-2 * torch.nn.functional.one_hot(y, 3).float() + 0.3 * torch.randn(40, 3) for y in labels]
    here = World(logits, labels, logits, labels)
    fitted = select(here.fit("calibrated").published.fitted, "calibration.none")
    assert 0 < float(fitted["scale"]) < 0.05
    frequencies = torch.bincount(torch.cat(labels), minlength=3) / 320
    np.testing.assert_allclose(fitted["prior"], frequencies, atol=0.02)


def test_calibration_lowers_the_loss_of_new_clients(shifted: World) -> None:
    fitted = select(shifted.fit("calibrated").published.fitted, "calibration.none")
    z, y = torch.cat(shifted.new_logits).double(), torch.cat(shifted.new_labels)
    raw = torch.nn.functional.cross_entropy(z, y)
    calibrated = torch.nn.functional.cross_entropy(fitted["scale"] * z + fitted["bias"], y)
    assert calibrated < raw - 0.2
    assert float(fitted["scale"]) == pytest.approx(1 / 2.5, rel=0.3)
