"""Figures of the report."""

from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.colors import to_hex

from upfl.methods import ROWS
from upfl.report import figures

pytestmark = pytest.mark.usefixtures("wide")


def test_every_row_has_a_colour_of_its_own_and_others_have_one_too() -> None:
    lines: Any = [SimpleNamespace(row=row) for row in [*(method.row for method in ROWS), "tent+calibrated", "em"]]
    colours = [to_hex(figures.colour(lines, line)) for line in lines]
    assert len(set(colours)) == len(lines)
