"""The last layer in closed form: against scikit-learn's discriminant, a hand-computed one, and clients dealt anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from tests.helpers.last_layer import Holder, dealt, gaussians
from upfl.api import accuracy, train
from upfl.bundle import Bundle, export
from upfl.config import configure
from upfl.contract import CrossFitted, Published, Task, Unlabelled
from upfl.engine.fold import FixedPointSum
from upfl.errors import BadClientError
from upfl.last_layer import discriminant
from upfl.methods import PERSONALIZERS, TRAININGS
from upfl.models import mlp
from upfl.personalize.refit import Discriminant, Refit, RefitHyper
from upfl.randomness import generator
from upfl.state import prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def sums(h: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.bincount(y, minlength=classes),
        torch.stack([h[y == c].sum(0) for c in range(classes)]),
        torch.einsum("ni,nj->ij", h, h),
    )


def fit(holders: Sequence[Holder], classes: int, shrinkage: float = 0.01) -> tuple[Refit, Published]:
    """The refit of a random MLP over clients, and what newcomers receive."""
    model = mlp(holders[0].x.shape[1], (7,), classes)
    training = FedAvg(Task(model, classes, len(holders)), FedAvgHyper())
    personalizer = Refit(training, RefitHyper(shrinkage=shrinkage))
    published = Published(prefixed("psi", model.init(generator(3))), 1)
    stage = Discriminant(personalizer, CrossFitted(published))
    server = stage.init(generator(0))
    total: FixedPointSum | None = None
    for holder in holders:
        up, _ = stage.finish(server, stage.begin(server, {}, holder), holder)
        total = total or FixedPointSum(up, len(holders), stage.scales)
        total.add(up)
    assert total is not None
    results = stage.results(stage.aggregate(server, total, 0))
    assert len(results) == 1, "there are no folds where validation labels play no part"
    return personalizer, Published(published.state, 1, fitted=results[0])


@pytest.mark.parametrize("shrinkage", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_layer_is_scikit_learns_discriminant(classes: int, shrinkage: float) -> None:
    h, y = gaussians(400, classes, 6)
    counts = torch.bincount(y)
    weight, bias = discriminant(*sums(h, y, classes), shrinkage)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(h.numpy(), y.numpy())
    ours = h @ weight.T + bias - ((counts + 1) / (len(y) + classes)).log() + (counts / len(y)).log()
    np.testing.assert_allclose(ours.softmax(1).numpy(), theirs.predict_proba(h.numpy()), rtol=1e-6, atol=1e-9)


def test_two_classes_on_a_line_by_hand() -> None:
    """Means 1 and 4, variance 1/4 in each: w = mu / v = 4 and 16, b = -mu^2 / 2v = -2 and -32, less their means."""
    h, y = torch.tensor([[0.5], [1.5], [3.5], [4.5]]).double(), torch.tensor([0, 0, 1, 1])
    weight, bias = discriminant(*sums(h, y, 2), 0.01)  # in one dimension shrinking changes nothing
    torch.testing.assert_close(weight, torch.tensor([[-6.0], [6.0]]).double())
    torch.testing.assert_close(bias, torch.tensor([15.0, -15.0]).double())


def test_a_class_that_nobody_holds_and_features_that_never_change_are_borne() -> None:
    h, y = gaussians(60, 3, 4)
    h[:, 1] = 0
    weight, bias = discriminant(*sums(h, y, 5), 0.01)
    logits = h @ weight.T + bias
    assert logits.isfinite().all()
    assert (logits.argmax(1) < 3).double().mean() > 0.95
    dead = discriminant(*sums(torch.zeros(60, 4).double(), y, 3), 0.01)
    torch.testing.assert_close(dead[0], torch.zeros(3, 4).double())
    assert dead[1].argmax() == torch.bincount(y).argmax()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_who_holds_which_samples_makes_no_difference(seed: int, clients: int) -> None:
    """One client with everything, clients at random, and clients that have one class each, with none in common."""
    x, y = gaussians(120, 4, 5, seed)
    at_random = torch.randint(clients, (len(y),), generator=generator(seed))
    x = x.float()
    _, alone = fit([Holder(x, y)], 4)
    for to in (at_random, y):
        _, together = fit(dealt(x, y, to), 4)
        for name, value in alone.fitted.items():
            torch.testing.assert_close(together.fitted[name], value, rtol=1e-3, atol=1e-3 * float(value.abs().max()))


def test_a_newcomers_predictions_are_the_layers_on_its_features() -> None:
    x, y = gaussians(300, 4, 5)
    x = x.float()
    personalizer, published = fit(dealt(x, y, y), 4)
    found = personalizer.personalize(published, Unlabelled(0, x))
    psi = select(published.state, "psi")
    h = torch.relu(x @ psi["fc1.weight"].T + psi["fc1.bias"])
    weight, bias = discriminant(*sums(h.double(), y, 4), 0.01)
    torch.testing.assert_close(found.logits.double(), h.double() @ weight.T + bias, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.before, personalizer.training.model.apply(psi, x))
    torch.testing.assert_close(found.predict_logits(x), found.logits)
    torch.testing.assert_close(personalizer.training.model.apply(psi, x), found.before)  # what was published stays
    assert accuracy(found.logits, y) > accuracy(found.before, y) + 30  # a random layer against a fitted one


def test_all_clients_take_part_however_few_are_evaluated(tmp_path: Path) -> None:
    """And where none validates: the layer comes from train splits."""
    layers = []
    for setting in ("evaluate_clients=4", "evaluate_clients=2", "partition.validation=0.0"):
        config = configure("refit", "digits", profile="smoke", rounds=1, settings=[setting])
        run = train(config, tmp_path / setting, workers=1)
        layers.append(run.published("refit").fitted["discriminant.refit.weight"])
    torch.testing.assert_close(layers[0], layers[1])
    assert layers[2].abs().max() > 0


def test_sums_that_are_not_of_samples_are_refused() -> None:
    x, y = gaussians(20, 2, 3)
    personalizer, published = fit([Holder(x.float(), y)], 2)
    stage = Discriminant(personalizer, CrossFitted(published))
    up, _ = stage.finish(stage.init(generator(0)), {}, Holder(x.float(), y))
    assert stage.checked(up) is up
    with pytest.raises(BadClientError, match="negative"):
        stage.checked({**up, "counts": -up["counts"]})
    with pytest.raises(BadClientError, match="negative"):
        stage.checked({**up, "products": -up["products"]})


def test_it_says_why_it_does_not_fit() -> None:
    task = Task(mlp(4, (3,), 2), 2, 3)
    fedsr = TRAININGS["fedsr"](task, TRAININGS["fedsr"].Hyper())
    assert "does not end in a linear layer" in str(PERSONALIZERS["refit"].why_not(fedsr))
    fedper = TRAININGS["fedper"](task, TRAININGS["fedper"].Hyper())
    assert "no model for a client that did not train" in str(PERSONALIZERS["refit"].why_not(fedper))


def test_a_run_is_better_for_it_and_a_bundle_carries_it(tmp_path: Path) -> None:
    """Clients with two classes each, few rounds: the mean of bent layers against the one that they all deserve."""
    config = configure("fedavg", "digits", rounds=4, score=["refit", "refit+label-shift"])
    run = train(config, tmp_path / "run", workers=1)
    test = {row["row"]: row["test_last"] for row in run.result["rows"]}
    assert test["refit"] > test["fedavg"] + 5
    assert test["refit-label-shift"] > test["fedavg"] + 5
    bundle = export(run, tmp_path / "bundle")
    assert "discriminant.refit" in bundle.manifest.fitted
    ours = run.personalize(run.newcomer(0), "refit+label-shift")
    images = run.federation.source.x[run.federation.new.all(0)]
    theirs = Bundle.load(tmp_path / "bundle").personalize(images, "refit+label-shift")
    assert theirs.personalized is not None
    torch.testing.assert_close(theirs.personalized.logits, ours.logits)
