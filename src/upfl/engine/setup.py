"""What a configuration describes, as objects: the data, the training, the personalizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from upfl import data, models
from upfl.config import Config
from upfl.contract import Personalizer, Task, Training, needs_of
from upfl.contract.personalizer import LEAST_CLIENTS
from upfl.data.federation import Federation
from upfl.data.forms import Pixels, Tokens
from upfl.data.inputs import Inputs
from upfl.data.large import federation_of
from upfl.engine.clients import LocalClient, Population
from upfl.engine.fitting import require_data
from upfl.errors import ConfigError
from upfl.methods import make_personalizer, make_training, personalizer_class, training_class


@dataclass(frozen=True)
class Setup:
    """A run before its first round: everything that follows from its configuration."""

    config: Config
    device: torch.device
    federation: Federation
    inputs: Inputs
    training: Training[Any]
    personalizers: Mapping[str, Personalizer[Any]]

    @property
    def clients(self) -> int:
        """How many training clients there are."""
        return len(self.federation.training)

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever reads the result should know."""
        asked, notes = self.config.clients_per_round, self.federation.notes
        if isinstance(asked, int) and asked > self.clients:
            notes = (f"clients_per_round = {asked}: there are {self.clients}, and all take part", *notes)
        training, least = self.federation.training, LEAST_CLIENTS[0]
        able = int(((training.counts("validation") > 0) & ~training.held_out).sum())
        if able < least and needs_of([*self.personalizers.values()]):
            few = (
                f"{able} training clients validate, and what fewer than {least} teach about class mixes and accuracies"
            )
            notes = (*notes, f"{few} is not relied on: newcomers are not corrected; take more training clients")
        return notes

    @property
    def population(self) -> Population:
        return Population(self.federation, self.inputs, self.config.seed)

    def client(self, id: int, round: int) -> LocalClient:
        return self.population.training(id, round)


def assemble(config: Config, federation: Federation | None = None, device: str | None = None) -> Setup:
    """Make what a configuration describes; refuses what could not be scored after the training.

    A federation whose data come from elsewhere is given; whoever gives it knows who can be scored.
    """
    where = checked_device(device or config.device)
    given = federation
    if federation is None:
        federation = named_federation(config)
    source = federation.source
    inputs = Inputs(source, where)
    shape, classes = source.form.shape, len(source.class_names)
    kind, hyper = training_class(config.training_name), config.training_hyper()
    require_form(config, kind, source)
    own = None if isinstance(source.form, Tokens) else kind.own_model(shape, classes, hyper)
    task = Task(
        model=own or config.model.build(shape, classes),
        classes=classes,
        clients=len(federation.training),
        participants=config.participants(len(federation.training)),
        architectures=config.model.architectures(shape, classes),
        public=inputs.x(federation.public).contiguous() if kind.heterogeneous else None,
        images=isinstance(source.form, Pixels),
    )
    training = make_training(config.training_name, task, hyper)
    needed = kind.passes(hyper) * training.rounds_a_pass
    if kind.in_turn and config.rounds < needed:
        raise ConfigError(
            f"rounds = {config.rounds}: {config.training_name} asks every client in turn, and with so many in a round "
            f"that takes {needed} rounds; leave rounds out, or raise clients_per_round"
        )
    if config.vectorize > 1 and not (training.vectorizes and training.model.vectorizes):
        what = f"model '{config.model.name}'" if training.vectorizes else training.name
        raise ConfigError(f"vectorize = {config.vectorize}: {what} trains one client at a time; leave it at 1")
    personalizers = {
        name: make_personalizer(name, training, personalizer_class(name).Hyper(**values))
        for name, values in config.personalize.items()
    }
    if given is None:
        require_data(list(personalizers.values()), federation, config.evaluate_clients)
    return Setup(config, where, federation, inputs, training, personalizers)


def require_form(config: Config, kind: type[Training[Any]], source: data.Source) -> None:
    """Refuse a training or a model that does not take samples of the data's form."""
    form = source.form
    if not kind.takes_tokens and isinstance(form, Tokens):
        raise ConfigError(f"{kind.name} takes numbers; {source.name} has {form.noun}: take another training")
    for one in (config.model.name, *(size.name or config.model.name for size in config.model.sizes.values())):
        if isinstance(form, Tokens) and "vocabulary" not in models.entry(one).Hyper.model_fields:
            raise ConfigError(
                f"model '{one}' takes numbers; {source.name} has {form.noun}: take `embedding`, or a model of your own "
                "with an option `vocabulary`"
            )


def named_federation(config: Config) -> Federation:
    """The federation over the named data set of a configuration."""
    source = data.load(config.dataset)
    return federation_of(source, config.partition, config.partition_seed, config.model.sizes)


def checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError("not a device that computes")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{name}' cannot be used on this machine: {reason}. Take --device cpu") from error
    return device
