"""ODPFL-HN: the hypernetwork's gradient against autograd, its sizes, and its memory."""

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.params import Params, descend, difference, distance, gradient, leaves, norm
from tests.helpers.rounds import CIFAR10, FEMNIST, MLP, double_server, holder, local_round, tensor_bytes, total_of
from tests.reference import CLASSES, Case, descended, forward_convolutions, forward_mlp
from upfl.contract import Batch, Published, Task, Unlabelled
from upfl.engine.fold import FixedPointSum
from upfl.engine.local import with_loss
from upfl.models import Layered, mlp
from upfl.randomness import generator
from upfl.state import Factored, select
from upfl.training.odpfl_hn import OdpflHn, OdpflHnHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def hypernetwork(case: Case, rank: int | None = None, **hyper: Any) -> OdpflHn:
    values = {"embedding": 6, "hidden": 11, "lr": 0.3} | hyper
    return OdpflHn(Task(case.model, CLASSES, 3), OdpflHnHyper(rank=rank, **values))


def forward_embedding(encoder: Params, x: Tensor) -> Tensor:
    """mean E(x)"""
    if "conv1.weight" in encoder:
        x = forward_convolutions(encoder, x)
        return F.linear(x, encoder["embedding.weight"], encoder["embedding.bias"]).mean(0)
    return forward_mlp(encoder, x).mean(0)


def forward_hypernetwork(server: Params, case: Case, x: Tensor) -> Params:
    """H(mean E(x)): a hidden layer, three further ones, the bottleneck if there is one, a head for each tensor."""
    h, trunk = forward_embedding(select(server, "encoder"), x), select(server, "trunk")
    for i in range(1, 5):
        h = F.relu(F.linear(h, trunk[f"fc{i}.weight"], trunk[f"fc{i}.bias"]))
    if "bottleneck.weight" in trunk:
        h = F.linear(h, trunk["bottleneck.weight"], trunk["bottleneck.bias"])
    return {
        name: F.linear(h, server[f"head.{name}.weight"], server[f"head.{name}.bias"]).view(shape)
        for name, shape in case.model.shapes.items()
    }


def hypernetwork_gradient(server: Params, case: Case, x: Tensor, change: Params) -> Params:
    """The gradient of <H(mean E(x)), change> by autograd."""
    at = leaves(server)
    with torch.enable_grad():
        theta = forward_hypernetwork(at, case, x)
        return gradient(torch.stack([(theta[name] * change[name]).sum() for name in theta]).sum(), at)


def local_change(case: Case, theta: Params, batches: Sequence[Batch], lr: float) -> Params:
    """theta - theta'"""
    return difference(theta, descended(case.forward, theta, batches, lr))


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_odpfl_hns_gradient_is_that_of_the_inner_product_with_the_weight_change(
    case: Case, rank: int | None, aggregation: str
) -> None:
    training = hypernetwork(case, rank, aggregation=aggregation)
    server, own = double_server(training), case.batch(300, 4)
    batches = [case.batch(9, seed) for seed in range(3)]
    up, kept, _ = local_round(training, server, {}, holder(own, round=7), batches)
    theta = forward_hypernetwork(server, case, own.x)
    change = local_change(case, theta, batches, 0.3 * 0.99**0.7)
    expected = hypernetwork_gradient(server, case, own.x, change)
    weight = float(up["weight"])
    assert (weight == 1) == (aggregation == "uniform")
    assert up.keys() == server.keys() | {"weight"}
    for name, value in expected.items():
        assert norm({name: value}) > 0, name
        assert up[name].shape == server[name].shape
        assert distance({name: up[name] / weight}, {name: value}) < 1e-8, name
    assert kept == {}


@pytest.mark.parametrize("server_clip", [1e-4, 1e9])
def test_an_odpfl_hn_round_weighs_by_samples_and_clips_encoder_and_hypernetwork_apart(
    case: Case, server_clip: float
) -> None:
    hyper = {"encoder_lr": 0.4, "hypernet_lr": 0.7, "weight_decay": 1e-4, "server_clip": server_clip}
    training = hypernetwork(case, rank=4, **hyper)
    server, counts, round = double_server(training), (10, 40, 25), 7
    ups, mean = [], {name: torch.zeros_like(value) for name, value in server.items()}
    for i, count in enumerate(counts):
        own, batches = case.batch(count, 20 + i), [case.batch(9, 10 * i + seed) for seed in range(3)]
        ups.append(local_round(training, server, {}, holder(own, i, round), batches)[0])
        change = local_change(case, forward_hypernetwork(server, case, own.x), batches, 0.3 * 0.99**0.7)
        for name, value in hypernetwork_gradient(server, case, own.x, change).items():
            mean[name] += value * count / sum(counts)
    before = {name: value.clone() for name, value in server.items()}
    after = training.aggregate(server, total_of(training, ups), round)
    for part, lr in (("encoder", 0.4), ("hypernetwork", 0.7)):
        names = [name for name in before if name.startswith("encoder.") == (part == "encoder")]
        grads = {name: mean[name] for name in names}
        assert (norm(grads) > server_clip) == (server_clip < 1), "clips where it should not, or not where it should"
        values = {name: before[name] for name in names}
        expected = descend(values, grads, lr * 0.99**0.7, 1e-4, server_clip)
        ours = {name: after[name] for name in names}
        assert distance(difference(ours, values), difference(expected, values)) < 1e-5


