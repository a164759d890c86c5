"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    convolutions: FedAvg.   fully connected layers: trained locally, never sent up (for an MLP: the last layer).

A newcomer has no personal layers. PFL-Sampled and PFL-Ensemble (`personalize/pfl.py`) therefore hand it training
clients' own: the only two rows for which layers that may tell about a client's data leave it, and only through
`publish`.

Settled: personal layers start from (seed, client).
"""

import torch

from upfl.contract import Client, Published, Task, Unlabelled
from upfl.state import State, select, to_device
from upfl.training.fedavg import FedAvg, FedAvgHyper


class FedPer(FedAvg):
    name = "fedper"
    title = "FedPer"
    records = True
    remembers = True
    starts_from_memory = True
    publishes_memory = True
    serves_newcomers = False

    def __init__(self, task: Task, hyper: FedAvgHyper) -> None:
        super().__init__(task, hyper)
        kinds = task.model.kinds
        linear = [layer for layer, kind in kinds.items() if kind == "linear"]
        own = linear if "convolution" in kinds.values() else linear[-1:]
        self.personal = {name for name in task.model.shapes if name.rpartition(".")[0] in own}

    def init(self, generator: torch.Generator) -> State:
        return {f"psi.{name}": value for name, value in self.model.init(generator).items() if name not in self.personal}

    def memory(self, client: Client) -> State:
        fresh = self.model.init(client.generator("personal layers"))
        return {f"psi.{name}": fresh[name] for name in self.model.shapes if name in self.personal}

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

    def _ordered(self, state: State) -> State:
        return {f"psi.{name}": state[f"psi.{name}"] for name in self.model.shapes}
