"""BatchNorm: running statistics in local training, in the sum over clients, and under TENT."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import plugin_models
from tests.modules import SHAPE, batch, own
from tests.reference import CLASSES, Somebody
from upfl import models
from upfl.contract import Architecture, Batch, Published, Task, Unlabelled
from upfl.engine.fold import FixedPointSum
from upfl.errors import ConfigError
from upfl.methods import TRAININGS, make_training
from upfl.personalize.tent import Tent
from upfl.randomness import generator
from upfl.state import is_buffer, prefixed, select
from upfl.training.fedavg import FedAvg
from upfl.training.fedper import FedPer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_local_training_with_batchnorm_is_plain_pytorchs() -> None:
    model = own("own-batchnorm")
    training = FedAvg(Task(model, CLASSES, 2), FedAvg.Hyper(weight_decay=0.0, lr=0.1))
    server = training.init(generator(1))
    net = plugin_models.BatchNormNet(SHAPE, CLASSES)
    net.load_state_dict(
        {key.removeprefix("buffers."): value for key, value in select(server, "psi").items()}, strict=False
    )
    carry, optimizer = training.begin(server, {}, Somebody()), torch.optim.SGD(net.parameters(), 0.1)
    net.train()
    for i in range(3):
        one = batch(9, i)
        carry, _ = training.step(carry, one, 0)
        optimizer.zero_grad()
        F.cross_entropy(net(one.x), one.y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    psi = select(carry, "psi")
    for key, value in net.state_dict().items():
        if value.is_floating_point():
            ours = psi[key] if key in psi else psi[f"buffers.{key}"]
            torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-6)
    net.eval()
    torch.testing.assert_close(model.apply(psi, batch(5, 7).x), net(batch(5, 7).x).detach(), rtol=1e-4, atol=1e-5)
    assert not any(key.endswith("num_batches_tracked") for key in psi)


def test_the_server_averages_running_statistics_and_no_step_moves_them() -> None:
    training = FedAvg(Task(own("own-batchnorm"), CLASSES, 2), FedAvg.Hyper())
    server, ends = training.init(generator(1)), []
    for i in (0, 1):
        carry, _ = training.step(training.begin(server, {}, Somebody()), batch(9, i), 0)
        ends.append(carry)
    total = FixedPointSum(training.finish(server, ends[0], Somebody())[0], 2)
    for carry in ends:
        total.add(training.finish(server, carry, Somebody())[0])
    total.merged()
    after = training.aggregate(server, total, 0)
    for name in (name for name in after if is_buffer(name)):
        torch.testing.assert_close(after[name], (ends[0][name] + ends[1][name]) / 2)
        assert not torch.equal(after[name], server[name])


class Holder(Somebody):
    """A client with samples."""

    def batches(self, split: Any, size: int) -> Any:
        yield batch(self.count, 3)


@pytest.mark.parametrize("name", [name for name, kind in TRAININGS.items() if kind.takes_steps])
def test_a_step_of_every_training_is_in_training_mode_and_leaves_no_running_statistic_as_it_was(name: str) -> None:
    model = own("own-batchnorm")
    task = Task(model, CLASSES, 2, {"": Architecture(model)}, torch.zeros(4, *SHAPE))
    if TRAININGS[name].why_not(task):
        assert name == "odpfl-hn"
        return
    training, client = make_training(name, task, TRAININGS[name].Hyper()), Holder()
    carry = training.begin(training.init(generator(1)), training.memory(client), client)
    before = {key: value.clone() for key, value in carry.items() if key.startswith("psi.buffers.")}
    phase, given = training.phases(0)[-1], batch(16, 0)
    noise = {key: torch.randn(16, one.size, generator=generator(key)) for key, one in phase.noise.items()}
    with torch.no_grad():
        carry, _ = phase.step(carry, Batch(given.x, given.y, noise=noise), 0)
    assert before
    assert not [key for key, value in before.items() if torch.equal(value, carry[key])]


def test_scaffold_and_fedgma_take_the_mean_of_running_statistics() -> None:
    for name, hyper in (("scaffold", {"server_lr": 0.5}), ("fedgma", {"server_lr": 0.5, "threshold": 1.0})):
        training = make_training(name, Task(own("own-batchnorm"), CLASSES, 2), TRAININGS[name].Hyper(**hyper))
        server = training.init(generator(1))
        memory, who = training.memory(Somebody()), Somebody()
        carry, _ = training.step(training.begin(server, memory, who), batch(9, 1), 0)  # type: ignore[attr-defined]
        up, _ = training.finish(server, carry, who)
        total = FixedPointSum(up, 1)
        total.add(up)
        total.merged()
        expected = {key: carry[key] for key in carry if is_buffer(key) and key.startswith("psi.")}
        after = training.aggregate({key: value.clone() for key, value in server.items()}, total, 0)
        assert expected
        for key, value in expected.items():
            torch.testing.assert_close(after[key], value)
        assert not any(is_buffer(key) for key in after if key.startswith(("control.", "sign.")))


def test_a_batch_of_one_sample_takes_running_statistics() -> None:
    model = own("own-batchnorm")
    params = model.init(generator(0))
    one = batch(1, 0).x
    torch.testing.assert_close(model.trace(params, one).output, model.apply(params, one))
    assert torch.equal(model.batchwise(params, one), model.apply(params, one))


def test_tent_on_batchnorm_is_the_originals() -> None:
    """Scales and shifts alone, under the statistics of the newcomer's data, against plain PyTorch."""
    training = FedAvg(Task(own("own-batchnorm"), CLASSES, 2), FedAvg.Hyper())
    state = training.init(generator(4))
    for i in range(5):  # statistics that are not the initial ones
        training.step(state, batch(16, i), 0)
    x, lr = batch(300, 9).x, 0.05
    tent = Tent(training, Tent.Hyper(steps=3, lr=lr, weight_decay=0.0, clip=1e9))
    personalized = tent.personalize(Published(state, 0), Unlabelled(0, x))

    net = plugin_models.BatchNormNet(SHAPE, CLASSES)
    net.load_state_dict(
        {key.removeprefix("buffers."): value for key, value in select(state, "psi").items()}, strict=False
    )
    torch.testing.assert_close(personalized.before, net.eval()(x).detach(), rtol=1e-4, atol=1e-5)
    net.train().requires_grad_(False)
    norms = [layer for layer in net if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
    for layer in norms:
        layer.requires_grad_(True)
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    optimizer = torch.optim.SGD([value for layer in norms for value in layer.parameters()], lr)
    for _ in range(3):
        p = net(x).log_softmax(1)
        optimizer.zero_grad()
        (-(p.exp() * p).sum(1).mean() / torch.log(torch.tensor(2.0))).backward()
        optimizer.step()
    params = personalized.predictor.params[0]
    for key, value in net.named_parameters():
        torch.testing.assert_close(params[key], value.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(personalized.logits, net(x).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(personalized.predict_logits(x[:7]), personalized.logits[:7], rtol=1e-4, atol=1e-4)


def test_tent_on_groupnorm_moves_scales_and_shifts_alone() -> None:
    training = FedAvg(Task(own("resnet8", width=0.25), CLASSES, 2), FedAvg.Hyper())
    state = training.init(generator(4))
    after = (
        Tent(training, Tent.Hyper()).personalize(Published(state, 0), Unlabelled(0, batch(20, 1).x)).predictor.params[0]
    )
    moved = {name for name, value in select(state, "psi").items() if not torch.equal(after[name], value)}
    assert moved
    assert all("norm" in name for name in moved)


def test_fedper_can_keep_normalisation_layers_on_the_client() -> None:
    """FedBN, by patterns."""
    model = own("own-batchnorm")
    training = FedPer(Task(model, CLASSES, 2), FedPer.Hyper(personal=("1.*", "4.*", "8.*")))
    server, memory = training.init(generator(0)), training.memory(Somebody())
    assert {name.split(".")[-2] for name in memory} == {"1", "4", "8"}
    assert "psi.buffers.1.running_mean" in memory
    assert not server.keys() & memory.keys()
    assert {*server, *memory} == set(prefixed("psi", model.init(generator(0))))
    with pytest.raises(ConfigError, match=r"none of the model's parameters .* 0\.weight"):
        FedPer(Task(model, CLASSES, 2), FedPer.Hyper(personal=("no-such*",)))


def test_frozen_parameters_belong_to_the_state_and_stay() -> None:
    def half(shape: Any, classes: int) -> nn.Module:
        net = plugin_models.Mlp(shape, classes)
        net.fc1.requires_grad_(False)
        return net

    models.register("half-frozen", half)
    model = own("half-frozen")
    assert set(model.buffers) == {"buffers.fc1.weight", "buffers.fc1.bias"}
    training = FedAvg(Task(model, CLASSES, 2), FedAvg.Hyper())
    server = training.init(generator(0))
    carry, _ = training.step(training.begin(server, {}, Somebody()), batch(8, 0), 0)
    assert torch.equal(carry["psi.buffers.fc1.weight"], server["psi.buffers.fc1.weight"])
    assert not torch.equal(carry["psi.fc2.weight"], server["psi.fc2.weight"])
