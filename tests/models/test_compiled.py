"""Derivatives at the winners alone, by compiled loops: against autograd in double precision, and where they serve."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llvmlite import binding
from torch import Tensor
from torch.func import jvp, vmap

from tests.helpers.params import difference, distance, doubled
from tests.helpers.rounds import trained
from tests.reference import CLASSES, Case, MetaStep, descended, forward_convnet
from tests.runs import assert_same, ran, ran_by_workers
from upfl.config import configure
from upfl.contract import Task
from upfl.errors import ConfigError
from upfl.models import Layered, Linear, compiled, convnet
from upfl.models.layers import Conv, ConvPass, Flatten
from upfl.randomness import generator
from upfl.state import prefixed, select
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = Case(convnet((3, 26, 30), CLASSES, hidden=16, width=0.5), forward_convnet, (3, 26, 30))
SHAPES = [(16, 24, 13, 15), (32, 5, 12, 12), (48, 8, 13, 12)]  # inputs, outputs, height, breadth
SLIM = [(1, 5, 13, 15), (2, 16, 12, 13), (3, 32, 14, 12)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the loops from here on."""
    from upfl.models import winners

    made: list[str] = []
    for name in ("gradients", "change"):
        monkeypatch.setattr(winners, name, _noted(name, getattr(winners, name), made))
    return made


def _noted(name: str, real: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    def noting(*given: Any) -> Any:
        made.append(name)
        return real(*given)

    return noting


def layer(shape: tuple[int, int, int, int]) -> tuple[ConvPass, Tensor, Tensor]:
    """The forward pass of a layer, its inputs and its weights; some inputs are zero, and some of the outputs shut."""
    inputs, outputs, height, breadth = shape
    source = generator(0, str(shape))
    x = torch.randn(7, inputs, height, breadth, generator=source).relu_()
    params = {"c.weight": torch.randn(outputs, inputs, 5, 5, generator=source), "c.bias": torch.zeros(outputs)}
    params = {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in params.items()
    }
    made = Conv("c", inputs, outputs).forward(params, x.contiguous(memory_format=torch.channels_last))
    assert isinstance(made, ConvPass)
    return made, x, params["c.weight"]


def opened(x: Tensor, w: Tensor) -> Tensor:
    return F.max_pool2d(F.conv2d(x, w, padding=2), 2).relu()


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_rectified_pooled_convolution(shape: tuple[int, int, int, int]) -> None:
    from upfl.models import winners

    made, x, w = layer(shape)
    u = torch.randn(made.y.shape, generator=generator(1))
    there, weight = (value.double().requires_grad_() for value in (x, w))
    expected = torch.autograd.grad((opened(there, weight) * u).sum(), (there, weight))
    ours = winners.gradients(u * (made.y > 0), made.winners, made.x, made.w, True, True)
    for one, other in zip(ours, expected, strict=True):
        assert one is not None
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert distance({"": one.double()}, {"": other}) < 1e-6
    assert winners.gradients(u, made.winners, made.x, made.w, False, False) == (None, None)


@pytest.mark.parametrize("shape", SLIM)
def test_an_images_few_channels_have_the_same_gradient_of_the_weights(shape: tuple[int, int, int, int]) -> None:
    from upfl.models import winners

    made, x, w = layer(shape)
    u = torch.randn(made.y.shape, generator=generator(1))
    weight = w.double().requires_grad_()
    (expected,) = torch.autograd.grad((opened(x.double(), weight) * u).sum(), weight)
    dx, dw = winners.gradients(u * (made.y > 0), made.winners, made.x, made.w, False, True)
    assert dx is None
    assert dw is not None
    assert dw.stride() == made.w.stride()  # else the update would take several passes over all parameters
    assert distance({"": dw.double()}, {"": expected}) < 1e-6


@pytest.mark.parametrize("shape", SLIM)
def test_what_is_not_finite_in_one_image_does_not_reach_what_others_teach(shape: tuple[int, int, int, int]) -> None:
    """Nor does the number behind a row of a patch, where a vector is longer than the row."""
    from upfl.models import winners

    made, _, w = layer(shape)
    gy = torch.zeros_like(made.y)
    gy[2, 3, 1, 1] = 1.0
    made.x[3] = torch.nan
    made.x[2, :, 6:] = torch.inf  # at most rows 0 to 5 are below the winner
    _, dw = winners.gradients(gy, made.winners, made.x, w, False, True)
    assert dw is not None
    assert dw[3].any()
    assert dw.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("shape", SLIM)
def test_the_gradient_of_an_images_pixels_is_the_dense_kernels(
    shape: tuple[int, int, int, int], calls: list[str]
) -> None:
    made, _, _ = layer(shape)
    u = torch.randn(made.y.shape, generator=generator(1))
    expected = made.backward(u.clone(), None, True)
    with compiled.used():
        ours = made.backward(u.clone(), None, True)
    assert ours is not None
    assert expected is not None
    assert torch.equal(ours, expected)
    assert not calls


@pytest.mark.parametrize("shape", SHAPES)
def test_the_change_is_that_of_the_rectified_pooled_convolution(shape: tuple[int, int, int, int]) -> None:
    from upfl.models import winners

    made, x, w = layer(shape)
    dw = torch.randn(w.shape, generator=generator(1))
    expected = jvp(lambda w: opened(x.double(), w), (w.double(),), (dw.double(),))[1]
    ours = winners.change(made.y, made.winners, made.x, dw)
    assert distance({"": ours.double()}, {"": expected}) < 1e-6
    assert not ours[made.y <= 0].any()
    assert (made.y <= 0).any()


def test_where_every_winner_is_shut_nothing_changes() -> None:
    from upfl.models import winners

    made, _, _ = layer(SHAPES[0])
    for one in winners.gradients(torch.zeros_like(made.y), made.winners, made.x, made.w, True, True):
        assert one is not None
        assert not one.any()
    assert not winners.change(-made.y.abs(), made.winners, made.x, made.w).any()


def test_what_is_not_finite_stays_so() -> None:
    from upfl.models import winners

    made, _, _ = layer(SHAPES[0])
    gy = torch.zeros_like(made.y)
    gy[3, 2, 1, 1] = torch.inf
    dx, dw = winners.gradients(gy, made.winners, made.x, made.w, True, True)
    assert dx is not None
    assert dw is not None
    assert not dx[3].isfinite().all()
    assert dx[:3].isfinite().all()
    assert not dw[2].isfinite().all()
    assert dw[:2].isfinite().all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 3, 1), (2, 3, 1, 0)])
