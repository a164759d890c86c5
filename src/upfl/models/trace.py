"""The trace of a chain of layers: a forward pass and its derivative products, without an autograd graph.

Written out for each layer they cost less than the dense matrix products; autograd's double backward costs twice that
(`results/steps.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from upfl.models import compiled
from upfl.models.factored import Direction, Gradient, Outer, ScaledDirection
from upfl.models.layers import ConvPass, Layer, Linear, LinearPass, Pass, PlainPass, Relu
from upfl.state import State, combined


class LayeredTrace:
    """A forward pass and its derivative products; call `backward`, `tangent`, `backward_tangent` in this order."""

    def __init__(self, layers: Sequence[Layer], params: State, x: Tensor) -> None:
        self.params, self.input, self.passes = params, x, list[Pass]()
        wide = any(type(layer) is Linear and layer.inputs * layer.outputs >= compiled.WIDE for layer in layers)
        for layer, following in zip_longest(layers, layers[1:]):
            self.passes.append(one := layer.forward(params, x))
            if isinstance(one, ConvPass):
                one.rectified = type(following) is Relu
            elif isinstance(one, LinearPass):
                one.opens = wide and type(following) is Relu
            x = one.y
        self.output = x
        self.input_gradient: Tensor  # set by a walk back with `inputs`
        # Below the first layer with parameters nothing depends on them: gradients stop there, but for the input's.
        self.first = next(i for i, layer in enumerate(layers) if layer.shapes())

    def backward(
        self, u: Tensor, inputs: bool = False, plus: ScaledDirection | None = None, factored: bool = False
    ) -> Gradient:
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

    def moved(self, v: Gradient, scale: float, shrink: float = 1.0) -> LayeredMoved:
        """The forward pass on the same input at shrink * params + scale * v."""
        params = combined([self.params[name] for name in v.dense], shrink, list(v.dense.values()), scale)
        return LayeredMoved(self, dict(zip(v.dense, params, strict=True)), v.outer, scale, shrink)

    def tangent(self, v: Direction | None, dx: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """The output's change along scale * v (the parameters' tangent) and dx (the input's); None stands still."""
        for layer in self.passes[0 if dx is not None else self.first :]:
            dx = layer.tangent(v, scale, dx)
        assert dx is not None
        return dx

    def backward_tangent(self, du: Tensor, inputs: bool = False, plus: ScaledDirection | None = None) -> Gradient:
        """The change of `backward(u)` along the last `tangent` when u changes by du, plus what is given and used up.

        What is given may be the direction of that tangent, which is then used up, too.
        """
        gradient = Gradient(plus)
        self._walk_back(du, inputs, gradient, tangent=True)
        return gradient

    def curvature(
        self,
        v: Direction,
        response: Callable[[Tensor], Tensor],
        *,
        scale: float = 1.0,
        plus: ScaledDirection | None = None,
    ) -> Gradient:
        return self.backward_tangent(response(self.tangent(v, scale=scale)), plus=plus)

    def _walk_back(self, u: Tensor, inputs: bool, to: Gradient | None, tangent: bool) -> None:
        g: Tensor | None = u
        for i in range(len(self.passes) - 1, -1 if inputs else self.first - 1, -1):
            assert g is not None
            step = self.passes[i].backward_tangent if tangent else self.passes[i].backward
            g = step(g, to, inputs or i > self.first)
        if g is not None:
            self.input_gradient = g


class LayeredMoved:
    """A forward pass at parameters that were moved along a gradient: new tensors, and factors left as they are."""

    def __init__(
        self, origin: LayeredTrace, params: State, outer: Mapping[str, Outer], scale: float, shrink: float
    ) -> None:
        self.passes: list[PlainPass] = []
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
