"""The table of methods."""

import json
import re
from typing import Any

import pytest

from tests.conformance.common import TABLE, Parts, of_every_training
from upfl.errors import ConfigError
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, make_personalizer, resolve


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_a_row_pairs_a_training_with_a_personalizer_that_fits(row: Any) -> None:
    assert row.training in TRAININGS
    assert all(part in TABLE[row.training] for part in row.personalizer.split("+"))
    assert resolve(row.row) == (row.training, (row.personalizer,))
    assert row.title
    assert row.summary


def test_names_in_the_table_are_unique_and_their_classes_own() -> None:
    rows = [method.row for method in ROWS]
    assert len(set(rows)) == len(rows)
    for table in (TRAININGS, PERSONALIZERS):
        for key, kind in table.items():
            assert kind.name == key
            assert kind.title
            assert json.dumps(kind.Hyper().model_dump())


@of_every_training
def test_a_personalizer_that_does_not_fit_says_why(name: str, parts: Parts) -> None:
    for key, kind in PERSONALIZERS.items():
        reason = kind.why_not(parts.training)
        if reason is None:
            make_personalizer(key, parts.training, kind.Hyper())
        else:
            with pytest.raises(ConfigError, match=re.escape(reason)):
                make_personalizer(key, parts.training, kind.Hyper())
