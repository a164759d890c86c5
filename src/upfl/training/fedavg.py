"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    psi_i <- psi_i - lr * clip(grad CE(f(X; psi_i), Y))       tau local steps from psi_i = psi
    psi   <- psi + mean_i (psi_i - psi)

Settled: SGD with weight decay 1e-4, gradient norm clipped to 10, rates times 0.99^(round/10); the mean is uniform over
clients (the paper's 1/M), `aggregation = "samples"` weights by sample count as the authors' code does.
"""

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch
from upfl.state import State, select
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import cross_entropy, sgd_


class FedAvgHyper(LocalHyper):
    lr: float = Field(0.1, gt=0)


class FedAvg(LocalTraining[FedAvgHyper]):
    name = "fedavg"
    title = "FedAvg"
    Hyper = FedAvgHyper
    vectorizes = True
    records = True

    @torch.inference_mode()
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, psi = self.hyper, select(carry, "psi")
        trace = self.model.trace(psi, batch.x)
        loss, dz = self.fit(carry, trace.output, batch)
        sgd_(psi, trace.backward(dz), hyper.rate(hyper.lr, round), hyper.weight_decay, hyper.clip)
        return carry, loss

    def fit(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of the logits, and its gradient there."""
        return cross_entropy(logits, batch)

    def local_rate(self, round: int) -> float:
        return self.hyper.rate(self.hyper.lr, round)
