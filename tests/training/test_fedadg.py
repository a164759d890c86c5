"""FedADG: its adversarial steps against plain autograd, and what is never sent."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.params import Params, descend, difference, distance, doubled, gradient, leaves, norm
from tests.helpers.rounds import CIFAR10, FEMNIST, MLP, double_server, listen, local_round, noisy, small_run
from tests.reference import CLASSES, Case, Somebody, forward_convolutions, forward_mlp
from upfl.contract import Batch, Task
from upfl.models import Linear
from upfl.state import select
from upfl.training.fedadg import FedADG, FedADGHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def forward_features(params: Params, x: Tensor) -> Tensor:
    """F: the model up to its last layer, and the projection."""
    if "conv1.weight" in params:
        x = F.relu(F.linear(forward_convolutions(params, x), params["fc1.weight"], params["fc1.bias"]))
    else:
        for name in ("fc1", "fc2"):
            x = F.relu(F.linear(x.flatten(1), params[f"{name}.weight"], params[f"{name}.bias"]))
    return F.linear(x, params["projection.weight"], params["projection.bias"])


def forward_discriminator(params: Params, features: Tensor, labels: Tensor) -> Tensor:
    x = F.linear(torch.cat([features, labels], 1), params["projection.weight"], params["projection.bias"])
    x = F.relu(F.linear(x, params["hidden.weight"], params["hidden.bias"]))
    return torch.sigmoid(F.linear(x, params["output.weight"], params["output.bias"])).squeeze(1)


@dataclass
class AdversarialClient:
    """FedADG's local steps by the method card, with plain autograd."""

    last: str
    psi: Params
    generator: Params
    discriminator: Params
    clip: float
    norms: list[float] = field(default_factory=list)

    def down(self, params: Params, loss: Tensor, rate: float) -> Params:
        grads = gradient(loss, params)
        self.norms.append(norm(grads))
        return descend(params, grads, rate, 0.01, self.clip)

    def step(self, batch: Batch, lr: float, adversarial_lr: float) -> float:
        labels = F.one_hot(batch.y, CLASSES).double()
        noise = torch.cat([batch.noise["noise"], labels], 1)
        psi, g, d = leaves(self.psi), leaves(self.generator), leaves(self.discriminator)
        real, fake = forward_features(psi, batch.x), forward_mlp(g, noise)
        of_fake, of_real = forward_discriminator(d, fake, labels), forward_discriminator(d, real, labels)
        d = leaves(self.down(d, ((1 - of_fake) ** 2).mean() + (of_real**2).mean(), adversarial_lr))
        logits = F.linear(real, psi[f"{self.last}.weight"], psi[f"{self.last}.bias"])
        cross_entropy = F.cross_entropy(logits, batch.y, label_smoothing=0.1)
        loss = 0.85 * cross_entropy + 0.15 * ((1 - forward_discriminator(d, real, labels)) ** 2).mean()
        self.psi = self.down(psi, loss, lr)
        of_fake = forward_discriminator(d, forward_mlp(g, noise), labels)
        self.generator = self.down(g, (of_fake**2).mean(), adversarial_lr)
        self.discriminator = {name: value.detach() for name, value in d.items()}
        return float(loss.detach())


def adversarial(case: Case, **hyper: Any) -> FedADG:
    values = {"lr": 0.3, "adversarial_lr": 0.2, "features": 12, "projection": 6, "weight_decay": 0.01} | hyper
    return FedADG(Task(case.model, CLASSES, 3), FedADGHyper(**values))


@pytest.mark.parametrize("clip", [0.02, 1e9])
def test_consecutive_fedadg_steps_equal_plain_autograd(case: Case, clip: float) -> None:
    training = adversarial(case, clip=clip)
    server, memory = double_server(training), doubled(training.memory(Somebody(id=1)))
    batches = [noisy(case.batch(9, seed), training, seed) for seed in range(4)]
    up, kept, losses = local_round(training, server, memory, Somebody(id=1, round=7), batches)
    psi, g = select(server, "psi"), select(server, "generator")
    reference = AdversarialClient("fc2" if "conv1.weight" in psi else "fc3", psi, g, memory, clip)
    decay = 0.99**0.7
    expected = [reference.step(batch, 0.3 * decay, 0.2 * decay) for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert min(reference.norms) > 1e-3
    assert (min(reference.norms) > clip) == (clip < 1), "the case clips where it should not, or not where it should"
    assert distance(select(dict(up), "psi"), difference(reference.psi, psi)) < 1e-6
    assert distance(select(dict(up), "generator"), difference(reference.generator, g)) < 1e-6
    assert distance(difference(kept, memory), difference(reference.discriminator, memory)) < 1e-6


def test_fedadgs_discriminator_is_never_sent_and_each_client_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = listen(monkeypatch)
    run = small_run(tmp_path / "run", "fedadg", "features=12", "projection=6")
    parts = {name.split(".")[0] for name in sent}
    assert parts == {"psi", "generator", "weight", "engine"}
    assert set(run.server) | {"weight", "engine.loss"} == sent.keys()
    assert not any("discriminator" in name for name in [*sent, *run.server])
    memories = {name: state for name, state in run.tensors.items() if name.startswith("memory/")}
    assert len(memories) >= 4
    shapes = {"projection.weight": (6, 22), "hidden.weight": (6, 6), "output.weight": (1, 6)}
    for state in memories.values():
        assert state.keys() == {name.replace("weight", kind) for name in shapes for kind in ("weight", "bias")}
        assert {name: tuple(state[name].shape) for name in shapes} == shapes
    first, second, *_ = memories.values()
    assert distance(first, second) > 0.1


def test_fedadgs_parts_have_the_papers_sizes() -> None:
    for model, features, classes in ((MLP, 128, 10), (CIFAR10, 512, 10), (FEMNIST, 512, 62)):
        training = FedADG(Task(model, classes, 3), FedADGHyper(features=features))
        last = model.layers[-1]
        assert isinstance(last, Linear)
        assert training.model.shapes["projection.weight"] == (features, last.inputs)
        assert training.model.shapes[f"{last.name}.weight"] == (classes, features)
        kept = [name for name in model.shapes if not name.startswith(last.name)]
        assert all(training.model.shapes[name] == model.shapes[name] for name in kept)
        (phase,) = training.phases(0)
        assert (phase.noise["noise"].kind, phase.noise["noise"].size) == ("uniform", 10)
        *_, output = training.generator.shapes.values()
        assert output == (features,)
