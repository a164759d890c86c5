"""What is fitted over a trained model: calibration, gate, mixture, reliability, choice; and who may know which labels.

Every sum of the federation is compared with a plain computation on pooled data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from tests.runs import VirtualGroup, by_virtual_workers
from tests.synthetic import Floats, World, draw, even, pairs, world
from upfl.contract import FOLDS, CrossFitted, Unlabelled
from upfl.engine.evaluate import evaluate
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.errors import ConfigError
from upfl.personalize import auto, label_shift
from upfl.personalize.calibration import newton_sums
from upfl.personalize.estimate import estimates
from upfl.state import State, select

EVERYTHING = ("auto", "label-shift", "bbse", "map-em")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One thread: with several, small operations wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def overconfident(here: World, by: float, tilt: Sequence[float]) -> World:
    """The same, seen through a model whose logits are `by` times too large and tilted towards some classes."""

    def bent(all: list[Tensor]) -> list[Tensor]:
        return [by * (z + torch.tensor(tilt)) for z in all]

    return replace(here, logits=bent(here.logits), new_logits=bent(here.new_logits))


def uneven(classes: int, clients: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(classes, 0.7)) for _ in range(clients)]


@pytest.fixture(scope="module")
def shifted() -> World:
    """Twelve training clients and eight new ones, each with a mix of its own, and a model that is far too sure."""
    return overconfident(world(uneven(5, 12), uneven(5, 8, 1), samples=40), 2.5, [1.0, 0.0, -0.5, 0.0, 0.3])


# Calibration


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
        torch.testing.assert_close(sums["prior"], p.sum(0))
        confusion = torch.zeros(classes, classes, dtype=torch.int64)
        for d, c in zip(p.argmax(1).tolist(), y.tolist(), strict=True):
            confusion[d, c] += 1
        assert torch.equal(sums["confusion"], confusion)
        assert int(sums["count"]) == 11


def pooled_calibration(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[float, Floats]:
    """(a, b) of the pooled data by a general optimizer, on the documented objective."""
    scores, y = torch.cat(list(logits)).double().log_softmax(1), torch.cat(list(labels))
    n, classes = scores.shape
    weight = 1e-3 if classes >= 62 else 1e-6

    def objective(theta: Floats) -> tuple[float, Floats]:
        leaf = torch.tensor(theta, requires_grad=True)
        b = leaf[1:] - leaf[1:].mean()
        loss = torch.nn.functional.cross_entropy(leaf[0] * scores + b, y)
        loss = loss + (leaf[0] - 1) ** 2 / (2 * n) + weight / 2 * (b**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return loss.item(), leaf.grad.numpy()

    start = np.concatenate([[1.0], np.zeros(classes)])
    bounds = [(1e-6, None), *[(None, None)] * classes]
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 5000, "ftol": 0})
    return float(found.x[0]), found.x[1:] - found.x[1:].mean()


def all_right() -> World:
    """Every prediction is right, with room to spare: without a bound the temperature would fall for ever."""
    rng = np.random.default_rng(0)
    labels = [torch.tensor(rng.integers(0, 4, 20)) for _ in range(6)]
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
    "timid": lambda: overconfident(world(uneven(3, 6), uneven(3, 2)), 0.2, [0.0, 0.4, 0.0]),
    "two classes": lambda: world(uneven(2, 6), uneven(2, 2)),
    "all right": all_right,
    "a class missing": a_class_missing,
    "one client": lambda: overconfident(world(uneven(4, 1), uneven(4, 1)), 2.0, [0.5, 0.0, 0.0, 0.0]),
    "many classes": lambda: overconfident(world(uneven(62, 8), uneven(62, 2), 60, 3.0), 2.0, [0.1] * 31 + [0.0] * 31),
}


@pytest.mark.parametrize("which", WORLDS)
def test_the_federations_calibration_is_that_of_pooled_data(which: str) -> None:
    here = WORLDS[which]()
    fitted = select(here.fit("calibrated").published.fitted, "calibration.none")
    a, b = pooled_calibration(here.logits, here.labels)
    assert float(fitted["scale"]) == pytest.approx(a, rel=2e-3)
    assert float(fitted["bias"].mean()) == pytest.approx(0, abs=1e-6)
    scores = torch.cat(here.logits).double().log_softmax(1)
    ours = (fitted["scale"] * scores + fitted["bias"]).softmax(1)
    np.testing.assert_allclose(ours, (a * scores + torch.tensor(b)).softmax(1), atol=2e-3)


@pytest.mark.parametrize("which", WORLDS)
def test_the_mean_calibrated_posterior_is_the_label_frequencies(which: str) -> None:
    here = WORLDS[which]()
    fitted = select(here.fit("calibrated").published.fitted, "calibration.none")
    scores, y = torch.cat(here.logits).double().log_softmax(1), torch.cat(here.labels)
    mean = (fitted["scale"] * scores + fitted["bias"]).softmax(1).mean(0)
    smoothing = 1e-4 if here.classes >= 62 else 1e-6
    torch.testing.assert_close(fitted["prior"], (mean + smoothing) / (1 + here.classes * smoothing), atol=1e-8, rtol=0)
    frequencies = torch.bincount(y, minlength=here.classes).double() / len(y)
    slack = 3e-3 if here.classes >= 62 else 5e-5  # the penalty on b keeps them apart
    torch.testing.assert_close(mean, frequencies, atol=slack, rtol=0)
    assert fitted["prior"].min() > 0
    assert float(fitted["prior"].sum()) == pytest.approx(1)
    confusion = torch.zeros(here.classes, here.classes).double()
    predicted = (fitted["scale"] * scores + fitted["bias"]).argmax(1)
    confusion.index_put_((predicted, y), torch.tensor(1 / len(y)).double(), accumulate=True)
    torch.testing.assert_close(fitted["confusion"], confusion)


def test_predictions_that_mislead_are_calibrated_to_the_label_frequencies() -> None:
    """Where a larger score means a smaller probability, the best a >= 0 is nearly none, and b does all."""
    rng = np.random.default_rng(0)
    labels = [torch.tensor(rng.choice(3, 40, p=[0.6, 0.3, 0.1])) for _ in range(6)]
    logits = [-2 * torch.nn.functional.one_hot(y, 3).float() + 0.3 * torch.randn(40, 3) for y in labels]
    here = World(logits, labels, logits, labels)
    fitted = select(here.fit("calibrated").published.fitted, "calibration.none")
    assert 0 < float(fitted["scale"]) < 0.05
    frequencies = torch.bincount(torch.cat(labels), minlength=3) / 240
    np.testing.assert_allclose(fitted["prior"], frequencies, atol=0.02)


def test_calibration_lowers_the_loss_of_new_clients(shifted: World) -> None:
    fitted = select(shifted.fit("calibrated").published.fitted, "calibration.none")
    z, y = torch.cat(shifted.new_logits).double(), torch.cat(shifted.new_labels)
    raw = torch.nn.functional.cross_entropy(z, y)
    calibrated = torch.nn.functional.cross_entropy(fitted["scale"] * z + fitted["bias"], y)
    assert calibrated < raw - 0.2
    assert float(fitted["scale"]) == pytest.approx(1 / 2.5, rel=0.3)


# The fold over clients


def by_workers(here: World, names: Sequence[str], size: int) -> list[CrossFitted]:
    found: dict[int, CrossFitted] = {}

    def work(group: VirtualGroup) -> None:
        found[group.rank] = here.fit(*names, group=group)

    by_virtual_workers(size, work)
    return [found[rank] for rank in range(size)]


def assert_same_fits(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    assert different == []


@pytest.mark.parametrize("size", [2, 5])
def test_fits_have_the_same_bits_for_any_number_of_workers(size: int) -> None:
    """Also where some workers have no client."""
    here = overconfident(world(uneven(3, 4), uneven(3, 1), samples=15), 2.0, [1.0, 0.0, 0.0])
    alone = here.fit(*EVERYTHING)
    for fits in by_workers(here, EVERYTHING, size):
        assert_same_fits(fits.published.fitted, alone.published.fitted)
        for ours, theirs in zip(fits.folds, alone.folds, strict=True):
            assert_same_fits(ours, theirs)


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients_are_enough_to_fit_and_to_be_scored(clients: int) -> None:
    """Folds that are empty, and fits that no client is part of, fall back to the model as it is."""
    here = world(uneven(3, clients), uneven(3, 2), samples=10)
    made = [here.personalizer(name) for name in EVERYTHING]
    federation, inputs = here.federation()
    fits, _ = fit_needs(made, here.published(), federation, inputs, 0, Group())
    for personalizer in made:
        scores = evaluate(federation, inputs, personalizer, fits, 0, Group())
        assert scores.training[:, 2].tolist() == [10] * clients
    if clients == 1:
        own = select(fits.without(0).fitted, "calibration.none")
        assert (float(own["scale"]), own["bias"].tolist()) == (1, [0, 0, 0])
        torch.testing.assert_close(own["prior"], torch.full((3,), 1 / 3).double())
        assert int(fits.published.fitted["gate.label-shift.menu"]) == 9, "one client cannot justify adaptation"


def test_a_client_whose_model_fails_is_left_out_and_counted_once(shifted: World) -> None:
    broken = replace(shifted, logits=[*shifted.logits[:3], shifted.logits[3] * math.nan, *shifted.logits[4:]])
    federation, inputs = broken.federation()
    calibrated = broken.personalizer("calibrated")
    fits, facts = fit_needs([calibrated], broken.published(), federation, inputs, 0, Group())
    assert {key: fact.get("left_out") for key, fact in facts.items()} == {
        "calibration.none": 1,
        "reliability.calibrated": 1,
    }
    others = [i for i in range(12) if i != 3]
    a, _ = pooled_calibration([shifted.logits[i] for i in others], [shifted.labels[i] for i in others])
    assert float(fits.published.fitted["calibration.none.scale"]) == pytest.approx(a, rel=2e-3)


def test_what_cannot_share_a_fit_is_refused(shifted: World) -> None:
    with pytest.raises(ConfigError, match=r"gate\.label-shift.*different settings"):
        shifted.fit(shifted.personalizer("label-shift", gate=5.0), "auto")


# Whose labels are known to whom


@pytest.fixture(scope="module")
def fits(shifted: World) -> CrossFitted:
    return shifted.fit(*EVERYTHING)


def test_a_fold_is_scored_by_what_the_others_fitted(shifted: World, fits: CrossFitted) -> None:
    """The fit without a fold is that of a federation which never had these clients."""
    for fold in range(FOLDS):
        others = [i for i in range(12) if i % FOLDS != fold]
        a, b = pooled_calibration([shifted.logits[i] for i in others], [shifted.labels[i] for i in others])
        without = select(fits.without(fold).fitted, "calibration.none")
        assert float(without["scale"]) == pytest.approx(a, rel=2e-3)
        np.testing.assert_allclose(without["bias"], b, atol=5e-3)
    assert {fits.without(i).fitted["calibration.none.scale"].item() for i in range(12)} == {
        fits.folds[fold]["calibration.none.scale"].item() for fold in range(FOLDS)
    }


def changes(ours: State, theirs: State) -> set[str]:
    return {name for name, value in theirs.items() if not torch.equal(ours[name], value)}


@pytest.mark.parametrize("client", [0, 7])
def test_a_clients_own_labels_do_not_reach_the_calibration_it_is_scored_by(
    shifted: World, fits: CrossFitted, client: int
) -> None:
    relabelled = shifted.relabelled(client, (shifted.labels[client] + 1) % 5).fit(*EVERYTHING)
    changed = changes(fits.without(client).fitted, relabelled.without(client).fitted)
    assert {name for name in changed if name.startswith("calibration.")} == set()
    everyone = changes(fits.published.fitted, relabelled.published.fitted)
    assert "calibration.none.scale" in everyone  # the labels do count elsewhere
    assert "calibration.none.scale" in changes(fits.without(client + 1).fitted, relabelled.without(client + 1).fitted)


@pytest.mark.parametrize("client", [0, 7])
def test_a_clients_own_labels_reach_nothing_it_is_scored_by(shifted: World, fits: CrossFitted, client: int) -> None:
    relabelled = shifted.relabelled(client, (shifted.labels[client] + 1) % 5).fit(*EVERYTHING)
    assert changes(fits.without(client).fitted, relabelled.without(client).fitted) == set()


def test_new_clients_labels_reach_nothing(shifted: World, fits: CrossFitted) -> None:
    unknown = replace(shifted, new_labels=[torch.zeros_like(y) for y in shifted.new_labels])
    assert_same_fits(unknown.fit(*EVERYTHING).published.fitted, fits.published.fitted)


# The gate


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
    losses = np.random.default_rng(seed).normal(size=(clients, 10)) + drift * np.linspace(-1, 1, 10) ** 2
    loss, products = torch.tensor(losses.sum(0)), torch.tensor(losses.T @ losses)
    assert label_shift.choose(loss, products, clients) == plain_choice(losses)


def test_the_gate_by_hand() -> None:
    """Four clients, three menus. The best is the first; the second costs everyone one nat, the third is a draw."""
    losses = np.array([[-5.0, -4.0, -9.0], [-5.0, -4.0, 0.0], [-5.0, -4.0, -9.0], [-5.0, -4.0, 0.0]])
    sums = torch.tensor(losses.sum(0)), torch.tensor(losses.T @ losses)
    assert label_shift.choose(*sums, 4) == 2
    sums = torch.tensor(losses[:, :2].sum(0)), torch.tensor(losses[:, :2].T @ losses[:, :2])
    assert label_shift.choose(*sums, 4) == 0
    assert label_shift.choose(torch.zeros(3), torch.zeros(3, 3), 4) == 2, "no difference: the least adaptation"
    assert label_shift.choose(torch.tensor([-9.0, 0.0]), torch.tensor([[81.0, 0.0], [0.0, 0.0]]), 1) == 1


def accuracy(here: World, personalizer: Any, fitted: CrossFitted) -> float:
    right = total = 0
    for i, (x, y) in enumerate(zip(here.new_logits, here.new_labels, strict=True)):
        found = personalizer.personalize(fitted.published, Unlabelled(i, x))
        right, total = right + int((found.logits.argmax(1) == y).sum()), total + len(y)
    return 100 * right / total


def feature_shift(clients: int = 15, size: float = 1.5) -> World:
    """Everyone has the same mix of classes, but each client's inputs make some classes look likelier."""
    rng = np.random.default_rng(3)

    def bend(z: Tensor, y: Tensor) -> Tensor:
        return z + torch.tensor(rng.normal(0, size, z.shape[1])).float()

    return world([even(6)] * clients, [even(6)] * clients, samples=60, apart=1.5, bend=bend)


