"""Random numbers by name: a generator follows from what it is for, never from what was drawn before it.

So a run's numbers do not depend on the number of workers, on who trains which client, or on where a run was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Key = int | str


def generator(*key: Key) -> torch.Generator:
    """A CPU generator that is a function of the key alone, e.g. `generator(seed, "epoch", client, 3)`."""
    import torch  # here and below, because seeds alone, of partitions, do not need it

    return torch.Generator().manual_seed(seed_of(*key))


def seed_of(*key: Key) -> int:
    """63 bits of a hash of the key; distinct keys (1 and "1" too) give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


@contextmanager
def default_generator(*key: Key) -> Iterator[Callable[..., None]]:
    """PyTorch's default generator as a function of the key, for code that draws from nothing else: a user's module.

    Within, what is yielded seeds it anew, by a key of its own. Afterwards it is as it was.
    """
    import torch

    def seed(*further: Key) -> None:
        torch.manual_seed(seed_of(*key, *further))

    with torch.random.fork_rng(devices=[]):
        seed()
        yield seed
