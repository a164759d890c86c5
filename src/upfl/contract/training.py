"""A training algorithm: what it is made for, what it hands out, what it says about its model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from upfl.contract.clients import Unlabelled
from upfl.contract.stage import H, Stage
from upfl.models import Model
from upfl.state import AlignedStates, State, all_aligned, byte_size, set_first


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
    participants: int | None = None  # clients in a round; all where silent
    images: bool = False  # whether samples are images: channels, height, width


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

    def __post_init__(self) -> None:
        state, fitted = all_aligned(self.state), all_aligned(self.fitted)
        set_first(self, state=state, fitted=fitted, members=AlignedStates(self.members))


class Training(Stage[H]):
    """A training algorithm. Subclasses set `name`, `title` and `Hyper`, and write the functions of the contract."""

    name: ClassVar[str]
    title: ClassVar[str]
    Hyper: ClassVar[type[Any]]
    adaptation: Model | None = None  # g, where the training learns one
    publishes_memory: ClassVar[bool] = False  # whether newcomers receive training clients' memories
    starts_from_memory: ClassVar[bool] = False  # whether a training client's own model is made of its memory
    heterogeneous: ClassVar[bool] = False  # whether clients may differ in architecture; they share a public set
    memory_advice: ClassVar[str] = "fewer workers"  # what helps where its state does not fit the machine's memory
    serves_newcomers: ClassVar[bool] = True  # whether `start` gives a model without a memory
    takes_tokens: ClassVar[bool] = True  # whether samples may be whole numbers, which only an embedding can read
    takes_steps: ClassVar[bool] = True  # whether its models are made for steps down a gradient
    refuses_models: ClassVar[str] = ""  # why a model cannot be chosen for it, in words
    in_turn: ClassVar[bool] = False  # whether clients are asked in order, each once a pass, not drawn anew each round

    def __init__(self, task: Task, hyper: H) -> None:
        self.task = task
        self.model = task.model
        self.hyper = hyper

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        """Why this training does not fit a task, in words; None where it fits."""
        return None

    @classmethod
    def own_model(cls, shape: tuple[int, ...], classes: int, hyper: Any) -> Model | None:
        """The model for images or vectors of a shape, where the training does not take the configured one."""
        return None

    @classmethod
    def passes(cls, hyper: Any) -> int:
        """How many passes over the clients it takes, where they are asked in turn."""
        return 1

    @property
    def rounds_a_pass(self) -> int:
        """Rounds until every client was asked once, where they are asked in turn."""
        return -(-self.task.clients // (self.task.participants or self.task.clients))

    def turn(self, round: int) -> range:
        """The clients whose turn it is in a round, where they are asked in turn."""
        count = self.task.participants or self.task.clients
        first = round % self.rounds_a_pass * count
        return range(first, min(first + count, self.task.clients))

    def sent(self, server: State, round: int) -> State:
        """What clients receive in a round: the server's state, unless some of it stays there."""
        return server

    def publish(self, server: State) -> State:
        """What newcomers receive."""
        return server

    @abstractmethod
    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        """The parameters of the model before personalization: a newcomer's (no memory) or a training client's own.

        Most trainings give everyone the same model and look neither at the client's data nor at its architecture.
        """

    def model_of(self, params: State) -> Model:
        """The prediction model that parameters belong to."""
        return self.model

    @property
    def client_models(self) -> Mapping[str, Model]:
        """The prediction models that clients may have, by the name of their architecture."""
        return {"": self.model}

    def logits(self, params: State, x: Tensor) -> Tensor:
        """What a client's model says about x, as a differentiable function of its parameters.

        The parameters are all that tells one client's model from another's, so that a personalized model can be stored.
        """
        return self.model.apply(params, x)

    # An ensemble's models may begin alike: `logits` is `beyond` of what is `shared`, which is computed once for all.

    def shared(self, params: State, x: Tensor) -> Tensor:
        """What all models of an ensemble make of x; the parameters are those of any of them."""
        return x

    def beyond(self, params: State, shared: Tensor) -> Tensor:
        """What one of them says, from what is shared."""
        return self.logits(params, shared)

    def batchwise(self, params: State, x: Tensor) -> Tensor:
        """The same as `logits`, but normalised by statistics of x, where the model normalises by statistics of data."""
        return self.model_of(params).batchwise(params, x)

    def features(self, params: State, x: Tensor) -> Tensor:
        """What a client's model makes of x before its last layer, a row for each sample."""
        return self.model.features(params, x)

    @property
    def head(self) -> str | None:
        """The name of a linear layer that makes `logits` of `features`, where all clients' models have one."""
        return self.model.head

    @property
    def size(self) -> int:
        """About how many values a worker holds of the server's state or of its sum: for the memory forecast."""
        return self.model.size + (self.adaptation.size if self.adaptation else 0)

    def bytes_down(self, server: State, round: int) -> int:
        """The size of what a client receives in a round."""
        return byte_size(self.sent(server, round))

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
