"""Matrix products of linear layers, each by the fastest kernel that there is.

Mostly that is MKL's. Three kinds of products are taken elsewhere, where it pays (`models/compiled.py`).

Large ones are oneDNN's (`direct`): outputs, and gradients of inputs and of weights. PyTorch leaves matrices to MKL,
which does not use AVX-512 on processors that are not Intel's: it takes up to 2.7 times as long there.

With AVX2 the outputs of a wide layer whose matrix stays in the cache are a loop's, which packs nothing first
(`models/dots.py`).

Others have a first factor that is zero wherever a rectifier is shut; there, and on Intel's newer processors, they are a
loop's (`compiled.skipping_outruns_mkl`). A shut rectifier passes no gradient back: about half of the
gradient a of a linear layer's outputs is zero, in no pattern, and a dense kernel multiplies by it all the same. Here
only what is open is gone through, so that what others would be multiplied by does not count, finite or not:

    total[r] <- beta * total[r] + alpha * sum_k a[r, k] * b[k]       over the k where a[r, k] is not zero

That is the gradient of the weights, a^T x, added to them on the way, and the gradient of the inputs, a W. The loop is
in `models/rows.py`; `models/compiled.py` says when it serves. It is an operation of PyTorch's, `upfl::add_open_`, so
that a step that is recorded has it, too (`engine/recorded.py`). It looks at memory as it is told, and cannot refuse:
whoever calls it has asked `compiled.multiplies` first.
"""

import platform
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl.models import compiled
from upfl.state import add_product_, is_recording

LARGE = 2**23  # multiplications; below, MKL is as fast with AVX2, though not with Zen 5's AVX-512 (results/speed.md)

_library = torch.library.Library("upfl", "DEF")  # type: ignore[no-untyped-call]
# Factors are tensors, of float64: rates are while a step is recorded, and a number would be the same in every replay.
_SCHEMA = "add_open_(Tensor(a!) total, Tensor a, Tensor b, Tensor beta, Tensor alpha) -> Tensor(a!)"
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]
_library.define("outputs_(Tensor(a!) y, Tensor x, Tensor w, Tensor bias) -> Tensor(a!)")  # type: ignore[no-untyped-call]


def add_open_(total: Tensor, a: Tensor, b: Tensor, opens: bool, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """total <- beta * total + alpha * a b, where a is zero for rectifiers that are shut, if it `opens`."""
    if opens and compiled.multiplies(a, b, total):
        compiled.loaded("rows").register()
        return torch.ops.upfl.add_open_(total, a, b, _factor(beta), _factor(alpha))  # type: ignore[no-any-return]
    if direct(a, b) and total.shape == (a.shape[0], b.shape[1]):
        return _scaled_(total, beta).add_(_product(a, b.t(), None), alpha=alpha)
    return add_product_(total, a, b, beta=beta, alpha=alpha)


def _scaled_(total: Tensor, beta: float | Tensor) -> Tensor:
    if isinstance(beta, Tensor):
        return total.mul_(beta)
    return total if beta == 1 else total.mul_(beta) if beta else total.zero_()


def _factor(value: float | Tensor) -> Tensor:
    return value.double() if isinstance(value, Tensor) else _number(value)  # the loop reads 64 bits


@lru_cache(64)
def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def added(total: Tensor, a: Tensor, b: Tensor, opens: bool, beta: float, alpha: float) -> Tensor:
    """The same, where total stays as it is."""
    if opens and compiled.multiplies(a, b, total):
        return add_open_(total.clone(), a, b, opens, beta, alpha)
    return torch.addmm(total, a, b, beta=beta, alpha=alpha)


def multiplied(a: Tensor, b: Tensor, opens: bool) -> Tensor:
    """a b, likewise."""
    if opens and compiled.multiplies(a, b):
        return add_open_(a.new_empty(a.shape[0], b.shape[1]), a, b, opens, beta=0.0)
    return _product(a, b.t(), None) if direct(a, b) else torch.mm(a, b)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T, and the bias added."""
    if bias is not None and compiled.sums_rows(x, w, bias):
        compiled.loaded("dots").register()
        return torch.ops.upfl.outputs_(x.new_empty(x.shape[0], w.shape[0]), x, w, bias)  # type: ignore[no-any-return]
    whole = bias is None or (bias.is_contiguous() and bias.shape == w.shape[:1])  # oneDNN does not look at strides
    return _product(x, w, bias) if whole and direct(x, w.t()) else F.linear(x, w, bias)


def direct(a: Tensor, b: Tensor) -> bool:
    """Whether a b is oneDNN's: in local steps, if the product is large, and b dense (else it would be slow)."""
    return (
        compiled.used_on(a, b)
        and bool(a.numel() * b.shape[-1] >= LARGE)
        and (b.is_contiguous() or b.t().is_contiguous())
        and compiled.outruns_mkl()
        and _available()
    )


@cache
def _available() -> bool:
    """On the processors that it was measured on."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
    return there and platform.machine() in ("x86_64", "AMD64")


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if is_recording():
        return _recordable().linear(x, w, bias)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def _recordable() -> Any:
    """The same in TorchScript: the recorder does not take the operation's list of options."""
    return torch.jit.CompilationUnit("""
def linear(x: Tensor, w: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
""")
