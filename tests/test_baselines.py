"""The paper's eight other baselines against hand-solved problems, plain autograd and exact arithmetic.

What every training has to keep to (bits, workers, resume, memory) is in `conformance/`; here is what each of
them has to be.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from tests.observers import Watching
from tests.reference import (
    CASES,
    CLASSES,
    Case,
    Params,
    Somebody,
    clipped,
    descend,
    difference,
    distance,
    doubled,
    forward_mlp,
    gradient,
    leaves,
    norm,
)
from tests.runs import Interrupter, Outcome, StopError, assert_same, assert_same_bits, outcome, ran
from upfl import api, data
from upfl.cli.methods import methods as show_methods
from upfl.cli.runs import show_runs
from upfl.config import Config, configure
from upfl.contract import Batch, Client, Published, Split, Task, Training, Unlabelled
from upfl.engine.clients import LocalClient
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS
from upfl.models import Layered, Linear, convnet, mlp
from upfl.personalize.pfl import Ensemble, PFLHyper, Sampled
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training import scaffold
from upfl.training.afl import AFL, AFLHyper, simplex_projection
from upfl.training.fedadg import FedADG, FedADGHyper
from upfl.training.fedgma import FedGMA, FedGMAHyper
from upfl.training.fedper import FedPer
from upfl.training.fedprox import FedProx, FedProxHyper
from upfl.training.fedsr import FedSR, FedSRHyper, gaussian_kl
from upfl.training.odpfl_hn import OdpflHn, OdpflHnHyper
from upfl.training.scaffold import Scaffold, ScaffoldHyper

pytestmark = pytest.mark.usefixtures("one_thread")

MLP = mlp(784, (200, 200), 10)  # MNIST's
CIFAR10 = convnet((3, 32, 32), 10)
FEMNIST = convnet((1, 28, 28), 62, hidden=2048)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# A client's round by the contract, and whole runs


@dataclass(frozen=True)
class Holder(Somebody):
    """A client with samples."""

    own: Batch | None = None

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        assert self.own is not None
        assert split == "train"
        for start in range(0, len(self.own.y), size):
            yield Batch(self.own.x[start : start + size], self.own.y[start : start + size])


def holder(own: Batch, id: int = 0, round: int = 0) -> Holder:
    return Holder(count=len(own.y), id=id, round=round, own=own)


def double_server(training: Training[Any], seed: int = 1) -> State:
    return doubled(training.init(generator(seed, "server")))


def local_round(
    training: Any, server: State, memory: State, client: Client, batches: Sequence[Batch]
) -> tuple[Mapping[str, Tensor], State, list[float]]:
    """What goes up, what is kept, the losses."""
    carry, losses = training.begin(server, memory, client), []
    with torch.no_grad():
        for batch in batches:
            carry, loss = training.step(carry, batch, client.round)
            losses.append(float(loss))
        up, kept = training.finish(server, carry, client)
    return up, kept, losses


def total_of(training: Training[Any], ups: Sequence[Mapping[str, Tensor]]) -> FixedPointSum:
    total = FixedPointSum(ups[0], len(ups), training.scales)
    for up in ups:
        total.add(up)
    return total


def small_config(method: str, *settings: str, **options: Any) -> Config:
    """Six training clients of digits, four of them a round, four rounds; some gradients are clipped."""
    scale: dict[str, Any] = {
        "rounds": 4,
        "clients_per_round": 4,
        "evaluate_every": 2,
        "evaluate_clients": 3,
        "model": {"hidden": 16},
        "partition": {"clients": 12},
    }
    common = ("iterations=3", "batch_size=16", "clip=0.5", "lr=0.2")
    return configure(method, "digits", profile="smoke", settings=(*common, *settings), **(scale | options))


def small_run(path: Path, method: str, *settings: str, **options: Any) -> Outcome:
    return ran(small_config(method, *settings, **options), path)


def scores(run: Outcome) -> list[Any]:
    """Losses and accuracies, under whatever row's name."""
    return [(line["loss"], list(line.get("rows", {}).values())) for line in run.metrics]


DATASETS = ("mnist", "cifar10", "femnist", "cifar100", "fashion_mnist")
PAPER: dict[str, dict[str, float | tuple[float, ...]]] = {  # copied by hand; one value, or one for each data set
    "fedprox": {"lr": (0.3, 0.1, 0.3, 0.1, 0.3), "mu": 0.001},
    "scaffold": {"lr": 0.1, "server_lr": 1.5},
    "afl": {"lr": (0.3, 0.1, 0.1, 0.1, 0.3), "mixture_lr": (0.001, 0.3, 0.5, 0.3, 0.001)},
    "fedgma": {"lr": (0.3, 0.1, 0.3, 0.1, 0.3), "server_lr": (1.0, 1.5, 1.0, 1.5, 1.5), "threshold": 0.1},
    "fedadg": {
        "lr": (0.3, 0.1, 0.3, 0.1, 0.3),
        "features": (128, 512, 512, 512, 512),
        "noise": 10,
        "adversarial_lr": 0.1,
        "alignment": 0.15,
    },
    "fedsr": {"lr": (0.3, 0.05, 0.3, 0.1, 0.3), "l2r": 0.01, "cmi": 0.0005, "momentum": 0.9},
    "pfl-sampled": {"lr": (0.1, 0.1, 0.1, 0.1, 0.3)},
    "pfl-ensemble": {"lr": (0.1, 0.1, 0.1, 0.1, 0.3)},
    # CIFAR-100's are not printed in the paper: CIFAR-10's
    "odpfl-hn": {
        "lr": (0.3, 0.05, 0.01, 0.05, 0.1),
        "encoder_lr": (0.5, 0.1, 0.1, 0.1, 0.5),
        "hypernet_lr": 0.5,
        "embedding": 32,
        "hidden": 100,
        "server_clip": 50,
    },
}


@pytest.mark.parametrize("row", PAPER)
def test_a_baselines_hyper_parameters_are_the_papers(row: str) -> None:
    for i, dataset in enumerate(DATASETS):
        config = configure(row, dataset)
        hyper = config.training_hyper().model_dump()
        expected = {name: value[i] if isinstance(value, tuple) else value for name, value in PAPER[row].items()}
        expected |= {"iterations": 20, "batch_size": 64, "clip": 10.0, "decay": 0.99, "weight_decay": 1e-4}
        assert {name: hyper[name] for name in expected} == expected, dataset
        assert hyper["aggregation"] == ("samples" if row == "odpfl-hn" else "uniform")
        assert config.participants(50) == 50
    assert configure(row, "digits").training == configure(row, "mnist").training


# FedProx


def test_fedprox_without_mu_is_fedavg_to_the_bit_over_a_whole_run(tmp_path: Path) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg")
    fedprox = small_run(tmp_path / "fedprox", "fedprox", "mu=0.0")
    assert_same_bits(fedprox.server, fedavg.server)
    assert scores(fedprox) == scores(fedavg)
    held = small_run(tmp_path / "held", "fedprox", "mu=1.0")
    assert distance(held.server, fedavg.server) > 1e-4, "mu makes no difference here"


@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_a_fedprox_step_is_one_down_the_loss_with_its_proximal_term(case: Case, clip: float) -> None:
    hyper = {"lr": 0.3, "mu": 2.0, "clip": clip, "weight_decay": 0.01}
    training = FedProx(Task(case.model, CLASSES, 3), FedProxHyper(**hyper))
    server = double_server(training)
    batches = [case.batch(9, seed) for seed in range(4)]
    up, _, _ = local_round(training, server, {}, Somebody(round=7), batches)
    received = psi = select(server, "psi")
    for batch in batches:
        psi = leaves(psi)
        with torch.enable_grad():
            away = torch.stack([(value - received[name]).square().sum() for name, value in psi.items()]).sum()
            grads = gradient(F.cross_entropy(case.forward(psi, batch.x), batch.y) + 1.0 * away, psi)
        assert norm(grads) > 0.3
        psi = descend(psi, grads, 0.3 * 0.99**0.7, 0.01, clip)
    assert distance(select(dict(up), "psi"), difference(psi, received)) < 1e-6


