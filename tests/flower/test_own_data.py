"""Nodes with files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from tests.helpers.flower import federated, own_data
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, result, server, small
from upfl import api, data
from upfl.cli.tables import markdown_table
from upfl.data.federation import Clients, Federation
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.flower import cohort
from upfl.flower.terms import nobody
from upfl.randomness import seed_of
from upfl.report.page import write_report


def test_nodes_with_files_of_their_own_train_what_the_engine_would_on_all_of_them(tmp_path: Path) -> None:
    sizes = [40, 55, 30]
    task, files = own_data(tmp_path, sizes)
    config = small("scaffold", clients_per_round=1.0)
    grid = InProcessGrid({10 + client: {"client": client, "data": str(file)} for client, file in enumerate(files)})
    federated(config, tmp_path / "flower", grid, task=task)
    # The same federation in one place: all samples in one source, each client's in the order that its node draws.
    arrays = [np.load(file) for file in files]
    digits = data.load("digits")
    source = data.Source(
        "my digits",
        np.concatenate([array["x"] for array in arrays]),
        np.concatenate([array["y"] for array in arrays]),
        digits.class_names,
        sum(sizes),
        None,
        digits.form,
    )
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    orders = [np.random.default_rng(seed_of(0, "partition", "node", i)).permutation(n) for i, n in enumerate(sizes)]
    validation = [round(config.partition.validation * size) for size in sizes]
    clients = Clients(
        np.concatenate([offsets[i] + order for i, order in enumerate(orders)]),
        offsets,
        np.array(sizes, np.int64) - np.array(validation, np.int64),
        np.zeros(len(sizes)),
    )
    folder = RunFolder.create(tmp_path / "engine", config)
    federation = Federation(source, clients, nobody(), np.empty(0, np.int64), ())
    Engine.local(folder, setup=assemble(config, federation)).run()
    flower = server(tmp_path / "flower")
    assert all(torch.equal(value, flower[name]) for name, value in server(tmp_path / "engine").items())
    ours, theirs = result(tmp_path / "flower")["rows"][0], result(tmp_path / "engine")["rows"][0]
    assert ours["validation"] == theirs["validation"] > 0
    assert ours["clients"] == theirs["clients"]
    assert "test" not in ours, "there are no new clients to score"
    assert write_report([tmp_path / "flower"], tmp_path / "page").collected.left_out == []
    assert "| - |" in markdown_table([api.Run(tmp_path / "flower")])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": 3}, "client is 3; a training node is one of 0 to 2"),
        ({"client": 1}, "client 1 is there already"),
        ({"cleint": 2}, "its node-config does not fit"),
        ({"client": 2, "data": "nowhere.npz"}, "its data cannot be used"),
        ({"client": 2, "data": "of-ms-smith.npz"}, "its data cannot be used"),
        ({}, "newcomer"),
    ],
)
def test_a_node_that_does_not_fit_is_named_and_the_others_train(
    change: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, files = own_data(tmp_path, [30, 30, 30])
    good = {client: {"client": client, "data": str(files[client])} for client in (0, 1)}
    np.savez(tmp_path / "of-ms-smith.npz", x=np.full((30, 8, 8), 213, np.uint8), y=np.zeros(30, np.int64))  # up to 16
    own = {"data": str(files[2])} | change
    own["data"] = str(tmp_path / own["data"])
    warned: list[str] = []
    sent: list[str] = []

    def overheard(node: int, asked: Message, reply: Message) -> Message:
        sent.extend(str(value) for record in reply.content.config_records.values() for value in record.values())
        return reply

    monkeypatch.setattr(cohort, "log", lambda level, text, *values: warned.append(text % values))
    federated(
        small("fedavg", clients_per_round=1.0),
        tmp_path / "run",
        InProcessGrid(good | {9: own}, overheard),
        task=task,
    )
    assert [line["clients"] for line in lines(tmp_path / "run")] == [2] * 4
    assert reason in next(text for text in warned if text.startswith("node 9 does not train"))
    for secret in (str(tmp_path), "smith", "213", "nowhere"):
        assert not [text for text in sent if secret in text], "the link learns of files or samples"
