"""The Flower app over an in-process grid: the engine's bits, and what nodes that fail, lie or come back do to a run."""

from __future__ import annotations

import functools
import json
import math
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message

from tests.in_process_grid import InProcessGrid, Tamper
from tests.observers import Watching
from tests.plugin_methods import (
    ROOT,
    assert_memory_counted_once,
    entered,
    lines,
    result,
    server,
    small,
    tensors,
    timeless,
)
from upfl import api, data
from upfl.bundle import Bundle, PersonalModel
from upfl.cli.runs import markdown_table
from upfl.config import Config
from upfl.data.federation import Clients, Federation
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.local import LOSS
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import BadClientError, ConfigError, StoppedError, UpflError
from upfl.flower import cohort, handout, messages, privacy
from upfl.flower import server as flower_server
from upfl.flower.handout import personalize
from upfl.flower.keys import make_keys
from upfl.flower.messages import ARRAYS, FACTS, from_record, to_record
from upfl.flower.server import train
from upfl.flower.terms import Settings, nobody
from upfl.randomness import seed_of
from upfl.state import State, norm

CLIENTS = 8
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
load = functools.cache(data.load)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(messages, "POLL", 0.01)
    monkeypatch.setattr(cohort, "STEP", 0.01)
    monkeypatch.setattr(handout, "STEP", 0.01)
    monkeypatch.setattr(data, "load", load)  # every message would load the data anew
    with entered():
        yield


def nodes(**more: Any) -> dict[int, dict[str, Any]]:
    """A node for each training client; its Flower number says nothing about its client's."""
    return {1000 - 7 * client: {"client": client, **more} for client in range(CLIENTS)}


def federated(config: Config, out: Path, grid: InProcessGrid, observer: Any = None, **more: Any) -> Path:
    """A run of the Flower app that is described by a configuration as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower_server, "describe", lambda settings: config)
        train(grid, Settings(**{"out": out, "min_nodes": 1, "timeout": 5, "wait": 0.2} | more), observer)
    return out


def assert_same_run(flower: Path, engine: Path) -> None:
    """The same metrics, result and tensors; nodes keep the memories that the engine keeps in the folder."""
    assert timeless(lines(flower)) == timeless(lines(engine))
    assert result(flower) == result(engine)
    best = [path.relative_to(engine) for path in engine.glob("best/*.safetensors")]
    assert best
    for name in [*best, Path("checkpoint.safetensors")]:
        ours, theirs = tensors(flower / name), tensors(engine / name)
        if ours.pop("memory_digests", None):
            theirs.pop("memory_digests")  # of files that nodes have
        assert ours == theirs


class Watch(Watching):
    """The server's state after every round."""

    def __init__(self, stop_after: int = 0) -> None:
        self.states: list[State] = []
        self.stop_after = stop_after

    def begin(self, run: Engine[Any]) -> None:
        self.run = run

    def round(self, metrics: dict[str, Any]) -> None:
        self.states.append({name: value.clone() for name, value in self.run.progress.server.items()})
        if metrics["round"] == self.stop_after:
            raise KeyboardInterrupt


# The same bits


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
    config = small("fedavg", "partition.clients=8", rounds=1, score=["calibrated"], clients_per_round=1.0)
    gone = 1000 - 7 * 2

    def fails_late(node: int, asked: Message, reply: Message) -> Message | None:
        late = asked.content.config_records[FACTS].get("fit_round") == 2
        return None if node == gone and late else reply

    def never_fits(node: int, asked: Message, reply: Message) -> Message | None:
        return None if node == gone and asked.metadata.message_type == "train.fit" else reply

    for name, tamper in (("late", fails_late), ("never", never_fits)):
        federated(config, tmp_path / name, InProcessGrid(dict(list(nodes().items())[:4]), tamper), timeout=0.3)
    late, never = (lines(tmp_path / name)[-1]["fits"]["calibration.none"] for name in ("late", "never"))
    assert late == never
    assert late["left_out"] == 1


# Nodes with data of their own


