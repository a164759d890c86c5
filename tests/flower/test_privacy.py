"""Differential privacy: the exact budget, the noise, and where it is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from tests.helpers.flower import bad_in, federated, nodes, spoiled
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, result, server, small
from upfl.bundle import Bundle
from upfl.engine.fold import FixedPointSum
from upfl.engine.local import LOSS
from upfl.errors import ConfigError
from upfl.flower import privacy
from upfl.flower.messages import ARRAYS, from_record
from upfl.state import State, norm


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
