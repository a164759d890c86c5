"""The contract of a personalizer: a published model and unlabelled data in, a predictor with its diary out.

A personalizer never sees a label: the type it receives has none, and nothing here imports the data, the engine, files
or the network. The same code serves a training client's validation (which may bring the client's own memory) and a
newcomer (which has none).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from upfl.state import State
from upfl.training.base import Hyper, Published, Training
from upfl.training.base import Unlabelled as Unlabelled

if TYPE_CHECKING:
    from upfl.personalize.fitting import Need

CHUNK = 256  # samples that pass through a model at once; bounds memory, and keeps activations near the cache


@dataclass(frozen=True)
class Estimate:
    """An accuracy that was estimated without labels, with its interval; fractions."""

    value: float
    low: float
    high: float


@dataclass
class Diary:
    """What a personalizer saw and did: one entry before the first step and one after each."""

    entropy: list[float] = field(default_factory=list)  # mean over the client's samples, nats
    loss: list[float] = field(default_factory=list)  # what the steps minimise
    steps: int = 0  # steps behind the model that was kept
    decision: str = ""
    mix: list[float] = field(default_factory=list)  # each class's share of the samples, where it was estimated
    accuracy: list[Estimate] = field(default_factory=list)  # before and after, where it was estimated


@dataclass(frozen=True)
class Predictor:
    """A client's own model: logits(x) = mean over its parameter sets of the training's logits / temperature + bias.

    All but the training's function is data, so that the model can be stored and sent.
    """

    training: Training[Any]
    params: Sequence[State]  # one set, but for ensembles, which may make theirs when they are asked for
    temperature: float = 1.0
    bias: Tensor | None = None  # one value for each class

    def logits(self, x: Tensor) -> Tensor:
        total = all_logits(self.training.logits, self.params[0], x)
        for i in range(1, len(self.params)):
            total = total + all_logits(self.training.logits, self.params[i], x)
        mean = total / (len(self.params) * self.temperature)
        return mean if self.bias is None else mean + self.bias


@dataclass(frozen=True)
class Personalized:
    """What a client has come to: logits on its own data before and after, and its predictor for later data.

    `logits` may know more than the predictor does, as they were found for all of the client's samples together.
    """

    before: Tensor
    logits: Tensor
    predictor: Predictor
    diary: Diary

    def predict_logits(self, x: Tensor) -> Tensor:
        return self.predictor.logits(x)

    def predict(self, x: Tensor) -> Tensor:
        """The most probable class of each sample."""
        return self.predict_logits(x).argmax(1)


H = TypeVar("H", bound=Hyper)


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


def chunks(x: Tensor, size: int = CHUNK) -> Iterator[Tensor]:
    for start in range(0, len(x), size):
        yield x[start : start + size]


def all_logits(logits: Callable[[State, Tensor], Tensor], params: State, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([logits(params, part) for part in chunks(x)])


def summed_gradient(
    of: Callable[[Tensor], Tensor], logits: Callable[[State, Tensor], Tensor], params: State, x: Tensor
) -> tuple[Tensor, Tensor, State]:
    """Logits on all of x, the sum over samples of `of(logits)`, and that sum's gradient for the parameters."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    gradient = [torch.zeros_like(value) for value in leaves.values()]
    total = torch.zeros((), device=x.device)
    outputs = []
    for part in chunks(x):
        with torch.enable_grad():
            z = logits(leaves, part)
            value = of(z).sum()
            step = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        torch._foreach_add_(*zip(*[(g, s) for g, s in zip(gradient, step, strict=True) if s is not None], strict=True))
        total += value.detach()
        outputs.append(z.detach())
    return torch.cat(outputs), total, dict(zip(params, gradient, strict=True))


def entropy(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits) of each sample, in nats."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)
