"""A personalizer: a published model and unlabelled data in, a predictor with its diary out.

A personalizer never sees a label: the type it receives has none. The same code serves a training client's validation
(which may bring the client's own memory) and a newcomer (which has none).

A personalizer may need more than the trained model: a calibration, a gate. It says what it `needs`; whoever evaluates
or publishes fits that first, in order, by the same fold over clients as a training, and enters it into
`Published.fitted`. Training clients play the newcomer for it: they personalize on their validation inputs as a newcomer
would, without a memory, and only then look at their labels. No logit and no label leaves a client, only sums.

What is fitted on train splits (`Fit.split`) is like more training: once, on all clients, for everyone. With validation
labels it is not so: a client that was fitted on must not be scored by it. So what needs them is fitted six times at
once: on all clients, for newcomers, and without each of five folds of them. A training client is scored by what was
fitted without its fold.

Fits stand on fits: for the gate, clients play with a calibration. A fit without a fold must not know this fold's labels
through what it stands on either. So for it, clients play with what was fitted without that same fold: the fits without
a fold are a chain of their own, in which the fold's labels do not occur. For the fit on all clients, each client plays
with what was fitted without its own fold, as a newcomer would that nobody has seen.

Where clients are machines of their own, every round of sums is a message to each of them. So fits that do not stand on
each other go in one message, and each says on what it stands (`Need.after`).

Settled: within the chain without a fold, clients play with fits that know their own labels. Fits without each two and
three folds would avoid that, with 26 calibrations in place of 6. They change nothing of the calibration and the gate
that newcomers receive. Measured against chains on MNIST, every figure was the same; on digits, with 140 validation
samples, newcomers' accuracies were the same under label-shift, and validation accuracies up to four points lower,
because gates then stood on calibrations of three fifths of the clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from upfl.contract.clients import Client, Unlabelled
from upfl.contract.predictor import Personalized
from upfl.contract.stage import H, Hyper, Phase, Stage
from upfl.contract.training import Published, Training
from upfl.errors import ConfigError
from upfl.state import State, prefixed

NoHyper = Hyper  # of a personalizer that has no hyper-parameters
FOLDS = 5
FITS = 1 + FOLDS  # on all clients, and without each fold
LEAST_CLIENTS = 7, *(5,) * FOLDS  # of each of these fits: with fewer, nothing that validation labels teach is relied on
R = TypeVar("R")


class Personalizer(ABC, Generic[H]):
    """Turns what a training published into a client's own predictor."""

    name: ClassVar[str]
    title: ClassVar[str]
    Hyper: ClassVar[type[Any]] = NoHyper
    # What the predictor, which is for later samples, says about the client's own: the `same` as `logits`; or, where
    # these are judged together, something `similar` to it, or what the model said `before`.
    later: ClassVar[Literal["same", "similar", "before"]] = "same"
    takes_settings_of: ClassVar[str] = ""  # the personalizer whose searched values of the paper are its own, too

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


@dataclass(frozen=True)
class CrossFitted:
    """What newcomers receive, and what was fitted without each fold of training clients in place of `fitted`."""

    published: Published
    folds: tuple[State, ...] = ({},) * FOLDS

    def without(self, client: int) -> Published:
        """What a training client is scored by: nothing in it was fitted on its labels."""
        return self._fold(client % FOLDS)

    def playing(self, client: int, fit: int) -> Published:
        """What a training client plays the newcomer with, for a fit that it is part of."""
        return self.without(client) if fit == 0 else self._fold(fit - 1)

    def _fold(self, fold: int) -> Published:
        return replace(self.published, fitted=self.folds[fold])

    def plus(self, fits: Sequence[State]) -> CrossFitted:
        """With what was fitted on all clients and without each fold; or, where there is but one, on train splits."""
        on_all, *without = fits
        without = without or [on_all] * FOLDS
        return CrossFitted(
            replace(self.published, fitted=self.published.fitted | on_all),
            tuple(known | new for known, new in zip(self.folds, without, strict=True)),
        )


@dataclass(frozen=True)
class Need:
    """Something to be fitted: under which name it is found, with which settings, and how."""

    key: str
    settings: str  # two personalizers may share a fit only if these agree
    kind: type[Fit]
    personalizer: Personalizer[Any]
    after: tuple[str, ...] | None = None  # what clients must have for it; where None, all that is named before it
    read_by: tuple[str, ...] = ()  # what only the server must have, when it reads the sums: they may go up together

    @classmethod
    def of(
        cls,
        fit: type[Fit],
        personalizer: Personalizer[Any],
        after: Sequence[Need] | None = None,
        read_by: Sequence[Need] = (),
    ) -> Need:
        """A fit over what a personalizer makes of the training clients."""
        name, settings = f"{fit.key}.{personalizer.name}", personalizer.hyper.model_dump_json()
        before = None if after is None else tuple(need.key for need in after)
        return cls(name, settings, fit, personalizer, before, tuple(need.key for need in read_by))

    def standing_on(self, others: Sequence[Need]) -> Need:
        return replace(self, after=tuple(need.key for need in others))

    def stage(self, given: CrossFitted) -> Fit:
        return self.kind(self.personalizer, given)


