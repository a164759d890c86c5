"""Scoring a trained run anew: further personalizers, oracles, later data, newcomers of other sizes and class mixes.

Nothing is trained and nothing in the run changes. Every personalizer is scored on the same state, that of the last
checkpoint, so that all comparisons are paired. What personalizers need is fitted over the training clients as during
the run; new clients' labels are used to count right predictions, by oracles, and to draw newcomers with given classes.
New clients without labels have no part in a score; what can be told of them is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upfl.contract import Personalizer, Training, Unlabelled
from upfl.data.draft import MISSING
from upfl.data.federation import with_newcomers
from upfl.engine.clients import Population
from upfl.engine.evaluate import unscored, validation, validation_counts
from upfl.engine.fitting import fit_needs
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine, one_thread
from upfl.errors import ConfigError
from upfl.methods import make_personalizer, personalizer_class
from upfl.personalize.nothing import Nothing
from upfl.personalize.oracle import ORACLES, Oracle
from upfl.randomness import generator, seed_of
from upfl.suggest import unknown

Tell = Callable[[str], None]
USUAL = ("none", "calibrated", "label-shift", "tent")  # scored beside the run's own where none are named


@dataclass(frozen=True)
class Newcomers:
    """Draws of newcomers with so many classes and samples from all that new clients hold."""

    classes: int
    samples: int
    draws: int = 50


@dataclass
class Score:
    """A personalizer or an oracle on a set of clients."""

    name: str
    title: str
    bound: bool = False
    right: list[NDArray[np.bool_]] = field(default_factory=list)  # of each new client's samples that have labels
    asked: list[NDArray[np.int64]] = field(default_factory=list)  # which samples these are
    later: list[tuple[int, int]] = field(default_factory=list)  # right, samples: personalized on one half, other scored
    estimates: list[tuple[float, float, float, float]] = field(default_factory=list)  # value, low, high, truth
    validation: float | None = None
    unscored: list[dict[str, Any]] = field(default_factory=list)  # what is told of new clients without labels

    @property
    def accuracy(self) -> float:
        """In percent, if any new client has labels."""
        return 100 * float(np.concatenate(self.right).mean())


class Scorer:
    """A run's last state, with what the given personalizers and oracles need."""

    def __init__(
        self,
        folder: RunFolder,
        names: Sequence[str] = (),
        oracles: Sequence[str] = (),
        tell: Tell = lambda what: None,
        newcomers: Mapping[str, Any] | None = None,  # fields in which the new clients' partition differs from the run's
        drawn: Sequence[Newcomers] = (),  # what score_drawn will be asked for: refused before anything is fitted
    ) -> None:
        self.engine = Engine.standing(folder)
        self.config, self.federation, self.inputs = self.engine.config, self.engine.federation, self.engine.setup.inputs
        if newcomers:
            self.federation = with_newcomers(self.federation, self.config.partition, newcomers)
        self.population = Population(self.federation, self.inputs, self.config.seed)
        for kind in drawn:
            self._classes(kind)
        self.personalizers = {
            name: make_personalizer(name, self.engine.training, self.config.personalizer_hyper(name))
            for name in names or self._usual()
        }
        self.oracles: list[Oracle] = make_oracles(oracles, self.engine.training)
        with one_thread(), torch.no_grad():
            self.given, self.facts = fit_needs(
                [*self.personalizers.values(), *self.oracles],
                self.engine.published(),
                self.population,
                Group(),
                tell=tell,
            )

    def _usual(self) -> list[str]:
        names = dict.fromkeys([*USUAL, *self.config.personalize])
        return [name for name in names if personalizer_class(name).why_not(self.engine.training) is None]

    def score(self, inductive: bool = False, tell: Tell = lambda what: None) -> list[Score]:
        """On the federation's own new clients, and on training clients' validation data."""
        clients = [
            (self.population.newcomer(i), self.population.newcomer_labels(i))
            for i in range(len(self.federation.new))
            if self.federation.has_labels(i)
        ]
        scores = []
        with one_thread(), torch.no_grad():
            for name, personalizer in self.personalizers.items():
                tell(f"scoring {name}")
                score = self._personalizer(personalizer, clients, inductive)
                memory = self.engine.cohort.own_memory
                counts = validation_counts(self.population, personalizer, self.given, Group(), memory, None)
                score.validation = validation(counts, torch.from_numpy(self.federation.training.held_out))
                score.unscored = unscored(self.population, personalizer, self.given.published)
                scores.append(score)
            for oracle in self.oracles:
                tell(f"scoring {oracle.name}")
                scores.append(self._oracle(oracle, clients))
        return scores

    def score_drawn(self, kind: Newcomers) -> list[Score]:
        """On drawn newcomers; the same draws for every personalizer."""
        with one_thread(), torch.no_grad():
            clients = list(self._drawn(kind))
            return [self._personalizer(one, clients, inductive=True) for one in self.personalizers.values()]

    def _personalizer(
        self, personalizer: Personalizer[Any], clients: Sequence[tuple[Unlabelled, Tensor]], inductive: bool
    ) -> Score:
        score = Score(personalizer.name, personalizer.title)
        for client, y in clients:
            personalized = personalizer.personalize(self.given.published, client)
            asked = (y >= 0).nonzero().flatten().cpu()
            right = (personalized.logits.argmax(1) == y).cpu()[asked].numpy()
            score.right.append(right)
            score.asked.append(asked.numpy())
            if personalized.diary.accuracy:
                after = personalized.diary.accuracy[-1]
                score.estimates.append((after.value, after.low, after.high, float(right.mean())))
            if inductive and len(y) > 1:
                score.later.append(self._later(personalizer, client, y))
        return score

    def _later(self, personalizer: Personalizer[Any], client: Unlabelled, y: Tensor) -> tuple[int, int]:
        order = torch.randperm(len(y), generator=generator(self.config.seed, "halves", client.id))
        first, second = order[: (len(y) + 1) // 2], order[(len(y) + 1) // 2 :]
        half = replace(client, x=client.x[first])
        predicted = personalizer.personalize(self.given.published, half).predict(client.x[second])
        return int((predicted == y[second]).sum()), int((y[second] >= 0).sum())

    def _oracle(self, oracle: Oracle, clients: Sequence[tuple[Unlabelled, Tensor]]) -> Score:
        score = Score(oracle.name, oracle.title, bound=True)
        for client, labels in clients:
            known = labels >= 0
            y = labels[known].cpu()
            predicted, asked = oracle.predict(self.given.published, replace(client, x=client.x[known]), y)
            score.right.append((predicted == y[asked]).numpy())
            score.asked.append(known.nonzero().flatten().cpu()[asked].numpy())
        return score

    def _classes(self, kind: Newcomers) -> NDArray[np.int64]:
        """The classes that newcomers can be drawn from, if there are enough."""
        labels = self.federation.source.labels[self.federation.new.indices]
        present: NDArray[np.int64] = np.unique(labels[labels != MISSING])
        if not 1 <= kind.classes <= len(present):
            raise ConfigError(f"--classes {kind.classes}: new clients hold {len(present)} classes")
        return present

    def _drawn(self, kind: Newcomers) -> Iterator[tuple[Unlabelled, Tensor]]:
        pool = self.federation.new.indices
        labels = self.federation.source.labels[pool]
        present = self._classes(kind)
        rng = np.random.default_rng(seed_of(self.config.seed, "newcomers", kind.classes, kind.samples))
        for i in range(kind.draws):
            held = np.flatnonzero(np.isin(labels, rng.choice(present, kind.classes, replace=False)))
            indices = pool[rng.choice(held, min(kind.samples, len(held)), replace=False)]
            x = self.inputs.x(indices, float(rng.choice(self.federation.new.angles)))
            like = self.population.newcomer(i % len(self.federation.new))
            yield replace(like, id=i, x=x), self.inputs.y(indices)


def make_oracles(names: Sequence[str], training: Training[Any]) -> list[Oracle]:
    if names and (reason := Nothing.why_not(training)):
        raise ConfigError(f"oracles do not fit training '{training.name}': {reason}")
    for name in names:
        if name not in ORACLES:
            raise unknown("oracle", name, ORACLES)
    return [ORACLES[name](training) for name in names]
