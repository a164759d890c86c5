"""A stopped federation is resumed to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.flower import CLIENTS, Watch, assert_same_run, federated, nodes, own_data
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import small
from upfl import api
from upfl.errors import ConfigError, StoppedError


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_stopped_run_is_resumed_to_the_same_bits_with_memory_on_the_nodes_disks(
    checkpoint_every: int, tmp_path: Path
) -> None:
    config = small("scaffold", rounds=5, checkpoint_every=checkpoint_every)
    api.train(config, tmp_path / "engine", workers=1)
    state = {"state": str(tmp_path / "node")}
    with pytest.raises(KeyboardInterrupt):
        federated(config, tmp_path / "flower", InProcessGrid(nodes(**state)), Watch(stop_after=4))
    # Another Flower run: the SuperNodes' contexts are empty again.
    federated(config, tmp_path / "flower", InProcessGrid(nodes(**state)))
    assert_same_run(tmp_path / "flower", tmp_path / "engine")
    kept = list((tmp_path / "node").glob("*/memory/*/*.safetensors"))
    assert len({path.stem.partition("-")[0] for path in kept}) <= CLIENTS
    assert len(kept) <= 2 * CLIENTS * checkpoint_every, "old versions go"


def test_memory_that_was_in_a_context_only_is_missed_after_a_new_start(tmp_path: Path) -> None:
    config = small("scaffold", rounds=3, clients_per_round=1.0)
    with pytest.raises(KeyboardInterrupt):
        federated(config, tmp_path / "run", InProcessGrid(nodes()), Watch(stop_after=2))
    some = nodes(state=str(tmp_path / "node"))
    with pytest.raises(StoppedError, match=r"memory.*2"):
        federated(config, tmp_path / "run", InProcessGrid(some))
    with pytest.raises(StoppedError, match="its memory of round 2 is gone"):
        federated(config, tmp_path / "run", InProcessGrid(nodes()))


def test_a_folder_with_another_run_is_not_resumed(tmp_path: Path) -> None:
    federated(small("fedavg", rounds=1), tmp_path / "run", InProcessGrid(nodes()))
    with pytest.raises(ConfigError, match="holds another run"):
        federated(small("fedprox", rounds=1), tmp_path / "run", InProcessGrid(nodes()))
    with pytest.raises(ConfigError, match="holds another run"):  # the budget would count rounds without noise
        federated(small("fedavg", rounds=1), tmp_path / "run", InProcessGrid(nodes()), clip=1.0, noise=1.0)


def test_a_training_that_needs_a_public_set_is_refused_for_data_of_ones_own(tmp_path: Path) -> None:
    task, files = own_data(tmp_path, [30, 30])
    grid = InProcessGrid({1: {"client": 0, "data": str(files[0])}})
    with pytest.raises(ConfigError, match="needs a public set"):
        federated(small("hetero-fedtta"), tmp_path / "run", grid, task=task)
    with pytest.raises(StoppedError, match="node 1: hetero-fedtta needs a public set"):
        federated(small("hetero-fedtta"), tmp_path / "run", grid)


def test_a_training_that_publishes_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the server sees sums alone"):
        federated(small("fedper"), tmp_path / "run", InProcessGrid(nodes()))
