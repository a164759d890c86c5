"""The sum over clients: exact, so that its bits do not depend on who adds what in which order.

Each value is added as a 64-bit integer, value * 2^40 rounded (a training may declare other scales; integers are added
as they are). Integer addition is associative, floating-point addition is not. A client whose values are not finite,
or too large for the sum to hold, or not of the expected names, shapes and types, is refused whole: `BadClientError`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from upfl.contract import Total
from upfl.errors import BadClientError
from upfl.models import compiled

BITS = 40
CHUNK = 1 << 16  # values converted at once: the conversion's intermediates stay in the cache


class FixedPointSum(Total):
    """A sum of states like `like`, over at most `clients` clients."""

    def __init__(self, like: Mapping[str, Tensor], clients: int, scales: Mapping[str, int] | None = None) -> None:
        self._shapes = {name: (value.shape, value.dtype) for name, value in like.items()}
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
        for name, value in up.items():
            flat, into = value.detach().reshape(-1).cpu(), self.buffer[self._spans[name]]
            if not value.is_floating_point():
                into += flat
                continue
            factor = 2.0 ** self._bits[name]
            if compiled.adds(flat, len(self.buffer)):
                compiled.loaded("loops").add_rounded(into.numpy(), flat.numpy(), factor)
                continue
            for start in range(0, len(flat), CHUNK):
                part = flat[start : start + CHUNK]
                scaled = torch.mul(part, factor, out=self._scratch[: len(part)])
                into[start : start + CHUNK] += scaled.round_().long()
        self.buffer[-1] += 1
        self.merged()

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
        for name, value in up.items():
            shape, dtype = self._shapes[name]
            if (value.shape, value.dtype) != (shape, dtype):
                raise BadClientError(f"{name} is {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")
            if value.numel():
                low, high = (bound.item() for bound in value.aminmax())
                if not (-self._largest[name] <= low and high <= self._largest[name]):  # false for NaN, too
                    raise BadClientError(f"{name} is not finite or too large (from {low:g} to {high:g})")
