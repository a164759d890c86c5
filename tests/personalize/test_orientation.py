"""Images that are turned or mirrored are found by the view that would fit better."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from upfl import configure
from upfl.bundle.in_words import in_words
from upfl.contract import CrossFitted, Likeness, Published
from upfl.engine.clients import LocalClient
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.engine.setup import Setup, assemble
from upfl.personalize.likeness import LikenessCheck, check, known_of
from upfl.personalize.nothing import Nothing
from upfl.personalize.orientation import KEY, VIEWS, Orientation, edges, orders
from upfl.randomness import generator

pytestmark = pytest.mark.usefixtures("alone")


def views(x: Tensor) -> list[Tensor]:
    turned = [torch.rot90(x, k, (2, 3)) for k in range(4)]
    return [*turned, *(one.flip(3) for one in turned)]


@pytest.mark.parametrize("size", [8, 9, 28])
def test_other_views_of_an_image_have_the_same_numbers_in_another_order(size: int) -> None:
    x = torch.randn(3, 2, size, size, generator=torch.Generator().manual_seed(0))
    for view, order in zip(views(x), orders(), strict=True):
        torch.testing.assert_close(edges(view), edges(x)[:, order])


@cache
def digits() -> tuple[Setup, Published]:
    """Clients of two classes each, and a model that nobody trained: orientation has no need of it."""
    setup = assemble(configure("fedavg", "digits", settings=["partition_seed=50"]))
    published = Published(setup.training.publish(setup.training.init(generator(0))), 1)
    given, _ = fit_needs([LikenessCheck(setup.training)], published, setup.population, Group())
    return setup, given.published


def found(x: Tensor) -> Likeness:
    setup, published = digits()
    known = {name: value for name, value in known_of(published).items() if not name.startswith("features")}
    return check(setup.training, known, None, x)[0]


def newcomers() -> list[Tensor]:
    setup = digits()[0]
    return [setup.inputs.x(setup.federation.new.all(i)) for i in range(len(setup.federation.new))]


def test_newcomers_images_fit_as_they_are_and_turned_ones_do_not() -> None:
    for x in newcomers():
        assert found(x).verdict == "alike"
        for view in (1, 2, 3, 4, 7):
            score = max(score for name, score in found(views(x)[view]).scores.items() if name.startswith("orientation"))
            assert score > 4


def test_turned_images_would_fit_turned_back() -> None:
    x = torch.cat(newcomers())
    for view, back in enumerate((2, 1, 0, 3, 4, 5, 6), start=1):
        assert f"orientation ({VIEWS[back]})" in found(views(x)[view]).scores


def test_a_single_class_is_no_alarm() -> None:
    setup = digits()[0]
    held = np.concatenate([setup.federation.new.all(i) for i in range(len(setup.federation.new))])
    labels = setup.federation.source.labels[held]
    assert [found(setup.inputs.x(held[labels == c])).verdict for c in range(10)].count("alike") >= 9


def test_a_client_is_not_judged_by_its_own_images() -> None:
    setup, published = digits()
    fit = Orientation(Nothing(setup.training, Nothing.Hyper()), CrossFitted(published))
    clients = [LocalClient(setup.federation, setup.inputs, 0, i, 0) for i in range(6)]
    memories = [fit.memory(client) for client in clients]
    names = ("counts", "sums", "products")

    def total(of: range) -> dict[str, Tensor]:
        sums = {name: torch.stack([memories[i][name] for i in of]).sum(0) for name in names}
        return fit.init(torch.Generator()) | sums

    ours, _ = fit.finish(total(range(6)), memories[0], clients[0])
    nothing = memories[0] | {name: torch.zeros_like(memories[0][name]) for name in names}
    theirs, _ = fit.finish(total(range(1, 6)), nothing, clients[0])
    assert ours["seen"].any()
    for name in ("seen", "margin", "within"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-6)


def test_images_alone_have_an_orientation() -> None:
    training = digits()[0].training
    assert KEY in {need.key for need in LikenessCheck(training).needs()}
    vectors = type(training)(replace(training.task, images=False), training.hyper)
    assert KEY not in {need.key for need in LikenessCheck(vectors).needs()}


def test_the_better_view_is_named() -> None:
    told = in_words(Likeness("unlike", 1e-5, {"inputs drift": 1.0, "orientation (turned by 180 degrees)": 6.0}), 30)
    assert "The images would fit better turned by 180 degrees (orientation" in told
