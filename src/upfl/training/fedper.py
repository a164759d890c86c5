"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    convolutions: FedAvg.   fully connected layers: trained locally, never sent up (for an MLP: the last layer).

A newcomer has no personal layers. PFL-Sampled and PFL-Ensemble (`personalize/pfl.py`) therefore hand it training
clients' own: the only two rows for which layers that may tell about a client's data leave it, and only through
`publish`.

Settled: personal layers start from (seed, client). Buffers (running statistics) are shared, unless `personal` says
otherwise: `personal = ["*norm*"]` keeps normalisation layers on the client as FedBN does (Li et al., ICLR 2021).
"""

from fnmatch import fnmatch

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Client, Published, Task, Unlabelled
from upfl.errors import ConfigError
from upfl.models import Model
from upfl.models.surgery import cut_below
from upfl.state import BUFFERS, State, select, to_device
from upfl.training.fedavg import FedAvg, FedAvgHyper


class FedPerHyper(FedAvgHyper):
    personal: tuple[str, ...] | None = Field(
        None, description="patterns of parameters that stay on the client; where silent, of its linear layers"
    )


class FedPer(FedAvg):
    name = "fedper"
    title = "FedPer"
    Hyper = FedPerHyper
    records = True
    hyper: FedPerHyper
    remembers = True
    starts_from_memory = True
    publishes_memory = True
    serves_newcomers = False

    def __init__(self, task: Task, hyper: FedPerHyper) -> None:
        super().__init__(task, hyper)
        self.personal = set(_personal(task.model, hyper.personal))
        if not self.personal or self.personal.issuperset(task.model.shapes):
            which = "all" if self.personal else "none"
            raise ConfigError(
                f"fedper.personal: {which} of the model's parameters would be personal; they are called "
                f"{', '.join(task.model.shapes)}"
            )
        # What an ensemble computes once, and what each of its models adds.
        self.cut = cut_below(task.model, self.personal)

    def init(self, generator: torch.Generator) -> State:
        return {f"psi.{name}": value for name, value in self.model.init(generator).items() if name not in self.personal}

    def memory(self, client: Client) -> State:
        fresh = self.model.init(client.generator("personal layers"))
        return {f"psi.{name}": value for name, value in fresh.items() if name in self.personal}

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = {name: value.to(next(iter(server.values()))) for name, value in memory.items()}
        return super().begin(self._ordered(server | own), memory, client)

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        return up, {f"psi.{name}": carry[f"psi.{name}"].contiguous() for name in sorted(self.personal)}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        assert memory is not None, "FedPer has no model for a client that did not train"
        own = to_device(memory, client.x.device)
        return self.model.layout(select(self._ordered(published.state | own), "psi"))

    def shared(self, params: State, x: Tensor) -> Tensor:
        return self.cut[0].apply(params, x) if self.cut else super().shared(params, x)

    def beyond(self, params: State, shared: Tensor) -> Tensor:
        return self.cut[1].apply(params, shared) if self.cut else super().beyond(params, shared)

    def _ordered(self, state: State) -> State:
        return {f"psi.{name}": state[f"psi.{name}"] for name in (*self.model.shapes, *self.model.buffers)}


def _personal(model: Model, patterns: tuple[str, ...] | None) -> list[str]:
    """What stays on the client: what patterns name, or the linear layers behind convolutions, or the last layer."""
    if patterns is not None:
        names = (*model.shapes, *model.buffers)
        return [name for name in names if any(fnmatch(name.removeprefix(BUFFERS), one) for one in patterns)]
    linear = [layer for layer, kind in model.kinds.items() if kind == "linear"]
    own = linear if "convolution" in model.kinds.values() else linear[-1:]
    return [name for name in model.shapes if name.rpartition(".")[0] in own]
