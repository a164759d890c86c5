"""Scoring: personalize on a client's unlabelled data, compare with the labels afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upfl.contract import CrossFitted, Personalized, Personalizer
from upfl.data.federation import ROLES, Federation, Role
from upfl.data.inputs import Inputs
from upfl.engine.clients import newcomer, validation_client
from upfl.engine.group import Group
from upfl.state import State, all_aligned

# A score's name, whose it is, and its column in their counts.
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

    @property
    def validation(self) -> float:
        return percent(self.training[:, 1], self.training[:, 2])

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


def percent(correct: Tensor, samples: Tensor) -> float:
    """Accuracy over the samples of all clients."""
    return 100 * int(correct.sum()) / max(int(samples.sum()), 1)


def evaluate(
    federation: Federation,
    inputs: Inputs,
    personalizer: Personalizer[Any],
    given: CrossFitted,
    seed: int,
    group: Group,
    memory: Callable[[int], State | None] = lambda client: None,
    limit: int | None = None,
) -> Scores:
    """Score a personalizer on every client (or the first `limit` of each kind), shared out among the workers."""
    training = torch.zeros(len(federation.training), 3, dtype=torch.int64)
    new = torch.zeros(len(federation.new), 3, dtype=torch.int64)
    steps = torch.zeros(len(federation.new), dtype=torch.int64)
    jobs = [("training", i) for i in range(min(len(training), limit or len(training)))]
    jobs += [("new", i) for i in range(min(len(new), limit or len(new)))]
    held = {"training": federation.training.sizes() - federation.training.train_counts, "new": federation.new.sizes()}
    sizes = [int(held[kind][i]) for kind, i in jobs]
    for kind, i in group.share(jobs, sizes):
        group.check()
        if kind == "training":
            indices = federation.training.validation(i)
            if len(indices):
                client = validation_client(federation, inputs, seed, i)
                own = memory(i)
                own = None if own is None else all_aligned(own)
                personalized = personalizer.personalize(given.without(i), client, own)
                training[i] = count_correct(personalized, inputs.y(indices))
        else:
            personalized = personalizer.personalize(given.published, newcomer(federation, inputs, seed, i))
            new[i] = count_correct(personalized, inputs.y(federation.new.all(i)))
            steps[i] = personalized.diary.steps
    for counts in (training, new, steps):
        group.sum_(counts)
    return Scores(training, new, steps)


def by_architecture(federation: Federation, training: Tensor, new: Tensor) -> dict[str, dict[str, Any]]:
    """Scores of the clients of each architecture, where clients differ in that; None where none was scored."""
    if not federation.architectures:
        return {}
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


def count_correct(personalized: Personalized, y: Tensor) -> Tensor:
    before, after = ((logits.argmax(1) == y).sum() for logits in (personalized.before, personalized.logits))
    return torch.tensor([int(before), int(after), len(y)])
