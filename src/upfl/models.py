"""The models: pure functions of named parameters, each with hand-written derivatives.

A model is a tuple of layers. `model.apply(params, x)` is ordinary differentiable PyTorch. `model.trace(params, x)`
keeps what the forward pass computed and offers three products that the methods are made of, without an autograd graph:

    trace.backward(u)            J^T u, with u = dl/dZ
    trace.tangent(v)             Z' = J v, the change of the output when the parameters move along v
    trace.backward_tangent(u')   d/dt J^T u along v: the Hessian-vector product of l, with u' = d/dt dl/dZ

A FedTTA step needs all three. Written out for each layer they cost little more than the matrix products; autograd's
double backward costs 1.4 (ConvNet) to 1.7 (MLP) times that (`results/steps.md`).

Parameter names are dotted (`conv1.weight`), values contiguous. `model.layout(params)` gives convolution weights the
channels-last layout, in which oneDNN's kernels run at the machine's matrix-multiply rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl.state import State

Shapes = dict[str, tuple[int, ...]]

_convolution_backward = torch.ops.aten.convolution_backward.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default


@dataclass(frozen=True)
class Model:
    """Layers applied one after another. A slice of a model is a model: `model[:-1]` computes the last features."""

    layers: tuple[Layer, ...]

    def __getitem__(self, part: slice) -> Model:
        return Model(self.layers[part])

    @property
    def shapes(self) -> Shapes:
        return {name: shape for layer in self.layers for name, shape in layer.shapes().items()}

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

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

    def trace(self, params: State, x: Tensor) -> Trace:
        """The forward pass on x, ready for derivative products."""
        return Trace(self, params, x)

    def layout(self, params: State) -> State:
        """The same values in the memory layout in which the layers are fast."""
        return {
            name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
            for name, value in params.items()
        }


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> Model:
    """Fully connected layers with ReLU between them: fc1, fc2, ..."""
    sizes = [inputs, *hidden, outputs]
    layers: list[Layer] = [Flatten()]
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers += [Linear(f"fc{i}", fan_in, fan_out), Relu()]
    return Model(tuple(layers[:-1]))


def convnet(shape: tuple[int, int, int], classes: int, hidden: int = 512, width: float = 1.0) -> Model:
    """Two 5x5 convolutions (32 and 64 channels times `width`), each pooled by 2 and rectified, and two linear layers.

    The paper rectifies before it pools. The maximum of rectified values is the rectified maximum, and the derivatives
    agree, so pooling first is the same model at a quarter of the work.
    """
    channels, height, breadth = shape
    first, second = round(32 * width), round(64 * width)
    features = second * (height // 4) * (breadth // 4)
    return Model(
        (
            *(Conv("conv1", channels, first), MaxPool(), Relu()),
            *(Conv("conv2", first, second), MaxPool(), Relu()),
            *(Flatten(), Linear("fc1", features, hidden), Relu(), Linear("fc2", hidden, classes)),
        )
    )


def adaptation_model(classes: int, width: int = 32) -> Model:
    """g: a sample's logits to a scalar that says how badly they fit."""
    return mlp(classes, (width, width, width), 1)


def describe(model: Model) -> list[dict[str, Any]]:
    """The layers as data, from which `described` makes the model again."""
    kinds = {layer: kind for kind, layer in _KINDS.items()}
    return [{"kind": kinds[type(layer)], **vars(layer)} for layer in model.layers]


def described(layers: Iterable[Mapping[str, Any]]) -> Model:
    return Model(tuple(_KINDS[layer["kind"]](**{k: v for k, v in layer.items() if k != "kind"}) for layer in layers))


