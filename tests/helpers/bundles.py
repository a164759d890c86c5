"""What tests of bundles share."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.plugin_methods import Said, upfl
from upfl import api
from upfl.bundle import Bundle, write
from upfl.contract import Published, Task
from upfl.data.forms import Pixels
from upfl.methods import TRAININGS
from upfl.models import convnet
from upfl.randomness import generator

FILES = ["README.md", "SHA256SUMS", "manifest.json", "weights.safetensors"]


def pixels_of(run: api.Run, client: int = 0) -> NDArray[np.uint8]:
    source = run.federation.source
    return source.x[run.federation.new.all(client)][:, 0]


def small_convnet(tmp_path: Path, name: str = "fedavg", **more: Any) -> tuple[Bundle, NDArray[np.uint8]]:
    """A bundle of a ConvNet, without a run."""
    kind = TRAININGS[name]
    training = kind(Task(convnet((3, 8, 8), 4, 16, 0.25), 4, 5), kind.Hyper())
    values: dict[str, Any] = {
        "task": "animals",
        "classes": ["cat", "dog", "emu", "fox"],
        "input": Pixels(shape=(3, 8, 8), scale=255.0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        "training": training,
        "published": Published(training.publish(training.init(generator(3))), 7),
        "personalizers": {"none": {}, "tent": {"lr": 0.5, "steps": 3}},
        "default": "tent",
        "summary": {"nodes": 5, "what": ["a", "b"]},
    }
    x = np.random.default_rng(1).integers(0, 256, (30, 8, 8, 3), np.uint8)
    return write(tmp_path / "animals", **(values | more)), x


def personalize(bundle: Path, data: Path, out: Path, *more: str) -> Said:
    return upfl("personalize", bundle, data, "-o", out, *more)
