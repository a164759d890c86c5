"""Clients with different models: Li, Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019.

Everyone has a public set P of unlabelled samples. Clients keep their own models and exchange what these say about P:

    digest       train on P towards the teacher, the mean of what clients said about P       from the second round on
    revisit      train on the client's own labelled data
    communicate  adapt to P as a newcomer adapts to its data; send the logits on P
    server:      the mean of the logits, the next round's teacher
    newcomer:    fresh models of its own architecture digest the teacher; they adapt to the newcomer's data

This is the loop that HeteroFedTTA and heterogeneous TENT share. What is published is the teacher and P: nothing of a
training client's weights.

Settled (authors' code): the digest is one epoch in batches of 100, a newcomer's two; the first round has nothing to
digest; rates decay by round in the digest, too. Here the batches of P are shuffled. The paper's Eq. 10 puts the student
first in the divergence, the authors' code the teacher, KL(teacher || student): the default, and `kl` chooses
(`training/sgd.py`: one rule for all methods).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import (
    Architecture,
    Batch,
    Client,
    Personalizer,
    Phase,
    Published,
    Task,
    Total,
    Training,
    Unlabelled,
    all_logits,
)
from upfl.errors import ConfigError
from upfl.models import Model
from upfl.randomness import default_generator
from upfl.state import State, contiguous, has_shapes, prefixed, select, to_device, trainable
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import Order, divergence


class FedMDHyper(LocalHyper):
    digest_epochs: int = Field(1, ge=1, description="passes over the public set before local training")
    digest_batch: int = Field(100, ge=1)
    newcomer_epochs: int = Field(2, ge=1, description="passes over the public set that make a newcomer's models")
    public_steps: int = Field(1, ge=0, description="of adaptation to the public set, before the logits are sent")
    kl: Order = Field("target-first", description="KL(teacher || student), or the other way round")


@dataclass(frozen=True)
class Student:
    """A client's training, by one architecture: `revisit` learns from labels, `digest` from the teacher's logits."""

    revisit: LocalTraining[Any]
    digest: LocalTraining[Any]


D = TypeVar("D", bound=FedMDHyper)


class FedMD(Training[D]):
    """The loop. Subclasses say what a student is, which logits it sends, and how it adapts to the public set."""

    remembers = True
    starts_from_memory = True
    heterogeneous = True
    knowledge: ClassVar[tuple[str, ...]]  # of "base" and "personalized": logits before and after adaptation
    learns: ClassVar[type[LocalTraining[Any]]]  # a student's local training
    adapts_by: ClassVar[str]  # the name of the personalizer that newcomers use, too
    adapt: Personalizer[Any]  # that personalizer: `methods.make_training` hands it in

    def __init__(self, task: Task, hyper: D) -> None:
        super().__init__(task, hyper)
        if task.public is None or not len(task.public):
            raise ConfigError(f"{self.name} needs a public set: set partition.public, for example to 0.1")
        self.public = task.public
        architectures = task.architectures or {"": Architecture(task.model)}
        self.students = {name: self.student(architecture) for name, architecture in architectures.items()}

    @property
    def adapts_with(self) -> dict[str, Any]:
        """Hyper-parameters of that personalizer on the public set, where they are not its own."""
        return {}

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        described = {name: (one.model.shapes, one.model.describe()) for name, one in task.architectures.items()}
        for name, (shapes, description) in described.items():
            for other, (same, another) in described.items():
                if name < other and shapes == same and description != another:
                    return f"the sizes {name} and {other} are different models with the same parameters; rename some"
        reasons = (cls.learns.why_not(Task(one.model, task.classes, 1)) for one in task.architectures.values())
        return next((reason for reason in reasons if reason), None) or super().why_not(task)

    @abstractmethod
    def student(self, architecture: Architecture) -> Student: ...

    def init(self, generator: torch.Generator) -> State:
        return {kind: torch.zeros(len(self.public), self.task.classes) for kind in self.knowledge}

    def memory(self, client: Client) -> State:
        return self._student(client.architecture).revisit.init(client.generator("models"))

    def phases(self, round: int) -> tuple[Phase, ...]:
        hyper = self.hyper
        batches = hyper.digest_epochs * -(-len(self.public) // hyper.digest_batch)
        student = next(iter(self.students.values()))  # every architecture's step costs as many passes of its own model
        digest = Phase(self.digest, batches, hyper.digest_batch, "public", cost=student.digest.step_cost)
        revisit = Phase(self.revisit, hyper.iterations, hyper.batch_size, cost=student.revisit.step_cost)
        return (digest, revisit) if round else (revisit,)

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = to_device(memory, self.public.device)
        return self._student(client.architecture).revisit.carry(own) | prefixed("teacher", server)

    def digest(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        return self._student_of(select(carry, "psi")).digest.step(carry, batch, round)

    def revisit(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        return self._student_of(select(carry, "psi")).revisit.step(carry, batch, round)

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        memory = contiguous({name: value for name, value in carry.items() if name.startswith(("psi.", "phi."))})
        on_public = Unlabelled(client.id, self.public, architecture=client.architecture)
        published = Published({}, client.round)
        if self.hyper.public_steps:
            adapted = self.adapt.personalize(published, on_public, memory)
            said = {"base": adapted.before, "personalized": adapted.logits}
        else:
            psi = self.start(published, on_public, memory)
            said = dict.fromkeys(self.knowledge, all_logits(self.logits, psi, self.public))
        weight = self.hyper.weight(client)
        up = {kind: said[kind] * weight for kind in self.knowledge}
        return contiguous(up) | {"weight": torch.tensor(weight)}, memory

    def aggregate(self, server: State, total: Total, round: int) -> State:
        return {kind: total.mean(kind).to(value) for kind, value in server.items()}

    def bytes_down(self, server: State, round: int) -> int:
        return super().bytes_down(server, round) if round else 0  # before the first round there is no teacher

    def publish(self, server: State) -> State:
        return server | {"public": self.public}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        models = self.models(published, client, memory)
        return self._student(client.architecture).revisit.start(Published(models, published.round), client, None)

    def models(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        """A client's models before it personalizes: a training client's own, or what a newcomer digests."""
        student, device = self._student(client.architecture), client.x.device
        if memory is not None:
            return to_device(memory, device)
        fresh = student.revisit.init(client.generator("models"))
        taught = to_device(published.state, device)
        public = taught.pop("public")
        carry = student.digest.carry(to_device(fresh, device))
        carry |= prefixed("teacher", taught)
        order = client.generator("digest")
        with torch.no_grad(), default_generator(client.seed, "digest", client.id):
            for _ in range(self.hyper.newcomer_epochs):
                shuffled = torch.randperm(len(public), generator=order).to(device)
                for start in range(0, len(public), self.hyper.digest_batch):
                    index = shuffled[start : start + self.hyper.digest_batch]
                    x = public[index].contiguous(memory_format=torch.channels_last)
                    batch = Batch(x, torch.zeros_like(index), index=index)
                    carry, _ = student.digest.step(carry, batch, published.round)
        return {name: carry[name] for name in fresh}

    def model_of(self, params: State) -> Model:
        return self._student_of(params).revisit.model

    @property
    def client_models(self) -> dict[str, Model]:
        return {name: student.revisit.model for name, student in self.students.items()}

    def logits(self, params: State, x: Tensor) -> Tensor:
        return self._student_of(params).revisit.logits(params, x)

    def features(self, params: State, x: Tensor) -> Tensor:
        return self._student_of(params).revisit.features(params, x)

    @property
    def size(self) -> int:
        """The teacher and the public set, which every worker holds, and the largest model."""
        teacher = len(self.knowledge) * len(self.public) * self.task.classes
        return teacher + self.public.numel() + max(student.revisit.size for student in self.students.values())

    def local_rate(self, round: int) -> float:
        return next(iter(self.students.values())).revisit.local_rate(round)

    def _student(self, architecture: str) -> Student:
        if architecture not in self.students:
            raise ConfigError(
                f"a client's architecture is {architecture!r}, and this federation knows {', '.join(self.students)}"
            )
        return self.students[architecture]

    def _student_of(self, psi: State) -> Student:
        """Parameters tell their architecture by their shapes; where two agree in all, they are the same model."""
        own = trainable(psi)
        return next(student for student in self.students.values() if has_shapes(own, student.revisit.model.shapes))


def distillation(logits: Tensor, teacher: Tensor, batch: Batch, hyper: FedMDHyper) -> tuple[Tensor, Tensor]:
    """The mean divergence of a student's logits from the teacher's on a batch of the public set, and its gradient."""
    assert batch.index is not None
    return divergence(logits, teacher[batch.index], batch.weight(), hyper.kl)
