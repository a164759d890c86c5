"""`auto`: which correction it chooses, and what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.shifts import accuracy, feature_shift, uneven
from tests.synthetic import World, even, pairs, world
from upfl.config import configure
from upfl.contract import Personalized, Published, Unlabelled
from upfl.engine.setup import assemble
from upfl.personalize import auto
from upfl.personalize.estimate import accuracy_of
from upfl.personalize.refit import Refit
from upfl.state import select

pytestmark = pytest.mark.usefixtures("alone")


def chosen(here: World) -> tuple[list[str], float, dict[str, float]]:
    """auto's choices for new clients, its accuracy, and that of its candidates."""
    personalizer = here.personalizer("auto")
    fitted = here.fit(personalizer)
    names = []
    for i, x in enumerate(here.new_logits):
        decision = personalizer.personalize(fitted.published, Unlabelled(i, x)).diary.decision
        assert "expected accuracy" in decision
        names.append(decision.split(":")[0])
    assert isinstance(personalizer, auto.Auto)
    candidates = personalizer.candidates
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
    for seed in range(2):
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
        return auto.choose(torch.tensor(expected), torch.tensor(covariance), range(len(expected)))

    apart = [[0.0, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]]  # errors of 0.1, 0.1 and, between the last two, 0.14
    assert choose([0.5, 0.55, 0.7], apart) == 2
    assert choose([0.5, 0.55, 0.59], apart) == 0
    assert choose([0.5, 0.65, 0.75], apart) == 1
    assert choose([0.5, 0.65, 0.8], apart) == 2
    together = [[0.0, 0.0, 0.0], [0.0, 0.01, 0.01], [0.0, 0.01, 0.01]]  # what one is off by, the other is, too
    assert choose([0.5, 0.65, 0.66], together) == 2
    assert choose([0.5, 0.4, 0.5], [[0.0] * 3] * 3) == 0
    assert auto.choose(torch.full((3,), 0.5), 1e-4 * torch.eye(3), [2, 0, 1]) == 2


@pytest.mark.parametrize(
    ("method", "further"),
    [
        ("fedavg", ["refit+calibrated", "refit+label-shift"]),
        ("fedtta-prox", ["refit+calibrated", "refit+label-shift", "one-step", "early-stopped"]),
        ("closed-form", []),
        ("hetero-fedtta", ["one-step", "early-stopped"]),
    ],
)
def test_autos_candidates_stand_on_published_refitted_and_adapted_models(method: str, further: list[str]) -> None:
    training = assemble(configure(method, "digits")).training
    personalizer = auto.Auto(training, auto.AutoHyper())
    assert personalizer.candidates == ["calibrated", "none", "label-shift", *further]
    orders = [
        [personalizer.candidates[place] for place in personalizer.order(i)] for i in range(len(personalizer.models))
    ]
    assert orders[0] == personalizer.candidates
    for order in orders[1:]:
        assert order == [*further[:2], "calibrated", "none", "label-shift", *further[2:]]


