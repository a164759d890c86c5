"""The models: what a federation trains.

base.py         the protocol that trainings and personalizers know
layered.py      chains of layers whose derivatives are written out (`layers`, `trace`, `factored`): mlp, convnet
module.py       any torch.nn.Module (`autograd`, `inspection`)
registry.py     models by name: `register`; `builtin` has those that are there from the start, such as resnet8
surgery.py      models made of other models, for methods that put layers of their own into them
"""

from upfl.models import builtin as builtin
from upfl.models.base import Kind, Model, Moved, Trace
from upfl.models.factored import (
    Direction,
    Gradient,
    Outer,
    ScaledDirection,
    Shapes,
    descend_,
    factors,
    split,
    whole_in_factors,
)
from upfl.models.layered import Layered, adaptation_model, convnet, described, mlp
from upfl.models.layers import Conv, Flatten, Layer, Linear, Relu
from upfl.models.module import Module
from upfl.models.registry import Entry, Options, entry, load, named, names, register

__all__ = [
    "Conv",
    "Direction",
    "Entry",
    "Flatten",
    "Gradient",
    "Kind",
    "Layer",
    "Layered",
    "Linear",
    "Model",
    "Module",
    "Moved",
    "Options",
    "Outer",
    "Relu",
    "ScaledDirection",
    "Shapes",
    "Trace",
    "adaptation_model",
    "convnet",
    "descend_",
    "described",
    "entry",
    "factors",
    "load",
    "mlp",
    "named",
    "names",
    "register",
    "split",
    "whole_in_factors",
]
