"""Tables and texts on Flower's nodes: the task says their form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.own import write_csv
from upfl.config import configure
from upfl.data import Source, kept
from upfl.errors import ConfigError, DataError
from upfl.flower.terms import FederationTask, Node, Terms, node_federation, unseen_federation

TASK = """
name = "wards"
classes = ["ill", "well"]
clients = 3
[input]
kind = "vectors"
features = ["a", "b"]
mean = [1.0, 2.0]
std = [2.0, 4.0]
"""


def terms(task: FederationTask) -> Terms:
    config = configure("fedavg", "digits", profile="smoke").model_copy(update={"dataset": task.name})
    return Terms(run="0" * 32, config=config, task=task)


def test_a_nodes_table_is_read_by_the_tasks_form(tmp_path: Path) -> None:
    (tmp_path / "source.toml").write_text(TASK)
    task = FederationTask.read(tmp_path / "source.toml")
    rows = [[i, 2 * i, "x", "ill" if i % 2 else "well"] for i in range(10)]
    table = write_csv(tmp_path / "mine.csv", ["b", "a", "other", "label"], rows)
    federation = node_federation(terms(task), Node(client=1, data=table))
    assert [len(held) for held in federation.training] == [0, 10, 0]
    np.testing.assert_array_equal(federation.source.x, [[2 * i, i] for i in range(10)])
    assert federation.source.labels.tolist() == [1, 0] * 5
    assert federation.source.form == task.input
    assert unseen_federation(task).source.x.shape == (1, 2)
    wrong = write_csv(tmp_path / "wrong.csv", ["a", "b", "label"], [[1, 2, "dead"]])
    with pytest.raises(DataError, match="unknown class 'dead'"):
        node_federation(terms(task), Node(client=1, data=wrong))


def test_the_file_of_a_data_set_that_was_added_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path))
    kept.keep(
        Source.from_arrays(np.eye(6, dtype=np.int64), np.arange(6) % 2, [0, 0, 1, 1, 2, 2], tokens=True, name="t")
    )
    task = FederationTask.read(kept.folder_of("t") / "source.toml")
    assert (task.clients, task.input.kind) == (3, "tokens")
    kept.keep(Source.from_arrays(np.eye(6), np.arange(6) % 2, [0, 0, 1, 1, 2, 2], name="v"))
    with pytest.raises(ConfigError, match=r"source\.toml: input\.mean and input\.std are missing"):
        FederationTask.read(kept.folder_of("v") / "source.toml")
