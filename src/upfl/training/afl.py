"""AFL: Mohri, Sivek, Suresh, Agnostic Federated Learning, ICML 2019.

    psi    <- psi + sum_i lambda_i (psi_i - psi) / sum_i lambda_i             psi_i by FedAvg's local steps
    lambda <- projection onto the simplex of lambda + mixture_lr * losses     losses of the psi that was received

lambda weighs the clients, starts uniform, and moves towards those whose loss is high.

Settled: losses are on each client's training data; sums run over the clients that take part, and only their losses
count; mixture_lr decays like the other rates. mixture_lr = 0 with all clients is FedAvg to rounding. The effective
number of clients, 1 / sum lambda^2, is in the metrics: at the paper's 0.3 one update can leave a quarter of them with
weight. Under partial participation, clients that stay away keep their place on the simplex but for the projection's
common shift. lambda is the weight, so there is none by sample count.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Client, Total
from upfl.state import State, contiguous, prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.sgd import cross_entropy


class AFLHyper(FedAvgHyper):
    mixture_lr: float = Field(0.001, ge=0)
    aggregation: Literal["uniform"] = "uniform"


class AFL(FedAvg):
    name = "afl"
    title = "AFL"
    records = True
    Hyper = AFLHyper
    hyper: AFLHyper

    def init(self, generator: torch.Generator) -> State:
        return super().init(generator) | {"mixture": torch.full((self.task.clients,), 1 / self.task.clients)}

    def begin(self, server: State, memory: State, client: Client) -> State:
        carry = super().begin(prefixed("psi", select(server, "psi")), memory, client)
        psi, total = select(carry, "psi"), torch.zeros((), dtype=torch.float64)
        for batch in client.batches("train", 256):
            total += cross_entropy(self.model.apply(psi, batch.x), batch)[0].cpu() * len(batch.y)
        return carry | {"received_loss": (total / client.count).float()}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        psi = prefixed("psi", select(server, "psi"))
        weight = server["mixture"][client.id] * self.task.clients  # 1 where lambda is uniform
        losses = torch.zeros(self.task.clients)
        losses[client.id] = carry["received_loss"]
        change = {name: (carry[name] - value) * weight for name, value in psi.items()}
        return contiguous(change) | {"weight": weight.cpu(), "losses": losses}, {}

    def aggregate(self, server: State, total: Total, round: int) -> State:
        psi = prefixed("psi", select(server, "psi"))
        if total["weight"] > 0:  # under partial participation, nobody with weight may have come
            psi = super().aggregate(psi, total, round)
        mixture, losses = server["mixture"], total["losses"].to(server["mixture"].device)
        raised = mixture.double() + self.hyper.rate(self.hyper.mixture_lr, round) * losses
        return psi | {"mixture": simplex_projection(raised).float()}

    def facts(self, server: State) -> dict[str, float]:
        return {"effective_clients": 1 / float(server["mixture"].double().square().sum())}


def simplex_projection(point: Tensor) -> Tensor:
    """The nearest point with non-negative entries that sum to one.

    It is max(point - threshold, 0); with the entries sorted downwards, the threshold is that of the longest prefix
    whose last entry stays positive (Duchi et al., ICML 2008).
    """
    ordered = point.sort(descending=True).values
    thresholds = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    kept = int((ordered > thresholds).sum())
    return (point - thresholds[kept - 1]).clamp(min=0)