def own_data(folder: Path, sizes: list[int], seed: int = 0) -> tuple[Path, list[Path]]:
    """Digits in files of one's own, and the task that they belong to."""
    source, rng = data.load("digits"), np.random.default_rng(seed)
    files = []
    for client, size in enumerate(sizes):
        chosen = rng.choice(len(source.labels), size, replace=False)
        files.append(folder / f"node-{client}.npz")
        np.savez(files[-1], x=source.images[chosen], y=source.labels[chosen])
    task = folder / "task.toml"
    task.write_text(
        f'name = "my digits"\nclasses = {json.dumps(source.class_names)}\nclients = {len(sizes)}\n'
        f"[input]\nshape = [1, 8, 8]\nscale = {source.scale}\nmean = {list(source.mean)}\nstd = {list(source.std)}\n"
    )
    return task, files


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
        digits.scale,
        digits.mean,
        digits.std,
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
    assert "| - |" in markdown_table([api.Run(tmp_path / "flower")])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": 3}, "client is 3; a training node is one of 0 to 2"),
        ({"client": 1}, "client 1 is there already"),
        ({"cleint": 2}, "its node-config does not fit"),
        ({"client": 2, "data": "/nowhere.npz"}, "its data cannot be used"),
        ({}, "newcomer"),
    ],
)
def test_a_node_that_does_not_fit_is_named_and_the_others_train(
    change: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, files = own_data(tmp_path, [30, 30, 30])
    good = {client: {"client": client, "data": str(files[client])} for client in (0, 1)}
    warned: list[str] = []
    monkeypatch.setattr(cohort, "log", lambda level, text, *values: warned.append(text % values))
    federated(
        small("fedavg", clients_per_round=1.0),
        tmp_path / "run",
        InProcessGrid(good | {9: {"data": str(files[2])} | change}),
        task=task,
    )
    assert [line["clients"] for line in lines(tmp_path / "run")] == [2] * 4
    assert reason in next(text for text in warned if text.startswith("node 9 does not train"))


# Replies that cannot be used

BAD = 1000 - 7 * 3


def bad_in(rounds: set[int], spoil: Any) -> Tamper:
    def tamper(node: int, asked: Message, reply: Message) -> Message | None:
        kind, facts = asked.metadata.message_type, asked.content.config_records[FACTS]
        return spoil(reply) if (node, kind) == (BAD, "train") and facts["round"] in rounds else reply

    return tamper


def spoiled(change: Any) -> Any:
    """A reply whose arrays were changed."""

    def spoil(reply: Message) -> Message:
        state = from_record(reply.content.array_records[ARRAYS])
        reply.content[ARRAYS] = to_record(change(state))
        return reply

    return spoil


def with_array(reply: Message, array: Array) -> Message:
    record = reply.content.array_records[ARRAYS]
    reply.content[ARRAYS] = ArrayRecord({**record, "psi.fc1.bias": array})
    return reply


def npy(header: str, body: bytes = b"") -> Array:
    text = header.ljust(117).encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
    return Array("float32", (16,), "numpy.ndarray", content)


SPOILS = {
    "not finite or too large": spoiled(lambda state: state | {"psi.fc1.bias": state["psi.fc1.bias"] * math.nan}),
    "expected torch.float32 [16]": spoiled(lambda state: state | {"psi.fc1.bias": torch.zeros(17)}),
    "names differ": spoiled(lambda state: {name: value for name, value in state.items() if name != "weight"}),
    "is torch.float64": spoiled(lambda state: state | {"psi.fc1.bias": state["psi.fc1.bias"].double()}),
    "above 100": spoiled(lambda state: state | {"psi.fc1.bias": torch.full((16,), 1e5)}),
    "did not reply": lambda reply: None,
    "no arrays": lambda reply: make_message(reply.metadata, RecordDict({FACTS: ConfigRecord({})})),
    # A header that announces a terabyte must not have it allocated.
    "and 0 follow": lambda reply: with_array(
        reply, npy("{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000,), }")
    ),
    "objects": lambda reply: with_array(
        reply, npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"x" * 8)
    ),
    "cannot be read": lambda reply: with_array(reply, Array("float32", (16,), "numpy.ndarray", b"nonsense")),
}


@pytest.mark.parametrize("reason", SPOILS)
def test_a_reply_that_cannot_be_used_is_left_out_and_named(reason: str, tmp_path: Path) -> None:
    config = small("counting" if reason == "did not reply" else "fedavg", rounds=3, clients_per_round=1.0)
    grid = InProcessGrid(nodes(), bad_in({1}, SPOILS[reason]))
    federated(config, tmp_path / "run", grid, timeout=0.5)
    left_out = [line["left_out"] for line in lines(tmp_path / "run")]
    assert [len(entry) for entry in left_out] == [0, 1, 0]
    assert left_out[1][0]["client"] == 3
    assert reason in left_out[1][0]["reason"]
    assert result(tmp_path / "run")["left_out"] == 1
    if reason == "did not reply":
        assert_memory_counted_once(tmp_path / "run")


