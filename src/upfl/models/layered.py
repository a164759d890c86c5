"""Chains of layers whose derivatives are written out: the paper's models, and the networks that methods add to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from upfl.models.base import Kind
from upfl.models.factored import Shapes
from upfl.models.filters import Filters
from upfl.models.layers import Conv, Flatten, Layer, Linear, Relu
from upfl.models.patches import Patches
from upfl.models.projections import Projections
from upfl.models.trace import LayeredTrace
from upfl.state import State


@dataclass(frozen=True)
class Layered:
    """Layers applied one after another. A slice of a model is a model: `model[:-1]` computes the last features."""

    layers: tuple[Layer, ...]
    vectorizes: ClassVar[bool] = True
    random: ClassVar[bool] = False

    def __getitem__(self, part: slice) -> Layered:
        return Layered(self.layers[part])

    @property
    def shapes(self) -> Shapes:
        return {name: shape for layer in self.layers for name, shape in layer.shapes().items()}

    @property
    def buffers(self) -> Shapes:
        return {}

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def kinds(self) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        for layer in self.layers:
            if isinstance(layer, Linear | Conv):
                found[layer.name] = "linear" if isinstance(layer, Linear) else "convolution"
            elif isinstance(layer, Filters):
                found[layer.name] = "other"
        return found

    @property
    def head(self) -> str | None:
        return self.layers[-1].name if isinstance(self.layers[-1], Linear) else None

    @property
    def records(self) -> bool:
        return "convolution" not in self.kinds.values()  # whose kernels take milliseconds, not microseconds

    def init(self, generator: torch.Generator) -> State:
        """PyTorch's default: weights and biases uniform within 1 / sqrt(fan in)."""
        params = {}
        for layer in self.layers:
            shapes = layer.shapes()
            for name, shape in shapes.items():
                bound = 1 / math.sqrt(math.prod(next(iter(shapes.values()))[1:]))
                params[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return params

    def apply(self, params: State, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(params, x).y
        return x

    def learning(self, params: State, x: Tensor) -> Tensor:
        return self.apply(params, x)

    def batchwise(self, params: State, x: Tensor) -> Tensor:
        return self.apply(params, x)

    def observed(self, params: State, x: Tensor) -> State:
        return params

    def features(self, params: State, x: Tensor) -> Tensor:
        return self[:-1].apply(params, x).flatten(1)

    def trace(self, params: State, x: Tensor) -> LayeredTrace:
        """The forward pass on x, ready for derivative products."""
        return LayeredTrace(self.layers, params, x)

    def layout(self, params: State) -> State:
        """The same values in the memory layout in which the layers are fast."""
        return {
            name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
            for name, value in params.items()
        }

    def describe(self) -> list[dict[str, Any]]:
        kinds = {layer: kind for kind, layer in _KINDS.items()}
        return [{"kind": kinds[type(layer)], **vars(layer)} for layer in self.layers]

    def why_not_twice(self) -> str | None:
        return None


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> Layered:
    """Fully connected layers with ReLU between them: fc1, fc2, ..."""
    sizes = [inputs, *hidden, outputs]
    layers: list[Layer] = [Flatten()]
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers += [Linear(f"fc{i}", fan_in, fan_out), Relu()]
    return Layered(tuple(layers[:-1]))


def convnet(shape: tuple[int, int, int], classes: int, hidden: int = 512, width: float = 1.0) -> Layered:
    """Two 5x5 convolutions (32 and 64 channels times `width`), each pooled by 2 and rectified, and two linear layers.

    The paper rectifies before it pools. The maximum of rectified values is the rectified maximum, and the derivatives
    agree, so pooling first is the same model at a quarter of the work.
    """
    channels, height, breadth = shape
    first, second = round(32 * width), round(64 * width)
    features = second * (height // 4) * (breadth // 4)
    return Layered(
        (
            *(Conv("conv1", channels, first), Relu(), Conv("conv2", first, second), Relu()),
            *(Flatten(), Linear("fc1", features, hidden), Relu(), Linear("fc2", hidden, classes)),
        )
    )


def adaptation_model(classes: int, width: int = 32) -> Layered:
    """g: a sample's logits to a scalar that says how badly they fit."""
    return mlp(classes, (width, width, width), 1)


def described(layers: Iterable[Mapping[str, Any]]) -> Layered:
    """The model that describes itself so."""
    return Layered(tuple(_KINDS[layer["kind"]](**{k: v for k, v in layer.items() if k != "kind"}) for layer in layers))


_KINDS: dict[str, type[Any]] = {
    "linear": Linear,
    "convolution": Conv,
    "relu": Relu,
    "flatten": Flatten,
    "patches": Patches,
    "projections": Projections,
}
