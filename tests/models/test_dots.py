"""Outputs of wide linear layers by the loop that sums along rows: exactness, bits, who is served."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.params import distance
from upfl.contract import Batch, Phase, Task
from upfl.engine.recorded import Recorded, as_written
from upfl.models import compiled, mlp, products
from upfl.randomness import generator
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not compiled.installed(), reason="the loop needs Numba"),
]
SHAPES = [(64, 784, 200), (33, 784, 200), (7, 1040, 131), (64, 1000, 199), (67, 784, 201)]  # samples, inputs, outputs


@pytest.fixture(autouse=True)
def as_with_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to others elsewhere is tried there, too."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(compiled, "outruns_mkl", lambda: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    said, real = list[bool](), compiled.sums_rows

    def noting(*given: Any) -> bool:
        said.append(real(*given))
        return said[-1]

    monkeypatch.setattr(compiled, "sums_rows", noting)
    return said


def layer(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    samples, inputs, outputs = shape
    source = generator(0, str(shape))
    x, w = torch.randn(samples, inputs, generator=source), torch.randn(outputs, inputs, generator=source)
    return x, w, torch.randn(outputs, generator=source)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_outputs_are_those_of_double_precision(
    shape: tuple[int, int, int], calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LEAST", 1)
    x, w, bias = layer(shape)
    with compiled.used():
        y = products.linear(x, w, bias)
    assert calls == [True]
    assert distance({"": y.double()}, {"": x.double() @ w.double().t() + bias.double()}) < 3e-7


@pytest.mark.bits
@torch.inference_mode()
def test_bits_do_not_depend_on_neighbours_or_on_where_operands_begin() -> None:
    x, w, bias = layer(SHAPES[0])
    with compiled.used():
        y = products.linear(x, w, bias)
        assert torch.equal(products.linear(x[5:].contiguous(), w, bias), y[5:])
        assert torch.equal(products.linear(x, w[:-31].contiguous(), bias[:-31].contiguous()), y[:, :-31])
        for shift in (1, 3, 8):
            moved = []
            for one in (x, w, bias):
                room = torch.empty(one.numel() + shift)[shift:].view(one.shape)
                moved.append(room.copy_(one))
            assert torch.equal(products.linear(*moved), y)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_sample_and_its_output(value: float) -> None:
    x, w, bias = layer(SHAPES[0])
    x[11, 9], w[7, 3], bias[19] = value, value, value
    with compiled.used():
        assert compiled.sums_rows(x, w, bias)
        finite = products.linear(x, w, bias).isfinite()
    expected = torch.ones_like(finite)
    expected[11], expected[:, 7], expected[:, 19] = False, False, False
    assert torch.equal(finite, expected)


@torch.no_grad()
def test_it_serves_wide_layers_of_local_steps_in_single_precision_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w, bias = layer(SHAPES[0])
    assert not compiled.sums_rows(x, w, bias)  # nobody takes local steps
    with compiled.used():
        assert compiled.sums_rows(x, w, bias)
        assert not compiled.sums_rows(x[:6], w, bias)  # too small
        assert not compiled.sums_rows(x[:, :200].contiguous(), w[:, :200].contiguous(), bias)  # a narrow layer
        assert not compiled.sums_rows(
            torch.zeros(64, 2048), torch.zeros(512, 2048), torch.zeros(512)
        )  # leaves the cache
        assert not compiled.sums_rows(x[:, :780].contiguous(), w[:, :780].contiguous(), bias)  # no vectors
        assert not compiled.sums_rows(
            torch.zeros(64, 2**17), torch.zeros(1, 2**17), bias[:1]
        )  # fewer than three outputs
        assert not compiled.sums_rows(torch.zeros(3, 784), torch.zeros(300, 784), torch.zeros(300))  # and four samples
        assert not compiled.sums_rows(x.t().contiguous().t(), w, bias)
        assert not compiled.sums_rows(x, w.t().contiguous().t(), bias)
        assert not compiled.sums_rows(x, w, bias.repeat(2)[::2])
        assert not compiled.sums_rows(x, w, bias[:-1])
        assert not compiled.sums_rows(x.double(), w.double(), bias.double())
        with torch.enable_grad():
            assert not compiled.sums_rows(x, w, bias)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        assert not compiled.sums_rows(x, w, bias)
        monkeypatch.undo()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        monkeypatch.setattr(compiled, "outruns_mkl", lambda: False)
        assert not compiled.sums_rows(x, w, bias)
        monkeypatch.setattr(compiled, "outruns_mkl", lambda: True)
        monkeypatch.setattr(compiled, "torch_library", lambda: None)
        assert not compiled.sums_rows(x, w, bias)


@pytest.mark.bits
@pytest.mark.parametrize("method", [FedAvg, FedTTA])
def test_recorded_steps_have_the_bits_of_those_as_written(method: Any, calls: list[bool]) -> None:
    source = generator(2, "batches")
    batches = [
        Batch(torch.randn(64, 784, generator=source), torch.randint(5, (64,), generator=source)) for _ in range(6)
    ]
    made = method(Task(mlp(784, (200, 200), 5), 5, 3), method.Hyper())
    server, phase, told = made.init(generator(1)), Phase(made.step, 6, 64), list[str]()
    with torch.no_grad():
        ours, written = (
            steps(phase, made.carry(server), batches, 3)[0] for steps in (Recorded(told.append, worth=1), as_written)
        )
    assert any(calls)
    assert not told
    assert all(torch.equal(ours[name], written[name]) for name in written)
