"""Pixels to tensors: the samples that a client's code asks for, normalized, and turned where a client's images are."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from upfl.data.sources import Source


class Inputs:
    """A source's images as float tensors, made for each batch: the bytes are there once for all workers."""

    def __init__(self, source: Source, device: torch.device | None = None) -> None:
        self.images, self.labels = source.images, source.labels
        self.device = device or torch.device("cpu")
        # (pixel / scale - mean) / std as one multiplication and one addition
        std = torch.tensor(source.std).view(-1, 1, 1)
        self.factor = (1 / (source.scale * std)).to(self.device)
        self.offset = (-torch.tensor(source.mean).view(-1, 1, 1) / std).to(self.device)

    def x(self, indices: NDArray[np.int64], angle: float = 0.0) -> Tensor:
        """Normalized images, channels last in memory; `angle` in degrees, counter-clockwise."""
        pixels = torch.from_numpy(self.images[indices]).to(self.device)
        x = pixels.to(torch.float32, memory_format=torch.channels_last)
        if angle:
            x = rotate(x, angle)
        return x.mul_(self.factor).add_(self.offset)

    def y(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.labels[indices]).to(self.device)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre, bilinear, with zeros where nothing was."""
    turn = math.radians(degrees)
    cosine, sine = math.cos(turn), math.sin(turn)
    # The grid says where each target pixel comes from: the inverse turn, in a frame whose y axis points down.
    inverse = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]], device=images.device)
    grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
