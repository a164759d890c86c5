"""What newcomers are told, against the truth: `python -m benchmarks.newcomers told RUN ...` and `... few`.

`told` makes a bundle of each finished run and lets its new clients personalize as a user would, with 1, 5, 20 and all
of their samples: how many data sets are called alike, how far the class mix that is shown is off (total variation,
points), how many 95% intervals hold the accuracy before and after. Then the same newcomers with images that are
inverted, transposed, shifted, turned, or noise: how many are called unlike, beside what is lost of the accuracy.

`few` trains FedAvg on digits with few training clients, over several kinds of partitions, and compares label-shift and
auto with none. New clients' labels are compared with, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import upfl
from benchmarks.machine import machine
from upfl.data.forms import Pixels, rotate
from upfl.personalize.estimate import total_variation

Images = NDArray[np.generic]
PERSONALIZERS = ("label-shift", "refit+label-shift", "auto")
SIZES = (1, 5, 20, None)
SCORED = ("none", "label-shift", "auto", "refit", "refit+label-shift")
KINDS: dict[str, dict[str, Any]] = {
    "two classes": {"kind": "pathological"},
    "six classes": {"kind": "pathological", "labels_per_client": 6},
    "i.i.d.": {"kind": "iid"},
    "Dirichlet 0.5": {"kind": "dirichlet", "alpha_training": 0.5, "alpha_new": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser("told")
    told.add_argument("runs", nargs="+", type=Path)
    told.add_argument("--clients", type=int, help="new clients of each run; all where silent")
    told.add_argument("--personalizers", default=",".join(PERSONALIZERS))
    few = commands.add_parser("few")
    few.add_argument("--clients", type=int, nargs="+", default=(2, 3, 5, 10, 20))
    few.add_argument("--rounds", type=int, default=20)
    few.add_argument("--seeds", type=int, default=3, help="partitions of each kind")
    for command in (told, few):
        command.add_argument("-o", "--out", type=Path, help="the results as JSON")
    arguments = parser.parse_args()
    if arguments.command == "told":
        names = arguments.personalizers.split(",")
        rows = [row for run in arguments.runs for row in measured(run, names, arguments.clients)]
        show = told_tables
    else:
        rows = list(with_few(arguments.clients, arguments.rounds, arguments.seeds))
        show = few_table
    print(show(rows))
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


# What newcomers are told


def measured(path: Path, names: list[str], clients: int | None) -> Iterator[dict[str, Any]]:
    """A row for each personalizer, size of newcomers and kind of images."""
    run = upfl.Run(path)
    fitting = [name for name in names if upfl.methods.personalizer_class(name).why_not(run.training) is None]
    with tempfile.TemporaryDirectory() as folder:
        bundle = upfl.export(
            run, Path(folder) / "bundle", [name for name in fitting if name not in run.config.personalize]
        )
    federation = run.federation
    source, new = federation.source, federation.new
    assert isinstance(source.form, Pixels), "images alone can be turned"
    scale = source.form.scale
    chosen = range(min(len(new), clients or len(new)))
    images = [turned(source.x[new.all(i)], float(new.angles[i]), scale) for i in chosen]
    labels = [source.labels[new.all(i)] for i in chosen]
    for name in fitting:
        for size in SIZES:
            large = [i for i in chosen if len(labels[i]) >= (size or 1)]
            found = [asked(bundle, name, images[i][:size], labels[i][:size]) for i in large]
            yield {"run": path.name, "personalizer": name, "size": size, "images": "own", "clients": found}
    for kind, change in changes(scale).items():
        found = [asked(bundle, fitting[0], change(images[i]), labels[i]) for i in chosen]
        yield {"run": path.name, "personalizer": fitting[0], "size": None, "images": kind, "clients": found}


def asked(bundle: upfl.Bundle, name: str, images: Images, labels: NDArray[np.int64]) -> dict[str, Any]:
    """What a newcomer is told, and the truth."""
    mine = bundle.personalize(images, name)
    assert mine.personalized is not None
    diary, y = mine.diary, torch.from_numpy(labels)
    assert diary.likeness is not None
    truth = torch.bincount(y, minlength=len(mine.classes_)) / len(y)
    right = [float((z.argmax(1) == y).double().mean()) for z in (mine.personalized.before, mine.personalized.logits)]
    shown = torch.tensor(upfl.bundle.class_mix(mine).after)
    return {
        "samples": len(y),
        "verdict": diary.likeness.verdict,
        "p": diary.likeness.p,
        "outlying": int(mine.outlying_.sum()),
        "accuracy": right,
        "estimates": [(one.value, one.low, one.high) for one in diary.accuracy],
        "mix_off": float(total_variation(shown, truth)),
        "mix_error": diary.mix_error,
        "decision": diary.decision,
    }


def turned(images: Images, degrees: float, scale: float) -> Images:
    if not degrees:
        return images
    pixels = rotate(torch.from_numpy(images.astype(np.float32)), degrees).clamp(0, scale)
    return pixels.round().numpy().astype(images.dtype)


def changes(scale: float) -> dict[str, Callable[[Images], Images]]:
    def inverted(x: Images) -> Images:
        return np.asarray(scale - x.astype(np.float64)).astype(x.dtype)

    def shifted(x: Images) -> Images:
        moved = np.zeros_like(x)
        moved[..., 2:] = x[..., :-2]
        return moved

    def noise(x: Images) -> Images:
        return np.random.default_rng(0).integers(0, int(scale) + 1, x.shape).astype(x.dtype)

    return {
        "inverted": inverted,
        "transposed": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)),
        "shifted by 2 pixels": shifted,
        "turned by 180 degrees": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1]),
        "noise": noise,
        "one image of noise": lambda x: noise(x[:1]),
        "turned by 15 degrees": lambda x: turned(x, 15, scale),
        "turned by 45 degrees": lambda x: turned(x, 45, scale),
        "turned by 90 degrees": lambda x: turned(x, 90, scale),
    }


def told_tables(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| run | personalizer | samples | newcomers | alike | unlike | mix off by | before held | after held | width |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if row["images"] == "own" and row["clients"]):
        clients = row["clients"]
        estimated = [one for one in clients if one["estimates"]]
        covered = [
            np.mean([low <= one["accuracy"][k] <= high for one in estimated for _, low, high in [one["estimates"][k]]])
            for k in range(2)
            if estimated
        ]
        width = [100 * (one["estimates"][1][2] - one["estimates"][1][1]) for one in estimated]
        figures = [f"{value:.0%}" for value in covered] or ["-", "-"]
        figures.append(f"{np.mean(width):.1f}" if width else "-")
        mix = 100 * np.mean([one["mix_off"] for one in clients])
        figures = [share(clients, "alike"), share(clients, "unlike"), f"{mix:.1f}", *figures]
        head = f"| {row['run']} | {row['personalizer']} | {row['size'] or 'all'} | {len(clients)} "
        lines.append(f"{head}| {' | '.join(figures)} |")
    lines += ["", "| run | images | called unlike | accuracy after | as they were |", "|---|---|---:|---:|---:|"]
    for row in (row for row in rows if row["images"] != "own"):
        as_it_was = next(one for one in rows if one["images"] == "own" and one["size"] is None and same(one, row))
        figures = [share(row["clients"], "unlike"), f"{right(row):.1f}", f"{right(as_it_was):.1f}"]
        lines.append(f"| {row['run']} | {row['images']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("run", "personalizer"))


def share(clients: list[dict[str, Any]], verdict: str) -> str:
    return f"{np.mean([one['verdict'] == verdict for one in clients]):.0%}"


def right(row: dict[str, Any]) -> float:
    samples = sum(one["samples"] for one in row["clients"])
    return float(100 * sum(one["samples"] * one["accuracy"][1] for one in row["clients"]) / samples)


# Few training clients


def with_few(numbers: list[int], rounds: int, seeds: int) -> Iterator[dict[str, Any]]:
    for clients in numbers:
        for kind, partition in KINDS.items():
            if kind == "two classes" and clients < 3:
                continue  # four clients of two classes would leave some classes to nobody
            for seed in range(seeds):
                settings = [f"partition.{key}={value}" for key, value in (partition | {"clients": 2 * clients}).items()]
                config = upfl.configure(
                    "fedavg",
                    "digits",
                    rounds=rounds,
                    partition_seed=seed,
                    evaluate_every=rounds,
                    score=SCORED,
                    settings=settings,
                )
                with tempfile.TemporaryDirectory() as folder:
                    found = {
                        row["row"]: row for row in upfl.train(config, Path(folder) / "run", workers=1).result["rows"]
                    }
                rows = {name: found[upfl.methods.row_name("fedavg", name)] for name in SCORED}
                scores = {name: {key: row[key] for key in ("validation", "test")} for name, row in rows.items()}
                yield {"clients": clients, "kind": kind, "seed": seed, "scores": scores}


def few_table(rows: list[dict[str, Any]]) -> str:
    """New clients' accuracy in the mean over kinds and partitions, and the largest loss of any kind against none."""
    lines = [f"| training clients | {' | '.join(SCORED)} | label-shift - none | auto - none |"]
    lines.append("|---:" * (len(SCORED) + 3) + "|")
    numbers = dict.fromkeys(row["clients"] for row in rows)
    for clients, kind in [(clients, kind) for clients in numbers for kind in (*KINDS, "mean")]:
        some = [row["scores"] for row in rows if row["clients"] == clients and kind in (row["kind"], "mean")]
        if not some:
            continue
        means = {name: np.mean([scores[name]["test"] for scores in some]) for name in SCORED}
        against = [f"{means[name] - means['none']:+.1f}" for name in ("label-shift", "auto")]
        figures = [f"{value:.1f}" for value in means.values()]
        lines.append(f"| {clients}, {kind} | {' | '.join([*figures, *against])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
