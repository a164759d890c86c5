"""Fits over a trained model: the same for any number of workers, and who may know which labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.shifts import EVERYTHING, overconfident, pooled_calibration, uneven
from tests.runs import VirtualGroup, by_virtual_workers
from tests.synthetic import World, world
from upfl.contract import FOLDS, CrossFitted, Personalized, Published, Unlabelled
from upfl.engine.clients import Population
from upfl.engine.evaluate import evaluate
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.errors import ConfigError
from upfl.personalize.label_shift import AS_IS
from upfl.personalize.nothing import Nothing
from upfl.state import State, select

pytestmark = pytest.mark.usefixtures("alone")


def by_workers(here: World, names: Sequence[str], size: int) -> list[CrossFitted]:
    found: dict[int, CrossFitted] = {}

    def work(group: VirtualGroup) -> None:
        found[group.rank] = here.fit(*names, group=group)

    by_virtual_workers(size, work)
    return [found[rank] for rank in range(size)]


def changes(ours: State, theirs: State) -> set[str]:
    assert ours.keys() == theirs.keys()
    return {name for name, value in theirs.items() if not torch.equal(ours[name], value)}


@pytest.mark.parametrize("size", [2, 5])
def test_fits_have_the_same_bits_for_any_number_of_workers(size: int) -> None:
    """Also where some workers have no client."""
    here = overconfident(world(uneven(3, 4), uneven(3, 1), samples=15), 2.0, [1.0, 0.0, 0.0])
    alone = here.fit(*EVERYTHING)
    for fits in by_workers(here, EVERYTHING, size):
        assert changes(fits.published.fitted, alone.published.fitted) == set()
        for ours, theirs in zip(fits.folds, alone.folds, strict=True):
            assert changes(ours, theirs) == set()


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients_are_enough_to_fit_and_to_be_scored(clients: int) -> None:
    """Folds that are empty, and fits that no client is part of, fall back to the model as it is."""
    here = world(uneven(3, clients), uneven(3, 2), samples=10)
    made = [here.personalizer(name) for name in EVERYTHING]
    everybody = Population(*here.federation(), 0)
    fits, _ = fit_needs(made, here.published(), everybody, Group())
    for personalizer in made:
        scores = evaluate(everybody, personalizer, fits, Group())
        assert scores.training[:, 2].tolist() == [10] * clients
    if clients == 1:
        own = select(fits.without(0).fitted, "calibration.none")
        assert (float(own["scale"]), own["bias"].tolist()) == (1, [0, 0, 0])
        torch.testing.assert_close(own["prior"], torch.full((3,), 1 / 3).double())
        assert int(fits.published.fitted["gate.label-shift.menu"]) == AS_IS, "one client cannot justify adaptation"


def test_a_training_client_is_scored_by_fits_without_it_and_a_new_one_by_those_of_all() -> None:
    here, seen = world(uneven(3, 7), uneven(3, 2), samples=10), list[int]()

    class Seeing(Nothing):
        def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
            seen.append(int(published.fitted["without"]))
            return super().personalize(published, client, memory)

    everybody = replace(here.published(), fitted={"without": torch.tensor(-1)})
    given = CrossFitted(everybody, tuple({"without": torch.tensor(fold)} for fold in range(FOLDS)))
    method = Seeing(here.personalizer("none").training, Nothing.Hyper())
    evaluate(Population(*here.federation(), 0), method, given, Group())
    assert seen == [0, 1, 2, 3, 4, 0, 1, -1, -1]


def test_a_client_whose_model_fails_is_left_out_and_counted_once(shifted: World) -> None:
    broken = replace(shifted, logits=[*shifted.logits[:3], shifted.logits[3] * math.nan, *shifted.logits[4:]])
    calibrated = broken.personalizer("calibrated")
    fits, facts = fit_needs([calibrated], broken.published(), Population(*broken.federation(), 0), Group())
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


@pytest.mark.parametrize("client", [0, 7])
def test_a_clients_own_labels_reach_nothing_it_is_scored_by(shifted: World, fits: CrossFitted, client: int) -> None:
    relabelled = shifted.relabelled(client, (shifted.labels[client] + 1) % 5).fit(*EVERYTHING)
    assert changes(fits.without(client).fitted, relabelled.without(client).fitted) == set()
    everyone = changes(fits.published.fitted, relabelled.published.fitted)
    assert "calibration.none.scale" in everyone  # the labels do count elsewhere
    assert "calibration.none.scale" in changes(fits.without(client + 1).fitted, relabelled.without(client + 1).fitted)


def test_new_clients_labels_reach_nothing(shifted: World, fits: CrossFitted) -> None:
    unknown = replace(shifted, new_labels=[torch.zeros_like(y) for y in shifted.new_labels])
    assert changes(unknown.fit(*EVERYTHING).published.fitted, fits.published.fitted) == set()
