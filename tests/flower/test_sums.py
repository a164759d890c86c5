"""Secure sums over the grid: the bits of a run without them, whoever is killed when, and links that cheat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from tests.helpers.flower import BAD, CLIENTS, Watch, federated, nodes, own_data
from tests.helpers.secure_grid import LinkGrid, assert_same_but_for_costs, secure_nodes
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, result, small
from upfl.errors import StoppedError
from upfl.flower.messages import ARRAYS, SECURE, from_record, problem_in, to_record
from upfl.flower.training_node import TrainingNode
from upfl.methods import TRAININGS

ALL = {"clients_per_round": 1.0}
QUICK = ["fedavg", "scaffold", "hetero-fedtta", "closed-form"]
OTHERS = [name for name, kind in TRAININGS.items() if name not in QUICK and not kind.publishes_memory]
METHODS = [*QUICK, *(pytest.param(method, marks=pytest.mark.full) for method in OTHERS)]  # all that Flower takes


@pytest.mark.bits
@pytest.mark.parametrize("method", METHODS)
def test_a_secure_run_has_the_bits_of_one_that_is_not(method: str, keys: Path, tmp_path: Path) -> None:
    in_turn = TRAININGS[method].in_turn
    config = small(method, *(["iterations=1", "filters=8"] if in_turn else []), **({} if in_turn else {"rounds": 2}))
    grid = LinkGrid(secure_nodes(keys))
    federated(config, tmp_path / "secure", grid, secure=True, compared=method == "fedavg")
    federated(config, tmp_path / "plain", InProcessGrid(nodes()))
    assert_same_but_for_costs(tmp_path / "secure", tmp_path / "plain")
    line = lines(tmp_path / "secure")[-1]
    assert line["secure"]["seconds"].keys() == {"advertise", "share", "mask", "agree", "unmask"}
    assert line["bytes_up"] == line["secure"]["bytes_up"]["train"] > 0
    assert {step for _, step, _ in grid.asked} <= {"query.introduce", *line["secure"]["seconds"]}, (
        "nothing in the clear"
    )
    assert all(entry["kind"] == "new" for row in result(tmp_path / "secure")["rows"] for entry in row["clients"])


@pytest.mark.bits
def test_data_of_ones_own_are_added_up_securely(keys: Path, tmp_path: Path) -> None:
    task, files = own_data(tmp_path, [30, 30, 40])
    config = small("fedavg", rounds=2, score=["label-shift"], **ALL)
    own = {
        node: {**about, "data": str(files[about["client"]])}
        for node, about in secure_nodes(keys).items()
        if about["client"] < 3
    }
    plain = {node: {"client": about["client"], "data": about["data"]} for node, about in own.items()}
    federated(config, tmp_path / "secure", LinkGrid(own), secure=True, task=task)
    federated(config, tmp_path / "plain", InProcessGrid(plain), task=task)
    assert_same_but_for_costs(tmp_path / "secure", tmp_path / "plain")


@pytest.mark.bits
def test_features_are_standardized_by_a_secure_sum(keys: Path, tmp_path: Path) -> None:
    task, own = tmp_path / "task.toml", {}
    task.write_text(
        'name = "wards"\nclasses = ["ill", "well"]\nclients = 3\n[input]\nkind = "vectors"\nfeatures = ["a", "b"]\n'
    )
    for node, about in secure_nodes(keys).items():
        if (client := about["client"]) < 3:
            x = np.random.default_rng(client).normal(client, 5, (20, 2))
            np.savez(tmp_path / f"{client}.npz", x=x, y=(x[:, 0] > client).astype(np.int64))
            own[node] = {**about, "data": str(tmp_path / f"{client}.npz")}
    config = small("fedavg", rounds=1, **ALL)
    plain = {node: {"client": about["client"], "data": about["data"]} for node, about in own.items()}
    grid = LinkGrid(own)
    federated(config, tmp_path / "secure", grid, secure=True, task=task)
    federated(config, tmp_path / "plain", InProcessGrid(plain), task=task)
    assert_same_but_for_costs(tmp_path / "secure", tmp_path / "plain")
    assert "query.features" not in {step for _, step, _ in grid.asked}


@pytest.mark.parametrize("step", ["advertise", "share", "mask", "agree", "unmask"])
def test_nodes_killed_at_a_step_leave_the_sum_of_those_that_remain(step: str, keys: Path, tmp_path: Path) -> None:
    """Two of eight, in the second round; the run goes on, and is that of nodes that were away from then on."""
    config, gone = small("fedavg", rounds=3, evaluate_every=3, **ALL), {BAD, 1000}
    grid, watch = LinkGrid(secure_nodes(keys)), Watch()
    asked = dict.fromkeys(gone, 0)

    def kill(node: int, asked_for: dict[str, Any]) -> bool:
        if node in gone and asked_for.get("step") == step:
            asked[node] += 1
        return node in gone and asked_for.get("step") == step and asked[node] == 2

    grid.kill = kill
    federated(config, tmp_path / "killed", grid, watch, secure=True, timeout=0.3, min_nodes=2)
    counted = step in ("agree", "unmask")  # their vectors were there already
    away = InProcessGrid(nodes())

    class Leave(Watch):
        def round(self, metrics: dict[str, Any]) -> None:
            super().round(metrics)
            if metrics["round"] == (2 if counted else 1):
                for node in gone:
                    del away.contexts[node]

    other = Leave()
    federated(config, tmp_path / "away", away, other, min_nodes=2)
    for ours, theirs in zip(watch.states, other.states, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = [line["clients"] for line in lines(tmp_path / "killed")]
    assert found == ([8, 8, 6] if counted else [8, 6, 6])
    left_out = [entry["client"] for entry in lines(tmp_path / "killed")[1]["left_out"]]
    assert left_out == ([] if counted else [0, 3])


def test_below_the_threshold_a_round_is_tried_again_even_if_more_are_killed_then(keys: Path, tmp_path: Path) -> None:
    """Four of eight at the second mask, one more while it is tried again: three remain, and their sum counts."""
    config = small("fedavg", rounds=2, **ALL)
    order, masks = sorted(nodes()), dict.fromkeys(nodes(), 0)
    grid, watch = LinkGrid(secure_nodes(keys)), Watch()

    def kill(node: int, asked: dict[str, Any]) -> bool:
        masks[node] += asked.get("step") == "mask" and asked["work"] == "train"
        first = node in order[:4] and masks[node] == 2
        return asked.get("step") == "mask" and (first or (node == order[4] and masks[node] == 3))

    grid.kill = kill
    federated(config, tmp_path / "run", grid, watch, secure=True, timeout=0.3, min_nodes=2)
    assert [line["clients"] for line in lines(tmp_path / "run")] == [8, 3]
    remaining = {node: nodes()[node] for node in order[5:]}
    plain = InProcessGrid(nodes())

    class Leave(Watch):
        def round(self, metrics: dict[str, Any]) -> None:
            super().round(metrics)
            plain.contexts = {node: context for node, context in plain.contexts.items() if node in remaining}

    other = Leave()
    federated(config, tmp_path / "plain", plain, other)
    assert all(torch.equal(watch.states[1][name], value) for name, value in other.states[1].items())


def test_a_sum_that_cannot_be_had_stops_the_run_and_names_who_was_missing(keys: Path, tmp_path: Path) -> None:
    config = small("fedavg", rounds=2, **ALL)
    grid = LinkGrid(secure_nodes(keys))
    grid.kill = lambda node, asked: asked.get("step") == "share" and node != 1000
    with pytest.raises(StoppedError, match=r"train/0 failed: .*missing: 1, 2, 3, 4, 5, 6, 7.*Client 3: did not"):
        federated(config, tmp_path / "run", grid, secure=True, timeout=0.1, min_nodes=2)
    silent = LinkGrid(secure_nodes(keys))
    silent.kill = lambda node, asked: asked.get("step") == "unmask" and node != 1000
    with pytest.raises(StoppedError, match="unmask: 1 of 6 clients"):
        federated(config, tmp_path / "other", silent, secure=True, timeout=0.1, min_nodes=2)


def test_a_fit_that_loses_a_node_ends_where_one_without_it_does(keys: Path, tmp_path: Path) -> None:
    """Nothing is done again; but what is fitted is the least loss of those that remain, in the rounds that are left."""
    config = small("fedavg", "evaluate_clients=8", rounds=1, score=["calibrated"], **ALL)
    grid, fits = LinkGrid(secure_nodes(keys)), []

    def kill(node: int, asked: dict[str, Any]) -> bool:
        if node == BAD and asked["work"] == "fit":
            fits.append(1)
        return node == BAD and len(fits) == 3

    def never_fits(node: int, asked: Message, reply: Message) -> Message | None:
        return None if node == BAD and asked.metadata.message_type == "train.fit" else reply

    grid.kill = kill
    federated(config, tmp_path / "run", grid, secure=True, timeout=0.3)
    federated(config, tmp_path / "never", InProcessGrid(nodes(), never_fits), timeout=0.3)
    ours, theirs = (lines(tmp_path / name)[0]["fits"]["calibration.none"] for name in ("run", "never"))
    assert ours["left_out"] == theirs["left_out"] == 1
    assert ours["cross_entropy"] == pytest.approx(theirs["cross_entropy"], abs=2e-4)
    assert ours["temperature"] == pytest.approx(theirs["temperature"], rel=1e-2)


# Links that cheat, over the grid


def cheated(keys: Path, out: Path, cheat: Callable[[int, Message], None], reason: str, **more: Any) -> LinkGrid:
    grid = LinkGrid(secure_nodes(keys))
    grid.cheat = cheat
    with pytest.raises(StoppedError, match=reason):
        federated(small("fedavg", rounds=1, **ALL), out, grid, secure=True, timeout=0.2, **more)
    return grid


def step_of(message: Message) -> str:
    return str(dict(message.content.config_records.get(SECURE) or ConfigRecord()).get("step"))


def test_a_link_that_asks_in_the_clear_is_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError, match="takes part in secure sums only"):
        federated(small("fedavg", rounds=1), tmp_path / "run", LinkGrid(secure_nodes(keys)))

    def plain(node: int, message: Message) -> None:
        if step_of(message) == "mask":
            message.metadata.__dict__["_message_type"] = "train"

    cheated(keys, tmp_path / "cheated", plain, "nothing goes up in the clear")


def test_a_link_that_substitutes_a_key_is_refused(keys: Path, tmp_path: Path) -> None:
    def substitute(node: int, message: Message) -> None:
        if step_of(message) == "share":
            record: dict[str, Any] = dict(message.content.config_records[SECURE])
            record["mask_keys"] = [bytes(32 * [7]), *record["mask_keys"][1:]]
            message.content[SECURE] = ConfigRecord(record)

    cheated(keys, tmp_path / "run", substitute, "client 0 are not signed by its registered key")


def test_a_link_that_gives_one_node_another_model_gets_no_sum(keys: Path, tmp_path: Path) -> None:
    def another(node: int, message: Message) -> None:
        if step_of(message) == "mask" and node == BAD:
            arrays = from_record(message.content.array_records[ARRAYS])
            message.content[ARRAYS] = to_record({name: 2 * value for name, value in arrays.items()})

    cheated(keys, tmp_path / "run", another, "asked for something else")


def test_a_link_that_shows_different_sets_of_those_that_remain_gets_no_sum(keys: Path, tmp_path: Path) -> None:
    def different(node: int, message: Message) -> None:
        if step_of(message) == "agree" and node > 980:
            message.content[SECURE] = ConfigRecord({"step": "agree", "live": [0, 1, 2, 3, 4, 5]})

    cheated(keys, tmp_path / "run", different, "did not sign what this one signed")


def test_a_link_that_names_the_same_sum_otherwise_is_refused(keys: Path, tmp_path: Path) -> None:
    def rename(node: int, message: Message) -> None:
        if step_of(message) == "advertise":
            record = message.content.config_records[SECURE]
            message.content[SECURE] = ConfigRecord({**record, "name": "train/77"})

    cheated(keys, tmp_path / "run", rename, r"the sum train/77 is not what it is asked for \(train/0\)")


def test_a_link_that_replays_a_round_is_refused(keys: Path, tmp_path: Path) -> None:
    """A node remembers from message to message what it has given its part of."""
    grid = LinkGrid(secure_nodes(keys))

    def replay(node: int, message: Message) -> None:
        record = dict(message.content.config_records.get(SECURE) or {})
        if record.get("name") == "train/1":
            message.content[SECURE] = ConfigRecord({**record, "name": "train/0"})

    grid.cheat = replay
    with pytest.raises(StoppedError, match="given its part of the sum train/0 already, and gives it once"):
        federated(small("fedavg", rounds=2, **ALL), tmp_path / "run", grid, secure=True, timeout=0.2)
    assert [line["clients"] for line in lines(tmp_path / "run")] == [8]


def test_a_link_that_asks_for_the_other_share_of_a_node_is_refused(keys: Path, tmp_path: Path) -> None:
    """Once masks came off for a set of nodes, no other set is signed: its shares would be the others."""
    grid = LinkGrid(secure_nodes(keys))
    federated(small("fedavg", rounds=1, **ALL), tmp_path / "run", grid, secure=True)
    for node in nodes():
        asked = RecordDict({SECURE: ConfigRecord({"step": "agree", "live": [0, 1, 2, 3, 4, 5]})})
        (reply,) = grid.pull_messages(grid.push_messages([Message(asked, node, "query.secure", ttl=5)]))
        assert "out of turn: it is agreed, not masked" in str(problem_in(reply))
        assert not reply.content.config_records.get(SECURE)


def test_a_node_whose_part_is_no_number_keeps_it_and_says_nothing_of_it(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = TrainingNode.trained

    def spoiled(node: TrainingNode) -> Any:
        up = dict(trained(node))
        return up | {"psi.fc1.bias": up["psi.fc1.bias"] * float("inf")} if node.id == 3 else up

    monkeypatch.setattr(TrainingNode, "trained", spoiled)
    federated(small("fedavg", rounds=1, **ALL), tmp_path / "run", LinkGrid(secure_nodes(keys)), secure=True)
    (left_out,) = lines(tmp_path / "run")[0]["left_out"]
    assert left_out == {
        "client": 3,
        "reason": "what it has to add is not finite, too large, or not of the expected form",
    }


SPOILS: dict[str, Any] = {
    "advertise": {"cipher_key": "text"},
    "share": {"clients": [float("inf")], "sealed": [b""]},
    "agree": {},
    "unmask": {"clients": [1], "shares": [b"", b""]},
}


@pytest.mark.parametrize("step", SPOILS)
def test_what_a_node_sends_that_cannot_be_read_costs_that_node_alone(step: str, keys: Path, tmp_path: Path) -> None:
    grid = LinkGrid(secure_nodes(keys))
    after = grid.tamper

    def spoil(node: int, asked: Message, reply: Message) -> Message | None:
        if node == BAD and step_of(asked) == step:
            reply.content[SECURE] = ConfigRecord(SPOILS[step])
        return after(node, asked, reply)

    grid.tamper = spoil
    federated(small("fedavg", rounds=1, **ALL), tmp_path / "run", grid, secure=True, timeout=0.3)
    (line,) = lines(tmp_path / "run")
    left_out = [] if step in ("agree", "unmask") else [(3, f"sent nothing that can be read ({step})")]
    assert [(entry["client"], entry["reason"]) for entry in line["left_out"]] == left_out


def test_an_owner_decides_how_few_a_sum_may_be_over(keys: Path, tmp_path: Path) -> None:
    few = {node: about for node, about in secure_nodes(keys, least=5).items() if about["client"] < 4}
    with pytest.raises(StoppedError, match="a sum over 4 nodes: its owner allows none over fewer than 5"):
        federated(small("fedavg", rounds=1, **ALL), tmp_path / "run", LinkGrid(few), secure=True, timeout=0.2)


def test_what_the_link_sees_of_a_round_is_noise(keys: Path, tmp_path: Path) -> None:
    grid = LinkGrid(secure_nodes(keys))
    federated(small("fedavg", rounds=1, **ALL), tmp_path / "run", grid, secure=True)
    values = np.concatenate(grid.masked[:CLIENTS]).view(np.uint64)
    bits = np.unpackbits(values.view(np.uint8)).reshape(-1, 64)
    assert len(values) > 8000
    assert (abs(bits.mean(0) - 0.5) < 6 * 0.5 / np.sqrt(len(bits))).all()


def test_noise_comes_in_shares_of_the_nodes_and_adds_up_to_what_is_promised(keys: Path, tmp_path: Path) -> None:
    """With a clipping norm far below the updates' and eight nodes, t = 6: noise of z C sqrt(8 / 6) on the sum."""
    config = small("fedavg", rounds=1, **ALL)
    clip, noise = 1e-3, 50.0
    changes = []
    for number in range(2):
        out = tmp_path / f"run-{number}"
        watch = Watch()
        federated(config, out, LinkGrid(secure_nodes(keys)), watch, secure=True, clip=clip, noise=noise)
        changes.append(torch.cat([value.flatten() for value in watch.states[0].values()]).double())
        (line,) = lines(out)
        assert line["epsilon"] > 0
        assert "loss" not in line
    spread = float((changes[0] - changes[1]).std()) / np.sqrt(2) * CLIENTS
    assert spread == pytest.approx(noise * clip * np.sqrt(CLIENTS / 6), rel=0.1)
