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
units, and the projection is trained with the rest of D. Features are computed once a batch, in training mode: D and F
see the same, and of a model with BatchNorm running statistics move once.
"""

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Noise, Phase, Task
from upfl.models import Layered, Linear, Relu, mlp
from upfl.models.surgery import with_head
from upfl.models.trace import LayeredTrace
from upfl.state import State, contiguous, prefixed, select
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import sgd_


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
    records = True
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

    @torch.inference_mode()
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, weight = self.hyper, batch.weight()
        psi, g, d = (select(carry, part) for part in ("psi", "generator", "discriminator"))
        labels = weight.new_zeros(len(batch.y), self.task.classes).scatter_(1, batch.y.unsqueeze(1), 1.0)
        features = self.extractor.trace(psi, batch.x)
        fake = self.generator.trace(g, torch.cat([batch.noise["noise"], labels], dim=1))
        rate, adversarial = hyper.rate(hyper.lr, round), hyper.rate(hyper.adversarial_lr, round)

        # D: 1 for what is generated, 0 for what is real.
        of_both, p, slope = self.judged(d, torch.cat([fake.output, features.output]), torch.cat([labels, labels]))
        wanted = torch.cat([torch.ones_like(weight), torch.zeros_like(weight)])
        gradient = of_both.backward((2 * (p - wanted) * slope * torch.cat([weight, weight])).unsqueeze(1))
        sgd_(d, gradient, adversarial, hyper.weight_decay, hyper.clip)

        # F and C: the labels, and features that D takes for generated ones.
        of_real, p, slope = self.judged(d, features.output, labels)
        classified = self.classifier.trace(psi, features.output)
        log_p = classified.output.log_softmax(1)
        smoothed = (1 - hyper.smoothing) * labels + hyper.smoothing / self.task.classes
        cross_entropy, aligned = -(smoothed * log_p).sum(1), (1 - p).square()
        loss = (((1 - hyper.alignment) * cross_entropy + hyper.alignment * aligned) * weight).sum()
        share, other = (1 - hyper.alignment) * weight, hyper.alignment * weight
        above = classified.backward((log_p.exp() - smoothed) * share.unsqueeze(1), inputs=True)
        toward = of_real.backward_to_input((-2 * (1 - p) * slope * other).unsqueeze(1))[:, : hyper.features]
        below = features.backward(classified.input_gradient + toward)
        sgd_(psi, below.also(dict(above)), rate, hyper.weight_decay, hyper.clip)

        # G, through D.
        of_fake, p, slope = self.judged(d, fake.output, labels)
        toward = of_fake.backward_to_input((2 * p * slope * weight).unsqueeze(1))[:, : hyper.features]
        sgd_(g, fake.backward(toward.contiguous()), adversarial, hyper.weight_decay, hyper.clip)
        return carry, loss

    def judged(self, d: State, features: Tensor, labels: Tensor) -> tuple[LayeredTrace, Tensor, Tensor]:
        """D's trace, its judgement p of each feature, and the derivative of p with respect to D's last number."""
        trace = self.discriminator.trace(d, torch.cat([features, labels], dim=1))
        p = trace.output.squeeze(1).sigmoid()
        return trace, p, p * (1 - p)

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        return up, contiguous(select(carry, "discriminator"))

    def local_rate(self, round: int) -> float:
        return self.hyper.rate(self.hyper.lr, round)
