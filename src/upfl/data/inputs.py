"""Pixels to tensors: the samples that a client's code asks for, normalized, and turned where a client's images are."""

from __future__ import annotations

import math
from typing import Annotated, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from upfl.data.files import Samples
from upfl.data.formats import Shape
from upfl.data.sources import Source

LARGEST = 2**24  # values of an image


class InputFormat(BaseModel):
    """What a model takes: images of a shape, normalized by (pixel / scale - mean) / std."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(description="channels, height, width")
    scale: float = Field(gt=0, description="the value of full intensity, where pixels are integers")
    mean: tuple[float, ...] = Field(description="of each channel")
    std: tuple[Annotated[float, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.shape) != 3 or not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError("shape is channels, height, width; mean and std have a value for each channel")
        if math.prod(self.shape) > LARGEST:
            raise ValueError(f"images of {math.prod(self.shape)} values are larger than any that can be used")
        return self

    @classmethod
    def of(cls, source: Source) -> InputFormat:
        return cls(shape=source.images.shape[1:], scale=source.scale, mean=source.mean, std=source.std)

    @property
    def image(self) -> Shape:
        channels, height, width = self.shape
        return channels, height, width

    def affine(self, scale: float) -> tuple[Tensor, Tensor]:
        """The normalization of pixels up to `scale`, as one multiplication and one addition."""
        std = torch.tensor(self.std).view(-1, 1, 1)
        return 1 / (scale * std), -torch.tensor(self.mean).view(-1, 1, 1) / std

    def normalized(self, samples: Samples) -> Tensor:
        """A user's samples as the model takes them, to the bits that `Inputs` makes of the same pixels."""
        factor, offset = self.affine(samples.scale)
        images = samples.images if samples.images.flags.writeable else samples.images.copy()  # torch warns otherwise
        pixels = torch.from_numpy(images)
        return pixels.to(torch.float32, memory_format=torch.channels_last, copy=True).mul_(factor).add_(offset)


class Inputs:
    """A source's images as float tensors, made for each batch: the bytes are there once for all workers."""

    def __init__(self, source: Source, device: torch.device | None = None) -> None:
        # As plain arrays: indexing a memory-mapped one goes through Python for each batch.
        self.images, self.labels = np.asarray(source.images), np.asarray(source.labels)
        self.device = device or torch.device("cpu")
        self.factor, self.offset = (value.to(self.device) for value in InputFormat.of(source).affine(source.scale))

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
