"""`upfl score` on a trained run, its bounds, its draws, and the names of corrected personalizers from end to end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugin_methods import Said, lines, result, upfl
from upfl import api
from upfl.config import Config, configure
from upfl.contract import Personalized, Published, Unlabelled
from upfl.data.inputs import Inputs
from upfl.engine.clients import newcomer
from upfl.engine.fitting import fit_needs
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import RunError
from upfl.experiments.comparison import harm, summaries
from upfl.experiments.score import Newcomers, Score, Scorer
from upfl.methods import PERSONALIZERS, personalizer_class
from upfl.personalize.nothing import Nothing
from upfl.personalize.oracle import ORACLES, HalfSupervised
from upfl.state import State
from upfl.statistics import mcnemar

SMALL = ("iterations=10", "model.hidden=32", "partition.clients=20")


def small(method: str = "fedavg", *settings: str, **options: Any) -> Config:
    asked = {"rounds": 12, "clients_per_round": 10, "evaluate_every": 12} | options
    return configure(method, "digits", settings=(*SMALL, *settings), **asked)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One thread: with several, small operations wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on pathological digits: ten training clients, ten new ones, at most two classes each."""
    path = tmp_path_factory.mktemp("score") / "run"
    api.train(small(score=["tent"]), path, workers=1)
    return path


@pytest.fixture(scope="module")
def scorer(run: Path) -> Scorer:
    return Scorer(RunFolder.open(run), ["none", "calibrated", "label-shift", "tent"], oracles=list(ORACLES))


@pytest.fixture(scope="module")
def scores(scorer: Scorer) -> dict[str, Score]:
    return {score.name: score for score in scorer.score(inductive=True)}


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*.*")
    }


# McNemar


@pytest.mark.parametrize("lost", range(0, 15, 3))
@pytest.mark.parametrize("won", range(0, 15, 2))
def test_mcnemars_p_is_a_fair_coins(lost: int, won: int) -> None:
    """Twice the tail of the binomial distribution, at most 1."""
    n, least = lost + won, min(lost, won)
    tail = sum(math.comb(n, k) for k in range(least + 1)) / 2**n
    assert mcnemar(lost, won) == pytest.approx(min(1.0, 2 * tail))


def test_mcnemars_p_by_the_book() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(0, 5) == pytest.approx(0.0625)
    assert mcnemar(1, 9) == pytest.approx(0.021484375)


def hits(text: str) -> Any:
    return np.array([mark == "x" for mark in text])


def test_harm_counts_what_was_lost_and_won_client_by_client() -> None:
    ours = Score("ours", "", right=[hits("xx--x"), hits("---")])
    theirs = Score("none", "", right=[hits("x-xxx"), hits("xxx")])
    assert [(one["lost"], one["won"], one["size"]) for one in harm(ours, theirs)] == [(2, 1, 5), (3, 0, 3)]
    assert [one["p"] for one in harm(ours, theirs)] == [1.0, 0.25]


def test_a_client_is_harmed_by_more_than_two_points_that_are_no_chance() -> None:
    """200 samples: 12 lost and none won is harm; 12 lost and 8 won may be chance; 3 lost are under two points."""
    all_right = np.ones(200, np.bool_)

    def against(lost: int, won: int) -> dict[str, Any]:
        theirs, ours = all_right.copy(), all_right.copy()
        theirs[:won], ours[won : won + lost] = False, False
        rows = summaries([Score("none", "", right=[theirs]), Score("ours", "", right=[ours])])
        return dict(rows[1]["against_none"])

    assert against(12, 0)["harmed_large_clients"] == 1
    assert against(12, 0)["difference"] == -6
    assert against(12, 8)["harmed_large_clients"] == 0
    assert against(3, 0)["harmed_large_clients"] == 0
    assert against(0, 12)["harmed_large_clients"] == 0


# A scored run


def test_the_last_scores_of_the_run_are_found_again(run: Path, scores: dict[str, Score]) -> None:
    (row,) = [row for row in result(run)["rows"] if row["row"] == "fedavg"]
    assert scores["none"].accuracy == pytest.approx(row["test_last"])
    (row,) = [row for row in result(run)["rows"] if row["row"] == "tent"]
    assert scores["tent"].accuracy == pytest.approx(row["test_last"])


