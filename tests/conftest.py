"""Fixtures for the whole suite."""

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from tests.helpers.shifts import EVERYTHING, overconfident, uneven
from tests.plugin_methods import PLUGIN, entered
from tests.reference import CASES, Case
from tests.synthetic import World, world
from upfl.contract import CrossFitted

collect_ignore = [] if importlib.util.find_spec("flwr") else ["flower"]
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@contextmanager
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, for tests that compare bits: with several, sums are cut where threads happen to be."""
    with single_thread():
        yield


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """One thread: with several, small operations wait for each other on a busy machine."""
    with single_thread():
        yield


@pytest.fixture(scope="module")
def methods() -> Iterator[None]:
    """The suite's own methods are in the table, here and in processes that are started."""
    with entered(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPFL_PLUGINS", PLUGIN)
        yield


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is wide enough for tables and paths."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A small model of each kind, with its forward pass written anew."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def shifted() -> World:
    """Twelve training clients and eight new ones, each with a mix of its own, and a model that is far too sure."""
    return overconfident(world(uneven(5, 12), uneven(5, 8, 1), samples=40), 2.5, [1.0, 0.0, -0.5, 0.0, 0.3])


@pytest.fixture(scope="session")
def fits(shifted: World) -> CrossFitted:
    """All that is fitted over these clients."""
    with single_thread():
        return shifted.fit(*EVERYTHING)


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compares bits in this process: under another instruction set it may find another fault.

    The one test that mostly waits comes first, so that another process works meanwhile.
    """
    items.sort(key=lambda item: item.path.stem != "test_flower_deployment")
    for item in items:
        file = item.path.stem
        whole = item.path.parent.name == "conformance" or file in ("test_alignment", "test_recorded")
        apart = file in ("test_processes", "test_flower_deployment") or "entropy_in_bits" in item.name
        if whole or ("_bits" in item.name and not apart):
            item.add_marker(pytest.mark.bits)


# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
