"""A newcomer's own model as an ONNX file, checked against ONNX Runtime. Needs the extra `onnx`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from upfl.errors import BundleError

if TYPE_CHECKING:
    from upfl.bundle import PersonalModel

TOLERANCE = 1e-4  # of a probability


class _WithNormalization(nn.Module):
    """images in [0, 1], channels first, to probabilities."""

    def __init__(self, mine: PersonalModel) -> None:
        super().__init__()
        self.predictor = mine.predictor
        self.factor, self.offset = mine.manifest.task.input.affine(1.0)

    def forward(self, images: Tensor) -> Tensor:
        predictor, x = self.predictor, images * self.factor + self.offset
        logits = torch.stack([predictor.training.logits(params, x) for params in predictor.params]).mean(0)
        logits = logits / predictor.temperature
        return (logits if predictor.bias is None else logits + predictor.bias).softmax(1)


def export(mine: PersonalModel, out: Path) -> float:
    """Write the model; returns the largest difference of a probability between ONNX Runtime and PyTorch."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise BundleError(f"ONNX export needs `pip install 'upfl[onnx]'` ({error.name} is missing)") from error
    model = _WithNormalization(mine).eval()
    example = torch.rand(3, *mine.manifest.task.input.shape)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(
            model,
            (example,),
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: torch.export.Dim("n", min=1)}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    properties = {
        "classes": "\n".join(mine.manifest.task.classes),
        "task": mine.manifest.task.name,
        "made_with": mine.manifest.made_with,
    }
    onnx.helper.set_model_props(proto, properties)
    onnx.checker.check_model(proto)
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    difference = max(_difference(session, model, example[:1].repeat(n, 1, 1, 1)) for n in (1, 3))
    difference = max(difference, _difference(session, model, torch.rand(7, *example.shape[1:])))
    if not difference < TOLERANCE:
        raise BundleError(f"{out}: not written, because ONNX Runtime differs from PyTorch by {difference:.2g}")
    try:
        part = out.with_name(out.name + ".part")
        part.write_bytes(content)
        part.replace(out)
    except OSError as error:
        raise BundleError(f"{out}: cannot be written: {error.strerror}") from error
    return difference


def _difference(session: Any, model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        expected = model(images).numpy()
    (found,) = session.run(["probabilities"], {"images": images.numpy()})
    return float(np.abs(found - expected).max())