def test_label_shift_is_worth_it_and_bounds_are_above(scores: dict[str, Score]) -> None:
    found = {name: score.accuracy for name, score in scores.items()}
    assert [name for name, score in scores.items() if score.bound] == list(ORACLES)
    assert found["label-shift"] > found["calibrated"] + 3
    assert found["label-shift"] > found["tent"]
    assert found["oracle-prior"] >= found["label-shift"] - 0.5
    assert found["oracle-prior"] >= found["oracle-labels"] - 2
    assert found["oracle-labels"] > found["calibrated"]
    assert found["oracle-step"] >= found["none"]
    assert found["oracle-half"] > found["none"]
    for score in scores.values():
        assert (score.validation is None) == score.bound
        assert bool(score.later) == (not score.bound)


def test_the_true_prior_is_the_calibrated_model_with_the_clients_frequencies(
    scorer: Scorer, scores: dict[str, Score]
) -> None:
    known = scorer.given.published.fitted
    for i, right in enumerate(scores["oracle-prior"].right):
        client = newcomer(scorer.federation, scorer.inputs, scorer.config.seed, i)
        y = scorer.inputs.y(scorer.federation.new.all(i))
        z = scorer.personalizers["none"].personalize(scorer.given.published, client).logits.double()
        p = (known["calibration.none.scale"] * z.log_softmax(1) + known["calibration.none.bias"]).softmax(1)
        shares = torch.bincount(y, minlength=10) / len(y)
        expected = (p * shares / known["calibration.none.prior"]).argmax(1)
        assert right.tolist() == (expected == y).tolist()
        assert set(expected.tolist()) <= set(y.tolist())


def test_fine_tuning_on_half_of_the_labels_is_scored_on_the_other_half(
    scorer: Scorer, scores: dict[str, Score]
) -> None:
    for i, asked in enumerate(scores["oracle-half"].asked):
        size = len(scorer.federation.new.all(i))
        assert len(set(asked.tolist())) == len(asked) == size - size // 2
    client = newcomer(scorer.federation, scorer.inputs, 0, 0)
    y = scorer.inputs.y(scorer.federation.new.all(0))
    oracle = HalfSupervised(scorer.engine.training)
    predicted, others = oracle.predict(scorer.given.published, client, y)
    hidden = y.clone()
    hidden[others] = (hidden[others] + 1) % 10
    assert torch.equal(oracle.predict(scorer.given.published, client, hidden)[0], predicted)


@pytest.mark.parametrize("samples", [1, 2])
def test_oracles_take_the_smallest_clients(scorer: Scorer, samples: int) -> None:
    client = newcomer(scorer.federation, scorer.inputs, 0, 0)
    y = scorer.inputs.y(scorer.federation.new.all(0))[:samples]
    for oracle in scorer.oracles:
        predicted, asked = oracle.predict(scorer.given.published, replace(client, x=client.x[:samples]), y)
        assert len(predicted) == len(asked) >= 1, oracle.name


class Watching(Nothing):
    """No personalization; it notes what it was personalized on and asked about."""

    name = "watching"
    title = "Watching"
    seen: list[Any] = []  # noqa: RUF012

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        found = super().personalize(published, client, memory)
        self.seen.append([client.x, None])
        note = self.seen[-1]

        class Asked(Personalized):
            def predict_logits(self, x: torch.Tensor) -> torch.Tensor:
                note[1] = x
                return super().predict_logits(x)

        return Asked(found.before, found.logits, found.predictor, found.diary)


def test_inductive_halves_are_disjoint_and_all_of_the_client(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PERSONALIZERS, Watching.name, Watching)
    scorer = Scorer(RunFolder.open(run), [Watching.name])
    Watching.seen.clear()
    (score,) = scorer.score(inductive=True)
    halves = [(x, asked) for x, asked in Watching.seen if asked is not None]
    assert len(halves) == len(scorer.federation.new)
    for i, (first, second) in enumerate(halves):
        whole = newcomer(scorer.federation, scorer.inputs, 0, i).x
        assert abs(len(first) - len(second)) <= 1
        rows = [sorted(map(tuple, part.flatten(1).tolist())) for part in (torch.cat([first, second]), whole)]
        assert rows[0] == rows[1]
        assert score.later[i][1] == len(second)


