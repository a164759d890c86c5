"""A newcomer's model as an ONNX file."""

from pathlib import Path

import numpy as np
import pytest

import upfl as library
from tests.helpers.bundles import small_convnet
from tests.helpers.cli import done
from tests.plugin_methods import upfl


@pytest.mark.parametrize("name", ["fedavg", "fedsr"])
def test_an_onnx_file_gives_the_models_probabilities(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    bundle, x = small_convnet(tmp_path, name)
    mine = bundle.personalize(x)
    mine.save(tmp_path / "me")
    upfl("export-onnx", tmp_path / "me", "-o", tmp_path / "me.onnx").ended()
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    images = (x.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    for count in (1, 2, 30):
        (probabilities,) = session.run(None, {"images": images[:count]})
        np.testing.assert_allclose(probabilities, mine.predict_proba(x[:count]), atol=1e-5)
    properties = session.get_modelmeta().custom_metadata_map
    assert properties["classes"].split("\n") == mine.classes_.tolist()
    assert str(tmp_path).encode() not in (tmp_path / "me.onnx").read_bytes()


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "texts"])
def test_an_onnx_file_takes_features_and_tokens_as_they_are(
    tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))
    rng, y = np.random.default_rng(0), np.arange(160) % 2
    x = rng.integers(1, 9, (160, 4)) + 8 * y[:, None] if tokens else rng.normal(300 * y[:, None], 50, (160, 4))
    source = library.Source.from_arrays(x, y, np.arange(160) // 2 % 16, tokens=tokens)
    config = library.configure("label-shift", source, rounds=1, settings=["iterations=3"])
    bundle = library.export(library.train(config, tmp_path / "run", source=source, workers=1), tmp_path / "bundle")
    mine = bundle.personalize(x[:20])
    mine.save(tmp_path / "me")
    done("export-onnx", tmp_path / "me", "-o", tmp_path / "me.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    given = {"texts": x.astype(np.int64)} if tokens else {"rows": x.astype(np.float32)}
    (probabilities,) = session.run(None, given)
    np.testing.assert_allclose(probabilities, mine.predict_proba(x), atol=1e-5)