class Trace:
    """A forward pass and its derivative products; call `backward`, `tangent`, `backward_tangent` in this order."""

    def __init__(self, model: Model, params: State, x: Tensor) -> None:
        self.passes: list[Pass] = []
        for layer in model.layers:
            self.passes.append(layer.forward(params, x))
            x = self.passes[-1].y
        self.output = x
        self.input_gradient: Tensor  # set by a walk back with `inputs`
        # Below the first layer with parameters nothing depends on them: gradients stop there, but for the input's.
        self._first = next(i for i, layer in enumerate(model.layers) if layer.shapes())

    def backward(self, u: Tensor, inputs: bool = False, plus: Plus | None = None, factor: float = 1.0) -> State:
        """factor * J^T u for the parameters, plus what is given; with `inputs`, J^T u for the input as
        `input_gradient`."""
        return self._walk_back(u, inputs, Sink(plus, factor), tangent=False)

    def backward_to_input(self, u: Tensor) -> Tensor:
        """J^T u for the input alone."""
        self._walk_back(u, True, None, tangent=False)
        return self.input_gradient

    def tangent(self, v: State | None, dx: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """The output's change along scale * v (the parameters' tangent) and dx (the input's); None stands still."""
        for layer in self.passes[0 if dx is not None else self._first :]:
            dx = layer.tangent(v, scale, dx)
        assert dx is not None
        return dx

    def backward_tangent(self, du: Tensor, inputs: bool = False, plus: Plus | None = None) -> State:
        """The change of `backward(u)` along the last `tangent` when u changes by du, plus what is given."""
        return self._walk_back(du, inputs, Sink(plus, 1.0), tangent=True)

    def _walk_back(self, u: Tensor, inputs: bool, to: Sink | None, tangent: bool) -> State:
        g: Tensor | None = u
        for i in range(len(self.passes) - 1, -1 if inputs else self._first - 1, -1):
            assert g is not None
            step = self.passes[i].backward_tangent if tangent else self.passes[i].backward
            g = step(g, to, inputs or i > self._first)
        if g is not None:
            self.input_gradient = g
        return to.result if to else {}


Plus = tuple[State, float]  # a state and a factor on it


class Sink:
    """Where a walk back leaves gradients: times a factor, plus a multiple of another state, in one pass over memory."""

    def __init__(self, plus: Plus | None, factor: float) -> None:
        self.result: State = {}
        self.base: State | None = plus[0] if plus else None
        self.beta = plus[1] if plus else 0.0
        self.alpha = factor

    def product(self, name: str, a: Tensor, b: Tensor) -> None:
        if self.base is None:
            self.result[name] = torch.mm(a, b) if self.alpha == 1 else torch.mm(a, b).mul_(self.alpha)
        else:
            self.result[name] = torch.addmm(self.base[name], a, b, beta=self.beta, alpha=self.alpha)

    def further_product(self, name: str, a: Tensor, b: Tensor) -> None:
        self.result[name].addmm_(a, b, alpha=self.alpha)

    def value(self, name: str, gradient: Tensor) -> None:
        if self.base is None:
            self.result[name] = gradient if self.alpha == 1 else gradient.mul_(self.alpha)
        else:
            self.result[name] = torch.mul(self.base[name], self.beta).add_(gradient, alpha=self.alpha)


class Layer(Protocol):
    """What a model is made of: named parameters and a forward pass."""

    def shapes(self) -> Shapes:
        """The weight first: its dimensions but the first give the fan in."""

    def forward(self, params: State, x: Tensor) -> Pass: ...


class Pass(Protocol):
    """A layer's forward pass: its output y and the derivative products of what it did."""

    y: Tensor

    def backward(self, gy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        """Leave the parameters' gradients in `to`, if given; return the input's gradient if `inputs`.

        gy may be overwritten by a pass without parameters; one with parameters keeps it for `backward_tangent`.
        """

    def tangent(self, v: State | None, scale: float, dx: Tensor | None) -> Tensor:
        """The output's change along scale * v and dx, where None stands still."""

    def backward_tangent(self, dgy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        """`backward`, differentiated along the tangent: gy changes by dgy."""


@dataclass(frozen=True)
class Linear:
    name: str
    inputs: int
    outputs: int

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.inputs), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _LinearPass(f"{self.name}.weight", f"{self.name}.bias", params, x)


class _LinearPass:
    def __init__(self, weight: str, bias: str, params: State, x: Tensor) -> None:
        self.weight, self.bias = weight, bias
        self.w, self.wt, self.x = params[weight], params[weight].t(), x
        self.y = torch.addmm(params[bias], x, self.wt)

    def backward(self, gy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        self.gy, self.gyt = gy, gy.t()
        if to is not None:
            to.product(self.weight, self.gyt, self.x)
            to.value(self.bias, gy.sum(0))
        return torch.mm(gy, self.w) if inputs else None

    def tangent(self, v: State | None, scale: float, dx: Tensor | None) -> Tensor:
        self.v, self.scale, self.dx = v, scale, dx
        if v is None:
            assert dx is not None
            return torch.mm(dx, self.wt)
        dy = torch.addmm(v[self.bias], self.x, v[self.weight].t(), beta=scale, alpha=scale)
        return dy if dx is None else dy.addmm_(dx, self.wt)

    def backward_tangent(self, dgy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        if to is not None:
            to.product(self.weight, dgy.t(), self.x)
            if self.dx is not None:
                to.further_product(self.weight, self.gyt, self.dx)
            to.value(self.bias, dgy.sum(0))
        if not inputs:
            return None
        dgx = torch.mm(dgy, self.w)
        return dgx if self.v is None else dgx.addmm_(self.gy, self.v[self.weight], alpha=self.scale)


@dataclass(frozen=True)
class Conv:
    """A 5x5 convolution, padded so that the size stays."""

    name: str
    inputs: int
    outputs: int

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.inputs, 5, 5), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _ConvPass(f"{self.name}.weight", f"{self.name}.bias", params, x)


class _ConvPass:
    def __init__(self, weight: str, bias: str, params: State, x: Tensor) -> None:
        self.weight, self.bias = weight, bias
        self.w, self.x = params[weight], x
        self.dv: Tensor | None = None
        self.y = F.conv2d(x, self.w, params[bias], padding=2)

    def backward(self, gy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        self.gy = gy
        gx, weight, bias = _conv_gradients(gy, self.x, self.w, inputs, to is not None)
        if to is not None:
            to.value(self.weight, weight)
            to.value(self.bias, bias)
        return gx

    def tangent(self, v: State | None, scale: float, dx: Tensor | None) -> Tensor:
        self.dx, self.dv = dx, None
        if v is None:
            assert dx is not None
            return F.conv2d(dx, self.w, padding=2)
        self.dv = v[self.weight] * scale  # small beside the activations
        dy = F.conv2d(self.x, self.dv, v[self.bias] * scale, padding=2)
        return dy if dx is None else dy.add_(F.conv2d(dx, self.w, padding=2))

    def backward_tangent(self, dgy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        dgx, weight, bias = _conv_gradients(dgy, self.x, self.w, inputs, to is not None)
        if to is not None:
            if self.dx is not None:
                weight.add_(_conv_gradients(self.gy, self.dx, self.w, False, True)[1])
            to.value(self.weight, weight)
            to.value(self.bias, bias)
        if inputs and self.dv is not None:
            dgx.add_(_conv_gradients(self.gy, self.x, self.dv, True, False)[0])
        return dgx


def _conv_gradients(gy: Tensor, x: Tensor, w: Tensor, inputs: bool, params: bool) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = _convolution_backward(
        gy, x, w, [w.shape[0]], [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [inputs, params, params]
    )
    return result


class _PiecewiseLinear(ABC):
    """A pass without parameters, linear in its input near almost every point: the tangent of `backward` is itself."""

    y: Tensor

    @abstractmethod
    def pull(self, gy: Tensor) -> Tensor:
        """The input's gradient."""

    @abstractmethod
    def push(self, dx: Tensor) -> Tensor:
        """The output's change."""

    def backward(self, gy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        return self.pull(gy) if inputs else None

    def tangent(self, v: State | None, scale: float, dx: Tensor | None) -> Tensor:
        assert dx is not None
        return self.push(dx)

    def backward_tangent(self, dgy: Tensor, to: Sink | None, inputs: bool) -> Tensor | None:
        return self.pull(dgy) if inputs else None


class Relu:
    def shapes(self) -> Shapes:
        return {}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _ReluPass(x)


class _ReluPass(_PiecewiseLinear):
    def __init__(self, x: Tensor) -> None:
        self.y = x.relu()
        self._open: Tensor | None = None

    def pull(self, gy: Tensor) -> Tensor:
        if self._open is None:
            self._open = self.y.sign()  # 1 where the rectifier is open, 0 where it is shut
        return gy.mul_(self._open)

    def push(self, dx: Tensor) -> Tensor:
        return self.pull(dx)


class MaxPool:
    """The maximum of each 2x2 square."""

    def shapes(self) -> Shapes:
        return {}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _MaxPoolPass(x)


class _MaxPoolPass(_PiecewiseLinear):
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.y, self.winners = F.max_pool2d(x, 2, return_indices=True)

    def pull(self, gy: Tensor) -> Tensor:
        return _pool_backward(gy, self.x, [2, 2], [2, 2], [0, 0], [1, 1], False, self.winners)  # type: ignore[no-any-return]

    def push(self, dx: Tensor) -> Tensor:
        return dx.flatten(2).gather(2, self.winners.flatten(2)).view_as(self.winners)


class Flatten:
    def shapes(self) -> Shapes:
        return {}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _FlattenPass(x)


class _FlattenPass(_PiecewiseLinear):
    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        self.y = x.flatten(1)

    def pull(self, gy: Tensor) -> Tensor:
        gx = gy.view(self.shape)
        return gx.contiguous(memory_format=torch.channels_last) if gx.dim() == 4 else gx

    def push(self, dx: Tensor) -> Tensor:
        return dx.flatten(1)


_KINDS: dict[str, type[Any]] = {
    "linear": Linear,
    "convolution": Conv,
    "relu": Relu,
    "max-pool": MaxPool,
    "flatten": Flatten,
}