# SCAFFOLD


def test_scaffolds_first_round_is_fedavgs_to_the_bit(tmp_path: Path) -> None:
    for rounds in (1, 2):
        fedavg = small_run(tmp_path / f"fedavg-{rounds}", "fedavg", rounds=rounds)
        ours = small_run(tmp_path / f"scaffold-{rounds}", "scaffold", "server_lr=1.0", rounds=rounds)
        psi, expected = select(ours.server, "psi"), select(fedavg.server, "psi")
        if rounds == 1:
            assert_same_bits(psi, expected)
            assert scores(ours) == scores(fedavg)
        else:
            assert distance(psi, expected) > 1e-4, "the control variates make no difference here"


@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_a_scaffold_step_adds_the_correction_to_the_clipped_gradient(case: Case, clip: float) -> None:
    hyper = ScaffoldHyper(lr=0.3, clip=clip, weight_decay=0.01, iterations=3)
    training = Scaffold(Task(case.model, CLASSES, 3), hyper)
    server = double_server(training)
    drawn = generator(3)
    memory = {}
    for name in select(server, "psi"):
        shape = server[f"psi.{name}"].shape
        server[f"control.{name}"] = torch.randn(shape, generator=drawn, dtype=torch.float64)
        memory[f"control.{name}"] = torch.randn(shape, generator=drawn, dtype=torch.float64)
    batches = [case.batch(9, seed) for seed in range(3)]
    up, kept, _ = local_round(training, server, memory, Somebody(round=7), batches)
    lr = 0.3 * 0.99**0.7
    psi = start = select(server, "psi")
    for batch in batches:
        psi = leaves(psi)
        with torch.enable_grad():
            grads = gradient(F.cross_entropy(case.forward(psi, batch.x), batch.y), psi)
        assert norm(grads) > 0.2
        psi = {
            name: value - lr * (server[f"control.{name}"] - memory[f"control.{name}"])
            for name, value in descend(psi, grads, lr, 0.01, clip).items()
        }
    assert distance(select(dict(up), "psi"), difference(psi, start)) < 1e-6
    for name in psi:
        change = -server[f"control.{name}"] + (start[name] - psi[name]) / (3 * lr)
        torch.testing.assert_close(up[f"control.{name}"], change, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(kept[f"control.{name}"], memory[f"control.{name}"] + change, rtol=1e-6, atol=1e-8)


@dataclass
class Quadratics:
    """Two clients with f_i(w, v) = a_i/2 (w - b_i)^2 + 1/2 v^2, as a linear model's squared errors."""

    training: Scaffold
    curvature: tuple[float, float] = (1.0, 4.0)
    optimum: tuple[float, float] = (1.0, -1.0)
    server: State = field(default_factory=dict)
    memories: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {"weight": ((1, 1), 3.0), "bias": ((1,), 0.5)}
        self.server = {f"psi.fc1.{name}": torch.full(*value).double() for name, value in names.items()}
        self.server |= {name.replace("psi", "control"): torch.zeros_like(v) for name, v in self.server.items()}
        self.memories = [doubled(self.training.memory(Somebody(id=i))) for i in range(2)]

    def round(self, round: int) -> None:
        ups = []
        for i, (a, b) in enumerate(zip(self.curvature, self.optimum, strict=True)):
            x = torch.tensor([[math.sqrt(a)], [-math.sqrt(a)]], dtype=torch.float64)
            batches = [Batch(x, x[:, 0] * b)] * self.training.hyper.iterations
            client = Somebody(id=i, round=round)
            up, self.memories[i], _ = local_round(self.training, self.server, self.memories[i], client, batches)
            ups.append(up)
        self.server = self.training.aggregate(self.server, total_of(self.training, ups), round)

    def point(self, of: State, kind: str) -> tuple[float, float]:
        return float(of[f"{kind}.fc1.weight"]), float(of[f"{kind}.fc1.bias"])


def squared_error(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """In the place of the cross-entropy: half the mean squared error, with its gradient."""
    away, weight = logits - batch.y.unsqueeze(1), batch.weight().unsqueeze(1)
    return (weight * away.square()).sum() / 2, weight * away


def quadratics(monkeypatch: pytest.MonkeyPatch, **hyper: Any) -> Quadratics:
    monkeypatch.setattr(scaffold, "cross_entropy", squared_error)
    values = ScaffoldHyper(weight_decay=0.0, clip=1e9, **hyper)
    return Quadratics(Scaffold(Task(Layered((Linear("fc1", 1, 1),)), 1, 2), values))


def test_scaffolds_control_variates_on_two_quadratics_are_those_solved_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    K, server_lr = 5, 1.5
    problem = quadratics(monkeypatch, lr=0.1, iterations=K, server_lr=server_lr, decay=0.5)
    x, c, own = np.array([3.0, 0.5]), np.zeros(2), np.zeros((2, 2))
    for round in range(4):
        problem.round(round)
        lr = 0.1 * 0.5 ** (round / 10)
        moved, changed = np.zeros((2, 2)), np.zeros((2, 2))
        for i in range(2):
            a, b = np.array([problem.curvature[i], 1.0]), np.array([problem.optimum[i], 0.0])
            rest = b - (c - own[i]) / a  # where a (y - b) + c - c_i is zero
            y = rest + (1 - lr * a) ** K * (x - rest)
            moved[i], changed[i] = y - x, -c + (x - y) / (K * lr)
        x, c, own = x + server_lr * moved.mean(0), c + changed.mean(0), own + changed
        assert problem.point(problem.server, "psi") == pytest.approx(x.tolist(), rel=1e-9, abs=1e-9)
        assert problem.point(problem.server, "control") == pytest.approx(c.tolist(), rel=1e-9, abs=1e-9)
        for i in range(2):
            assert problem.point(problem.memories[i], "control") == pytest.approx(own[i].tolist(), rel=1e-9, abs=1e-9)


def test_scaffold_finds_the_optimum_of_two_quadratics_that_fedavg_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    K, lr = 5, 0.1
    problem = quadratics(monkeypatch, lr=lr, iterations=K, server_lr=1.0, decay=1.0)
    for round in range(120):
        problem.round(round)
    (a1, a2), (b1, b2) = problem.curvature, problem.optimum
    best = (a1 * b1 + a2 * b2) / (a1 + a2)
    moves = [1 - (1 - lr * a) ** K for a in (a1, a2)]
    fedavg = (moves[0] * b1 + moves[1] * b2) / sum(moves)
    assert abs(fedavg - best) > 0.1
    assert problem.point(problem.server, "psi") == pytest.approx((best, 0.0), abs=1e-6)
    assert problem.point(problem.server, "control") == pytest.approx((0.0, 0.0), abs=1e-6)
    for i, (a, b) in enumerate(((a1, b1), (a2, b2))):  # each client's gradient at the optimum
        assert problem.point(problem.memories[i], "control") == pytest.approx((a * (best - b), 0.0), abs=1e-6)


def test_scaffolds_server_divides_the_changes_by_all_clients_and_the_models_by_those_that_came() -> None:
    training = Scaffold(Task(Layered((Linear("fc1", 2, 1),)), 1, 5), ScaffoldHyper(server_lr=1.5))
    psi, control = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -0.5]])
    server = {"psi.fc1.weight": psi, "psi.fc1.bias": torch.zeros(1)}
    server |= {"control.fc1.weight": control, "control.fc1.bias": torch.zeros(1)}
    ups = []
    for moved, changed in (([1.0, -2.0], [0.25, 1.0]), ([3.0, 0.0], [0.75, -4.0])):
        up = {"psi.fc1.weight": torch.tensor([moved]), "psi.fc1.bias": torch.zeros(1)}
        up |= {"control.fc1.weight": torch.tensor([changed]), "control.fc1.bias": torch.zeros(1)}
        ups.append(up | {"weight": torch.tensor(1.0)})
    after = training.aggregate(server, total_of(training, ups), 0)
    torch.testing.assert_close(after["psi.fc1.weight"], torch.tensor([[1.0 + 1.5 * 2.0, 2.0 + 1.5 * -1.0]]))
    torch.testing.assert_close(after["control.fc1.weight"], torch.tensor([[0.5 + 1.0 / 5, -0.5 - 3.0 / 5]]))


