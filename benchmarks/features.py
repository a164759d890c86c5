"""How near the features of `closed-form` come to the machine's matrix products: `python -m benchmarks.features`.

The bare products of the same shapes against the features with all that is around them (patches, their normalization,
rectified means), on one core, interleaved. Seconds are the thread's own, so that other work on the machine counts as
little as it can; the least of all samples counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from upfl.engine.allocator import keep_freed_memory
from upfl.models.filters import rounded_filters
from upfl.models.patches import Patches
from upfl.randomness import generator

IMAGES = 64
KINDS = {  # channels, side, patch, mirror
    "CIFAR": (3, 32, 6, True),
    "MNIST": (1, 28, 5, False),
}


def seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def measure(kind: str, filters: int, grid: int, samples: int) -> tuple[float, float]:
    """Products a second, in units of 2e9: bare ones, and those of the features."""
    channels, side, patch, mirror = KINDS[kind]
    layer = Patches("patches", channels, filters, patch, grid, 0.25, 0.0025, mirror)
    source = generator(0, "features")
    weight, bias = (torch.randn(*shape, generator=source) * 0.1 for shape in ((filters, layer.size), (filters,)))
    params, images = rounded_filters(weight, bias), torch.randn(IMAGES, channels, side, side, generator=source)
    places, columns = (side - patch + 1) ** 2, filters * (1 + mirror)
    patches, matrix = torch.randn(2 * places, layer.size, generator=source), layer.both(weight).t().contiguous()

    def bare() -> None:
        for _ in range(IMAGES // 2):
            torch.mm(patches, matrix)

    both = [(seconds(bare), seconds(lambda: layer.apply(*params, images))) for _ in range(samples)]
    work = 2e-9 * IMAGES * places * layer.size * columns
    return work / min(one[0] for one in both), work / min(one[1] for one in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--filters", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--grid", type=int, default=3)
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    print("| images | filters | products alone, GFLOP/s | features, GFLOP/s | of the products' rate |")
    print("|---|---:|---:|---:|---:|")
    with torch.no_grad():
        for kind in KINDS:
            for filters in arguments.filters:
                alone, features = measure(kind, filters, arguments.grid, arguments.samples)
                print(f"| {kind} | {filters} | {alone:.0f} | {features:.0f} | {features / alone:.0%} |")


if __name__ == "__main__":
    main()
