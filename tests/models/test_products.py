"""Products without the zeros of shut rectifiers, and oneDNN's: against double precision, in steps, where they serve."""

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.params import difference, distance, doubled
from tests.helpers.rounds import trained
from tests.runs import Interrupter, StopError, assert_same, outcome, ran, ran_by_workers
from upfl.config import configure
from upfl.contract import Batch, Phase, Task
from upfl.engine.folder import RunFolder
from upfl.engine.recorded import Recorded, as_written
from upfl.engine.rounds import Engine
from upfl.models import compiled, mlp, products
from upfl.randomness import generator
from upfl.state import State
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = 5
ASKED, SKIPPING = compiled.outruns_mkl, compiled.skipping_outruns_mkl
MODEL = mlp(784, (200, 200), CLASSES)
SHAPES = [(200, 64, 784), (64, 200, 200), (96, 131, 104), (203, 70, 96)]  # rows, depth, columns


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to MKL on Intel's processors is tried there, too."""
    for asked in ("outruns_mkl", "skipping_outruns_mkl"):
        monkeypatch.setattr(compiled, asked, lambda: True)


def factors(rows: int, depth: int, columns: int, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    source = generator(0, str((rows, depth, columns)))
    a = torch.randn(rows, depth, generator=source).relu_()
    a[3] = 0  # a row that is shut
    a[:, 5] = -1.0
    a[3, 5] = 0
    b, total = torch.randn(depth, columns, generator=source), torch.randn(rows, columns, generator=source)
    return (a.t().contiguous().t() if turned else a), b, total


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was said from here on about who is served."""
    said, real = list[bool](), compiled.multiplies

    def noting(*given: Any) -> bool:
        said.append(real(*given))
        return said[-1]

    monkeypatch.setattr(compiled, "multiplies", noting)
    return said


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_products_are_those_of_double_precision(shape: tuple[int, int, int], turned: bool, calls: list[bool]) -> None:
    a, b, total = factors(*shape, turned)
    exact = a.double() @ b.double()
    with compiled.used():
        for ours, expected in (
            (products.multiplied(a, b, True), exact),
            (products.added(total, a, b, True, 0.5, -2.0), 0.5 * total.double() - 2 * exact),
            (products.add_open_(total.clone(), a, b, True, 0.5, -2.0), 0.5 * total.double() - 2 * exact),
        ):
            assert distance({"": ours.double()}, {"": expected}) < 1e-6
    assert all(calls)
    assert torch.equal(products.added(total, a, b, True, 0.5, -2.0), torch.addmm(total, a, b, beta=0.5, alpha=-2.0))


@torch.inference_mode()
def test_bits_do_not_depend_on_where_operands_begin_or_which_way_the_first_lies() -> None:
    a, b, total = factors(*SHAPES[0], False)
    with compiled.used():
        expected = products.added(total, a, b, True, 0.9, -0.1)
        for shift in (1, 3, 8):
            moved = []
            for one in (a, b, total):
                room = torch.empty(one.numel() + shift)[shift:].view(one.shape)
                moved.append(room.copy_(one))
            ours = products.add_open_(moved[2], moved[0], moved[1], True, 0.9, -0.1)
            assert torch.equal(ours, expected)
        assert torch.equal(products.added(total, a.t().contiguous().t(), b, True, 0.9, -0.1), expected)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64])
@torch.inference_mode()
def test_factors_may_be_tensors_of_any_kind(kind: torch.dtype) -> None:
    a, b, total = factors(*SHAPES[0], False)
    beta: Any = torch.tensor(2, dtype=kind)
    alpha: Any = torch.tensor(-3, dtype=kind)
    with compiled.used():
        expected = products.added(total, a, b, True, 2.0, -3.0)
        assert torch.equal(products.added(total, a, b, True, beta, alpha), expected)


@torch.inference_mode()
def test_what_memory_held_does_not_count_where_it_is_written_anew() -> None:
    a, b, total = factors(*SHAPES[2], False)  # three layers of rows
    a[3] = 0
    with compiled.used():
        expected = products.add_open_(torch.zeros_like(total), a, b, True)
        assert torch.equal(products.add_open_(torch.full_like(total, torch.nan), a, b, True, beta=0.0), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_so_where_it_is_open(value: float) -> None:
    a, b, _ = factors(*SHAPES[0], True)
    a[7, 9] = value
    with compiled.used():
        ours = products.multiplied(a, b, True)
    assert not ours[7].isfinite().any()
    assert ours[:7].isfinite().all()
    assert ours[8:].isfinite().all()
    a[7, 9], b[2] = 1.0, value
    a[:9, 2], a[9, 2] = 0.0, 1.0
    with compiled.used():
        ours = products.multiplied(a, b, True)
    assert ours[:9].isfinite().all()  # nobody there takes the row
    assert not ours[9].isfinite().any()


@torch.no_grad()
def test_they_serve_large_products_of_local_steps_in_single_precision_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, total = torch.zeros(64, 200), torch.zeros(200, 200), torch.zeros(64, 200)
    assert not compiled.multiplies(a, b, total)  # nobody takes local steps
    with compiled.used():
        assert compiled.multiplies(a, b, total)
        assert not compiled.multiplies(a[:26], b, total[:26])  # too small
        assert not compiled.multiplies(a, b[:, :196].contiguous(), total[:, :196].contiguous())  # no vectors
        assert not compiled.multiplies(a, torch.zeros(200, 120), torch.zeros(64, 120))  # parts of 7 and 8 vectors
        assert not compiled.multiplies(a, torch.zeros(200, 2048), torch.zeros(64, 2048))  # too large
        assert not compiled.multiplies(a, b.t(), total)
        assert not compiled.multiplies(a, b, torch.zeros(200, 64).t())
        assert not compiled.multiplies(torch.zeros(64, 400)[:, ::2], b, total)
        assert not compiled.multiplies(a, b, total[:60])
        assert not compiled.multiplies(a, torch.zeros(199, 200), total)
        assert not compiled.multiplies(a.double(), b.double(), total.double())
        with torch.enable_grad():
            assert not compiled.multiplies(a, b, total)
        seen = []

        def look(a: Tensor) -> Tensor:
            seen.append(compiled.multiplies(a, b, total))
            return a.sum()

        torch.func.vmap(look)(torch.zeros(3, 64, 200))
        torch.func.jvp(look, (a,), (a,))
        assert seen == [False, False]
        monkeypatch.setattr(compiled, "torch_library", lambda: None)
        assert not compiled.multiplies(a, b, total)


@pytest.mark.parametrize("intel", [True, False])
@pytest.mark.parametrize("told", [{"amx_tile": True}, {"amx_tile": False}, {}, None])
@torch.no_grad()
def test_products_are_left_to_mkl_where_it_is_fastest(
    intel: bool, told: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "outruns_mkl", lambda: not intel)
    monkeypatch.setattr(compiled, "skipping_outruns_mkl", SKIPPING.__wrapped__)
    if told is None:  # an earlier PyTorch
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    a, b = torch.ones(64, 1024), torch.ones(1024, 200)
    with compiled.used():
        assert products.direct(a, b) is not intel
        assert compiled.multiplies(a[:, :200].contiguous(), b[:200]) is (
            not intel or (told or {}).get("amx_tile", False)
        )


@pytest.mark.parametrize(("library", "ours"), [({}, True), ({"says": 0}, True), ({"says": 1}, False)])
def test_mkl_is_asked_whose_the_processor_is(
    library: dict[str, int], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {compiled.INTEL: (lambda: library["says"])} if library else {}  # a PyTorch without MKL has no such name
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**given))
    assert ASKED.__wrapped__() is ours


def laid_out(value: Tensor, form: str) -> Tensor:
    """The same values, as they may lie in memory."""
    rows, columns = value.shape
    if form == "turned":
        return value.t().contiguous().t()
    if form == "of a wider one":
        return torch.cat([value, value[:, :7]], 1)[:, :columns]
    if form == "every second":
        return value.repeat_interleave(2, 1)[:, ::2]
    shift = int(form)
    return torch.empty(value.numel() + shift)[shift:].view(rows, columns).copy_(value)


@pytest.mark.bits
@pytest.mark.parametrize("shape", [(64, 784, 200), (200, 64, 784), (128, 64, 2048), (65, 1031, 127)])
@torch.inference_mode()
def test_large_products_are_exact_to_rounding_and_have_the_same_bits_however_operands_lie(
    shape: tuple[int, int, int],
) -> None:
    rows, depth, columns = shape
    source = generator(0, str(shape))
    a, b = torch.randn(rows, depth, generator=source), torch.randn(depth, columns, generator=source)
    total, exact = torch.randn(rows, columns, generator=source), a.double() @ b.double()
    with compiled.used():
        assert products.direct(a, b)
        plain = products.multiplied(a, b, False)
        ours = products.add_open_(total.clone(), a, b, False, 0.5, -2.0)
        y = products.linear(a, laid_out(b, "turned").t(), total[0])
        for form in ("turned", "of a wider one", "every second", "0", "1", "3", "8"):
            assert torch.equal(products.multiplied(laid_out(a, form), b, False), plain), form
        for form in ("turned", "0", "1", "3", "8"):
            assert torch.equal(products.multiplied(a, laid_out(b, form), False), plain), form
        for form in ("of a wider one", "every second"):
            assert not products.direct(a, laid_out(b, form))
        column = torch.randn(columns, 3, generator=source)[:, 1]  # a bias with gaps
        assert distance({"": products.linear(a, b.t(), column).double()}, {"": exact + column}) < 1e-6
        nothing = products.add_open_(torch.full_like(total, torch.nan), a, b, False, 0.0)
        assert torch.equal(nothing, plain)
    for one, expected in (
        (plain, exact),
        (ours, 0.5 * total.double() - 2 * exact),
        (y, exact + total[0].double()),
    ):
        assert distance({"": one.double()}, {"": expected}) < 1e-6


@torch.no_grad()
def test_onednn_serves_large_products_of_local_steps_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(64, 512), torch.zeros(512, 256)
    assert not products.direct(a, b)  # nobody takes local steps
    with compiled.used():
        assert products.direct(a, b)
        assert not products.direct(a[:63], b)  # too small
        assert not products.direct(a.double(), b.double())
        with torch.enable_grad():
            assert not products.direct(a, b)
        seen = []

        def look(one: Tensor) -> Tensor:
            seen.append(products.direct(one, b))
            return one.sum()

        torch.func.vmap(look)(torch.zeros(3, 64, 512))
        assert seen == [False]
        bias = torch.zeros(())
        assert torch.equal(products.linear(a, b.t().contiguous(), bias.expand(256)), torch.zeros(64, 256))
        monkeypatch.setattr(products, "_available", lambda: False)
        assert not products.direct(a, b)
        assert products.multiplied(a, b, False).shape == (64, 256)


def batches(count: int, samples: int = 64) -> list[Batch]:
    source = generator(2, "batches")
    return [
        Batch(torch.randn(samples, 784, generator=source), torch.randint(CLASSES, (samples,), generator=source))
        for _ in range(count)
    ]


def training(method: str, model: Any = MODEL) -> Any:
    task = Task(model, CLASSES, 3)
    return FedAvg(task, FedAvg.Hyper(lr=0.1)) if method == "fedavg" else FedTTA(task, FedTTA.Hyper())


@pytest.mark.parametrize(("method", "served"), [("fedavg", 3), ("fedtta", 9)])
def test_steps_are_the_dense_ones_to_float32s_precision(method: str, served: int, calls: list[bool]) -> None:
    made = training(method)
    server = made.init(generator(1))
    dense = doubled(trained(made, server, batches(2))[0])
    assert not any(calls)
    with compiled.used(), torch.no_grad():
        ours = doubled(trained(made, server, batches(2))[0])
    assert sum(calls) >= 2 * served
    moved = difference(dense, doubled(server))
    assert 0 < distance(ours, dense, scale=moved) < 1e-4


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "fedtta"])
def test_recorded_steps_have_the_bits_of_those_as_written(
    method: str, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loops:
        monkeypatch.setattr(compiled, "installed", lambda: False)
    made = training(method)
    server = made.init(generator(1))
    told: list[str] = []
    phase = Phase(made.step, 6, 64)

    def run(steps: Any) -> State:
        with torch.no_grad():
            return steps(phase, made.carry(server), batches(6), 3)[0]  # type: ignore[no-any-return]

    ours, written = run(Recorded(told.append, worth=1)), run(as_written)
    assert not told
    assert all(torch.equal(ours[name], written[name]) for name in written)


def test_small_models_and_layers_without_a_rectifier_are_not_served(calls: list[bool]) -> None:
    small = training("fedavg", mlp(64, (200, 200), CLASSES))
    few = [Batch(one.x[:, :64].contiguous(), one.y) for one in batches(1)]
    with compiled.used(), torch.no_grad():
        trained(small, small.init(generator(1)), few)
        bare = MODEL[:2].trace(MODEL.init(generator(1)), batches(1)[0].x)
        bare.backward(torch.ones_like(bare.output))["fc1.weight"]
    assert not any(calls)


def test_batches_that_lie_otherwise_in_memory_are_recorded_anew_to_the_same_bits() -> None:
    made = training("fedavg")
    server, phase = made.init(generator(1)), Phase(made.step, 6, 64)
    turned = [Batch(one.x.t().contiguous().t(), one.y) for one in batches(3)]
    ours, written = (
        steps(phase, made.carry(server), batches(3) + turned, 3)[0] for steps in (Recorded(worth=1), as_written)
    )
    assert all(torch.equal(ours[name], written[name]) for name in written)


def test_threads_make_one_operation() -> None:
    together, made = threading.Barrier(3), list[Any]()

    register = compiled.loaded("operations").made_once(object)

    def work() -> None:
        together.wait()
        made.append(register())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(made) == 3
    assert made[0] is made[1] is made[2]


@pytest.mark.parametrize("missing", compiled.NEEDED)
def test_a_pytorch_without_a_part_of_the_interface_is_not_called(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"aoti_torch_{name}" for name in compiled.NEEDED if name != missing]
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**dict.fromkeys(names)))
    assert compiled.torch_library.__wrapped__() is None


def test_a_library_that_does_not_load_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", fails)
    assert compiled.torch_library.__wrapped__() is None


@pytest.mark.parametrize("served", ["loops", "onednn"])
def test_a_run_has_the_same_bits_with_two_workers_and_after_a_stop(
    served: str, tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if served == "loops":
        monkeypatch.setattr(compiled, "WIDE", 1)  # digits have 64 inputs: the layer between the hidden ones is served
        monkeypatch.setattr(compiled, "LEAST", 1)
    else:
        monkeypatch.setattr(products, "LARGE", 1)
    settings = ("iterations=3", "batch_size=16")
    config = configure(
        "fedavg",
        "digits",
        profile="smoke",
        settings=settings,
        rounds=2,
        model={"name": "mlp", "hidden": 200},
        partition={"clients": 12},
    )
    alone = ran(config, tmp_path / "alone")
    assert any(calls) == (served == "loops")
    assert_same(ran_by_workers(config, tmp_path / "two", 2), alone)
    folder = RunFolder.create(tmp_path / "stopped", config)
    with pytest.raises(StopError):
        Engine.local(folder).run(Interrupter("round", 1))
    Engine.local(folder).run()
    assert_same(outcome(folder), alone)