def test_scaffolds_server_variate_stays_the_mean_of_all_clients_own_under_partial_participation(tmp_path: Path) -> None:
    config = small_config("scaffold", rounds=5, clients_per_round=2, evaluate_every=5)
    engine = Engine.local(RunFolder.create(tmp_path / "run", config))
    engine.run()
    versions = engine.progress.memory_rounds.tolist()
    assert min(versions) < 0 <= max(versions), "all clients took part, or none"
    own = [select(doubled(engine.cohort.memory(i)), "control") for i in range(engine.setup.clients)]
    mean = {name: torch.stack([state[name] for state in own]).mean(0) for name in own[0]}
    assert norm(mean) > 1e-2
    assert distance(select(doubled(engine.progress.server), "control"), mean) < 1e-6
    for i, version in enumerate(versions):
        assert (norm(own[i]) > 0) == (version >= 0)


# AFL


def exact_projection(point: Sequence[float]) -> list[Fraction]:
    """The nearest point of the simplex, by trying every support: the one that meets the conditions of optimality."""
    values = [Fraction(value) for value in point]
    for size in range(1, len(values) + 1):
        for support in combinations(range(len(values)), size):
            threshold = sum((values[i] for i in support), Fraction(-1)) / size
            inside = all(values[i] >= threshold for i in support)
            if inside and all(values[i] <= threshold for i in range(len(values)) if i not in support):
                return [values[i] - threshold if i in support else Fraction(0) for i in range(len(values))]
    raise AssertionError("every point has a projection")


numbers = st.floats(-1000, 1000) | st.floats(-1, 1) | st.sampled_from([0.0, 0.25, 0.5, 1.0])


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=6))
def test_the_simplex_projection_is_the_exact_one(point: list[float]) -> None:
    ours = simplex_projection(torch.tensor(point, dtype=torch.float64))
    assert ours.tolist() == pytest.approx([float(value) for value in exact_projection(point)], abs=1e-11)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_a_point_of_the_simplex_is_its_own_projection(weights: list[float]) -> None:
    total = math.fsum(weights)
    point = [weight / total for weight in weights] if total > 1e-6 else [1 / len(weights)] * len(weights)
    assert simplex_projection(torch.tensor(point, dtype=torch.float64)).tolist() == pytest.approx(point, abs=1e-12)


@pytest.mark.parametrize("participants", [4, 6])
def test_afl_without_a_mixture_rate_is_fedavg_to_1e_6(tmp_path: Path, participants: int) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg", clients_per_round=participants)
    afl = small_run(tmp_path / "afl", "afl", "mixture_lr=0.0", clients_per_round=participants)
    assert distance(select(afl.server, "psi"), select(fedavg.server, "psi")) < 1e-6
    assert afl.server["mixture"].tolist() == pytest.approx([1 / 6] * 6, rel=1e-6)
    moved = small_run(tmp_path / "moved", "afl", "mixture_lr=0.1", clients_per_round=participants)
    assert distance(select(moved.server, "psi"), select(fedavg.server, "psi")) > 1e-4, "the rate makes no difference"


def afl_server(training: AFL, mixture: Sequence[float]) -> State:
    return double_server(training) | {"mixture": torch.tensor(mixture)}


def test_an_afl_client_sends_the_received_models_loss_on_its_training_data_in_its_own_place(case: Case) -> None:
    training = AFL(Task(case.model, CLASSES, 4), AFLHyper(lr=0.3))
    server, own = afl_server(training, [0.4, 0.3, 0.2, 0.1]), case.batch(300, 4)
    up, kept, _ = local_round(training, server, {}, holder(own, id=2), [case.batch(9, seed) for seed in range(3)])
    expected = F.cross_entropy(case.forward(select(server, "psi"), own.x), own.y)
    assert up["losses"].tolist() == [0, 0, pytest.approx(float(expected), rel=1e-6), 0]
    assert kept == {}


@pytest.mark.parametrize("came", [(0, 1, 2, 3), (0, 1), (1, 2, 3), (1, 3), (3,)], ids=str)
def test_an_afl_round_weighs_by_the_mixture_of_those_that_came_and_raises_it_by_their_losses(
    case: Case, came: tuple[int, ...]
) -> None:
    """Client 3 has no weight: where it comes alone the model stays as it is."""
    mixture, rate = [0.5, 0.2, 0.3, 0.0], 0.05
    training = AFL(Task(case.model, CLASSES, 4), AFLHyper(lr=0.3, mixture_lr=rate))
    server, round = afl_server(training, mixture), 7
    received = select(server, "psi")
    ups, moves, losses = [], [], [0.0] * 4
    for id in came:
        own, batches = case.batch(20 + id, 50 + id), [case.batch(9, 10 * id + seed) for seed in range(3)]
        ups.append(local_round(training, server, {}, holder(own, id, round), batches)[0])
        losses[id] = float(F.cross_entropy(case.forward(received, own.x), own.y))
        psi = received
        for batch in batches:
            psi = leaves(psi)
            with torch.enable_grad():
                grads = gradient(F.cross_entropy(case.forward(psi, batch.x), batch.y), psi)
            psi = descend(psi, grads, 0.3 * 0.99**0.7, 1e-4, 10.0)
        moves.append(difference(psi, received))
    after = training.aggregate(server, total_of(training, ups), round)
    weight = sum(mixture[id] for id in came)
    for name, value in received.items():
        mean = sum(mixture[id] * move[name] for id, move in zip(came, moves, strict=True)) / (weight or 1)
        torch.testing.assert_close(after[f"psi.{name}"], value + mean, rtol=1e-6, atol=1e-9)
    raised = [share + rate * 0.99**0.7 * loss for share, loss in zip(mixture, losses, strict=True)]
    expected = [float(value) for value in exact_projection(raised)]
    assert after["mixture"].tolist() == pytest.approx(expected, abs=1e-6)
    assert max(abs(new - old) for new, old in zip(expected, mixture, strict=True)) > 1e-4


def test_afls_effective_number_of_clients_is_in_every_rounds_metrics(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "afl", "mixture_lr=0.3")
    effective = [line["effective_clients"] for line in run.metrics]
    mixture = run.server["mixture"].double()
    assert float(mixture.sum()) == pytest.approx(1, abs=1e-6)
    assert effective[-1] == pytest.approx(1 / float(mixture.square().sum()), rel=1e-6)
    assert all(1 <= value <= 6.0001 for value in effective)
    assert min(effective) < 5.9, "the mixture did not move"


# FedGMA


