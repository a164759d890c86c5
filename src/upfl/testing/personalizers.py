"""What the contract asks of a personalizer, each a function that raises `CheckError`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upfl.config import Config
from upfl.contract import Personalized, Personalizer, Published, Unlabelled
from upfl.data.inputs import Inputs
from upfl.engine.evaluate import Scores, evaluate
from upfl.engine.fitting import fit_needs
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import one_thread
from upfl.methods import PERSONALIZERS, make_personalizer
from upfl.state import State
from upfl.testing.parts import Parts, parts_of, require, same_bits, small, snapshot

EVALUATED = 2  # clients of each kind


@dataclass(frozen=True)
class Case:
    """A personalizer over a training, a newcomer, and what the newcomer came to."""

    parts: Parts
    name: str
    method: Personalizer[Any]
    client: Unlabelled
    first: Personalized
    heard: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Parts, name: str) -> Case:
        method, client = parts.personalizers[name], parts.population.newcomer(1)
        return cls(parts, name, method, client, method.personalize(parts.published, client))

    @property
    def classes(self) -> int:
        return len(self.parts.federation.source.class_names)


def check_personalizer(
    personalizer: str | type[Personalizer[Any]],
    *,
    training: str = "fedavg",
    model: Any = None,
    settings: Sequence[str] = (),
) -> None:
    """Check a registered personalizer, by its name or its class, over a training that it fits."""
    name = personalizer if isinstance(personalizer, str) else personalizer.name
    known = PERSONALIZERS.get(name) is personalizer or isinstance(personalizer, str)
    require(known, f"{name}: register it first")
    check_personalizers(small(training, model, settings), [name])


def check_personalizers(config: Config, names: Sequence[str]) -> None:
    """Check several over a run's training, with what they need fitted once for all of them."""
    with one_thread(), torch.no_grad():
        parts = parts_of(config, names)
        wanted = list(parts.personalizers.values())
        given, _ = fit_needs(wanted, parts.published, parts.population, Group())
        for name in names:
            case = Case.of(replace(parts, given=given), name)
            for check in PERSONALIZER_CHECKS:
                check(case)


def changes_neither_the_published_state_nor_the_client(case: Case) -> None:
    _unchanged(case, case.client)
    if (memory := case.parts.memory(1)) is not None:
        _unchanged(case, case.parts.population.validating(1), memory)


def _unchanged(case: Case, client: Unlabelled, memory: State | None = None) -> None:
    published = case.parts.published
    states = published.state, published.fitted, *published.members, memory or {}
    before, x = [snapshot(state) for state in states], client.x.clone()
    case.method.personalize(published, client, memory).predict_logits(client.x)
    for state, kept in zip(states, before, strict=True):
        same_bits(state, kept, "personalize changed what it was given")
    require(torch.equal(client.x, x), "personalize changed the client's inputs")


def predicts_its_own_and_later_data(case: Case) -> None:
    first, x = case.first, case.client.x
    for what, logits in (("logits", first.logits), ("before", first.before)):
        require(logits.shape == (len(x), case.classes), f"{what}: shape {list(logits.shape)}")
        require(logits.isfinite().all() and not logits.requires_grad, f"{what}: not finite, or with a gradient")
    own = first.predict_logits(x)
    if case.method.later == "before":
        _close(own, first.before, "later = 'before', and the predictor is not the model as it was")
    elif case.method.later == "similar":
        share = (own.argmax(1) == first.logits.argmax(1)).double().mean()
        require(
            share >= 0.8, f"later = 'similar', and the predictor agrees with `logits` on {share:.0%} of the samples"
        )
    else:
        _close(own, first.logits, "later = 'same', and the predictor says something else than `logits`")
    require(torch.equal(first.predict(x), own.argmax(1)), "predict is not the largest of predict_logits")
    later = case.parts.population.newcomer(2).x
    said = first.predict_logits(later)
    require(said.shape == (len(later), case.classes), f"predict_logits: shape {list(said.shape)}")
    require(said.isfinite().all(), "predict_logits: not finite")
    require(torch.equal(first.predict_logits(later), said), "predicting changes the predictor")
    _close(first.predict_logits(later[:1]), said[:1], "a prediction depends on the samples beside it")


def _close(ours: Tensor, theirs: Tensor, message: str) -> None:
    require(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), message)