def test_a_node_that_is_left_out_changes_nothing_but_its_absence(tmp_path: Path) -> None:
    config = small("scaffold", rounds=2, clients_per_round=1.0)
    nan = SPOILS["not finite or too large"]
    federated(config, tmp_path / "bad", InProcessGrid(nodes(), bad_in({0, 1}, nan)))
    absent = {node: about for node, about in nodes().items() if node != BAD}
    federated(config, tmp_path / "absent", InProcessGrid(absent))
    ours, theirs = server(tmp_path / "bad"), server(tmp_path / "absent")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_node_whose_code_fails_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPFL_TEST_FAULTS", "finish-raise:1:2 loss:2:4")
    federated(small(clients_per_round=1.0), tmp_path / "run", InProcessGrid(nodes()))
    left_out = [line["left_out"] for line in lines(tmp_path / "run")]
    assert [[entry["client"] for entry in entries] for entries in left_out] == [[], [2], [4], []]
    assert left_out[1][0]["reason"] == "its code failed (ValueError); its own log says why"
    assert left_out[2][0]["reason"] == "its loss is not finite"
    assert_memory_counted_once(tmp_path / "run")


def test_a_round_with_too_few_good_replies_is_tried_again_and_then_stops_the_run(tmp_path: Path) -> None:
    config = small("counting", rounds=3, clients_per_round=1.0)
    asked: list[int] = []

    def fails_twice(node: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.content.config_records[FACTS]["round"] == 1:
            asked.append(node)
            if len(asked) <= 2 * CLIENTS:  # two attempts
                return None
        return reply

    federated(config, tmp_path / "again", InProcessGrid(nodes(), fails_twice), timeout=0.3, min_nodes=5)
    api.train(config, tmp_path / "engine", workers=1)
    assert len(asked) == 3 * CLIENTS
    assert_same_run(tmp_path / "again", tmp_path / "engine")

    silent = InProcessGrid(nodes(), lambda node, message, reply: None if is_round(message, 1) else reply)
    with pytest.raises(StoppedError, match=r"round 2: 0 good replies .* 5 are needed"):
        federated(config, tmp_path / "stopped", silent, timeout=0.1, min_nodes=5)
    assert len(lines(tmp_path / "stopped")) == 1
    silent.tamper = lambda node, message, reply: reply
    federated(config, tmp_path / "stopped", silent, min_nodes=5)
    assert_same_run(tmp_path / "stopped", tmp_path / "engine")


def is_round(message: Message, round: int) -> bool:
    facts = message.content.config_records[FACTS]
    return message.metadata.message_type == "train" and facts["round"] == round


def test_too_few_nodes_stop_the_run_with_the_reason_of_those_that_do_not_fit(tmp_path: Path) -> None:
    grid = InProcessGrid({1: {"client": 0}, 2: {"client": 99}})
    with pytest.raises(StoppedError, match=r"only 1 training node\(s\) .* 2 are needed .* node 2: .*client is 99"):
        federated(small("fedavg"), tmp_path / "run", grid, min_nodes=2)


def test_a_node_that_joins_later_takes_part_and_one_that_leaves_is_named(tmp_path: Path) -> None:
    grid = InProcessGrid(nodes())
    late = {node: grid.contexts.pop(node) for node in (1000, 993)}

    class Comings(Watch):
        def round(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 1:
                grid.contexts.update(late)
            if metrics["round"] == 2:
                del grid.contexts[BAD]

    federated(small("counting", clients_per_round=1.0), tmp_path / "run", grid, Comings())
    assert [line["clients"] for line in lines(tmp_path / "run")] == [6, 8, 7, 7]
    assert [line.get("absent") for line in lines(tmp_path / "run")] == [None, None, [3], [3]]
    assert_memory_counted_once(tmp_path / "run")


# Resume


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


# Bundle and newcomers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    settings = ("iterations=10", "model.hidden=64")
    config = small("fedtta", *settings, rounds=6, evaluate_every=6, clients_per_round=1.0, score=["none"])
    return federated(config, path, InProcessGrid(nodes()))


def newcomers(tmp_path: Path) -> tuple[InProcessGrid, np.ndarray]:
    source = data.load("digits")
    chosen = np.flatnonzero(np.isin(source.labels, [3, 8]))[:120]
    np.savez(tmp_path / "mine.npz", x=source.images[chosen])
    own = {"data": str(tmp_path / "mine.npz"), "out": str(tmp_path / "me"), "personalizer": "none"}
    shy, frank = {2: {**own}}, {3: {"newcomer": 0, "share": "estimates"}}
    broken = {4: {"data": str(tmp_path / "secret-place.npz")}}
    return InProcessGrid(nodes() | shy | frank | broken), chosen


def test_newcomers_personalize_and_send_back_only_what_their_owner_allows(trained: Path, tmp_path: Path) -> None:
    grid, chosen = newcomers(tmp_path)
    settings = Settings(mode="personalize", bundle=trained / "bundle", profile="smoke", min_nodes=2, wait=5, timeout=5)
    told = {about.pop("node"): about for about in personalize(grid, settings)}
    assert told.keys() == {2, 3, 4}
    assert told[2] == {"samples": 120}
    assert told[3].keys() >= {"samples", "entropy", "personalizer"}
    assert told[4] == {"problem": "it could not personalize; its own log says why"}
    source = data.load("digits")
    mine, bundle = PersonalModel.load(tmp_path / "me"), Bundle.load(trained / "bundle")
    again = bundle.personalize(source.images[chosen], "none")
    assert (mine.predict(source.images[chosen]) == again.predict(source.images[chosen])).all()


def test_a_bundle_that_was_changed_on_its_way_is_refused(trained: Path, tmp_path: Path) -> None:
    grid, _ = newcomers(tmp_path)
    push = grid.push_messages

    def changed(sent: Any) -> Any:
        for message in (asked := list(sent)):
            files = message.content.array_records[ARRAYS]
            weights = files["weights.safetensors"].numpy().copy()
            weights[-1] ^= 1
            message.content[ARRAYS] = ArrayRecord({**files, "weights.safetensors": Array(weights)})
        return push(asked)

    grid.push_messages = changed  # type: ignore[method-assign, assignment]
    settings = Settings(
        mode="personalize", bundle=trained / "bundle", profile="smoke", min_nodes=1, wait=0.2, timeout=5
    )
    with pytest.raises(StoppedError, match="no newcomer personalized"):
        personalize(grid, settings)
    assert not (tmp_path / "me").exists()


def test_the_bundle_is_the_best_rounds_state_with_the_runs_personalizers(trained: Path) -> None:
    bundle = Bundle.load(trained / "bundle")
    scored = bundle.manifest.summary["validation"]
    best = load_file(trained / "best" / f"round-{bundle.published.round}.safetensors")
    assert all(torch.equal(bundle.published.state[name], value) for name, value in best.items() if "." in name)
    assert set(bundle.personalizers) == {"one-step", "none"}
    assert bundle.manifest.default == max(scored, key=lambda name: scored[name])
    assert bundle.manifest.task.classes == tuple("0123456789")


def test_a_newcomer_of_each_size_personalizes_from_the_bundle_of_a_heterogeneous_federation(tmp_path: Path) -> None:
    federated(small("hetero-fedtta"), tmp_path / "run", InProcessGrid(nodes()))
    sizes = list(Bundle.load(tmp_path / "run" / "bundle").manifest.architectures)
    assert len(sizes) == 3
    asked = {i: {"newcomer": i, "architecture": size, "out": str(tmp_path / size)} for i, size in enumerate(sizes, 1)}
    odd = {9: {"newcomer": 0, "architecture": "gigantic"}}
    settings = Settings(
        mode="personalize", bundle=tmp_path / "run" / "bundle", profile="smoke", min_nodes=3, wait=5, timeout=5
    )
    told = {about["node"]: about for about in personalize(InProcessGrid(asked | odd), settings)}
    assert "problem" in told[9]
    models = [PersonalModel.load(tmp_path / size) for size in sizes]
    assert [model.manifest.architecture for model in models] == sizes
    assert len({sum(value.numel() for value in model.predictor.params[0].values()) for model in models}) == 3


# Privacy


def exact_delta(noise: float, rounds: int, epsilon: float) -> float:
    """The hockey-stick divergence of N(0, 1) and N(mu, 1) by summing over a fine grid: nothing of the closed form."""
    mu = math.sqrt(rounds) / noise
    x = np.linspace(-40, 40 + mu, 2_000_001)
    p, q = (np.exp(-0.5 * (x - centre) ** 2) / math.sqrt(2 * math.pi) for centre in (mu, 0.0))
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(
    ("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (2.0, 40, 1e-6), (0.7, 3, 1e-3), (10.0, 1, 0.5)]
)
def test_the_budget_is_the_exact_one_of_the_gaussian_mechanism(noise: float, rounds: int, delta: float) -> None:
    spent = privacy.epsilon(noise, rounds, delta)
    if spent:
        assert exact_delta(noise, rounds, spent) == pytest.approx(delta, rel=1e-4)
    assert exact_delta(noise, rounds, spent) <= delta * (1 + 1e-4)


def test_the_budget_agrees_with_published_values_and_known_limits() -> None:
    # Balle and Wang's analytic mechanism: sigma = 1 and delta = 1e-5 give 4.3775; rounds are a larger sensitivity.
    assert privacy.epsilon(1.0, 1, 1e-5) == pytest.approx(4.3775, abs=1e-3)
    assert privacy.epsilon(3.0, 9, 1e-5) == pytest.approx(privacy.epsilon(1.0, 1, 1e-5), rel=1e-9)
    assert privacy.epsilon(1.0, 0, 1e-5) == 0
    spent = [privacy.epsilon(1.0, rounds, 1e-5) for rounds in (1, 2, 5, 1000, 100_000)]
    assert spent == sorted(spent)
    # The classical bound is weaker.
    assert privacy.epsilon(5.0, 1, 1e-5) < math.sqrt(2 * math.log(1.25 / 1e-5)) / 5.0
    assert math.isfinite(spent[-1])


def test_noise_is_standard_normal_and_never_twice_the_same() -> None:
    values = privacy.secret_normal(200_001)
    assert len(values) == 200_001
    assert abs(float(values.mean())) < 6 / math.sqrt(len(values))
    assert abs(float(values.var()) - 1) < 6 * math.sqrt(2 / len(values))
    assert abs(float((values.abs() < 1).double().mean()) - 0.6826895) < 6 * 0.466 / math.sqrt(len(values))
    assert float(values.abs().max()) < 8
    assert not torch.equal(values, privacy.secret_normal(200_001))


def test_noise_on_the_sum_has_the_scale_that_was_asked_for() -> None:
    like = {"a": torch.zeros(50_000), "weight": torch.tensor(1.0), LOSS: torch.zeros((), dtype=torch.float64)}
    total = FixedPointSum(like, 2)
    for _ in range(2):
        total.add(like | {"weight": torch.tensor(1.0)})
    privacy.Privacy(clip=0.5, noise=3.0).disturb(total)
    assert float(total["a"].std()) == pytest.approx(1.5, rel=6 / math.sqrt(2 * 50_000))
    assert (float(total["weight"]), float(total[LOSS]), total.count) == (2, 0, 2)


def test_a_private_run_reports_its_budget_and_asks_nodes_for_nothing_else(tmp_path: Path) -> None:
    config = small("fedtta", rounds=3, clients_per_round=1.0)
    kinds: set[str] = set()
    sent: list[State] = []

    def listen(node: int, asked: Message, reply: Message) -> Message:
        kinds.add(asked.metadata.message_type)
        if asked.metadata.message_type == "train":
            sent.append(from_record(reply.content.array_records[ARRAYS]))
        return reply

    federated(config, tmp_path / "run", InProcessGrid(nodes(), listen), clip=0.05, noise=2.0, delta=1e-4)
    assert kinds == {"query.introduce", "train"}, "validation is not covered by the noise: it is not asked for"
    for up in sent:
        assert float(up[LOSS]) == 0
        change = float(norm([value.double() for name, value in up.items() if name not in ("weight", LOSS)]))
        assert change <= 0.05
        assert change == pytest.approx(0.05, rel=1e-4), "these updates are longer than the clipping norm"
    found = lines(tmp_path / "run")
    assert [line["epsilon"] for line in found] == [privacy.epsilon(2.0, rounds, 1e-4) for rounds in (1, 2, 3)]
    assert all("loss" not in line for line in found)
    assert "validation" not in found[-1]["rows"]["fedtta"]
    spent = result(tmp_path / "run")["privacy"]
    assert spent == {"clip": 0.05, "noise": 2.0, "delta": 1e-4, "epsilon": found[-1]["epsilon"], "rounds": 3}
    assert result(tmp_path / "run")["rows"][0]["best_round"] == 3, "nothing tells rounds apart: the last one counts"
    assert Bundle.load(tmp_path / "run" / "bundle").manifest.summary["privacy"] == spent


def test_without_noise_to_speak_of_and_a_wide_clip_a_private_run_is_fedavg(tmp_path: Path) -> None:
    config = small("fedavg", rounds=2)
    federated(config, tmp_path / "private", InProcessGrid(nodes()), clip=1e3, noise=1e-9)
    federated(config, tmp_path / "plain", InProcessGrid(nodes()))
    ours, theirs = server(tmp_path / "private"), server(tmp_path / "plain")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


@pytest.mark.parametrize("change", [{"psi.fc1.bias": torch.full((16,), 0.2)}, {"weight": torch.tensor(2.0)}])
def test_a_private_round_refuses_what_was_not_clipped_or_not_weighted_alike(change: State, tmp_path: Path) -> None:
    grid = InProcessGrid(nodes(), bad_in({0}, spoiled(lambda state: state | change)))
    federated(small("fedavg", rounds=1, clients_per_round=1.0), tmp_path / "run", grid, clip=0.1, noise=1.0)
    (left_out,) = lines(tmp_path / "run")[0]["left_out"]
    assert left_out["client"] == 3
    assert "clipping norm" in left_out["reason"] or "weight is not 1" in left_out["reason"]


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fedgma", {}, "clients send more than"),
        ("afl", {}, "clients send more than"),
        ("odpfl-hn", {}, "clients send more than"),
        ("fedavg", {"training": {"aggregation": "samples"}}, "equally weighted"),
        ("fedavg", {"checkpoint_every": 2}, "checkpoint_every=1"),
        ("fedavg", {"score": ["label-shift"]}, "do not cover what is fitted"),
    ],
)
def test_privacy_is_refused_where_it_would_not_hold(
    method: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        federated(small(method, **options), tmp_path / "run", InProcessGrid(nodes()), clip=1.0, noise=1.0)
    assert not (tmp_path / "run").exists(), "what cannot start leaves no folder behind"


# Messages, settings, keys


def test_a_state_comes_back_from_a_record_as_it_was() -> None:
    state = {
        "psi.conv1.weight": torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "signs": torch.tensor([[1, -1]], dtype=torch.int8),
        "none": torch.zeros(0, 4),
        "a.b": torch.arange(3),
    }
    back = from_record(to_record(state))
    assert list(back) == list(state)
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items())


def test_values_out_of_order_are_refused() -> None:
    column_major = Array(np.asfortranarray(np.zeros((2, 3))))
    with pytest.raises(BadClientError, match="'a' cannot be read"):
        from_record(ArrayRecord({"a": column_major}))


def test_the_app_offers_every_setting_with_its_default() -> None:
    offered = tomllib.loads((ROOT / "flower" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {key.replace("-", "_") for key in offered} == Settings.model_fields.keys()
    assert Settings.of(offered, "pyproject.toml") == Settings()


def test_the_app_installs_nothing() -> None:
    app = tomllib.loads((ROOT / "flower" / "pyproject.toml").read_text())
    assert app["project"]["dependencies"] == []


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run-config: .*\n.*mode"):
        Settings.of({"mode": "trian"}, "run-config")
    with pytest.raises(ConfigError, match="clip and noise belong together"):
        Settings.of({"clip": 1.0}, "run-config")
    with pytest.raises(ConfigError, match="absolute path"):
        train(InProcessGrid({}), Settings(out=Path("here")))


def test_keys_are_for_their_owner_alone_and_are_not_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1"], 2, "127.0.0.1:8000")
    found = {path.name for path in (tmp_path / "keys").iterdir()}
    assert found >= {"ca.crt", "superlink.pem", "superlink.key", "node-1.key", "node-1.pub", "node-2.key"}
    assert "ca.key" not in found, "who has it could pose as the SuperLink"
    for path in [tmp_path / "keys", *(tmp_path / "keys").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    with pytest.raises(UpflError, match="is there already"):
        make_keys(tmp_path / "keys", ["localhost"], 1, "127.0.0.1:8000")
