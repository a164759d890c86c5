"""A step on a torch.nn.Module against the same by plain PyTorch: `python -m benchmarks.modules`.

    SGD       forward, backward and update by torch.optim, against FedAvg's step
    FedTTA    autograd through the inner step (create_graph=True, as `higher` does; the gradients alone), against ours

Times are processor time of one thread, taken in turn: what else runs on the machine moves both. Printed are the medians
of the times and of the pairs' ratios, with the least and the greatest. `benchmarks.peers --models module` has whole
rounds, for a machine that is calm.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.work import ConvNet
from benchmarks.steps import BATCH, by_autograd, step_of, timed
from upfl import models
from upfl.contract import Batch, Task
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.rounds import one_thread
from upfl.models.resnet import resnet8
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA

SHAPE, CLASSES = (3, 32, 32), 10
NETS: dict[str, Callable[..., nn.Module]] = {
    "ConvNet": lambda shape, classes: ConvNet(),
    "resnet8": lambda shape, classes: resnet8(shape, classes),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=9, help="pairs of each step")
    samples = parser.parse_args().samples
    keep_freed_memory()  # as the command line does
    print(f"{'step, batch 64':20}{'ours, ms':>10}{'PyTorch, ms':>13}{'ratio':>8}  of {samples} pairs")
    for name, make in NETS.items():
        models.register(f"measured-{name}", make)
        task = Task(models.entry(f"measured-{name}").make(SHAPE, CLASSES, {}), CLASSES, 50)
        batch = Batch(torch.randn(BATCH, *SHAPE), torch.randint(0, CLASSES, (BATCH,)))
        with one_thread():
            report(
                f"SGD {name}", step_of(FedAvg(task, FedAvg.Hyper()), batch), plain(make(SHAPE, CLASSES), batch), samples
            )
            report(
                f"FedTTA {name}", step_of(FedTTA(task, FedTTA.Hyper()), batch), by_autograd(task, batch, True), samples
            )


def plain(net: nn.Module, batch: Batch) -> Callable[[], object]:
    """A step as everybody writes it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)

    def step() -> object:
        optimizer.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()  # type: ignore[no-untyped-call]
        return optimizer.step()

    return step


def report(name: str, ours: Callable[[], object], theirs: Callable[[], object], samples: int) -> None:
    for work in (ours, theirs):
        work()
    pairs = [(timed(ours, 2)[1] / 2, timed(theirs, 2)[1] / 2) for _ in range(samples)]
    ratios = [one / other for one, other in pairs]
    times = [1e3 * statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{name:20}{times[0]:10.1f}{times[1]:13.1f}{statistics.median(ratios):8.2f}  {spread}", flush=True)


if __name__ == "__main__":
    main()
