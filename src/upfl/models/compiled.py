"""When local steps are taken by compiled loops (`models/winners.py`) in place of PyTorch's kernels.

The loops are compiled by Numba (the extra `fast`) when a process first needs them, in about four seconds. So they serve
local training, where steps are many (`used`), and not a newcomer's few. Without Numba, or where a layer is too small to
gain, `models/layers.py` takes the dense kernels: the same derivatives, rounded differently.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

# Who is served decides about bits: both numbers stay as they are.
BLOCK = 16  # channels of the input that are gone through together
SMALLEST = 12 * 12  # pixels of the input below which too little is to be gained

_used: ContextVar[bool] = ContextVar("compiled", default=False)


@contextmanager
def used() -> Iterator[None]:
    """Derivatives are taken here meanwhile, where that is possible and pays."""
    token = _used.set(True)
    try:
        yield
    finally:
        _used.reset(token)


@cache
def installed() -> bool:
    """Whether there is Numba; `UPFL_NUMBA=0` does without it."""
    return os.environ.get("UPFL_NUMBA") != "0" and importlib.util.find_spec("numba") is not None


def pays(channels: int, pixels: int) -> bool:
    """Whether a layer with inputs of this form is served."""
    return channels % BLOCK == 0 and pixels >= SMALLEST


def serves(x: Tensor, w: Tensor) -> bool:
    """Whether derivatives for these inputs and weights are taken here."""
    return (
        _used.get()
        and pays(w.shape[1], x.shape[-2] * x.shape[-1])
        and type(x) is type(w) is Tensor
        and x.device.type == "cpu"
        and x.dtype == w.dtype == torch.float32
        and not torch.is_grad_enabled()  # the loops leave no graph behind
        and torch._C._functorch.peek_interpreter_stack() is None  # and no transformation sees into them
        and installed()
    )
