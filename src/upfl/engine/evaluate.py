"""Scoring: personalize on a client's unlabelled data, compare with the labels afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upfl.contract import CrossFitted, Personalized, Personalizer, Published
from upfl.data.federation import ROLES, Federation, Role
from upfl.engine.clients import Population
from upfl.engine.group import Group
from upfl.state import State, all_aligned

Memory = Callable[[int], State | None]  # a training client's own, where its model is made of that

# A score's name, the clients that it is of, and its column in their counts.
SCORES: tuple[tuple[str, Role, int], ...] = (
    ("validation", "training", 1),
    ("test", "new", 1),
    ("test_before", "new", 0),
)


@dataclass(frozen=True)
class Scores:
    """Correct predictions of each client, with its size, for one personalizer."""

    training: Tensor  # [clients, 3]: correct before, correct after, samples of the validation split
    new: Tensor  # [clients, 3]: the same for a new client's data
    steps: Tensor  # [clients]: adaptation steps behind each new client's model
    held_out: Tensor  # [clients]: whether a training client never trains

    @property
    def validation(self) -> float:
        return validation(self.training, self.held_out)

    @property
    def validation_own(self) -> dict[str, float]:
        """Where some are held out, of the others on their own validation splits."""
        counts = self.training[~self.held_out]
        return {"validation_own": percent(counts[:, 1], counts[:, 2])} if self.held_out.any() else {}

    @property
    def test(self) -> float:
        return percent(self.new[:, 1], self.new[:, 2])

    @property
    def before(self) -> float:
        return percent(self.new[:, 0], self.new[:, 2])

    @property
    def mean_steps(self) -> float:
        scored = self.new[:, 2] > 0
        return int(self.steps[scored].sum()) / max(int(scored.sum()), 1)


def validation(training: Tensor, held_out: Tensor) -> float:
    """By which rounds are chosen: of the clients that are held out, or, where none are, of all that train."""
    counts = training[held_out] if held_out.any() else training
    return percent(counts[:, 1], counts[:, 2])


def percent(correct: Tensor, samples: Tensor) -> float:
    """Accuracy over the samples of all clients."""
    return 100 * int(correct.sum()) / max(int(samples.sum()), 1)


def evaluate(
    population: Population,
    personalizer: Personalizer[Any],
    given: CrossFitted,
    group: Group,
    memory: Memory = lambda client: None,
    limit: int | None = None,
) -> Scores:
    """Score a personalizer on every client (or the first `limit` of each kind), shared out among the workers."""
    training = validation_counts(population, personalizer, given, group, memory, limit)
    new, steps = newcomer_counts(population, personalizer, given.published, group, limit)
    return Scores(training, new, steps, held_out(population.federation, training))


def held_out(federation: Federation, counts: Tensor) -> Tensor:
    """Whether each training client that counts are of is held out."""
    return torch.from_numpy(federation.training.held_out[: len(counts)])


def validation_counts(
    population: Population,
    method: Personalizer[Any],
    given: CrossFitted,
    group: Group,
    memory: Memory,
    limit: int | None,
) -> Tensor:
    """What a personalizer gets right of each training client's validation data: [clients, 3]."""
    federation = population.federation
    sizes, chosen = federation.training.counts("validation"), validating(federation, limit)
    counts = no_counts(chosen)
    for i in group.share(chosen, sizes[chosen].tolist()):
        if sizes[i]:
            group.check()
            published = shown_to(i, federation, given)
            counts[i] = score_validation(population, method, published, i, memory(i))
    group.sum_(counts)
    return counts


def no_counts(clients: Sequence[int]) -> Tensor:
    """[clients, 3]: of very many clients of which a few are scored, those up to the last that is."""
    return torch.zeros(max(clients, default=-1) + 1, 3, dtype=torch.int64)


