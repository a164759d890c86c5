"""Models: sizes as in the method cards, outputs and derivative products as autograd's."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vjp

from tests.helpers.params import Params, descend, difference, distance, gradient, norm
from tests.reference import Case, forward_convnet, forward_mlp
from upfl.config import configure
from upfl.models import Layered, Linear, adaptation_model, convnet, mlp, split
from upfl.randomness import generator
from upfl.training.sgd import sgd_

pytestmark = pytest.mark.usefixtures("one_thread")

# Sizes


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (mlp(784, (200, 200), 10), 199_210),
        (mlp(64, (200, 200), 10), 64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        (convnet((1, 28, 28), 10), 1_663_370),
        (convnet((3, 32, 32), 10), 2_156_490),
        (convnet((3, 32, 32), 100), 2_202_660),
        (convnet((1, 28, 28), 62, hidden=2048), 6_603_710),
        (convnet((3, 32, 32), 10, width=0.5), 1_068_266),
        (convnet((3, 32, 32), 10, width=2.0), 4_409_738),
        (adaptation_model(10), 2_497),
        (adaptation_model(62), 4_161),
        (adaptation_model(100), 5_377),
    ],
)
def test_models_have_the_papers_sizes(model: Layered, size: int) -> None:
    assert model.size == size
    assert sum(value.numel() for value in model.init(generator(0)).values()) == size


@pytest.mark.parametrize(
    ("dataset", "shape", "classes", "size"),
    [
        ("digits", (1, 8, 8), 10, 55_210),
        ("mnist", (1, 28, 28), 10, 199_210),
        ("fashion_mnist", (1, 28, 28), 10, 1_663_370),
        ("cifar10", (3, 32, 32), 10, 2_156_490),
        ("cifar100", (3, 32, 32), 100, 2_202_660),
        ("femnist", (1, 28, 28), 62, 6_603_710),
    ],
)
def test_each_data_set_gets_its_model_by_default(dataset: str, shape: Any, classes: int, size: int) -> None:
    assert configure("fedavg", dataset).model.build(shape, classes).size == size


# Initialisation


def test_initial_values_are_uniform_within_one_over_root_fan_in(case: Case) -> None:
    params = case.model.init(generator(0))
    for name, value in params.items():
        weight = params[name.replace(".bias", ".weight")]
        bound = 1 / math.sqrt(weight[0].numel())
        assert value.abs().max() <= bound
        if value.numel() > 200:
            assert value.abs().max() > 0.9 * bound
            assert abs(value.std().item() / (bound / math.sqrt(3)) - 1) < 0.1


def test_initial_values_follow_from_the_generator_alone(case: Case) -> None:
    first, again, other = (case.model.init(generator(seed)) for seed in (1, 1, 2))
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        assert first[name].dtype == torch.float32
        assert first[name].is_contiguous()


# Outputs


@pytest.mark.parametrize(("shape", "width"), [((1, 28, 28), 0.25), ((3, 32, 32), 0.5), ((3, 10, 14), 0.25)])
def test_convnet_is_convolution_relu_pool_twice_and_two_linear_layers(
    shape: tuple[int, int, int], width: float
) -> None:
    model = convnet(shape, 7, hidden=24, width=width)
    params = model.init(generator(3))
    x = torch.randn(9, *shape, generator=generator(4))
    expected = forward_convnet(params, x)
    fast = model.layout(params)
    in_channels_last = x.contiguous(memory_format=torch.channels_last)
    for params_, x_ in ((params, x), (fast, in_channels_last), (params, in_channels_last)):
        torch.testing.assert_close(model.apply(params_, x_), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.trace(params_, x_).output, expected, rtol=1e-5, atol=1e-6)


def test_mlp_is_linear_layers_with_relu_between() -> None:
    model = mlp(12, (9, 8), 4)
    params = model.init(generator(3))
    x = torch.randn(6, 3, 2, 2, generator=generator(4))
    torch.testing.assert_close(model.apply(params, x), forward_mlp(params, x))


def test_layout_keeps_values_and_the_input_untouched(case: Case) -> None:
    params = case.params(0)
    laid_out = case.model.layout(params)
    for name, value in params.items():
        assert torch.equal(laid_out[name], value)
        assert value.is_contiguous()


def test_a_slice_of_a_model_computes_the_features_that_the_rest_takes(case: Case) -> None:
    params, x = case.params(0), case.x(4, 1)
    features = case.model[:-1].apply(params, x)
    assert features.shape == (4, 16)
    torch.testing.assert_close(case.model[-1:].apply(params, features), case.forward(params, x))


# Derivative products


def _random_like(params: Params, seed: int) -> Params:
    source = generator(seed, "tangent")
    return {name: torch.randn(value.shape, generator=source, dtype=value.dtype) for name, value in params.items()}


def _directional_gradient(
    case: Case, params: Params, x: Tensor, u: Tensor, du: Tensor, v: Params | None, dx: Tensor | None
) -> tuple[Params, Tensor]:
    """d/dt of the gradient of <u + t du, f(params + t v, x + t dx)> at t = 0, by double backward."""
    everything = {f"p.{name}": value.clone().requires_grad_() for name, value in params.items()}
    everything["x"] = x.clone().requires_grad_()
    z = case.forward({name: everything[f"p.{name}"] for name in params}, everything["x"])
    first = gradient((u * z).sum(), everything, create_graph=True)
    change = (du * z).sum()
    for name, direction in (v or {}).items():
        change = change + (first[f"p.{name}"] * direction).sum()
    if dx is not None:
        change = change + (first["x"] * dx).sum()
    second = gradient(change, everything)
    return {name: second[f"p.{name}"] for name in params}, second["x"]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
def test_backward_is_the_vector_jacobian_product(case: Case, inputs: bool, channels_last: bool) -> None:
    params, x = case.params(0), case.x(6, 1)
    u = torch.randn(6, 5, generator=generator(2), dtype=torch.float64)
    pull: Callable[[Tensor], tuple[Params, Tensor]] = vjp(case.forward, params, x)[1]
    expected, expected_x = pull(u)
    if channels_last:
        trace = case.model.trace(case.model.layout(params), x.contiguous(memory_format=torch.channels_last))
    else:
        trace = case.model.trace(params, x)
    ours = trace.backward(u, inputs=inputs)
    assert distance(dict(ours), expected) < 1e-12
    if inputs:
        torch.testing.assert_close(trace.input_gradient, expected_x, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("moving", ["params", "input", "both"])
def test_tangent_is_the_jacobian_vector_product(case: Case, moving: str) -> None:
    params, x = case.params(0), case.x(6, 1)
    v = _random_like(params, 3)
    dx = torch.randn(x.shape, generator=generator(4), dtype=torch.float64)
    still = {name: torch.zeros_like(value) for name, value in v.items()}
    tangents = (still if moving == "input" else v, torch.zeros_like(dx) if moving == "params" else dx)
    expected = jvp(case.forward, (params, x), tangents)[1]
    trace = case.model.trace(params, x)
    trace.backward(torch.ones_like(trace.output))
    ours = trace.tangent(None if moving == "input" else v, None if moving == "params" else dx)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("moving", ["params", "input", "both"])
def test_backward_tangent_is_the_double_backward(case: Case, moving: str, inputs: bool) -> None:
    params, x = case.params(0), case.x(6, 1)
    u, du = torch.randn(2, 6, 5, generator=generator(2), dtype=torch.float64)
    v = None if moving == "input" else _random_like(params, 3)
    dx = None if moving == "params" else torch.randn(x.shape, generator=generator(4), dtype=torch.float64)
    expected, expected_x = _directional_gradient(case, params, x, u, du, v, dx)
    trace = case.model.trace(params, x)
    first = trace.backward(u, inputs=inputs)
    kept = {name: value.clone() for name, value in first.items()}
    trace.tangent(v, dx)
    assert distance(dict(trace.backward_tangent(du, inputs=inputs)), expected) < 1e-11
    assert distance(dict(first), kept, scale=kept) == 0  # the first gradient is still the caller's to use
    if inputs:
        torch.testing.assert_close(trace.input_gradient, expected_x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("samples", [3, 12])
def test_a_moved_trace_is_a_trace_at_the_moved_parameters(case: Case, samples: int, factored: bool) -> None:
    """Three samples are few beside the first linear layer, whose gradient then stays factored; twelve are not."""
    params, x = case.params(0), case.x(samples, 1)
    u, w = torch.randn(2, samples, 5, generator=generator(2), dtype=torch.float64)
    trace = case.model.trace(params, x)
    v = trace.backward(u, factored=factored)
    linear = {layer.name for layer in case.model.layers if isinstance(layer, Linear)}
    assert v.outer.keys() == linear if factored else bool(v.outer) == (samples == 3)
    moved = trace.moved(v, scale=-0.3, shrink=0.9)
    at = {name: 0.9 * value - 0.3 * v[name] for name, value in params.items()}
    pull: Callable[[Tensor], tuple[Params]]
    expected, pull = vjp(lambda at: case.forward(at, x), at)  # type: ignore[misc]
    torch.testing.assert_close(moved.output, expected, rtol=1e-11, atol=1e-13)
    along = moved.backward(w)
    assert distance(dict(along), pull(w)[0]) < 1e-12
    dense = {name: value.clone() for name, value in along.items()}  # of its own: what is added is used up
    assert distance({"": trace.tangent(along, scale=0.7)}, {"": 0.7 * trace.tangent(dense)}) < 1e-12
    trace.tangent(along, scale=0.7)
    ours = trace.backward_tangent(w, inputs=True, plus=(along, 0.4))
    from_input = trace.input_gradient
    trace.tangent(dense, scale=0.7)
    theirs = trace.backward_tangent(w, inputs=True)
    assert distance(dict(ours), {name: value + 0.4 * dense[name] for name, value in theirs.items()}) < 1e-12
    torch.testing.assert_close(from_input, trace.input_gradient, rtol=1e-11, atol=1e-13)


def test_a_factored_gradient_has_the_norm_and_the_update_of_its_matrix() -> None:
    model, rate, decay, clip = mlp(600, (500,), 5), 0.2, 0.01, 1e-3
    params = {name: value.double() for name, value in model.init(generator(0)).items()}
    x, u = (torch.randn(4, n, generator=generator(1, n), dtype=torch.float64) for n in (600, 5))
    gradient = model.trace(params, x).backward(u)
    assert split(gradient)[1], "the case has no layer that is updated by factors"
    dense = {name: value.clone() for name, value in gradient.items()}
    assert norm(dense) > clip
    expected = descend(params, dense, rate, decay, clip)
    ours, theirs = ({name: value.clone() for name, value in params.items()} for _ in range(2))
    sgd_(ours, gradient, rate, decay, clip)
    sgd_(theirs, dense, rate, decay, clip)
    assert distance(ours, expected, scale=difference(expected, params)) < 1e-5
    assert distance(ours, theirs, scale=difference(theirs, params)) < 1e-5


def test_derivative_products_leave_parameters_and_input_alone(case: Case) -> None:
    params, x = case.params(0), case.x(6, 1)
    kept, kept_x = {name: value.clone() for name, value in params.items()}, x.clone()
    u = torch.randn(6, 5, generator=generator(2), dtype=torch.float64)
    v = _random_like(params, 3)
    trace = case.model.trace(params, x)
    trace.backward(u, inputs=True)
    trace.tangent(v, torch.ones_like(x))
    trace.backward_tangent(u, inputs=True)
    assert torch.equal(x, kept_x)
    for name, value in params.items():
        assert torch.equal(value, kept[name])