@pytest.mark.parametrize(("classes", "samples"), [(2, 5), (5, 20), (10, 60), (1, 1)])
def test_drawn_newcomers_are_as_asked(scorer: Scorer, classes: int, samples: int) -> None:
    drawn = list(scorer._drawn(Newcomers(classes, samples, 12)))
    assert len(drawn) == 12
    pool = {tuple(row) for row in scorer.inputs.x(scorer.federation.new.indices).flatten(1).tolist()}
    kinds = set()
    for client, y in drawn:
        assert len(client.x) == len(y) == samples
        assert len(set(y.tolist())) <= classes
        assert not hasattr(client, "y")
        assert {tuple(row) for row in client.x.flatten(1).tolist()} <= pool
        kinds.add(tuple(sorted(set(y.tolist()))))
    if classes < 10:
        assert len(kinds) > 1
    if samples >= 20:
        assert max(map(len, kinds)) == classes
    again = list(scorer._drawn(Newcomers(classes, samples, 12)))
    assert all(torch.equal(a.x, b.x) and torch.equal(y, z) for (a, y), (b, z) in zip(drawn, again, strict=True))


def test_draws_that_the_data_cannot_fill_are_told(run: Path, tmp_path: Path) -> None:
    """Two classes of digits' new clients have under 600 samples: a curve must not say 600."""
    said = upfl("score", run, "--score", "none", "--sizes", "600", "--classes", "2", "--draws", "2", "--json")
    assert said.code == 0, said.err
    (curve,) = json.loads(said.out)["newcomers"]
    assert curve["samples"] == 600
    assert 100 < curve["mean_samples"] < 600


def test_more_classes_than_there_are_are_refused_before_anything_is_fitted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upfl.experiments.score.fit_needs", lambda *given, **more: pytest.fail("it was fitted"))
    said = upfl("score", run, "--score", "none", "--classes", "2,11")
    assert said.code == 2
    assert "--classes 11" in said.err
    assert "10 classes" in said.err