def validating(federation: Federation, limit: int | None) -> list[int]:
    """The training clients that are scored: all, or the first `limit` of those that train and of those held out."""
    held_out = federation.training.held_out
    return [int(i) for kind in (~held_out, held_out) for i in np.flatnonzero(kind)[:limit]]


def shown_to(client: int, federation: Federation, given: CrossFitted) -> Published:
    """What a training client is scored by: nothing that was fitted on its labels."""
    return given.published if federation.training.held_out[client] else given.without(client)


def score_validation(
    population: Population, personalizer: Personalizer[Any], published: Published, client: int, memory: State | None
) -> Tensor:
    """A training client's counts on its validation data, which it personalizes on without labels."""
    own = None if memory is None else all_aligned(memory)
    personalized = personalizer.personalize(published, population.validating(client), own)
    return count_correct(personalized, population.inputs.y(population.federation.training.validation(client)))


def newcomer_counts(
    population: Population,
    personalizer: Personalizer[Any],
    published: Published,
    group: Group,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What a personalizer gets right of each new client's data, [clients, 3], and the steps that it took."""
    federation = population.federation
    sizes = federation.new.sizes()[:limit]
    counts = torch.zeros(len(sizes), 3, dtype=torch.int64)
    steps = torch.zeros(len(sizes), dtype=torch.int64)
    scored = [i for i in range(len(sizes)) if federation.has_labels(i)]
    for i in group.share(scored, sizes[scored].tolist()):
        group.check()
        counts[i], steps[i] = score_newcomer(population, personalizer, published, i)
    group.sum_(counts)
    group.sum_(steps)
    return counts, steps


def score_newcomer(
    population: Population, personalizer: Personalizer[Any], published: Published, client: int
) -> tuple[Tensor, int]:
    """A new client's counts and steps: it personalizes without labels, which are looked at afterwards."""
    personalized = personalizer.personalize(published, population.newcomer(client))
    return count_correct(personalized, population.newcomer_labels(client)), personalized.diary.steps


def count_correct(personalized: Personalized, y: Tensor) -> Tensor:
    """(correct before, correct after, samples); those without a label do not count"""
    before, after = ((logits.argmax(1) == y).sum() for logits in (personalized.before, personalized.logits))
    return torch.tensor([int(before), int(after), int((y >= 0).sum())])


def unscored(
    population: Population, personalizer: Personalizer[Any], published: Published, limit: int | None = None
) -> list[dict[str, Any]]:
    """What can be told of new clients without labels: their class mix, and the accuracy that is estimated."""
    federation, found = population.federation, []
    for i in range(len(federation.new))[:limit]:
        if federation.has_labels(i):
            continue
        personalized = personalizer.personalize(published, population.newcomer(i))
        diary = personalized.diary
        mix = diary.mix or personalized.logits.double().softmax(1).mean(0).tolist()
        found.append(
            {
                "client": i,
                "name": federation.name("new", i),
                "samples": int(federation.new.sizes()[i]),
                "mix": {name: round(share, 4) for name, share in zip(federation.source.class_names, mix, strict=True)},
                "estimates": [[one.value, one.low, one.high] for one in diary.accuracy],
            }
        )
    return found


def by_architecture(federation: Federation, training: Tensor, new: Tensor) -> dict[str, dict[str, Any]]:
    """Scores of the clients of each architecture, where clients differ in that; None where none was scored."""
    if not federation.architectures:
        return {}
    if federation.training.held_out.any():
        training = training * held_out(federation, training).unsqueeze(1)
    scores: dict[str, dict[str, Any]] = {}
    for name in federation.architectures:
        held = {
            role: counts[[federation.architecture(role, i) == name for i in range(len(counts))]]
            for role, counts in zip(ROLES, (training, new), strict=True)
        }
        scores[name] = {
            score: percent(held[role][:, column], held[role][:, 2]) if held[role][:, 2].any() else None
            for score, role, column in SCORES
        } | {"clients": int((held["new"][:, 2] > 0).sum())}
    return {"architectures": scores}
