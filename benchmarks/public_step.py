"""What clients of different models do to their teacher: `python -m benchmarks.public_step RUN... [--quick]`.

HeteroFedTTA's and heterogeneous TENT's clients adapt to the public set before they send their logits. For each run: how
much of the public set a training client's model puts into the client's own classes, how much of it is right (the
client's, and the teacher's, which is the mean over clients), before and after that step; then the same of the clients'
own validation data and of new clients (not with `--quick`: with ConvNets they digest for minutes). Labels of the public
set and of new clients are for this table alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upfl.contract import Personalizer, Published, Unlabelled
from upfl.engine.cohort import LocalCohort
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine, one_thread
from upfl.state import State
from upfl.training.fedmd import FedMD

Counts = tuple[float, ...]


def shares(before: Tensor, after: Tensor, y: Tensor) -> Counts:
    """In percent of the samples, before and after: right, then of classes that the client holds."""
    said, held = [logits.argmax(1) for logits in (before, after)], torch.unique(y[y >= 0])
    right = [(one == y).float().mean().item() for one in said]
    own = [torch.isin(one, held).float().mean().item() for one in said]
    return tuple(100 * share for share in (*right, *own))


def public(run: Engine[LocalCohort]) -> tuple[list[Counts], Counts]:
    """Each training client's shares of the public set, and what is right of the teachers that their logits make."""
    training, population, federation = run.training, run.setup.population, run.federation
    assert isinstance(training, FedMD)
    truth = population.inputs.y(federation.public)
    clients, sums = [], [torch.zeros(len(truth), training.task.classes, dtype=torch.float64) for _ in range(2)]
    for i in trained(run):
        on_public = Unlabelled(i, training.public, architecture=federation.architecture("training", i))
        said = personalized(training.adapt, Published({}, run.progress.round), on_public, run.cohort.own_memory(i))
        held = torch.unique(population.inputs.y(federation.training.train(i)))
        own = [100 * torch.isin(logits.argmax(1), held).float().mean().item() for logits in said]
        clients.append((*shares(*said, truth)[:2], *own))
        for total, logits in zip(sums, said, strict=True):
            total += logits
    return clients, shares(sums[0], sums[1], truth)[:2]


def trained(run: Engine[LocalCohort]) -> list[int]:
    return [int(i) for i in np.flatnonzero(~run.federation.training.held_out)]


def personalized(
    how: Personalizer[Any], published: Published, client: Unlabelled, memory: State | None
) -> tuple[Tensor, Tensor]:
    done = how.personalize(published, client, memory)
    return done.before, done.logits


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of hetero-fedtta or hetero-tent")
    parser.add_argument("--quick", action="store_true", help="without new clients, who digest first")
    options = parser.parse_args()
    print("| run | what | right before | after | in the client's own classes before | after |")
    print("|---|---|---:|---:|---:|---:|")
    for folder in options.runs:
        run = Engine.standing(RunFolder.open(folder))
        population, federation = run.setup.population, run.federation
        (how,) = run.setup.personalizers.values()
        with one_thread(), torch.no_grad():
            clients, teachers = public(run)
            published = run.published()
            validation = [
                shares(
                    *personalized(how, published, population.validating(i), run.cohort.own_memory(i)),
                    population.inputs.y(federation.training.validation(i)),
                )
                for i in trained(run)
            ]
            new = [
                shares(
                    *personalized(how, published, population.newcomer(i), None),
                    population.newcomer_labels(i),
                )
                for i in range(0 if options.quick else len(federation.new))
            ]
        rows = {
            "public set, the clients' models": np.mean(clients, 0),
            "public set, the teacher": teachers,
            "training clients' validation": np.mean(validation, 0),
        }
        if new:
            rows["new clients"] = np.mean(new, 0)
        for what, values in rows.items():
            cells = [f"{value:.1f}" for value in values] + ["", ""]
            print(f"| {folder.name} | {what} | {' | '.join(cells[:4])} |", flush=True)


if __name__ == "__main__":
    main()
