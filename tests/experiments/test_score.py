"""A trained run scored anew: its bounds, its draws, and other new clients."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugin_methods import result, upfl
from upfl.contract import Personalized, Published, Unlabelled
from upfl.engine.folder import RunFolder
from upfl.experiments.score import Newcomers, Score, Scorer
from upfl.methods import PERSONALIZERS
from upfl.personalize.nothing import Nothing
from upfl.personalize.oracle import ORACLES, HalfSupervised
from upfl.state import State

pytestmark = pytest.mark.usefixtures("alone", "wide")


@pytest.fixture(scope="module")
def scorer(run: Path) -> Scorer:
    return Scorer(RunFolder.open(run), ["none", "calibrated", "label-shift", "tent"], oracles=list(ORACLES))


@pytest.fixture(scope="module")
def scores(scorer: Scorer) -> dict[str, Score]:
    return {score.name: score for score in scorer.score(inductive=True)}


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
        client = scorer.population.newcomer(i)
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
    client = scorer.population.newcomer(0)
    y = scorer.inputs.y(scorer.federation.new.all(0))
    oracle = HalfSupervised(scorer.engine.training)
    predicted, others = oracle.predict(scorer.given.published, client, y)
    hidden = y.clone()
    hidden[others] = (hidden[others] + 1) % 10
    assert torch.equal(oracle.predict(scorer.given.published, client, hidden)[0], predicted)


@pytest.mark.parametrize("samples", [1, 2])
def test_oracles_take_the_smallest_clients(scorer: Scorer, samples: int) -> None:
    client = scorer.population.newcomer(0)
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
        whole = scorer.population.newcomer(i).x
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
    said = upfl("score", run, "--score", "none", "--sizes", "600", "--classes", "2", "--draws", "2", "--json").ended()
    (curve,) = json.loads(said.out)["newcomers"]
    assert curve["samples"] == 600
    assert 100 < curve["mean_samples"] < 600


def test_more_classes_than_there_are_are_refused_before_anything_is_fitted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upfl.experiments.score.fit_needs", lambda *given, **more: pytest.fail("it was fitted"))
    upfl("score", run, "--score", "none", "--classes", "2,11").ended(2, "--classes 11", "10 classes")


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
        upfl("score", run, "--score", "none", "--new", setting).ended(2, *words)
