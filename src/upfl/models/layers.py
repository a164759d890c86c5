"""Layers with their derivatives written out: what the built-in models are made of.

A layer's forward pass keeps what it computed (`Pass`) and offers the way back, the tangent, and the derivative of the
way back along that tangent. Convolution weights and images are channels-last, where oneDNN's kernels run at the
machine's matrix-multiply rate; derivatives below a pooling are taken at the winners alone (`models/winners.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl.models import compiled
from upfl.models.factored import Direction, Gradient, Outer, Shapes, factors, gram
from upfl.models.products import add_open_, added, linear, multiplied
from upfl.state import State, add_product_, is_vectorized

_convolution_backward = torch.ops.aten.convolution_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default


class Layer(Protocol):
    """What a model is made of: named parameters and a forward pass."""

    def shapes(self) -> Shapes:
        """The weight first: its dimensions but the first give the fan in."""

    def forward(self, params: State, x: Tensor) -> Pass: ...


class PlainPass(Protocol):
    """A layer's forward pass: its output y, and its gradients."""

    y: Tensor

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        """Leave the parameters' gradients in `to`, if given; return the input's gradient if `inputs`.

        gy may be overwritten by a pass without parameters; one with parameters keeps it for `backward_tangent`.
        """


class Pass(PlainPass, Protocol):
    """A layer's forward pass with all derivative products of what it did."""

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> PlainPass:
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
        return LinearPass(self.name, params[f"{self.name}.weight"], params[f"{self.name}.bias"], x)


class LinearPass:
    def __init__(self, layer: str, w: Tensor, bias: Tensor, x: Tensor, opens: bool = False) -> None:
        self.layer, self.w, self.bias, self.x = layer, w, bias, x
        self.opens = opens  # whether its outputs' gradients are zero in many places, which are worth to be passed over
        self.y = linear(x, w, bias)
        samples, (outputs, inputs) = x.shape[0], w.shape
        self.thin = 2 * samples * (outputs + inputs) < outputs * inputs  # where factors pay, by measurement
        self._input_gram: tuple[Tensor, Tensor] | None = None
        self._output_gram: tuple[Tensor, Tensor] | None = None

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        self.gy = gy
        if to is not None:
            to.product(self.layer, self.thin, Outer(gy, self.x, opens=self.opens))
        return multiplied(gy, self.w, self.opens) if inputs else None

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> PlainPass:
        if (by := outer.get(self.layer)) is None:
            return LinearPass(self.layer, params[f"{self.layer}.weight"], params[f"{self.layer}.bias"], x, self.opens)
        if self.thin:
            return _ThinlyMovedPass(self, x, by, scale, shrink)
        weight = added(self.w, by.a.t(), by.b, self.opens, beta=shrink, alpha=scale)
        bias = torch.mul(self.bias, shrink).add_(by.a.sum(0), alpha=scale)
        return LinearPass(self.layer, weight, bias, x, self.opens)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        self.v, self.scale, self.dx = v, scale, dx
        if v is None:
            assert dx is not None
            return linear(dx, self.w)
        if (outer := factors(v, self.layer)) is not None:
            products = self.input_gram(outer.b)
            if dx is None:
                return torch.addmm(self.y, products, outer.a, beta=0, alpha=scale)
            return add_product_(linear(dx, self.w), products, outer.a, alpha=scale)
        weight, bias = v[f"{self.layer}.weight"], v[f"{self.layer}.bias"]
        along = torch.addmm(bias, self.x, weight.t(), beta=scale, alpha=scale)
        return along if dx is None else add_product_(along, dx, self.w.t())

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        dgx = self._input_tangent(dgy) if inputs else None  # before `to` may use up v
        if to is not None:
            further = None if self.dx is None else (self.gy, self.dx)
            products = self._input_gram[1] if self._input_gram and self._input_gram[0] is self.x else None
            to.product(self.layer, self.thin, Outer(dgy, self.x, products, self.opens), further)
        return dgx

    def _input_tangent(self, dgy: Tensor) -> Tensor:
        dgx = multiplied(dgy, self.w, self.opens)
        if self.v is None:
            return dgx
        if (outer := factors(self.v, self.layer)) is not None:
            return add_product_(dgx, self.output_gram(outer.a), outer.b, alpha=self.scale)
        return add_open_(dgx, self.gy, self.v[f"{self.layer}.weight"], self.opens, alpha=self.scale)

    def input_gram(self, x: Tensor) -> Tensor:
        """This pass's inputs times others, self.x x^T + 1; asked for twice in a row it is computed once."""
        if self._input_gram is None or self._input_gram[0] is not x:
            self._input_gram = x, gram(self.x, x)
        return self._input_gram[1]

    def output_gram(self, gy: Tensor) -> Tensor:
        """This pass's output gradients times others, self.gy gy^T, likewise."""
        if self._output_gram is None or self._output_gram[0] is not gy:
            self._output_gram = gy, torch.mm(self.gy, gy.t())
        return self._output_gram[1]


