"""The built-in models, by name."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field

from upfl.models.layered import Layered, convnet, mlp
from upfl.models.registry import Options, Shape, register
from upfl.models.resnet import resnet8, resnet18


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


def _convnet(shape: tuple[int, int, int], classes: int, hidden: int, width: float) -> Layered:
    return convnet(shape, classes, hidden, width)


def _linear(shape: Shape, classes: int) -> Layered:
    return mlp(math.prod(shape), (), classes)


register("mlp", _mlp, MlpOptions)
register("convnet", _convnet, ConvnetOptions)
register("linear", _linear, Options)
register("resnet8", resnet8, WidthOptions)
register("resnet18", resnet18, WidthOptions)
