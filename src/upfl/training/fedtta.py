"""FedTTA and FedTTA-Prox: Ye et al., UPFL: Unsupervised Personalized Federated Learning towards New Clients.

Clients meta-learn a prediction model f(.; psi) and an adaptation model g(.; phi) such that one unsupervised step guided
by g makes f fit the client. On a batch (X, Y):

    Z    = f(X; psi),   l_per = ||g(Z; phi)||_2
    psi~ = psi - inner_lr * (grad_psi l_per + weight_decay * psi)
    L    = CE(f(X; psi~), Y)  [+ mu * KL(softmax Z. || softmax Z)]            the last term in FedTTA-Prox
    psi <- psi - outer_lr * clip(grad_psi L),   phi <- phi - adapt_lr * clip(grad_phi L)
    server: the mean of both

Z. are the logits of the model received at the start of the round. The gradients go through the inner step. With
v = grad L at psi~, d = -inner_lr * v and u = grad_Z l_per, so that grad_psi l_per = J^T u:

    grad_psi L = (1 - inner_lr * weight_decay) * v + d/dt (J^T u) along d  [+ J^T mu grad_Z KL]
    grad_phi L = grad_phi <u, J d>

J d is one forward product; both derivatives of <u, J d> through g are one more pass over the small g.

Settled: weight decay in the inner step, no clipping there, phi with momentum 0.9 that restarts every round (authors'
code); the norm is sqrt(sum s^2 + 1e-12), whose second derivative exists at zero; KL is the mean over samples, in the
order of the authors' code; the paper's text has `kl = "own-first"` (`training/sgd.py`: one rule for all methods).
`second_order = false` drops the Hessian term from psi's gradient; phi's stays exact. Of a model with BatchNorm, both
passes take the batch's statistics, the pass at psi moves the running ones, and Z. is normalised by the batch, too, so
that the term is zero where nothing has moved.
"""

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Published, Task, Unlabelled
from upfl.models import Gradient, adaptation_model
from upfl.state import State, prefixed, select
from upfl.training.base import LocalHyper, LocalTraining
from upfl.training.sgd import Order, cross_entropy, divergence, sgd_


class FedTTAHyper(LocalHyper):
    inner_lr: float = Field(0.5, ge=0)
    outer_lr: float = Field(0.3, gt=0)
    adapt_lr: float = Field(0.01, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="of phi, restarted every round")
    adaptation_width: int = Field(32, ge=1, description="hidden units of g")
    second_order: bool = Field(True, description="psi's gradient through the inner step")


class FedTTA(LocalTraining[FedTTAHyper]):
    name = "fedtta"
    title = "FedTTA"
    Hyper = FedTTAHyper
    vectorizes = True
    records = True

    def __init__(self, task: Task, hyper: FedTTAHyper) -> None:
        super().__init__(task, hyper)
        self.g = self.adaptation = adaptation_model(task.classes, hyper.adaptation_width)

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        return task.model.why_not_twice() or super().why_not(task)

    def init(self, generator: torch.Generator) -> State:
        return super().init(generator) | prefixed("phi", self.g.init(generator))

    def carry(self, models: State) -> State:
        carry = super().carry(models)
        return carry | {f"momentum.{name}": torch.zeros_like(value) for name, value in select(carry, "phi").items()}

    @torch.inference_mode()
    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        hyper, psi, phi, momentum = self.hyper, select(carry, "psi"), select(carry, "phi"), select(carry, "momentum")
        decay = hyper.rate(1.0, round)
        inner_lr, outer_lr, adapt_lr = hyper.inner_lr * decay, hyper.outer_lr * decay, hyper.adapt_lr * decay
        shrink = 1 - inner_lr * hyper.weight_decay

        base = self.model.trace(psi, batch.x)
        g = self.g.trace(phi, base.output)
        s = g.output if batch.mask is None else g.output * batch.mask.unsqueeze(1)
        l_per = (s.square().sum() + 1e-12).sqrt()
        direction = s / l_per
        inner = base.backward(g.backward_to_input(direction), factored=True)

        personalized = base.moved(inner, -inner_lr, shrink)  # at psi~
        loss, dz = self.fit(carry, personalized.output, batch)
        v = personalized.backward(dz)

        if (penalty := self.penalty(carry, base.output, batch)) is not None:
            loss = loss + penalty[0]
        grad_phi = Gradient()

        def response(dz: Tensor) -> Tensor:
            """du, where Z moves by dz; on the way, the gradient for phi."""
            nonlocal grad_phi
            ds = g.tangent(None, dz)
            ds = ds if batch.mask is None else ds * batch.mask.unsqueeze(1)
            grad_phi = g.backward_tangent((ds - direction * (direction * ds).sum()) / l_per, inputs=True)
            return g.input_gradient if penalty is None else g.input_gradient + penalty[1]

        if hyper.second_order:
            grad_psi = base.curvature(v, response, scale=-inner_lr, plus=(v, shrink))
        else:
            response(base.tangent(v, scale=-inner_lr))
            grad_psi = v.times(shrink) if penalty is None else base.backward(penalty[1], plus=(v, shrink))

        sgd_(psi, grad_psi, outer_lr, hyper.weight_decay, hyper.clip)
        sgd_(phi, grad_phi, adapt_lr, hyper.weight_decay, hyper.clip, (hyper.momentum, momentum))
        return carry, loss

    @property
    def step_cost(self) -> float:
        # Products a layer: two forward and backward passes (6), J d (2), the derivative of J^T u along d (4).
        return (12 if self.hyper.second_order else 8) / 3

    def fit(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of the personalized model's logits, and its gradient there."""
        return cross_entropy(logits, batch)

    def penalty(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """A term on the base model's logits that is added to the loss, and its gradient there."""
        return None

    def guided(self, published: Published, client: Unlabelled, memory: State | None) -> tuple[State, State]:
        return self.start(published, client, memory), select(published.state, "phi")

    def guide(self, phi: State, logits: Tensor) -> Tensor:
        return self.g.apply(phi, logits)

    def local_rate(self, round: int) -> float:
        return self.hyper.rate(self.hyper.outer_lr, round)


class FedTTAProxHyper(FedTTAHyper):
    mu: float = Field(0.01, ge=0, description="weight of the divergence from the received model")
    kl: Order = Field("target-first", description="KL(received || base), or the other way round")


class FedTTAProx(FedTTA):
    name = "fedtta-prox"
    title = "FedTTA-Prox"
    records = True
    Hyper = FedTTAProxHyper
    hyper: FedTTAProxHyper

    def begin(self, server: State, memory: State, client: Client) -> State:
        return super().begin(server, memory, client) | self.received(server)

    @property
    def step_cost(self) -> float:
        # Z. (1), and without the second order a pass back of its own for the penalty (2).
        return super().step_cost + (1 if self.hyper.second_order else 3) / 3

    def penalty(self, carry: State, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        received = self.model.batchwise(select(carry, "received"), batch.x)
        return divergence(logits, received, batch.weight() * self.hyper.mu, self.hyper.kl)
