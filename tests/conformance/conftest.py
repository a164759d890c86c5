"""What the checks of the contract share: the suite's own training is known, and a training's parts are made."""

from dataclasses import replace

import pytest

from tests.conformance.common import TABLE, Parts, Remembering, config_of, parts_of
from tests.runs import Outcome, ran
from upfl.contract import CrossFitted
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.methods import TRAININGS


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setitem(TRAININGS, Remembering.name, Remembering)


_straight: dict[str, Outcome] = {}


@pytest.fixture
def reference(name: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that others are compared with, made once in a process."""
    if name not in _straight:
        _straight[name] = ran(config_of(name), tmp_path_factory.mktemp("straight") / "run")
    return _straight[name]


_given: dict[tuple[str, str | None], CrossFitted] = {}  # made once in a process: nobody changes what was published


@pytest.fixture
def parts(name: str, request: pytest.FixtureRequest) -> Parts:
    config = config_of(name)
    parts = parts_of(config, TABLE[name])
    asked = request.node.callspec.params.get("personalizer")
    wanted = [parts.personalizers[asked]] if asked else []
    if (name, asked) not in _given:
        _given[name, asked] = fit_needs(wanted, parts.published, parts.population, Group())[0]
    return replace(parts, given=_given[name, asked])
