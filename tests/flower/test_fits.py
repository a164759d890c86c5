"""What personalizers need, fitted over nodes: in few messages, to the bits of the engine, in the clear and securely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from tests.helpers.flower import assert_same_run, federated, nodes
from tests.helpers.secure_grid import LinkGrid, assert_same_but_for_costs, secure_nodes
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import lines, small
from upfl import api
from upfl.bundle import Bundle
from upfl.engine.setup import assemble
from upfl.flower.messages import FACTS
from upfl.methods import PERSONALIZERS
from upfl.personalize.likeness import known_of

ALL = {"clients_per_round": 1.0, "rounds": 1, "evaluate_every": 1}
EIGHT = "evaluate_clients=8"  # enough to calibrate by


def fitting(training: str) -> list[str]:
    """Every personalizer that goes with a training, and corrections that stand on others."""
    made = assemble(small(training)).training
    found = [kind.name for kind in PERSONALIZERS.values() if kind.name != "none" and kind.why_not(made) is None]
    return [*found, "refit+label-shift", "tent+calibrated"]


def messages(score: list[str], out: Path) -> list[list[str]]:
    """What a node was asked for in each message about fits; all of them came before it was scored."""
    asked: list[list[str]] = []

    def watch(node: int, message: Message, reply: Message) -> Message:
        if node == 1000 and message.metadata.message_type in ("train.fit", "evaluate"):
            facts: dict[str, Any] = dict(message.content.config_records[FACTS])
            asked.append(facts.get("keys", []))
        return reply

    federated(small("fedavg", EIGHT, score=score, **ALL), out, InProcessGrid(nodes(), watch))
    assert known_of(Bundle.load(out / "bundle").published)
    assert asked.pop() == [], "the check of newcomers' data went with the others"
    return asked


@pytest.mark.parametrize(
    ("score", "most"), [(["label-shift"], 5), (["refit+label-shift", "label-shift", "atp"], 5), (["auto"], 6)]
)
def test_what_personalizers_need_takes_at_most_five_messages(score: list[str], most: int, tmp_path: Path) -> None:
    """With `auto` it is one more: its choice comes after the gate on the refitted model."""
    asked = messages(score, tmp_path / "run")
    assert len(asked) <= most
    assert sum("likeness.none" in keys for keys in asked) == 4
    assert {"gate.label-shift", "reliability.label-shift"} <= set(asked[-1 if most == 5 else -2])


@pytest.mark.bits
@pytest.mark.parametrize("training", ["fedavg", pytest.param("fedtta", marks=pytest.mark.full)])
def test_every_fit_has_the_engines_bits_in_the_clear_and_securely(training: str, keys: Path, tmp_path: Path) -> None:
    config = small(training, EIGHT, score=fitting(training), **ALL)
    grid = LinkGrid(secure_nodes(keys))
    api.train(config, tmp_path / "engine", workers=1)
    federated(config, tmp_path / "plain", InProcessGrid(nodes()))
    federated(config, tmp_path / "secure", grid, secure=True)
    assert_same_run(tmp_path / "plain", tmp_path / "engine")
    assert_same_but_for_costs(tmp_path / "secure", tmp_path / "plain")
    line = lines(tmp_path / "secure")[-1]
    kinds = {key.partition(".")[0] for key in line["fits"]}
    assert kinds == {"calibration", "gate", "reliability", "rates", "discriminant", "ridge", "means", "choice"}
    assert line["secure"]["bytes_up"].keys() == {"train", "fit", "evaluate"}
    assert "train.fit" not in {step for _, step, _ in grid.asked}, "nothing in the clear"


def test_a_later_step_of_a_secure_fit_is_tried_again_with_those_that_are_left(keys: Path, tmp_path: Path) -> None:
    """Four of eight at the second step: those that remain still have what the step before left them."""
    config = small("fedavg", EIGHT, score=["calibrated"], **ALL)
    grid, masks = LinkGrid(secure_nodes(keys)), dict.fromkeys(nodes(), 0)

    def kill(node: int, asked: dict[str, Any]) -> bool:
        masks[node] += asked.get("step") == "mask" and asked["work"] == "fit"
        return node in sorted(nodes())[:4] and masks[node] == 2

    grid.kill = kill
    federated(config, tmp_path / "run", grid, secure=True, timeout=0.3)
    fits = lines(tmp_path / "run")[-1]["fits"]
    assert fits["calibration.none"]["left_out"] == fits["reliability.calibrated"]["left_out"] == 4
