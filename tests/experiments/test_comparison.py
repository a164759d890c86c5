"""Which clients are harmed, counted client by client."""

from typing import Any

import numpy as np
import pytest

from upfl.experiments.comparison import harm, summaries
from upfl.experiments.score import Score

pytestmark = pytest.mark.usefixtures("alone", "wide")


def hits(text: str) -> Any:
    return np.array([mark == "x" for mark in text])


def test_harm_counts_what_was_lost_and_won_client_by_client() -> None:
    ours = Score("ours", "", right=[hits("xx--x"), hits("---")])
    theirs = Score("none", "", right=[hits("x-xxx"), hits("xxx")])
    assert [(one["lost"], one["won"], one["size"]) for one in harm(ours, theirs)] == [(2, 1, 5), (3, 0, 3)]
    assert [one["p"] for one in harm(ours, theirs)] == [1.0, 0.25]


def test_a_client_is_harmed_by_more_than_two_points_that_are_no_chance() -> None:
    """200 samples: 12 lost and none won is harm; 12 lost and 8 won may be chance; 3 lost are under two points."""
    all_right = np.ones(200, np.bool_)

    def against(lost: int, won: int) -> dict[str, Any]:
        theirs, ours = all_right.copy(), all_right.copy()
        theirs[:won], ours[won : won + lost] = False, False
        rows = summaries([Score("none", "", right=[theirs]), Score("ours", "", right=[ours])])
        return dict(rows[1]["against_none"])

    assert against(12, 0)["harmed_large_clients"] == 1
    assert against(12, 0)["difference"] == -6
    assert against(12, 8)["harmed_large_clients"] == 0
    assert against(3, 0)["harmed_large_clients"] == 0
    assert against(0, 12)["harmed_large_clients"] == 0
