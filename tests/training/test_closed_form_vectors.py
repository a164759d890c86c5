"""Closed form on vectors: the features of the equations, scikit-learn's discriminant, whoever holds what, a bundle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, make_moons
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import upfl
from upfl.bundle import export
from upfl.data import Source
from upfl.data.large import federation_of
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import ConfigError
from upfl.models.filters import FEATURE, rounded_filters
from upfl.models.projections import Projections, too_long
from upfl.onnx_export import export as onnx_export
from upfl.randomness import generator

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = ("filters=8", "iterations=2")


def ran(x: NDArray[Any], y: NDArray[Any], path: Path, *settings: str, **options: Any) -> Engine[Any]:
    given = Source.from_arrays(x.astype(np.float32), y, clients=np.arange(len(x)) % 20)
    options.setdefault("score", ["label-shift"])
    config = upfl.configure("closed-form", given, settings=[*SETTINGS, *settings], **options)
    federation = federation_of(given, config.partition, config.partition_seed, {})
    engine = Engine.local(RunFolder.create(path, config), setup=assemble(config, federation))
    engine.run()
    return engine


def test_features_are_those_of_the_equations() -> None:
    layer, source = Projections("projections", 7, 5, 0.25), generator(0, "vectors")
    weight, bias = rounded_filters(torch.randn(5, 7, generator=source), torch.randn(5, generator=source))
    x = torch.randn(40, 7, generator=source) * 3
    values = ((x * 32).round() / 32).clamp(-8, 8).double()
    z = values @ weight.double().T + bias
    sides = torch.cat([values, -values, z - 0.25, -z - 0.25], 1)
    expected = (sides * FEATURE).round().clamp(0, 4095) / FEATURE
    assert torch.equal(layer.apply(weight, bias, x).double(), expected)
    assert layer.features == expected.shape[1]


def test_the_largest_vectors_that_are_allowed_are_still_exact() -> None:
    size = max(size for size in range(1, 8000) if not too_long(size, 0.1))
    filters = torch.full((1, size), (0.1 * size) ** -0.5)  # as long as whitening can make them, all of one sign
    weight, bias = rounded_filters(filters, torch.zeros(1))
    x = torch.full((1, size), 8.0)
    layer = Projections("projections", size, 1, 0.0)
    exact = float((weight.double() * x.double()).sum())
    assert float(layer.answers(weight, bias, layer.windows(x, 0, 1))) == exact * 2**12


@pytest.fixture(scope="module")
def cancer(tmp_path_factory: pytest.TempPathFactory) -> Engine[Any]:
    x, y = load_breast_cancer(return_X_y=True)
    return ran(x, y, tmp_path_factory.mktemp("closed-form") / "run")


def trained_on(engine: Engine[Any]) -> tuple[Tensor, Tensor]:
    clients = engine.federation.training
    indices = np.concatenate([clients.train(i) for i in range(len(clients))])
    return engine.setup.inputs.x(indices), engine.setup.inputs.y(indices)


def test_the_last_layer_is_scikit_learns_on_standardized_features(cancer: Engine[Any]) -> None:
    x, y = trained_on(cancer)
    params = cancer.training.start(cancer.published(), None, None)  # type: ignore[arg-type]
    h = StandardScaler().fit_transform(cancer.training.features(params, x).double().numpy())
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.01).fit(h, y.numpy())
    counts = torch.bincount(y).double()
    expected = torch.from_numpy(model.decision_function(h)) + float(((counts + 1) / counts).log().diff())
    logits = cancer.training.logits(params, x).double()
    torch.testing.assert_close(logits.diff()[:, 0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.bits
def test_clients_in_turn_and_batches_of_another_size_come_to_the_same_bits(cancer: Engine[Any], tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    other = ran(x, y, tmp_path / "run", "batch_size=7", clients_per_round=4)
    assert all(torch.equal(value, cancer.progress.server[name]) for name, value in other.progress.server.items())


def test_it_bends_where_classes_do(tmp_path: Path) -> None:
    """Two half moons: the best line between them has one in eight on its wrong side."""
    x, y = make_moons(2000, noise=0.1, random_state=0)
    engine = ran(x, y, tmp_path / "run", "filters=64", "iterations=10", score=["none"])
    assert engine.folder.metrics()[-1]["rows"]["closed-form"]["validation"] > 94


def test_a_newcomers_bundle_and_onnx_file_take_vectors(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, y = load_breast_cancer(return_X_y=True)
    x = x.astype(np.float32)
    given = Source.from_arrays(x, y, clients=np.arange(len(x)) % 20)
    config = upfl.configure("closed-form-label-shift", given, settings=SETTINGS)
    export(upfl.train(config, tmp_path / "run", source=given, workers=1), tmp_path / "bundle")
    mine = upfl.Bundle.load(tmp_path / "bundle").personalize(x[:60])
    assert (mine.predict(x[:60]).astype(int) == y[:60]).mean() > 0.85
    assert onnx_export(mine, tmp_path / "me.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(None, {session.get_inputs()[0].name: x[:60]})
    np.testing.assert_allclose(probabilities, mine.predict_proba(x[:60]), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [(("mirror=true",), "for images"), (("patch=3",), "for images"), (("whitening=0.001",), "too long for exact sums")],
)
def test_what_does_not_fit_vectors_is_refused(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 400))
    with pytest.raises(ConfigError, match=message):
        ran(x, np.arange(200) % 2, tmp_path / "run", *settings)