def test_evidence_alone_is_fooled_by_feature_shift_and_the_gate_is_not() -> None:
    here = feature_shift()
    gated, free = here.personalizer("label-shift"), here.personalizer("label-shift", gate=0.0)
    calibrated = here.personalizer("calibrated")
    fitted = here.fit(gated, calibrated)
    plain = accuracy(here, calibrated, fitted)
    assert accuracy(here, free, fitted) < plain - 4
    assert accuracy(here, gated, fitted) > plain - 0.5
    assert "no adaptation" in gated.personalize(fitted.published, Unlabelled(0, here.new_logits[0])).diary.decision


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
    assert float(fitted.without(0).fitted["calibration.none.prior"][5]) < 1e-3
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
    told = fits.published.fitted["gate.label-shift.loss"]
    np.testing.assert_allclose(told, np.array(expected) - expected[-1], atol=1e-5)


# The mixture of class families


def families(clients: int = 20, samples: int = 40, new_samples: int = 6) -> World:
    mixes = [np.zeros(10) for _ in range(clients)]
    for i, mix in enumerate(mixes):
        mix[[2 * (i % 5), 2 * (i % 5) + 1]] = 0.5
    here, small = world(mixes, mixes, samples, 1.2), world(mixes, mixes, new_samples, 1.2, seed=1)
    return replace(here, new_logits=small.new_logits, new_labels=small.new_labels)