@pytest.mark.parametrize("better", [0, 1])
def test_the_better_model_is_the_one_that_is_so_without_label_shift(
    better: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Label-shift on the other one gets more labels right: that may be for want of labels, and does not decide."""
    certain = {0: (1.0, 0.3, 0.3, 1.0), 1: (0.3, 1.0, 1.0, 0.3)}[better]  # calibrated, label-shift of each model
    here = world([even(4)] * 10, [even(4)] * 2, samples=30, apart=2.0)
    made = auto.Auto.all_corrected

    def altered(self: auto.Auto, uncorrected: list[Personalized], published: Published) -> list[list[Personalized]]:
        results = made(self, uncorrected, published)
        for place, factor in zip((0, 2, 3, 4), certain, strict=True):
            logits = factor * results[auto.NONE][0].before
            results[place] = [replace(one, logits=logits, posterior=None) for one in results[place]]
        return results

    monkeypatch.setattr(auto.Auto, "all_corrected", altered)
    fitted = here.fit("auto").published.fitted
    assert int(fitted["choice.auto.measure"]) == better


def test_the_published_model_is_better_only_by_a_standard_error() -> None:
    """Gains of four clients from the refitted model: -1 +- 1, -2 +- 1, 1 +- 1; and of none."""
    gains = torch.tensor([[-2.0, 0, -2, 0], [-3, -1, -3, -1], [0, 2, 0, 2], [0, 0, 0, 0]]).double()
    clients = torch.tensor([4, 4, 4, 0])
    found = auto.refitted_is_better(gains.sum(1), gains.square().sum(1), clients)
    assert found.tolist() == [False, False, True, True]  # the standard error of a sum of these is 2.3
    wider = 3 * (gains - gains.mean(1, keepdim=True)) + gains.mean(1, keepdim=True)
    found = auto.refitted_is_better(wider.sum(1), wider.square().sum(1), clients)
    assert found.tolist() == [True, False, True, True]  # and of these 6.9


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
    assert isinstance(personalizer, auto.Auto)
    fitted = here.fit("none", personalizer)
    known = select(fitted.published.fitted, "choice.auto")
    gains = []
    errors, excess, chances = [], [], []
    for i, (x, y) in enumerate(zip(here.logits, here.labels, strict=True)):
        found = [
            here.personalizer(name).personalize(fitted.without(i), Unlabelled(i, x)).logits
            for name in personalizer.candidates
        ]
        published, refitted = (
            found[place].double().softmax(1)[torch.arange(len(y)), y] for place, *_ in personalizer.of_models
        )
        gains.append(float(((0.99 * refitted + 0.01 / 4) / (0.99 * published + 0.01 / 4)).log().sum()))
        r = found[personalizer.of_models[int(known["measure"])][-1]].double().softmax(1)
        right = torch.stack([r[torch.arange(len(y)), z.argmax(1)] for z in found])
        truth = torch.stack([(z.argmax(1) == y).double().mean() for z in found])
        errors.append((truth - right.mean(1)).numpy())
        excess.append(errors[-1] ** 2 - (right * (1 - right)).mean(1).numpy() / len(y))
        chances.append(np.zeros((5, 5)))
        for p in r.numpy():  # sums over what the label may be
            for c, probability in enumerate(p):
                hits = np.array([float(int(z[0].argmax()) == c) for z in found])
                found_at = hits - np.array([p[int(z[0].argmax())] for z in found])
                chances[-1] += probability * np.outer(found_at, found_at) / len(y) ** 2
            found = [z[1:] for z in found]
    sizes = np.array([len(y) for y in here.labels])
    weight = sizes / sizes.sum()
    mean = weight @ np.array(errors)
    centred = weight[:, None] * (np.array(errors) - mean)
    chance = np.einsum("i,ikl->kl", weight**2, np.array(chances))
    v = (10 * centred.T @ centred + 5 * chance) / (9 + 5)
    precision = np.linalg.inv(v)
    covariance = np.linalg.inv(precision + np.eye(5) / auto.SPREAD**2)
    assert int(known["measure"]) == (sum(gains) >= -np.std(gains, ddof=1) * len(gains) ** 0.5)
    np.testing.assert_allclose(known["covariance"], covariance, atol=1e-8)
    np.testing.assert_allclose(known["offset"], covariance @ precision @ mean, atol=1e-5)
    np.testing.assert_allclose(known["scatter"], (weight @ np.array(excess) - mean**2).clip(0), atol=1e-6)


@pytest.fixture
def no_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this world clients train on one sample each, of which no layer can be fitted."""
    monkeypatch.setattr(Refit, "why_not", classmethod(lambda cls, training: "too few samples"))


@pytest.mark.usefixtures("no_refit")
def test_few_labels_leave_autos_estimates_as_they_are_and_many_correct_them() -> None:
    """Inputs that mislead, and an estimate that is off for it: by how much, three labels of a client do not tell."""

    def known(samples: int, clients: int) -> tuple[float, float]:
        here = feature_shift(clients, size=2.5)
        cut = replace(here, logits=[z[:samples] for z in here.logits], labels=[y[:samples] for y in here.labels])
        found = select(cut.fit("auto").published.fitted, "choice.auto")
        return abs(float(found["offset"][auto.NONE])), float(found["covariance"][auto.NONE, auto.NONE].sqrt())

    few, many = known(3, 10), known(60, 40)
    assert few[0] < 0.2 * auto.SPREAD
    assert few[1] > 0.95 * auto.SPREAD
    assert many[1] < 0.75 * auto.SPREAD


@pytest.mark.usefixtures("no_refit")
def test_auto_tells_an_accuracy_whatever_it_chooses() -> None:
    for here in (feature_shift(), world(pairs(6, 12), pairs(6, 12), samples=40, apart=1.2)):
        personalizer = here.personalizer("auto")
        fitted = here.fit(personalizer)
        held = []
        for i, (x, y) in enumerate(zip(here.new_logits, here.new_labels, strict=True)):
            found = personalizer.personalize(fitted.published, Unlabelled(i, x))
            chosen = found.diary.decision.split(":")[0]
            row = here.personalizer("label-shift" if chosen == "none" else chosen)
            own = row.personalize(fitted.published, Unlabelled(i, x)).diary
            told = own.accuracy if chosen != "none" else [own.accuracy[0]] * 2
            assert (found.diary.accuracy, found.diary.mix, found.diary.mix_error) == (told, own.mix, own.mix_error)
            for one, logits in zip(found.diary.accuracy, (found.before, found.logits), strict=True):
                assert 0 <= one.low <= one.value <= one.high <= 1
                held.append(one.low <= accuracy_of(logits, y) <= one.high)
        assert np.mean(held) > 0.9


def test_auto_tells_an_accuracy_where_nothing_is_in_doubt() -> None:
    """Variances are then differences of equal numbers, which rounding may take below zero."""
    here = world(pairs(6, 12), pairs(6, 12), samples=40, apart=9.0)
    personalizer = here.personalizer("auto")
    fitted = here.fit(personalizer)
    assert float(fitted.published.fitted["choice.auto.covariance"].diagonal().min()) < 1e-12
    for i, x in enumerate(here.new_logits):
        _, after = personalizer.personalize(fitted.published, Unlabelled(i, x)).diary.accuracy
        assert after.low <= after.value <= after.high
