"""Gradients of linear layers in two thin factors.

A linear layer's gradient over a batch is a^T b: the gradients a of the layer's outputs times its inputs b, a row for
each sample. Where the batch is small beside the layer it stays in these two factors (`Outer`): to multiply by it, to
take its norm and to add it to the weights takes fewer operations, and less memory, than the matrix would.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upfl.models import compiled
from upfl.models.products import add_open_, multiplied
from upfl.state import State, is_recording, is_vectorized

Shapes = dict[str, tuple[int, ...]]

LARGE = 2**18  # entries of a matrix: 1 MB


class Outer(NamedTuple):
    """A linear layer's gradient as factors: a^T b for the weight, the sum of a for the bias."""

    a: Tensor
    b: Tensor
    gram: Tensor | None = None  # b b^T + 1, where it is known
    opens: bool = False  # whether a is zero where a rectifier is shut (`models/products.py`)

    def norm(self) -> Tensor:
        """The l2 norm of both together, the root of <(b b^T + 1) a, a>."""
        products = gram(self.b, self.b) if self.gram is None else self.gram
        return torch.mm(products, self.a).flatten().dot(self.a.flatten()).clamp(min=0).sqrt()

    def over(self, divisor: Tensor) -> Outer:
        return self._replace(a=self.a / divisor)

    def add_to_(self, weight: Tensor, bias: Tensor, factor: float, shrink: float) -> None:
        """weight, bias <- shrink * (weight, bias) + factor * gradient, in one pass over the weight."""
        step = 128 if weight.numel() >= LARGE else len(weight)  # rows that stay in the cache while they are scaled
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            add_open_(weight[rows], self.a[:, rows].t(), self.b, self.opens, beta=shrink, alpha=factor)
        bias.mul_(shrink).add_(self.a.sum(0), alpha=factor)


ScaledDirection = tuple["Direction", float]  # a direction, which is used up, and a factor on it


class Gradient(Mapping[str, Tensor]):
    """A tensor for each parameter, plus a multiple of another direction. Read as a mapping, factors are multiplied."""

    def __init__(self, plus: ScaledDirection | None = None, factored: bool = False) -> None:
        self._dense: State = {}
        self._waiting: dict[str, Outer] = {}  # what is multiplied when it is asked for, by the layer's name
        self.outer: dict[str, Outer] = {}  # what is not
        self._plus, self._factored = plus, factored

    @property
    def dense(self) -> State:
        for layer, one in self._waiting.items():
            weight = multiplied(one.a.t(), one.b, one.opens)
            self._dense |= {f"{layer}.weight": weight, f"{layer}.bias": one.a.sum(0)}
        self._waiting.clear()
        return self._dense

    @property
    def factors(self) -> dict[str, Outer]:
        """All of it in factors; nothing where some of it is not."""
        return {} if self._dense else self._waiting | self.outer

    def value(self, name: str, gradient: Tensor) -> None:
        """Take a gradient, which may be overwritten."""
        self.dense[name] = gradient if self._plus is None else gradient.add_(self._plus[0][name], alpha=self._plus[1])

    def also(self, gradients: State) -> Gradient:
        """This one, with those of further parameters."""
        for name, gradient in gradients.items():
            self.value(name, gradient)
        return self

    def product(self, layer: str, keep: bool, own: Outer, further: tuple[Tensor, Tensor] | None = None) -> None:
        """Take a linear layer's gradient, factored if `keep`; `further` factors add to the weight's alone."""
        terms, plus = [own], None
        if self._plus is not None:
            direction, factor = self._plus
            if (more := factors(direction, layer)) is None:
                plus = direction[f"{layer}.weight"], direction[f"{layer}.bias"], factor
            elif more.b is own.b:
                terms = [own._replace(a=torch.add(own.a, more.a, alpha=factor))]
            else:
                terms = [own, more._replace(a=more.a * factor)]
        if len(terms) == 1 and further is None and plus is None:
            (self.outer if keep or self._factored else self._waiting)[layer] = terms[0]
            return
        bias = terms[0].a.sum(0) if len(terms) == 1 else terms[0].a.sum(0).add_(terms[1].a.sum(0))
        pairs = [(term.a, term.b) for term in terms] + ([further] if further else [])
        if plus is not None:
            bias.add_(plus[1], alpha=plus[2])
        self.dense[f"{layer}.weight"] = _multiplied(pairs, plus, own.opens)
        self.dense[f"{layer}.bias"] = bias

    def times(self, factor: float) -> Gradient:
        result = Gradient()
        result._dense = {name: value * factor for name, value in self.dense.items()}
        result.outer = {layer: outer._replace(a=outer.a * factor) for layer, outer in self.outer.items()}
        return result

    def __getitem__(self, name: str) -> Tensor:
        if name in self.dense:
            return self.dense[name]
        layer, _, kind = name.rpartition(".")
        outer = self.outer[layer]
        return outer.a.sum(0) if kind == "bias" else multiplied(outer.a.t(), outer.b, outer.opens)

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
        if one.gram is not None or one.a.shape[1] * one.b.shape[1] >= LARGE:
            outer[layer] = one
        else:
            dense |= {name: direction[name] for name in (f"{layer}.weight", f"{layer}.bias")}
    return dense, outer