# Estimated accuracy


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


# auto


def chosen(here: World) -> tuple[list[str], float, dict[str, float]]:
    """auto's choices for new clients, its accuracy, and that of its candidates."""
    personalizer = here.personalizer("auto")
    fitted = here.fit(personalizer)
    names = []
    for i, x in enumerate(here.new_logits):
        decision = personalizer.personalize(fitted.published, Unlabelled(i, x)).diary.decision
        assert "expected accuracy" in decision
        names.append(decision.split(":")[0])
    candidates = ("none", "calibrated", "label-shift")
    assert set(names) <= set(candidates)
    single = {name: accuracy(here, here.personalizer(name), fitted) for name in candidates}
    return names, accuracy(here, personalizer, fitted), single


def test_auto_takes_label_shift_where_it_clearly_helps() -> None:
    names, ours, single = chosen(world(pairs(6, 12), pairs(6, 12), samples=40, apart=1.2))
    assert single["label-shift"] > single["none"] + 10
    assert names.count("label-shift") >= 10
    assert ours > single["label-shift"] - 1.5


def test_auto_leaves_the_class_mix_alone_where_nothing_helps() -> None:
    """The model is exact and everyone has the same mix: whether it is calibrated once more makes no difference."""
    gains = []
    for seed in range(3):
        names, ours, single = chosen(world([even(5)] * 12, [even(5)] * 10, samples=40, apart=1.5, seed=seed))
        assert names.count("label-shift") <= 1
        gains.append(ours - single["none"])
    assert np.mean(gains) > -1


