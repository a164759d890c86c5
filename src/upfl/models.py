"""The models: pure functions of named parameters, each with hand-written derivatives.

A model is a tuple of layers. `model.apply(params, x)` is ordinary differentiable PyTorch. `model.trace(params, x)`
keeps what the forward pass computed and offers three products that the methods are made of, without an autograd graph:

    trace.backward(u)            J^T u, with u = dl/dZ
    trace.tangent(v)             Z' = J v, the change of the output when the parameters move along v
    trace.backward_tangent(u')   d/dt J^T u along v: the Hessian-vector product of l, with u' = d/dt dl/dZ

    trace.moved(v, ...)          the trace of the same input at parameters moved along v

A FedTTA step needs all of them. Written out for each layer they cost little more than the matrix products; autograd's
double backward costs 1.3 (ConvNet) to 3 (MLP) times that (`results/steps.md`).

A linear layer's gradient over a batch is a^T b: the gradients a of the layer's outputs times its inputs b, a row for
each sample. Where the batch is small beside the layer it stays in these two factors (`Outer`): to multiply by it, to
take its norm and to add it to the weights takes fewer operations, and less memory, than the matrix would.

Parameter names are dotted (`conv1.weight`), values contiguous. `model.layout(params)` gives convolution weights the
channels-last layout, in which oneDNN's kernels run at the machine's matrix-multiply rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl.state import State, add_product_, combined, is_vectorized

Shapes = dict[str, tuple[int, ...]]

LARGE = 2**18  # entries of a matrix: 1 MB

_convolution_backward = torch.ops.aten.convolution_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.grad_input
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
            *(Conv("conv1", channels, first), Relu(), Conv("conv2", first, second), Relu()),
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
        self.params, self.input, self.passes = params, x, list[Pass]()
        for layer in model.layers:
            self.passes.append(layer.forward(params, x))
            x = self.passes[-1].y
        self.output = x
        self.input_gradient: Tensor  # set by a walk back with `inputs`
        # Below the first layer with parameters nothing depends on them: gradients stop there, but for the input's.
        self.first = next(i for i, layer in enumerate(model.layers) if layer.shapes())

    def backward(self, u: Tensor, inputs: bool = False, plus: Plus | None = None, factored: bool = False) -> Gradient:
        """J^T u for the parameters, plus what is given, which is used up; with `inputs`, the input's: `input_gradient`.

        `factored` leaves every linear layer's gradient in factors, for `moved` alone; not together with `plus`.
        """
        gradient = Gradient(plus, factored)
        self._walk_back(u, inputs, gradient, tangent=False)
        return gradient

    def backward_to_input(self, u: Tensor) -> Tensor:
        """J^T u for the input alone."""
        self._walk_back(u, True, None, tangent=False)
        return self.input_gradient

    def moved(self, v: Gradient, scale: float, shrink: float = 1.0) -> Moved:
        """The forward pass on the same input at shrink * params + scale * v."""
        params = combined([self.params[name] for name in v.dense], shrink, list(v.dense.values()), scale)
        return Moved(self, dict(zip(v.dense, params, strict=True)), v.outer, scale, shrink)

    def tangent(self, v: Direction | None, dx: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """The output's change along scale * v (the parameters' tangent) and dx (the input's); None stands still."""
        for layer in self.passes[0 if dx is not None else self.first :]:
            dx = layer.tangent(v, scale, dx)
        assert dx is not None
        return dx

    def backward_tangent(self, du: Tensor, inputs: bool = False, plus: Plus | None = None) -> Gradient:
        """The change of `backward(u)` along the last `tangent` when u changes by du, plus what is given and used up.

        What is given may be the direction of that tangent, which is then used up, too.
        """
        gradient = Gradient(plus)
        self._walk_back(du, inputs, gradient, tangent=True)
        return gradient

    def _walk_back(self, u: Tensor, inputs: bool, to: Gradient | None, tangent: bool) -> None:
        g: Tensor | None = u
        for i in range(len(self.passes) - 1, -1 if inputs else self.first - 1, -1):
            assert g is not None
            step = self.passes[i].backward_tangent if tangent else self.passes[i].backward
            g = step(g, to, inputs or i > self.first)
        if g is not None:
            self.input_gradient = g


class Moved:
    """A forward pass at parameters that were moved along a gradient: new tensors, and factors left as they are."""

    def __init__(self, origin: Trace, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> None:
        self.passes: list[Half] = []
        x = origin.input
        for layer in origin.passes:
            self.passes.append(layer.moved(x, params, outer, scale, shrink))
            x = self.passes[-1].y
        self.output, self._first = x, origin.first

    def backward(self, u: Tensor) -> Gradient:
        """J^T u for the parameters."""
        gradient, g = Gradient(), u
        for i in range(len(self.passes) - 1, self._first - 1, -1):
            below = self.passes[i].backward(g, gradient, i > self._first)
            if below is not None:
                g = below
        return gradient


class Outer(NamedTuple):
    """A linear layer's gradient as factors: a^T b for the weight, the sum of a for the bias."""

    a: Tensor
    b: Tensor
    near: Tensor | None = None  # b b^T + 1, where it is known

    def norm(self) -> Tensor:
        """The l2 norm of both together, the root of <(b b^T + 1) a, a>."""
        near = _near(self.b, self.b) if self.near is None else self.near
        return torch.mm(near, self.a).flatten().dot(self.a.flatten()).clamp(min=0).sqrt()

    def over(self, divisor: Tensor) -> Outer:
        return Outer(self.a / divisor, self.b, self.near)

    def add_to_(self, weight: Tensor, bias: Tensor, factor: float, shrink: float) -> None:
        """weight, bias <- shrink * (weight, bias) + factor * gradient, in one pass over the weight."""
        step = 128 if weight.numel() >= LARGE else len(weight)  # rows that stay in the cache while they are scaled
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            add_product_(weight[rows], self.a[:, rows].t(), self.b, beta=shrink, alpha=factor)
        bias.mul_(shrink).add_(self.a.sum(0), alpha=factor)


Plus = tuple["Direction", float]  # a direction, which is used up, and a factor on it


class Gradient(Mapping[str, Tensor]):
    """A tensor for each parameter, plus a multiple of another direction. Read as a mapping, factors are multiplied."""

    def __init__(self, plus: Plus | None = None, factored: bool = False) -> None:
        self.dense: State = {}
        self.outer: dict[str, Outer] = {}  # by the layer's name
        self._plus, self._factored = plus, factored

    def value(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, which may be overwritten."""
        self.dense[name] = gradient if self._plus is None else gradient.add_(self._plus[0][name], alpha=self._plus[1])

    def product(self, layer: str, keep: bool, own: Outer, further: tuple[Tensor, Tensor] | None = None) -> None:
        """Take a linear layer's gradient, factored if `keep`; `further` factors add to the weight's alone."""
        terms, plus = [own], None
        if self._plus is not None:
            direction, factor = self._plus
            if (more := factors(direction, layer)) is None:
                plus = direction[f"{layer}.weight"], direction[f"{layer}.bias"], factor
            elif more.b is own.b:
                terms = [Outer(torch.add(own.a, more.a, alpha=factor), own.b, own.near)]
            else:
                terms = [own, Outer(more.a * factor, more.b)]
        if (keep or self._factored) and len(terms) == 1 and further is None and plus is None:
            self.outer[layer] = terms[0]
            return
        bias = terms[0].a.sum(0) if len(terms) == 1 else terms[0].a.sum(0).add_(terms[1].a.sum(0))
        pairs = [(term.a, term.b) for term in terms] + ([further] if further else [])
        if plus is not None:
            bias.add_(plus[1], alpha=plus[2])
        self.dense[f"{layer}.weight"] = _multiplied(pairs, plus)
        self.dense[f"{layer}.bias"] = bias

    def times(self, factor: float) -> Gradient:
        result = Gradient()
        result.dense = {name: value * factor for name, value in self.dense.items()}
        result.outer = {layer: Outer(outer.a * factor, outer.b, outer.near) for layer, outer in self.outer.items()}
        return result

    def __getitem__(self, name: str) -> Tensor:
        if name in self.dense:
            return self.dense[name]
        layer, _, kind = name.rpartition(".")
        outer = self.outer[layer]
        return outer.a.sum(0) if kind == "bias" else torch.mm(outer.a.t(), outer.b)

    def __iter__(self) -> Iterator[str]:
        yield from self.dense
        for layer in self.outer:
            yield from (f"{layer}.weight", f"{layer}.bias")

    def __len__(self) -> int:
        return len(self.dense) + 2 * len(self.outer)


Direction = State | Gradient


def split(direction: Direction) -> tuple[State, dict[str, Outer]]:
    """What an update takes as tensors, and what as factors: those that save a pass over a matrix too large for a cache,
    or whose norm costs next to nothing."""
    if not isinstance(direction, Gradient):
        return direction, {}
    dense, outer = direction.dense.copy(), dict[str, Outer]()
    for layer, one in direction.outer.items():
        if one.near is not None or one.a.shape[1] * one.b.shape[1] >= LARGE:
            outer[layer] = one
        else:
            dense |= {name: direction[name] for name in (f"{layer}.weight", f"{layer}.bias")}
    return dense, outer


def factors(direction: Direction, layer: str) -> Outer | None:
    return direction.outer.get(layer) if isinstance(direction, Gradient) else None


def _near(a: Tensor, b: Tensor) -> Tensor:
    """a b^T + 1: the products of samples' inputs, of which the last is the one that multiplies the bias."""
    return torch.addmm(a.new_ones(()), a, b.t())


def _multiplied(pairs: Sequence[tuple[Tensor, Tensor]], plus: tuple[Tensor, Tensor, float] | None) -> Tensor:
    """The sum of a^T b over the pairs, plus a multiple of the matrix that is given, in its place."""
    if len(pairs) > 2:  # one product over more rows passes over the matrix once
        pairs = [(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))]
    a, b = pairs[0]
    if plus is None:
        total = torch.mm(a.t(), b)
    elif is_vectorized(plus[0]):
        total = torch.addmm(plus[0], a.t(), b, beta=plus[2])
    else:
        total = plus[0].addmm_(a.t(), b, beta=plus[2])
    for a, b in pairs[1:]:
        add_product_(total, a.t(), b)
    return total


class Layer(Protocol):
    """What a model is made of: named parameters and a forward pass."""

    def shapes(self) -> Shapes:
        """The weight first: its dimensions but the first give the fan in."""

    def forward(self, params: State, x: Tensor) -> Pass: ...


class Half(Protocol):
    """A layer's forward pass: its output y, and the way back."""

    y: Tensor

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        """Leave the parameters' gradients in `to`, if given; return the input's gradient if `inputs`.

        gy may be overwritten by a pass without parameters; one with parameters keeps it for `backward_tangent`.
        """


class Pass(Half, Protocol):
    """A layer's forward pass with all derivative products of what it did."""

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> Half:
        """The layer's forward pass on x at other parameters: given, or at shrink * its own + scale * the factors."""

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        """The output's change along scale * v and dx, where None stands still."""

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        """`backward`, differentiated along the tangent: gy changes by dgy."""


@dataclass(frozen=True)
class Linear:
    name: str
    inputs: int
    outputs: int

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.inputs), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _LinearPass(self.name, params[f"{self.name}.weight"], params[f"{self.name}.bias"], x)


class _LinearPass:
    def __init__(self, layer: str, w: Tensor, bias: Tensor, x: Tensor) -> None:
        self.layer, self.w, self.bias, self.x = layer, w, bias, x
        self.y = F.linear(x, w, bias)
        samples, (outputs, inputs) = x.shape[0], w.shape
        self.thin = 2 * samples * (outputs + inputs) < outputs * inputs  # where factors pay, by measurement
        self._near: tuple[Tensor, Tensor] | None = None
        self._aligned: tuple[Tensor, Tensor] | None = None

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        self.gy = gy
        if to is not None:
            to.product(self.layer, self.thin, Outer(gy, self.x))
        return torch.mm(gy, self.w) if inputs else None

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> Half:
        if (by := outer.get(self.layer)) is None:
            return _LinearPass(self.layer, params[f"{self.layer}.weight"], params[f"{self.layer}.bias"], x)
        if self.thin:
            return _ThinlyMovedPass(self, x, by, scale, shrink)
        weight = torch.addmm(self.w, by.a.t(), by.b, beta=shrink, alpha=scale)
        return _LinearPass(self.layer, weight, torch.mul(self.bias, shrink).add_(by.a.sum(0), alpha=scale), x)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        self.v, self.scale, self.dx = v, scale, dx
        if v is None:
            assert dx is not None
            return torch.mm(dx, self.w.t())
        if (outer := factors(v, self.layer)) is not None:
            near = self.near(outer.b)
            if dx is None:
                return torch.addmm(self.y, near, outer.a, beta=0, alpha=scale)
            return add_product_(torch.mm(dx, self.w.t()), near, outer.a, alpha=scale)
        weight, bias = v[f"{self.layer}.weight"], v[f"{self.layer}.bias"]
        along = torch.addmm(bias, self.x, weight.t(), beta=scale, alpha=scale)
        return along if dx is None else add_product_(along, dx, self.w.t())

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        dgx = self._input_tangent(dgy) if inputs else None  # before `to` may use up v
        if to is not None:
            further = None if self.dx is None else (self.gy, self.dx)
            near = self._near[1] if self._near and self._near[0] is self.x else None
            to.product(self.layer, self.thin, Outer(dgy, self.x, near), further)
        return dgx

    def _input_tangent(self, dgy: Tensor) -> Tensor:
        dgx = torch.mm(dgy, self.w)
        if self.v is None:
            return dgx
        if (outer := factors(self.v, self.layer)) is not None:
            return add_product_(dgx, self.aligned(outer.a), outer.b, alpha=self.scale)
        return add_product_(dgx, self.gy, self.v[f"{self.layer}.weight"], alpha=self.scale)

    def near(self, x: Tensor) -> Tensor:
        """This pass's inputs times others, self.x x^T + 1; asked for twice in a row it is computed once."""
        if self._near is None or self._near[0] is not x:
            self._near = x, _near(self.x, x)
        return self._near[1]

    def aligned(self, gy: Tensor) -> Tensor:
        """This pass's output gradients times others, self.gy gy^T, likewise."""
        if self._aligned is None or self._aligned[0] is not gy:
            self._aligned = gy, torch.mm(self.gy, gy.t())
        return self._aligned[1]


class _ThinlyMovedPass:
    """A linear layer whose weight was moved along a^T b: products with the old weight, corrected by thin ones."""

    def __init__(self, origin: _LinearPass, x: Tensor, by: Outer, scale: float, shrink: float) -> None:
        self.origin, self.x, self.by, self.scale, self.shrink = origin, x, by, scale, shrink
        before = origin.y if x is origin.x else F.linear(x, origin.w, origin.bias)
        self.y = torch.addmm(before, origin.near(x).t(), by.a, beta=shrink, alpha=scale)

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        if to is not None:
            near = self.origin.near(self.x) if self.x is self.origin.x else None
            to.product(self.origin.layer, True, Outer(gy, self.x, near))
        if not inputs:
            return None
        gx = torch.mm(gy, self.origin.w)
        return add_product_(gx, self.origin.aligned(gy).t(), self.by.b, beta=self.shrink, alpha=self.scale)


@dataclass(frozen=True)
class Conv:
    """A 5x5 convolution, padded so that the size stays, and the maximum of each 2x2 square."""

    name: str
    inputs: int
    outputs: int

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.inputs, 5, 5), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _ConvPass(self.name, params[f"{self.name}.weight"], params[f"{self.name}.bias"], x)


