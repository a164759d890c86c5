"""What every training and every personalizer of the table has to keep to. A new one is tested by being registered.

Beside the table's own, a training whose clients remember is tested here, so that the suite covers memory whether or
not the table has such a row.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.observers import Watching
from upfl.config import Config, configure
from upfl.contract import Batch, Client, CrossFitted, Personalized, Personalizer, Published, Task, Training, Unlabelled
from upfl.data import Federation, Source
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient, newcomer, validation_client
from upfl.engine.evaluate import evaluate
from upfl.engine.fitting import fit_needs
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder, read_state
from upfl.engine.group import Group
from upfl.engine.rounds import Engine, assemble
from upfl.errors import ConfigError, RunError
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, make_personalizer, resolve
from upfl.models import mlp
from upfl.personalize.calibration import Correction
from upfl.randomness import generator
from upfl.state import State, byte_size, prefixed, select
from upfl.training.fedavg import FedAvg

CPU = torch.device("cpu")
ROUNDS = 4
CLIENTS = 6  # of each kind


class Remembering(FedAvg):
    """FedAvg whose clients keep a last layer of their own and count the rounds they took part in."""

    name = "remembering"
    title = "Remembering"
    remembers = True

    def memory(self, client: Client) -> State:
        fresh = prefixed("psi", self.model.init(client.generator("head")))
        return {name: fresh[name] for name in self._own()} | {"rounds": torch.tensor(0)}

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = {name: value.clone() for name, value in memory.items()}
        return super().begin(server, {}, client) | own

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        memory = {name: carry[name].contiguous() for name in self._own()}
        return up | {"taking_part": torch.tensor(1)}, memory | {"rounds": carry["rounds"] + 1}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        own = {name: memory[name] for name in self._own()} if memory else {}
        return super().start(published, client, memory) | select(own, "psi")

    def _own(self) -> list[str]:
        return [f"psi.{self.model.head}.{kind}" for kind in ("weight", "bias")]


def _corrects(personalizer: str) -> bool:
    return issubclass(PERSONALIZERS[personalizer], Correction)


def _is_fitted(personalizer: str) -> bool:
    return PERSONALIZERS[personalizer].needs is not Personalizer.needs


def _table() -> dict[str, list[str]]:
    """Every training, with the personalizers that fit it."""
    fitting = {}
    trainings: dict[str, type[Training[Any]]] = TRAININGS | {Remembering.name: Remembering}
    for name, kind in trainings.items():
        task = Task(mlp(64, (16, 16), 10), 10, CLIENTS, public=torch.zeros(20, 1, 8, 8))
        training = kind(task, kind.Hyper())
        fitting[name] = [key for key, personalizer in PERSONALIZERS.items() if personalizer.why_not(training) is None]
    return fitting


TABLE = _table()
# Corrections see predictions only, so that one training meets all of them here; `make test-all` has every pair.
TOGETHER = {
    name: [key for key in fitting if name == "fedavg" or key == "label-shift" or not _corrects(key)]
    for name, fitting in TABLE.items()
}
# What whole runs are scored under. Fits over the training clients take longer than the runs: they are made where
# clients all begin alike, where each begins from its memory, and where they differ in architecture and are guided.
SCORED = {
    name: [key for key in paired if name in ("fedavg", Remembering.name, "hetero-fedtta") or not _is_fitted(key)]
    for name, paired in TOGETHER.items()
}
of_every_training = pytest.mark.parametrize("name", TABLE)
of_every_pair = pytest.mark.parametrize(
    ("name", "personalizer"),
    [
        pytest.param(name, personalizer, marks=[] if personalizer in TOGETHER[name] else pytest.mark.full)
        for name, fitting in TABLE.items()
        for personalizer in fitting
    ],
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setitem(TRAININGS, Remembering.name, Remembering)


def config_of(name: str, **options: Any) -> Config:
    """A run of a second or a few: digits, six clients of each kind, scored as `SCORED` says.

    Some gradients are clipped: their norm is where an order of tensors would show in the bits.
    """
    small = {
        "iterations": 3,
        "batch_size": 16,
        "clip": 0.3,
        "digest_epochs": 2,
        "digest_batch": 10,
        "newcomer_epochs": 2,
    }
    settings = [f"{key}={value}" for key, value in small.items() if key in TRAININGS[name].Hyper.model_fields]
    scale: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients_per_round": 4,
        "evaluate_every": 2,
        "evaluate_clients": 3,
        "model": {"hidden": 16},
        "partition": {"clients": 2 * CLIENTS},
    }
    return configure(name, "digits", profile="smoke", settings=settings, score=SCORED[name], **(scale | options))


# Whole runs


@dataclass
class Outcome:
    """All that a run leaves behind, without times."""

    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    tensors: dict[str, State]  # by file: checkpoint, best states, memories

    @property
    def server(self) -> State:
        return select(self.tensors["checkpoint.safetensors"], "server")


def outcome(folder: RunFolder) -> Outcome:
    files = sorted(folder.path.rglob("*.safetensors"))
    tensors = {str(file.relative_to(folder.path)): read_state(file)[0] for file in files}
    return Outcome(_timeless(folder.metrics()), folder.result(), tensors)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not key.endswith("_s")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.metrics == theirs.metrics
    assert ours.result == theirs.result
    assert ours.tensors.keys() == theirs.tensors.keys()
    for file, state in theirs.tensors.items():
        assert_same_bits(ours.tensors[file], state, file)


def assert_same_bits(ours: State, theirs: State, where: str = "") -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, f"{where} {name}"
        assert torch.equal(ours[name], value), f"{where} {name}"


def ran(config: Config, path: Path) -> Outcome:
    folder = RunFolder.create(path, config)
    Engine(folder, Group()).run()
    return outcome(folder)


_straight: dict[str, Outcome] = {}


def straight(name: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that others are compared with, made once in a process."""
    if name not in _straight:
        _straight[name] = ran(config_of(name), tmp_path_factory.mktemp("straight") / "run")
    return _straight[name]


