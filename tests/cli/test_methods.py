"""`upfl methods`."""

from __future__ import annotations

import json

import pytest

from tests.plugin_methods import upfl
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, personalizer_class

pytestmark = pytest.mark.usefixtures("methods")


def test_methods_as_json_are_the_table() -> None:
    said = upfl("methods", "--json")
    rows = json.loads(said.out)
    assert said.code == 0
    assert isinstance(rows, list)
    assert [row["row"] for row in rows] == [row.row for row in ROWS]
    assert all(row["training"] in TRAININGS and personalizer_class(row["personalizer"]) for row in rows)
    table = {row["row"]: (row["training"], row["personalizer"]) for row in rows}
    assert table["fedtta++"] == ("fedtta-prox", "early-stopped")
    assert table["tent"] == ("fedavg", "tent")
    assert table["fedavg"] == ("fedavg", "none")


@pytest.mark.parametrize("options", [(), ("--hyper",)])
def test_methods_name_every_row_and_personalizer(options: tuple[str, ...]) -> None:
    said = upfl("methods", *options)
    assert all(row.row in said.out for row in ROWS)
    assert all(name in said.out for name in PERSONALIZERS)
    assert ("inner_lr" in said.out) == bool(options)