def test_fedgma_without_threshold_is_fedavg_to_the_bit_over_a_whole_run(tmp_path: Path) -> None:
    fedavg = small_run(tmp_path / "fedavg", "fedavg")
    fedgma = small_run(tmp_path / "fedgma", "fedgma", "threshold=0.0", "server_lr=1.0")
    assert_same_bits(fedgma.server, fedavg.server)
    assert scores(fedgma) == scores(fedavg)
    masked = small_run(tmp_path / "masked", "fedgma", "threshold=0.8", "server_lr=1.0")
    assert distance(masked.server, fedavg.server) > 1e-4, "the mask makes no difference here"


def fedgma_after(changes: Tensor, threshold: float, server_lr: float, server: Tensor) -> Tensor:
    """The weight after clients changed it by the rows of `changes`."""
    size = changes.shape[1]
    hyper = FedGMAHyper(threshold=threshold, server_lr=server_lr)
    training = FedGMA(Task(Layered((Linear("fc1", size, 1),)), 1, len(changes)), hyper)
    state = {"psi.fc1.weight": server.view(1, size), "psi.fc1.bias": torch.zeros(1)}
    ups = [
        training.finish(state, {"psi.fc1.weight": state["psi.fc1.weight"] + row, "psi.fc1.bias": torch.zeros(1)}, who)[
            0
        ]
        for who, row in enumerate_clients(changes)
    ]
    return training.aggregate(state, total_of(training, ups), 0)["psi.fc1.weight"].view(size)


def enumerate_clients(rows: Tensor) -> Iterator[tuple[Somebody, Tensor]]:
    for id, row in enumerate(rows):
        yield Somebody(id=id), row


def test_fedgmas_mask_on_an_example_by_hand() -> None:
    changes = torch.tensor(
        [
            [1.0, 1.0, 4.0, 2.0, -1.0, 0.0],
            [2.0, 2.0, 1.0, 2.0, -2.0, 0.0],
            [3.0, 5.0, -1.0, -1.0, -5.0, 0.0],
            [2.0, -4.0, -2.0, 0.0, 0.0, 8.0],
        ]
    )
    #  agreement: 1, 1/2, 0, 1/4, 3/4, 1/4;  mean: 2, 1, 1/2, 3/4, -2, 2
    masked_mean = torch.tensor([2.0, 1.0, 0.0, 0.25 * 0.75, -2.0, 0.25 * 2.0])
    server = torch.tensor([1.0, -1.0, 0.5, 0.25, 2.0, 0.0])
    assert torch.equal(fedgma_after(changes, 0.5, 2.0, server), server + 2 * masked_mean)


@pytest.mark.parametrize("clients", [10, 20, 30, 50])
def test_an_agreement_of_just_the_threshold_is_not_masked(clients: int) -> None:
    """Entry j rises for j clients and falls for the others; thresholds are the decimal fractions that one writes."""
    changes = torch.where(torch.arange(clients).unsqueeze(1) < torch.arange(clients + 1), 1.0, -1.0)
    for tenths in range(1, 10):
        after = fedgma_after(changes, float(f"0.{tenths}"), 1.0, torch.zeros(clients + 1)).tolist()
        for j, value in enumerate(after):
            mean = Fraction(2 * j - clients, clients)
            mask = Fraction(1) if abs(mean) >= Fraction(tenths, 10) else abs(mean)
            assert value == pytest.approx(float(mask * mean), rel=1e-6, abs=1e-9), (tenths, j)


# FedADG


def forward_features(params: Params, x: Tensor) -> Tensor:
    """F: the model up to its last layer, and the projection."""
    if "conv1.weight" in params:
        for name in ("conv1", "conv2"):
            x = F.max_pool2d(F.relu(F.conv2d(x, params[f"{name}.weight"], params[f"{name}.bias"], padding=2)), 2)
        x = F.relu(F.linear(x.flatten(1), params["fc1.weight"], params["fc1.bias"]))
    else:
        for name in ("fc1", "fc2"):
            x = F.relu(F.linear(x.flatten(1), params[f"{name}.weight"], params[f"{name}.bias"]))
    return F.linear(x, params["projection.weight"], params["projection.bias"])


def forward_discriminator(params: Params, features: Tensor, labels: Tensor) -> Tensor:
    x = F.linear(torch.cat([features, labels], 1), params["projection.weight"], params["projection.bias"])
    x = F.relu(F.linear(x, params["hidden.weight"], params["hidden.bias"]))
    return torch.sigmoid(F.linear(x, params["output.weight"], params["output.bias"])).squeeze(1)


@dataclass
class AdversarialClient:
    """FedADG's local steps by the method card, with plain autograd."""

    last: str
    psi: Params
    generator: Params
    discriminator: Params
    clip: float
    norms: list[float] = field(default_factory=list)

    def down(self, params: Params, loss: Tensor, rate: float) -> Params:
        grads = gradient(loss, params)
        self.norms.append(norm(grads))
        return descend(params, grads, rate, 0.01, self.clip)

    def step(self, batch: Batch, lr: float, adversarial_lr: float) -> float:
        labels = F.one_hot(batch.y, CLASSES).double()
        noise = torch.cat([batch.noise["noise"], labels], 1)
        psi, g, d = leaves(self.psi), leaves(self.generator), leaves(self.discriminator)
        real, fake = forward_features(psi, batch.x), forward_mlp(g, noise)
        of_fake, of_real = forward_discriminator(d, fake, labels), forward_discriminator(d, real, labels)
        d = leaves(self.down(d, ((1 - of_fake) ** 2).mean() + (of_real**2).mean(), adversarial_lr))
        logits = F.linear(real, psi[f"{self.last}.weight"], psi[f"{self.last}.bias"])
        cross_entropy = F.cross_entropy(logits, batch.y, label_smoothing=0.1)
        loss = 0.85 * cross_entropy + 0.15 * ((1 - forward_discriminator(d, real, labels)) ** 2).mean()
        self.psi = self.down(psi, loss, lr)
        of_fake = forward_discriminator(d, forward_mlp(g, noise), labels)
        self.generator = self.down(g, (of_fake**2).mean(), adversarial_lr)
        self.discriminator = {name: value.detach() for name, value in d.items()}
        return float(loss.detach())


def adversarial(case: Case, **hyper: Any) -> FedADG:
    values = {"lr": 0.3, "adversarial_lr": 0.2, "features": 12, "projection": 6, "weight_decay": 0.01} | hyper
    return FedADG(Task(case.model, CLASSES, 3), FedADGHyper(**values))


def noisy(batch: Batch, training: Training[Any], seed: int) -> Batch:
    """The batch with the noise that the training's phase asks for."""
    (phase,) = training.phases(0)
    (name,) = phase.noise
    wanted = phase.noise[name]
    draw = {"normal": torch.randn, "uniform": torch.rand}[wanted.kind]
    drawn = draw(len(batch.y), wanted.size, generator=generator(seed, "noise"), dtype=torch.float64)
    return Batch(batch.x, batch.y, batch.mask, {name: drawn})


