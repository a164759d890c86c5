"""SCAFFOLD: hand-solved quadratics, steps against autograd, its control variates in memory."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.params import descend, difference, distance, doubled, gradient, leaves, norm
from tests.helpers.rounds import double_server, local_round, scores, small_config, small_run, tensor_bytes, total_of
from tests.observers import Watching
from tests.reference import CLASSES, Case, Somebody
from tests.runs import assert_same_bits, begun
from upfl import data
from upfl.contract import Batch, Task
from upfl.data.forms import Pixels
from upfl.models import Layered, Linear
from upfl.randomness import generator
from upfl.state import State, select
from upfl.training import scaffold
from upfl.training.scaffold import Scaffold, ScaffoldHyper

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_scaffolds_server_variate_stays_the_mean_of_all_clients_own_under_partial_participation(tmp_path: Path) -> None:
    config = small_config("scaffold", rounds=5, clients_per_round=2, evaluate_every=5)
    engine = begun(config, tmp_path / "run")
    engine.run()
    versions = engine.progress.memory_rounds.tolist()
    assert min(versions) < 0 <= max(versions), "all clients took part, or none"
    own = [select(doubled(engine.cohort.memory(i)), "control") for i in range(engine.setup.clients)]
    mean = {name: torch.stack([state[name] for state in own]).mean(0) for name in own[0]}
    assert norm(mean) > 1e-2
    assert distance(select(doubled(engine.progress.server), "control"), mean) < 1e-6
    for i, version in enumerate(versions):
        assert (norm(own[i]) > 0) == (version >= 0)


@dataclass
class Scales(Watching):
    """Weighs this process after every stage of a run."""

    tensors: int = 0
    resident: int = 0

    def stage(self, what: str) -> None:
        self.tensors = max(self.tensors, tensor_bytes())
        self.resident = max(self.resident, resident_bytes())


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def test_ten_thousand_scaffold_clients_cost_files_for_those_that_came_and_no_models_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, each, rounds = 10_000, 20, 3
    drawn, size = np.random.default_rng(0), 4 * clients
    images, labels = drawn.integers(0, 256, (size, 1, 4, 4), np.uint8), drawn.integers(0, 3, size)
    form = Pixels(shape=(1, 4, 4), scale=255.0, mean=(0.5,), std=(0.3,))
    source = data.Source("digits", images, labels, ("a", "b", "c"), size, None, form)
    monkeypatch.setattr(data, "load", lambda name: source)
    scale: dict[str, Any] = {"rounds": rounds, "clients_per_round": each, "evaluate_every": 1, "evaluate_clients": 10}
    parts = {"model": {"hidden": 128}, "partition": {"clients": 2 * clients}}
    config = small_config("scaffold", "partition.kind=iid", **scale, **parts)
    engine = begun(config, tmp_path / "run")
    assert engine.setup.clients == clients
    one_model = 4 * engine.training.model.size
    assert one_model > 60_000
    before, scales = (tensor_bytes(), resident_bytes()), Scales()
    engine.run(scales)
    came = {id for round in range(rounds) for id in engine.cohort.participants(round)}
    files = [file.stem.split("-") for file in engine.folder.path.rglob("memory/*/*")]
    assert {int(client) for client, _ in files} == came
    assert len(files) == len(came) <= each * rounds
    checkpoint = (engine.folder.path / "checkpoint.safetensors").stat().st_size
    assert checkpoint < 3 * one_model + 64 * clients, "more than a few numbers for every client that exists"
    assert scales.tensors - before[0] < 40 * one_model
    assert scales.resident - before[1] < clients * one_model / 4