def test_auto_is_not_fooled_by_feature_shift() -> None:
    names, ours, single = chosen(feature_shift())
    assert ours > single["none"] - 1
    assert names.count("label-shift") <= len(names) // 2 or single["label-shift"] > single["none"]


def test_auto_leaves_a_candidate_only_for_one_that_promises_more_by_a_standard_error() -> None:
    def choose(expected: Sequence[float], covariance: Sequence[Sequence[float]]) -> int:
        return auto.choose(torch.tensor(expected), torch.tensor(covariance))

    apart = [[0.0, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]]  # errors of 0.1, 0.1 and, between the last two, 0.14
    assert choose([0.5, 0.55, 0.7], apart) == 2
    assert choose([0.5, 0.55, 0.59], apart) == 0
    assert choose([0.5, 0.65, 0.75], apart) == 1
    assert choose([0.5, 0.65, 0.8], apart) == 2
    together = [[0.0, 0.0, 0.0], [0.0, 0.01, 0.01], [0.0, 0.01, 0.01]]  # what one is off by, the other is, too
    assert choose([0.5, 0.65, 0.66], together) == 2
    assert choose([0.5, 0.4, 0.5], [[0.0] * 3] * 3) == 0


def test_auto_begins_with_the_calibrated_model() -> None:
    """Between two candidates nothing decides: the newcomer gets the one that the federation's labels speak for."""
    personalizer = world([even(5)] * 12, [even(5)] * 10, samples=40, apart=1.5).personalizer("auto")
    assert isinstance(personalizer, auto.Auto)
    assert personalizer.candidates[:2] == ["calibrated", "none"]
    same = torch.full((3,), 0.5)
    assert auto.choose(same, 1e-4 * torch.eye(3)) == 0


