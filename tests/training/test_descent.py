"""The update of linear layers whose gradient is nowhere formed: that of the gradient itself."""

import pytest
import torch
from torch import Tensor

from upfl.contract import Batch
from upfl.models import Gradient, mlp, whole_in_factors
from upfl.models.factored import _compiled, _descended, _divisor
from upfl.training.sgd import cross_entropy, sgd_

RATE, DECAY = 0.3, 1e-2


def gradient_of(params: dict[str, Tensor], scale: float = 1.0) -> Gradient:
    """Over 16 samples: wide enough that the first layer's norm is that of its factors, and the last one's is not."""
    draw = torch.Generator().manual_seed(1)
    batch = Batch(torch.randn(16, 64, generator=draw), torch.arange(16) % 10)
    trace = mlp(64, (48,), 10).trace(params, batch.x)
    return trace.backward(scale * cross_entropy(trace.output, batch)[1])


def params() -> dict[str, Tensor]:
    return mlp(64, (48,), 10).init(torch.Generator().manual_seed(0))


def length(gradient: Gradient) -> float:
    return float(torch.cat([value.double().flatten() for value in dict(gradient).values()]).norm())


@pytest.mark.parametrize("share", [1e-3, 0.5, 0.999, 1.001, 3.0, 1e6])
def test_an_update_in_factors_is_that_of_the_gradient(share: float) -> None:
    """With clips below the norm, between it and its bound, and above both."""
    clip = share * length(gradient_of(params()))
    ours, theirs = params(), params()
    assert whole_in_factors(gradient_of(ours)).keys() == {"fc1", "fc2"}
    sgd_(ours, gradient_of(ours), RATE, DECAY, clip)
    sgd_(theirs, dict(gradient_of(theirs)), RATE, DECAY, clip)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)


def test_a_bound_is_no_more_than_a_shorter_way_to_the_same_divisor() -> None:
    found = whole_in_factors(gradient_of(params()))
    a, b = [one.a for one in found.values()], [one.b for one in found.values()]
    norm = length(gradient_of(params()))
    assert _divisor(a, b, 1e6) == 1.0
    assert _divisor(a, b, 1.001 * norm) == 1.0
    assert _divisor(a, b, norm / 4) == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize("clip", [1e-2, 1e6])
def test_compiled_it_has_the_same_bits(clip: float) -> None:
    ends = []
    for run in (_descended, _compiled()):
        own = params()
        found = whole_in_factors(gradient_of(own))
        weights, biases = ([own[f"{layer}.{kind}"] for layer in found] for kind in ("weight", "bias"))
        factors = [one.a for one in found.values()], [one.b for one in found.values()]
        with torch.inference_mode():
            run(weights, biases, *factors, [False] * len(found), torch.tensor(RATE, dtype=torch.float64), DECAY, clip)
        ends.append(own)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e30])
def test_who_diverges_does_not_stand_still(scale: float) -> None:
    own = params()
    sgd_(own, gradient_of(own, scale), RATE, DECAY, 10.0)
    assert not all(value.isfinite().all() for value in own.values())


def test_a_gradient_that_is_asked_for_is_multiplied() -> None:
    gradient = gradient_of(params())
    assert len(gradient) == 4
    assert {name: tuple(value.shape) for name, value in gradient.items()} == mlp(64, (48,), 10).shapes
    assert gradient["fc2.weight"] is gradient["fc2.weight"]
