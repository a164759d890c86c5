"""What personalization comes to: a client's own model, and the diary of how it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from upfl.contract.training import Training
from upfl.state import AlignedStates, State, aligned, set_first

CHUNK = 256  # samples that pass through a model at once; bounds memory, and keeps activations near the cache


@dataclass(frozen=True)
class Estimate:
    """An accuracy that was estimated without labels, with its interval; fractions."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Likeness:
    """Whether a newcomer's data are like the federation's."""

    verdict: Literal["alike", "unlike", "too few"]
    p: float  # about how often a newcomer like the training clients is as far off as this
    scores: dict[str, float]  # how far off, by check, in standard deviations of clients

    @property
    def unlike(self) -> bool:
        return self.verdict == "unlike"


@dataclass
class Diary:
    """What a personalizer saw and did: one entry before the first step and one after each."""

    entropy: list[float] = field(default_factory=list)  # mean over the client's samples, nats
    loss: list[float] = field(default_factory=list)  # what the steps minimise
    steps: int = 0  # steps behind the model that was kept
    decision: str = ""
    mix: list[float] = field(default_factory=list)  # each class's share of the samples, where it was estimated
    mix_error: float | None = None  # by how much it is off, about: half the sum of the differences; where that is known
    accuracy: list[Estimate] = field(default_factory=list)  # before and after, where it was estimated
    no_accuracy: str = ""  # why it was not, where the personalizer estimates it
    likeness: Likeness | None = None  # of the data, where the federation published what it takes


@dataclass(frozen=True)
class Predictor:
    """A client's own model: logits(x) = mean over its parameter sets of the training's logits / temperature + bias.

    All but the training's function is data, so that the model can be stored and sent.
    """

    training: Training[Any]
    params: Sequence[State]  # one set, but for ensembles, which may make theirs when they are asked for
    temperature: float = 1.0
    bias: Tensor | None = None  # one value for each class

    def __post_init__(self) -> None:
        set_first(self, params=AlignedStates(self.params))

    def logits(self, x: Tensor) -> Tensor:
        alone = len(self.params) == 1
        total = all_logits(self.training.logits, self.params[0], x) if alone else self._together(x)
        mean = total / (len(self.params) * self.temperature)
        return mean if self.bias is None else mean + self.bias

    @torch.no_grad()
    def _together(self, x: Tensor) -> Tensor:
        """The sum of all models' logits; what they share is computed once."""
        first = self.params[0]
        shared = [self.training.shared(first, part) for part in chunks(x)]
        each = (torch.cat([self.training.beyond(one, part) for part in shared]) for one in self.params)
        return reduce(torch.add, each)


@dataclass(frozen=True)
class Personalized:
    """What a client has come to: logits on its own data before and after, and its predictor for later data.

    `logits` may know more than the predictor does, as they were found for all of the client's samples together.
    """

    before: Tensor
    logits: Tensor
    predictor: Predictor
    diary: Diary
    posterior: Tensor | None = None  # what the predictions are judged by, where it is not the softmax of the logits

    def predict_logits(self, x: Tensor) -> Tensor:
        return self.predictor.logits(x)

    def predict(self, x: Tensor) -> Tensor:
        """The most probable class of each sample."""
        return self.predict_logits(x).argmax(1)


def chunks(x: Tensor, size: int = CHUNK) -> Iterator[Tensor]:
    for start in range(0, len(x), size):
        yield aligned(x[start : start + size])


def all_logits(logits: Callable[[State, Tensor], Tensor], params: State, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([logits(params, part) for part in chunks(x)])