@pytest.mark.parametrize("rank", [None, 4])
def test_an_odpfl_hn_newcomers_model_is_made_from_its_data_in_any_order(case: Case, rank: int | None) -> None:
    training = hypernetwork(case, rank)
    server, x = training.init(generator(1, "server")), case.x(700, 3, torch.float32)
    x = x * torch.linspace(0.1, 3, 700).view(-1, 1, 1, 1)  # samples that differ: a mean over chunks' means would show
    server |= {f"head.{name}.weight": server[f"head.{name}.weight"] * 30 for name in case.model.shapes}
    published = Published(server, 3)
    expected = forward_hypernetwork(server, case, x)
    by_chunks = training.generate(server, training.embed(server, [x[:1], x[1:500], x[500:]]))
    turned = x[torch.randperm(700, generator=generator(5))]
    theta, reordered, part = (training.start(published, Unlabelled(0, own), None) for own in (x, turned, x[:256]))
    for same in (theta, reordered, by_chunks):
        assert distance(same, expected) < 1e-5
    assert distance(part, expected) > 1e-4, "the data makes no difference"
    torch.testing.assert_close(training.logits(theta, x), case.forward(expected, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("model", "millions"), [(CIFAR10, 218), (FEMNIST, 667)], ids=["cifar10", "femnist"])
def test_odpfl_hns_full_head_has_as_many_parameters_as_the_card_says(model: Layered, millions: int) -> None:
    with nothing_allocated():
        training = OdpflHn(Task(model, 10, 3), OdpflHnHyper())
        size = training.size
    assert round(size / 1e6) == millions
    convolutions = sum(math.prod(shape) for name, shape in model.shapes.items() if name.startswith("conv"))
    encoder = convolutions + 32 * model.shapes["fc1.weight"][1] + 32
    trunk = 32 * 100 + 100 + 3 * (100 * 100 + 100)
    assert size == encoder + trunk + 101 * model.size


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """No tensor of a million values may be made here."""

    def checked(*shape: Any, **options: Any) -> Tensor:
        assert math.prod(torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)) < 1_000_000
        return empty(*shape, **options)

    empty, before = torch.empty, tensor_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", checked)
        yield
    assert tensor_bytes() - before < 4_000_000


@pytest.mark.parametrize("rank", [None, 4])
def test_odpfl_hns_size_is_that_of_its_state_and_a_low_rank_makes_it_small(case: Case, rank: int | None) -> None:
    training = OdpflHn(Task(case.model, CLASSES, 3), OdpflHnHyper(rank=rank))
    state = training.init(generator(1))
    assert training.size == sum(value.numel() for value in state.values())
    assert training.encoder.init(generator(1)).keys() == select(state, "encoder").keys()
    heads = sum(value.numel() for value in select(state, "head").values())
    assert heads == (101 if rank is None else 5) * case.model.size


def test_odpfl_hns_encoder_is_the_convolutions_or_784_200_32() -> None:
    assert hypernetwork_of(MLP).encoder.shapes == mlp(784, (200,), 32).shapes
    assert hypernetwork_of(CIFAR10).encoder.shapes == {
        name: shape for name, shape in CIFAR10.shapes.items() if name.startswith("conv")
    } | {"embedding.weight": (32, 4096), "embedding.bias": (32,)}


def hypernetwork_of(model: Layered) -> OdpflHn:
    return OdpflHn(Task(model, 10, 3), OdpflHnHyper())


def test_odpfl_hns_head_gradients_are_nowhere_formed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(64, (64, 64, 64), 64)
    training = OdpflHn(Task(model, 64, 3), OdpflHnHyper())
    server = training.init(generator(1, "server"))
    own = Batch(torch.randn(20, 1, 8, 8, generator=generator(2)), torch.arange(20))
    before = tensor_bytes()
    up, _, _ = local_round(training, server, {}, holder(own), [own])
    gc.collect()
    heads = sum(4 * server[name].numel() for name in server if name.startswith("head."))
    assert tensor_bytes() - before < heads / 4, "what a client sends holds its head gradients"
    sent = with_loss(up, torch.tensor(0.5))
    whole = FixedPointSum(dict(sent), 1)
    whole.add(dict(sent))

    def only_whole(self: Factored, name: str) -> Tensor:
        assert name not in self.factors, f"{name} is formed as a whole"
        return self.whole[name]

    monkeypatch.setattr(Factored, "__getitem__", only_whole)
    total = FixedPointSum(sent, 1)
    total.add(sent)
    assert all(torch.equal(total[name], whole[name]) for name in server)
