"""From a run, or from a training's state, to a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from upfl import models
from upfl.bundle.card import federation_card
from upfl.bundle.manifest import (
    ArchitectureSection,
    FederationManifest,
    LayerSection,
    ModelSection,
    NamedSection,
    TaskSection,
    TrainingSection,
    version,
)
from upfl.bundle.model import Bundle
from upfl.bundle.write import require_new, write_folder
from upfl.contract import HasNeeds, Published, Training
from upfl.data.forms import Form
from upfl.data.inputs import Inputs
from upfl.engine.clients import Population
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.engine.rounds import one_thread
from upfl.errors import BundleError
from upfl.methods import make_personalizer, personalizer_class, row_name
from upfl.personalize.likeness import LikenessCheck
from upfl.safe.folder import expanded
from upfl.state import prefixed

if TYPE_CHECKING:
    from upfl.api import Run


def export(run: Run, out: str | Path, add: Sequence[str] = ()) -> Bundle:
    """Write the bundle of a finished run: its best row's state by validation accuracy, and all its personalizers.

    `none` is always among them, for comparison, where the training has a model for newcomers without personalization.
    `add` names personalizers that the run was not scored under; what they need is fitted here, over the run's clients.
    """
    require_new(out)
    rows = {row["row"]: row for row in run.result["rows"]}
    named = {name: row_name(run.training.name, name) for name in run.config.personalize}
    if unscored := [row for row in named.values() if row not in rows]:
        raise BundleError(f"{run.path}: no row '{unscored[0]}' was scored in this run; it has {', '.join(rows)}")
    scored = {name: rows[row] for name, row in named.items()}
    default = max(scored, key=lambda name: float(scored[name]["validation"]))
    config, source, published = run.config, run.federation.source, run.published(default)
    plain = ["none"] if run.training.serves_newcomers else []
    names = dict.fromkeys([*config.personalize, *add, *plain])
    personalizers = {name: config.personalizer_hyper(name) for name in names}
    needed: list[HasNeeds] = [LikenessCheck(run.training)]
    if add:
        needed += [make_personalizer(name, run.training, hyper) for name, hyper in personalizers.items()]
        published = replace(published, fitted={})
    with one_thread(), torch.no_grad():
        given, _ = fit_needs(needed, published, Population(run.federation, Inputs(source), config.seed), Group())
    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "rounds": run.result["rounds"],
        "partition": config.partition.model_dump(mode="json", exclude_defaults=True),
        "new_clients": len(run.federation.new),
        "seed": config.seed,
        "partition_seed": config.partition_seed,
        "notes": run.result["notes"],
        "scores": {
            name: {
                "round": row["best_round"],
                "validation": row["validation"],
                **({"before": row["test_before"], "after": row["test"]} if "test" in row else {}),
            }
            for name, row in scored.items()
        },
    }
    return write(
        out,
        task=config.dataset,
        classes=source.class_names,
        input=source.form,
        training=run.training,
        published=given.published,
        personalizers={name: hyper.model_dump(exclude_none=True) for name, hyper in personalizers.items()},
        default=default,
        summary=summary,
    )


def write(
    out: str | Path,
    *,
    task: str,
    classes: Sequence[str],
    input: Form,  # noqa: A002 - the manifest's word
    training: Training[Any],
    published: Published,
    personalizers: Mapping[str, Mapping[str, Any]],
    default: str,
    summary: Mapping[str, Any],
) -> Bundle:
    """Write what a training published as a bundle; `personalizers` are names with their hyper-parameters."""
    manifest = FederationManifest(
        made_with=version(),
        task=TaskSection(name=task, classes=tuple(classes), input=input),
        model=_layers(training.task.model),
        architectures={
            name: ArchitectureSection(layers=_layers(kind.model), adaptation_width=kind.adaptation_width)
            for name, kind in training.task.architectures.items()
        },
        training=TrainingSection(
            name=training.name,
            clients=training.task.clients,
            round=published.round,
            hyper=training.hyper.model_dump(mode="json", exclude_none=True),
        ),
        personalizers={
            name: personalizer_class(name).Hyper(**values).model_dump(mode="json", exclude_none=True)
            for name, values in personalizers.items()
        },
        default=default,
        fitted=tuple(dict.fromkeys(name.rpartition(".")[0] for name in published.fitted)),
        members=len(published.members),
        public=0 if training.task.public is None else len(training.task.public),
        summary=dict(summary),
    )
    state = prefixed("state", published.state) | prefixed("fitted", published.fitted)
    write_folder(out, manifest, state, published.members, federation_card(manifest))
    try:
        return Bundle.load(out)
    except BundleError:  # what nobody could load is not handed out
        shutil.rmtree(expanded(out))
        raise


def _layers(model: models.Model) -> ModelSection:
    made = model.describe()
    return NamedSection(**made) if isinstance(made, dict) else tuple(LayerSection(**layer) for layer in made)
