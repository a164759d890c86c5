"""Derivatives of a pooled convolution, at the winners alone.

Pooling keeps one of each four outputs of a convolution, the winner, and a rectifier shuts some winners. The gradient of
all other outputs is zero, and their change is not asked for: three quarters and more of a dense kernel's operations
multiply by zero. Here only the open winners are gone through, so that what lies below others does not count, finite or
not. With g for the gradient at a winner of channel o, and `patch` for the 5 x 5 window of inputs below it:

    gradient of the weights    dW[o]     <- dW[o] + g * patch           `gradients`
    gradient of the inputs     dX[patch] <- dX[patch] + g * W[o]        `gradients`
    change of the outputs      dy = <W[o], patch>                       `change`

The loops are in `models/loops.py`; `models/compiled.py` says when they serve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from upfl.models import compiled, loops
from upfl.models.compiled import BLOCK


def gradients(
    gy: Tensor, winners: Tensor, x: Tensor, w: Tensor, inputs: bool, weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What `convolution_backward` gives of the gradient of the pooled outputs: the inputs' and the weights'.

    The inputs' not where they have few channels (`compiled.slim`).
    """
    _check(gy, winners, x, w)
    g, at, dx, dw = _pixels(gy), _pixels(winners), None, None
    if inputs:
        dx = torch.empty_like(x, memory_format=torch.channels_last)
        loops.inputs(g, at, _blocks(w).transpose(1, 2).contiguous().numpy(), _pixels(dx), x.shape[3])
    outputs, channels = w.shape[:2]
    if weight and compiled.slim(w):
        rows = torch.empty(outputs, 5, loops.WIDE)
        loops.slim_weights(g, at, _pixels(x), rows.numpy(), x.shape[3])
        dw = torch.empty_like(w)  # laid out as the weights are: the update then takes one pass
        dw.permute(0, 2, 3, 1).copy_(rows[:, :, : 5 * channels].view(outputs, 5, 5, channels))
    elif weight:
        blocks = torch.empty(channels // BLOCK, outputs, 5, 5 * BLOCK)
        loops.weights(g, at, _pixels(x), blocks.numpy(), x.shape[3])
        flat = blocks.view(-1, outputs, 5, 5, BLOCK).permute(1, 2, 3, 0, 4)
        dw = flat.reshape(outputs, 5, 5, channels).permute(0, 3, 1, 2)
    return dx, dw


def change(y: Tensor, winners: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The convolution of x by w at the winners where y, the pooled outputs, is positive; zero elsewhere."""
    _check(y, winners, x, w)
    dy = torch.empty_like(y, memory_format=torch.channels_last)
    loops.change(_pixels(y), _pixels(winners), _pixels(x), _blocks(w).numpy(), _pixels(dy), x.shape[3])
    return dy


def _pixels(image: Tensor) -> Any:
    """samples x pixels x channels"""
    return image.detach().permute(0, 2, 3, 1).contiguous().flatten(1, 2).numpy()


def _blocks(w: Tensor) -> Tensor:
    """blocks of input channels x outputs x rows x (columns x channels of the block)"""
    outputs, channels = w.shape[:2]
    apart = w.detach().reshape(outputs, channels // BLOCK, BLOCK, 5, 5).permute(1, 0, 3, 4, 2)
    return apart.reshape(channels // BLOCK, outputs, 5, 5 * BLOCK).contiguous()


def _check(y: Tensor, winners: Tensor, x: Tensor, w: Tensor) -> None:
    """The loops look at memory as they are told: what they are told must be so."""
    outputs, channels = w.shape[:2]
    samples, _, height, breadth = x.shape
    form, floats = (samples, outputs, height // 2, breadth // 2), (y.dtype, x.dtype, w.dtype)
    if not y.shape == winners.shape == form or x.shape[1] != channels or floats != (torch.float32,) * 3:
        raise ValueError(
            f"outputs {tuple(y.shape)} {y.dtype} and winners {tuple(winners.shape)} are not of inputs "
            f"{tuple(x.shape)} {x.dtype} and weights {tuple(w.shape)} {w.dtype}"
        )


def warm() -> None:
    """Compile all loops now: processes that are forked from this one have them."""
    x, w = torch.zeros(1, BLOCK, 2, 2), torch.zeros(1, BLOCK, 5, 5)
    y, at = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    gradients(y, at, x, w, True, True)
    gradients(y, at, x[:, :1], w[:, :1], False, True)
    change(y, at, x, w)