class Fit(Stage[Hyper]):
    """A stage whose clients play the newcomer. On validation labels its state has a first axis over the six fits."""

    key: ClassVar[str]
    split: ClassVar[Literal["train", "validation"]] = "validation"  # whose labels it is fitted on
    rounds: ClassVar[int] = 1
    remembers = True

    def __init__(self, personalizer: Personalizer[Any], given: CrossFitted) -> None:
        self.personalizer, self.training, self.given = personalizer, personalizer.training, given
        self.classes = self.training.task.classes

    @classmethod
    def most(cls, limit: int | None) -> int | None:
        """How many clients are asked where only so many are evaluated: what is fitted on train splits asks all."""
        return limit if cls.split == "validation" else None

    def done(self, server: State) -> bool:
        """Whether no further round is needed."""
        return False

    def over_others(self, server: State) -> State:
        """The state before a round over other clients than the rounds before."""
        return server

    def facts(self, server: State) -> dict[str, float]:
        """Numbers about what was fitted on all clients that belong into the metrics."""
        return {}

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()

    def begin(self, server: State, memory: State, client: Client) -> State:
        return memory

    def fitted(self, server: State, fit: int) -> State:
        """What fit 0, on all clients, or fit 1 + k, without fold k, came to."""
        return {name: value[fit].clone() for name, value in server.items()}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Between which values what is fitted lies, by name, where not every number will do."""
        return {}

    def results(self, server: State) -> list[State]:
        """What was fitted on all clients, and on validation labels also without each fold; by its whole name."""
        name, count = f"{self.key}.{self.personalizer.name}", 1 if self.split == "train" else FITS
        return [prefixed(name, self.fitted(server, fit)) for fit in range(count)]

    def part_of(self, client: int) -> list[int]:
        """The fits that a client is part of; always of fit 0."""
        return [fit for fit in range(FITS) if fit != 1 + client % FOLDS]

    def takes_part(self, client: int) -> Tensor:
        """1 for each fit that a client is part of, else 0."""
        taking = torch.zeros(FITS, dtype=torch.int64)
        taking[self.part_of(client)] = 1
        return taking

    def by_fold(self, values: Tensor, client: int) -> Tensor:
        """A client's part in each fit, where a gate is to choose later: [fits, ...] to [2, folds, ...].

        For the fit on all clients, those of a fold play with what was fitted without it: summed by fold, as it chooses.
        """
        parts = values.new_zeros(2, FOLDS, *values.shape[1:])
        parts[0, client % FOLDS], parts[1] = values[0], values[1:]
        return parts

    def over_folds(self, chosen: Tensor) -> Tensor:
        """The sums of each fit, of what each fold's gate has chosen: [2, folds, ...] to [fits, ...]."""
        return torch.cat([chosen[0].sum(0, keepdim=True), chosen[1]])

    def too_few(self, clients: Tensor, labels: Tensor) -> Tensor:
        """Whether so many clients and labels, of each fit, are too few to teach more than harm: [fits]."""
        return (clients < torch.tensor(LEAST_CLIENTS)) | (labels < self.classes)

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
            published = self.given.playing(client.id, fit)
            if varies or fit == 0:
                found = base(published, newcomer)
            yield fit, published, found


def varies(personalizer: Personalizer[Any]) -> bool:
    """Whether what a personalizer makes of a client depends on the folds that its fits leave out."""
    return any(need.kind.split == "validation" for need in personalizer.needs())


class HasNeeds(Protocol):
    """A personalizer, or an oracle."""

    name: ClassVar[str]

    def needs(self) -> tuple[Need, ...]: ...


def needs_of(personalizers: Sequence[HasNeeds]) -> dict[str, Need]:
    """All that these need, each thing once, in an order in which it can be fitted."""
    found: dict[str, Need] = {}
    for personalizer in personalizers:
        before: list[str] = []
        for need in personalizer.needs():
            after = tuple(before) if need.after is None else need.after
            before.append(need.key)
            known = found.setdefault(need.key, replace(need, after=after))
            if known.settings != need.settings:
                raise ConfigError(
                    f"{personalizer.name} and another personalizer of this run need '{need.key}' with different "
                    f"settings ({known.settings}, {need.settings}): score them in runs of their own"
                )
    return found
