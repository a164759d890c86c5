"""The built-in models, by name."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field

from upfl.errors import ConfigError
from upfl.models.embedding import Embedding
from upfl.models.layered import Layered, convnet, mlp
from upfl.models.registry import Options, Shape, register
from upfl.models.resnet import ResNet, resnet8, resnet18


class MlpOptions(Options):
    hidden: int = Field(200, ge=1, description="units of each of the two hidden layers")
    width: float = Field(1.0, gt=0, description="the ConvNet's, which profiles set; of no effect here")

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"hidden": max(1, round(self.hidden * factor))})


class WidthOptions(Options):
    width: float = Field(1.0, gt=0, description="factor on the channels")

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"width": self.width * factor})


class ConvnetOptions(WidthOptions):
    hidden: int = Field(512, ge=1, description="units of the hidden linear layer")


def _mlp(shape: Shape, classes: int, hidden: int, width: float) -> Layered:
    return mlp(math.prod(shape), (hidden,) * 2, classes)


class EmbeddingOptions(Options):
    vocabulary: int = Field(2, ge=2, le=2**24, description="how many tokens there are; the data's own where silent")
    dimension: int = Field(32, ge=1, description="of a token's vector")

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"dimension": max(1, round(self.dimension * factor))})


def _convnet(shape: Shape, classes: int, hidden: int, width: float) -> Layered:
    return convnet(_image("convnet", shape), classes, hidden, width)


def _resnet8(shape: Shape, classes: int, width: float) -> ResNet:
    return resnet8(_image("resnet8", shape), classes, width)


def _resnet18(shape: Shape, classes: int, width: float) -> ResNet:
    return resnet18(_image("resnet18", shape), classes, width)


def _embedding(shape: Shape, classes: int, vocabulary: int, dimension: int) -> Embedding:
    return Embedding(vocabulary, dimension, classes)


def _image(name: str, shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ConfigError(f"model '{name}' takes images, and samples are of shape {list(shape)}: take mlp or linear")
    return shape[0], shape[1], shape[2]


def _linear(shape: Shape, classes: int) -> Layered:
    return mlp(math.prod(shape), (), classes)


register("mlp", _mlp, MlpOptions)
register("convnet", _convnet, ConvnetOptions)
register("linear", _linear, Options)
register("resnet8", _resnet8, WidthOptions)
register("resnet18", _resnet18, WidthOptions)
register("embedding", _embedding, EmbeddingOptions)