@pytest.mark.parametrize("clip", [0.02, 1e9])
def test_consecutive_fedadg_steps_equal_plain_autograd(case: Case, clip: float) -> None:
    training = adversarial(case, clip=clip)
    server, memory = double_server(training), doubled(training.memory(Somebody(id=1)))
    batches = [noisy(case.batch(9, seed), training, seed) for seed in range(4)]
    up, kept, losses = local_round(training, server, memory, Somebody(id=1, round=7), batches)
    psi, g = select(server, "psi"), select(server, "generator")
    reference = AdversarialClient("fc2" if "conv1.weight" in psi else "fc3", psi, g, memory, clip)
    decay = 0.99**0.7
    expected = [reference.step(batch, 0.3 * decay, 0.2 * decay) for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert min(reference.norms) > 1e-3
    assert (min(reference.norms) > clip) == (clip < 1), "the case clips where it should not, or not where it should"
    assert distance(select(dict(up), "psi"), difference(reference.psi, psi)) < 1e-6
    assert distance(select(dict(up), "generator"), difference(reference.generator, g)) < 1e-6
    assert distance(difference(kept, memory), difference(reference.discriminator, memory)) < 1e-6


def test_fedadgs_generator_receives_gradient_through_the_discriminator(case: Case) -> None:
    """Without weight decay it moves, and against the discriminator's judgement of what it makes."""
    training = adversarial(case, weight_decay=0.0)
    server, memory = double_server(training), doubled(training.memory(Somebody()))
    batch = noisy(case.batch(9, 0), training, 0)
    up, kept, _ = local_round(training, server, memory, Somebody(), [batch])
    before, labels = select(server, "generator"), F.one_hot(batch.y, CLASSES).double()
    after = {name: value + up[f"generator.{name}"] for name, value in before.items()}
    noise = torch.cat([batch.noise["noise"], labels], 1)
    judged = [float((forward_discriminator(kept, forward_mlp(g, noise), labels) ** 2).mean()) for g in (before, after)]
    assert all(float(up[f"generator.{name}"].abs().max()) > 0 for name in before)
    assert judged[1] < judged[0] - 1e-6


def test_fedadgs_discriminator_depends_on_the_label(case: Case) -> None:
    """The same feature with another label is judged otherwise, and so its step is another one."""
    training = adversarial(case)
    server, memory = double_server(training), doubled(training.memory(Somebody()))
    assert memory["projection.weight"].shape == (6, 12 + CLASSES)
    blind = {name: value.clone() for name, value in memory.items()}
    blind["projection.weight"][:, 12:] = 0
    batch = noisy(case.batch(9, 0), training, 0)
    kept = [local_round(training, server, d, Somebody(), [batch])[1] for d in (memory, blind)]
    assert norm({"labels": kept[1]["projection.weight"][:, 12:]}) > 1e-6, "labels give the discriminator no gradient"
    assert distance(kept[0], kept[1]) > 1e-3


def test_fedadgs_discriminator_is_never_sent_and_each_client_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = listen(monkeypatch)
    run = small_run(tmp_path / "run", "fedadg", "features=12", "projection=6")
    parts = {name.split(".")[0] for name in sent}
    assert parts == {"psi", "generator", "weight", "engine"}
    assert set(run.server) | {"weight", "engine.loss"} == sent.keys()
    assert not any("discriminator" in name for name in [*sent, *run.server])
    memories = {name: state for name, state in run.tensors.items() if name.startswith("memory/")}
    assert len(memories) >= 4
    shapes = {"projection.weight": (6, 22), "hidden.weight": (6, 6), "output.weight": (1, 6)}
    for state in memories.values():
        assert state.keys() == {name.replace("weight", kind) for name in shapes for kind in ("weight", "bias")}
        assert {name: tuple(state[name].shape) for name in shapes} == shapes
    first, second, *_ = memories.values()
    assert distance(first, second) > 0.1


def test_fedadgs_parts_have_the_papers_sizes() -> None:
    for model, features, classes in ((MLP, 128, 10), (CIFAR10, 512, 10), (FEMNIST, 512, 62)):
        training = FedADG(Task(model, classes, 3), FedADGHyper(features=features))
        last = model.layers[-1]
        assert isinstance(last, Linear)
        assert training.model.shapes["projection.weight"] == (features, last.inputs)
        assert training.model.shapes[f"{last.name}.weight"] == (classes, features)
        kept = [name for name in model.shapes if not name.startswith(last.name)]
        assert all(training.model.shapes[name] == model.shapes[name] for name in kept)
        (phase,) = training.phases(0)
        assert (phase.noise["noise"].kind, phase.noise["noise"].size) == ("uniform", 10)
        *_, output = training.generator.shapes.values()
        assert output == (features,)


def listen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The names in what clients send, and how often each was sent, from here on."""
    sent: Counter[str] = Counter()
    add = FixedPointSum.add

    def listening(self: FixedPointSum, up: Mapping[str, Tensor]) -> None:
        sent.update(list(up))
        add(self, up)

    monkeypatch.setattr(FixedPointSum, "add", listening)
    return sent


# FedSR


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 10), st.floats(0.1, 2))
def test_fedsrs_divergence_is_that_of_torch_distributions(seed: int, spread: float, to_spread: float) -> None:
    drawn = torch.randn(2, 7, generator=generator(seed), dtype=torch.float64)
    scale = torch.rand(2, 7, generator=generator(seed, "scale"), dtype=torch.float64) + 0.1
    m, to_m, sigma, to_sigma = *drawn, *(scale * torch.tensor([[spread], [to_spread]]))
    expected = kl_divergence(Normal(m, sigma), Normal(to_m, to_sigma))
    torch.testing.assert_close(gaussian_kl(m, sigma, to_m, to_sigma), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gaussian_kl(m, -sigma, to_m, to_sigma), expected, rtol=1e-6, atol=1e-6)


def test_fedsrs_feature_layers_have_the_papers_sizes() -> None:
    for model, layer, doubled_shape, features, rest in (
        (MLP, "fc2", (400, 200), 200, {"fc3.weight": (10, 200)}),
        (CIFAR10, "conv2", (128, 32, 5, 5), 4096, {"fc1.weight": (512, 4096), "fc2.weight": (10, 512)}),
        (FEMNIST, "conv2", (128, 32, 5, 5), 3136, {"fc1.weight": (2048, 3136), "fc2.weight": (62, 2048)}),
    ):
        training = FedSR(Task(model, 10, 3), FedSRHyper())
        assert training.model.shapes == model.shapes | {
            f"{layer}.weight": doubled_shape,
            f"{layer}.bias": (doubled_shape[0],),
        }
        assert {name: training.model.shapes[name] for name in rest} == rest
        (phase,) = training.phases(0)
        assert (phase.noise["eps"].kind, phase.noise["eps"].size) == ("normal", features)
        memory = training.memory(Somebody())
        assert {name: tuple(value.shape) for name, value in memory.items()} == {
            "r_m": (10, features),
            "r_s": (10, features),
            "C": (),
        }
        assert (memory["r_m"] == 0).all()
        assert (memory["r_s"] == 1).all()
        assert memory["C"] == 1


def forward_gaussian(psi: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the representation."""
    if "conv1.weight" in psi:
        x = F.max_pool2d(F.relu(F.conv2d(x, psi["conv1.weight"], psi["conv1.bias"], padding=2)), 2)
        x = F.max_pool2d(F.conv2d(x, psi["conv2.weight"], psi["conv2.bias"], padding=2), 2).flatten(1)
    else:
        x = F.relu(F.linear(x.flatten(1), psi["fc1.weight"], psi["fc1.bias"]))
        x = F.linear(x, psi["fc2.weight"], psi["fc2.bias"])
    half = x.shape[1] // 2
    return x[:, :half], F.softplus(x[:, half:])


def forward_classifier(psi: Params, z: Tensor) -> Tensor:
    if "conv1.weight" in psi:
        z = F.relu(F.linear(z, psi["fc1.weight"], psi["fc1.bias"]))
        return F.linear(z, psi["fc2.weight"], psi["fc2.bias"])
    return F.linear(z, psi["fc3.weight"], psi["fc3.bias"])


def fedsr_loss(psi: Params, own: Params, batch: Batch, l2r: float, cmi: float) -> Tensor:
    m, sigma = forward_gaussian(psi, batch.x)
    z = m + sigma * batch.noise["eps"]
    reference = Normal(own["r_m"][batch.y], F.softplus(own["r_s"][batch.y]))
    divergence: Tensor = kl_divergence(Normal(own["C"] * m, own["C"] * sigma), reference).sum(1).mean()
    length: Tensor = torch.linalg.vector_norm(z, dim=1).mean()
    return F.cross_entropy(forward_classifier(psi, z), batch.y) + l2r * length + cmi * divergence


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_consecutive_fedsr_steps_equal_plain_autograd(case: Case, clip: float) -> None:
    """Regularizers far larger than the paper's, so that they show; references with momentum, from rest."""
    l2r, cmi = 0.3, 0.2
    hyper = FedSRHyper(lr=0.1, l2r=l2r, cmi=cmi, clip=clip, weight_decay=0.01)
    training = FedSR(Task(case.model, CLASSES, 3), hyper)
    server, memory = double_server(training), doubled(training.memory(Somebody()))
    memory["C"] = torch.tensor(1.2, dtype=torch.float64)
    batches = [noisy(case.batch(9, seed), training, seed) for seed in range(4)]
    up, kept, losses = local_round(training, server, memory, Somebody(round=7), batches)
    lr = 0.1 * 0.99**0.7
    psi, own = select(server, "psi"), memory
    velocity = {name: torch.zeros_like(value) for name, value in own.items()}
    for batch, loss in zip(batches, losses, strict=True):
        both = leaves(prefixed("psi", psi) | prefixed("own", own))
        expected = fedsr_loss(select(both, "psi"), select(both, "own"), batch, l2r, cmi)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        grads = gradient(expected, both)
        assert min(norm(select(grads, part)) for part in ("psi", "own")) > 0.05
        psi = descend(psi, select(grads, "psi"), lr, 0.01, clip)
        steps = clipped(select(grads, "own"), clip)
        velocity = {name: 0.9 * value + steps[name] for name, value in velocity.items()}
        own = {name: value - lr * velocity[name] for name, value in own.items()}
    assert distance(select(dict(up), "psi"), difference(psi, select(server, "psi"))) < 1e-4
    assert distance(difference(kept, memory), difference(own, memory)) < 1e-4
    assert up.keys() == server.keys() | {"weight"}, "references are not aggregated"
    assert float((kept["C"] - memory["C"]).abs()) > 1e-3


class Overheard:
    """A classifier that keeps what it is given."""

    def __init__(self, inner: Layered) -> None:
        self.inner, self.heard = inner, [torch.empty(0)][:0]

    def apply(self, params: State, z: Tensor) -> Tensor:
        self.heard.append(z)
        return self.inner.apply(params, z)


def test_fedsr_predicts_the_mean_probability_of_twenty_seeded_samples(case: Case) -> None:
    training = FedSR(Task(case.model, CLASSES, 3), FedSRHyper())
    server, x = training.init(generator(1, "server")), case.x(9, 3, torch.float32)
    overheard = Overheard(training.classifier)
    training.classifier = overheard  # type: ignore[assignment]
    params = training.start(Published(server, 3), Unlabelled(0, x), None)
    log_p = training.logits(params, x)
    psi = select(server, "psi")
    m, sigma = forward_gaussian(psi, x)
    samples = torch.stack(overheard.heard)
    assert samples.shape == (20, *m.shape)
    expected = torch.stack([forward_classifier(psi, z).softmax(1) for z in samples]).mean(0)
    torch.testing.assert_close(log_p.softmax(1), expected, rtol=1e-4, atol=1e-6)
    eps = (samples - m) / sigma
    assert float(eps.mean()) == pytest.approx(0, abs=0.2)
    assert float(eps.std()) == pytest.approx(1, abs=0.1)
    assert not torch.allclose(eps[0], eps[1], atol=0.1)
    torch.manual_seed(99)
    again = training.start(Published(server, 7), Unlabelled(0, x), None)
    assert torch.equal(training.logits(again, x), log_p), "a prediction depends on what was drawn before it"
    torch.testing.assert_close(training.logits(params, x[4:5]), log_p[4:5], rtol=1e-4, atol=1e-5)


# FedPer and the rows that stand on it


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
        engine = Engine.local(RunFolder.create(tmp_path / method, config))
        engine.run()
        assert len(engine.published().members) == members
        (best,) = {int(row["best_round"]) for row in engine.folder.result()["rows"]}
        assert len(engine.folder.load_best(best).members) == members


def test_rows_that_send_models_say_so_where_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    small_run(tmp_path / "fedper", "fedper", rounds=1)
    small_run(tmp_path / "fedavg", "fedavg", rounds=1)
    show_methods(as_json=False, hyper=False)
    listed = capsys.readouterr().out.splitlines()
    show_runs([api.Run(tmp_path / "fedper")], as_json=False)
    shown = capsys.readouterr().out.splitlines()
    show_runs([api.Run(tmp_path / "fedavg")], as_json=False)
    others = capsys.readouterr().out
    words = "sends training clients' own layers to newcomers"
    assert [line.split()[1] for line in listed if words in line] == ["pfl-sampled", "pfl-ensemble"]
    assert [line.split()[0] for line in shown if words in line] == ["PFL-Sampled", "PFL-Ensemble"]
    assert words not in others


@dataclass(frozen=True)
class Members:
    """FedPer with five training clients whose memories are their first ones."""

    case: Case
    training: FedPer
    published: Published

    def logits(self, member: int, x: Tensor) -> Tensor:
        return self.case.forward(select(self.published.state | self.published.members[member], "psi"), x)

    def newcomer(self, id: int, seed: int = 0) -> Unlabelled:
        return Unlabelled(id, self.case.x(300, id, torch.float32), seed)


@pytest.fixture
def members(case: Case) -> Members:
    training = FedPer(Task(case.model, CLASSES, 5), FedPer.Hyper())
    memories = [training.memory(Somebody(id=i)) for i in range(5)]
    return Members(case, training, Published(training.init(generator(1)), 3, memories))


def test_pfl_ensemble_is_the_mean_of_all_members_logits(members: Members) -> None:
    client, later = members.newcomer(0), members.newcomer(1).x
    personalized = Ensemble(members.training, PFLHyper()).personalize(members.published, client)
    for x, logits in ((client.x, personalized.logits), (later, personalized.predict_logits(later))):
        every = torch.stack([members.logits(i, x) for i in range(5)])
        torch.testing.assert_close(logits, every.mean(0), rtol=1e-4, atol=1e-5)
        assert float(every.std(0).mean()) > 0.01, "the members are alike"


def test_pfl_sampled_is_one_members_model_drawn_from_newcomer_and_seed(members: Members) -> None:
    method = Sampled(members.training, PFLHyper())

    def drawn(id: int, seed: int) -> int:
        client = members.newcomer(id, seed)
        short = Unlabelled(client.id, client.x[:20], seed)
        personalized = method.personalize(members.published, short)
        fitting = [
            i for i in range(5) if torch.allclose(personalized.logits, members.logits(i, short.x), rtol=1e-4, atol=1e-5)
        ]
        assert len(fitting) == 1
        assert str(fitting[0]) in personalized.diary.decision
        return fitting[0]

    first = [drawn(id, 0) for id in range(60)]
    assert first == [drawn(id, 0) for id in range(60)]
    assert first != [drawn(id, 1) for id in range(60)]
    counts = Counter(first)
    assert set(counts) == set(range(5))
    assert max(counts.values()) < 30, "far from uniform"


@pytest.mark.parametrize("method", [Sampled, Ensemble])
def test_a_training_client_validates_with_its_own_model(
    members: Members, method: type[Sampled] | type[Ensemble]
) -> None:
    client = members.newcomer(3)
    personalized = method(members.training, PFLHyper()).personalize(
        members.published, client, members.published.members[3]
    )
    torch.testing.assert_close(personalized.logits, members.logits(3, client.x), rtol=1e-4, atol=1e-5)


def test_both_pfl_rows_have_one_validation_accuracy_that_of_clients_own_models(tmp_path: Path) -> None:
    config = small_config("fedper", rounds=3, evaluate_every=1, evaluate_clients=6, clients_per_round=6)
    engine = Engine.local(RunFolder.create(tmp_path / "run", config))
    engine.run()
    lines = engine.folder.metrics()
    for line in lines:
        assert line["rows"].keys() == {"pfl-sampled", "pfl-ensemble"}
        assert len({row["validation"] for row in line["rows"].values()}) == 1
    sampled, ensemble = engine.folder.result()["rows"]
    own = [[client for client in row["clients"] if client["kind"] == "training"] for row in (sampled, ensemble)]
    assert own[0] == own[1]
    assert len(own[0]) == 6
    assert sampled["best_round"] == ensemble["best_round"]
    assert any(len({row["test"] for row in line["rows"].values()}) == 2 for line in lines), "the rows are alike"
    correct = samples = 0
    for i in range(engine.setup.clients):
        indices = engine.federation.training.validation(i)
        logits = forward_mlp(
            select(engine.progress.server | engine.cohort.memory(i), "psi"), engine.setup.inputs.x(indices)
        )
        correct += int((logits.argmax(1) == engine.setup.inputs.y(indices)).sum())
        samples += len(indices)
    assert lines[-1]["rows"]["pfl-sampled"]["validation"] == pytest.approx(100 * correct / samples)


# ODPFL-HN


def hypernetwork(case: Case, rank: int | None = None, **hyper: Any) -> OdpflHn:
    values = {"embedding": 6, "hidden": 11, "lr": 0.3} | hyper
    return OdpflHn(Task(case.model, CLASSES, 3), OdpflHnHyper(rank=rank, **values))


def forward_embedding(encoder: Params, x: Tensor) -> Tensor:
    """mean E(x)"""
    if "conv1.weight" in encoder:
        for name in ("conv1", "conv2"):
            x = F.max_pool2d(F.relu(F.conv2d(x, encoder[f"{name}.weight"], encoder[f"{name}.bias"], padding=2)), 2)
        return F.linear(x.flatten(1), encoder["embedding.weight"], encoder["embedding.bias"]).mean(0)
    return forward_mlp(encoder, x).mean(0)


def forward_hypernetwork(server: Params, case: Case, x: Tensor) -> Params:
    """H(mean E(x)): a hidden layer, three further ones, the bottleneck if there is one, a head for each tensor."""
    h, trunk = forward_embedding(select(server, "encoder"), x), select(server, "trunk")
    for i in range(1, 5):
        h = F.relu(F.linear(h, trunk[f"fc{i}.weight"], trunk[f"fc{i}.bias"]))
    if "bottleneck.weight" in trunk:
        h = F.linear(h, trunk["bottleneck.weight"], trunk["bottleneck.bias"])
    return {
        name: F.linear(h, server[f"head.{name}.weight"], server[f"head.{name}.bias"]).view(shape)
        for name, shape in case.model.shapes.items()
    }


def hypernetwork_gradient(server: Params, case: Case, x: Tensor, change: Params) -> Params:
    """The gradient of <H(mean E(x)), change> by autograd."""
    at = leaves(server)
    with torch.enable_grad():
        theta = forward_hypernetwork(at, case, x)
        return gradient(torch.stack([(theta[name] * change[name]).sum() for name in theta]).sum(), at)


def local_change(case: Case, theta: Params, batches: Sequence[Batch], lr: float) -> Params:
    """theta - theta'"""
    psi = theta
    for batch in batches:
        psi = leaves(psi)
        with torch.enable_grad():
            grads = gradient(F.cross_entropy(case.forward(psi, batch.x), batch.y), psi)
        psi = descend(psi, grads, lr, 1e-4, 10.0)
    return difference(theta, psi)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_odpfl_hns_gradient_is_that_of_the_inner_product_with_the_weight_change(
    case: Case, rank: int | None, aggregation: str
) -> None:
    training = hypernetwork(case, rank, aggregation=aggregation)
    server, own = double_server(training), case.batch(300, 4)
    batches = [case.batch(9, seed) for seed in range(3)]
    up, kept, _ = local_round(training, server, {}, holder(own, round=7), batches)
    theta = forward_hypernetwork(server, case, own.x)
    change = local_change(case, theta, batches, 0.3 * 0.99**0.7)
    expected = hypernetwork_gradient(server, case, own.x, change)
    weight = float(up["weight"])
    assert (weight == 1) == (aggregation == "uniform")
    assert up.keys() == server.keys() | {"weight"}
    for name, value in expected.items():
        assert norm({name: value}) > 0, name
        assert up[name].shape == server[name].shape
        assert distance({name: up[name] / weight}, {name: value}) < 1e-8, name
    assert kept == {}


@pytest.mark.parametrize("server_clip", [1e-4, 1e9])
def test_an_odpfl_hn_round_weighs_by_samples_and_clips_encoder_and_hypernetwork_apart(
    case: Case, server_clip: float
) -> None:
    hyper = {"encoder_lr": 0.4, "hypernet_lr": 0.7, "weight_decay": 1e-4, "server_clip": server_clip}
    training = hypernetwork(case, rank=4, **hyper)
    server, counts, round = double_server(training), (10, 40, 25), 7
    ups, mean = [], {name: torch.zeros_like(value) for name, value in server.items()}
    for i, count in enumerate(counts):
        own, batches = case.batch(count, 20 + i), [case.batch(9, 10 * i + seed) for seed in range(3)]
        ups.append(local_round(training, server, {}, holder(own, i, round), batches)[0])
        change = local_change(case, forward_hypernetwork(server, case, own.x), batches, 0.3 * 0.99**0.7)
        for name, value in hypernetwork_gradient(server, case, own.x, change).items():
            mean[name] += value * count / sum(counts)
    before = {name: value.clone() for name, value in server.items()}
    after = training.aggregate(server, total_of(training, ups), round)
    for part, lr in (("encoder", 0.4), ("hypernetwork", 0.7)):
        names = [name for name in before if name.startswith("encoder.") == (part == "encoder")]
        grads = {name: mean[name] for name in names}
        assert (norm(grads) > server_clip) == (server_clip < 1), "clips where it should not, or not where it should"
        values = {name: before[name] for name in names}
        expected = descend(values, grads, lr * 0.99**0.7, 1e-4, server_clip)
        ours = {name: after[name] for name in names}
        assert distance(difference(ours, values), difference(expected, values)) < 1e-5


@pytest.mark.parametrize("rank", [None, 4])
def test_an_odpfl_hn_newcomers_model_is_made_from_its_data_in_any_order(case: Case, rank: int | None) -> None:
    training = hypernetwork(case, rank)
    server, x = training.init(generator(1, "server")), case.x(700, 3, torch.float32)
    x = x * torch.linspace(0.1, 3, 700).view(-1, 1, 1, 1)  # samples that differ: a mean over chunks' means would show
    server |= {f"head.{name}.weight": server[f"head.{name}.weight"] * 30 for name in case.model.shapes}
    published = Published(server, 3)
    expected = forward_hypernetwork(server, case, x)
    by_chunks = training.generate(server, [x[:1], x[1:500], x[500:]])
    turned = x[torch.randperm(700, generator=generator(5))]
    for theta in (
        training.start(published, Unlabelled(0, x), None),
        training.start(published, Unlabelled(0, turned), None),
        by_chunks,
    ):
        assert distance(theta, expected) < 1e-5
    assert distance(training.start(published, Unlabelled(0, x[:256]), None), expected) > 1e-4, (
        "the data makes no difference"
    )
    theta = training.start(published, Unlabelled(0, x), None)
    torch.testing.assert_close(training.logits(theta, x), case.forward(expected, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("model", "millions"), [(CIFAR10, 218), (FEMNIST, 667)], ids=["cifar10", "femnist"])
def test_odpfl_hns_full_head_has_as_many_parameters_as_the_card_says(model: Layered, millions: int) -> None:
    with nothing_allocated():
        training = OdpflHn(Task(model, 10, 3), OdpflHnHyper())
        size = training.size
    assert round(size / 1e6) == millions
    convolutions = sum(math.prod(shape) for name, shape in model.shapes.items() if name.startswith("conv"))
    encoder = convolutions + 32 * model.shapes["fc1.weight"][1] + 32
    trunk = 32 * 100 + 100 + 3 * (100 * 100 + 100)
    assert size == encoder + trunk + 101 * model.size


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """No tensor of a million values may be made here."""

    def checked(*shape: Any, **options: Any) -> Tensor:
        assert math.prod(torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)) < 1_000_000
        return empty(*shape, **options)

    empty, before = torch.empty, _tensor_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", checked)
        yield
    assert _tensor_bytes() - before < 4_000_000


def _tensor_bytes() -> int:
    """The bytes of all tensors that Python objects hold."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("rank", [None, 4])
def test_odpfl_hns_size_is_that_of_its_state_and_a_low_rank_makes_it_small(case: Case, rank: int | None) -> None:
    training = OdpflHn(Task(case.model, CLASSES, 3), OdpflHnHyper(rank=rank))
    state = training.init(generator(1))
    assert training.size == sum(value.numel() for value in state.values())
    assert training.encoder.init(generator(1)).keys() == select(state, "encoder").keys()
    heads = sum(value.numel() for value in select(state, "head").values())
    assert heads == (101 if rank is None else 5) * case.model.size


def test_odpfl_hns_encoder_is_the_convolutions_or_784_200_32() -> None:
    assert hypernetwork_of(MLP).encoder.shapes == {
        "fc1.weight": (200, 784),
        "fc1.bias": (200,),
        "fc2.weight": (32, 200),
        "fc2.bias": (32,),
    }
    assert hypernetwork_of(CIFAR10).encoder.shapes == {
        name: shape for name, shape in CIFAR10.shapes.items() if name.startswith("conv")
    } | {"embedding.weight": (32, 4096), "embedding.bias": (32,)}


def hypernetwork_of(model: Layered) -> OdpflHn:
    return OdpflHn(Task(model, 10, 3), OdpflHnHyper())


class Watched(Mapping[str, Tensor]):
    """An upload that knows how many bytes of what it handed out are still held by somebody."""

    def __init__(self, inner: Mapping[str, Tensor]) -> None:
        self.inner, self.most = inner, 0
        self.out: list[tuple[weakref.ref[Tensor], int]] = []

    def __getitem__(self, name: str) -> Tensor:
        value = self.inner[name]
        if name.startswith("head."):
            self.out.append((weakref.ref(value), value.numel() * value.element_size()))
        self.most = max(self.most, sum(size for ref, size in self.out if ref() is not None))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def test_odpfl_hns_head_gradients_are_formed_one_at_a_time() -> None:
    """Eight tensors of about a size: an upload with all their gradients would be four times that of two."""
    model = mlp(64, (64, 64, 64), 64)
    training = OdpflHn(Task(model, 64, 3), OdpflHnHyper())
    server = training.init(generator(1, "server"))
    own = Batch(torch.randn(20, 1, 8, 8, generator=generator(2)), torch.arange(20))
    before = _tensor_bytes()
    up, _, _ = local_round(training, server, {}, holder(own), [own])
    gc.collect()
    heads = sum(4 * server[name].numel() for name in server if name.startswith("head."))
    largest = max(4 * server[name].numel() for name in server if name.startswith("head."))
    assert _tensor_bytes() - before < heads / 4, "what a client sends holds its head gradients"
    watched = Watched(up)
    total = FixedPointSum(watched, 1)
    total.add(watched)
    assert watched.most >= largest
    assert watched.most <= 2.1 * largest < heads / 1.5, "the sum holds all head gradients at once"
    assert total.count == 1


# Memory over processes, and of many clients


def test_scaffolds_memory_survives_a_stop_and_does_not_depend_on_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the engine sets it: put back at the end
    config = small_config("scaffold", rounds=5, clients_per_round=3, checkpoint_every=2)
    expected = ran(config, tmp_path / "one")
    with pytest.raises(StopError):  # after round 3, when the checkpoint holds round 2
        api.train(config, tmp_path / "two", workers=2, observer=Interrupter("round", 3))
    folder = RunFolder(tmp_path / "two")
    assert not folder.finished
    stopped = folder.load(torch.device("cpu"))
    assert stopped is not None
    assert stopped.round == 2
    api.resume(tmp_path / "two", workers=2)
    ours = outcome(folder)
    assert sum(name.startswith("memory/") for name in ours.tensors) >= 3
    assert_same(ours, expected)


@dataclass
class Scales(Watching):
    """Weighs this process after every stage of a run."""

    tensors: int = 0
    resident: int = 0

    def weigh(self) -> None:
        self.tensors = max(self.tensors, _tensor_bytes())
        self.resident = max(self.resident, resident_bytes())

    def begin(self, run: Engine[Any]) -> None:
        self.weigh()

    def stage(self, what: str) -> None:
        self.weigh()

    def round(self, metrics: dict[str, Any]) -> None:
        self.weigh()


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def test_ten_thousand_scaffold_clients_cost_files_for_those_that_came_and_no_models_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, each, rounds = 10_000, 20, 3
    drawn, size = np.random.default_rng(0), 4 * clients
    images, labels = drawn.integers(0, 256, (size, 1, 4, 4), np.uint8), drawn.integers(0, 3, size)
    source = data.Source("digits", images, labels, ("a", "b", "c"), size, None, 255.0, (0.5,), (0.3,))
    monkeypatch.setattr(data, "load", lambda name: source)
    config = small_config(
        "scaffold",
        "partition.kind=iid",
        rounds=rounds,
        clients_per_round=each,
        evaluate_every=1,
        evaluate_clients=10,
        model={"hidden": 128},
        partition={"clients": 2 * clients},
    )
    engine = Engine.local(RunFolder.create(tmp_path / "run", config))
    assert engine.setup.clients == clients
    one_model = 4 * engine.training.model.size
    assert one_model > 60_000
    before, scales = (_tensor_bytes(), resident_bytes()), Scales()
    engine.run(scales)
    came = {id for round in range(rounds) for id in engine.cohort.participants(round)}
    files = [file.stem.split("-") for file in engine.folder.path.rglob("memory/*/*")]
    assert {int(client) for client, _ in files} == came
    assert len(files) == len(came) <= each * rounds
    assert scales.tensors - before[0] < 40 * one_model
    assert scales.resident - before[1] < clients * one_model / 4


def test_a_client_that_never_came_has_scaffolds_zero_variate_without_a_file(tmp_path: Path) -> None:
    config = small_config("scaffold", rounds=1, clients_per_round=1)
    engine = Engine.local(RunFolder.create(tmp_path / "run", config))
    engine.run()
    (came,) = engine.cohort.participants(0)
    for id in range(engine.setup.clients):
        assert (norm(engine.cohort.memory(id)) == 0) == (id != came)
    fresh = engine.training.memory(LocalClient(engine.federation, engine.setup.inputs, 0, 0, 0))
    assert {name.removeprefix("control."): tuple(value.shape) for name, value in fresh.items()} == {
        name: tuple(shape) for name, shape in engine.training.model.shapes.items()
    }
