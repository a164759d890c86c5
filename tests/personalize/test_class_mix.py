"""Estimates of a class mix: variational Bayes, expectation-maximisation and black-box estimation,
each against enumeration, slow loops or optimality conditions."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import gammaln
from torch import Tensor

from tests.helpers.class_mix import STRENGTHS, calibrated_as, newcomer, posterior_of
from tests.synthetic import Floats
from upfl.personalize.class_mix import black_box, evidence_bound, expectation_maximisation, variational, with_unadapted

pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert torch.equal(black_box(torch.zeros(3, 3).double(), q, pi), pi), "without an answer, the source's mix"
