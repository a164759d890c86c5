"""HeteroFedTTA: Ye et al., UPFL: Unsupervised Personalized Federated Learning towards New Clients; on FedMD's loop.

Clients with different models share what their base models f(.; psi) and their personalized models f(.; psi~) say about
the public set P. A student (psi, phi) digests the teacher, the mean of both over clients, by

    L = KL(teacher's personalized || f(X; psi~)) + lambda * KL(teacher's base || f(X; psi)),      X a batch of P

with psi~ FedTTA's inner step on X, through which L is differentiated. It is FedTTA's step with another loss in place
of the cross-entropy, and the second term in place of FedTTA-Prox's. lambda = 0 is end-to-end distillation, in which
psi can learn the personalized outputs by itself and leave phi idle. Then 20 FedTTA steps on the client's own data; then
one guided step on P, as a newcomer takes it on its data (`personalize/fedtta.py`), before the logits are sent.

Settled: the step on P has the scale of the digest's, which learns from it: `digest_batch` takes the place of the batch
size in l_per, so that a client that is its own teacher starts the digest without a loss. phi's momentum runs on from
the digest into the local steps (one optimizer in the authors' code). What else see `training/fedmd.py` and
`training/fedtta.py`. On digits adaptation gains nothing, because a phi of one's own learns one's own classes; label
shift gains nine points in its place (results/heterogeneous.md).
"""

from typing import Any

from pydantic import Field
from torch import Tensor

from upfl.contract import Architecture, Batch, Published, Task, Unlabelled
from upfl.models import adaptation_model
from upfl.state import State, select
from upfl.training.fedmd import FedMD, FedMDHyper, Student, distillation
from upfl.training.fedtta import FedTTA, FedTTAHyper


class HeteroFedTTAHyper(FedTTAHyper, FedMDHyper):
    public_steps: int = Field(1, ge=0, le=1, description="of adaptation to the public set, before the logits are sent")
    lambda_: float = Field(0.8, ge=0, description="weight of the base models' divergence in the digest")
    adaptation_width: int = Field(32, ge=1, description="hidden units of g, where an architecture does not say")


class _Digest(FedTTA):
    """FedTTA's step towards the teacher."""

    hyper: HeteroFedTTAHyper

    def fit(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return distillation(logits, carry["teacher.personalized"], batch, self.hyper)

    def penalty(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, gradient = distillation(logits, carry["teacher.base"], batch, self.hyper)
        return self.hyper.lambda_ * loss, self.hyper.lambda_ * gradient


class HeteroFedTTA(FedMD[HeteroFedTTAHyper]):
    name = "hetero-fedtta"
    title = "HeteroFedTTA"
    Hyper = HeteroFedTTAHyper
    adapts_by = "one-step"
    learns = FedTTA
    knowledge = ("base", "personalized")
    records = True

    def __init__(self, task: Task, hyper: HeteroFedTTAHyper) -> None:
        super().__init__(task, hyper)
        self.g = adaptation_model(task.classes)  # applied to any phi: the widths are the parameters'

    @property
    def adapts_with(self) -> dict[str, Any]:
        return {"batch": self.hyper.digest_batch}

    def student(self, architecture: Architecture) -> Student:
        task = Task(architecture.model, self.task.classes, self.task.clients)
        width = architecture.adaptation_width or self.hyper.adaptation_width
        hyper = self.hyper.model_copy(update={"adaptation_width": width})
        return Student(FedTTA(task, hyper), _Digest(task, hyper))

    def guided(self, published: Published, client: Unlabelled, memory: State | None) -> tuple[State, State]:
        models = self.models(published, client, memory)
        return self.start(published, client, models), select(models, "phi")

    def guide(self, phi: State, logits: Tensor) -> Tensor:
        return self.g.apply(phi, logits)
