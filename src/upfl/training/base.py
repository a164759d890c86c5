"""The contract of a training algorithm: pure functions over named tensors.

A round of a training is a fold over its clients. For each client that takes part:

    carry = begin(server, memory, client)          what the client works on
    carry, loss = step(carry, batch, round)        once for each batch of each phase
    up, memory = finish(server, carry, client)     what goes up, what the client keeps

and then, once, `server = aggregate(server, total, round)`, where `total` is the sum of what went up. The sum is all the
server ever sees of the clients, so partial sums can be formed anywhere and merged in any order. A client that is left
out changes neither the sum nor its memory.

`step` does no I/O, keeps no state of its own and has no Python branch that depends on data or on the round, so it can
be vectorized over clients, and recorded. It may change the tensors of the carry in place: `begin` makes them the
client's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from upfl.models import Model
from upfl.randomness import generator
from upfl.state import State, byte_size, contiguous, prefixed, select

Split = Literal["train", "validation", "public"]


class Hyper(BaseModel):
    """Hyper-parameters, beside the method that uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LocalHyper(Hyper):
    """What all local training by SGD has in common."""

    iterations: int = Field(20, ge=1, description="local iterations a round")
    batch_size: int = Field(64, ge=1)
    weight_decay: float = Field(1e-4, ge=0)
    clip: float = Field(10.0, gt=0, description="largest gradient norm of each model")
    decay: float = Field(0.99, gt=0, le=1, description="factor on every learning rate for ten rounds")
    aggregation: Literal["uniform", "samples"] = Field("uniform", description="a client's weight in the mean")

    def rate(self, rate: float, round: int) -> float:
        """A learning rate after `round` rounds."""
        factor: float = self.decay ** (round / 10)
        return rate * factor


@dataclass(frozen=True)
class Batch:
    """A batch of a client's samples. With a mask, samples where it is 0 are padding and must not count."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    noise: State = field(default_factory=dict)  # what the phase asked for, a row for each sample
    index: Tensor | None = None  # the samples' places in their split

    def weight(self) -> Tensor:
        """Each sample's weight in a mean over the batch."""
        if self.mask is None:
            return torch.full(self.y.shape, 1 / len(self.y), dtype=self.x.dtype, device=self.x.device)
        return self.mask / self.mask.sum()


@dataclass(frozen=True)
class Architecture:
    """One of the models that clients may have, and the width of the adaptation model that goes with it."""

    model: Model
    adaptation_width: int | None = None  # where None, the training's


@dataclass(frozen=True)
class Task:
    """What is to be learned: the model, and the number of training clients that exist.

    Where clients differ in their models, `architectures` has them by name. `public` are the unlabelled samples that
    everyone has, in the order of the split of that name.
    """

    model: Model
    classes: int
    clients: int
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    public: Tensor | None = None


class Client(Protocol):
    """A training client as its own local code sees it."""

    @property
    def id(self) -> int: ...

    @property
    def round(self) -> int: ...

    @property
    def seed(self) -> int:
        """The run's."""

    @property
    def architecture(self) -> str:
        """The name of its model's architecture, where clients differ in that; else empty."""

    @property
    def count(self) -> int:
        """The number of samples in its train split."""

    def generator(self, purpose: str) -> torch.Generator: ...

    def batches(self, split: Split, size: int) -> Iterator[Batch]:
        """One pass over a split, in order."""


@dataclass(frozen=True)
class Unlabelled:
    """A client as a personalizer sees it: inputs, and a seed of its own. There are no labels here."""

    id: int
    x: Tensor
    seed: int = 0
    architecture: str = ""

    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.seed, "personalize", self.id, purpose)


Step = Callable[[State, Batch, int], tuple[State, Tensor]]


@dataclass(frozen=True)
class Noise:
    """Random numbers that a step needs for each sample: drawn by the engine, so that `step` stays a pure function."""

    kind: Literal["normal", "uniform"]
    size: int


@dataclass(frozen=True)
class Phase:
    """A part of a client's round: so many batches of a split, each given to `step`."""

    step: Step
    iterations: int
    batch_size: int
    split: Split = "train"
    noise: Mapping[str, Noise] = field(default_factory=dict)
    cost: float = 1.0  # gradient evaluations in a step: forward and backward passes of the prediction model


class Total(Mapping[str, Tensor]):
    """The sum of what the clients sent, and how many they were."""

    count: int

    @abstractmethod
    def mean(self, name: str) -> Tensor:
        """The entry divided by the sum of the entry `weight`, in the type in which it was sent."""


@dataclass(frozen=True)
class Published:
    """What a trained federation hands to newcomers: named tensors, and the rounds that led to them.

    `members` are training clients' own layers, read one at a time; only trainings that say so (`publishes_memory`) hand
    them out, because they may tell about a client's data. `fitted` is what was fitted after the training, over the same
    clients, for personalizers that need it: a calibration, a gate.
    """

    state: State
    round: int
    members: Sequence[State] = ()
    fitted: State = field(default_factory=dict)


H = TypeVar("H", bound=Hyper)


