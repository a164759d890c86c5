"""No leakage: with the new clients' labels in another order, nothing that is published or predicted changes.

New clients' labels count right predictions and do nothing else; validation labels fit what personalizers need and do
nothing else. Who holds what is drawn by the labels (a pathological partition is), so it stays as it is here.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.config import Config, configure
from upfl.contract import Published
from upfl.data import load
from upfl.data.federation import Federation, build_federation
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {
    "closed-form": ("filters=6", "iterations=1", "patches=4"),
    "fedavg": ("iterations=2",),
    "fedtta-prox": ("iterations=20",),
}
SCORED = {
    "closed-form": ["none", "label-shift", "auto"],
    "fedavg": ["fed3r", "bbse", "auto"],
    "fedtta-prox": ["early-stopped", "auto"],
}


class Seen(NamedTuple):
    """What came of a run: the server's state, what newcomers receive, each one's logits, and how many are right."""

    server: dict[str, Tensor]
    published: Published
    logits: dict[str, list[Tensor]]
    right: list[float]


def config_of(method: str) -> Config:
    rounds: dict[str, Any] = {} if method == "closed-form" else {"rounds": 2}
    settings = ("partition.clients=16", *SETTINGS[method])
    return configure(method, "digits", settings=settings, score=SCORED[method], **rounds)


def federation_of(config: Config, indices: Callable[[Federation], NDArray[np.int64]] | None = None) -> Federation:
    """The federation; with the labels at some indices in another order."""
    made = build_federation(load("digits"), config.partition, 0)
    if indices is None:
        return made
    labels, there = np.array(made.source.labels), indices(made)
    labels[there] = np.random.default_rng(0).permutation(labels[there])
    return replace(made, source=replace(made.source, labels=labels))


def of_new_clients(federation: Federation) -> NDArray[np.int64]:
    return np.asarray(federation.new.indices)


def of_validation(federation: Federation) -> NDArray[np.int64]:
    clients = federation.training
    return np.concatenate([clients.validation(i) for i in range(len(clients))])


def seen(config: Config, federation: Federation, path: Path) -> Seen:
    setup = assemble(config, federation)
    engine: Engine[Any] = Engine.local(RunFolder.create(path, config), setup=setup)
    engine.run()
    personalizers, population = setup.personalizers, setup.population
    with torch.no_grad():
        published = engine.folder.load_best(config.rounds)
        clients = [population.newcomer(i) for i in range(len(federation.new))]
        logits = {
            name: [one.personalize(published, client).logits for client in clients]
            for name, one in personalizers.items()
        }
    right = [row["test"] for row in engine.folder.result()["rows"]]
    return Seen(engine.progress.server, published, logits, right)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("method", SETTINGS)
def test_new_clients_labels_change_no_bit_of_what_is_published_and_predicted(method: str, tmp_path: Path) -> None:
    config = config_of(method)
    plain = seen(config, federation_of(config), tmp_path / "plain")
    shuffled = seen(config, federation_of(config, of_new_clients), tmp_path / "shuffled")
    assert_same(plain.server, shuffled.server)
    assert_same(plain.published.state, shuffled.published.state)
    assert_same(plain.published.fitted, shuffled.published.fitted)
    for name, logits in plain.logits.items():
        assert all(torch.equal(a, b) for a, b in zip(logits, shuffled.logits[name], strict=True)), name
    assert shuffled.right != plain.right, "they count right predictions, and nothing else"


def test_validation_labels_change_what_is_fitted_and_nothing_of_the_training(tmp_path: Path) -> None:
    config = config_of("closed-form")
    plain = seen(config, federation_of(config), tmp_path / "plain")
    shuffled = seen(config, federation_of(config, of_validation), tmp_path / "shuffled")
    assert_same(plain.server, shuffled.server)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits["none"], shuffled.logits["none"], strict=True))
    assert not torch.equal(
        plain.published.fitted["calibration.none.scale"], shuffled.published.fitted["calibration.none.scale"]
    ), "a test that cannot fail would not see this"
