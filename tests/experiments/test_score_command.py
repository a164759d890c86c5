"""`upfl score`: what is shown, what is stored, and what is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.scored import small
from tests.plugin_methods import Said, upfl
from upfl.engine.folder import RunFolder
from upfl.personalize.oracle import ORACLES
from upfl.statistics import mcnemar

pytestmark = pytest.mark.usefixtures("alone", "wide")


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*.*")
    }


@pytest.fixture(scope="module")
def told(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, dict[str, Any], dict[str, Any]]:
    out = tmp_path_factory.mktemp("told") / "new folder" / "scores.json"
    before = content(run)
    options = ("--oracles", "all", "--inductive", "--sizes", "5,20", "--classes", "2,10", "--draws", "3")
    said = upfl("score", run, "--score", "none,calibrated,label-shift,auto", *options, "-o", out, "--json")
    assert content(run) == before, "scoring changed the run folder"
    return said, json.loads(said.out), json.loads(out.read_text())


def test_score_tells_the_same_on_screen_and_in_the_file(told: tuple[Said, dict[str, Any], dict[str, Any]]) -> None:
    said, printed, stored = told
    said.ended()
    assert printed == stored


def test_score_tells_all_that_a_table_of_results_needs(told: tuple[Said, dict[str, Any], dict[str, Any]]) -> None:
    _, found, _ = told
    named = [found[key] for key in ("dataset", "training", "round", "seed", "partition_seed")]
    assert named == ["digits", "fedavg", 12, 0, 0]
    assert {"calibration.none", "gate.label-shift", "reliability.label-shift", "choice.auto"} <= found["fits"].keys()
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["none", "calibrated", "label-shift", "auto", *ORACLES]
    for name, row in rows.items():
        assert row["bound"] == name.startswith("oracle-")
        assert len(row["clients"]) == 10
        assert all(0 <= client["accuracy"] <= 100 for client in row["clients"])
        sizes = np.array([client["size"] for client in row["clients"]])
        mean = float(np.average([client["accuracy"] for client in row["clients"]], weights=sizes))
        assert row["test"] == pytest.approx(mean)
        assert ("validation" in row) == ("inductive" in row) == (not row["bound"])
        assert ("against_none" in row) == (not row["bound"] and name != "none")
        assert ("against_calibrated" in row) == (not row["bound"] and name != "calibrated")
    for row in (rows["label-shift"], rows["auto"]):
        against = row["against_none"]
        assert against["difference"] == pytest.approx(row["test"] - rows["none"]["test"])
        assert against["low"] <= against["difference"] <= against["high"]
    assert rows["label-shift"]["estimate"].keys() == {"mean_error", "mean_absolute_error", "covered"}
    curves = [(curve["classes"], curve["samples"]) for curve in found["newcomers"]]
    assert curves == [(2, 5), (2, 20), (10, 5), (10, 20)]
    for curve in found["newcomers"]:
        assert [row["name"] for row in curve["rows"]] == ["none", "calibrated", "label-shift", "auto"]
        assert curve["mean_samples"] == curve["samples"]


def test_small_clients_are_pooled_where_harm_is_counted(told: tuple[Said, dict[str, Any], dict[str, Any]]) -> None:
    """Clients of this run have about 90 samples: none is large enough to be judged by itself."""
    rows = {row["name"]: row for row in told[1]["rows"]}
    for reference in ("none", "calibrated"):
        against = rows["label-shift"][f"against_{reference}"]
        assert against["large_clients"] + against["small_clients"]["clients"] == 10
        pooled = against["small_clients"]
        assert pooled["lost"] + pooled["won"] <= pooled["samples"]
        assert pooled["p"] == pytest.approx(mcnemar(pooled["lost"], pooled["won"]))


def test_the_table_draws_bounds_apart(run: Path) -> None:
    said = upfl("score", run, "--score", "none", "--oracles", "all").ended()
    rows = said.out.splitlines()
    places = [i for i, line in enumerate(rows) if line.startswith("oracle-")]
    assert len(places) == len(ORACLES)
    (none,) = [i for i, line in enumerate(rows) if line.startswith("none")]
    assert none < places[0] - 1, "a line divides methods from bounds"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--score label-shif", ("label-shif", "label-shift")),
        ("--score ", ("--score",)),
        ("--score  , ", ("--score",)),
        ("--score one-step", ("one-step", "fedavg")),
        ("--sizes 5,x", ("--sizes 5,x", "whole numbers")),
        ("--sizes 0", ("--sizes 0",)),
        ("--classes -2", ("--classes",)),
        ("--draws 0", ("--draws",)),
    ],
)
def test_wrong_arguments_are_named(run: Path, options: str, words: tuple[str, ...]) -> None:
    assert upfl("score", run, *options.split(" ", 1)).ended(2, *words).out == ""


def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    upfl("score", run, "--score", "none", "-o", tmp_path).ended(2, str(tmp_path))


def test_no_run_and_a_run_that_has_not_begun_are_named(tmp_path: Path) -> None:
    upfl("score", tmp_path / "nowhere").ended(4, "not a run folder")
    RunFolder.create(tmp_path / "empty", small())
    upfl("score", tmp_path / "empty").ended(4, "no checkpoint", "upfl resume")
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["config.toml"]
