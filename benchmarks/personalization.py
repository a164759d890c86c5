"""Time for a newcomer: `python -m benchmarks.personalization -o personalization.json --plot personalization.png`.

How long each personalizer takes on a newcomer's 60, 600 and 6,000 unlabelled images, from what the federation published
to the newcomer's own predictions: CPU time of one thread, which a busy machine changes little. Random images of MNIST's
shape and an MLP, or of CIFAR-10's and the ConvNet (`--model convnet`). The models are not trained, so early stopping
takes as many steps as it happens to; they are shown. What a federation fits beforehand (calibrations and the like) is
fitted over 10 clients and is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

from benchmarks.machine import machine
from upfl.config import configure
from upfl.contract import Personalizer, Published, Task, Training, Unlabelled
from upfl.data.federation import build_federation
from upfl.data.forms import Pixels
from upfl.data.inputs import Inputs
from upfl.data.partition import Partition
from upfl.data.source import Source
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.clients import Population
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.engine.rounds import one_thread
from upfl.methods import PERSONALIZERS, TRAININGS, make_personalizer
from upfl.randomness import generator

mpl.use("Agg")

from matplotlib import pyplot as plt

SIZES = (60, 600, 6000)
CLIENTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=("mlp", "convnet"), default="mlp")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("-o", "--out", type=Path, help="the results as JSON")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()  # as the command line does
    with one_thread(), torch.no_grad():
        rows = measure(arguments.model, tuple(arguments.sizes), arguments.samples)
    print(table(rows))
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "model": arguments.model, "rows": rows}, indent=1))
    if arguments.plot:
        draw(rows, arguments.plot)


def measure(model: str, sizes: tuple[int, ...], samples: int) -> list[dict[str, Any]]:
    """Each personalizer's median time for each size, in turn, so that all see the same machine."""
    shape = (3, 32, 32) if model == "convnet" else (1, 28, 28)
    ready = {name: prepared(name, model, shape) for name in PERSONALIZERS}
    newcomers = [Unlabelled(0, images(size, shape)) for size in sizes]
    times: dict[tuple[str, int], list[float]] = {(name, size): [] for name in ready for size in sizes}
    steps: dict[tuple[str, int], int] = {}
    for _ in range(samples + 1):  # the first is to warm up
        for name, (personalizer, published) in ready.items():
            for newcomer in newcomers:
                started, key = time.thread_time(), (name, len(newcomer.x))
                personalized = personalizer.personalize(published, newcomer)
                times[key].append(time.thread_time() - started)
                steps[key] = personalized.diary.steps
    return [
        {
            "personalizer": name,
            "training": personalizer.training.name,
            "seconds": {size: statistics.median(times[name, size][1:]) for size in sizes},
            "steps": {size: steps[name, size] for size in sizes},
        }
        for name, (personalizer, _) in ready.items()
    ]


def prepared(name: str, model: str, shape: tuple[int, int, int]) -> tuple[Personalizer[Any], Published]:
    """A personalizer of the first training that it fits, and what that training would publish for it."""
    dataset = "cifar10" if model == "convnet" else "mnist"
    pixels = np.random.default_rng(0).integers(0, 256, (2 * CLIENTS * 100, *shape), np.uint8)
    labels, channels = np.arange(len(pixels)) % 10, shape[0]
    source = Source(
        "synthetic",
        pixels,
        labels,
        tuple("0123456789"),
        len(labels),
        None,
        Pixels(shape=shape, scale=255.0, mean=(0.5,) * channels, std=(0.25,) * channels),
    )
    federation = build_federation(source, Partition(kind="iid", clients=2 * CLIENTS), 0)
    population = Population(federation, Inputs(source), 0)
    for kind in ("fedavg", "fedtta-prox", "fedper"):
        config = configure(kind, dataset)
        task = Task(config.model.build(shape, 10), 10, CLIENTS)
        training: Training[Any] = TRAININGS[kind](task, config.training_hyper())
        if PERSONALIZERS[name].why_not(training) is None:
            break
    personalizer = make_personalizer(name, training, config.personalizer_hyper(name))
    members = [training.memory(population.training(i)) for i in range(CLIENTS)]
    state = training.publish(training.init(generator(0, "init")))
    published = Published(state, 1, members if training.publishes_memory else ())
    return personalizer, fit_needs([personalizer], published, population, Group())[0].published


def images(count: int, shape: tuple[int, int, int]) -> torch.Tensor:
    x = torch.randn(count, *shape, generator=generator(0, "newcomer"))
    return x.contiguous(memory_format=torch.channels_last)


def table(rows: list[dict[str, Any]]) -> str:
    sizes = list(rows[0]["seconds"])
    lines = [
        f"| personalizer | on | {' | '.join(f'{size:,} samples, s' for size in sizes)} | steps |",
        f"|---|---|{'---:|' * len(sizes)}---|",
    ]
    for row in rows:
        seconds = " | ".join(f"{row['seconds'][size]:.4f}" for size in sizes)
        taken = ", ".join(str(row["steps"][size]) for size in sizes)
        lines.append(f"| {row['personalizer']} | {row['training']} | {seconds} | {taken} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    colours = plt.get_cmap("tab20")(np.linspace(0, 1, len(rows)))
    for row, colour in zip(sorted(rows, key=lambda row: -max(row["seconds"].values())), colours, strict=True):
        panel.loglog(
            *zip(*row["seconds"].items(), strict=True),
            marker="o",
            markersize=3,
            color=colour,
            label=row["personalizer"],
        )
    panel.set_xlabel("a newcomer's samples")
    panel.set_ylabel("s of one core")
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
