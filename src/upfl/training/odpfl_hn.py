"""ODPFL-HN: Amosy, Eyal, Chechik, Late to the Party? On-Demand Unlabeled Personalized Federated Learning, WACV 2024.

An encoder E turns a client's unlabelled samples into an embedding, a hypernetwork H turns that into the client's
weights:

    e = mean_j E(x_j),   theta = H(e),   theta' = theta after tau local SGD steps on CE
    the client sends the gradient of <H(e), theta - theta'> for H and E, theta - theta' held fixed
    H <- H - hypernet_lr * clip(mean gradient),   E <- E - encoder_lr * clip(mean gradient)
    newcomer: theta = H(mean_j E(x_j)), no training

Settled: the mean is weighted by sample count; the gradient norm of H and E is clipped to 50 each (pFedHN's code). E is
the convolutions and a linear layer to 32 (for an MLP: inputs-200-32); H has a hidden layer of 100, three further ones,
and one linear head for each parameter tensor. The heads hold 100 numbers for each parameter of the model: 218 million
for CIFAR-10's ConvNet, 667 million for FEMNIST's. So gradients of heads, outer products of a tensor's change with the
last hidden layer, are left in these two factors, which the sum multiplies piece by piece. `rank` puts a bottleneck
before the heads: `rank = 4` has about 20 times fewer parameters.

Ours, where paper and code are silent: H and E have the weight decay of local training; the last hidden layer goes
through a rectifier into the heads; a head's bias starts as the model's own initialisation, its weights small, so that
the first theta is a model that can be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Client, Published, Task, Total, Unlabelled
from upfl.models import Layer, Layered, Linear, Relu, mlp
from upfl.models.surgery import embedding
from upfl.state import Factored, State, norm, prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper

CHUNK = 256


class OdpflHnHyper(FedAvgHyper):
    encoder_lr: float = Field(0.5, gt=0)
    hypernet_lr: float = Field(0.5, gt=0)
    embedding: int = Field(32, ge=1)
    hidden: int = Field(100, ge=1)
    rank: int | None = Field(None, ge=1, description="a bottleneck before the heads, to save memory")
    server_clip: float = Field(50.0, gt=0)
    aggregation: Literal["uniform", "samples"] = "samples"


class OdpflHn(FedAvg):
    name = "odpfl-hn"
    title = "ODPFL-HN"
    records = True
    memory_advice = "--set rank=4 makes the hypernetwork about 20 times smaller"
    Hyper = OdpflHnHyper
    hyper: OdpflHnHyper

    def __init__(self, task: Task, hyper: OdpflHnHyper) -> None:
        super().__init__(task, hyper)
        encoder = embedding(task.model, hyper.embedding)
        assert encoder is not None, self.why_not(task)
        self.encoder = encoder
        width = hyper.rank or hyper.hidden
        trunk = mlp(hyper.embedding, (hyper.hidden,) * 3, hyper.hidden)
        bottleneck: tuple[Layer, ...] = (Relu(), Linear("bottleneck", hyper.hidden, width)) if hyper.rank else (Relu(),)
        self.trunk = Layered((*trunk.layers, *bottleneck))
        self.heads = {name: Layered((Linear(name, width, _size(shape)),)) for name, shape in task.model.shapes.items()}

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        if task.model.buffers:
            return "a hypernetwork makes parameters, and this model has running statistics or frozen parameters, too"
        if task.model.random:
            return "its encoder is made of the model, and must not draw random numbers as dropout does"
        if embedding(task.model, 1) is None:
            return "it makes an encoder of the model's layers up to the last, which must be linear"
        return super().why_not(task)

    def init(self, generator: torch.Generator) -> State:
        state = prefixed("encoder", self.encoder.init(generator)) | prefixed("trunk", self.trunk.init(generator))
        own = self.model.init(generator)
        for name, head in self.heads.items():
            params = head.init(generator)
            # theta starts near the model's own initialisation: the bias is one, the weights move it by the embedding.
            params[f"{name}.weight"] *= own[name].std(unbiased=False).nan_to_num() + 1e-3
            params[f"{name}.bias"] = own[name].flatten()
            state |= prefixed("head", params)
        return state

    def begin(self, server: State, memory: State, client: Client) -> State:
        embedded = self.embed(server, [batch.x for batch in client.batches("train", CHUNK)])
        theta = self.generate(server, embedded)
        start = prefixed("start", {name: value.clone() for name, value in theta.items()})
        return self.model.layout(prefixed("psi", theta)) | start | {"embedded": embedded}

    def finish(self, server: State, carry: State, client: Client) -> tuple[Mapping[str, Tensor], State]:  # type: ignore[override]
        change = {name: (carry[f"start.{name}"] - carry[f"psi.{name}"]).contiguous() for name in self.model.shapes}
        weight = self.hyper.weight(client)
        batches = [batch.x for batch in client.batches("train", CHUNK)]
        return self.gradient(server, carry["embedded"], batches, change, weight), {}

    def generate(self, server: State, embedded: Tensor) -> State:
        """theta = H(e)."""
        hidden = self.trunk.apply(select(server, "trunk"), embedded)
        return {name: self._head(server, name, hidden) for name in self.heads}

    def embed(self, server: State, batches: list[Tensor]) -> Tensor:
        """e = mean E(x), as a row."""
        encoder, count = select(server, "encoder"), sum(len(x) for x in batches)
        return torch.stack([self.encoder.apply(encoder, x).sum(0) for x in batches]).sum(0, keepdim=True) / count

    def gradient(
        self, server: State, embedded: Tensor, batches: list[Tensor], change: State, weight: float
    ) -> Mapping[str, Tensor]:
        """The gradient of <H(mean E(x)), change> for H and E, times weight; embedded is the mean, known already."""
        encoder = select(server, "encoder")
        trunk = self.trunk.trace(select(server, "trunk"), embedded)
        hidden = trunk.output
        flat = {name: value.flatten() * weight for name, value in change.items()}
        dh = torch.zeros_like(hidden)
        for name in self.heads:
            dh += (flat[name] @ server[f"head.{name}.weight"]).unsqueeze(0)
        up = prefixed("trunk", trunk.backward(dh, inputs=True))
        count = sum(len(x) for x in batches)
        for x in batches:
            trace = self.encoder.trace(encoder, x)
            part = trace.backward((trunk.input_gradient / count).expand(len(x), -1).contiguous())
            for name, value in prefixed("encoder", part).items():
                up[name] = up[name] + value if name in up else value
        up = {name: up[name].contiguous() for name in server if not name.startswith("head.")}
        up |= {f"head.{name}.bias": value for name, value in flat.items()}
        heads = {f"head.{name}.weight": (value, hidden[0]) for name, value in flat.items()}
        return Factored(up | {"weight": torch.tensor(weight)}, heads)

    def aggregate(self, server: State, total: Total, round: int) -> State:
        hyper = self.hyper
        for part, lr in (("encoder", hyper.encoder_lr), ("hypernet", hyper.hypernet_lr)):
            names = [name for name in server if name.startswith("encoder.") == (part == "encoder")]
            length = torch.stack([norm([total.mean(name)]) for name in names]).norm()
            scale = float((hyper.server_clip / (length + 1e-6)).clamp(max=1.0))
            rate = hyper.rate(lr, round)
            for name in names:  # in place, one tensor at a time: two copies of the heads would not fit
                value = server[name].mul_(1 - rate * hyper.weight_decay)
                value.sub_(total.mean(name).to(value.device), alpha=rate * scale)
        return server

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        parts = list(client.x.split(CHUNK))  # type: ignore[no-untyped-call]
        return self.model.layout(self.generate(published.state, self.embed(published.state, parts)))

    # The sum has the gradients of H's heads: outer products of theta - theta' with what H computed. A server that has H
    # forms them itself. What then crosses the wire, besides E, is e, theta and what is needed to train both.

    def bytes_down(self, server: State, round: int) -> int:
        """E, theta, and the gradient for e."""
        return 4 * (self.encoder.size + self.model.size + self.hyper.embedding)

    def bytes_up(self, sizes: Mapping[str, int]) -> int:
        """e, theta - theta', the gradient for E, and the weight."""
        return 4 * (self.hyper.embedding + self.model.size + self.encoder.size + 1)

    def publish(self, server: State) -> State:
        return server

    def remark(self) -> str:
        heads = f"low-memory heads of rank {self.hyper.rank}" if self.hyper.rank else "full heads"
        return f"the encoder and the hypernetwork, with {heads}, have {self.size:,} parameters"

    @property
    def size(self) -> int:
        return self.encoder.size + self.trunk.size + sum(head.size for head in self.heads.values())

    def _head(self, server: State, name: str, hidden: Tensor) -> Tensor:
        weight, bias = server[f"head.{name}.weight"], server[f"head.{name}.bias"]
        return torch.addmv(bias, weight, hidden[0]).view(self.model.shapes[name])


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
