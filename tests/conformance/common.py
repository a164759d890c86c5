"""The table of trainings and personalizers under test, and what the checks of the contract are made of."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from upfl import plugins
from upfl.config import Config, configure
from upfl.contract import Client, Personalizer, Published, Task, Training, Unlabelled
from upfl.engine.clients import LocalClient
from upfl.engine.setup import Setup, assemble
from upfl.methods import PERSONALIZERS, TRAININGS
from upfl.models import mlp
from upfl.personalize.calibration import Correction
from upfl.state import State, prefixed, select
from upfl.testing.parts import Parts as Parts
from upfl.testing.parts import folded as folded
from upfl.testing.parts import parts_of as parts_of
from upfl.testing.parts import snapshot as snapshot
from upfl.testing.parts import storable as storable
from upfl.training.fedavg import FedAvg

plugins.load(plugins.from_environment())  # a method of one's own is checked like the others

CPU = torch.device("cpu")
ROUNDS = 4
PASSING = 6  # rounds of a training that asks its clients in turn: three passes of two
CLIENTS = 6  # of each kind


class Remembering(FedAvg):
    """FedAvg whose clients keep a last layer of their own and count the rounds they took part in."""

    name = "remembering"
    title = "Remembering"
    remembers = True

    def memory(self, client: Client) -> State:
        fresh = prefixed("psi", self.model.init(client.generator("head")))
        return {name: fresh[name] for name in self._own()} | {"rounds": torch.tensor(0)}

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = {name: value.clone() for name, value in memory.items()}
        return super().begin(server, {}, client) | own

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        memory = {name: carry[name].contiguous() for name in self._own()}
        return up | {"taking_part": torch.tensor(1)}, memory | {"rounds": carry["rounds"] + 1}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        own = {name: memory[name] for name in self._own()} if memory else {}
        return super().start(published, client, memory) | select(own, "psi")

    def _own(self) -> list[str]:
        return [f"psi.{self.model.head}.{kind}" for kind in ("weight", "bias")]


KINDS: dict[str, type[Training[Any]]] = TRAININGS | {Remembering.name: Remembering}


def corrects(personalizer: str) -> bool:
    return issubclass(PERSONALIZERS[personalizer], Correction)


def _is_fitted(personalizer: str) -> bool:
    return PERSONALIZERS[personalizer].needs is not Personalizer.needs


def _table() -> dict[str, list[str]]:
    """Every training, with the personalizers that fit it."""
    fitting = {}
    for name, kind in KINDS.items():
        model = kind.own_model((1, 8, 8), 10, kind.Hyper()) or mlp(64, (16, 16), 10)
        task = Task(model, 10, CLIENTS, public=torch.zeros(20, 1, 8, 8))
        training = kind(task, kind.Hyper())
        fitting[name] = [key for key, personalizer in PERSONALIZERS.items() if personalizer.why_not(training) is None]
    return fitting


TABLE = _table()
# Fits of corrections take longer than all else. They are made where clients all begin alike, where each begins from its
# memory, and where they differ in architecture and are guided; `make test-all` has every pair.
FITTING = ("fedavg", Remembering.name, "hetero-fedtta")
COSTLY = ("label-shift", "auto")
# Other corrections see predictions only, so that one training meets all of them.
TOGETHER = {
    name: [key for key in fitting if name == "fedavg" or (name in FITTING if key in COSTLY else not corrects(key))]
    for name, fitting in TABLE.items()
}
# What whole runs are scored under: once with fits, twice without.
SCORED = {
    name: [key for key in paired if key in COSTLY or not (corrects(key) or (_is_fitted(key) and name not in FITTING))]
    for name, paired in TOGETHER.items()
}
SCORINGS = {name: 1 if name in FITTING else 2 for name in TABLE}
of_every_training = pytest.mark.parametrize("name", KINDS)
of_remembering_trainings = pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.remembers])
of_every_pair = pytest.mark.parametrize(
    ("name", "personalizer"),
    [
        pytest.param(name, personalizer, marks=[] if personalizer in TOGETHER[name] else pytest.mark.full)
        for name, fitting in TABLE.items()
        for personalizer in fitting
    ],
)


def rounds_of(name: str) -> int:
    return PASSING if KINDS[name].in_turn else ROUNDS


def config_of(name: str, **options: Any) -> Config:
    """A run of a second or a few: digits, six clients of each kind, scored as `SCORED` says.

    Some gradients are clipped: their norm is where an order of tensors would show in the bits.
    """
    small = {
        "iterations": 3,
        "batch_size": 16,
        "clip": 0.3,
        "digest_epochs": 2,
        "digest_batch": 10,
        "newcomer_epochs": 2,
        "filters": 8,
    } | ({"iterations": 1} if KINDS[name].in_turn else {})
    settings = [f"{key}={value}" for key, value in small.items() if key in TRAININGS[name].Hyper.model_fields]
    scale: dict[str, Any] = {
        "rounds": rounds_of(name),
        "clients_per_round": 4,
        "evaluate_every": rounds_of(name) // SCORINGS[name],
        "evaluate_clients": 3,
        "model": None if KINDS[name].refuses_models else {"hidden": 16},
        "partition": {"clients": 2 * CLIENTS},
    }
    scale |= {"score": SCORED[name]} | options
    settings.append("partition.held_out=0")  # all train; who does not is tested beside the engine
    return configure(name, "digits", profile="smoke", settings=settings, **scale)


def briefly(name: str, **options: Any) -> Config:
    """The same, scored without fits: for what does not depend on scores."""
    return config_of(name, score=[key for key in SCORED[name] if not _is_fitted(key)], **options)


def until(config: Config, round: int) -> Setup:
    """The parts of a run that ends after so many of its rounds, whether or not its training is complete by then."""
    return replace(assemble(config), config=config.model_copy(update={"rounds": round}))


def train_one(training: Training[Any], server: State, memory: State, client: LocalClient) -> tuple[State, State]:
    """A client's round by the contract: what goes up, what the client keeps."""
    carry = training.begin(server, memory, client)
    with torch.no_grad():
        for phase in training.phases(client.round):
            for batch in client.phase(phase):
                carry, loss = phase.step(carry, batch, client.round)
                assert loss.dim() == 0
                assert loss.isfinite()
        up, kept = training.finish(server, carry, client)
        return dict(up), kept
