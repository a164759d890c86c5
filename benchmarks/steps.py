"""One training step against the machine's limit: `python -m benchmarks.steps` (or `make bench`).

A step's floating-point operations, at the rate of the machine's best 2048 x 2048 float32 matrix product on one thread
in the same run, give the time that it would take at the limit; printed is the time it takes over that. A FedTTA step
is counted as 6 forward passes of the first layer (which needs no gradient for its input) and 12 of every other, the
forward and backward pass of an SGD step as 2 and 3. That is the count of the plain method, by which others can be
compared; our steps form neither psi~ nor its gradient for wide linear layers (`models/`), which are fewer operations.

Rate and steps are measured in turn, so that both see the same machine; samples whose CPU time is under 95% of their
wall time (a stolen core) are thrown away; the medians are over at least seven.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from upfl.contract import Batch, Task
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.recorded import steps_of
from upfl.engine.rounds import one_thread
from upfl.models import Conv, Layered, Linear, compiled, convnet, mlp
from upfl.state import select
from upfl.training.base import LocalTraining
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA, FedTTAProx
from upfl.training.sgd import cross_entropy

BATCH = 64
LIMITS = {"FedTTA ConvNet": 1.45, "FedTTA MLP": 1.6, "SGD ConvNet": 1.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=15, help="kept samples of each step (at least 7)")
    wanted = max(7, parser.parse_args().samples)
    keep_freed_memory()  # as the command line does
    with one_thread(), torch.no_grad():
        report(*measure(jobs(), wanted))


def jobs() -> dict[str, tuple[Callable[[], object], float]]:
    """Name -> (a step, its floating-point operations)."""
    result: dict[str, tuple[Callable[[], object], float]] = {}
    for name, model, shape in (
        ("ConvNet", convnet((3, 32, 32), 10), (3, 32, 32)),
        ("MLP", mlp(784, (200, 200), 10), (1, 28, 28)),
    ):
        x = torch.randn(BATCH, *shape).contiguous(memory_format=torch.channels_last)
        batch = Batch(x, torch.randint(0, 10, (BATCH,)))
        first, others = forward_operations(model, shape)
        task = Task(model, 10, 50)
        result[f"FedTTA {name}"] = step_of(FedTTA(task, FedTTA.Hyper()), batch), 6 * first + 12 * others
        result[f"  FedTTA {name} by autograd"] = by_autograd(task, batch, meta=True), 6 * first + 12 * others
        first_order = FedTTA(task, FedTTA.Hyper(second_order=False))
        result[f"FedTTA {name}, first order"] = step_of(first_order, batch), 5 * first + 8 * others
        result[f"FedTTA-Prox {name}"] = step_of(FedTTAProx(task, FedTTAProx.Hyper()), batch), 7 * first + 13 * others
        if name == "MLP":
            result["  its matrix products alone"] = _products(model), 6 * first + 12 * others
        result[f"SGD {name}"] = _gradient(model, batch), 2 * first + 3 * others
        result[f"  SGD {name} by autograd"] = by_autograd(task, batch, meta=False), 2 * first + 3 * others
        result[f"SGD {name}, with update"] = step_of(FedAvg(task, FedAvg.Hyper()), batch), 2 * first + 3 * others
    return result


def forward_operations(model: Layered, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Operations of a forward pass on a batch: of the first layer, of the others."""
    counts, pixels = [], shape[1] * shape[2]
    for layer in model.layers:
        if isinstance(layer, Conv):
            counts.append(2.0 * BATCH * pixels * math.prod(layer.shapes()[f"{layer.name}.weight"]))
            pixels //= 4
        elif isinstance(layer, Linear):
            counts.append(2.0 * BATCH * layer.inputs * layer.outputs)
    return counts[0], sum(counts[1:])


def step_of(training: LocalTraining, batch: Batch) -> Callable[[], object]:  # type: ignore[type-arg]
    # Steps at rate zero do all the work and leave the model where it is, however long the benchmark runs.
    rates = {name: 1e-12 for name in ("lr", "outer_lr", "adapt_lr") if hasattr(training.hyper, name)}
    training.hyper = training.hyper.model_copy(update=rates)
    carry = training.begin(training.init(torch.Generator().manual_seed(0)), {}, None)  # type: ignore[arg-type]
    steps, (phase,) = steps_of(training, torch.device("cpu")), training.phases(0)  # as the engine takes them
    return lambda: steps(phase, carry, [batch], 0)


