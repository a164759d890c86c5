"""What the contract asks of a personalizer, over every training that it fits.

One test a pair: what was fitted for the pair, and what a client came to, are made once and looked at by every check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.conformance.common import Parts, corrects, of_every_pair, snapshot
from tests.runs import assert_same_bits
from tests.shifted import ShiftedInputs, shifted_given, shifted_state
from upfl.contract import Personalized, Personalizer, Published, Unlabelled
from upfl.data.inputs import Inputs
from upfl.engine.clients import newcomer, validation_client
from upfl.engine.evaluate import Scores, evaluate
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.methods import make_personalizer
from upfl.state import State

EVALUATED = 2  # clients of each kind


@of_every_pair
def test_a_personalizer_keeps_to_its_contract(name: str, personalizer: str, parts: Parts, tmp_path: Path) -> None:
    method, client = parts.personalizers[personalizer], newcomer(parts.federation, parts.inputs, 0, 1)
    first = changes_neither_the_published_state_nor_the_client(parts, method, client)
    if (memory := parts.memory(1)) is not None:
        validating = validation_client(parts.federation, parts.inputs, 0, 1)
        changes_neither_the_published_state_nor_the_client(parts, method, validating, memory)
    predicts_its_own_and_later_data(parts, personalizer, first, client)
    before_is_the_published_model(parts, first, client)
    the_diary_says_what_was_done(first)
    a_single_sample_is_enough(parts, method, client)
    is_a_function_of_its_arguments(parts, personalizer, first, client)
    a_file_changes_nothing(parts, method, first, client, tmp_path)
    neither_labels_of_new_clients_nor_places_in_memory_count(parts, method)


def changes_neither_the_published_state_nor_the_client(
    parts: Parts, method: Personalizer[Any], client: Unlabelled, memory: State | None = None
) -> Personalized:
    states = parts.published.state, parts.published.fitted, *parts.published.members, memory or {}
    before, x = [snapshot(state) for state in states], client.x.clone()
    personalized = method.personalize(parts.published, client, memory)
    personalized.predict_logits(client.x)
    for state, kept in zip(states, before, strict=True):
        assert_same_bits(state, kept)
    assert torch.equal(client.x, x)
    return personalized


def predicts_its_own_and_later_data(
    parts: Parts, personalizer: str, personalized: Personalized, client: Unlabelled
) -> None:
    assert personalized.logits.shape == personalized.before.shape == (len(client.x), 10)
    assert personalized.logits.isfinite().all()
    assert not personalized.logits.requires_grad
    own = personalized.predict_logits(client.x)
    if personalizer == "lame":  # own samples are predicted together, later ones by the model as it was
        torch.testing.assert_close(own, personalized.before, rtol=1e-4, atol=1e-5)
    elif corrects(personalizer) or personalizer == "auto":  # ... by what came of it
        assert (own.argmax(1) == personalized.logits.argmax(1)).double().mean() >= 0.8
    else:
        torch.testing.assert_close(own, personalized.logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(personalized.predict(client.x), own.argmax(1))
    later = newcomer(parts.federation, parts.inputs, 0, 2).x
    first = personalized.predict_logits(later)
    assert first.shape == (len(later), 10)
    assert first.isfinite().all()
    assert torch.equal(personalized.predict_logits(later), first)  # predicting changes nothing
    torch.testing.assert_close(personalized.predict_logits(later[:1]), first[:1], rtol=1e-4, atol=1e-5)


def before_is_the_published_model(parts: Parts, personalized: Personalized, client: Unlabelled) -> None:
    if not parts.training.serves_newcomers:  # there is no model before: the members' models are all there is
        assert torch.equal(personalized.before, personalized.logits)
        return
    with torch.no_grad():
        logits = parts.training.logits(parts.training.start(parts.published, client, None), client.x)
    torch.testing.assert_close(personalized.before, logits, rtol=1e-4, atol=1e-5)


def the_diary_says_what_was_done(personalized: Personalized) -> None:
    diary = personalized.diary
    assert diary.decision
    assert 0 <= diary.steps < len(diary.entropy)
    assert all(0 <= value <= math.log(10) + 1e-4 for value in diary.entropy)
    assert all(math.isfinite(value) for value in diary.loss)


def a_single_sample_is_enough(parts: Parts, method: Personalizer[Any], client: Unlabelled) -> None:
    personalized = method.personalize(parts.published, replace(client, x=client.x[:1]))
    assert personalized.logits.shape == (1, 10)
    assert personalized.logits.isfinite().all()


def is_a_function_of_its_arguments(parts: Parts, personalizer: str, first: Personalized, client: Unlabelled) -> None:
    """After other clients, and by another object: the same bits."""
    method = parts.personalizers[personalizer]
    again = make_personalizer(personalizer, parts.training, method.hyper)
    for who in (method, again):
        assert_same_result(who.personalize(parts.published, client), first)


def a_file_changes_nothing(
    parts: Parts, method: Personalizer[Any], first: Personalized, client: Unlabelled, path: Path
) -> None:
    folder, published = RunFolder.create(path / "run", parts.config), parts.published
    folder.save_best(published)
    loaded = folder.load_best(published.round)
    assert len(loaded.members) == len(published.members)
    assert_same_result(method.personalize(loaded, client), first)


def assert_same_result(ours: Personalized, theirs: Personalized) -> None:
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.diary == theirs.diary


class Listening(Personalizer[Any]):
    """Does what another one does and keeps what came of it."""

    def __init__(self, inner: Personalizer[Any]) -> None:
        super().__init__(inner.training, inner.hyper)
        self.inner, self.heard = inner, list[Tensor]()

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        personalized = self.inner.personalize(published, client, memory)
        self.heard.append(personalized.logits)
        return personalized


def neither_labels_of_new_clients_nor_places_in_memory_count(parts: Parts, method: Personalizer[Any]) -> None:
    """With other labels in the source the predictions are the same to the bit, and only new clients' scores change.

    So they are with everything four bytes further on: the state, what was fitted, members, memories and inputs.
    """
    labels = parts.federation.source.labels.copy()
    new = parts.federation.new.indices
    labels[new] = (labels[new] + 1 + np.arange(len(new)) % 9) % 10
    source = replace(parts.federation.source, labels=labels)
    relabelled = replace(parts, federation=replace(parts.federation, source=source), inputs=Inputs(source))
    moved = replace(parts, inputs=ShiftedInputs(parts.federation.source), given=shifted_given(parts.given))
    scores, heard = evaluated(parts, method, parts.memory)
    other_scores, other_heard = evaluated(relabelled, method, parts.memory)
    moved_scores, moved_heard = evaluated(moved, method, lambda id: shifted_state(parts.memory(id)))
    assert len(heard) == len(other_heard) == len(moved_heard) == 2 * EVALUATED
    for ours, other, third in zip(heard, other_heard, moved_heard, strict=True):
        assert torch.equal(other, ours)
        assert torch.equal(third, ours)
    assert torch.equal(other_scores.training, scores.training)
    assert not torch.equal(other_scores.new[:, 1], scores.new[:, 1])
    assert torch.equal(moved_scores.new, scores.new)


def evaluated(
    parts: Parts, method: Personalizer[Any], memory: Callable[[int], State | None]
) -> tuple[Scores, list[Tensor]]:
    listening = Listening(method)
    scores = evaluate(parts.federation, parts.inputs, listening, parts.given, 0, Group(), memory, EVALUATED)
    return scores, listening.heard
