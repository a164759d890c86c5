"""Convolutions that are differentiated twice, against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upfl.models.convolution import tangents, twice
from upfl.randomness import generator

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "line": (F.conv1d, (2, 3, 7), (4, 3, 3), {"padding": 1}),
    "plain": (F.conv2d, (2, 3, 5, 6), (4, 3, 3, 3), {}),
    "strides": (F.conv2d, (2, 4, 7, 6), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    "dilated": (F.conv2d, (2, 2, 7, 7), (2, 1, 3, 3), {"dilation": 2, "padding": 2, "groups": 2}),
    "by name": (F.conv2d, (2, 2, 5, 5), (3, 2, 3, 3), {"padding": "same"}),
    "one sample": (F.conv2d, (2, 5, 5), (3, 2, 3, 3), {}),
    "space": (F.conv3d, (1, 2, 4, 4, 3), (2, 2, 2, 2, 2), {"stride": 2, "padding": 1}),
}


def tensors(case: str, dtype: torch.dtype, bias: bool = True) -> list[Tensor]:
    _, x, weight, _ = CASES[case]
    source = generator("convolution", case)
    shapes = [x, weight, *([weight[:1]] if bias else [])]
    return [torch.randn(shape, generator=source, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("bias", [False, True], ids=["without", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_both_orders_are_those_of_finite_differences(case: str, bias: bool) -> None:
    function, *_, options = CASES[case]

    def ours(*given: Tensor) -> Tensor:
        with twice():
            found: Tensor = function(*given, **options)
            return found

    given = tensors(case, torch.float64, bias)
    assert torch.autograd.gradcheck(ours, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, given, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_values_and_first_derivatives_have_pytorchs_bits(case: str) -> None:
    function, *_, options = CASES[case]
    ends = []
    for ours in (False, True):
        given = tensors(case, torch.float32)
        if ours:
            with twice():
                y = function(*given, **options)
        else:
            y = function(*given, **options)
        ends.append([y, *torch.autograd.grad(y.square().sum(), given)])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 1, 2)], ids=["input", "weight", "bias", "all"])
def test_along_some_of_its_operands_a_gradient_changes_as_pytorchs_does(moving: tuple[int, ...]) -> None:
    """What is not moved comes as nothing, not as zeros."""
    ends = []
    for ours in (False, True):
        x, weight, bias = given = tensors("strides", torch.float64)
        layer = twice() if ours else torch.enable_grad()
        with layer:
            y = F.conv2d(x, weight, bias, stride=(2, 1), padding=(1, 0), groups=2)
        u = torch.ones_like(y).mul_(0.3).requires_grad_()
        back = torch.autograd.grad(y.sin(), given, u, create_graph=True)
        along = torch.stack([back[i].square().sum() for i in moving]).sum()
        ends.append(torch.autograd.grad(along, [*given, u], materialize_grads=True))
    for theirs, own in zip(*ends, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_a_tangent_alone_is_the_same_and_costs_no_gradients() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3))
    x, counted = torch.randn(2, 2, 7, 7, generator=generator("x")), []
    with twice():
        z = net(x)
    u = torch.ones_like(z).requires_grad_()
    h = torch.autograd.grad(z, list(net.parameters()), u, create_graph=True)
    for alone in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            if alone:
                with tangents():
                    (found,) = torch.autograd.grad(h, u, [one.detach() for one in h], retain_graph=True)
            else:
                (found,) = torch.autograd.grad(h, u, [one.detach() for one in h], retain_graph=True)
        counted.append(
            (found, sum(one.count for one in seen.key_averages() if one.key == "aten::convolution_backward"))
        )
    assert torch.equal(counted[0][0], counted[1][0])
    assert counted[0][1] > counted[1][1] == 0
