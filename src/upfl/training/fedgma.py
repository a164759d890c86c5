"""FedGMA: Tenison et al., Gradient Masked Averaging for Federated Learning, TMLR 2023.

    A    = |mean_i sign(psi_i - psi)|                          how far the clients agree, entry by entry
    mask = 1 where A >= threshold, else A
    psi  <- psi + server_lr * mask * mean_i (psi_i - psi)

threshold = 0 with server_lr = 1 is FedAvg, to the bit.

Settled: buffers (running statistics) are averaged as they are: clients need not agree about them.
"""

import torch
from pydantic import Field

from upfl.contract import Client, Total
from upfl.state import State, is_buffer, trainable
from upfl.training.fedavg import FedAvg, FedAvgHyper


class FedGMAHyper(FedAvgHyper):
    server_lr: float = Field(1.0, gt=0)
    threshold: float = Field(0.1, ge=0, le=1)


class FedGMA(FedAvg):
    name = "fedgma"
    title = "FedGMA"
    records = True
    Hyper = FedGMAHyper
    hyper: FedGMAHyper

    @property
    def size(self) -> int:
        return 2 * self.model.size  # signs travel beside the changes

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, memory = super().finish(server, carry, client)
        return up | {f"sign.{name}": up[name].sign().to(torch.int8) for name in trainable(server)}, memory

    def aggregate(self, server: State, total: Total, round: int) -> State:
        result = {}
        for name, value in server.items():
            if is_buffer(name):
                result[name] = value + total.mean(name).to(value)
                continue
            agreement = (total[f"sign.{name}"] / total.count).abs()
            mask = torch.where(agreement >= self.hyper.threshold, 1.0, agreement)
            result[name] = value + (self.hyper.server_lr * (mask * total.mean(name))).to(value)
        return result
