"""What a model is to the methods: a pure function of named parameters, and derivative products of it.

`model.apply(params, x)` is ordinary differentiable PyTorch, `model.learning(params, x)` the same in training mode, for
losses that are written so (`training.sgd.gradients`). `model.trace(params, x)` keeps what the forward pass
computed and offers the products that the methods are made of:

    trace.backward(u)            J^T u, with u = dl/dZ
    trace.tangent(v)             Z' = J v, the change of the output when the parameters move along v
    trace.backward_tangent(u')   d/dt J^T u along v: the Hessian-vector product of l, with u' = d/dt dl/dZ
    trace.curvature(v, u')       both, with u' a function of Z'

    trace.moved(v, ...)          the trace of the same input at parameters moved along v

A FedTTA step needs all of them, FedAvg's the first.

Parameter names are dotted (`conv1.weight`), values contiguous. `model.layout(params)` has the same values in the memory
layout in which the model is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from upfl.models.factored import Direction, Gradient, ScaledDirection, Shapes
from upfl.state import State

Kind = Literal["linear", "convolution", "norm", "other"]


class Model(Protocol):
    """A prediction model. Trainings and personalizers know this of it, and nothing else."""

    @property
    def shapes(self) -> Shapes:
        """The parameters."""

    @property
    def buffers(self) -> Shapes:
        """What belongs to the state and is not trained, under `buffers.`: running statistics, frozen parameters."""

    @property
    def size(self) -> int:
        """The number of values in parameters and buffers."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """What each layer with parameters is, by its name, in the order of the parameters."""

    @property
    def head(self) -> str | None:
        """The name of the last layer, where that is linear with a bias and reads `features`."""

    @property
    def records(self) -> bool:
        """Whether steps may be recorded, and are so small that it pays."""

    @property
    def vectorizes(self) -> bool:
        """Whether clients may be trained side by side under torch.func.vmap."""

    @property
    def random(self) -> bool:
        """Whether it draws from PyTorch's default generator while it trains, as dropout does."""

    def init(self, generator: torch.Generator) -> State:
        """Parameters and buffers to start from: a function of the generator."""

    def apply(self, params: State, x: Tensor) -> Tensor:
        """The logits of x, as a differentiable function; in evaluation mode."""

    def learning(self, params: State, x: Tensor) -> Tensor:
        """The same in training mode. Buffers among the parameters are updated in place."""

    def batchwise(self, params: State, x: Tensor) -> Tensor:
        """The same as `apply`, but normalised by statistics of x, where the model normalises by statistics of data."""

    def observed(self, params: State, x: Tensor) -> State:
        """The parameters with statistics that are those of x: `apply` on x is then `batchwise`."""

    def features(self, params: State, x: Tensor) -> Tensor:
        """What the head reads, a row for each sample; of a model without a head, what it has before its last layer."""

    def trace(self, params: State, x: Tensor) -> Trace:
        """The forward pass on x in training mode, ready for derivative products."""

    def layout(self, params: State) -> State:
        """The same values in the memory layout in which the model is fast."""

    def describe(self) -> list[dict[str, Any]] | dict[str, Any]:
        """The model as data: its layers, of which `described` makes it again, or a registered name with its options."""

    def why_not_twice(self) -> str | None:
        """Why a trace has no second-order products; None where it has."""


class Moved(Protocol):
    """A forward pass at parameters that were moved along a gradient."""

    output: Tensor

    def backward(self, u: Tensor) -> Gradient:
        """J^T u for the parameters."""


class Trace(Protocol):
    """A forward pass and its derivative products; call `backward`, `tangent`, `backward_tangent` in this order."""

    output: Tensor

    def backward(self, u: Tensor, *, plus: ScaledDirection | None = None, factored: bool = False) -> Gradient:
        """J^T u for the parameters, plus what is given, which is used up.

        `factored`: the gradient is for `moved` alone, and `tangent` follows; not together with `plus`.
        """

    def moved(self, v: Gradient, scale: float, shrink: float = 1.0) -> Moved:
        """The forward pass on the same input at shrink * params + scale * v."""

    def tangent(self, v: Direction, *, scale: float = 1.0) -> Tensor:
        """The output's change along scale * v."""

    def backward_tangent(self, du: Tensor, *, plus: ScaledDirection | None = None) -> Gradient:
        """The change of `backward(u)` along the last `tangent` when u changes by du, plus what is given and used up.

        What is given may be the direction of that tangent, which is then used up, too.
        """

    def curvature(
        self,
        v: Direction,
        response: Callable[[Tensor], Tensor],
        *,
        scale: float = 1.0,
        plus: ScaledDirection | None = None,
    ) -> Gradient:
        """`backward_tangent(response(tangent(v)))`, in one pass where that is less work."""
