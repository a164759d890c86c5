"""Local steps without Python in them: recorded once, replayed by PyTorch's interpreter.

A step of a small model is some 140 operations of a few microseconds, and about a fifth of its time is Python
between them (`results/steps.md`). A step has no branch that depends on data (`contract/stage.py`), so that its
operations are the same for every batch of a shape. They are recorded when a shape has come up often enough to pay for
it, and replayed from then on: the same kernels on the same numbers in the same order, hence the same bits. Batches of
one shape that follow each other are one call, without Python between their steps either.

What changes from round to round are the learning rates. While a step is recorded, `round` is a tensor, and so is every
rate that is made of it: the graph holds their arithmetic, not their values.

Only trainings that say so are recorded (`records`; CONTRIBUTING has what their steps may not do). A class says it for
itself: a subclass may have changed the step, or what it calls. A step that looks at a number while it is recorded (a
branch on data or on the round) cannot be recorded, and one whose first replay differs in a bit is not replayed: it runs
as it is written, and the observer is told.

The recorder is `torch.jit.trace`, run without TorchScript's optimizer, which would change the order of sums. PyTorch
no longer develops it, but has nothing else that replays a graph without a compiler on the user's machine. Where it is
missing or fails, steps run as they are written: results do not change, small models take longer. TorchScript keeps what
it compiles in one table as long as the process lives; recordings go into tables of their own, and end with their run.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from upfl.contract import Batch, Phase, Step, Training
from upfl.models import compiled
from upfl.state import State

Tell = Callable[[str], None]

WORTH = 32  # a recording takes as long as it saves in some sixty steps, and serves the whole run


class Steps(Protocol):
    """How a phase's steps are carried out, one for each batch: what is left, and the losses."""

    def __call__(
        self, phase: Phase, carry: State, batches: Sequence[Batch], round: int
    ) -> tuple[State, list[Tensor]]: ...


def steps_of(training: Training[Any], device: torch.device, tell: Tell = lambda text: None) -> Steps:
    """Recorded where that is allowed and pays."""
    allowed = vars(type(training)).get("records", False) and hasattr(torch.jit, "trace")
    recordable = all(model.records for model in training.client_models.values())
    return Recorded(tell) if allowed and recordable and device.type == "cpu" else as_written


def as_written(phase: Phase, carry: State, batches: Sequence[Batch], round: int) -> tuple[State, list[Tensor]]:
    losses = []
    with compiled.used():
        for batch in batches:
            carry, loss = phase.step(carry, batch, round)
            losses.append(loss.detach())
    return carry, losses


class Recorded:
    """Steps that are recorded for each shape of batch that comes up more than `worth` times."""

    def __init__(self, tell: Tell = lambda text: None, worth: int = WORTH) -> None:
        self._tell, self._worth, self._failed = tell, worth, False
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, phase: Phase, carry: State, batches: Sequence[Batch], round: int) -> tuple[State, list[Tensor]]:
        losses: list[Tensor] = []
        for _, alike in groupby(batches, _shapes):
            left = list(alike)
            while left:
                graph = None if self._failed else self._graph(phase.step, carry, left[0], round)
                now = left if graph and graph.keeps_layout else left[:1]
                carry, some = graph(carry, now, round) if graph else as_written(phase, carry, now, round)
                losses += some
                left = left[len(now) :]
        return carry, losses

    def _graph(self, step: Step, carry: State, batch: Batch, round: int) -> _Graph | None:
        """The recording for a batch and a carry like these, if there is one or it is time for it."""
        key = step, _shapes(batch), _layout(carry)
        graph = self._graphs.get(key)
        if graph is None:
            self._seen[key] += 1
            if self._seen[key] <= self._worth:
                return None
            try:
                graph = self._graphs[key] = _checked_graph(step, carry, batch, round)
            except Exception as error:  # whatever the step does that cannot be recorded; as written it may be right
                self._failed = True
                self._graphs.clear()
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._tell(f"local steps cannot be recorded and run as they are written, to the same results: {reason}")
        return graph


