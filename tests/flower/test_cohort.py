"""The Flower app over an in-process grid has the engine's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import Message

from tests.helpers.flower import Watch, assert_same_run, federated, nodes
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, small
from upfl import api
from upfl.flower.messages import FACTS

ROUND_BY_ROUND = [
    "fedavg",
    "fedtta",
    "scaffold",
    "fedgma",
    "hetero-fedtta",
    "afl",
    "odpfl-hn",
    "closed-form",
    "counting",
]


@pytest.mark.parametrize("method", ROUND_BY_ROUND)
def test_the_app_gives_the_engines_bits_round_by_round(method: str, tmp_path: Path) -> None:
    config = small(method)
    watches = Watch(), Watch()
    api.train(config, tmp_path / "engine", workers=1, observer=watches[0])
    federated(config, tmp_path / "flower", InProcessGrid(nodes()), watches[1])
    assert len(watches[0].states) == config.rounds
    for ours, theirs in zip(*(watch.states for watch in watches), strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert_same_run(tmp_path / "flower", tmp_path / "engine")


def test_what_personalizers_need_is_fitted_over_nodes_to_the_engines_bits(tmp_path: Path) -> None:
    config = small("fedavg", "partition.clients=8", rounds=1, score=["refit+label-shift", "atp"])
    api.train(config, tmp_path / "engine", workers=1)
    federated(config, tmp_path / "flower", InProcessGrid(dict(list(nodes().items())[:4])))
    assert lines(tmp_path / "flower")[-1]["fits"]
    assert_same_run(tmp_path / "flower", tmp_path / "engine")


def test_a_node_that_fails_in_a_fit_is_left_out_of_all_of_it(tmp_path: Path) -> None:
    """The fit's sums must be over the same nodes in every round; so it equals one that this node was never part of."""
    config = small("fedavg", "evaluate_clients=8", rounds=1, score=["calibrated"], clients_per_round=1.0)
    gone = 1000 - 7 * 2

    def fails_late(node: int, asked: Message, reply: Message) -> Message | None:
        rounds = asked.content.config_records[FACTS].get("fit_rounds")
        late = isinstance(rounds, list) and 2 in rounds
        return None if node == gone and late else reply

    def never_fits(node: int, asked: Message, reply: Message) -> Message | None:
        return None if node == gone and asked.metadata.message_type == "train.fit" else reply

    for name, tamper in (("late", fails_late), ("never", never_fits)):
        federated(config, tmp_path / name, InProcessGrid(nodes(), tamper), timeout=0.3)
    late, never = (lines(tmp_path / name)[-1]["fits"]["calibration.none"] for name in ("late", "never"))
    assert late == never
    assert late["left_out"] == 1
