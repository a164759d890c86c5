"""FedPer: which layers are personal, and who is handed them."""

from pathlib import Path

import pytest

from tests.helpers.rounds import CIFAR10, FEMNIST, MLP, listen, small_config, small_run
from tests.reference import CASES, CLASSES, Somebody
from tests.runs import begun
from upfl.contract import Task
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS
from upfl.models import Layered
from upfl.randomness import generator
from upfl.training.fedper import FedPer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("model", "personal"),
    [(MLP, ["fc3"]), (CIFAR10, ["fc1", "fc2"]), (FEMNIST, ["fc1", "fc2"])],
    ids=["mlp", "convnet", "femnist"],
)
def test_fedper_shares_convolutions_and_of_an_mlp_all_but_the_last_layer(model: Layered, personal: list[str]) -> None:
    training = FedPer(Task(model, 10, 3), FedPer.Hyper())
    own = {f"psi.{layer}.{kind}" for layer in personal for kind in ("weight", "bias")}
    assert training.memory(Somebody()).keys() == own
    assert training.init(generator(1)).keys() == {f"psi.{name}" for name in model.shapes} - own


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_fedpers_personal_layers_are_in_no_upload_and_not_on_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    sent = listen(monkeypatch)
    run = small_run(tmp_path / "run", "fedper", model={"name": model, "hidden": 16, "width": 0.25})
    shared = {"mlp": ["fc1", "fc2"], "convnet": ["conv1", "conv2"]}[model]
    personal = {"mlp": ["fc3"], "convnet": ["fc1", "fc2"]}[model]
    expected = {f"psi.{layer}.{kind}" for layer in shared for kind in ("weight", "bias")}
    assert sent == dict.fromkeys(expected | {"weight", "engine.loss"}, 4 * 4)
    assert run.server.keys() == expected
    own = {f"psi.{layer}.{kind}" for layer in personal for kind in ("weight", "bias")}
    found: dict[str, set[str]] = {"memory": set(), "members": set(), "published": set()}
    for file, state in run.tensors.items():
        kind = {"memory": "memory", "best": "published", "checkpoint.safetensors": "published"}[file.split("/")[0]]
        names = {name.removeprefix("server.") for name in state if "psi." in name}
        found["members" if file.count("/") == 2 and kind == "published" else kind] |= names
    assert found == {"memory": own, "members": own, "published": expected}


def test_only_fedper_hands_out_memories_and_only_to_the_rows_that_say_so() -> None:
    assert [name for name, kind in TRAININGS.items() if kind.publishes_memory] == ["fedper"]
    training = FedPer(Task(CASES["mlp"].model, CLASSES, 3), FedPer.Hyper())
    assert [name for name, kind in PERSONALIZERS.items() if kind.why_not(training) is None] == ["sampled", "ensemble"]
    rows = {row.row: row for row in ROWS}
    assert {name for name, row in rows.items() if row.training == "fedper"} == {"pfl-sampled", "pfl-ensemble"}
    assert {name for name, row in rows.items() if row.warning} == {"pfl-sampled", "pfl-ensemble"}


def test_a_training_that_does_not_publish_memories_hands_newcomers_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four of the six clients have trained after a round: only those have a model of their own to hand out.
    for method, members in (("scaffold", 0), ("fedadg", 0), ("fedsr", 0), ("fedper", 4)):
        config = small_config(method, rounds=1)
        engine = begun(config, tmp_path / method)
        engine.run()
        assert len(engine.published().members) == members
        (best,) = {int(row["best_round"]) for row in engine.folder.result()["rows"]}
        assert len(engine.folder.load_best(best).members) == members
