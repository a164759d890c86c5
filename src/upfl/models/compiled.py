"""When local steps are taken and added up by compiled loops (`models/winners.py`, `products.py`, `engine/fold.py`) in
place of PyTorch's kernels.

The loops are compiled by Numba (the extra `fast`) when a process first needs them, in two to four seconds. So they
serve local training, where steps are many (`used`), and not a newcomer's few. Without Numba, or where a layer is too
small to gain, `models/layers.py` takes the dense kernels: the same derivatives, rounded differently.
"""

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upfl.errors import ConfigError

# Who is served decides about bits: these numbers stay as they are.
BLOCK = 16  # channels of the input that are gone through together
SLIM = 3  # channels, if fewer than a block: a row of a patch, 15 numbers, fits the widest vector
SMALLEST = 12 * 12  # pixels of the input below which too little is to be gained
LANES = 8  # numbers in a vector; where the processor's are shorter, LLVM takes several
WIDEST, SLIMMEST = 14, 12  # vectors that are summed at once: with a factor, fourteen fit AVX2's sixteen registers
LEAST = 2**20  # multiplications of a product, below which it is sooner done than called
MOST = 2**18  # entries of a matrix, from which on it leaves the cache and dense kernels are faster
WIDE = 2**17  # entries of the widest linear layer of a model, below which its rounds are too short to compile for
SEVERAL = 2**12  # values of a sum's entry, below which calling the loop takes as long as the loop saves

_used: ContextVar[bool] = ContextVar("compiled", default=False)


@contextmanager
def used() -> Iterator[None]:
    """Loops serve meanwhile, where that is possible and pays."""
    token = _used.set(True)
    try:
        yield
    finally:
        _used.reset(token)


@cache
def installed() -> bool:
    """Whether there is Numba; `UPFL_NUMBA=0` does without it."""
    return os.environ.get("UPFL_NUMBA") != "0" and importlib.util.find_spec("numba") is not None


INTEL = "mkl_serv_intel_cpu_true"  # MKL is linked into PyTorch's library; without MKL the name is not there
NEEDED = ("library_init_impl", "library_impl", "get_data_ptr", "get_size", "get_stride", "delete_tensor_object")


def _libraries() -> Iterator[ctypes.CDLL]:
    for one in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        with suppress(OSError):  # not a library that can be loaded
            yield ctypes.CDLL(str(one))


@cache
def torch_library() -> ctypes.CDLL | None:
    """PyTorch's library, if it takes operations by the stable C interface and has all that `operations.py` calls."""
    return next((one for one in _libraries() if all(hasattr(one, f"aoti_torch_{name}") for name in NEEDED)), None)


@cache
def outruns_mkl() -> bool:
    """Whether a dense product can be faster than MKL's: not on Intel's processors, as MKL itself sees them."""
    return not any(hasattr(one, INTEL) and getattr(one, INTEL)() for one in _libraries())


@cache
def skipping_outruns_mkl() -> bool:
    """Whether a product that passes over zeros can be: on Intel's processors, too, from Sapphire Rapids on.

    AMX tells them; no loop uses it. On a Cascade Lake, whose second cache is half as large, MKL was as fast.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return outruns_mkl() or bool(capabilities.get("amx_tile"))


def summing_outruns_others() -> bool:
    """Whether sums along rows (`models/dots.py`) can be: with AVX2. With AVX-512 oneDNN is as fast or faster."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and outruns_mkl() and bool(torch_library())


def loaded(name: str) -> Any:
    """A module of this package that needs Numba."""
    try:
        return importlib.import_module(f"upfl.models.{name}")
    except ImportError as error:
        raise ConfigError(f"Numba is installed and does not load ({error}); repair it, or set UPFL_NUMBA=0") from None


def pays(channels: int, pixels: int) -> bool:
    """Whether a layer with inputs of this form is served."""
    return (channels % BLOCK == 0 or channels <= SLIM) and pixels >= SMALLEST


def serves(x: Tensor, w: Tensor) -> bool:
    """Whether derivatives for these inputs and weights are taken here."""
    return used_on(x, w) and pays(w.shape[1], x.shape[-2] * x.shape[-1]) and installed()


def slim(w: Tensor) -> bool:
    """Whether inputs have fewer channels than a block: then only the gradient of the weights is taken here."""
    return w.shape[1] <= SLIM


def used_on(*values: Tensor) -> bool:
    """Whether these take part in a local step, without autograd or another transformation of functions."""
    return (
        _used.get()
        and _plain(*values)
        and not torch.is_grad_enabled()  # what is called here leaves no graph behind
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def fits(a: Tensor, b: Tensor, total: Tensor | None = None) -> bool:
    """Whether a loop can add a b to total, or write it to fresh memory: by what they are, and how they lie there."""
    return (
        _plain(a, b)
        and a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and b.is_contiguous()
        and (total is None or (_plain(total) and total.is_contiguous() and total.shape == (a.shape[0], b.shape[1])))
        and a.stride() in ((a.shape[1], 1), (1, a.shape[0]))
        and _divides(b.shape[1])
    )


def _divides(columns: int) -> bool:
    """Whether columns are so many that they divide into parts of 12 to 14 vectors."""
    vectors, left = divmod(int(columns), LANES)  # while a step is recorded, sizes are tensors
    return not left and vectors // -(-vectors // WIDEST) >= SLIMMEST


def multiplies(a: Tensor, b: Tensor, total: Tensor | None = None) -> bool:
    """Whether a loop adds a b to total, or writes it to fresh memory, where a is zero for rectifiers that are shut."""
    suits = a.numel() * b.shape[-1] >= LEAST and b.numel() < MOST and a.shape[0] * b.shape[-1] < MOST
    served = used_on(a, b) and bool(suits) and installed() and fits(a, b, total)
    return served and skipping_outruns_mkl() and bool(torch_library())


def sums_rows(x: Tensor, w: Tensor, bias: Tensor) -> bool:
    """Whether a loop computes x w^T + bias: of a wide layer whose matrix stays in the cache."""
    return (
        bool(WIDE <= w.numel() < MOST and x.shape[0] * w.numel() >= LEAST and x.numel() < MOST)
        and used_on(x, w, bias)
        and x.dim() == w.dim() == 2
        and x.shape[1] == w.shape[1]
        and bool(x.shape[0] >= 4 and w.shape[0] >= 3 and w.shape[1] % LANES == 0)
        and bias.shape == w.shape[:1]
        and all(one.is_contiguous() for one in (x, w, bias))
        and installed()
        and summing_outruns_others()
    )


def adds(count: int) -> bool:
    """Whether a loop adds to a sum of so many values; with or without it, the sum is the same."""
    return _used.get() and count >= WIDE and installed()


def worth_adding(values: Tensor) -> bool:
    """Whether it adds these."""
    return _plain(values) and values.numel() >= SEVERAL


def _plain(*values: Tensor) -> bool:
    return all(type(one) is Tensor and one.device.type == "cpu" and one.dtype == torch.float32 for one in values)
