"""Tables and texts on Flower's nodes: the task says their form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flwr.app import Message
from numpy.typing import NDArray
from PIL import Image

from tests.helpers.flower import assert_same_run, federated
from tests.helpers.own import write_csv
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import small
from upfl.bundle import Bundle
from upfl.config import configure
from upfl.data import Source, kept, load
from upfl.data.forms import Pixels, Vectors
from upfl.engine.folder import RunFolder
from upfl.errors import ConfigError, DataError, StoppedError
from upfl.flower.messages import ARRAYS, from_record, to_record
from upfl.flower.terms import FederationTask, Node, Terms, node_federation, unseen_federation
from upfl.randomness import seed_of

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


def test_a_nodes_images_may_be_in_a_table(tmp_path: Path) -> None:
    digits = FederationTask(name="d", classes=("0", "1"), input=load("digits").form, clients=2)
    content = []
    for value in range(4):
        Image.new("L", (8, 8), 10 * value).save(tmp_path / "one.png")
        content.append((tmp_path / "one.png").read_bytes())
    pq.write_table(pa.table({"scan": content, "label": [0, 1, 1, 0]}), tmp_path / "mine.parquet")
    federation = node_federation(terms(digits), Node(client=0, data=tmp_path / "mine.parquet"))
    assert federation.source.x[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert federation.source.labels.tolist() == [0, 1, 1, 0]
    assert isinstance(federation.source.form, Pixels)
    assert federation.source.form.scale == 255, "as image files have it"


def test_the_file_of_a_data_set_that_was_added_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path))
    kept.keep(
        Source.from_arrays(np.eye(6, dtype=np.int64), np.arange(6) % 2, [0, 0, 1, 1, 2, 2], tokens=True, name="t")
    )
    task = FederationTask.read(kept.folder_of("t") / "source.toml")
    assert (task.clients, task.input.kind) == (3, "tokens")
    kept.keep(Source.from_arrays(np.eye(6), np.arange(6) % 2, [0, 0, 1, 1, 2, 2], name="v"))
    assert FederationTask.read(kept.folder_of("v") / "source.toml").open, "nodes' sums will tell mean and deviation"


OPEN = "\n".join(line for line in TASK.splitlines() if not line.startswith(("mean", "std")))
WHOLE = {"clients_per_round": 1.0, "rounds": 2}


def wards(folder: Path) -> tuple[list[Path], NDArray[np.float32]]:
    """A table for each of three nodes, and all that they train on."""
    files, seen = [], []
    for client, size in enumerate((20, 30, 25)):
        rng = np.random.default_rng(client)
        x = (rng.normal(size=(size, 2)) * [1.0, 100.0] + [client, 1e4]).astype(np.float32)
        rows = [[*map(repr, row), "ill" if row[0] > client else "well"] for row in x.tolist()]
        files.append(write_csv(folder / f"ward-{client}.csv", ["a", "b", "label"], rows))
        order = np.random.default_rng(seed_of(0, "partition", "node", client)).permutation(size)
        seen.append(x[order[: size - round(0.15 * size)]])
    return files, np.concatenate(seen)


@pytest.mark.bits
def test_nodes_sum_up_their_features_and_train_as_with_the_mean_that_these_give(tmp_path: Path) -> None:
    files, seen = wards(tmp_path)
    config = small("fedavg", score=["refit"], **WHOLE)
    about = {10 + client: {"client": client, "data": str(file)} for client, file in enumerate(files)}
    (tmp_path / "open.toml").write_text(OPEN)
    run = federated(config, tmp_path / "run", InProcessGrid(about), task=tmp_path / "open.toml", min_nodes=3)
    form = Terms.model_validate_json(RunFolder.open(run).terms()).task.input
    assert isinstance(form, Vectors)
    np.testing.assert_allclose(form.mean, seen.mean(0, np.float64), rtol=1e-6)
    np.testing.assert_allclose(form.std, seen.std(0, dtype=np.float64), rtol=1e-6)
    assert Bundle.load(run / "bundle").manifest.task.input == form
    told = "\n".join([OPEN, f"mean = {list(form.mean)}", f"std = {list(form.std)}"])
    (tmp_path / "told.toml").write_text(told)
    other = federated(config, tmp_path / "told", InProcessGrid(about), task=tmp_path / "told.toml", min_nodes=3)
    assert_same_run(run, other)
    again = InProcessGrid(about)
    federated(config, run, again, task=tmp_path / "open.toml", min_nodes=3)
    assert again.sent == 0, "the run is finished, and what was found is kept"


def test_a_node_whose_sums_cannot_be_is_left_out_and_too_few_stop_the_run(tmp_path: Path) -> None:
    files, _ = wards(tmp_path)
    about = {10 + client: {"client": client, "data": str(file)} for client, file in enumerate(files)}
    (tmp_path / "open.toml").write_text(OPEN)

    def lie(node: int, asked: Message, reply: Message) -> Message:
        if node == 11 and asked.metadata.message_type == "query.features":
            state = from_record(reply.content.array_records[ARRAYS])
            reply.content[ARRAYS] = to_record(state | {"squares": state["squares"] + 2**50})
        return reply

    config, task = small("fedavg", **WHOLE), tmp_path / "open.toml"
    run = federated(config, tmp_path / "run", InProcessGrid(about, lie), task=task, min_nodes=2)
    form = Terms.model_validate_json(RunFolder.open(run).terms()).task.input
    assert isinstance(form, Vectors)
    assert form.std[0] < 2
    with pytest.raises(StoppedError, match="2 nodes gave good sums of features, and 3 are needed"):
        federated(config, tmp_path / "other", InProcessGrid(about, lie), task=task, min_nodes=3)
    with pytest.raises(ConfigError, match="clip and noise do not cover sums of features"):
        federated(config, tmp_path / "private", InProcessGrid(about), task=task, clip=1.0, noise=1.0)
