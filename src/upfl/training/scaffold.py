"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

    y_i <- y_i - lr * (g(y_i) + c - c_i)                       K local steps from y_i = x
    c_i' = c_i - c + (x - y_i) / (K lr)                        option II
    x <- x + server_lr * mean_i (y_i - x),   c <- c + 1/N sum_i (c_i' - c_i)

x is psi; c lives on the server, c_i on the client; N counts all clients, whether they take part or not.

Settled: g is clipped before the correction is added; weight decay belongs to g and is not clipped. With c = c_i = 0 and
server_lr = 1 the first round is FedAvg's, to the bit. Buffers (running statistics) have no control variates: the server
takes their mean.
"""

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Total
from upfl.state import State, contiguous, is_buffer, prefixed, select, trainable
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.sgd import cross_entropy, sgd_


class ScaffoldHyper(FedAvgHyper):
    server_lr: float = Field(1.0, gt=0)


class Scaffold(FedAvg):
    name = "scaffold"
    title = "SCAFFOLD"
    records = True
    Hyper = ScaffoldHyper
    hyper: ScaffoldHyper
    remembers = True

    def init(self, generator: torch.Generator) -> State:
        state = super().init(generator)
        own = trainable(select(state, "psi"))
        return state | {f"control.{name}": torch.zeros_like(value) for name, value in own.items()}

    def memory(self, client: Client) -> State:
        return {f"control.{name}": torch.zeros(shape) for name, shape in self.model.shapes.items()}

    def begin(self, server: State, memory: State, client: Client) -> State:
        carry = super().begin(prefixed("psi", select(server, "psi")), memory, client)
        own = {name: value.to(server[name]) for name, value in memory.items()}
        correction = {name: server[name] - value for name, value in own.items()}
        return carry | prefixed("correction", self.model.layout(select(correction, "control"))) | prefixed("own", own)

    @torch.inference_mode()
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, psi = self.hyper, select(carry, "psi")
        trace = self.model.trace(psi, batch.x)
        loss, dz = cross_entropy(trace.output, batch)
        lr = hyper.rate(hyper.lr, round)
        sgd_(psi, trace.backward(dz), lr, hyper.weight_decay, hyper.clip)
        correction = select(carry, "correction")
        for name, change in correction.items():
            psi[name].sub_(change, alpha=lr)
        return carry, loss

    @property
    def size(self) -> int:
        return 2 * self.model.size

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        psi = prefixed("psi", select(server, "psi"))
        up, _ = super().finish(psi, carry, client)
        steps = self.hyper.iterations * self.hyper.rate(self.hyper.lr, client.round)
        change, own = {}, {}
        for name, value in trainable(psi).items():
            control = name.replace("psi.", "control.", 1)
            change[control] = (value - carry[name]) / steps - server[control]
            own[control] = carry[f"own.{control}"] + change[control]
        return up | contiguous(change), contiguous(own)

    def aggregate(self, server: State, total: Total, round: int) -> State:
        psi = prefixed("psi", select(server, "psi"))
        controls = prefixed("control", select(server, "control"))
        mean = {name: total.mean(name).to(value) for name, value in psi.items()}
        change = {name: (total[name] / self.task.clients).to(value) for name, value in controls.items()}
        lr = self.hyper.server_lr
        return {name: value + (1 if is_buffer(name) else lr) * mean[name] for name, value in psi.items()} | {
            name: value + change[name] for name, value in controls.items()
        }