def _products(model: Layered) -> Callable[[], object]:
    """The matrix products of a FedTTA step and nothing else, into memory that is there: what the limit leaves of it."""
    products = []
    for i, layer in enumerate(layer for layer in model.layers if isinstance(layer, Linear)):
        x, y = torch.randn(BATCH, layer.inputs), torch.randn(BATCH, layer.outputs)
        weights = [torch.randn(layer.outputs, layer.inputs) for _ in range(3)]  # psi, psi~, v
        to_input = [(y, weights[i], x) for i in (0, 1, 0, 2)] if i else []
        further = [(x, weights[0].t(), y), (y.t(), x, weights[2])] if i else []
        forward = [(x, weight.t(), y) for weight in weights]
        to_weights = [(y.t(), x, torch.empty(layer.outputs, layer.inputs)) for _ in range(3)]
        products += [*forward, *to_weights, *to_input, *further]

    def multiply() -> object:
        for a, b, out in products:
            torch.mm(a, b, out=out)
        return products

    return multiply


def _gradient(model: Layered, batch: Batch) -> Callable[[], object]:
    params = model.layout(model.init(torch.Generator().manual_seed(0)))

    def forward_and_backward() -> object:
        with compiled.used():  # as local steps are taken
            trace = model.trace(params, batch.x)
            gradient = trace.backward(cross_entropy(trace.output, batch)[1])
            return dict(gradient)  # factors multiplied: the gradient as others have it

    return forward_and_backward


def by_autograd(task: Task, batch: Batch, meta: bool) -> Callable[[], object]:
    """The gradients alone, by PyTorch's autograd through the same model in the same layout, without weight decay."""
    training = FedTTA(task, FedTTA.Hyper())
    state = training.begin(training.init(torch.Generator().manual_seed(0)), {}, None)  # type: ignore[arg-type]
    psi, phi = ({k: v.requires_grad_() for k, v in select(state, part).items()} for part in ("psi", "phi"))
    model, guide, inner_lr = training.model, training.g, training.hyper.inner_lr

    @torch.enable_grad()
    def gradients() -> object:
        if not meta:
            return torch.autograd.grad(F.cross_entropy(model.apply(psi, batch.x), batch.y), list(psi.values()))
        l_per = (guide.apply(phi, model.apply(psi, batch.x)).square().sum() + 1e-12).sqrt()
        inner = torch.autograd.grad(l_per, list(psi.values()), create_graph=True)
        moved = {name: value - inner_lr * step for (name, value), step in zip(psi.items(), inner, strict=True)}
        loss = F.cross_entropy(model.apply(moved, batch.x), batch.y)
        return torch.autograd.grad(loss, [*psi.values(), *phi.values()])

    return gradients


def measure(
    steps: dict[str, tuple[Callable[[], object], float]], wanted: int
) -> tuple[float, dict[str, tuple[float, int, int]]]:
    """The best rate, and each step's (median time over time at that rate, samples kept, samples thrown away)."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    repeats = {name: max(1, round(1.5e10 / operations)) for name, (_, operations) in steps.items()}
    kept: dict[str, list[float]] = {name: [] for name in steps}
    thrown = dict.fromkeys(steps, 0)
    best = 0.0
    for name, (step, _) in steps.items():
        for _ in range(repeats[name]):  # small models, of which this is many, have been recorded then
            step()
    for _ in range(20 * wanted):
        if all(len(samples) >= wanted for samples in kept.values()):
            break
        best = max(best, *(2 * 2048**3 / timed(lambda: a @ b)[0] for _ in range(3)))
        for name, (step, _) in steps.items():
            wall, cpu = timed(step, repeats[name])
            if cpu < 0.95 * wall:
                thrown[name] += 1
            else:
                kept[name].append(wall / repeats[name])
    return best, {
        name: (statistics.median(kept[name]) / (operations / best), len(kept[name]), thrown[name])
        for name, (_, operations) in steps.items()
    }


def timed(work: Callable[[], object], repeats: int = 1) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(repeats):
        work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def report(rate: float, ratios: dict[str, tuple[float, int, int]]) -> None:
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s on one thread\n")
    print(f"{'step, batch 64':32}{'time over limit':>16}{'% of limit':>12}{'wanted':>8}{'samples':>9}{'thrown':>8}")
    for name, (ratio, samples, thrown) in ratios.items():
        wanted = f"{LIMITS[name]:.2f}" if name in LIMITS else ""
        print(f"{name:32}{ratio:16.2f}{100 / ratio:12.0f}{wanted:>8}{samples:9}{thrown:8}")


if __name__ == "__main__":
    main()