def uneven_sizes() -> World:
    here = world(uneven(4, 10), uneven(4, 3), samples=50, apart=1.3)
    sizes = [10, 50, 23, 31, 50, 44, 12, 50, 8, 37]
    return replace(
        here,
        logits=[z[:n] for z, n in zip(here.logits, sizes, strict=True)],
        labels=[y[:n] for y, n in zip(here.labels, sizes, strict=True)],
    )


def test_autos_offsets_are_the_posterior_mean_given_training_clients_errors() -> None:
    """m ~ N(offset, V), offset ~ N(0, T): against precisions, T^-1 + V^-1, in plain NumPy."""
    here = uneven_sizes()
    personalizer = here.personalizer("auto")
    fitted = here.fit("none", personalizer)
    errors, excess, chances = [], [], []
    for i, (x, y) in enumerate(zip(here.logits, here.labels, strict=True)):
        found = [
            here.personalizer(name).personalize(fitted.without(i), Unlabelled(i, x)).logits
            for name in ("calibrated", "none", "label-shift")
        ]
        r = found[-1].double().softmax(1)
        right = torch.stack([r[torch.arange(len(y)), z.argmax(1)] for z in found])
        truth = torch.stack([(z.argmax(1) == y).double().mean() for z in found])
        errors.append((truth - right.mean(1)).numpy())
        excess.append(errors[-1] ** 2 - (right * (1 - right)).mean(1).numpy() / len(y))
        chances.append(np.zeros((3, 3)))
        for p in r.numpy():  # sums over what the label may be
            for c, probability in enumerate(p):
                hits = np.array([float(int(z.argmax()) == c) for z in (found[0][0], found[1][0], found[2][0])])
                found_at = hits - np.array([p[int(z[0].argmax())] for z in found])
                chances[-1] += probability * np.outer(found_at, found_at) / len(y) ** 2
            found = [z[1:] for z in found]
    sizes = np.array([len(y) for y in here.labels])
    weight = sizes / sizes.sum()
    mean = weight @ np.array(errors)
    centred = weight[:, None] * (np.array(errors) - mean)
    chance = np.einsum("i,ikl->kl", weight**2, np.array(chances))
    v = (10 * centred.T @ centred + 3 * chance) / (9 + 3)
    precision = np.linalg.inv(v)
    covariance = np.linalg.inv(precision + np.eye(3) / auto.SPREAD**2)
    known = select(fitted.published.fitted, "choice.auto")
    np.testing.assert_allclose(known["covariance"], covariance, atol=1e-8)
    np.testing.assert_allclose(known["offset"], covariance @ precision @ mean, atol=1e-5)
    np.testing.assert_allclose(known["scatter"], (weight @ np.array(excess) - mean**2).clip(0), atol=1e-6)


