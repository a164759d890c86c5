"""What personalizers need, fitted over nodes: in few messages, to the bits of the engine, in the clear and securely."""

from __future__ import annotations

import re
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
from upfl.contract import Fit, Personalizer, Published
from upfl.engine.fitting import Schedule
from upfl.engine.setup import assemble
from upfl.flower.messages import FACTS
from upfl.methods import PERSONALIZERS, TRAININGS, personalizer_class
from upfl.personalize.calibration import Correction
from upfl.personalize.likeness import known_of
from upfl.randomness import generator

ALL = {"clients_per_round": 1.0, "rounds": 1, "evaluate_every": 1}
EIGHT = "evaluate_clients=8"  # enough to calibrate by


def fitting(training: str) -> list[str]:
    """What goes with a training and is fitted, and corrections that stand on others; each kind of fit is among them."""
    made = assemble(small(training)).training
    found = [name for name in ("auto", "atp", "fed3r", "fedncm", "bbse") if PERSONALIZERS[name].why_not(made) is None]
    return [*found, "tent+calibrated", "atp+label-shift"]


def messages(score: list[str], out: Path) -> list[list[str]]:
    """What a node was asked for in each message about fits; all of them came before it was scored."""
    asked: list[list[str]] = []

    def watch(node: int, message: Message, reply: Message) -> Message:
        if node == 1000 and message.metadata.message_type in ("train.fit", "evaluate"):
            facts: dict[str, Any] = dict(message.content.config_records[FACTS])
            asked.append(facts.get("keys", []))
        return reply

    federated(small("fedavg", EIGHT, score=score, **ALL), out, InProcessGrid(nodes(), watch), compared=True)
    assert known_of(Bundle.load(out / "bundle").published)
    assert asked.pop() == [], "the check of newcomers' data went with the others"
    return asked


@pytest.mark.parametrize(
    ("score", "last"),
    [
        (["refit+label-shift", "label-shift", "atp"], {"gate.refit+label-shift", "reliability.refit+label-shift"}),
        (["auto", "atp+label-shift"], {"gate.refit+label-shift", "gate.atp+label-shift", "choice.auto"}),
    ],
)
def test_what_personalizers_need_takes_at_most_five_messages(
    score: list[str], last: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says of each what it is about, and in which round it is."""
    caplog.set_level("INFO")
    asked = messages(score, tmp_path / "run")
    assert len(asked) <= 5
    assert len(re.findall(r"fit .*: 8 of 8 replies", caplog.text)) == len(asked)
    assert re.search(r"fit .*discriminant.refit, .*likeness.none 1 of 4", caplog.text)
    assert re.search(r"fit .*calibration.refit 2 of 3.*: 8 of 8 replies", caplog.text)
    assert sum("likeness.none" in keys for keys in asked) == 4
    assert last <= set(asked[-1])


def longest(personalizers: list[Personalizer[Any]]) -> int:
    """How many messages what they need takes, where no fit is done before its last round."""
    schedule, running, count = Schedule(personalizers, Published({}, 1), lambda what: None), dict[str, Fit](), 0
    left: dict[str, int] = {}
    while running := running | (begun := schedule.ready()):
        left |= {key: fit.rounds for key, fit in begun.items()}
        count += 1
        for key, fit in list(running.items()):
            left[key] -= 1
            if not left[key]:
                schedule.finished(key, running.pop(key), fit.init(generator(0)), 0)
    return count


@pytest.mark.parametrize("training", [name for name, kind in TRAININGS.items() if not kind.publishes_memory])
def test_no_personalizer_and_no_correction_of_one_needs_more_than_five_messages(training: str) -> None:
    """Alone, and all together. A correction of a correction stands on two calibrations, and takes up to nine."""
    made = assemble(small(training)).training
    corrections = {name for name, kind in PERSONALIZERS.items() if issubclass(kind, Correction)}
    pairs = [f"{base}+{name}" for base in PERSONALIZERS if base != "none" for name in corrections]
    kinds = [kind for kind in map(personalizer_class, [*PERSONALIZERS, *pairs]) if kind.why_not(made) is None]
    few, many = list[Personalizer[Any]](), list[Personalizer[Any]]()
    for kind in kinds:
        corrected = kind.name.rpartition("+")[0] in {*corrections, "auto"}
        (many if corrected else few).append(kind(made, kind.Hyper()))
    assert {"auto", "label-shift", "lame+label-shift"} <= {one.name for one in few}
    assert {one.name: count for one in few if (count := longest([one])) > 5} == {}
    assert longest(few) == 5
    assert {one.name: count for one in many if (count := longest([one])) > 9} == {}


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


def test_a_later_step_of_a_secure_fit_is_tried_again_with_those_that_are_left(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four of eight at the second step: those that remain still have what the step before left them."""
    caplog.set_level("INFO")
    config = small("fedavg", EIGHT, score=["calibrated"], **ALL)
    grid, masks = LinkGrid(secure_nodes(keys)), dict.fromkeys(nodes(), 0)

    def kill(node: int, asked: dict[str, Any]) -> bool:
        masks[node] += asked.get("step") == "mask" and asked["work"] == "fit"
        return node in sorted(nodes())[:4] and masks[node] == 2

    grid.kill = kill
    federated(config, tmp_path / "run", grid, secure=True, timeout=0.3)
    fits = lines(tmp_path / "run")[-1]["fits"]
    assert fits["calibration.none"]["left_out"] == fits["reliability.calibrated"]["left_out"] == 4
    assert re.search(r"fit calibration.none 2 of 4, .*likeness.none 2 of 4.*: mask: 4 of 8 replies", caplog.text)
    assert re.search(r"fit calibration.none 2 of 4, .*: mask: 4 of 4 replies", caplog.text)
    assert re.search(r"fit .*, reliability.calibrated: unmask", caplog.text)
