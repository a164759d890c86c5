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
    """Samples as they are (images in [0, 1], channels first; features; tokens) to probabilities."""

    def __init__(self, mine: PersonalModel) -> None:
        super().__init__()
        self.predictor = mine.predictor
        self.form = mine.manifest.task.input

    def forward(self, samples: Tensor) -> Tensor:
        predictor, x = self.predictor, self.form.unit(samples)
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
    form = mine.manifest.task.input
    example = form.example(3, random=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(
            model,
            (example,),
            input_names=[form.noun],
            output_names=["probabilities"],
            dynamic_shapes={"samples": {0: torch.export.Dim("n", min=1)}},
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
    trials = [example[[0] * n] for n in (1, 3)] + [form.example(7, random=True)]
    difference = max(_difference(session, model, trial, form.noun) for trial in trials)
    if not difference < TOLERANCE:
        raise BundleError(f"{out}: not written, because ONNX Runtime differs from PyTorch by {difference:.2g}")
    try:
        part = out.with_name(out.name + ".part")
        part.write_bytes(content)
        part.replace(out)
    except OSError as error:
        raise BundleError(f"{out}: cannot be written: {error.strerror}") from error
    return difference


def _difference(session: Any, model: nn.Module, samples: Tensor, name: str) -> float:
    with torch.no_grad():
        expected = model(samples).numpy()
    (found,) = session.run(["probabilities"], {name: samples.numpy()})
    return float(np.abs(found - expected).max())
