"""The sum over clients: exact, so that its bits do not depend on who adds what in which order.

Each value is added as a 64-bit integer, value * 2^40 rounded (a training may declare other scales; integers are added
as they are). Integer addition is associative, floating-point addition is not. A client whose values are not finite,
or too large for the sum to hold, or not of the expected names, shapes and types, is refused whole: `BadClientError`.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from upfl.contract import Total
from upfl.errors import BadClientError
from upfl.models import compiled
from upfl.state import factors

BITS = 40
CHUNK = 1 << 16  # values converted at once: the conversion's intermediates stay in the cache


class FixedPointSum(Total):
    """A sum of states like `like`, over at most `clients` clients."""

    def __init__(self, like: Mapping[str, Tensor], clients: int, scales: Mapping[str, int] | None = None) -> None:
        self._shapes = {name: _form(like, name) for name in like}
        self._bits = {
            name: (scales or {}).get(name, BITS) if dtype.is_floating_point else 0
            for name, (_, dtype) in self._shapes.items()
        }
        self._spans: dict[str, slice] = {}
        end = 0
        for name, (shape, _) in self._shapes.items():
            self._spans[name] = slice(end, end + shape.numel())
            end += shape.numel()
        # One buffer for all entries and, last, the count: workers' sums merge by one collective operation.
        self.buffer = torch.zeros(end + 1, dtype=torch.int64)
        self._scratch = torch.empty(CHUNK, dtype=torch.float64)
        self.reset(clients)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each entry as a client has it; the sum's own integers take eight a value."""
        return {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in self._shapes.items()}

    def reset(self, clients: int) -> None:
        """Empty the sum, for at most `clients` clients."""
        self.buffer.zero_()
        self.count = 0
        self._largest = {name: 2.0 ** (62 - bits) / max(clients, 1) for name, bits in self._bits.items()}

    def add(self, up: Mapping[str, Tensor]) -> None:
        """Add what one client sent, or refuse it and change nothing."""
        self.check(up)
        loop = compiled.loaded("loops").add_rounded if compiled.adds(len(self.buffer)) else None
        for name in up:
            into = self.buffer[self._spans[name]]
            for start, part in _parts(up, name):
                self._add(into[start : start + len(part)], part, 2.0 ** self._bits[name], loop)
        self.buffer[-1] += 1
        self.merged()

    def _add(self, into: Tensor, values: Tensor, factor: float, loop: Callable[..., None] | None) -> None:
        if not values.is_floating_point():
            into += values
        elif loop and compiled.worth_adding(values):
            loop(into.numpy(), values.numpy(), factor)
        else:
            for ours, some in zip(into.split(CHUNK), values.split(CHUNK), strict=True):  # type: ignore[no-untyped-call]
                ours += self._scratch[: len(some)].copy_(some).mul_(factor).round_().long()

    def disturb(self, name: str, noise: Tensor) -> None:
        """Add noise to an entry's sum, as exactly as values are added."""
        self.buffer[self._spans[name]] += noise.double().mul(2.0 ** self._bits[name]).round_().long()

    def merged(self) -> None:
        """Read the count anew after the buffer was summed over workers."""
        self.count = int(self.buffer[-1])

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        total = self.buffer[self._spans[name]].view(shape)
        return total.double() / 2.0 ** self._bits[name] if dtype.is_floating_point else total

    def mean(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        total, mean = self.buffer[self._spans[name]], torch.empty(shape, dtype=dtype)
        flat, divisor = mean.view(-1), float(self["weight"]) * 2.0 ** self._bits[name]
        for start in range(0, len(flat), CHUNK):
            flat[start : start + CHUNK] = total[start : start + CHUNK].double().div_(divisor)
        return mean

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def check(self, up: Mapping[str, Tensor]) -> None:
        """Refuse what cannot be added."""
        if up.keys() != self._shapes.keys():
            odd = sorted(up.keys() ^ self._shapes.keys())
            raise BadClientError(f"names differ from what was expected: {', '.join(odd[:5])}")
        for name in up:
            (found, kind), (shape, dtype) = _form(up, name), self._shapes[name]
            if (found, kind) != (shape, dtype):
                raise BadClientError(f"{name} is {kind} {list(found)}, expected {dtype} {list(shape)}")
            if shape.numel():
                low, high = _bounds(up, name)
                if not (-self._largest[name] <= low and high <= self._largest[name]):  # false for NaN, too
                    raise BadClientError(f"{name} is not finite or too large (from {low:g} to {high:g})")


# An entry that is an outer product (`state.Factored`) is not formed as a whole: it may be larger than all else.


def _form(up: Mapping[str, Tensor], name: str) -> tuple[torch.Size, torch.dtype]:
    if (outer := factors(up, name)) is None:
        return up[name].shape, up[name].dtype
    column, row = outer
    return torch.Size((*column.shape, *row.shape)), torch.promote_types(column.dtype, row.dtype)


def _bounds(up: Mapping[str, Tensor], name: str) -> tuple[float, float]:
    """The smallest and the largest value; not a number if one is none."""
    if (outer := factors(up, name)) is None:
        values = up[name]
    else:  # rounding keeps order: both are products of the factors' own bounds
        values = torch.outer(*(torch.stack(factor.aminmax()) for factor in outer))
    low, high = (bound.item() for bound in values.aminmax())
    return low, high


def _parts(up: Mapping[str, Tensor], name: str) -> Iterator[tuple[int, Tensor]]:
    """The values in a row, in parts with the place where each begins."""
    if (outer := factors(up, name)) is None:
        yield 0, up[name].detach().reshape(-1).cpu().resolve_neg()
        return
    column, row = (factor.detach().cpu() for factor in outer)
    rows = max(CHUNK // max(len(row), 1), 1)
    for start in range(0, len(column), rows):
        yield start * len(row), torch.outer(column[start : start + rows], row).view(-1)
