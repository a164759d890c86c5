"""Gradients of linear layers in two thin factors.

A linear layer's gradient over a batch is a^T b: the gradients a of the layer's outputs times its inputs b, a row for
each sample. Where the batch is small beside the layer it stays in these two factors (`Outer`): to multiply by it, to
take its norm and to add it to the weights takes fewer operations, and less memory, than the matrix would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from upfl.state import State, add_product_, is_vectorized

Shapes = dict[str, tuple[int, ...]]

LARGE = 2**18  # entries of a matrix: 1 MB


class Outer(NamedTuple):
    """A linear layer's gradient as factors: a^T b for the weight, the sum of a for the bias."""

    a: Tensor
    b: Tensor
    gram: Tensor | None = None  # b b^T + 1, where it is known

    def norm(self) -> Tensor:
        """The l2 norm of both together, the root of <(b b^T + 1) a, a>."""
        products = gram(self.b, self.b) if self.gram is None else self.gram
        return torch.mm(products, self.a).flatten().dot(self.a.flatten()).clamp(min=0).sqrt()

    def over(self, divisor: Tensor) -> Outer:
        return Outer(self.a / divisor, self.b, self.gram)

    def add_to_(self, weight: Tensor, bias: Tensor, factor: float, shrink: float) -> None:
        """weight, bias <- shrink * (weight, bias) + factor * gradient, in one pass over the weight."""
        step = 128 if weight.numel() >= LARGE else len(weight)  # rows that stay in the cache while they are scaled
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            add_product_(weight[rows], self.a[:, rows].t(), self.b, beta=shrink, alpha=factor)
        bias.mul_(shrink).add_(self.a.sum(0), alpha=factor)


ScaledDirection = tuple["Direction", float]  # a direction, which is used up, and a factor on it


class Gradient(Mapping[str, Tensor]):
    """A tensor for each parameter, plus a multiple of another direction. Read as a mapping, factors are multiplied."""

    def __init__(self, plus: ScaledDirection | None = None, factored: bool = False) -> None:
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
                terms = [Outer(torch.add(own.a, more.a, alpha=factor), own.b, own.gram)]
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
        result.outer = {layer: Outer(outer.a * factor, outer.b, outer.gram) for layer, outer in self.outer.items()}
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
        if one.gram is not None or one.a.shape[1] * one.b.shape[1] >= LARGE:
            outer[layer] = one
        else:
            dense |= {name: direction[name] for name in (f"{layer}.weight", f"{layer}.bias")}
    return dense, outer


def factors(direction: Direction, layer: str) -> Outer | None:
    return direction.outer.get(layer) if isinstance(direction, Gradient) else None


def gram(a: Tensor, b: Tensor) -> Tensor:
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