def _checked_graph(step: Step, carry: State, batch: Batch, round: int) -> _Graph:
    """A step's recording, if its first replay has the bits of the step as it is written."""
    with compiled.used():
        graph = _Graph(step, carry, batch)
        ours, (our_loss,) = graph(_copied(carry), [batch], round)
        written, loss = step(_copied(carry), batch, round)
    if ours.keys() != written.keys() or not _same(our_loss, loss):
        raise ValueError("the first replay differs from the step as written")
    for name, value in written.items():
        if not _same(ours[name], value):
            raise ValueError(f"the first replay differs from the step as written in {name}")
    graph.keeps_layout = _layout(ours) == _layout(carry)
    return graph


def _copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, where not a number is as good as any other."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


class _Graph:
    """A step's operations on batches like the one that it was recorded with, one after another."""

    keeps_layout = False  # whether what a step leaves is laid out as what it was given, so that the next can follow

    def __init__(self, step: Step, carry: State, batch: Batch) -> None:
        names, own = list(carry), _tensors(batch)
        self._names, self._mode = names, torch.inference_mode()

        def flat(round: Tensor, values: list[Tensor], given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            parts = dict(zip(own, values, strict=True))
            noise = {name: parts.pop(name) for name in batch.noise}
            before = dict(zip(names, given, strict=True))
            left, loss = step(before, replace(batch, **parts, noise=noise), cast(int, round))
            return loss, [left[name] for name in names]

        # It is recorded on copies, which it may change.
        values, given = list(own.values()), list(_copied(carry).values())
        jit: Any = torch.jit

        def in_turn(
            round: Tensor, batches: list[list[Tensor]], carry: list[Tensor]
        ) -> tuple[list[Tensor], list[Tensor]]:
            losses: list[Tensor] = []
            for batch in batches:
                loss, carry = graph(round, batch, carry)
                losses.append(loss)
            return losses, carry

        with torch.inference_mode(), _own_unit(), warnings.catch_warnings(record=True) as looked_at:
            warnings.simplefilter("ignore")  # TorchScript is old
            warnings.simplefilter("always", jit.TracerWarning)
            # Shapes are constants of a recording; models branch on them.
            warnings.filterwarnings("ignore", "Using len", jit.TracerWarning)
            warnings.filterwarnings("ignore", "", jit.TracerWarning, module=r"upfl\.(models\.|state$)")
            graph = jit.trace(flat, (_clock(0), values, given), check_trace=False, strict=False)
            self._in_turn = jit.script(in_turn)  # so that no Python is between steps either
        if looked_at:  # a number that Python looked at: it would be the same in every replay
            where = looked_at[0]
            raise ValueError(f"line {where.lineno} of {where.filename} branches on a value")

    def __call__(self, carry: State, batches: Sequence[Batch], round: int) -> tuple[State, list[Tensor]]:
        own = [list(_tensors(batch).values()) for batch in batches]
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            with self._mode:
                losses, left = self._in_turn(_clock(round), own, [carry[name] for name in self._names])
        finally:
            torch._C._set_graph_executor_optimize(before)
        return dict(zip(self._names, left, strict=True)), losses


@contextmanager
def _own_unit() -> Iterator[None]:
    """What is compiled meanwhile lives as long as whoever holds it, not as long as the process."""
    state: Any = importlib.import_module("torch.jit._state")
    shared = state._python_cu
    state._python_cu = torch._C.CompilationUnit()
    try:
        yield
    finally:
        state._python_cu = shared


def _tensors(batch: Batch) -> State:
    own = {"x": batch.x, "y": batch.y, "mask": batch.mask, "index": batch.index}
    return {name: value for name, value in own.items() if value is not None} | batch.noise


def _shapes(batch: Batch) -> tuple[tuple[torch.Size, tuple[int, ...]], ...]:
    """Shapes and strides: a recording holds who was served by how its tensors lay in memory (`models/products.py`)."""
    return tuple((value.shape, value.stride()) for value in _tensors(batch).values())


def _layout(carry: State) -> tuple[tuple[int, ...], ...]:
    return tuple(value.stride() for value in carry.values())


@lru_cache(4)
def _clock(round: int) -> Tensor:
    """A round as a tensor: in double precision, as Python computes."""
    return torch.tensor(float(round), dtype=torch.float64)
