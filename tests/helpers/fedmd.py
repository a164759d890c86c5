"""Small federations of clients with different models."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.params import Params, gradient, leaves
from tests.reference import CLASSES, Case, forward_mlp
from upfl.config import Config, configure
from upfl.contract import Batch, Task
from upfl.methods import make_training
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training.fedmd import FedMD
from upfl.training.hetero_fedtta import HeteroFedTTA

PUBLIC = 12  # samples


T = TypeVar("T", bound=FedMD[Any])


def made(kind: type[T], task: Task, **hyper: Any) -> T:
    training = make_training(kind.name, task, kind.Hyper(**hyper))
    assert isinstance(training, kind)
    return training


def hetero(case: Case, public: int = PUBLIC, **hyper: Any) -> HeteroFedTTA:
    """One architecture: that of the case."""
    task = Task(case.model, CLASSES, 3, public=case.x(public, 5, torch.float32))
    return made(HeteroFedTTA, task, **hyper)


def teacher(seed: int, scale: float = 3.0) -> State:
    drawn = torch.randn(2, PUBLIC, CLASSES, generator=generator(seed, "teacher"), dtype=torch.float64)
    return {"base": scale * drawn[0], "personalized": scale * drawn[1]}


def public_batch(case: Case, places: list[int]) -> Batch:
    return Batch(case.x(PUBLIC, 5)[places], torch.zeros(len(places), dtype=torch.int64), index=torch.tensor(places))


def kl(first: Tensor, second: Tensor) -> Tensor:
    """The mean over samples of KL(softmax(first) || softmax(second)), by PyTorch's own function."""
    return F.kl_div(second.log_softmax(1), first.log_softmax(1), reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class DigestStep:
    """HeteroFedTTA's digest with plain double backward."""

    case: Case
    lambda_: float
    direction: str = "target-first"
    inner_lr: float = 0.5
    weight_decay: float = 1e-4

    def loss(self, psi: Params, phi: Params, x: Tensor, base: Tensor, personalized: Tensor) -> Tensor:
        z = self.case.forward(psi, x)
        guide = (forward_mlp(phi, z).square().sum() + 1e-12).sqrt()
        grads = gradient(guide, psi, create_graph=True)
        adapted = {k: v - self.inner_lr * (grads[k] + self.weight_decay * v) for k, v in psi.items()}
        return self._kl(personalized, self.case.forward(adapted, x)) + self.lambda_ * self._kl(base, z)

    def _kl(self, taught: Tensor, student: Tensor) -> Tensor:
        return kl(taught, student) if self.direction == "target-first" else kl(student, taught)

    def gradients(self, psi: Params, phi: Params, batch: Batch, taught: State) -> tuple[float, Params, Params]:
        psi, phi = leaves(psi), leaves(phi)
        with torch.enable_grad():
            loss = self.loss(psi, phi, batch.x, taught["base"][batch.index], taught["personalized"][batch.index])
            both = gradient(loss, prefixed("psi", psi) | prefixed("phi", phi))
        return float(loss.detach()), select(both, "psi"), select(both, "phi")


def small(method: str = "hetero-fedtta", *settings: str, **options: Any) -> Config:
    settings = ("iterations=3", "digest_epochs=1", "newcomer_epochs=2", "digest_batch=50", *settings)
    scale: dict[str, Any] = {
        "rounds": 2,
        "model": {"hidden": 16},
        "partition": {"clients": 24, "public": 0.1, "held_out": 0.0},
    }
    return configure(method, "digits", settings=settings, **(scale | options))
