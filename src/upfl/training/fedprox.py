"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    psi_i <- psi_i - lr * clip(grad CE(f(X; psi_i), Y) + mu * (psi_i - psi))       psi as received

which is FedAvg on CE + mu/2 ||psi_i - psi||^2. mu = 0 is FedAvg, to the bit.

Settled: the clipping covers both terms, as in one backward pass of the sum.
"""

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client
from upfl.state import State, combined, select, trainable
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.sgd import cross_entropy, sgd_


class FedProxHyper(FedAvgHyper):
    mu: float = Field(0.001, ge=0, description="weight of the proximal term")


class FedProx(FedAvg):
    name = "fedprox"
    title = "FedProx"
    records = True
    Hyper = FedProxHyper
    hyper: FedProxHyper

    def begin(self, server: State, memory: State, client: Client) -> State:
        return super().begin(server, memory, client) | self.received(server)

    @torch.inference_mode()
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        if not self.hyper.mu:
            return super().step(carry, batch, round)
        hyper, psi, received = self.hyper, select(carry, "psi"), select(carry, "received")
        trace = self.model.trace(psi, batch.x)
        loss, dz = cross_entropy(trace.output, batch)
        own = trainable(psi)
        away = combined(list(own.values()), hyper.mu, [received[name] for name in own], -hyper.mu)
        gradient = trace.backward(dz, plus=(dict(zip(own, away, strict=True)), 1.0))
        sgd_(psi, gradient, hyper.rate(hyper.lr, round), hyper.weight_decay, hyper.clip)
        return carry, loss
