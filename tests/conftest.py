"""Fixtures for the whole suite."""

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.reference import CASES, Case


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, for tests that compare bits: with several, sums are cut where threads happen to be."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A small model of each kind, with its forward pass written anew."""
    return CASES[request.param]


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compares bits in this process: under another instruction set it may find another fault."""
    for item in items:
        file = item.path.stem
        whole = item.path.parent.name == "conformance" or file in ("test_alignment", "test_recorded")
        apart = file in ("test_processes", "test_flower_deployment") or "entropy_in_bits" in item.name
        if whole or ("_bits" in item.name and not apart):
            item.add_marker(pytest.mark.bits)


# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
