"""Training clients that stand aside: they never train, nothing is fitted on them, and they choose the round."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.plugin_methods import assert_same, small
from upfl import api, data
from upfl.config import configure
from upfl.data.federation import build_federation
from upfl.engine.fitting import clients_of
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.errors import ConfigError
from upfl.personalize.calibration import Calibration

HELD_OUT = ("partition.held_out=0.4", "partition.clients=10")


def test_held_out_clients_keep_their_samples_and_all_others_hold_what_they_would() -> None:
    partition, source = small("fedavg").partition, data.load("digits")
    plain = build_federation(source, partition, 0).training
    held = build_federation(source, partition.revised({"held_out": 0.25}), 0).training
    aside = held.held_out
    assert aside.sum() == round(0.25 * len(held))
    assert np.array_equal(held.indices, plain.indices)
    assert (held.train_counts[aside] == 0).all()
    assert np.array_equal(held.train_counts[~aside], plain.train_counts[~aside])
    assert not plain.held_out.any()
    other = build_federation(source, partition.revised({"held_out": 0.25}), 1).training
    assert not np.array_equal(aside, other.held_out)


def test_nobody_left_to_train_is_refused() -> None:
    partition = small("fedavg").partition.revised({"kind": "iid", "clients": 2, "held_out": 0.4})
    with pytest.raises(ConfigError, match=r"partition\.held_out = 0\.4 leaves none of the 1 training clients to train"):
        build_federation(data.load("digits"), partition, 0)


@pytest.mark.bits
def test_they_take_part_in_no_round_and_no_fit_and_choose_the_round(tmp_path: Path) -> None:
    config = small("label-shift", *HELD_OUT, clients_per_round=5, rounds=2, evaluate_every=1)
    run = api.train(config, tmp_path / "one", workers=1)
    held_out = run.federation.training.held_out
    assert held_out.sum() == 2
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [3, 3], "all that train, and no more"
    assert not set(clients_of(Calibration, run.federation)) & set(np.flatnonzero(held_out))

    (row,) = run.result["rows"]
    clients = [client for client in row["clients"] if client["kind"] == "training"]
    for aside, figure in ((True, "validation"), (False, "validation_own")):
        right = [(c["accuracy"] * c["size"] / 100, c["size"]) for c in clients if c.get("held_out", False) == aside]
        assert row[figure] == pytest.approx(100 * sum(r for r, _ in right) / sum(n for _, n in right))
    best = max(line["rows"]["label-shift"]["validation"] for line in lines)
    assert row["validation"] == best
    assert {c["client"] for c in clients if c.get("held_out")} == set(np.flatnonzero(held_out))

    api.train(config, tmp_path / "two", workers=2)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_a_held_out_client_of_a_heterogeneous_federation_is_a_newcomer(tmp_path: Path) -> None:
    """It has no model of its own: what it is scored by is digested from the teacher, as a newcomer's is."""
    assert configure("hetero-fedtta", "digits").partition.held_out == 0.2
    assert configure("fedtta", "digits").partition.held_out == 0
    run = api.train(small("hetero-tent", *HELD_OUT, rounds=2, evaluate_every=2), tmp_path / "run", workers=1)
    (row,) = run.result["rows"]
    held_out = np.flatnonzero(run.federation.training.held_out)
    assert not [file for client in held_out for file in (tmp_path / "run" / "memory").glob(f"*/*{client}-*")]
    assert {"validation", "validation_own"} <= row.keys()
    engine = Engine.standing(RunFolder(run.path))
    assert all(engine.cohort.own_memory(int(client)) is None for client in held_out)
    assert engine.cohort.own_memory(int(np.flatnonzero(~run.federation.training.held_out)[0])) is not None
    assert torch.tensor([entry["clients"] for entry in row["architectures"].values()]).sum() > 0
