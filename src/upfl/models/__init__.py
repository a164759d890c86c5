"""The models: what a federation trains. `base` has the protocol that methods know; `layered` the built-in chains."""

from upfl.models.base import Kind, Model, Moved, Trace
from upfl.models.factored import Direction, Gradient, Outer, Plus, Shapes, factors, split
from upfl.models.layered import Layered, adaptation_model, convnet, described, mlp
from upfl.models.layers import Conv, Flatten, Layer, Linear, Relu

__all__ = [
    "Conv",
    "Direction",
    "Flatten",
    "Gradient",
    "Kind",
    "Layer",
    "Layered",
    "Linear",
    "Model",
    "Moved",
    "Outer",
    "Plus",
    "Relu",
    "Shapes",
    "Trace",
    "adaptation_model",
    "convnet",
    "described",
    "factors",
    "mlp",
    "split",
]
