"""Local steps without Python in them: recorded once, replayed by PyTorch's interpreter.

A step of a small model is some 140 operations of a few microseconds, and about a fifth of its time is Python
between them (`results/steps.md`). A step has no branch that depends on data (`contract/stage.py`), so that its
operations are the same for every batch of a shape. They are recorded when a shape has come up often enough to pay for
it, and replayed from then on: the same kernels on the same numbers in the same order, hence the same bits.

What changes from round to round are the learning rates. While a step is recorded, `round` is a tensor, and so is every
rate that is made of it: the graph holds their arithmetic, not their values.

The recorder is `torch.jit.trace`, run without TorchScript's optimizer, which would change the order of sums. PyTorch
no longer develops it, but has nothing else that replays a graph without a compiler on the user's machine. Should a
release drop it, let `steps_of` return the steps as they are written: results do not change, small models take longer.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from upfl.contract import Batch, Phase, Step, Training
from upfl.state import State

_as_recorded: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]

WORTH = 32  # a recording takes as long as it saves in some sixty steps, and serves the whole run


class Steps(Protocol):
    """How a phase's steps are carried out."""

    def __call__(self, phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]: ...


def steps_of(training: Training[Any], device: torch.device) -> Steps:
    """Recorded where that is tested and pays."""
    return Recorded() if training.vectorizes and training.model.records and device.type == "cpu" else as_written


def as_written(phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
    return phase.step(carry, batch, round)


class Recorded:
    """Steps that are recorded for each shape of batch that comes up more than `worth` times."""

    def __init__(self, worth: int = WORTH) -> None:
        self._worth = worth
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        own = _tensors(batch)
        # The layout of a batch's tensors is the engine's, that of a carry's the training's own.
        key = phase.step, *(value.shape for value in own.values()), *(value.stride() for value in carry.values())
        graph = self._graphs.get(key)
        if graph is None:
            self._seen[key] += 1
            if self._seen[key] <= self._worth:
                return phase.step(carry, batch, round)
            graph = self._graphs[key] = _Graph(phase.step, carry, batch)
        return graph(carry, own, round)


class _Graph:
    """A step's operations on batches like the one that it was recorded with."""

    def __init__(self, step: Step, carry: State, batch: Batch) -> None:
        self._names, own = list(carry), _tensors(batch)
        self._new: list[str] = []  # what the step makes anew; all else it changes in place or leaves

        def flat(round: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            parts = dict(zip(own, values, strict=False))
            noise = {name: parts.pop(name) for name in batch.noise}
            given = dict(zip(self._names, values[len(own) :], strict=True))
            left, loss = step(dict(given), replace(batch, **parts, noise=noise), cast(int, round))
            self._new = [name for name, value in left.items() if value is not given.get(name)]
            return loss, *(left[name] for name in self._new)

        # It is recorded on copies, which it may change.
        values = (*own.values(), *(value.clone() for value in carry.values()))
        trace: Any = torch.jit.trace
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shapes are taken as constants, which they are; TorchScript is old
            self._graph = trace(flat, (_clock(0), *values), check_trace=False)

    def __call__(self, carry: State, own: State, round: int) -> tuple[State, Tensor]:
        with torch.inference_mode(), _as_recorded(False):
            loss, *new = self._graph(_clock(round), *own.values(), *(carry[name] for name in self._names))
        carry.update(zip(self._new, new, strict=True))
        return carry, loss


def _tensors(batch: Batch) -> State:
    own = {"x": batch.x, "y": batch.y, "mask": batch.mask, "index": batch.index}
    return {name: value for name, value in own.items() if value is not None} | batch.noise


def _clock(round: int) -> Tensor:
    """A round as a tensor: in double precision, as Python computes."""
    return torch.tensor(float(round), dtype=torch.float64)
