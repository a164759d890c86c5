"""A personalizer: a published model and unlabelled data in, a predictor with its diary out.

A personalizer never sees a label: the type it receives has none. The same code serves a training client's validation
(which may bring the client's own memory) and a newcomer (which has none).

A personalizer may need more than the trained model: a calibration, a gate. It says what it `needs`; whoever evaluates
or publishes fits that first, in order, by the same fold over clients as a training, and enters it into
`Published.fitted`. Training clients play the newcomer for it: they personalize on their validation inputs as a newcomer
would, without a memory, and only then look at their labels. No logit and no label leaves a client, only sums.

What is fitted on train splits (`Fit.split`) is like more training: once, on all clients, for everyone. With validation
labels it is not so: a client that was fitted on must not be scored by it. What needs them is fitted once on all
clients, for newcomers, and once without each of five folds of them: a training client is scored by what was fitted
without its fold.

Fits stand on fits: for the gate, clients play with a calibration that others fitted. A fit without some folds must not
know these folds' labels through what it stands on either. So for it a client plays with what was fitted without these
folds and without its own. Hence what another fit stands on is fitted without each two folds, too, and what carries two
fits above it without each three (`Fit.depth`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from upfl.contract.clients import Client, Unlabelled
from upfl.contract.predictor import Personalized
from upfl.contract.stage import H, Hyper, Phase, Stage
from upfl.contract.training import Published, Training
from upfl.errors import ConfigError
from upfl.state import State, prefixed

FOLDS = 5
Folds = frozenset[int]
NO_FOLDS: Folds = frozenset()
R = TypeVar("R")


class Personalizer(ABC, Generic[H]):
    """Turns what a training published into a client's own predictor."""

    name: ClassVar[str]
    title: ClassVar[str]
    Hyper: ClassVar[type[Any]]

    def __init__(self, training: Training[Any], hyper: H) -> None:
        self.training = training
        self.hyper = hyper

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        """Why this personalizer does not fit a training, in words; None where it fits."""
        if training.serves_newcomers:
            return None
        return f"{training.name} has no model for a client that did not train"

    def needs(self) -> tuple[Need, ...]:
        """What must have been fitted over the training's clients before this can personalize, in that order."""
        return ()

    @abstractmethod
    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized: ...


def left_out(depth: int) -> tuple[Folds, ...]:
    """The sets of at most so many folds, none first."""
    return tuple(
        frozenset(folds) for size in range(min(depth, FOLDS) + 1) for folds in combinations(range(FOLDS), size)
    )


@dataclass(frozen=True)
class CrossFitted:
    """What newcomers receive, and in place of what was fitted on all clients what was fitted without some folds."""

    published: Published
    fits: Mapping[Folds, State] = field(default_factory=dict)
    shared: State = field(default_factory=dict)  # what was fitted on train splits: the same for everyone

    def without(self, client: int, folds: Folds = NO_FOLDS) -> Published:
        """What a training client is scored by; what it plays with, where other folds are not to count either."""
        return replace(self.published, fitted=self.shared | self.fits.get(folds | {client % FOLDS}, {}))

    def plus(self, fits: Mapping[Folds, State]) -> CrossFitted:
        return CrossFitted(
            replace(self.published, fitted=self.published.fitted | fits[NO_FOLDS]),
            dict(self.fits) | {folds: self.fits.get(folds, {}) | new for folds, new in fits.items() if folds},
            self.shared if len(fits) > 1 else self.shared | fits[NO_FOLDS],
        )


@dataclass(frozen=True)
class Need:
    """Something to be fitted: under which name it is found, with which settings, how, and without how many folds."""

    key: str
    settings: str  # two personalizers may share a fit only if these agree
    kind: type[Fit]
    personalizer: Personalizer[Any]
    depth: int

    @classmethod
    def of(cls, fit: type[Fit], personalizer: Personalizer[Any]) -> Need:
        """A fit over what a personalizer makes of the training clients."""
        return cls(f"{fit.key}.{personalizer.name}", personalizer.hyper.model_dump_json(), fit, personalizer, fit.depth)

    def under(self, fit: type[Fit]) -> Need:
        """The same, for a fit to stand on."""
        return replace(self, depth=self.depth + fit.depth)

    def stage(self, given: CrossFitted) -> Fit:
        return self.kind(self.personalizer, given, self.depth)


