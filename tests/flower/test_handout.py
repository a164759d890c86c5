"""The bundle of a federation, and what newcomers send back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from safetensors.torch import load_file

from tests.helpers.flower import federated, nodes
from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import small
from upfl import data
from upfl.bundle import Bundle, PersonalModel
from upfl.errors import StoppedError
from upfl.flower.handout import personalize
from upfl.flower.messages import ARRAYS
from upfl.flower.terms import Settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    settings = ("iterations=10", "model.hidden=64")
    config = small("fedtta", *settings, rounds=6, evaluate_every=6, clients_per_round=1.0, score=["none"])
    return federated(config, path, InProcessGrid(nodes()), compared=True)


def newcomers(tmp_path: Path) -> tuple[InProcessGrid, np.ndarray]:
    source = data.load("digits")
    chosen = np.flatnonzero(np.isin(source.labels, [3, 8]))[:120]
    np.savez(tmp_path / "mine.npz", x=source.x[chosen])
    own = {"data": str(tmp_path / "mine.npz"), "out": str(tmp_path / "me"), "personalizer": "none"}
    shy, frank = {2: {**own}}, {3: {"newcomer": 0, "share": "estimates"}}
    broken = {4: {"data": str(tmp_path / "secret-place.npz")}}
    return InProcessGrid(nodes() | shy | frank | broken), chosen


def test_newcomers_personalize_and_send_back_only_what_their_owner_allows(trained: Path, tmp_path: Path) -> None:
    grid, chosen = newcomers(tmp_path)
    settings = Settings(mode="personalize", bundle=trained / "bundle", profile="smoke", min_nodes=2, wait=5, timeout=5)
    answers = {about.pop("node"): about for about in personalize(grid, settings)}
    assert answers.keys() == {2, 3, 4}
    assert answers[2] == {"samples": 120}
    assert answers[3].keys() >= {"samples", "entropy", "personalizer"}
    assert answers[4] == {"problem": "it could not personalize; its own log says why"}
    source = data.load("digits")
    mine, bundle = PersonalModel.load(tmp_path / "me"), Bundle.load(trained / "bundle")
    again = bundle.personalize(source.x[chosen], "none")
    assert (mine.predict(source.x[chosen]) == again.predict(source.x[chosen])).all()


def test_a_bundle_that_was_changed_on_its_way_is_refused(trained: Path, tmp_path: Path) -> None:
    grid, _ = newcomers(tmp_path)
    push = grid.push_messages

    def changed(sent: Any) -> Any:
        for message in (asked := list(sent)):
            files = message.content.array_records[ARRAYS]
            weights = files["weights.safetensors"].numpy().copy()
            weights[-1] ^= 1
            message.content[ARRAYS] = ArrayRecord({**files, "weights.safetensors": Array(weights)})
        return push(asked)

    grid.push_messages = changed  # type: ignore[method-assign, assignment]
    settings = Settings(
        mode="personalize", bundle=trained / "bundle", profile="smoke", min_nodes=1, wait=0.2, timeout=5
    )
    with pytest.raises(StoppedError, match="no newcomer personalized"):
        personalize(grid, settings)
    assert not (tmp_path / "me").exists()


def test_the_bundle_is_the_best_rounds_state_with_the_runs_personalizers(trained: Path) -> None:
    bundle = Bundle.load(trained / "bundle")
    scored = bundle.manifest.summary["validation"]
    best = load_file(trained / "best" / f"round-{bundle.published.round}.safetensors")
    assert all(torch.equal(bundle.published.state[name], value) for name, value in best.items() if "." in name)
    assert set(bundle.personalizers) == {"one-step", "none"}
    assert bundle.manifest.default == max(scored, key=lambda name: scored[name])
    assert bundle.manifest.task.classes == tuple("0123456789")


def test_a_newcomer_of_each_size_personalizes_from_the_bundle_of_a_heterogeneous_federation(tmp_path: Path) -> None:
    federated(small("hetero-fedtta"), tmp_path / "run", InProcessGrid(nodes()))
    sizes = list(Bundle.load(tmp_path / "run" / "bundle").manifest.architectures)
    assert len(sizes) == 3
    asked = {i: {"newcomer": i, "architecture": size, "out": str(tmp_path / size)} for i, size in enumerate(sizes, 1)}
    odd = {9: {"newcomer": 0, "architecture": "gigantic"}}
    settings = Settings(
        mode="personalize", bundle=tmp_path / "run" / "bundle", profile="smoke", min_nodes=3, wait=5, timeout=5
    )
    answers = {about["node"]: about for about in personalize(InProcessGrid(asked | odd), settings)}
    assert "problem" in answers[9]
    models = [PersonalModel.load(tmp_path / size) for size in sizes]
    assert [model.manifest.architecture for model in models] == sizes
    assert len({sum(value.numel() for value in model.predictor.params[0].values()) for model in models}) == 3
