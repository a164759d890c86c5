"""The class mix of a newcomer: variational Bayes, EM, black-box estimation, LAME and ATP, each against
something independent: enumeration, slow loops, optimality conditions, finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import digamma, gammaln
from torch import Tensor

from tests.synthetic import Floats, World, draw, even, pairs, world
from upfl.contract import Batch, CrossFitted, Personalized, Published, Task, Unlabelled
from upfl.errors import RunError
from upfl.models import mlp
from upfl.personalize import class_mix
from upfl.personalize.atp import Atp, AtpHyper, Rates
from upfl.personalize.calibration import Calibrator
from upfl.personalize.class_mix import black_box, evidence_bound, expectation_maximisation, variational, with_unadapted
from upfl.personalize.lame import affinity, agree
from upfl.randomness import generator
from upfl.state import prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("one_thread")

STRENGTHS = (0.15, 0.5, 1.5, 5, 15, 50, 150, 500, 1500)  # the method card's
CORRECTIONS = ("calibrated", "label-shift", "em", "map-em", "bbse")


@st.composite
def posteriors(draw: Any, most_samples: int = 12, most_classes: int = 5) -> tuple[Tensor, Tensor]:
    """Any posteriors [n, classes] of a client's samples, sharp or blurred, and any class frequencies."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, classes = draw(st.integers(1, most_samples)), draw(st.integers(2, most_classes))
    sharp = draw(st.sampled_from([0.05, 0.5, 5.0]))
    p = rng.dirichlet(np.full(classes, sharp), n) + 1e-9
    pi = rng.dirichlet(np.full(classes, draw(st.sampled_from([0.5, 3.0])))) + 1e-4
    return torch.tensor(p / p.sum(1, keepdims=True)), torch.tensor(pi / pi.sum())


strengths = st.floats(0.05, 2000)


# Evidence


@settings(max_examples=100, deadline=None)
@given(posteriors(), strengths)
def test_no_sweep_lowers_the_evidence_bound(client: tuple[Tensor, Tensor], s: float) -> None:
    p, pi = client
    likelihood, alpha = p.log() - pi.log(), s * pi.unsqueeze(0)
    bounds = [evidence_bound(likelihood, alpha, p.unsqueeze(0))]
    bounds += [variational(likelihood, alpha, p, sweeps).evidence for sweeps in range(1, 20)]
    gains = torch.cat(bounds).diff()
    assert gains.min() >= -1e-9 * (1 + bounds[0].abs().item())


def log_evidence(likelihood: Tensor, alpha: Tensor) -> float:
    """log of the sum over all assignments of labels of prod exp(l) times the Dirichlet-multinomial probability."""
    n, classes = likelihood.shape
    a, l_ic = alpha.numpy(), likelihood.numpy()
    terms = []
    for labels in itertools.product(range(classes), repeat=n):
        counts = np.bincount(labels, minlength=classes)
        prior = gammaln(a.sum()) - gammaln(a.sum() + n) + (gammaln(a + counts) - gammaln(a)).sum()
        terms.append(sum(l_ic[i, c] for i, c in enumerate(labels)) + prior)
    return float(np.logaddexp.reduce(terms))


@settings(max_examples=60, deadline=None)
@given(posteriors(most_samples=5, most_classes=3), strengths)
def test_the_evidence_bound_is_below_the_exact_evidence(client: tuple[Tensor, Tensor], s: float) -> None:
    p, pi = client
    likelihood, alpha = p.log() - pi.log(), s * pi
    exact = log_evidence(likelihood, alpha)
    for start in (p, torch.full_like(p, 1 / p.shape[1])):
        assert float(variational(likelihood, alpha.unsqueeze(0), start).evidence) <= exact + 1e-9
        assert float(evidence_bound(likelihood, alpha.unsqueeze(0), start.unsqueeze(0))) <= exact + 1e-9


