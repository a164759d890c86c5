"""FedSR: Nguyen, Torr, Lim, FedSR: A Simple and Effective Domain Generalization Method for FL, NeurIPS 2022.

The representation is Gaussian. With (m, s) the encoder's output in halves, sigma = softplus(s), eps ~ N(0, 1):

    z = m + sigma * eps
    L = CE(classifier(z), Y) + l2r * mean ||z||_2 + cmi * mean KL(N(C m, C sigma) || N(r_m[Y], softplus(r_s[Y])))

r_m, r_s (a reference for each class, started at 0 and 1) and the scalar C (started at 1) are learned with momentum 0.9
and stay on the client. The KL is summed over dimensions, averaged over the batch.

Settled: the MLP's second layer is doubled (400 = 200 + 200); the ConvNet's second convolution is (128 channels),
flattened and split in halves; any other module gets a linear layer between what its last layer read and that layer, as
the authors' ResNet does. All feed the classifier without a rectifier of their own, as a Gaussian's mean has a
sign; momentum restarts every round. r and C have no weight decay and are clipped apart from psi. 1e-6 is added to sigma
and 1e-12 to the ratio of variances in the KL, which keeps its logarithm finite where a representation collapses: sigma
under 1e-5 counts as wider than it is. A prediction averages the probabilities of 20 samples whose eps come from a fixed
seed and are the same for every input, so that it is a function of the input alone.
"""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Noise, Phase, Task
from upfl.models.surgery import halves
from upfl.randomness import generator as named_generator
from upfl.state import State, contiguous, prefixed, select
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import gradients_through, sgd_

SAMPLES = 20


class FedSRHyper(LocalHyper):
    lr: float = Field(0.3, gt=0)
    l2r: float = Field(0.01, ge=0, description="weight of the representation's norm")
    cmi: float = Field(0.0005, ge=0, description="weight of the conditional divergence")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the references, restarted every round")


class FedSR(LocalTraining[FedSRHyper]):
    name = "fedsr"
    title = "FedSR"
    Hyper = FedSRHyper
    remembers = True

    def __init__(self, task: Task, hyper: FedSRHyper) -> None:
        super().__init__(task, hyper)
        cut = halves(task.model)
        assert cut is not None, self.why_not(task)
        self.model, self.encoder, self.classifier = cut
        self.dimensions = next(iter(self.classifier.shapes.values()))[1]
        self.eps = torch.randn(SAMPLES, 1, self.dimensions, generator=named_generator("fedsr", "prediction"))

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        if halves(task.model) is None:
            return (
                "it makes a Gaussian of what the last layer reads, which must be linear, and not the model's only one"
            )
        return super().why_not(task)

    def memory(self, client: Client) -> State:
        reference = (self.task.classes, self.dimensions)
        return {"r_m": torch.zeros(reference), "r_s": torch.ones(reference), "C": torch.ones(())}

    def phases(self, round: int) -> tuple[Phase, ...]:
        noise = {"eps": Noise("normal", self.dimensions)}
        return (Phase(self.step, self.hyper.iterations, self.hyper.batch_size, noise=noise),)

    def begin(self, server: State, memory: State, client: Client) -> State:
        own = {name: value.to(next(iter(server.values())), copy=True) for name, value in memory.items()}
        still = {name: torch.zeros_like(value) for name, value in own.items()}
        return super().begin(server, memory, client) | prefixed("own", own) | prefixed("momentum", still)

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, lr = self.hyper, self.hyper.rate(self.hyper.lr, round)
        psi, own, momentum = select(carry, "psi"), select(carry, "own"), select(carry, "momentum")
        above = {name: psi[name] for name in self.classifier.shapes}
        loss, below, rest = gradients_through(
            self.encoder.trace(psi, batch.x),
            lambda encoded, params: self.loss(encoded, params, batch),
            above | prefixed("own", own),
        )
        gradient = below.also({name: rest[name] for name in above})
        sgd_(psi, gradient, lr, hyper.weight_decay, hyper.clip)
        sgd_(own, select(rest, "own"), lr, 0.0, hyper.clip, (hyper.momentum, momentum))
        return carry, loss

    def loss(self, encoded: Tensor, params: State, batch: Batch) -> Tensor:
        own, weight = select(params, "own"), batch.weight()
        m, sigma = self.gaussian(encoded)
        z = m + sigma * batch.noise["eps"]
        log_p = self.classifier.apply(params, z).log_softmax(1)
        cross_entropy = -(log_p.gather(1, batch.y.unsqueeze(1)).squeeze(1) * weight).sum()
        length = ((z.square().sum(1) + 1e-12).sqrt() * weight).sum()
        divergence = gaussian_kl(own["C"] * m, own["C"] * sigma, own["r_m"][batch.y], F.softplus(own["r_s"])[batch.y])
        return cross_entropy + self.hyper.l2r * length + self.hyper.cmi * (divergence.sum(1) * weight).sum()

    def gaussian(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation of each sample's representation."""
        m, s = encoded.flatten(1).chunk(2, dim=1)
        return m, F.softplus(s) + 1e-6

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        return up, contiguous(select(carry, "own"))

    def logits(self, params: State, x: Tensor) -> Tensor:
        return self._predicted(params, self.encoder.apply(params, x))

    def batchwise(self, params: State, x: Tensor) -> Tensor:
        return self._predicted(params, self.encoder.batchwise(params, x))

    def _predicted(self, params: State, encoded: Tensor) -> Tensor:
        m, sigma = self.gaussian(encoded)
        eps = self.eps.to(encoded.device)
        log_p = torch.stack([self.classifier.apply(params, m + sigma * e).log_softmax(1) for e in eps])
        return log_p.logsumexp(0) - math.log(SAMPLES)

    def features(self, params: State, x: Tensor) -> Tensor:
        return self.gaussian(self.encoder.apply(params, x))[0]

    @property
    def head(self) -> None:
        return None  # predictions are means over samples of the representation

    def local_rate(self, round: int) -> float:
        return self.hyper.rate(self.hyper.lr, round)


def gaussian_kl(m: Tensor, sigma: Tensor, to_m: Tensor, to_sigma: Tensor) -> Tensor:
    """KL(N(m, sigma) || N(to_m, to_sigma)), entry by entry; sigma is its absolute value."""
    ratio = (sigma / to_sigma).square() + 1e-12
    return 0.5 * (ratio + ((m - to_m) / to_sigma).square() - 1 - ratio.log())