def before_is_the_published_model(case: Case) -> None:
    training = case.parts.training
    if not training.serves_newcomers:  # there is no model before: the members' models are all there is
        require(torch.equal(case.first.before, case.first.logits), "before: there is no published model")
        return
    with torch.no_grad():
        logits = training.logits(training.start(case.parts.published, case.client, None), case.client.x)
    _close(case.first.before, logits, "before: not what the published model says")


def the_diary_says_what_was_done(case: Case) -> None:
    diary = case.first.diary
    require(diary.decision, "the diary has no decision")
    require(
        0 <= diary.steps < len(diary.entropy), f"the diary has {diary.steps} steps and {len(diary.entropy)} entries"
    )
    most = math.log(case.classes) + 1e-4
    require(all(0 <= value <= most for value in diary.entropy), f"an entropy is not from 0 to {most:.3g} nats")
    require(all(math.isfinite(value) for value in diary.loss), "a loss is not finite")


def a_single_sample_is_enough(case: Case) -> None:
    alone = case.method.personalize(case.parts.published, replace(case.client, x=case.client.x[:1]))
    require(alone.logits.shape == (1, case.classes), f"one sample: shape {list(alone.logits.shape)}")
    require(alone.logits.isfinite().all(), "one sample: not finite")


def is_a_function_of_its_arguments(case: Case) -> None:
    """After other clients, and by another object: the same bits."""
    again = make_personalizer(case.name, case.parts.training, case.method.hyper)
    for who in (case.method, again):
        _same(who.personalize(case.parts.published, case.client), case.first, "personalized again")


def a_file_changes_nothing(case: Case) -> None:
    published = case.parts.published
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create(Path(path) / "run", case.parts.config)
        folder.save_best(published)
        loaded = folder.load_best(published.round)
        _same(case.method.personalize(loaded, case.client), case.first, "personalized from a stored state")


def _same(ours: Personalized, theirs: Personalized, what: str) -> None:
    require(torch.equal(ours.logits, theirs.logits), f"{what}: other bits")
    require(ours.diary == theirs.diary, f"{what}: another diary")


class Listening(Personalizer[Any]):
    """Does what another one does and keeps what came of it."""

    def __init__(self, inner: Personalizer[Any]) -> None:
        super().__init__(inner.training, inner.hyper)
        self.inner, self.heard = inner, list[Tensor]()

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        personalized = self.inner.personalize(published, client, memory)
        self.heard.append(personalized.logits)
        return personalized


def labels_of_new_clients_do_not_count(case: Case) -> None:
    """With other labels in the source the predictions are the same to the bit, and only new clients' scores change."""
    parts = case.parts
    labels = parts.federation.source.labels.copy()
    new = parts.federation.new.indices
    labels[new] = (labels[new] + 1 + np.arange(len(new)) % 9) % 10
    source = replace(parts.federation.source, labels=labels)
    other = replace(parts, federation=replace(parts.federation, source=source), inputs=Inputs(source))
    (scores, heard), (other_scores, other_heard) = (evaluated(one, case.method, parts.memory) for one in (parts, other))
    aside = min(int(parts.federation.training.held_out.sum()), EVALUATED)
    require(len(heard) == len(other_heard) == 2 * EVALUATED + aside, "not every client was personalized")
    for ours, theirs in zip(heard, other_heard, strict=True):
        require(torch.equal(ours, theirs), "with other labels of new clients there are other predictions: labels leak")
    require(
        torch.equal(other_scores.training, scores.training), "training clients' scores depend on new clients' labels"
    )
    require(not torch.equal(other_scores.new[:, 1], scores.new[:, 1]), "new clients' scores do not depend on labels")


def evaluated(
    parts: Parts, method: Personalizer[Any], memory: Callable[[int], State | None]
) -> tuple[Scores, list[Tensor]]:
    listening = Listening(method)
    scores = evaluate(parts.population, listening, parts.given, Group(), memory, EVALUATED)
    return scores, listening.heard


PERSONALIZER_CHECKS: tuple[Callable[[Case], None], ...] = (
    changes_neither_the_published_state_nor_the_client,
    predicts_its_own_and_later_data,
    before_is_the_published_model,
    the_diary_says_what_was_done,
    a_single_sample_is_enough,
    is_a_function_of_its_arguments,
    a_file_changes_nothing,
    labels_of_new_clients_do_not_count,
)