def test_the_evidence_bound_is_tight_where_labels_are_certain() -> None:
    """With one possible label a sample, there is nothing to bound: the evidence is that of the counts."""
    y = torch.tensor([0, 0, 1, 2, 0])
    p = torch.nn.functional.one_hot(y, 3).double().clamp(min=1e-250)
    pi = torch.tensor([0.5, 0.3, 0.2]).double()
    for s in STRENGTHS:
        found = float(variational(p.log() - pi.log(), s * pi.unsqueeze(0), p).evidence)
        assert found == pytest.approx(log_evidence(p.log() - pi.log(), s * pi), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(posteriors())
def test_infinite_strength_is_no_adaptation_and_zero_evidence(client: tuple[Tensor, Tensor]) -> None:
    p, pi = client
    likelihood, alpha = p.log() - pi.log(), 1e9 * pi.unsqueeze(0)
    strong = variational(likelihood, alpha, p)
    assert float(strong.evidence) == pytest.approx(0, abs=1e-3)
    torch.testing.assert_close(strong.r[0], p, atol=1e-3, rtol=0)
    torch.testing.assert_close(strong.mix[0], pi, atol=1e-6, rtol=0)
    limit = with_unadapted(strong, p, pi)
    assert float(limit.evidence[-1]) == 0
    assert torch.equal(limit.r[-1], p)
    assert torch.equal(limit.mix[-1], pi)


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


def calibrated_as(classes: int, scale: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """A calibration and a gate without limits, as they are published."""
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 0.3, classes)
    pi = rng.dirichlet(np.full(classes, 4.0))
    confusion = 0.7 * np.diag(pi) + 0.3 * np.outer(even(classes), pi)
    calibration = {"scale": scale, "bias": bias - bias.mean(), "prior": pi, "confusion": confusion}
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
    np.testing.assert_allclose(ours.diary.mix, q, atol=1e-9)
    later = newcomer(samples=50, seed=9)
    likelihood = np.log(posterior_of(later, fitted)[0]) - np.log(pi)
    np.testing.assert_array_equal(ours.predict(later), (likelihood + np.log(q)).argmax(1))


def test_what_training_clients_justified_is_the_gate() -> None:
    x, fitted = newcomer(), calibrated_as(4)
    for menu, s_min in enumerate((*STRENGTHS, 1e9)):
        by_menu = personalize("label-shift", x, fitted | {"gate.label-shift.menu": torch.tensor(menu)})
        assert torch.equal(by_menu.logits, personalize("label-shift", x, fitted, gate=s_min).logits)


@pytest.mark.parametrize("hyper", [{}, {"gate": 1e9}])
def test_a_gate_at_infinity_returns_the_calibrated_predictions(hyper: dict[str, float]) -> None:
    x, later, fitted = newcomer(), newcomer(seed=5), calibrated_as(4, 0.6)
    fitted["gate.label-shift.menu"] = torch.tensor(len(STRENGTHS))
    closed, calibrated = personalize("label-shift", x, fitted, **hyper), personalize("calibrated", x, fitted)
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


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    x, fitted = newcomer(samples=60), calibrated_as(4)
    order = torch.randperm(60, generator=generator(3))
    straight, shuffled = personalize(name, x, fitted), personalize(name, x[order], fitted)
    torch.testing.assert_close(shuffled.logits, straight.logits[order], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(shuffled.diary.mix, straight.diary.mix, atol=1e-9)


@pytest.mark.parametrize("name", [*CORRECTIONS, "lame", "tent+label-shift"])
def test_a_single_sample_works(name: str) -> None:
    x, fitted = newcomer(samples=1), calibrated_as(4)
    fitted |= {key.replace("none", "tent").replace("label", "tent+label"): value for key, value in fitted.items()}
    found = personalize(name, x, fitted)
    assert found.logits.shape == (1, 4)
    assert found.logits.isfinite().all()
    assert found.predict_logits(x).isfinite().all()
    if found.diary.mix:
        assert sum(found.diary.mix) == pytest.approx(1)
        assert min(found.diary.mix) > 0
    for estimate in found.diary.accuracy:
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


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


def slow_em(likelihood: Floats, pi: Floats, strength: float = 0.0, sweeps: int = 5000) -> Floats:
    """The mode of q, sample by sample."""
    q = [float(one) for one in pi]
    for _ in range(sweeps):
        counts = [strength * float(one) for one in pi]
        for row in likelihood:
            joint = [q[c] * math.exp(row[c]) for c in range(len(q))]
            for c, one in enumerate(joint):
                counts[c] += one / sum(joint)
        q = [count / sum(counts) for count in counts]
    return np.array(q)


@pytest.mark.parametrize("strength", [0.0, 0.7, 20.0])
def test_em_is_that_of_slow_loops(strength: float) -> None:
    p, pi = posterior_of(newcomer(samples=20), calibrated_as(4))
    likelihood = np.log(p) - np.log(pi)
    r, q = expectation_maximisation(torch.tensor(likelihood), torch.tensor(pi), strength)
    expected = slow_em(likelihood, pi, strength, 2000)
    np.testing.assert_allclose(q, expected, atol=2e-4)
    joint = expected * np.exp(likelihood)
    np.testing.assert_allclose(r, joint / joint.sum(1, keepdims=True), atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(posteriors(most_samples=30), st.sampled_from([0.0, 3.0]))
@example((torch.tensor([[0.46, 1e-7, 1e-6, 0.54]]).double(), torch.tensor([0.25, 0.08, 0.3, 0.37]).double()), 0.0)
def test_em_never_lowers_the_likelihood_and_ends_at_its_top(client: tuple[Tensor, Tensor], strength: float) -> None:
    p, pi = client
    likelihood = p.log() - pi.log()

    def objective(q: Tensor) -> float:
        fit = float((likelihood.exp() @ q).log().sum())
        if strength:  # plain EM may bring a class's share down to 0
            fit += strength * float(torch.xlogy(pi, q).sum())  # log density of Dirichlet(1 + s pi), up to a constant
        return fit

    ways = [expectation_maximisation(likelihood, pi, strength, sweeps)[1] for sweeps in (1, 2, 3, 5, 10, 30, 100)]
    heights = np.array([objective(q) for q in (pi, *ways)])
    assert np.diff(heights).min() >= -1e-9 * (1 + abs(heights[0]))
    # The problem is concave: at the top, moving weight to any class gains nothing.
    q = expectation_maximisation(likelihood, pi, strength, 20_000)[1]
    slope = (likelihood.exp() / (likelihood.exp() @ q).unsqueeze(1)).sum(0) + strength * pi / q.clamp(min=1e-300)
    gap = float((slope - (slope * q).sum()).max()) / (len(p) + strength)
    assert gap < 0.05


def test_map_em_goes_from_em_to_the_calibrated_model() -> None:
    x, fitted = newcomer(), calibrated_as(4)
    weak, strong = (personalize("map-em", x, fitted, strength=strength) for strength in (1e-9, 1e9))
    em, calibrated = personalize("em", x, fitted), personalize("calibrated", x, fitted)
    np.testing.assert_allclose(weak.diary.mix, em.diary.mix, atol=1e-6)
    torch.testing.assert_close(weak.logits.softmax(1), em.logits.softmax(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(strong.logits.softmax(1), calibrated.logits.softmax(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(strong.predict_logits(x), calibrated.predict_logits(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["em", "map-em", "bbse", "label-shift"])
def test_own_samples_and_later_ones_are_predicted_alike(name: str) -> None:
    """r is the posterior under q (label-shift: nearly, as its r comes from the mean of log q under each strength)."""
    x, fitted = newcomer(samples=200), calibrated_as(4)
    found = personalize(name, x, fitted)
    assert (found.logits.argmax(1) == found.predict(x)).double().mean() > 0.97
    if name != "label-shift":
        torch.testing.assert_close(found.logits.softmax(1), found.predict_logits(x).softmax(1), atol=1e-5, rtol=0)


# Black-box shift estimation


def test_black_box_estimation_on_a_confusion_matrix_by_hand() -> None:
    """Half of the federation's samples is of each class; 80% of class 0 and 60% of class 1 are recognised."""
    confusion = torch.tensor([[0.40, 0.20], [0.10, 0.30]]).double()  # rows: predicted, columns: true
    pi = torch.tensor([0.5, 0.5]).double()
    for share in (0.0, 0.3, 0.9, 1.0):
        predicted = torch.tensor([0.8 * share + 0.4 * (1 - share), 0.2 * share + 0.6 * (1 - share)]).double()
        np.testing.assert_allclose(black_box(confusion, predicted, pi), [share, 1 - share], atol=1e-12)
    beyond = black_box(confusion, torch.tensor([1.0, 0.0]).double(), pi)  # more zeros than class 0 alone would give
    np.testing.assert_allclose(beyond, [1, 0])


def test_black_box_estimation_with_uneven_classes_and_one_that_is_missing() -> None:
    pi = torch.tensor([0.7, 0.3, 0.0]).double()
    right = torch.tensor([[0.9, 0.2, 0.0], [0.1, 0.8, 0.0], [0.0, 0.0, 0.0]]).double()
    q = torch.tensor([0.2, 0.8, 0.0]).double()
    np.testing.assert_allclose(black_box(right * pi, right @ q, pi), q, atol=1e-12)


def test_black_box_estimation_without_an_answer_keeps_the_sources_mix() -> None:
    pi = torch.tensor([0.5, 0.5]).double()
    assert torch.equal(black_box(torch.zeros(2, 2).double(), torch.tensor([1.0, 0.0]).double(), pi), pi)


# LAME


def test_lame_is_that_of_slow_loops() -> None:
    rng = np.random.default_rng(0)
    features, scores = rng.normal(size=(12, 5)), rng.normal(size=(12, 3))
    h = features / np.linalg.norm(features, axis=1, keepdims=True)
    distance = np.array([[math.dist(a, b) for b in h] for a in h])
    sigma = np.mean([sorted(row)[5] for row in distance])  # place 0 is the sample itself
    kernel = np.exp(-(distance**2) / (2 * sigma**2))
    np.fill_diagonal(kernel, 0)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    y = p.copy()
    for _ in range(100):
        new = np.empty_like(y)
        for i in range(12):
            score = [math.log(p[i, c]) + sum(kernel[i, j] * y[j, c] for j in range(12)) for c in range(3)]
            weights = [math.exp(one) for one in score]
            new[i] = [weight / sum(weights) for weight in weights]
        y = new
    ours = affinity(torch.tensor(features), 5)
    np.testing.assert_allclose(ours, kernel, atol=1e-6)
    np.testing.assert_allclose(agree(torch.tensor(p).log(), ours, 100), y, atol=1e-4)


def test_lame_leaves_the_model_alone_and_lets_neighbours_agree() -> None:
    x = torch.cat([torch.tensor([[3.0, 1.0]]).repeat(9, 1), torch.tensor([[0.9, 1.0]])])
    x[:, 1] += 0.01 * torch.arange(10)
    found = personalize("lame", x, {}, neighbours=2)
    assert torch.equal(found.predict_logits(x), found.before)
    assert found.logits.softmax(1)[:9, 0].min() > found.before.softmax(1)[:9, 0].min()


def test_lame_treats_equal_samples_equally() -> None:
    """All features equal: no distance has a scale, and everyone is everyone's neighbour."""
    found = personalize("lame", torch.tensor([[2.0, 1.0, 0.0]]).repeat(8, 1), {})
    assert found.logits.isfinite().all()
    torch.testing.assert_close(found.logits, found.logits[:1].expand(8, 3))


# ATP


def atp_case() -> tuple[Rates, Atp, Published, Batch]:
    model = mlp(6, (5,), 4)
    training = FedAvg(Task(model, 4, 3), FedAvgHyper())
    psi = {name: value.double() for name, value in model.init(generator(4)).items()}
    published = Published(prefixed("psi", psi), 1)
    personalizer = Atp(training, AtpHyper(rate=0.3))
    x = torch.randn(9, 6, generator=generator(5), dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0]))
    return Rates(personalizer, CrossFitted(published)), personalizer, published, batch


def test_atps_rates_go_down_the_cross_entropy_after_the_step() -> None:
    """Against finite differences of CE(theta - alpha u) in each alpha, at zero and elsewhere; in float64."""
    rates, personalizer, published, batch = atp_case()
    model, psi = personalizer.training.model, select(published.state, "psi")
    leaves = {name: value.clone().requires_grad_() for name, value in psi.items()}
    p = model.apply(leaves, batch.x).softmax(1)
    mean_entropy = -(p * p.log()).sum(1).mean()
    u = dict(zip(psi, torch.autograd.grad(mean_entropy, list(leaves.values())), strict=True))

    def loss(alpha: Tensor) -> float:
        moved = {name: value - alpha[i] * u[name] for i, (name, value) in enumerate(psi.items())}
        return float(torch.nn.functional.cross_entropy(model.apply(moved, batch.x), batch.y))

    for alpha in (torch.zeros(4).double(), torch.tensor([0.5, -1.0, 2.0, 0.3]).double()):
        after, at = rates.step({"alpha": alpha}, batch, 0)
        assert float(at) == pytest.approx(loss(alpha), rel=1e-5)
        for i, (name, value) in enumerate(psi.items()):
            up, down = alpha.clone(), alpha.clone()
            up[i], down[i] = up[i] + 1e-5, down[i] - 1e-5
            slope = (loss(up) - loss(down)) / 2e-5
            expected = -0.3 * slope / math.sqrt(value.numel())
            assert float(after["alpha"][i] - alpha[i]) == pytest.approx(expected, rel=1e-5, abs=1e-10), name


def test_atp_without_rates_is_the_base_model_and_its_step_is_an_entropy_step() -> None:
    _, personalizer, published, batch = atp_case()
    client = Unlabelled(0, batch.x)

    def at(alpha: Tensor) -> Personalized:
        known = Published(published.state, 1, fitted={"rates.atp.alpha": alpha})
        return personalizer.personalize(known, client)

    base = personalizer.training.model.apply(select(published.state, "psi"), batch.x)
    still = at(torch.zeros(4).double())
    torch.testing.assert_close(still.logits, base)
    torch.testing.assert_close(still.before, base)
    torch.testing.assert_close(still.predict_logits(batch.x), base)
    moved = at(torch.full((4,), 0.01).double())
    assert moved.diary.entropy[1] < moved.diary.entropy[0]
    assert at(torch.full((4,), -0.01).double()).diary.entropy[1] > moved.diary.entropy[0]


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