class _ThinlyMovedPass:
    """A linear layer whose weight was moved along a^T b: products with the old weight, corrected by thin ones."""

    def __init__(self, origin: LinearPass, x: Tensor, by: Outer, scale: float, shrink: float) -> None:
        self.origin, self.x, self.by, self.scale, self.shrink = origin, x, by, scale, shrink
        before = origin.y if x is origin.x else linear(x, origin.w, origin.bias)
        self.y = torch.addmm(before, origin.input_gram(x).t(), by.a, beta=shrink, alpha=scale)

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        if to is not None:
            products = self.origin.input_gram(self.x) if self.x is self.origin.x else None
            to.product(self.origin.layer, True, Outer(gy, self.x, products, self.origin.opens))
        if not inputs:
            return None
        gx = multiplied(gy, self.origin.w, self.origin.opens)
        return add_product_(gx, self.origin.output_gram(gy).t(), self.by.b, beta=self.shrink, alpha=self.scale)


@dataclass(frozen=True)
class Conv:
    """A 5x5 convolution, padded so that the size stays, and the maximum of each 2x2 square."""

    name: str
    inputs: int
    outputs: int

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.outputs, self.inputs, 5, 5), f"{self.name}.bias": (self.outputs,)}

    def forward(self, params: State, x: Tensor) -> Pass:
        return ConvPass(self.name, params[f"{self.name}.weight"], params[f"{self.name}.bias"], x)


class ConvPass:
    rectified = False  # whether a rectifier follows: the output's change then counts where the output is positive

    def __init__(self, layer: str, w: Tensor, bias: Tensor, x: Tensor) -> None:
        self.weight_name, self.bias_name = f"{layer}.weight", f"{layer}.bias"
        self.layer, self.w, self.x = layer, w, x
        self.z = F.conv2d(x, w, bias, padding=2)
        self.y, self.winners = F.max_pool2d(self.z, 2, return_indices=True)

    def backward(self, gy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        self.at_winners = compiled.serves(self.x, self.w)
        self.g = self._unpooled(gy)
        gx: Tensor | None
        gx, weight = self._gradients(self.g, self.x, self.w, inputs, to is not None)
        if to is not None:
            to.value(self.weight_name, weight)
            to.value(self.bias_name, _rows(gy).sum((0, 1)))  # pooling keeps sums: a quarter of the values
        return gx

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> PlainPass:
        return ConvPass(self.layer, params[self.weight_name], params[self.bias_name], x)

    def tangent(self, v: Direction | None, scale: float, dx: Tensor | None) -> Tensor:
        self.dx, self.dv = dx, None if v is None else v[self.weight_name] * scale  # small beside the activations
        dy = None if dx is None else self._change(dx, self.w)
        if v is None or self.dv is None:
            assert dy is not None
            return dy
        along = self._change(self.x, self.dv, v[self.bias_name] * scale)
        return along if dy is None else along.add_(dy)

    def backward_tangent(self, dgy: Tensor, to: Gradient | None, inputs: bool) -> Tensor | None:
        dg = self._unpooled(dgy)
        dgx, weight = self._gradients(dg, self.x, self.w, inputs, to is not None)
        if to is not None:
            if self.dx is not None:
                weight.add_(self._gradients(self.g, self.dx, self.w, False, True)[1])
            to.value(self.weight_name, weight)
            to.value(self.bias_name, _rows(dgy).sum((0, 1)))
        if inputs and self.dv is not None:
            dgx.add_(self._gradients(self.g, self.x, self.dv, True, False)[0])
        return dgx  # type: ignore[no-any-return]

    def _change(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of x by w at the winners, with channels last; where no rectifier is open it may be zero."""
        if self.rectified and compiled.serves(x, w) and not compiled.slim(w):
            dy: Tensor = compiled.loaded("winners").change(self.y, self.winners, x, w)
            return dy if bias is None else dy.add_(bias.view(1, -1, 1, 1))
        samples, channels, height, width = self.winners.shape
        chosen = _rows(F.conv2d(x, w, bias, padding=2)).gather(1, _rows(self.winners))
        return chosen.view(samples, height, width, channels).permute(0, 3, 1, 2)

    def _unpooled(self, gy: Tensor) -> Tensor:
        """The gradient before pooling; at the winners alone it is as it comes."""
        return gy if self.at_winners else self._pooled_from(gy)

    def _pooled_from(self, gy: Tensor) -> Tensor:
        return _pool_backward(gy, self.z, [2, 2], [2, 2], [0, 0], [1, 1], False, self.winners)  # type: ignore[no-any-return]

    def _gradients(self, g: Tensor, x: Tensor, w: Tensor, inputs: bool, weight: bool) -> tuple[Any, Any]:
        if self.at_winners and inputs and compiled.slim(w):
            g = self._pooled_from(g)
        elif self.at_winners:
            return compiled.loaded("winners").gradients(g, self.winners, x, w, inputs, weight)  # type: ignore[no-any-return]
        mask = [inputs, weight, False]
        return _convolution_backward(g, x, w, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, mask)[:2]  # type: ignore[no-any-return]


def _rows(image: Tensor) -> Tensor:
    """samples x pixels x channels"""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


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

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> PlainPass:
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

    def moved(self, x: Tensor, params: State, outer: Mapping[str, Outer], scale: float, shrink: float) -> PlainPass:
        return self if x is self.x else _FlattenPass(x)  # the same tensor, so that the next layer knows it again

    def pull(self, gy: Tensor) -> Tensor:
        gx = gy if self.y is self.x else gy.view(self.x.shape)
        if gx.dim() != 4 or is_vectorized(gx):
            return gx
        return gx.contiguous(memory_format=torch.channels_last)

    def push(self, dx: Tensor) -> Tensor:
        return dx if self.y is self.x else dx.flatten(1)
