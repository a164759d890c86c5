"""What the checks of the contract share: the suite's own training is known, and a training's parts are made."""

from __future__ import annotations

import pytest

from tests.conformance.common import TABLE, Parts, Remembering, config_of
from upfl.contract import CrossFitted, Published
from upfl.engine.clients import LocalClient
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.engine.setup import assemble
from upfl.methods import PERSONALIZERS, TRAININGS, make_personalizer
from upfl.randomness import generator


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setitem(TRAININGS, Remembering.name, Remembering)


_given: dict[tuple[str, str | None], CrossFitted] = {}  # made once in a process: nobody changes what was published


@pytest.fixture
def parts(name: str, request: pytest.FixtureRequest) -> Parts:
    config = config_of(name)
    setup = assemble(config)
    federation, inputs, training = setup.federation, setup.inputs, setup.training
    personalizers = {key: make_personalizer(key, training, PERSONALIZERS[key].Hyper()) for key in TABLE[name]}
    server = training.init(generator(0, "init"))
    clients = range(len(federation.training)) if training.publishes_memory else ()
    members = [training.memory(LocalClient(federation, inputs, config.seed, i, 0)) for i in clients]
    published = Published(training.publish(server), 3, members)
    asked = request.node.callspec.params.get("personalizer")
    wanted = [personalizers[asked]] if asked else []
    if (name, asked) not in _given:
        _given[name, asked] = fit_needs(wanted, published, federation, inputs, config.seed, Group())[0]
    given = _given[name, asked]
    return Parts(config, federation, inputs, training, personalizers, server, given)
