"""Convolutions whose gradient can be differentiated again at the price of convolutions.

PyTorch's own second derivative finds the weights' part by a convolution whose kernel is as large as the image, which
takes much of a FedTTA step's time on a module. With Y = X * W, and `backward` the pair of gradients:

    (X', W') = backward(Y'; X, W)                           linear in Y', in W (X') and in X (W')
    for Y' along (x, w):        x * W + X * w               Z' of a tangent
    for X and W along (x, w):   backward(Y'; x, w)          the same kernels, with x and w for X and W

Inside `twice()` PyTorch's convolutions of one, two and three dimensions are these. Values and first derivatives come
from the same kernels, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

How = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]


class twice(TorchFunctionMode):  # noqa: N801 - a context manager
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        dimensions = _DIMENSIONS.get(function)
        if dimensions is None:
            return function(*args, **(kwargs or {}))
        return _convolution(function, dimensions, *args, **(kwargs or {}))


@contextmanager
def tangents() -> Iterator[None]:
    """Where derivatives of a gradient are only wanted along Y', which autograd does not tell a function's author."""
    token = _TANGENT.set(True)
    try:
        yield
    finally:
        _TANGENT.reset(token)


_TANGENT = ContextVar("tangent", default=False)
_DIMENSIONS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


def _convolution(
    own: Callable[..., Tensor],
    dimensions: int,
    input: Tensor,  # noqa: A002 - PyTorch's name, which callers may use
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or input.dim() != dimensions + 2:  # by name, or a single sample
        return own(input, weight, bias, stride, padding, dilation, groups)
    each = [(one,) * dimensions if isinstance(one, int) else tuple(one) for one in (stride, padding, dilation)]
    how: How = (each[0], each[1], each[2], False, (0,) * dimensions, groups)
    found: Tensor = _Convolution.apply(input, weight, bias, how)  # type: ignore[no-untyped-call]
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *_Backward.apply(dy, *ctx.saved_tensors, ctx.how, ctx.needs_input_grad[:3]), None  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, how: How, wanted: tuple[bool, ...]) -> Any:
        ctx.save_for_backward(dy, x, weight)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return _gradients(dy, x, weight, how, wanted)

    @staticmethod
    def backward(ctx: Any, along_x: Tensor | None, along_weight: Tensor | None, along_bias: Tensor | None) -> Any:
        dy, x, weight = ctx.saved_tensors
        along_y = None
        if along_x is not None:
            along_y = torch.convolution(along_x, weight, along_bias, *ctx.how)
        if along_weight is not None:
            bias = along_bias if along_y is None else None
            change = torch.convolution(x, along_weight, bias, *ctx.how)
            along_y = change if along_y is None else along_y + change
        elif along_y is None and along_bias is not None:
            along_y = along_bias.view(-1, *(1,) * (dy.dim() - 2)).expand_as(dy)
        wanted = ctx.needs_input_grad[1] and along_weight is not None, ctx.needs_input_grad[2] and along_x is not None
        found = (None, None)
        if (
            any(wanted) and not _TANGENT.get()
        ):  # what is not there is not looked at: each gradient is linear in one of the two
            other_x, other_weight = (
                (x if along_x is None else along_x),
                (weight if along_weight is None else along_weight),
            )
            found = _gradients(dy, other_x, other_weight, ctx.how, (*wanted, False))[:2]
        return along_y, *found, None, None


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, how: How, wanted: tuple[bool, ...]) -> Any:
    return torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], *how, wanted)
