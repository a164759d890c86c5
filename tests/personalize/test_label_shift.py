"""The whole correction for label shift, against the method card in slow loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma, gammaln

from tests.helpers.class_mix import STRENGTHS, calibrated_as, newcomer, only_new, personalize, posterior_of
from tests.helpers.shifts import accuracy, feature_shift
from tests.synthetic import Floats, World, draw, even, pairs, world
from upfl.contract import CrossFitted, Unlabelled
from upfl.errors import RunError
from upfl.personalize import class_mix, label_shift
from upfl.personalize.calibration import Calibrator
from upfl.personalize.class_mix import expectation_maximisation
from upfl.personalize.estimate import total_variation
from upfl.state import prefixed

pytestmark = pytest.mark.usefixtures("one_thread")


CORRECTIONS = ("calibrated", "label-shift", "em", "map-em", "bbse")


# The whole correction, against the method card in slow loops


def slow_label_shift(p: Floats, pi: Floats, s_min: float) -> tuple[Floats, Floats]:
    """(r, q): step 2 and 3 of the card, 60 sweeps, a sample and a class at a time."""
    n, classes = p.shape
    found: dict[float, tuple[float, Floats, Floats]] = {math.inf: (0.0, p, pi)}
    for s in (s for s in STRENGTHS if s >= s_min):
        r = p.copy()
        for _ in range(60):
            counts = r.sum(0)
            for i in range(n):
                score = [math.log(p[i, c] / pi[c]) + digamma(s * pi[c] + counts[c]) for c in range(classes)]
                weights = [math.exp(one - max(score)) for one in score]
                r[i] = [weight / sum(weights) for weight in weights]
        counts = r.sum(0)
        fit = sum(
            r[i, c] * (math.log(p[i, c] / pi[c]) - math.log(r[i, c]))
            for i in range(n)
            for c in range(classes)
            if r[i, c] > 0
        )
        prior = sum(gammaln(s * pi[c] + counts[c]) - gammaln(s * pi[c]) for c in range(classes))
        evidence = fit + prior + gammaln(s) - gammaln(s + n)
        found[s] = (float(evidence), r, (s * pi + counts) / (s + n))
    top = max(evidence for evidence, _, _ in found.values())
    total = sum(math.exp(evidence - top) for evidence, _, _ in found.values())
    averaged, q = np.zeros_like(p), np.zeros_like(pi)
    for evidence, one, mix in found.values():
        averaged += math.exp(evidence - top) / total * one
        q += math.exp(evidence - top) / total * mix
    return averaged, q


@pytest.mark.parametrize("s_min", [0.15, 1.5, 500])
@pytest.mark.parametrize("samples", [1, 7, 25])
def test_label_shift_is_the_method_cards(s_min: float, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, fitted = newcomer(samples=samples), calibrated_as(4, 0.6)
    p, pi = posterior_of(x, fitted)
    r, q = slow_label_shift(p, pi, s_min)
    ours = personalize("label-shift", x, fitted, gate=s_min)
    np.testing.assert_allclose(ours.logits.double().softmax(1), r, atol=5e-3)  # the sweeps may stop early
    monkeypatch.setattr(class_mix, "TOLERANCE", 0.0)
    ours = personalize("label-shift", x, fitted, gate=s_min)
    np.testing.assert_allclose(ours.logits.double().softmax(1), r, atol=1e-6)
    np.testing.assert_allclose(ours.diary.mix, r.mean(0), atol=1e-6)
    later = newcomer(samples=50, seed=9)
    likelihood = np.log(posterior_of(later, fitted)[0]) - np.log(pi)
    np.testing.assert_array_equal(ours.predict(later), (likelihood + np.log(q)).argmax(1))


def test_what_training_clients_justified_is_the_gate() -> None:
    x, fitted = newcomer(), calibrated_as(4)
    for menu, s_min in enumerate((*STRENGTHS, 1e9)):
        by_menu = personalize("label-shift", x, fitted | {"gate.label-shift.menu": torch.tensor(menu)})
        assert torch.equal(by_menu.logits, personalize("label-shift", x, fitted, gate=s_min).logits)


def test_a_gate_at_infinity_returns_the_calibrated_predictions() -> None:
    x, later, fitted = newcomer(), newcomer(seed=5), calibrated_as(4, 0.6)
    fitted["gate.label-shift.menu"] = torch.tensor(len(STRENGTHS))
    closed, calibrated = personalize("label-shift", x, fitted), personalize("calibrated", x, fitted)
    assert torch.equal(closed.logits, calibrated.logits)
    torch.testing.assert_close(closed.predict_logits(later), calibrated.predict_logits(later))
    expected = posterior_of(x, fitted)[0]
    np.testing.assert_allclose(closed.logits.double().softmax(1), expected, atol=1e-6)
    np.testing.assert_allclose(closed.predict_logits(x).double().softmax(1), expected, atol=1e-6)


def test_who_closed_the_gate_is_told() -> None:
    x, fitted = newcomer(), calibrated_as(4)
    by_user = personalize("label-shift", x, fitted, gate=1e9).diary.decision
    by_clients = personalize("label-shift", x, fitted | {"gate.label-shift.menu": torch.tensor(9)}).diary.decision
    assert "training clients justify no adaptation" in by_clients
    assert "training clients" not in by_user


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_equal_to_the_sources_keeps_the_predictions(seed: int) -> None:
    """r for a mix that is pi is p; and from samples of that mix the evidence finds (nearly) nothing to adapt."""
    prior = even(4)
    flat = calibrated_as(4) | {
        "calibration.none.bias": torch.zeros(4).double(),
        "calibration.none.prior": torch.tensor(prior),
    }
    x, _ = draw(np.random.default_rng(seed), prior, 300, prior, 2.0)
    p = x.double().softmax(1)
    unmoved, _ = expectation_maximisation(p.log() - torch.tensor(prior).log(), torch.tensor(prior), sweeps=0)
    torch.testing.assert_close(unmoved, p)
    ours = personalize("label-shift", x, flat)
    assert (ours.logits.argmax(1) == p.argmax(1)).double().mean() > 0.93
    np.testing.assert_allclose(ours.diary.mix, prior, atol=0.1)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_predictor_for_the_sources_own_mix_is_the_calibrated_model(name: str) -> None:
    x, fitted = newcomer(), calibrated_as(4, 0.6)
    here = only_new(x)
    personalizer = here.personalizer(name)
    published = here.published(**fitted)
    base = here.personalizer("none").personalize(published, Unlabelled(0, x))
    calibrator = Calibrator.of(published, "none")
    kept = calibrator.predictor(base.predictor, calibrator.prior)
    torch.testing.assert_close(kept.logits(x), calibrator.predictor(base.predictor).logits(x))
    np.testing.assert_allclose(kept.logits(x).double().softmax(1), posterior_of(x, fitted)[0], atol=1e-6)
    assert personalizer.personalize(published, Unlabelled(0, x)).predictor.temperature == pytest.approx(1 / 0.6)


@pytest.mark.parametrize("classes", [2, 62, 100])
@pytest.mark.parametrize("sure", [0.0, 1e4])
def test_extreme_predictions_stay_finite(classes: int, sure: float) -> None:
    x = torch.zeros(30, classes)
    x[:, 1] = sure
    for name in CORRECTIONS:
        found = personalize(name, x, calibrated_as(classes))
        assert found.logits.isfinite().all(), name
        assert found.predict_logits(x).isfinite().all(), name
        assert sum(found.diary.mix) == pytest.approx(1, abs=1e-6)


def test_a_calibration_that_was_never_fitted_is_named() -> None:
    with pytest.raises(RunError, match=r"calibration\.none.*upfl export --add"):
        personalize("label-shift", newcomer(), {})


# Expectation-maximisation


def test_map_em_goes_from_em_to_the_calibrated_model() -> None:
    x, fitted = newcomer(), calibrated_as(4)
    weak, strong = (personalize("map-em", x, fitted, strength=strength) for strength in (1e-9, 1e9))
    em, calibrated = personalize("em", x, fitted), personalize("calibrated", x, fitted)
    np.testing.assert_allclose(weak.diary.mix, em.diary.mix, atol=1e-6)
    torch.testing.assert_close(weak.logits.softmax(1), em.logits.softmax(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(strong.logits.softmax(1), calibrated.logits.softmax(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(strong.predict_logits(x), calibrated.predict_logits(x), atol=1e-5, rtol=0)


# What it is for


def test_label_shift_finds_two_of_ten_classes_and_its_mix() -> None:
    mixes = pairs(10, 10)
    here = world(mixes, mixes, samples=60, apart=1.8)
    personalizer = here.personalizer("label-shift")
    published = here.fit(personalizer).published
    before = after = 0.0
    for mix, x, y in zip(mixes, here.new_logits, here.new_labels, strict=True):
        found = personalizer.personalize(published, Unlabelled(0, x))
        before += float((found.before.argmax(1) == y).double().mean()) / len(mixes)
        after += float((found.logits.argmax(1) == y).double().mean()) / len(mixes)
        assert np.abs(np.array(found.diary.mix) - mix).sum() < 0.5
    assert before < 0.75
    assert after > 0.85


def plain_choice(losses: Floats) -> int:
    """losses[client, menu]: the last menu within one standard error of the best, of the paired difference."""
    clients, menus = losses.shape
    best = int(losses.sum(0).argmin())
    chosen = []
    for menu in range(menus):
        difference = losses[:, menu] - losses[:, best]
        error = difference.std(ddof=1) * math.sqrt(clients)
        if difference.sum() <= error:
            chosen.append(menu)
    return max(chosen)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 30), st.floats(0, 3))
def test_the_gate_is_the_one_standard_error_rule(seed: int, clients: int, drift: float) -> None:
    """Mixes that nothing tells apart: of what is as good as the best, the least adaptation."""
    losses = np.random.default_rng(seed).normal(size=(clients, 10)) + drift * np.linspace(-1, 1, 10) ** 2
    assert choice(losses) == plain_choice(losses)


def choice(losses: Floats, mixes: Sequence[float] | None = None, wrong: Sequence[int] | None = None) -> int:
    menus = losses.shape[1]
    return label_shift.choose(
        torch.tensor(losses.sum(0)),
        torch.tensor(losses.T @ losses),
        torch.tensor(mixes or [0.0] * menus),
        torch.tensor(wrong or [0] * (menus + 1)),
        len(losses),
    )


def test_the_gate_by_hand() -> None:
    """Four clients, three menus. The best is the first; the second costs everyone one nat, the third is a draw."""
    losses = np.array([[-5.0, -4.0, -9.0], [-5.0, -4.0, 0.0], [-5.0, -4.0, -9.0], [-5.0, -4.0, 0.0]])
    assert choice(losses) == 2
    assert choice(losses[:, :2]) == 0
    assert choice(np.zeros((4, 3))) == 2, "no difference: the least adaptation"
    assert choice(np.zeros((4, 3)), [-1.0, -4.0, -9.0]) == 0, "no difference in the loss: the clients' mixes decide"
    assert choice(np.zeros((4, 3)), [-3.0, -2.0, -3.9]) == 2, "but for two nats"
    assert choice(losses, [-3.0, 0.0, -9.0]) == 2, "the nearest of those that are as good; of two, less adaptation"
    assert choice(losses, [-3.0, 0.0, -9.0], [4, 0, 4, 4]) == 2
    assert choice(losses, [-3.0, 0.0, -9.0], [4, 0, 4, 3]) == label_shift.AS_IS, "more labels are right without it"


def test_the_likelihood_of_a_mix_is_the_dirichlet_multinomial_s() -> None:
    counts, prior = torch.tensor([3, 0, 1]), torch.tensor([0.5, 0.3, 0.2]).double()
    ours = label_shift.log_mixes(counts, prior)
    for strength, found in zip(STRENGTHS, ours.tolist(), strict=False):
        alpha, seen, expected = strength * prior.numpy(), np.zeros(3), 0.0
        for label in (0, 0, 2, 0):  # one after another, by Polya's urn
            expected += math.log((alpha[label] + seen[label]) / (strength + seen.sum()))
            seen[label] += 1
        assert found == pytest.approx(expected)
    assert float(ours[-1]) == pytest.approx(3 * math.log(0.5) + math.log(0.2))


def test_where_labels_come_out_right_without_it_probabilities_alone_are_changed() -> None:
    x, fitted = newcomer(), calibrated_as(4, 0.6) | {"gate.label-shift.menu": torch.tensor(label_shift.AS_IS)}
    found, plain = personalize("label-shift", x, fitted), personalize("none", x, {})
    torch.testing.assert_close(found.logits, 0.6 * plain.logits)
    torch.testing.assert_close(found.predict_logits(x), 0.6 * plain.predict_logits(x))
    assert "left as it is" in found.diary.decision


def test_the_mix_that_is_shown_is_the_clients_own_whatever_the_gate_decided() -> None:
    """Training clients found the evidence's mix nearer to the truth than the closed gate's predictions."""
    mix = np.array([0.0, 0.0, 0.5, 0.5])
    x, y = draw(np.random.default_rng(0), mix, 200, even(4), 2.0)
    known = {"offset": torch.zeros(3, 2), "scatter": torch.zeros(3, 2), "clients": torch.full((3,), 20)}
    known |= {"few": torch.tensor(0), "size": torch.tensor(90.0)}
    for menu in (0, label_shift.CLOSED, label_shift.AS_IS):
        fitted = calibrated_as(4) | {"gate.label-shift.menu": torch.tensor(menu)}
        fitted |= {"calibration.none.bias": torch.zeros(4), "calibration.none.prior": torch.tensor(even(4))}
        for nearer in (0, 1):
            mixed = torch.tensor([0.1, 0.1]) - 0.05 * torch.nn.functional.one_hot(torch.tensor(nearer), 2)
            fitted |= prefixed("reliability.label-shift", known | {"mixed": mixed.expand(3, 2)})
            found = personalize("label-shift", x, fitted).diary
            truth = torch.bincount(y, minlength=4) / 200
            off = float(total_variation(torch.tensor(found.mix), truth))
            assert found.mix_error is not None
            if nearer or not menu:
                assert off < 0.06
            assert 0.05 <= found.mix_error < 0.15


def test_evidence_alone_is_fooled_by_feature_shift_and_the_gate_is_not() -> None:
    here = feature_shift()
    gated, free = here.personalizer("label-shift"), here.personalizer("label-shift", gate=0.0)
    calibrated = here.personalizer("calibrated")
    fitted = here.fit(gated, calibrated)
    plain = accuracy(here, calibrated, fitted)
    assert accuracy(here, free, fitted) < plain - 4
    assert int(fitted.published.fitted["gate.label-shift.menu"]) in (label_shift.CLOSED, label_shift.AS_IS)
    assert accuracy(here, gated, fitted) > plain - 2


def test_the_gate_opens_where_clients_differ_in_their_mix() -> None:
    here = world(pairs(6, 12), pairs(6, 12), samples=40, apart=1.5)
    gated, calibrated = here.personalizer("label-shift"), here.personalizer("calibrated")
    fitted = here.fit(gated, calibrated)
    assert int(fitted.published.fitted["gate.label-shift.menu"]) <= 4
    assert accuracy(here, gated, fitted) > accuracy(here, calibrated, fitted) + 10


def test_a_class_that_one_fold_alone_holds_does_not_close_the_gate() -> None:
    """Clients 0 and 5 are one fold. Without it nobody knows class 5, and no strength can predict it."""
    mixes = pairs(5, 10)
    mixes = [np.append(mix, 0.0) for mix in mixes]
    mixes[0] = mixes[5] = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.5])
    here = world(mixes, mixes, samples=40, apart=1.5)
    here = replace(here, logits=[z.clamp(min=-12) for z in here.logits])
    gated, calibrated = here.personalizer("label-shift"), here.personalizer("calibrated")
    fitted = here.fit(gated, calibrated)
    assert float(fitted.without(0).fitted["calibration.none.prior"][5]) < 1e-2
    assert int(fitted.published.fitted["gate.label-shift.menu"]) <= 4
    assert accuracy(here, gated, fitted) > accuracy(here, calibrated, fitted) + 10


def test_the_gates_loss_is_the_clients_own_log_likelihood(shifted: World, fits: CrossFitted) -> None:
    """Against label-shift itself at each gate, on validation data, cross-fitted: mean loss over all samples."""
    expected = []
    for gate in (0.15, 0.5, 1.5, 5.0, 15.0, 50.0, 150.0, 500.0, 1500.0, 1e9):
        personalizer, loss = shifted.personalizer("label-shift", gate=gate), 0.0
        for i, (x, y) in enumerate(zip(shifted.logits, shifted.labels, strict=True)):
            found = personalizer.personalize(fits.without(i), Unlabelled(i, x))
            right = found.logits.double().softmax(1)[torch.arange(len(y)), y]
            loss -= float((0.99 * right + 0.01 / found.logits.shape[1]).log().sum())  # a hundredth is chance
        expected.append(loss / sum(map(len, shifted.labels)))
    found_losses = fits.published.fitted["gate.label-shift.loss"]
    np.testing.assert_allclose(found_losses, np.array(expected) - expected[-1], atol=1e-5)
