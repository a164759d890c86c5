"""FedADG: Zhang et al., Federated Learning with Domain Generalization, 2021.

Clients align their features with a reference distribution that a shared generator learns:

    F: inputs to features,  C: features to classes,  G: (noise, label) to features,  D: (feature, label) to [0, 1]
    D    minimises (1 - D(G))^2 + D(F)^2
    F, C minimise  0.85 * CE with smoothed labels + 0.15 * (1 - D(F))^2
    G    minimises D(G)^2

F, C and G are averaged uniformly. D never leaves its client.

Settled: F is the model up to its last layer and then a projection to `features` (128 for MNIST, 512 elsewhere); noise
has 10 dimensions, uniform on [0, 1]; the reference distribution is that of generated features; D is class-conditional
(an unconditional one would be wrong on clients with two classes): a linear projection, one hidden layer, a sigmoid. D,
then F and C, then G are updated on each batch, G through D without detaching its output. G has one hidden layer of the
features' size. Ours, where the paper is silent: labels are smoothed by 0.1; D's projection and hidden layer have 64
units, and the projection is trained with the rest of D. Of a model with BatchNorm all updates see features under the
batch's statistics; the step of F and C moves the running ones.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Noise, Phase, Task
from upfl.models import Layered, Linear, Relu, mlp
from upfl.models.surgery import with_head
from upfl.state import State, contiguous, prefixed, select
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import gradients, sgd_


class FedADGHyper(LocalHyper):
    lr: float = Field(0.1, gt=0, description="of F and C")
    adversarial_lr: float = Field(0.1, gt=0, description="of G and D")
    features: int = Field(512, ge=1)
    noise: int = Field(10, ge=1, description="dimensions of G's noise")
    projection: int = Field(64, ge=1, description="size of D's projection and of its hidden layer")
    smoothing: float = Field(0.1, ge=0, lt=1, description="of the labels")
    alignment: float = Field(0.15, ge=0, le=1, description="share of the alignment in the loss of F and C")


class FedADG(LocalTraining[FedADGHyper]):
    name = "fedadg"
    title = "FedADG"
    Hyper = FedADGHyper
    remembers = True

    def __init__(self, task: Task, hyper: FedADGHyper) -> None:
        super().__init__(task, hyper)
        head = task.model.head
        assert head is not None, self.why_not(task)
        width = task.model.shapes[f"{head}.weight"][1]
        projection = Linear("projection", width, hyper.features)
        classifier = Linear(head, hyper.features, task.classes)
        model, extractor = (with_head(task.model, layers) for layers in ((projection, classifier), (projection,)))
        assert model is not None
        assert extractor is not None
        self.model, self.extractor, self.classifier = model, extractor, Layered((classifier,))
        self.generator = mlp(hyper.noise + task.classes, (hyper.features,), hyper.features)
        size, inputs = hyper.projection, hyper.features + task.classes
        self.discriminator = Layered(
            (Linear("projection", inputs, size), Linear("hidden", size, size), Relu(), Linear("output", size, 1))
        )

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        if task.model.head is None:
            return "it aligns what the last layer reads, and the model does not end in a linear layer"
        return super().why_not(task)

    @property
    def size(self) -> int:
        return self.model.size + self.generator.size

    def init(self, generator: torch.Generator) -> State:
        return super().init(generator) | prefixed("generator", self.generator.init(generator))

    def memory(self, client: Client) -> State:
        return self.discriminator.init(client.generator("discriminator"))

    def phases(self, round: int) -> tuple[Phase, ...]:
        noise = {"noise": Noise("uniform", self.hyper.noise)}
        return (Phase(self.step, self.hyper.iterations, self.hyper.batch_size, noise=noise),)

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = {name: value.to(next(iter(server.values())), copy=True) for name, value in memory.items()}
        return super().begin(server, memory, client) | prefixed("discriminator", own)

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, weight = self.hyper, batch.weight()
        psi, g, d = (select(carry, part) for part in ("psi", "generator", "discriminator"))
        labels = F.one_hot(batch.y, self.task.classes).to(batch.floats().dtype)
        noise = torch.cat([batch.noise["noise"], labels], dim=1)
        rate, adversarial = hyper.rate(hyper.lr, round), hyper.rate(hyper.adversarial_lr, round)

        def judged(d: State, features: Tensor) -> Tensor:
            return self.discriminator.apply(d, torch.cat([features, labels], dim=1)).squeeze(1).sigmoid()

        real, fake = self.extractor.batchwise(psi, batch.x), self.generator.apply(g, noise)
        _, gradient = gradients(
            lambda d: (((1 - judged(d, fake)).square() + judged(d, real).square()) * weight).sum(), d
        )
        sgd_(d, gradient, adversarial, hyper.weight_decay, hyper.clip)

        def classification(psi: State) -> Tensor:
            features = self.extractor.learning(psi, batch.x)
            log_p = self.classifier.apply(psi, features).log_softmax(1)
            smoothed = (1 - hyper.smoothing) * labels + hyper.smoothing / self.task.classes
            cross_entropy = -(smoothed * log_p).sum(1)
            aligned = (1 - judged(d, features)).square()
            return (((1 - hyper.alignment) * cross_entropy + hyper.alignment * aligned) * weight).sum()

        loss, gradient = gradients(classification, psi)
        sgd_(psi, gradient, rate, hyper.weight_decay, hyper.clip)
        _, gradient = gradients(lambda g: (judged(d, self.generator.apply(g, noise)).square() * weight).sum(), g)
        sgd_(g, gradient, adversarial, hyper.weight_decay, hyper.clip)
        return carry, loss

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        return up, contiguous(select(carry, "discriminator"))

    def local_rate(self, round: int) -> float:
        return self.hyper.rate(self.hyper.lr, round)