def test_weights_may_lie_in_memory_as_they_like(order: tuple[int, ...]) -> None:
    from upfl.models import winners

    made, _, w = layer(SHAPES[0])
    expected = (
        winners.gradients(made.y, made.winners, made.x, w, True, True),
        winners.change(made.y, made.winners, made.x, w),
    )
    back = tuple(order.index(i) for i in range(4))
    other = w.permute(order).contiguous().permute(back)
    ours = (
        winners.gradients(made.y, made.winners, made.x, other, True, True),
        winners.change(made.y, made.winners, made.x, other),
    )
    for one, same in zip((*ours[0], ours[1]), (*expected[0], expected[1]), strict=True):
        assert one is not None
        assert same is not None
        assert torch.equal(one, same)


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    from upfl.models import winners

    made, _, w = layer(SHAPES[0])
    with pytest.raises(ValueError, match="winners"):
        winners.gradients(torch.cat([made.y, made.y]), made.winners, made.x, w, True, True)
    with pytest.raises(ValueError, match="float64"):
        winners.gradients(made.y.double(), made.winners, made.x, w, True, True)
    with pytest.raises(ValueError, match="inputs"):
        winners.change(made.y, made.winners, made.x[:1], w)
    with pytest.raises(ValueError, match="weights"):
        winners.change(made.y, made.winners, made.x, w[:, :8])