class Fit(Stage[Hyper]):
    """A stage whose clients play the newcomer. Its state has a first axis over the sets of folds that are left out."""

    key: ClassVar[str]
    depth: ClassVar[int] = 1  # how many folds are left out at most: one, and one more for each fit that stands on this
    split: ClassVar[Literal["train", "validation"]] = "validation"  # whose labels it is fitted on
    rounds: ClassVar[int] = 1
    remembers = True

    def __init__(self, personalizer: Personalizer[Any], given: CrossFitted, depth: int | None = None) -> None:
        self.personalizer, self.training, self.given = personalizer, personalizer.training, given
        self.classes = self.training.task.classes
        self.left_out = left_out(depth or self.depth)

    @classmethod
    def most(cls, limit: int | None) -> int | None:
        """How many clients are asked where only so many are evaluated: what is fitted on train splits asks all."""
        return limit if cls.split == "validation" else None

    def done(self, server: State) -> bool:
        """Whether no further round is needed."""
        return False

    def facts(self, server: State) -> dict[str, float]:
        """Numbers about what was fitted on all clients that belong into the metrics."""
        return {}

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()

    def begin(self, server: State, memory: State, client: Client) -> State:
        return memory

    def fitted(self, server: State, fit: int) -> State:
        """What was fitted without `left_out[fit]`; fit 0 is on all clients."""
        return {name: value[fit].clone() for name, value in server.items()}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Between which values what is fitted lies, by name, where not every number will do."""
        return {}

    def results(self, server: State) -> dict[Folds, State]:
        name = f"{self.key}.{self.personalizer.name}"
        if self.split == "train":
            return {NO_FOLDS: prefixed(name, self.fitted(server, 0))}
        return {folds: prefixed(name, self.fitted(server, fit)) for fit, folds in enumerate(self.left_out)}

    def part_of(self, client: int) -> list[int]:
        """The fits that a client is part of; always of fit 0."""
        return [fit for fit, folds in enumerate(self.left_out) if client % FOLDS not in folds]

    def takes_part(self, client: int) -> Tensor:
        """1 for each fit that a client is part of, else 0."""
        taking = torch.zeros(len(self.left_out), dtype=torch.int64)
        taking[self.part_of(client)] = 1
        return taking

    def labels(self, client: Client) -> Tensor:
        return torch.cat([batch.y for batch in client.batches("validation", 1024)]).cpu()

    def plays(
        self, client: Client, base: Callable[[Published, Unlabelled], R], varies: bool = False
    ) -> Iterator[tuple[int, Published, R]]:
        """For each fit that the client is part of: what others fitted, and what `base` makes of the client with that.

        The client plays the newcomer, with its validation inputs and no memory. A base that does not vary with what was
        fitted is asked once.
        """
        x = torch.cat([batch.x for batch in client.batches("validation", 1024)])
        newcomer = Unlabelled(client.id, x, client.seed, client.architecture)
        for fit in self.part_of(client.id):
            published = self.given.without(client.id, self.left_out[fit])
            if varies or fit == 0:
                found = base(published, newcomer)
            yield fit, published, found


def varies(personalizer: Personalizer[Any]) -> bool:
    """Whether what a personalizer makes of a client depends on the folds that its fits leave out."""
    return any(need.kind.split == "validation" for need in personalizer.needs())


class Needy(Protocol):
    """A personalizer, or an oracle."""

    name: ClassVar[str]

    def needs(self) -> tuple[Need, ...]: ...


def needs_of(personalizers: Sequence[Needy]) -> dict[str, Need]:
    """All that these need, each thing once, in an order in which it can be fitted."""
    found: dict[str, Need] = {}
    for personalizer in personalizers:
        for need in personalizer.needs():
            known = found.setdefault(need.key, need)
            found[need.key] = max(known, need, key=lambda one: one.depth)
            if known.settings != need.settings:
                raise ConfigError(
                    f"{personalizer.name} and another personalizer of this run need '{need.key}' with different "
                    f"settings ({known.settings}, {need.settings}): score them in runs of their own"
                )
    return found
