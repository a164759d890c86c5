"""A client's adaptation, step by step: what the personalizer sees (its loss, the entropy), and the accuracy.

The steps are those of the personalizer, which has no labels; the accuracy of the logits that it arrives at is worked
out here, afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from upfl.api import Run, accuracy
from upfl.contract import Personalizer, Published, Unlabelled
from upfl.engine.rounds import one_thread
from upfl.errors import ConfigError
from upfl.methods import row_name
from upfl.personalize.adaptation import entropy
from upfl.personalize.fedtta import EarlyStopped, OneStep
from upfl.personalize.tent import Tent
from upfl.safe.folder import write_file

FILE = "diary.json"


def write_diary(run: Run, steps: int, client: int = 0) -> list[dict[str, Any]]:
    """The diary of one new client under each of the run's personalizers that takes steps, stored in the run folder."""
    labels, unlabelled = run.labels(client), run.newcomer(client)
    diaries = []
    with one_thread(), torch.no_grad():
        for name, personalizer in run.personalizers.items():
            if not isinstance(personalizer, OneStep | EarlyStopped | Tent):
                continue
            trace = list(_steps(personalizer, run.published(name), unlabelled, steps))
            diaries.append(
                {
                    "row": row_name(run.training.name, name),
                    "client": client,
                    "samples": len(labels),
                    "accuracy": [accuracy(logits, labels) for logits, _ in trace],
                    "loss": [loss for _, loss in trace],
                    "entropy": [entropy(logits).mean().item() for logits, _ in trace],
                }
            )
    if not diaries:
        raise ConfigError(f"{run.path}: none of {', '.join(run.personalizers)} takes steps: there is no diary to write")
    write_file(run.path / FILE, (json.dumps(diaries, indent=1) + "\n").encode())
    return diaries


def _steps(
    personalizer: Personalizer[Any], published: Published, client: Unlabelled, steps: int
) -> Iterator[tuple[Tensor, float]]:
    """Logits and personalization loss before the first step and after each."""
    if isinstance(personalizer, Tent):
        for taken in range(steps + 1):
            tent = Tent(personalizer.training, personalizer.hyper.model_copy(update={"steps": taken}))
            personalized = tent.personalize(published, client)
            yield personalized.logits, personalized.diary.loss[-1]
        return
    assert isinstance(personalizer, OneStep | EarlyStopped)
    psi, phi = personalizer.training.guided(published, client, None)
    for _ in range(steps + 1):
        logits, loss, psi = personalizer.step(phi, psi, client.x, published.round)
        yield logits, loss