def test_few_labels_leave_autos_estimates_as_they_are_and_many_correct_them() -> None:
    """Inputs that mislead, and an estimate that is off for it: by how much, three labels of a client do not tell."""

    def known(samples: int, clients: int) -> tuple[float, float]:
        here = feature_shift(clients, size=2.5)
        cut = replace(here, logits=[z[:samples] for z in here.logits], labels=[y[:samples] for y in here.labels])
        found = select(cut.fit("auto").published.fitted, "choice.auto")
        return abs(float(found["offset"][auto.NONE])), float(found["covariance"][auto.NONE, auto.NONE].sqrt())

    few, many = known(3, 10), known(60, 60)
    assert few[0] < 0.2 * auto.SPREAD
    assert few[1] > 0.95 * auto.SPREAD
    assert many[1] < 0.75 * auto.SPREAD


def test_auto_tells_an_accuracy_whatever_it_chooses() -> None:
    for here in (feature_shift(), world(pairs(6, 12), pairs(6, 12), samples=40, apart=1.2)):
        personalizer = here.personalizer("auto")
        fitted = here.fit(personalizer)
        told = [
            personalizer.personalize(fitted.published, Unlabelled(i, x)).diary.accuracy
            for i, x in enumerate(here.new_logits)
        ]
        truth = accuracy(here, personalizer, fitted)
        assert np.mean([100 * after.value for _, after in told]) == pytest.approx(truth, abs=5)
        assert all(0 <= one.low <= one.value <= one.high <= 1 for both in told for one in both)
