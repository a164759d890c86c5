"""Local steps without Python in them: recorded once, replayed by PyTorch's interpreter.

A step of a small model is some 140 operations of a few microseconds, and about a fifth of its time is Python
between them (`results/steps.md`). A step has no branch that depends on data (`contract/stage.py`), so that its
operations are the same for every batch of a shape. They are recorded when a shape has come up often enough to pay for
it, and replayed from then on: the same kernels on the same numbers in the same order, hence the same bits.

What changes from round to round are the learning rates. While a step is recorded, `round` is a tensor, and so is every
rate that is made of it: the graph holds their arithmetic, not their values.

Only trainings that say so are recorded (`records`; CONTRIBUTING has what their steps may not do). A class says it for
itself: a subclass may have changed the step, or what it calls. A step that looks at a number while it is recorded (a
branch on data or on the round) cannot be recorded, and one whose first replay differs in a bit is not replayed: it runs
as it is written, and the observer is told.

The recorder is `torch.jit.trace`, run without TorchScript's optimizer, which would change the order of sums. PyTorch
no longer develops it, but has nothing else that replays a graph without a compiler on the user's machine. Where it is
missing or fails, steps run as they are written: results do not change, small models take longer.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from upfl.contract import Batch, Phase, Step, Training
from upfl.state import State

Tell = Callable[[str], None]

WORTH = 32  # a recording takes as long as it saves in some sixty steps, and serves the whole run


class Steps(Protocol):
    """How a phase's steps are carried out."""

    def __call__(self, phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]: ...


def steps_of(training: Training[Any], device: torch.device, tell: Tell = lambda text: None) -> Steps:
    """Recorded where that is allowed and pays."""
    allowed = vars(type(training)).get("records", False) and hasattr(torch.jit, "trace")
    return Recorded(tell) if allowed and training.model.records and device.type == "cpu" else as_written


def as_written(phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
    return phase.step(carry, batch, round)


class Recorded:
    """Steps that are recorded for each shape of batch that comes up more than `worth` times."""

    def __init__(self, tell: Tell = lambda text: None, worth: int = WORTH) -> None:
        self._tell, self._worth, self._failed = tell, worth, False
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, phase: Phase, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        if self._failed:
            return phase.step(carry, batch, round)
        own = _tensors(batch)
        # The layout of a batch's tensors is the engine's, that of a carry's the training's own.
        key = phase.step, *(value.shape for value in own.values()), *(value.stride() for value in carry.values())
        graph = self._graphs.get(key)
        if graph is None:
            self._seen[key] += 1
            if self._seen[key] <= self._worth:
                return phase.step(carry, batch, round)
            try:
                graph = self._graphs[key] = _checked_graph(phase.step, carry, batch, round)
            except Exception as error:  # whatever the step does that cannot be recorded; as written it may be right
                self._failed = True
                self._graphs.clear()
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._tell(f"local steps cannot be recorded and run as they are written, to the same results: {reason}")
                return phase.step(carry, batch, round)
        return graph(carry, own, round)


def _checked_graph(step: Step, carry: State, batch: Batch, round: int) -> _Graph:
    """A step's recording, if its first replay has the bits of the step as it is written."""
    graph = _Graph(step, carry, batch)
    ours, our_loss = graph(_copied(carry), _tensors(batch), round)
    written, loss = step(_copied(carry), batch, round)
    if list(ours) != list(written) or not _same(our_loss, loss):
        raise ValueError("the first replay differs from the step as written")
    for name, value in written.items():
        if not _same(ours[name], value):
            raise ValueError(f"the first replay differs from the step as written in {name}")
    return graph


def _copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, where not a number is as good as any other."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


class _Graph:
    """A step's operations on batches like the one that it was recorded with."""

    def __init__(self, step: Step, carry: State, batch: Batch) -> None:
        self._names, own = list(carry), _tensors(batch)
        self._mode = torch.inference_mode()
        self._new: list[str] = []  # what the step makes anew; all else it changes in place or leaves

        def flat(round: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            parts = dict(zip(own, values, strict=False))
            noise = {name: parts.pop(name) for name in batch.noise}
            given = dict(zip(self._names, values[len(own) :], strict=True))
            left, loss = step(dict(given), replace(batch, **parts, noise=noise), cast(int, round))
            self._new = [name for name, value in left.items() if value is not given.get(name)]
            return loss, *(left[name] for name in self._new)

        # It is recorded on copies, which it may change.
        values = (*own.values(), *_copied(carry).values())
        jit: Any = torch.jit
        with torch.inference_mode(), warnings.catch_warnings(record=True) as looked_at:
            warnings.simplefilter("ignore")  # TorchScript is old
            warnings.simplefilter("always", jit.TracerWarning)
            # Shapes are constants of a recording; models branch on them.
            warnings.filterwarnings("ignore", "Using len", jit.TracerWarning)
            warnings.filterwarnings("ignore", "", jit.TracerWarning, module=r"upfl\.(models\.|state$)")
            self._graph = jit.trace(flat, (_clock(0), *values), check_trace=False)
        if looked_at:  # a number that Python looked at: it would be the same in every replay
            where = looked_at[0]
            raise ValueError(f"line {where.lineno} of {where.filename} branches on a value")

    def __call__(self, carry: State, own: State, round: int) -> tuple[State, Tensor]:
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            with self._mode:
                loss, *new = self._graph(_clock(round), *own.values(), *[carry[name] for name in self._names])
        finally:
            torch._C._set_graph_executor_optimize(before)
        carry.update(zip(self._new, new, strict=True))
        return carry, loss


def _tensors(batch: Batch) -> State:
    own = {"x": batch.x, "y": batch.y, "mask": batch.mask, "index": batch.index}
    return {name: value for name, value in own.items() if value is not None} | batch.noise


@lru_cache(4)
def _clock(round: int) -> Tensor:
    """A round as a tensor: in double precision, as Python computes."""
    return torch.tensor(float(round), dtype=torch.float64)