class Stage(ABC, Generic[H]):
    """Rounds over clients, as the engine runs them: a training, or what is fitted over a trained model."""

    vectorizes: ClassVar[bool] = False  # whether its steps are tested under torch.func.vmap and recorded
    remembers: ClassVar[bool] = False  # whether clients keep a memory between rounds
    scales: ClassVar[Mapping[str, int]] = {}  # fixed-point bits of what goes up, by name; 40 where silent

    @abstractmethod
    def init(self, generator: torch.Generator) -> State:
        """The server's state before the first round."""

    def memory(self, client: Client) -> State:
        """What a client remembers before it first takes part: a function of the seed and the client."""
        return {}

    @abstractmethod
    def phases(self, round: int) -> tuple[Phase, ...]: ...

    @abstractmethod
    def begin(self, server: State, memory: State, client: Client) -> State: ...

    @abstractmethod
    def finish(self, server: State, carry: State, client: Client) -> tuple[Mapping[str, Tensor], State]:
        """(what goes up, what the client keeps)"""

    @abstractmethod
    def aggregate(self, server: State, total: Total, round: int) -> State:
        """The server's next state. The old one is used up: a training with a large state may change it in place."""


class Training(Stage[H]):
    """A training algorithm. Subclasses set `name`, `title` and `Hyper`, and write the functions of the contract."""

    name: ClassVar[str]
    title: ClassVar[str]
    Hyper: ClassVar[type[Any]]
    adaptation: Model | None = None  # g, where the training learns one
    publishes_memory: ClassVar[bool] = False  # whether newcomers receive training clients' memories
    starts_from_memory: ClassVar[bool] = False  # whether a training client's own model is made of its memory
    heterogeneous: ClassVar[bool] = False  # whether clients may differ in architecture; they share a public set
    serves_newcomers: ClassVar[bool] = True  # whether `start` gives a model without a memory

    def __init__(self, task: Task, hyper: H) -> None:
        self.task = task
        self.model = task.model
        self.hyper = hyper

    def publish(self, server: State) -> State:
        """What newcomers receive."""
        return server

    @abstractmethod
    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        """The parameters of the model before personalization: a newcomer's (no memory) or a training client's own.

        Most trainings give everyone the same model and look neither at the client's data nor at its architecture.
        """

    @property
    def client_models(self) -> Mapping[str, Model]:
        """The prediction models that clients may have, by the name of their architecture."""
        return {"": self.model}

    def logits(self, params: State, x: Tensor) -> Tensor:
        """What a client's model says about x, as a differentiable function of its parameters.

        The parameters are all that tells one client's model from another's, so that a personalized model can be stored.
        """
        return self.model.apply(params, x)

    def features(self, params: State, x: Tensor) -> Tensor:
        """What a client's model makes of x before its last layer, a row for each sample."""
        return self.model[:-1].apply(params, x).flatten(1)

    @property
    def size(self) -> int:
        """About how many values a worker holds of the server's state or of its sum: for the memory forecast."""
        return self.model.size + (self.adaptation.size if self.adaptation else 0)

    def bytes_down(self, server: State, round: int) -> int:
        """What a client receives in a round: the server's state, unless some of it stays there."""
        return byte_size(server)

    def bytes_up(self, sizes: Mapping[str, int]) -> int:
        """What a client sends in a round: all that goes into the sum (bytes by name), in the types it is sent in."""
        return sum(sizes.values())

    def remark(self) -> str:
        """What a user should know before the first round; mostly nothing."""
        return ""

    def facts(self, server: State) -> dict[str, float]:
        """Numbers about the server's state that belong into the metrics."""
        return {}

    @abstractmethod
    def local_rate(self, round: int) -> float:
        """The learning rate of local training, for personalizers that take it over."""


L = TypeVar("L", bound=LocalHyper)


class LocalTraining(Training[L]):
    """Clients start from the server's models, train locally, send the change; the server adds the mean change.

    psi, and phi where there is one, live in the state under these names: newcomers receive these and nothing else.
    """

    def init(self, generator: torch.Generator) -> State:
        return prefixed("psi", self.model.init(generator))

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase(self.step, self.hyper.iterations, self.hyper.batch_size, cost=self.step_cost),)

    @property
    def step_cost(self) -> float:
        """Gradient evaluations in a step. One is three matrix products a layer: forward, and backward to both sides."""
        return 1.0

    def begin(self, server: State, memory: State, client: Client) -> State:
        return self.carry(server)

    def carry(self, models: State) -> State:
        """A copy of models to train, and what the steps need beside them."""
        return self.model.layout({name: value.clone() for name, value in models.items()})

    @abstractmethod
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        """One local step: the new carry and the batch's loss."""

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        # A power of two keeps weighted values within the range of the sum and cancels in the mean.
        weight = client.count / 1024 if self.hyper.aggregation == "samples" else 1
        change = {name: (carry[name] - value).mul_(weight) for name, value in server.items()}
        return contiguous(change) | {"weight": torch.tensor(float(weight))}, {}

    def aggregate(self, server: State, total: Total, round: int) -> State:
        return {name: value + total.mean(name).to(value) for name, value in server.items()}

    def publish(self, server: State) -> State:
        return {name: value for name, value in server.items() if name.startswith(("psi.", "phi."))}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        return self.model.layout(select(published.state, "psi"))