class _ConvPass:
    def __init__(self, layer: str, w: Tensor, bias: Tensor, x: Tensor) -> None:
        self.weight_name, self.bias_name = f"{layer}.weight", f"{layer}.bias"
        self.layer, self.w, self.x = layer, w, x
        self.z = F.conv2d(x, w, bias, padding=2)
        self.y, self.winners = F.max_pool2d(self.z, 2, return_indices=True)

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        self.gz = self._unpooled(gy)
        gx, weight = _conv_gradients(self.gz, self.x, self.w, inputs, to is not None)
        if to is not None:
            to.value(self.weight_name, weight)
            to.value(self.bias_name, _rows(gy).sum((0, 1)))  # pooling keeps sums: a quarter of the values
        return gx

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> Half:
        return _ConvPass(self.layer, params[self.weight_name], params[self.bias_name], x)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        self.dx, self.dv = dx, None if v is None else v[self.weight_name] * scale  # small beside the activations
        dz = None if dx is None else F.conv2d(dx, self.w, padding=2)
        if v is None or self.dv is None:
            assert dz is not None
            return self._pooled(dz)
        along = F.conv2d(self.x, self.dv, v[self.bias_name] * scale, padding=2)
        return self._pooled(along if dz is None else along.add_(dz))

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        dgz = self._unpooled(dgy)
        dgx, weight = _conv_gradients(dgz, self.x, self.w, inputs, to is not None)
        if to is not None:
            if self.dx is not None:
                weight.add_(_conv_gradients(self.gz, self.dx, self.w, False, True)[1])
            to.value(self.weight_name, weight)
            to.value(self.bias_name, _rows(dgy).sum((0, 1)))
        if inputs and self.dv is not None:
            dgx.add_(_conv_gradients(self.gz, self.x, self.dv, True, False)[0])
        return dgx

    def _pooled(self, dz: Tensor) -> Tensor:
        """The winners' change, with channels last."""
        samples, channels, height, width = self.winners.shape
        chosen = _rows(dz).gather(1, _rows(self.winners))
        return chosen.view(samples, height, width, channels).permute(0, 3, 1, 2)

    def _unpooled(self, gy: Tensor) -> Tensor:
        return _pool_backward(gy, self.z, [2, 2], [2, 2], [0, 0], [1, 1], False, self.winners)  # type: ignore[no-any-return]


