"""Any torch.nn.Module as a model: its derivatives, its head, its random numbers."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import plugin_models
from tests.helpers.params import difference, distance, doubled
from tests.modules import SHAPE, as_it_is, batch, own
from tests.reference import CLASSES, MetaStep, Somebody
from upfl import models
from upfl.contract import Batch, Task
from upfl.engine.fold import FixedPointSum
from upfl.methods import TRAININGS, make_training
from upfl.models import Model, convnet, mlp
from upfl.models.resnet import resnet8
from upfl.randomness import generator
from upfl.state import State, is_buffer, select, trainable
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA, FedTTAProx
from upfl.training.sgd import gradients

pytestmark = pytest.mark.usefixtures("one_thread")

NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet8": lambda: resnet8(SHAPE, CLASSES, 0.5),
    "own-batchnorm": lambda: plugin_models.BatchNormNet(SHAPE, CLASSES),
    "own-convnet": lambda: plugin_models.Convnet(SHAPE, CLASSES),
}


def model_of(name: str) -> Model:
    return own(name, width=0.5) if name == "resnet8" else own(name)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["single", "double"])
@pytest.mark.parametrize("kind", [FedTTA, FedTTAProx])
def test_fedttas_step_on_a_module_is_autograds(name: str, dtype: torch.dtype, close: float, kind: Any) -> None:
    """Second order, against torch.autograd.grad(create_graph=True) through the inner step."""
    # phi moves far enough for its change to be seen in single precision
    hyper = kind.Hyper(adapt_lr=1.0, **({"mu": 0.5} if kind is FedTTAProx else {}))
    training = kind(Task(model_of(name), CLASSES, 2), hyper)
    server = {key: value.to(dtype) for key, value in training.init(generator(3)).items()}
    carry = training.begin(server, {}, Somebody())
    carry, _ = training.step(carry, batch(12, 1, dtype), 0)
    psi, phi = doubled(select(server, "psi")), doubled(select(server, "phi"))
    moving, still = trainable(psi), {key: value for key, value in psi.items() if is_buffer(key)}
    forward = as_it_is(NETS[name]().double())
    reference = MetaStep(lambda params, x: forward(params | still, x), adapt_lr=1.0, mu=getattr(hyper, "mu", 0.0))
    expected = reference.run(moving, phi, [batch(12, 1, torch.float64)])
    for ours, theirs, before in (
        (trainable(select(carry, "psi")), expected.psi, moving),
        (select(carry, "phi"), expected.phi, phi),
    ):
        assert distance(doubled(ours), theirs, scale=difference(theirs, before)) < close


BUILT_IN = {"own-mlp": mlp(128, (16, 16), CLASSES), "own-convnet": convnet(SHAPE, CLASSES, 16, 0.25)}
OTHER_LAYERS = ("fedsr", "odpfl-hn")  # put other layers into a module than into the built-in models
PLAIN = [name for name, kind in TRAININGS.items() if name not in OTHER_LAYERS and not kind.refuses_models]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("wrapped", BUILT_IN)
@pytest.mark.parametrize("name", PLAIN)
def test_a_wrapped_model_trains_as_the_built_in_one(name: str, wrapped: str, dtype: torch.dtype) -> None:
    """A round of two clients."""
    ends, built_in, public = [], BUILT_IN[wrapped], batch(20, 99, dtype).x
    first = make_training(name, Task(built_in, CLASSES, 2, public=public), TRAININGS[name].Hyper())
    start = first.init(generator(0))
    for model in (built_in, own(wrapped)):
        task = Task(model, CLASSES, 2, public=public)
        training = make_training(name, task, TRAININGS[name].Hyper(iterations=3, batch_size=10))
        server = {key: value.to(dtype) for key, value in start.items()}
        ends.append(a_round(training, server, dtype, first))
    assert ends[0].keys() == ends[1].keys()
    moved = difference(ends[0], {key: value.to(dtype) for key, value in start.items()})
    assert distance(ends[1], ends[0], scale=ends[0]) < (1e-6 if dtype == torch.float32 else 1e-12)
    assert max(float(value.abs().max()) for value in moved.values()) > 1e-4, "nothing was learned"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_fedsr_gives_a_module_the_layer_that_a_deeper_mlp_has(dtype: torch.dtype) -> None:
    """The representation stands between the head and what it read: the third layer of an MLP of four."""
    hyper = TRAININGS["fedsr"].Hyper(iterations=3, batch_size=10)
    deeper = make_training("fedsr", Task(mlp(128, (16, 16, 16), CLASSES), CLASSES, 2), hyper)
    wrapped = make_training("fedsr", Task(own("own-mlp"), CLASSES, 2), hyper)
    start = {key: value.to(dtype) for key, value in deeper.init(generator(0)).items()}
    expected = a_round(deeper, start, dtype, deeper)
    renamed = {"psi.fc3": "psi.representation", "psi.fc4": "psi.fc3"}

    def as_module(state: State) -> State:
        return {f"{renamed.get(layer, layer)}.{kind}": state[f"{layer}.{kind}"] for layer, kind in map(split, state)}

    found = a_round(wrapped, as_module(start), dtype, wrapped)
    assert distance(found, as_module(expected), scale=found) < (1e-6 if dtype == torch.float32 else 1e-12)


def split(name: str) -> tuple[str, str]:
    layer, _, kind = name.rpartition(".")
    return layer, kind


def a_round(training: Any, server: State, dtype: torch.dtype, first: Any) -> State:
    ups = []
    for id in (0, 1):
        client = Given(id=id, dtype=dtype)
        memory = {key: value.to(dtype) for key, value in first.memory(client).items()}
        carry = training.begin(server, memory, client)
        with torch.no_grad():
            for phase in training.phases(0):
                for one in client.phase(phase):
                    carry, _ = phase.step(carry, one, 0)
            ups.append(dict(training.finish(server, carry, client)[0]))
    total = FixedPointSum(ups[0], 2, training.scales)
    for up in ups:
        total.add(up)
    total.merged()
    after: State = training.aggregate(server, total, 0)
    return after


class Given(Somebody):
    """A client with random samples."""

    def __init__(self, id: int, dtype: torch.dtype) -> None:
        super().__init__(id=id)
        object.__setattr__(self, "dtype", dtype)

    def phase(self, phase: Any) -> list[Batch]:
        made = []
        for i in range(phase.iterations):
            one = batch(phase.batch_size, 10 * self.id + i, self.dtype)  # type: ignore[attr-defined]
            noise = {
                key: torch.rand(len(one.y), wanted.size, generator=generator(i, key)).to(one.x)
                for key, wanted in phase.noise.items()
            }
            made.append(Batch(one.x, one.y, noise=noise))
        return made

    def batches(self, split: Any, size: int) -> Any:
        yield batch(self.count, 10 * self.id, self.dtype)  # type: ignore[attr-defined]


def test_initialisation_is_a_function_of_the_seed_and_leaves_the_default_generator_alone() -> None:
    model = own("own-dropout")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = model.init(generator(5, "init"))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second, other = model.init(generator(5, "init")), model.init(generator(6, "init"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_module_that_draws_says_so_and_predicts_without() -> None:
    assert own("own-dropout").random
    assert not own("own-dropout", rate=0.0).random
    assert not own("own-batchnorm").random
    model = own("own-dropout")
    params, x = model.init(generator(0)), batch(6, 0).x
    assert torch.equal(model.apply(params, x), model.apply(params, x))
    assert not torch.equal(model.learning(params, x), model.learning(params, x))


def test_one_walk_is_a_tangent_and_the_way_back_and_a_trace_leaves_nothing_behind() -> None:
    model, x = model_of("resnet8"), batch(6, 1).x
    params, v = model.init(generator(0)), model.init(generator(1))
    ends = []
    for apart in (True, False):
        trace = model.trace(params, x)
        trace.backward(torch.ones_like(trace.output), factored=True)
        if apart:
            ends.append(dict(trace.backward_tangent(trace.tangent(v, scale=0.5).sin())))
        else:
            ends.append(dict(trace.curvature(v, torch.sin, scale=0.5)))
        of_the_graph = weakref.ref(trace._h[0])  # type: ignore[attr-defined]
        del trace
        assert of_the_graph() is None
    assert distance(ends[1], ends[0], scale=ends[0]) < 1e-6
    plain = model.trace(params, x)
    plain.backward(torch.ones_like(plain.output), factored=True)
    plain.tangent(v, scale=0.5)
    assert distance(dict(plain.backward_tangent(torch.zeros_like(plain.output))), ends[0], scale=ends[0]) > 1e-3


def test_gradients_that_are_one_tensor_are_told_apart() -> None:
    """W1 + W2: autograd hands out the same tensor for both, and an update overwrites what it is given."""

    class Twins(nn.Module):
        def __init__(self, shape: Any, classes: int) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(classes, 128) / 9) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ (self.a + self.b).t()

    models.register("twins", Twins)
    training = FedAvg(Task(own("twins"), CLASSES, 2), FedAvg.Hyper(clip=0.1, weight_decay=0.0, lr=1.0))
    server, one = training.init(generator(0)), batch(8, 0)
    carry, _ = training.step(training.begin(server, {}, Somebody()), one, 0)
    change = difference(select(carry, "psi"), select(server, "psi"))
    _, expected = gradients(
        lambda psi: F.cross_entropy(own("twins").learning(psi, one.x), one.y), select(server, "psi")
    )
    torch.testing.assert_close(change["a"], change["b"])
    size = torch.sqrt(2 * expected["a"].double().square().sum())
    torch.testing.assert_close(change["a"], -0.1 * expected["a"].double() / size, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_module_sees_images_channels_first_in_memory_however_they_come(channels: int) -> None:
    """Of one channel a tensor is contiguous both ways, and its strides decide which kernels a convolution takes."""
    seen: list[tuple[int, ...]] = []

    class Looking(nn.Module):
        def __init__(self, shape: Any, classes: int) -> None:
            super().__init__()
            self.fc = nn.Linear(channels * 64, classes)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            return self.fc(x.flatten(1))  # type: ignore[no-any-return]

    models.register("looking", Looking)
    model = models.entry("looking").make((channels, 8, 8), CLASSES, {})
    params = model.init(generator(0))
    seen.clear()
    x = torch.randn(5, channels, 8, 8).contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.apply(params, x), model.apply(params, x.contiguous()))
    assert set(seen) == {(64 * channels, 64, 8, 1)}


def test_the_head_is_what_makes_logits_of_the_features() -> None:
    for name, head in (("own-mlp", "fc3"), ("own-batchnorm", "10"), ("resnet8", "head")):
        model = own(name)
        assert model.head == head
        params, x = model.init(generator(0)), batch(6, 0).x
        features = model.features(params, x)
        logits = F.linear(features, params[f"{head}.weight"], params[f"{head}.bias"])
        torch.testing.assert_close(logits, model.apply(params, x))
    models.register("headless", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(128, classes), nn.Tanh()))
    assert own("headless").head is None