def whole_in_factors(direction: Direction) -> dict[str, Outer]:
    """A gradient's factors where it has nothing else, and `descend_` takes them; nothing otherwise.

    Matrices that are too large for a cache are left out: they are added in parts (`Outer.add_to_`).
    """
    found = direction.factors if isinstance(direction, Gradient) else {}
    suits = all(
        one.a.device.type == "cpu" and not is_vectorized(one.a) and one.a.shape[1] * one.b.shape[1] < LARGE
        for one in found.values()
    )
    return found if suits else {}


def factors(direction: Direction, layer: str) -> Outer | None:
    return direction.outer.get(layer) if isinstance(direction, Gradient) else None


def gram(a: Tensor, b: Tensor) -> Tensor:
    """a b^T + 1: the products of samples' inputs, of which the last is the one that multiplies the bias."""
    return torch.addmm(a.new_ones(()), a, b.t())


def descend_(params: State, gradient: Mapping[str, Outer], rate: float, weight_decay: float, clip: float) -> None:
    """params <- params - rate * (clip(gradient) + weight_decay * params), in place: the gradient is nowhere formed.

    It is in factors (`Gradient.factors`), and on a CPU: whether it has to be clipped is looked at.
    """
    run = _compiled() if is_recording() else _descended  # what a recording holds may branch within
    lr = rate if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)
    weights, biases = ([params[f"{layer}.{kind}"] for layer in gradient] for kind in ("weight", "bias"))
    a, b = [one.a for one in gradient.values()], [one.b for one in gradient.values()]
    opens = [
        one.opens and compiled.multiplies(one.a.t(), one.b, weight)
        for weight, one in zip(weights, gradient.values(), strict=True)
    ]
    if any(opens):
        compiled.loaded("rows").register()
    run(weights, biases, a, b, opens, lr, weight_decay, clip)


def _descended(
    weights: list[Tensor],
    biases: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    opens: list[bool],
    rate: Tensor,
    weight_decay: float,
    clip: float,
) -> Tensor:
    """The same over lists, written so that TorchScript compiles it, too."""
    shrink = 1 - float(rate) * weight_decay
    factor = -float(rate) / _divisor(a, b, clip)
    beta, alpha = torch.tensor(shrink, dtype=torch.float64), torch.tensor(factor, dtype=torch.float64)
    for weight, bias, ours, others, opened in zip(weights, biases, a, b, opens):  # noqa: B905 - unknown to TorchScript
        if opened:
            torch.ops.upfl.add_open_(weight, ours.t(), others, beta, alpha)
        else:
            weight.addmm_(ours.t(), others, beta=shrink, alpha=factor)
        bias.mul_(shrink).add_(ours.sum(0), alpha=factor)
    return rate


def _divisor(a: list[Tensor], b: list[Tensor], clip: float) -> float:
    """What a gradient is divided by so that its norm is at most `clip`."""
    most = 0.0  # a product's norm is at most the product of norms, which cost far less: mostly that is enough
    for ours, others in zip(a, b):  # noqa: B905
        flat, other = ours.reshape(-1), others.reshape(-1)
        most += float(torch.dot(flat, flat)) * (float(torch.dot(other, other)) + others.size(0))
    if 1.01 * most <= clip * clip:
        return 1.0
    square = 0.0
    for ours, others in zip(a, b):  # noqa: B905
        if ours.size(0) * (ours.size(1) + others.size(1)) < ours.size(1) * others.size(1):
            flat = torch.mm(torch.mm(others, others.t()).add_(1), ours).reshape(-1)
            square += float(torch.dot(flat, ours.reshape(-1)))
        else:
            flat, bias = torch.mm(ours.t(), others).reshape(-1), ours.sum(0)
            square += float(torch.dot(flat, flat)) + float(torch.dot(bias, bias))
    if not math.isfinite(square):
        return math.nan  # and so is all that is divided by it: who diverges shall not stand still instead
    return max((math.sqrt(max(square, 0.0)) + 1e-6) / clip, 1.0)


@cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is old
        return torch.jit.script(_descended)


def _multiplied(
    pairs: Sequence[tuple[Tensor, Tensor]], plus: tuple[Tensor, Tensor, float] | None, opens: bool
) -> Tensor:
    """The sum of a^T b over the pairs, plus a multiple of the matrix that is given, in its place."""
    if len(pairs) > 2:  # one product over more rows passes over the matrix once
        pairs = [(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))]
    a, b = pairs[0]
    if plus is None:
        total = multiplied(a.t(), b, opens)
    elif is_vectorized(plus[0]):
        total = torch.addmm(plus[0], a.t(), b, beta=plus[2])
    else:
        total = add_open_(plus[0], a.t(), b, opens, beta=plus[2])
    for a, b in pairs[1:]:
        add_open_(total, a.t(), b, opens)
    return total
