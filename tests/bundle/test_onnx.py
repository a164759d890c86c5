"""A newcomer's model as an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bundles import small_convnet
from tests.plugin_methods import upfl


@pytest.mark.parametrize("name", ["fedavg", "fedsr"])
def test_an_onnx_file_gives_the_models_probabilities(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    bundle, x = small_convnet(tmp_path, name)
    mine = bundle.personalize(x)
    mine.save(tmp_path / "me")
    said = upfl("export-onnx", tmp_path / "me", "-o", tmp_path / "me.onnx")
    assert said.code == 0, said.err
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    images = (x.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    for count in (1, 2, 30):
        (probabilities,) = session.run(None, {"images": images[:count]})
        np.testing.assert_allclose(probabilities, mine.predict_proba(x[:count]), atol=1e-5)
    properties = session.get_modelmeta().custom_metadata_map
    assert properties["classes"].split("\n") == mine.classes_.tolist()
    assert str(tmp_path).encode() not in (tmp_path / "me.onnx").read_bytes()
