"""What is fitted over a trained model, for personalizers that need it: by the same fold over clients as a training.

A personalizer says what it `needs`; whoever evaluates or publishes fits that first, in order, and enters it into
`Published.fitted`. Training clients play the newcomer for it: they personalize on their validation inputs as a newcomer
would, without a memory, and only then look at their labels. No logit and no label leaves a client, only sums.

A client that was fitted on must not be scored by it. So everything is fitted once on all clients, for newcomers, and
once without each of five folds of them: a training client is scored by what was fitted without its fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from upfl.errors import ConfigError
from upfl.personalize.base import Personalizer, Unlabelled
from upfl.state import State, prefixed
from upfl.training.base import Client, Hyper, Phase, Published, Stage

FOLDS = 5
FITS = 1 + FOLDS  # on all clients, and without each fold


@dataclass(frozen=True)
class CrossFitted:
    """What newcomers receive, and in place of what was fitted on all clients what was fitted without each fold."""

    published: Published
    folds: tuple[State, ...] = ({},) * FOLDS

    def without(self, client: int) -> Published:
        """What a training client is scored by."""
        return replace(self.published, fitted=self.folds[client % FOLDS])

    def plus(self, fits: list[State]) -> CrossFitted:
        whole, *folds = fits
        return CrossFitted(
            replace(self.published, fitted=self.published.fitted | whole),
            tuple(old | new for old, new in zip(self.folds, folds, strict=True)),
        )


@dataclass(frozen=True)
class Need:
    """Something to be fitted: under which name it is found, with which settings, and how."""

    key: str
    settings: str  # two personalizers may share a fit only if these agree
    stage: Callable[[CrossFitted], Fit]

    @classmethod
    def of(cls, fit: type[Fit], personalizer: Personalizer[Any]) -> Need:
        """A fit over what a personalizer makes of the training clients."""
        settings = personalizer.hyper.model_dump_json()
        return cls(f"{fit.key}.{personalizer.name}", settings, lambda given: fit(personalizer, given))


class Fit(Stage[Hyper]):
    """A stage whose clients play the newcomer. Its state has a first axis over the fits."""

    key: ClassVar[str]
    rounds: ClassVar[int] = 1
    remembers = True

    def __init__(self, personalizer: Personalizer[Any], given: CrossFitted) -> None:
        self.personalizer, self.given = personalizer, given
        self.classes = personalizer.training.task.classes

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
        """What was fitted on all clients (fit 0) or without fold `fit - 1`."""
        return {name: value[fit].clone() for name, value in server.items()}

    def results(self, server: State) -> list[State]:
        name = f"{self.key}.{self.personalizer.name}"
        return [prefixed(name, self.fitted(server, fit)) for fit in range(FITS)]

    def play(self, client: Client) -> tuple[Unlabelled, Tensor]:
        """The client as a newcomer with its validation inputs, and the labels, for afterwards."""
        batches = list(client.batches("validation", 1024))
        x, y = torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])
        return Unlabelled(client.id, x, client.seed, client.architecture), y.cpu()


def takes_part(client: int) -> Tensor:
    """Which of the fits a client is part of."""
    taking = torch.ones(FITS, dtype=torch.bool)
    taking[1 + client % FOLDS] = False
    return taking


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
            if known.settings != need.settings:
                raise ConfigError(
                    f"{personalizer.name} and another personalizer of this run need '{need.key}' with different "
                    f"settings ({known.settings}, {need.settings}): score them in runs of their own"
                )
    return found