def test_numba_that_does_not_load_is_an_error_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.installed()
    for name in ("loops", "winners"):
        monkeypatch.delitem(sys.modules, f"upfl.models.{name}", raising=False)
        monkeypatch.delattr(sys.modules["upfl.models"], name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    made, _, _ = layer(SHAPES[0])
    with compiled.used(), torch.no_grad(), pytest.raises(ConfigError, match="UPFL_NUMBA=0"):
        made.backward(made.y, None, True)


def test_the_loops_can_be_compiled_ahead() -> None:
    from upfl.models import loops, winners

    winners.warm()
    made, _, w = layer(SHAPES[0])
    winners.gradients(made.y, made.winners, made.x, w, True, True)
    winners.change(made.y, made.winners, made.x, w)
    made, _, w = layer(SLIM[0])
    winners.gradients(made.y, made.winners, made.x, w, False, True)
    for loop in (loops.weights, loops.slim_weights, loops.inputs, loops.change):
        assert len(vars(loop)["overloads"]) == 1


# Steps


@pytest.mark.parametrize("method", ["fedavg", "fedtta", "fedtta first order"])
def test_steps_are_the_plain_ones_to_float32s_precision(method: str, calls: list[str]) -> None:
    batches = [WIDE.batch(12, seed, torch.float32) for seed in range(2)]
    exact = [WIDE.batch(12, seed) for seed in range(2)]
    for one, other in zip(batches, exact, strict=True):
        other.x.copy_(one.x)  # the very inputs
    task = Task(WIDE.model, CLASSES, 3)
    if method == "fedavg":
        training: Any = FedAvg(task, FedAvg.Hyper(lr=0.1))
    else:
        training = FedTTA(task, FedTTA.Hyper(second_order="first" not in method))
    server = training.init(generator(1))
    psi = doubled(select(server, "psi"))
    if method == "fedavg":
        expected = prefixed("psi", descended(WIDE.forward, psi, exact, 0.1))
    else:
        run = MetaStep(WIDE.forward, second_order="first" not in method).run(psi, doubled(select(server, "phi")), exact)
        expected = prefixed("psi", run.psi) | prefixed("phi", run.phi)
    with compiled.used(), torch.no_grad():
        ours = doubled(trained(training, server, batches)[0])
    assert calls
    assert set(calls) == ({"gradients"} if method == "fedavg" else {"gradients", "change"})
    dense = doubled(trained(training, server, batches)[0])
    moved = difference(expected, doubled(server))
    assert distance(dense, expected, scale=moved) < 1e-4
    assert distance(ours, expected, scale=moved) < 1e-4
    assert distance(ours, dense, scale=moved) > 0  # they are not the same kernels


def test_without_a_rectifier_behind_it_a_convolution_changes_where_its_outputs_are_negative_too(
    calls: list[str],
) -> None:
    bare = Layered((Conv("c", 16, 4), Flatten(), Linear("f", 4 * 36, 3)))
    params = bare.layout(bare.init(generator(0)))
    x, dx = torch.randn(2, 5, 16, 12, 12, generator=generator(1))
    moved = []
    for used in (nullcontext(), compiled.used()):
        with used, torch.no_grad():
            trace = bare.trace(params, x)
            trace.backward(torch.ones_like(trace.output), inputs=True)
            moved.append(trace.tangent(None, dx))
    assert (trace.passes[0].y < 0).any()
    assert calls == ["gradients"]
    torch.testing.assert_close(*moved)


# Where they serve


@torch.no_grad()
def test_they_serve_local_steps_in_single_precision_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(2, 16, 12, 12), torch.zeros(8, 16, 5, 5)
    assert not compiled.serves(x, w)  # nobody takes local steps
    with compiled.used():
        assert compiled.serves(x, w)
        assert not compiled.serves(x[:, :, 1:], w)  # too small
        assert not compiled.serves(x[:, :8], w[:, :8])  # not a block of channels
        assert compiled.serves(x[:, :3], w[:, :3])  # an image
        assert not compiled.serves(x.double(), w.double())
        with torch.enable_grad():
            assert not compiled.serves(x, w)
        seen = []

        def look(w: Tensor) -> Tensor:
            seen.append(compiled.serves(x, w))
            return w.sum()

        vmap(look)(torch.zeros(3, 8, 16, 5, 5))
        jvp(look, (w,), (w,))
        assert seen == [False, False]
        monkeypatch.setattr(compiled, "installed", lambda: False)
        assert not compiled.serves(x, w)
    assert not compiled.serves(x, w)


@pytest.mark.parametrize(("setting", "expected"), [("0", False), ("1", True), (None, True)])
def test_a_variable_of_the_environment_does_without_numba(
    setting: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPFL_NUMBA", raising=False)
    if setting is not None:
        monkeypatch.setenv("UPFL_NUMBA", setting)
    assert compiled.installed.__wrapped__() == expected


def test_a_run_uses_them_in_training_alone_and_has_the_same_bits_with_two_workers(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "SMALLEST", 1)  # digits have 4 x 4 pixels there
    model = {"name": "convnet", "hidden": 16, "width": 0.5}
    config = configure(
        "fedtta",
        "digits",
        profile="smoke",
        settings=("iterations=3", "batch_size=16"),
        rounds=2,
        evaluate_every=2,
        model=model,
        partition={"clients": 12},
    )
    evaluated: list[int] = []
    step = FedTTA.guided

    def guided(*given: Any) -> Any:
        evaluated.append(len(calls))
        return step(*given)

    monkeypatch.setattr(FedTTA, "guided", guided)
    alone = ran(config, tmp_path / "alone")
    steps = 2 * 4 * 3  # rounds, clients, iterations
    assert calls.count("gradients") == steps * (5 + 3)  # of both layers; the first one's inputs have no gradient
    assert calls.count("change") == steps * 2
    assert evaluated
    assert set(evaluated) == {len(calls)}  # newcomers' steps added none
    assert_same(ran_by_workers(config, tmp_path / "two", 2), alone)


DIGEST = """
import hashlib, torch
from upfl.models import winners
from tests.models.test_compiled import SHAPES, SLIM, layer
made, _, _ = layer(SHAPES[2])
dx, dw = winners.gradients(made.y.relu(), made.winners, made.x, made.w, True, True)
dy = winners.change(made.y, made.winners, made.x, made.w)
image, _, _ = layer(SLIM[2])
_, own = winners.gradients(image.y.relu(), image.winners, image.x, image.w, False, True)
print(hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in (dx, dw, dy, own))).hexdigest())
"""


def test_the_loops_sum_in_one_order_whatever_the_instruction_set() -> None:
    """This processor's and AVX2's have the same bits; where fused multiply-add is missing, plain x86-64's have."""
    has = binding.get_host_cpu_features()
    other = "haswell" if has.get("avx2") and has.get("fma") else "x86-64"
    root = Path(__file__).parents[2]
    fixed = {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root))), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | fixed | more,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ({}, {"NUMBA_CPU_NAME": other, "NUMBA_CPU_FEATURES": ""})
    ]
    assert digests[0].strip()
    assert digests[0] == digests[1]
