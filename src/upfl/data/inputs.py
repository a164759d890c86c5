"""Samples to tensors: those that a client's code asks for, as its model takes them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.data.forms import Form
from upfl.data.samples import Samples
from upfl.data.source import Source


def normalized(form: Form, samples: Samples) -> Tensor:
    """A user's samples as the model takes them, to the bits that `Inputs` makes of the same values."""
    x = samples.x if samples.x.flags.writeable else samples.x.copy()  # torch warns otherwise
    return form.reader(samples.scale)(x, 0.0)


class Inputs:
    """A source's samples as tensors, made for each batch: what is kept is there once for all workers."""

    def __init__(self, source: Source, device: torch.device | None = None) -> None:
        # As plain arrays: indexing a memory-mapped one goes through Python for each batch.
        self.samples, self.labels = np.asarray(source.x), np.asarray(source.labels)
        self.device = device or torch.device("cpu")
        self._read = source.form.reader(device=self.device)

    def x(self, indices: NDArray[np.int64], angle: float = 0.0) -> Tensor:
        """Samples as the model takes them; images are turned by `angle` in degrees, counter-clockwise."""
        return self._read(self.samples.take(indices, 0), angle)  # copies whole samples, as an index does not

    def y(self, indices: NDArray[np.int64]) -> Tensor:
        """Labels; -1 where a newcomer's sample has none."""
        return torch.from_numpy(self.labels.take(indices)).to(self.device)
