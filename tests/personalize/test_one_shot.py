"""Fed3R and FedNCM: against scikit-learn's ridge regression and means by hand, and clients dealt anew."""

from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from tests.helpers.last_layer import Holder, dealt, gaussians
from upfl.contract import CrossFitted, Hyper, Published, Task, Unlabelled
from upfl.engine.fold import FixedPointSum
from upfl.models import mlp
from upfl.personalize.one_shot import Fed3R, Fed3RHyper, FedNCM
from upfl.personalize.refit import NewLayer
from upfl.randomness import generator
from upfl.state import prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def fit(kind: type[NewLayer[Any]], hyper: Any, holders: list[Holder], classes: int) -> tuple[NewLayer[Any], Published]:
    model = mlp(holders[0].x.shape[1], (7,), classes)
    personalizer = kind(FedAvg(Task(model, classes, len(holders)), FedAvgHyper()), hyper)
    published = Published(prefixed("psi", model.init(generator(3))), 1)
    stage = personalizer.Layer(personalizer, CrossFitted(published))
    server = stage.init(generator(0))
    ups = [stage.finish(server, {}, holder)[0] for holder in holders]
    total = FixedPointSum(ups[0], len(ups), stage.scales)
    for up in ups:
        total.add(stage.checked(up))
    results = stage.results(stage.aggregate(server, total, 0))
    return personalizer, Published(published.state, 1, fitted=results[0])


def features(personalizer: NewLayer[Any], published: Published, x: Tensor) -> Tensor:
    return personalizer.training.features(select(published.state, "psi"), x).double()


def test_fed3r_is_ridge_regression_with_a_penalized_intercept_and_normalized_classes() -> None:
    x, y = gaussians(300, 4, 6)
    personalizer, published = fit(Fed3R, Fed3RHyper(lambda_=0.5), dealt(x.float(), y, y % 3), 4)
    h = features(personalizer, published, x.float())
    with_one = torch.cat([h, torch.ones(len(h), 1)], 1)
    expected = torch.from_numpy(
        Ridge(0.5, fit_intercept=False).fit(with_one.numpy(), one_hot(y, 4).double().numpy()).coef_
    )
    expected = expected / expected[:, :-1].norm(dim=1, keepdim=True)
    torch.testing.assert_close(published.fitted["ridge.fed3r.weight"], expected[:, :-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(published.fitted["ridge.fed3r.bias"], expected[:, -1], rtol=1e-4, atol=1e-5)
    logits = personalizer.personalize(published, Unlabelled(0, x.float())).logits.double()
    torch.testing.assert_close(logits, with_one @ expected.T, rtol=1e-3, atol=1e-4)


def test_fedncm_has_the_directions_of_the_class_means_and_sends_no_second_moments() -> None:
    x, y = gaussians(200, 3, 5)
    holders = dealt(x.float(), y, y % 2)
    personalizer, published = fit(FedNCM, Hyper(), holders, 3)
    h = features(personalizer, published, x.float())
    means = normalize(torch.stack([h[y == c].mean(0) for c in range(3)]), dim=1)
    torch.testing.assert_close(published.fitted["means.fedncm.weight"], means, rtol=1e-5, atol=1e-6)
    cosine = normalize(h, dim=1) @ means.T
    found = personalizer.personalize(published, Unlabelled(0, x.float())).logits
    assert torch.equal(found.argmax(1), cosine.argmax(1))
    stage = personalizer.Layer(personalizer, CrossFitted(published))
    assert stage.finish(stage.init(generator(0)), {}, holders[0])[0].keys() == {"counts", "sums"}


@pytest.mark.parametrize(("kind", "hyper"), [(Fed3R, Fed3RHyper()), (FedNCM, Hyper())])
def test_the_layer_does_not_depend_on_who_holds_what_and_does_without_a_class(
    kind: type[NewLayer[Any]], hyper: Any
) -> None:
    x, y = gaussians(150, 3, 4)
    layers = []
    for to in (y, torch.arange(150) % 7, torch.zeros(150, dtype=torch.int64)):
        layers.append(fit(kind, hyper, dealt(x.float(), y, to), 4)[1].fitted)
    for other in layers[1:]:
        for name, value in layers[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-5)
            assert value.isfinite().all(), "of the fourth class there is nothing"