def _rows(image: Tensor) -> Tensor:
    """samples x pixels x channels"""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def _conv_gradients(gz: Tensor, x: Tensor, w: Tensor, inputs: bool, weight: bool) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = _convolution_backward(
        gz, x, w, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [inputs, weight, False]
    )
    return result[:2]


class _PiecewiseLinear(ABC):
    """A pass without parameters, linear in its input near almost every point: the tangent of `backward` is itself."""

    y: Tensor

    @abstractmethod
    def __init__(self, x: Tensor) -> None: ...

    @abstractmethod
    def pull(self, gy: Tensor) -> Tensor:
        """The input's gradient."""

    @abstractmethod
    def push(self, dx: Tensor) -> Tensor:
        """The output's change."""

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        return self.pull(gy) if inputs else None

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> Half:
        return type(self)(x)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        assert dx is not None
        return self.push(dx)

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        return self.pull(dgy) if inputs else None


class Relu:
    def shapes(self) -> Shapes:
        return {}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _ReluPass(x)


class _ReluPass(_PiecewiseLinear):
    def __init__(self, x: Tensor) -> None:
        self.y = x.relu()

    def pull(self, gy: Tensor) -> Tensor:
        if is_vectorized(gy):
            return gy.mul_(self.y.sign())  # 1 where the rectifier is open, 0 where it is shut
        return _threshold_backward(gy, self.y, 0, grad_input=gy)  # type: ignore[no-any-return]

    def push(self, dx: Tensor) -> Tensor:
        return self.pull(dx)


class Flatten:
    def shapes(self) -> Shapes:
        return {}

    def forward(self, params: State, x: Tensor) -> Pass:
        return _FlattenPass(x)


class _FlattenPass(_PiecewiseLinear):
    def __init__(self, x: Tensor) -> None:
        self.x, self.y = x, x if x.dim() == 2 else x.flatten(1)

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> Half:
        return self if x is self.x else _FlattenPass(x)  # the same tensor, so that the next layer knows it again

    def pull(self, gy: Tensor) -> Tensor:
        gx = gy if self.y is self.x else gy.view(self.x.shape)
        if gx.dim() != 4 or is_vectorized(gx):
            return gx
        return gx.contiguous(memory_format=torch.channels_last)

    def push(self, dx: Tensor) -> Tensor:
        return dx if self.y is self.x else dx.flatten(1)


_KINDS: dict[str, type[Any]] = {
    "linear": Linear,
    "convolution": Conv,
    "relu": Relu,
    "flatten": Flatten,
}
