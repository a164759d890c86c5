"""Heterogeneous TENT, the rival of HeteroFedTTA: entropy minimisation within FedMD's loop.

    digest:  psi <- psi - lr * clip(grad KL(teacher || f(X; psi)))             X a batch of the public set
    revisit: psi <- psi - lr * clip(grad CE(f(X; psi), Y))                     20 steps on the client's own data
    adapt:   one step down the mean entropy (`personalize/tent.py`): on the public set before the logits are sent, on
             its own data for a newcomer

Settled: the teacher is the mean of the adapted models' logits, as in the authors' code; the rest see
`training/fedmd.py`. The step on the public set, which has all classes, spoils the teacher of clients that hold few: on
digits newcomers were ten points better with `public_steps = 0` (results/heterogeneous.md). The default is the paper's.
"""

from typing import Any

from torch import Tensor

from upfl.contract import Architecture, Batch, Task
from upfl.state import State
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.fedmd import FedMD, FedMDHyper, Student, distillation


class HeteroTentHyper(FedAvgHyper, FedMDHyper): ...


class _Digest(FedAvg):
    """FedAvg's step towards the teacher."""

    hyper: HeteroTentHyper

    def fit(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return distillation(logits, carry["teacher.personalized"], batch, self.hyper)


class HeteroTent(FedMD[HeteroTentHyper]):
    name = "hetero-tent"
    title = "heterogeneous TENT"
    Hyper = HeteroTentHyper
    adapts_by = "tent"
    learns = FedAvg
    knowledge = ("personalized",)
    records = True

    @property
    def adapts_with(self) -> dict[str, Any]:
        return {"steps": self.hyper.public_steps}

    def student(self, architecture: Architecture) -> Student:
        task = Task(architecture.model, self.task.classes, self.task.clients)
        return Student(FedAvg(task, self.hyper), _Digest(task, self.hyper))