@of_every_training
def test_the_same_seed_gives_the_same_bits(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    reference = straight(name, tmp_path_factory)
    assert len(reference.metrics) == ROUNDS
    assert all(math.isfinite(line["loss"]) for line in reference.metrics)
    assert len(reference.metrics[-1]["rows"]) == len(reference.result["rows"]) == len(SCORED[name])
    assert_same(ran(config_of(name), tmp_path / "run"), reference)


@of_every_training
def test_another_seed_gives_other_bits(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, other = straight(name, tmp_path_factory), ran(config_of(name, seed=1), tmp_path / "run")
    assert [line["loss"] for line in first.metrics] != [line["loss"] for line in other.metrics]
    moving = [key for key, value in first.server.items() if value.is_floating_point()]
    assert not any(torch.equal(first.server[key], other.server[key]) for key in moving)


class Meeting:
    """Where workers in threads of this process add up their integers."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120)
        self.brought: list[Tensor] = [torch.empty(0)] * size


class VirtualGroup(Group):
    """A worker that is a thread: its share of the clients is its own, the sums go through a meeting."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def sum_(self, values: Tensor) -> None:
        assert values.dtype == torch.int64
        self.meeting.brought[self.rank] = values.clone()
        self.meeting.barrier.wait()
        total = torch.stack(self.meeting.brought).sum(0)
        self.meeting.barrier.wait()
        values.copy_(total)


def by_virtual_workers(size: int, work: Callable[[VirtualGroup], None]) -> None:
    """Have so many workers do the same, each in a thread of its own; the first error is raised here."""
    meeting = Meeting(size)
    errors: list[BaseException] = []

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            work(VirtualGroup(rank, size, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def ran_by_workers(config: Config, path: Path, size: int) -> Outcome:
    folder = RunFolder.create(path, config)
    by_virtual_workers(size, lambda group: Engine(folder, group).run())
    return outcome(folder)


@of_every_training
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_any_number_of_workers_gives_the_same_bits(
    name: str, size: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_same(ran_by_workers(config_of(name), tmp_path / "run", size), straight(name, tmp_path_factory))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_workers_shares_are_all_the_items_and_nothing_twice(size: int) -> None:
    items = list(range(10))
    for cost in (None, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]):
        shares = [Group(rank, size).share(items, cost) for rank in range(size)]
        assert sorted(item for share in shares for item in share) == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


class StopError(Exception):
    """What an interrupted run ends with, here."""


class Interrupter(Watching):
    """Stops a run when the n-th stage (or round's end) of a kind is reached."""

    def __init__(self, what: str, number: int) -> None:
        self.what, self.left = what, number

    def stage(self, what: str) -> None:
        self._count(what.split()[0])

    def round(self, metrics: dict[str, Any]) -> None:
        self._count("round")

    def _count(self, what: str) -> None:
        self.left -= what == self.what
        if self.left == 0:
            raise StopError


@of_every_training
@pytest.mark.parametrize(
    ("what", "number", "checkpoint_every"),
    [
        ("scoring", -1, 1),
        ("round", 3, 2),
        pytest.param("scoring", 1, 1, marks=pytest.mark.full),
        pytest.param("round", 1, 2, marks=pytest.mark.full),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_that_never_stopped(
    name: str, what: str, number: int, checkpoint_every: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """-1: the last scoring, when the last round's training and memories are done and nothing of it is committed."""
    config = config_of(name, checkpoint_every=checkpoint_every)
    folder = RunFolder.create(tmp_path / "run", config)
    stage = 2 * len(SCORED[name]) if number < 0 else number
    with pytest.raises(StopError):
        Engine(folder, Group()).run(Interrupter(what, stage))
    assert not folder.finished
    with pytest.raises(StopError):  # and once more: the first stage after the resumption
        Engine(folder, Group()).run(Interrupter("training", 1))
    Engine(folder, Group()).run()
    assert_same(outcome(folder), straight(name, tmp_path_factory))


@of_every_training
def test_two_rounds_and_two_more_are_four(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = config_of(name)
    folder = RunFolder.create(tmp_path / "run", config)
    Engine(folder, Group(), config.model_copy(update={"rounds": 2})).run()
    Engine(folder, Group()).run()
    assert_same(outcome(folder), straight(name, tmp_path_factory))


# What is sent


@of_every_training
def test_bytes_sent_in_a_round_are_those_of_the_tensors(
    name: str, parts: Parts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of what a client really sends, in its own types; where a training counts otherwise, the next test has it."""
    training, client = parts.training, parts.client(1)
    up, _ = train_one(training, parts.server, training.memory(client), client)
    reference = straight(name, tmp_path_factory)
    for line in reference.metrics:
        down = training.bytes_down(parts.server, line["round"] - 1)
        assert line["bytes_down"] == 4 * down  # participants
        if name != "odpfl-hn":
            assert line["bytes_up"] == line["clients"] * byte_size(up)
            assert down == (byte_size(parts.server) if line["round"] > 1 or not training.heterogeneous else 0)
    for sent in ("bytes_up", "bytes_down"):
        assert reference.result[sent] == sum(line[sent] for line in reference.metrics)


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedavg", 1, 1),
        ("scaffold", 2, 2),  # with the control variates
        ("fedgma", 1.25, 1),  # with signs of one byte
        ("odpfl-hn", 1, 1),  # and the encoder's: the hypernetwork stays at the server
        ("hetero-fedtta", 0, 0),  # logits on the public set alone
    ],
)
def test_a_client_sends_and_receives_so_many_models(
    name: str, up: float, down: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config, line = config_of(name), straight(name, tmp_path_factory).metrics[-1]
    training = assemble(config, CPU)[2]
    model, weight = 4 * mlp(64, (16, 16), 10).size, 4
    beside = {
        "odpfl-hn": 4 * (mlp(64, (16,), 32).size + 32),
        "hetero-fedtta": 4 * 2 * 10 * round(config.partition.public * 1797),
    }.get(name, 0)
    assert line["bytes_up"] / line["clients"] == up * model + beside + weight
    assert line["bytes_down"] / 4 == down * model + beside
    assert training.model.size * 4 == model


# Clients that go wrong


class Poisoned(Inputs):
    """Inputs of which some samples are not numbers."""

    def __init__(self, source: Source, bad: NDArray[np.int64]) -> None:
        super().__init__(source)
        self.bad = bad

    def x(self, indices: NDArray[np.int64], angle: float = 0.0) -> Tensor:
        x = super().x(indices, angle)
        x[torch.from_numpy(np.isin(indices, self.bad))] = math.nan
        return x


def begun(config: Config, path: Path) -> Engine:
    return Engine(RunFolder.create(path, config), Group())


def train_one(training: Training[Any], server: State, memory: State, client: LocalClient) -> tuple[State, State]:
    """A client's round by the contract: what goes up, what the client keeps."""
    carry = training.begin(server, memory, client)
    with torch.no_grad():
        for phase in training.phases(client.round):
            for batch in client.phase(phase):
                carry, loss = phase.step(carry, batch, client.round)
                assert loss.dim() == 0
                assert loss.isfinite()
        up, kept = training.finish(server, carry, client)
        return dict(up), kept


def folded(training: Training[Any], server: State, clients: Iterable[LocalClient]) -> FixedPointSum:
    """The sum of what clients send in their first round."""
    ups = [train_one(training, server, training.memory(client), client)[0] for client in clients]
    total = FixedPointSum(ups[0], len(ups), training.scales)
    for up in ups:
        total.add(up)
    return total


def spoil_data(engine: Engine, clients: Iterable[int]) -> None:
    bad = np.concatenate([engine.federation.training.train(client) for client in clients])
    engine.inputs = Poisoned(engine.federation.source, bad)


def spoil_upload(engine: Engine, clients: Iterable[int]) -> None:
    """One value of what these clients send is infinite."""
    finish: Callable[[State, State, Client], tuple[Mapping[str, Tensor], State]] = engine.training.finish
    spoiled = set(clients)

    def finish_badly(server: State, carry: State, client: Client) -> tuple[Mapping[str, Tensor], State]:
        up, memory = finish(server, carry, client)
        if client.id in spoiled:
            first = next(name for name, value in up.items() if value.is_floating_point() and value.dim())
            up[first].view(-1)[-1] = math.inf
        return up, memory

    engine.training.finish = finish_badly  # type: ignore[method-assign]


@of_every_training
@pytest.mark.parametrize("spoil", [spoil_data, spoil_upload])
def test_a_client_that_goes_wrong_is_left_out_and_counted_and_does_no_harm(
    name: str, spoil: Callable[[Engine, Iterable[int]], None], tmp_path: Path
) -> None:
    config = config_of(name, rounds=1, clients_per_round=1.0)
    engine, bad = begun(config, tmp_path / "run"), 2
    server = engine.training.init(generator(config.seed, "init"))
    good = [LocalClient(engine.federation, engine.inputs, config.seed, i, 0) for i in range(CLIENTS) if i != bad]
    expected = engine.training.aggregate(server, folded(engine.training, server, good), 0)
    spoil(engine, [bad])
    engine.run()
    (line,) = engine.folder.metrics()
    assert [left["client"] for left in line["left_out"]] == [bad]
    assert line["left_out"][0]["reason"]
    assert line["clients"] == CLIENTS - 1
    assert math.isfinite(line["loss"])
    assert engine.folder.result()["left_out"] == 1
    assert_same_bits(outcome(engine.folder).server, expected)
    if engine.training.remembers:
        remembering = {int(path.stem.split("-")[0]) for path in engine.folder.path.glob("memory/*/*.safetensors")}
        assert remembering == {client.id for client in good}


@of_every_training
def test_a_round_without_a_good_client_stops_the_run_at_the_last_good_checkpoint(name: str, tmp_path: Path) -> None:
    config = config_of(name, rounds=2, clients_per_round=1.0)
    engine = begun(config, tmp_path / "run")

    class Spoiler(Interrupter):
        def round(self, metrics: dict[str, Any]) -> None:
            spoil_data(engine, range(CLIENTS))

    with pytest.raises(RunError, match="round 2"):
        engine.run(Spoiler("never", 1))
    progress = engine.folder.load(CPU)
    assert progress is not None
    assert progress.round == 1
    Engine(engine.folder, Group()).run()
    assert_same(outcome(engine.folder), ran(config, tmp_path / "untroubled"))


# What the contract asks of a training


@dataclass(frozen=True)
class Parts:
    config: Config
    federation: Federation
    inputs: Inputs
    training: Training[Any]
    personalizers: dict[str, Personalizer[Any]]
    server: State
    given: CrossFitted

    def client(self, id: int, round: int = 0) -> LocalClient:
        return LocalClient(self.federation, self.inputs, self.config.seed, id, round)

    @property
    def published(self) -> Published:
        return self.given.published

    def memory(self, id: int) -> State | None:
        return self.training.memory(self.client(id)) if self.training.remembers else None


_given: dict[tuple[str, str | None], CrossFitted] = {}  # made once in a process: nobody changes what was published


@pytest.fixture
def parts(name: str, request: pytest.FixtureRequest) -> Parts:
    config = config_of(name)
    federation, inputs, training, _ = assemble(config, CPU)
    personalizers = {key: make_personalizer(key, training, PERSONALIZERS[key].Hyper()) for key in TABLE[name]}
    server = training.init(generator(0, "init"))
    clients = range(len(federation.training)) if training.publishes_memory else ()
    members = [training.memory(LocalClient(federation, inputs, config.seed, i, 0)) for i in clients]
    published = Published(training.publish(server), 3, members)
    asked = request.node.callspec.params.get("personalizer")
    wanted = [personalizers[asked]] if asked else []
    if (name, asked) not in _given:
        _given[name, asked] = fit_needs(wanted, published, federation, inputs, config.seed, Group())[0]
    given = _given[name, asked]
    return Parts(config, federation, inputs, training, personalizers, server, given)


def snapshot(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def assert_storable(state: State) -> None:
    """Contiguous; floating-point values single precision and finite."""
    for name, value in state.items():
        assert value.is_contiguous(), name
        assert not value.requires_grad, name
        if value.is_floating_point():
            assert value.dtype == torch.float32, name
            assert value.isfinite().all(), name
        else:
            assert value.dtype == torch.int64, name


@of_every_training
def test_state_stays_contiguous_single_precision_of_the_same_names(name: str, parts: Parts) -> None:
    training, server = parts.training, parts.server
    assert_storable(server)
    for round in range(2):
        clients = [parts.client(i, round) for i in range(3)]
        after = training.aggregate(snapshot(server), folded(training, server, clients), round)
        assert_storable(after)
        assert {key: value.shape for key, value in after.items()} == {key: v.shape for key, v in server.items()}
        assert not all(torch.equal(after[key], server[key]) for key in server)
        server = after
    assert_storable(training.publish(server))


@of_every_training
def test_what_goes_up_is_finite_or_integers_and_contiguous(name: str, parts: Parts) -> None:
    ups = [
        train_one(parts.training, parts.server, parts.training.memory(parts.client(i)), parts.client(i))[0]
        for i in range(2)
    ]
    for up in ups:
        assert up
        for key, value in up.items():
            assert value.is_contiguous(), key
            assert not value.requires_grad, key
            assert value.is_floating_point() or value.dtype in (torch.int8, torch.int64), key
            assert not value.is_floating_point() or value.isfinite().all(), key
    forms = [{key: (value.shape, value.dtype) for key, value in up.items()} for up in ups]
    assert forms[0] == forms[1]


@of_every_training
def test_a_clients_round_changes_neither_the_server_nor_its_memory(name: str, parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    memory = training.memory(client)
    server_before, memory_before = snapshot(parts.server), snapshot(memory)
    up, kept = train_one(training, parts.server, memory, client)
    assert_same_bits(parts.server, server_before)
    assert_same_bits(memory, memory_before)
    sent, remembered = snapshot(up), snapshot(kept)
    total = FixedPointSum(up, 1, training.scales)
    total.add(up)
    training.aggregate(snapshot(parts.server), total, 0)
    training.publish(parts.server)
    assert_same_bits(parts.server, server_before)
    assert_same_bits(up, sent)
    assert_same_bits(kept, remembered)


@of_every_training
def test_a_clients_round_is_a_function_of_its_arguments(name: str, parts: Parts) -> None:
    """Trained again, after another client, and by another object: the same bits."""
    first, first_kept = train_one(parts.training, parts.server, parts.training.memory(parts.client(1)), parts.client(1))
    train_one(parts.training, parts.server, parts.training.memory(parts.client(2)), parts.client(2))
    other = assemble(parts.config, CPU)[2]
    for training in (parts.training, other):
        up, kept = train_one(training, parts.server, training.memory(parts.client(1)), parts.client(1))
        assert_same_bits(up, first)
        assert_same_bits(kept, first_kept)


@of_every_training
def test_a_state_that_went_through_a_file_trains_to_the_same_bits(name: str, parts: Parts, tmp_path: Path) -> None:
    """A file may order names anew."""
    folder, training, client = RunFolder.create(tmp_path / "run", parts.config), parts.training, parts.client(1)
    folder.save_best(Published(parts.server, 1))
    memory = training.memory(client)
    ours, kept = train_one(training, folder.load_best(1).state, memory, client)
    expected, expected_kept = train_one(training, parts.server, memory, client)
    assert_same_bits(ours, expected)
    assert_same_bits(kept, expected_kept)


@of_every_training
def test_padding_counts_in_no_training(name: str, parts: Parts) -> None:
    training, client = parts.training, parts.client(1)
    ends = []
    for padded in (False, True):
        carry = training.begin(parts.server, training.memory(client), client)
        with torch.no_grad():
            for phase in training.phases(0):
                for batch in client.phase(phase):
                    carry, _ = phase.step(carry, _with_padding(batch) if padded else batch, 0)
            ends.append(training.finish(parts.server, carry, client)[0])
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-3, atol=1e-5, msg=key)


def _with_padding(batch: Batch) -> Batch:
    mask = torch.ones(len(batch.x)) if batch.mask is None else batch.mask
    noise = torch.randn(batch.x[:3].shape, generator=generator(0, "noise"))
    x, y = torch.cat([noise, batch.x]), torch.cat([batch.y[:3], batch.y])
    drawn = {name: torch.cat([value[:3], value]) for name, value in batch.noise.items()}
    assert batch.index is not None
    index = torch.cat([batch.index[:3], batch.index])
    mask = torch.cat([torch.zeros(len(noise)), mask])
    return Batch(x.contiguous(memory_format=torch.channels_last), y, mask, drawn, index)


@of_every_training
def test_the_local_rate_is_positive_and_does_not_grow(name: str, parts: Parts) -> None:
    rates = [parts.training.local_rate(round) for round in (0, 1, 50)]
    assert rates[0] >= rates[1] >= rates[2] > 0


# Memory


@of_every_training
def test_only_trainings_that_say_so_remember(name: str, parts: Parts) -> None:
    memory = parts.training.memory(parts.client(1))
    _, kept = train_one(parts.training, parts.server, memory, parts.client(1))
    assert bool(kept) == parts.training.remembers
    assert memory.keys() <= kept.keys() or not parts.training.remembers


@of_every_training
def test_memory_comes_back_from_the_run_folder_as_it_went(name: str, parts: Parts, tmp_path: Path) -> None:
    if not parts.training.remembers:
        assert parts.training.memory(parts.client(1)) == {}
        return
    folder = RunFolder.create(tmp_path / "run", parts.config)
    memory = parts.training.memory(parts.client(1))
    for round in range(3):
        _, memory = train_one(parts.training, parts.server, memory, parts.client(1, round))
        assert_storable(memory)
        folder.save_memory(1, round, memory)
        assert_same_bits(folder.load_memory(1, round, CPU), memory)


@of_every_training
def test_a_first_memory_is_the_seeds_and_the_clients_whenever_it_is_made(name: str, tmp_path: Path) -> None:
    """A client that has not taken part yet is scored in several rounds: each time with the same memory."""
    engine = begun(config_of(name, rounds=1, clients_per_round=1), tmp_path / "run")
    if not engine.training.remembers:
        assert engine.memory(0) == {}
        return
    engine.run()
    idle = next(i for i in range(CLIENTS) if int(engine.progress.memory_rounds[i]) < 0)
    assert_same_bits(engine.memory(idle), engine.training.memory(engine._client(idle, 0)))
    assert_storable(engine.memory(idle))


@of_every_training
def test_each_client_has_the_memory_of_its_own_last_round(name: str, tmp_path: Path) -> None:
    """The run's memories are those of clients trained by the contract, one round after another."""
    config = config_of(name, clients_per_round=2)
    engine = begun(config, tmp_path / "run")
    if not engine.training.remembers:
        engine.run()
        assert not (engine.folder.path / "memory").exists()
        return
    training, server = engine.training, engine.training.init(generator(config.seed, "init"))
    memories: dict[int, State] = {}
    for round in range(config.rounds):
        ups = []
        for id in engine.participants(round):
            client = LocalClient(engine.federation, engine.inputs, config.seed, id, round)
            memory = memories[id] if id in memories else training.memory(replace(client, round=0))
            up, memories[id] = train_one(training, server, memory, client)
            ups.append(up)
        total = FixedPointSum(ups[0], len(ups), training.scales)
        for up in ups:
            total.add(up)
        server = training.aggregate(server, total, round)
    engine.run()
    assert_same_bits(engine.progress.server, server)
    assert {id for id in range(CLIENTS) if int(engine.progress.memory_rounds[id]) >= 0} == memories.keys()
    for id, memory in memories.items():
        assert_same_bits(engine.memory(id), memory)


# What the contract asks of a personalizer


@of_every_pair
def test_a_personalized_model_predicts_its_own_and_later_data(name: str, personalizer: str, parts: Parts) -> None:
    method = parts.personalizers[personalizer]
    client = newcomer(parts.federation, parts.inputs, 0, 1)
    personalized = method.personalize(parts.published, client)
    n = len(client.x)
    assert personalized.logits.shape == personalized.before.shape == (n, 10)
    assert personalized.logits.isfinite().all()
    assert not personalized.logits.requires_grad
    if personalizer == "lame":  # own samples are predicted together, later ones by the model as it was
        torch.testing.assert_close(personalized.predict_logits(client.x), personalized.before, rtol=1e-4, atol=1e-5)
    elif _corrects(personalizer) or personalizer == "auto":  # ... by what came of it
        assert (personalized.predict(client.x) == personalized.logits.argmax(1)).double().mean() >= 0.8
    else:
        torch.testing.assert_close(personalized.predict_logits(client.x), personalized.logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(personalized.predict(client.x), personalized.predict_logits(client.x).argmax(1))
    later = newcomer(parts.federation, parts.inputs, 0, 2).x
    first = personalized.predict_logits(later)
    assert first.shape == (len(later), 10)
    assert first.isfinite().all()
    assert torch.equal(personalized.predict_logits(later), first)  # predicting changes nothing
    torch.testing.assert_close(personalized.predict_logits(later[:1]), first[:1], rtol=1e-4, atol=1e-5)


@of_every_pair
def test_before_is_the_published_model(name: str, personalizer: str, parts: Parts) -> None:
    client = newcomer(parts.federation, parts.inputs, 0, 1)
    personalized = parts.personalizers[personalizer].personalize(parts.published, client)
    if not parts.training.serves_newcomers:  # there is no model before: the members' models are all there is
        assert torch.equal(personalized.before, personalized.logits)
        return
    with torch.no_grad():
        logits = parts.training.logits(parts.training.start(parts.published, client, None), client.x)
    torch.testing.assert_close(personalized.before, logits, rtol=1e-4, atol=1e-5)


@of_every_pair
def test_a_single_sample_is_enough(name: str, personalizer: str, parts: Parts) -> None:
    client = newcomer(parts.federation, parts.inputs, 0, 1)
    alone = replace(client, x=client.x[:1])
    personalized = parts.personalizers[personalizer].personalize(parts.published, alone)
    assert personalized.logits.shape == (1, 10)
    assert personalized.logits.isfinite().all()


@of_every_pair
def test_the_diary_says_what_was_done(name: str, personalizer: str, parts: Parts) -> None:
    client = newcomer(parts.federation, parts.inputs, 0, 1)
    diary = parts.personalizers[personalizer].personalize(parts.published, client).diary
    assert diary.decision
    assert 0 <= diary.steps < len(diary.entropy)
    assert all(0 <= value <= math.log(10) + 1e-4 for value in diary.entropy)
    assert all(math.isfinite(value) for value in diary.loss)


@of_every_pair
def test_personalizing_changes_neither_the_published_state_nor_the_client(
    name: str, personalizer: str, parts: Parts
) -> None:
    published, method = parts.published, parts.personalizers[personalizer]
    states = published.state, published.fitted, *published.members
    before = [snapshot(state) for state in states]
    for client, memory in (
        (newcomer(parts.federation, parts.inputs, 0, 1), None),
        (validation_client(parts.federation, parts.inputs, 0, 1), parts.memory(1)),
    ):
        x, remembered = client.x.clone(), snapshot(memory or {})
        personalized = method.personalize(published, client, memory)
        personalized.predict_logits(client.x)
        for state, kept in zip(states, before, strict=True):
            assert_same_bits(state, kept)
        assert torch.equal(client.x, x)
        assert_same_bits(memory or {}, remembered)


@of_every_pair
def test_personalizing_is_a_function_of_its_arguments(name: str, personalizer: str, parts: Parts) -> None:
    method = parts.personalizers[personalizer]
    again = make_personalizer(personalizer, parts.training, method.hyper)
    client, other = (newcomer(parts.federation, parts.inputs, 0, i) for i in (1, 2))
    first = method.personalize(parts.published, client)
    method.personalize(parts.published, other)
    for who in (method, again):
        second = who.personalize(parts.published, client)
        assert torch.equal(second.logits, first.logits)
        assert second.diary == first.diary


@of_every_pair
def test_a_published_state_that_went_through_a_file_personalizes_to_the_same_bits(
    name: str, personalizer: str, parts: Parts, tmp_path: Path
) -> None:
    folder, published = RunFolder.create(tmp_path / "run", parts.config), parts.published
    folder.save_best(published)
    loaded = folder.load_best(published.round)
    assert len(loaded.members) == len(published.members)
    client, method = newcomer(parts.federation, parts.inputs, 0, 1), parts.personalizers[personalizer]
    ours, expected = method.personalize(loaded, client), method.personalize(published, client)
    assert torch.equal(ours.logits, expected.logits)
    assert ours.diary == expected.diary


class Listening(Personalizer[Any]):
    """Does what another one does and keeps what came of it."""

    def __init__(self, inner: Personalizer[Any]) -> None:
        super().__init__(inner.training, inner.hyper)
        self.inner, self.heard = inner, [torch.empty(0)]

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        personalized = self.inner.personalize(published, client, memory)
        self.heard.append(personalized.logits)
        return personalized


@of_every_pair
def test_no_label_of_a_new_client_reaches_a_personalizer(name: str, personalizer: str, parts: Parts) -> None:
    """With other labels in the source the predictions are the same to the bit, and only the scores change."""
    labels = parts.federation.source.labels.copy()
    new = parts.federation.new.indices
    labels[new] = (labels[new] + 1 + np.arange(len(new)) % 9) % 10
    source = replace(parts.federation.source, labels=labels)
    heard, scores = [], []
    for federation, inputs in (
        (parts.federation, parts.inputs),
        (replace(parts.federation, source=source), Inputs(source)),
    ):
        listening = Listening(parts.personalizers[personalizer])
        scores.append(evaluate(federation, inputs, listening, parts.given, 0, Group(), parts.memory))
        heard.append(listening.heard)
    assert len(heard[0]) == len(heard[1]) == 1 + 2 * CLIENTS
    for one, other in zip(*heard, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(scores[0].training, scores[1].training)
    assert not torch.equal(scores[0].new[:, 1], scores[1].new[:, 1])


# The table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_a_row_pairs_a_training_with_a_personalizer_that_fits(row: Any) -> None:
    assert row.training in TRAININGS
    assert all(part in TABLE[row.training] for part in row.personalizer.split("+"))
    assert resolve(row.row) == (row.training, (row.personalizer,))
    assert row.title
    assert row.summary


def test_names_in_the_table_are_unique_and_their_classes_own() -> None:
    rows = [method.row for method in ROWS]
    assert len(set(rows)) == len(rows)
    for table in (TRAININGS, PERSONALIZERS):
        for key, kind in table.items():
            assert kind.name == key
            assert kind.title
            assert json.dumps(kind.Hyper().model_dump())


@of_every_training
def test_a_personalizer_that_does_not_fit_says_why(name: str, parts: Parts) -> None:
    for key, kind in PERSONALIZERS.items():
        reason = kind.why_not(parts.training)
        if reason is None:
            make_personalizer(key, parts.training, kind.Hyper())
        else:
            with pytest.raises(ConfigError, match=re.escape(reason)):
                make_personalizer(key, parts.training, kind.Hyper())


def test_a_memory_counts_the_rounds_that_its_client_took_part_in(tmp_path: Path) -> None:
    """What the suite's own training is for: a memory written before a stop does not count twice."""
    config = config_of(Remembering.name, clients_per_round=3)
    engine = begun(config, tmp_path / "run")
    with pytest.raises(StopError):
        engine.run(Interrupter("scoring", 1))
    Engine(engine.folder, Group()).run()
    done = Engine(engine.folder, Group())
    done.run()
    taken = [id for round in range(config.rounds) for id in done.participants(round)]
    for id in set(taken):
        assert int(done.memory(id)["rounds"]) == taken.count(id)
