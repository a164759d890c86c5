"""PFL-Sampled and PFL-Ensemble: training clients' own models for a newcomer, the paper's baselines on FedPer.

    PFL-Sampled:   one training client's whole model, drawn at random for each newcomer
    PFL-Ensemble:  the mean of the logits of all training clients' models

A training client that validates uses its own model, so both have one validation accuracy.

These two hand training clients' personal layers to newcomers. The paper has them as baselines only, because that may
compromise those clients' privacy; the ensemble also costs the transfer and computation of own layers for every training
client.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from upfl.contract import Diary, Hyper, Personalized, Personalizer, Predictor, Published, Training, Unlabelled
from upfl.personalize.adaptation import entropy
from upfl.state import State


class _Members(Personalizer[Hyper]):
    """What both have in common: a client with a memory uses it, a newcomer uses members' models."""

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        if training.publishes_memory:
            return None
        return f"{training.name} does not publish training clients' models"

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        if memory is not None:
            models: Sequence[State] = [self.training.start(published, client, memory)]
            decision = "the client's own model"
        else:
            members = self.choose(published, client)
            models = _Lazy(self.training, published, client, members)
            decision = self.describe(members)
        predictor = Predictor(self.training, models)
        logits = predictor.logits(client.x)
        diary = Diary(entropy=[entropy(logits).mean().item()], decision=decision)
        return Personalized(logits, logits, predictor, diary)

    @abstractmethod
    def choose(self, published: Published, client: Unlabelled) -> list[int]:
        """The training clients whose models the newcomer receives."""

    @abstractmethod
    def describe(self, members: list[int]) -> str: ...


class Sampled(_Members):
    name = "sampled"
    title = "a random training client's model"

    def choose(self, published: Published, client: Unlabelled) -> list[int]:
        return [int(torch.randint(len(published.members), (1,), generator=client.generator("sampled member")))]

    def describe(self, members: list[int]) -> str:
        return f"training clients' model number {members[0]}, drawn at random"


class Ensemble(_Members):
    name = "ensemble"
    title = "all training clients' models"

    def choose(self, published: Published, client: Unlabelled) -> list[int]:
        return list(range(len(published.members)))

    def describe(self, members: list[int]) -> str:
        return f"the mean of the logits of {len(members)} training clients' models"


class _Lazy(Sequence[State]):
    """Members' models, made when they are used: all of them at once would not fit into memory."""

    def __init__(self, training: Training[Any], published: Published, client: Unlabelled, members: list[int]) -> None:
        self.training, self.published, self.client, self.members = training, published, client, members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        return self.training.start(self.published, self.client, self.published.members[self.members[index]])
