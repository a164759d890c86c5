"""The names of corrected personalizers, from end to end."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scored import SMALL
from tests.plugin_methods import Said, lines, upfl
from upfl.config import Config, configure
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.errors import RunError
from upfl.experiments.score import Scorer
from upfl.methods import personalizer_class

pytestmark = pytest.mark.usefixtures("alone", "wide")


COMPOSITE = ("one-step+label-shift", "tent+calibrated", "early-stopped+map-em", "tent+calibrated+label-shift")


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    out = tmp_path_factory.mktemp("composite") / "run"
    tent = ("tent+calibrated.base.steps=3", "tent+calibrated+label-shift.base.base.steps=3")
    settings = (*SMALL, *tent, "one-step+label-shift.gate=5", "early-stopped+map-em.strength=2")
    options = [part for setting in settings for part in ("--set", setting)]
    scale = ("--rounds", "2", "--evaluate-every", "2", "--workers", "1", "--set", "evaluate_clients=4")
    said = upfl("train", "fedtta", "digits", "--score", ",".join(COMPOSITE), *options, *scale, "--out", out)
    return out, said


def test_a_run_is_scored_under_corrected_personalizers(composite: tuple[Path, Said]) -> None:
    out, said = composite
    said.ended()
    rows = lines(out)[-1]["rows"]
    assert rows.keys() == {"fedtta", *(f"fedtta+{name}" for name in COMPOSITE)}
    assert all(0 <= row["test"] <= 100 for row in rows.values())
    assert rows["fedtta+tent+calibrated"]["steps"] == 3, "--set reaches the base"
    calibrations = {f"calibration.{name}" for name in ("one-step", "tent", "tent+calibrated")}
    assert calibrations | {"gate.one-step+label-shift"} <= set(lines(out)[-1]["fits"])


def test_the_configuration_of_corrected_personalizers_makes_a_round_trip(composite: tuple[Path, Said]) -> None:
    out, _ = composite
    config = Config.from_toml(out / "config.toml")
    assert config.personalize["tent+calibrated"]["base"]["steps"] == 3
    assert config.personalize["one-step+label-shift"]["gate"] == 5
    assert config.personalize["early-stopped+map-em"]["strength"] == 2
    assert config.personalize["early-stopped+map-em"]["base"] == config_of_base(config, "early-stopped")
    assert config.to_toml() == (out / "config.toml").read_text()
    again = configure("fedtta", "digits", file=out / "config.toml")
    assert again == config


def config_of_base(config: Config, name: str) -> dict[str, Any]:
    """The paper's values of a personalizer on digits, as a run of its own would have them."""
    return configure("fedtta", config.dataset, score=[name]).personalize[name]


def test_a_stored_run_scores_corrected_personalizers_with_its_own_settings(composite: tuple[Path, Said]) -> None:
    out, _ = composite
    scorer = Scorer(RunFolder.open(out), ["tent+calibrated", "auto"])
    assert scorer.personalizers["tent+calibrated"].hyper.base.steps == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("label-shift+tent", ("label-shift+tent", "correction", "calibrated, label-shift, em, map-em, bbse")),
        ("one-step+none", ("one-step+none", "correction")),
        ("tent+auto", ("tent+auto", "correction")),
        ("tnt+label-shift", ("tnt", "tent")),
        ("tent+label-shif", ("label-shif", "label-shift")),
        ("tent+", ("tent+", "BASE+CORRECTION")),
        ("+label-shift", ("+label-shift", "BASE+CORRECTION")),
        ("sampled+label-shift", ("sampled+label-shift", "fedavg")),
        ("one-step+label-shift", ("one-step+label-shift", "fedavg")),
    ],
)
def test_wrong_combinations_say_what_can_be_combined(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    upfl("train", "fedavg", "digits", "--rounds", "1", "--score", name, "--out", tmp_path / "run").ended(2, *words)
    assert not (tmp_path / "run").exists()


def test_none_as_a_base_is_no_base() -> None:
    assert personalizer_class("none+label-shift") is personalizer_class("label-shift")


def test_settings_that_cannot_go_together_are_refused_before_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--score", "label-shift,auto", "--set", "label-shift.gate=5", "--workers", "1", "--out", out)
    upfl("train", "fedavg", "digits", "--rounds", "1", *options).ended(2, "gate.label-shift")
    assert not out.exists()


def test_what_needs_validation_data_says_so_before_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--set", "partition.validation=0", "--rounds", "1", "--workers", "1", "--out", out)
    said = upfl("train", "label-shift", "digits", *options)
    assert said.code in (2, 3), said.err
    assert "validation" in said.err
    assert not out.exists()


def test_a_base_that_was_not_fitted_is_named(run: Path) -> None:
    engine = Engine.standing(RunFolder.open(run))
    kind = personalizer_class("tent+label-shift")
    with pytest.raises(RunError, match=r"calibration\.tent"):
        kind(engine.training, kind.Hyper()).personalize(engine.published(), engine.setup.population.newcomer(0))