def test_other_new_clients_are_scored_with_the_same_fits(run: Path) -> None:
    whole, half = (
        Scorer(RunFolder.open(run), ["label-shift"]),
        Scorer(RunFolder.open(run), ["label-shift"], newcomers={"new_fraction": 0.5}),
    )
    sizes = [[len(right) for right in one.score()[0].right] for one in (whole, half)]
    assert [size // 2 for size in sizes[0]] == pytest.approx(sizes[1], abs=1)
    assert whole.facts == half.facts


def test_new_clients_that_would_change_the_training_are_refused(run: Path) -> None:
    for setting, words in (
        ("clients=10", ("clients", "changes the training clients")),
        ("new_fracton=0.5", ("new_fracton", "new_fraction")),
        ("new_fraction", ("--new new_fraction", "key=value")),
    ):
        said = upfl("score", run, "--score", "none", "--new", setting)
        assert said.code == 2, said.err
        assert [word for word in words if word not in said.err] == [], said.err


# The command


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
    assert said.code == 0
    assert printed == stored


def test_score_tells_all_that_a_table_of_results_needs(told: tuple[Said, dict[str, Any], dict[str, Any]]) -> None:
    _, found, _ = told
    assert {key: found[key] for key in ("dataset", "training", "round", "seed", "partition_seed")} == {
        "dataset": "digits",
        "training": "fedavg",
        "round": 12,
        "seed": 0,
        "partition_seed": 0,
    }
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
    assert [(curve["classes"], curve["samples"]) for curve in found["newcomers"]] == [
        (2, 5),
        (2, 20),
        (10, 5),
        (10, 20),
    ]
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
    said = upfl("score", run, "--score", "none", "--oracles", "all")
    assert said.code == 0
    rows = said.out.splitlines()
    places = [i for i, line in enumerate(rows) if line.startswith("oracle-")]
    assert len(places) == len(ORACLES)
    (none,) = [i for i, line in enumerate(rows) if line.startswith("none")]
    assert none < places[0] - 1, "a line divides methods from bounds"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--score", "label-shif"), 2, ("label-shif", "label-shift")),
        (("--score", ""), 2, ("--score",)),
        (("--score", " , "), 2, ("--score",)),
        (("--score", "one-step"), 2, ("one-step", "fedavg")),
        (("--sizes", "5,x"), 2, ("--sizes 5,x", "whole numbers")),
        (("--sizes", "0"), 2, ("--sizes 0",)),
        (("--classes", "-2"), 2, ("--classes",)),
        (("--draws", "0"), 2, ("--draws",)),
    ],
)
def test_wrong_arguments_are_named(run: Path, options: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    said = upfl("score", run, *options)
    assert said.code == code, said.err
    assert [word for word in words if word not in said.err] == []
    assert said.out == ""


def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    said = upfl("score", run, "--score", "none", "-o", tmp_path)
    assert said.code == 2
    assert str(tmp_path) in said.err


def test_no_run_and_a_run_that_has_not_begun_are_named(tmp_path: Path) -> None:
    said = upfl("score", tmp_path / "nowhere")
    assert said.code == 4
    assert "not a run folder" in said.err
    RunFolder.create(tmp_path / "empty", small())
    said = upfl("score", tmp_path / "empty")
    assert said.code == 4
    assert "no checkpoint" in said.err
    assert "upfl resume" in said.err
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["config.toml"]


# Labels of new clients


def test_labels_of_new_clients_change_no_fit_and_no_prediction(run: Path) -> None:
    config = RunFolder.open(run).config()
    engine = Engine.standing(RunFolder.open(run))
    setup = assemble(config)
    federation, inputs, training = setup.federation, setup.inputs, setup.training
    labels = federation.source.labels.copy()
    labels[federation.new.indices] = (labels[federation.new.indices] + 3) % 10
    other = replace(federation.source, labels=labels)
    auto = PERSONALIZERS["auto"](training, PERSONALIZERS["auto"].Hyper())
    found = []
    for held, given in ((federation, inputs), (replace(federation, source=other), Inputs(other))):
        fits, facts = fit_needs([auto], engine.published(), held, given, 0, Group())
        told = [auto.personalize(fits.published, newcomer(held, given, 0, i)) for i in range(3)]
        found.append((fits, facts, told))
    assert found[0][1] == found[1][1]
    ours, theirs = (fits.published.fitted for fits, _, _ in found)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for one, two in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(one.logits, two.logits)
        assert one.diary == two.diary


# Corrected personalizers, by name

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
    assert said.code == 0, said.err
    rows = lines(out)[-1]["rows"]
    assert rows.keys() == {"fedtta", *(f"fedtta+{name}" for name in COMPOSITE)}
    assert all(0 <= row["test"] <= 100 for row in rows.values())
    assert rows["fedtta+tent+calibrated"]["steps"] == 3, "--set reaches the base"
    fits = lines(out)[-1]["fits"]
    assert {
        "calibration.one-step",
        "gate.one-step+label-shift",
        "calibration.tent",
        "calibration.tent+calibrated",
    } <= set(fits)


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
    said = upfl("train", "fedavg", "digits", "--rounds", "1", "--score", name, "--out", tmp_path / "run")
    assert said.code == 2, said.err
    assert [word for word in words if word not in said.err] == [], said.err
    assert not (tmp_path / "run").exists()


def test_none_as_a_base_is_no_base() -> None:
    assert personalizer_class("none+label-shift") is personalizer_class("label-shift")


def test_settings_that_cannot_go_together_are_refused_before_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--score", "label-shift,auto", "--set", "label-shift.gate=5", "--workers", "1", "--out", out)
    said = upfl("train", "fedavg", "digits", "--rounds", "1", *options)
    assert said.code == 2, said.err
    assert "gate.label-shift" in said.err
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
        kind(engine.training, kind.Hyper()).personalize(
            engine.published(), newcomer(engine.federation, engine.setup.inputs, 0, 0)
        )
