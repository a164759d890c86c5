"""The trace of any differentiable function, by reverse-mode autograd alone.

With h = J^T u, whose graph is kept, both second-order products are one more walk back:

    J v          = d <h, v> / du                       h is linear in u, so that this is exact for any u
    d/dt (J^T u) = d (<h, v> + <Z, u'>) / d params     v and u' held fixed

In the graph u stands as a function of Z, of which autograd is told that its gradient is u' where J v arrives: so one
walk does both, and u' may depend on J v.

Every operation that autograd can differentiate twice will do; rules for forward mode are not needed. The cost is that
of a loop that lets autograd walk through the inner step (`higher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from upfl.models.factored import Direction, Gradient, ScaledDirection
from upfl.state import State, is_buffer, trainable

Forward = Callable[[State], Tensor]


class AutogradMoved:
    """A forward pass, and the way back."""

    def __init__(self, forward: Forward, params: State) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._leaves = {name: _own(value).requires_grad_() for name, value in trainable(params).items()}
            # What is updated on the way, as running statistics are, are the tensors that were given.
            self._z = forward(self._leaves | {name: value for name, value in params.items() if is_buffer(name)})
        self.output = self._z.detach()

    def backward(self, u: Tensor) -> Gradient:
        return self._gradient(self._back([self._z], [u], retain_graph=False))

    def _back(self, of: Iterable[Tensor], along: Iterable[Tensor], **options: bool) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            along = [_own(value) for value in along]
            return torch.autograd.grad(
                list(of), list(self._leaves.values()), along, materialize_grads=True, allow_unused=True, **options
            )

    def _gradient(self, found: Iterable[Tensor], plus: ScaledDirection | None = None) -> Gradient:
        gradient, seen = Gradient(), set[int]()
        for (name, leaf), value in zip(self._leaves.items(), found, strict=True):
            with torch.inference_mode(False), torch.no_grad():
                if plus is not None:
                    value = torch.add(value.detach(), plus[0][name], alpha=plus[1])
                # A gradient may be overwritten, and is then a tensor of its own, laid out as the parameter is.
                elif value.stride() != leaf.stride() or value.data_ptr() in seen:
                    value = torch.empty_like(leaf).copy_(value)
            seen.add(value.data_ptr())
            gradient.dense[name] = value.detach()
        return gradient


class AutogradTrace(AutogradMoved):
    """A forward pass and its derivative products."""

    def __init__(self, forward: Forward, params: State) -> None:
        super().__init__(forward, params)
        self._forward, self._params = forward, params
        self._given: Tensor | None = None
        self._responses: list[Callable[[Tensor], Tensor]] = []  # apart, so that the graph does not hold what holds it
        self._h: tuple[Tensor, ...] | None = None  # J^T u with its graph

    def backward(self, u: Tensor, *, plus: ScaledDirection | None = None, factored: bool = False) -> Gradient:
        self._given = u
        if factored:  # a tangent follows
            return self._gradient(self._kept(), plus)
        self._h = None
        return self._gradient(self._back([self._z], [u], retain_graph=True), plus)

    def _kept(self) -> tuple[Tensor, ...]:
        assert self._given is not None, "call backward first"
        with torch.inference_mode(False), torch.enable_grad():
            self._u: Tensor = _Response.apply(self._z, _own(self._given), self._responses)  # type: ignore[no-untyped-call]
            self._h = torch.autograd.grad(
                self._z, list(self._leaves.values()), self._u, create_graph=True, materialize_grads=True
            )
        return self._h

    def moved(self, v: Gradient, scale: float, shrink: float = 1.0) -> AutogradMoved:
        with torch.inference_mode(False), torch.no_grad():
            params = {name: torch.mul(leaf, shrink).add_(v[name], alpha=scale) for name, leaf in self._leaves.items()}
            still = {name: value.clone() for name, value in self._params.items() if is_buffer(name)}
        return AutogradMoved(self._forward, params | still)

    def tangent(self, v: Direction, *, scale: float = 1.0) -> Tensor:
        h, along = self._direction(v, scale)
        with torch.inference_mode(False):
            (change,) = torch.autograd.grad(h, self._u, along, retain_graph=True)
        return change.detach()

    def _direction(self, v: Direction, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        h = self._h if self._h is not None else self._kept()
        with torch.inference_mode(False):
            pairs = [(one, v[name] * scale) for name, one in zip(self._leaves, h, strict=True) if one.requires_grad]
            self._along = [one for one, _ in pairs], [_own(other) for _, other in pairs]
        return self._along

    def backward_tangent(self, du: Tensor, *, plus: ScaledDirection | None = None) -> Gradient:
        return self._walk(lambda _: du, plus)

    def curvature(
        self,
        v: Direction,
        response: Callable[[Tensor], Tensor],
        *,
        scale: float = 1.0,
        plus: ScaledDirection | None = None,
    ) -> Gradient:
        self._direction(v, scale)
        return self._walk(response, plus)

    def _walk(self, response: Callable[[Tensor], Tensor], plus: ScaledDirection | None) -> Gradient:
        self._responses.append(response)
        try:
            return self._gradient(self._back(*self._along, retain_graph=True), plus)
        finally:
            self._responses.clear()


class _Response(torch.autograd.Function):
    """u as a function of Z: its value is given, and its gradient is what `responses` has where J v arrives."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, u: Tensor, responses: list[Callable[[Tensor], Tensor]]) -> Tensor:
        ctx.responses = responses
        return u.clone()

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> Any:
        with torch.inference_mode():
            du = ctx.responses[-1](change)
        with torch.inference_mode(False):
            return _own(du), None, None


def _own(value: Tensor) -> Tensor:
    """A tensor that autograd may keep: one that was made in inference mode is copied."""
    return value.clone() if value.is_inference() else value.detach()
