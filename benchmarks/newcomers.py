"""What newcomers are told, against the truth: `python -m benchmarks.newcomers`.

It makes every figure of results/newcomers.md. Each setting below is trained for each of its partitions (a run folder
below --runs, which is resumed or taken as it is), exported as a bundle, and its new clients personalize as a user
would, with 1, 5, 20 and all of their samples: how many data sets are called alike, how far the class mix that is shown
is off (total variation, points), how many 95% intervals hold the accuracy before and after. Then with images that are
inverted, transposed, shifted, turned, or noise: how many are called unlike, beside what is lost of the accuracy. What
was found is kept beside the run, so that the command goes on where it was stopped; --again asks once more. New clients'
labels are compared with, and nothing else.

No rule was made with these partitions in view: results/newcomers.md names those that were used.

`few` is the last table: FedAvg on digits with few training clients, label-shift and auto against none.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
Told = dict[str, Any]
SIZES = (1, 5, 20, None)  # samples of a newcomer; all
LARGE = 20  # samples from which on a newcomer is to be told


@dataclass(frozen=True)
class Setting:
    """A federation, and whom of its newcomers to ask what."""

    method: str
    dataset: str
    partition: str  # in words
    settings: tuple[str, ...] = ()
    partitions: tuple[int, ...] = (34,)
    personalizers: tuple[str, ...] = ("label-shift", "refit+label-shift", "auto")
    changed: int = 0  # newcomers of each partition that bring other images, too

    @property
    def name(self) -> str:
        return re.sub("[ .,-]+", "-", f"{self.dataset} {self.partition} {self.method}")

    def config(self, partition: int) -> upfl.Config:
        settings = [f"partition_seed={partition}", *self.settings]
        return upfl.configure(self.method, self.dataset, settings=settings)


IID = "partition.kind=iid"
DIRICHLET = ("partition.kind=dirichlet", "partition.alpha_training=0.1")
TURNED = ("partition.rotations_training=[0.0,30.0,60.0]", "partition.rotations_new=[15.0,45.0]")
ROUNDS = ("rounds=20", "evaluate_every=20")
SOME = (*ROUNDS, "clients_per_round=20")
SHUT = "personalize.label-shift.gate=1e9"
CLOSED, LABEL_SHIFT, ON_MODEL = "closed-form", "closed-form-label-shift", ("label-shift", "auto")
THREE = (34, 35, 36)


def alpha(new: float) -> tuple[str, ...]:
    return (*DIRICHLET, f"partition.alpha_new={new}")


SETTINGS = (
    # README's example
    Setting("refit-label-shift", "digits", "two classes", ("rounds=20",), THREE, changed=20),
    Setting("fedavg", "digits", "two classes", ("rounds=60", "evaluate_every=60"), THREE),
    Setting("fedavg", "digits", "i.i.d.", (*ROUNDS, IID), THREE),
    Setting("fedavg", "digits", "Dirichlet 0.1", (*ROUNDS, *alpha(0.1)), THREE),
    Setting("fedavg", "digits", "Dirichlet 0.5", (*ROUNDS, "partition.kind=dirichlet", "partition.alpha_training=0.5",
            "partition.alpha_new=0.5"), THREE),
    Setting("fedtta-prox", "digits", "i.i.d.", ("rounds=60", "evaluate_every=60", IID), THREE),
    Setting(CLOSED, "digits", "two classes", (), THREE, ON_MODEL),
    Setting(CLOSED, "digits", "i.i.d.", (IID,), THREE, ON_MODEL),
    Setting("fedtta-prox", "mnist", "1000 images, turned", ("rounds=40", "evaluate_every=40", IID,
            "partition.samples=1000", "partition.clients=50", *TURNED), THREE),
    Setting("fedavg", "mnist", "two classes", SOME, (34,), ("label-shift", "refit+label-shift"), changed=20),
    Setting("fedavg", "mnist", "i.i.d.", (*SOME, IID), (34,), ("label-shift",)),
    Setting("fedavg", "mnist", "Dirichlet 0.1", (*SOME, *alpha(0.1)), (34,), ("label-shift",)),
    Setting("fedavg", "femnist", "writers", (*SOME, "model.name=mlp", "model.hidden=200", "training.lr=0.01"),
            changed=20),
    # where the gate opens, held closed
    Setting("label-shift", "digits", "two classes, gate closed", (*ROUNDS, SHUT), THREE, ("label-shift",)),
    Setting("label-shift", "mnist", "two classes, gate closed", (*SOME, SHUT), (34,), ("label-shift",)),
    Setting(CLOSED, "mnist", "two classes", (), (34,), ON_MODEL),
    Setting(LABEL_SHIFT, "cifar10", "two classes", (), (1,), ("label-shift",)),
    Setting(LABEL_SHIFT, "cifar10", "two classes, gate closed", (SHUT,), (34,), ("label-shift",)),
    Setting(LABEL_SHIFT, "cifar10", "i.i.d.", (IID,), (0,), ("label-shift",)),
    Setting(CLOSED, "cifar10", "Dirichlet 0.01", alpha(0.01), (34,), ("label-shift",)),
    Setting(CLOSED, "cifar10", "Dirichlet 0.5", alpha(0.5), (34,), ("label-shift",)),
    Setting(CLOSED, "femnist", "writers", (), (34,), ON_MODEL),
    Setting(CLOSED, "fashion_mnist", "two classes", (), (34,), ON_MODEL),
    Setting("fedavg", "cifar10", "two classes", (*SOME, "model.width=0.5")),
)  # fmt: skip

FEW = (2, 3, 5, 10, 20)  # training clients
SCORED = ("none", "label-shift", "auto", "refit", "refit+label-shift")
KINDS: dict[str, dict[str, Any]] = {
    "two classes": {"kind": "pathological"},
    "six classes": {"kind": "pathological", "labels_per_client": 6},
    "i.i.d.": {"kind": "iid"},
    "Dirichlet 0.5": {"kind": "dirichlet", "alpha_training": 0.5, "alpha_new": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path, default=Path("runs/newcomers"))
    parser.add_argument("--only", default="", help="settings whose name contains this; `few`: the last table")
    parser.add_argument("--again", action="store_true", help="ask newcomers again, whatever was found before")
    parser.add_argument("--show", action="store_true", help="the tables of what was found so far")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    told: dict[Setting, list[Told]] = {}
    for setting in (one for one in SETTINGS if arguments.only in one.name):
        for partition in setting.partitions:
            kept = arguments.runs / f"{setting.name}-{partition}.json"
            if (arguments.again or not kept.exists()) and not arguments.show:
                rows = list(measured(setting, trained(setting.config(partition), kept.with_suffix("")), partition))
                kept.write_text(json.dumps({"machine": machine(), "rows": rows}))
            if kept.exists():
                told.setdefault(setting, []).extend(json.loads(kept.read_text())["rows"])
    few = []
    if arguments.only in ("", "few"):
        for clients in FEW:
            kept = arguments.runs / f"few-{clients}.json"
            if (arguments.again or not kept.exists()) and not arguments.show:
                kept.write_text(json.dumps({"machine": machine(), "rows": list(with_few(clients))}))
            if kept.exists():
                few += json.loads(kept.read_text())["rows"]
    print("\n\n".join([*tables(told), few_table(few)]))


def trained(config: upfl.Config, path: Path) -> upfl.Run:
    return upfl.resume(path, workers=1) if path.exists() else upfl.train(config, path, workers=1)


# What newcomers are told


def measured(setting: Setting, run: upfl.Run, partition: int) -> Iterator[Told]:
    """A row for each newcomer, personalizer, size and kind of images."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = upfl.export(run, Path(folder) / "bundle", setting.personalizers)
    source, new = run.federation.source, run.federation.new
    assert isinstance(source.form, Pixels), "images alone can be turned"
    scale = source.form.scale
    for i in range(len(new)):
        images = turned(source.x[new.all(i)], float(new.angles[i]), scale)
        labels = source.labels[new.all(i)]
        facts = {"partition": partition, "client": i}
        for name in setting.personalizers:
            for size in (size for size in SIZES if len(labels) >= (size or 1)):
                told = asked(bundle, name, images[:size], labels[:size])
                yield facts | {"personalizer": name, "size": size, "images": "own", **told}
        for kind, change in changes(scale).items() if i < setting.changed else ():
            told = asked(bundle, setting.personalizers[0], change(images), labels)
            yield facts | {"personalizer": setting.personalizers[0], "size": None, "images": kind, **told}


def asked(bundle: upfl.Bundle, name: str, images: Images, labels: NDArray[np.int64]) -> Told:
    """What a newcomer is told, and the truth."""
    mine = bundle.personalize(images, name)
    assert mine.personalized is not None
    diary, y = mine.diary, torch.from_numpy(labels[: len(images)])
    assert diary.likeness is not None
    truth = torch.bincount(y, minlength=len(mine.classes_)) / len(y)
    right = [float((z.argmax(1) == y).double().mean()) for z in (mine.personalized.before, mine.personalized.logits)]
    shown = torch.tensor(upfl.bundle.class_mix(mine).after)
    return {
        "samples": len(y),
        "verdict": diary.likeness.verdict,
        "p": diary.likeness.p,
        "scores": diary.likeness.scores,
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


def tables(told: dict[Setting, list[Told]]) -> Iterator[str]:
    """Alarms, mix and coverage with all samples; coverage with few; other images."""
    own = {setting: [row for row in rows if row["images"] == "own"] for setting, rows in told.items()}
    groups = [
        (setting, name, [row for row in own[setting] if row["personalizer"] == name])
        for setting in told
        for name in setting.personalizers
    ]
    yield table(
        "data, who holds what | training | personalizer | newcomers | alike | unlike | gate | before | after "
        "| mix off by | before held | after held | width",
        (
            [*head(setting), name, len(whole), *verdicts(whole), gates(whole), *figures(whole)]
            for setting, name, rows in groups
            for whole in [[row for row in rows if row["size"] is None]]
        ),
        left=3,
    )
    yield table(
        "data, who holds what | training | personalizer "
        + "".join(f"| {n}: before held | after held | width | mix off by " for n in SIZES if n),
        (
            [*head(setting), name, *(cell for part in parts for cell in (*covered(part), width(part), off(part)))]
            for setting, name, rows in groups
            for parts in [[[row for row in rows if row["size"] == size] for size in SIZES if size]]
        ),
        left=3,
    )
    yield table(
        "data, who holds what | training | images | newcomers | alike | unlike | accuracy after | told | as they were",
        (
            [*head(setting), kind, len(other), *verdicts(other), right(other, 1), estimated(other), right(as_was, 1)]
            for setting, name, rows in groups
            if setting.changed and name == setting.personalizers[0]
            for as_was in [[row for row in rows if row["size"] is None and row["client"] < setting.changed]]
            for kind in changes(1)
            for other in [[row for row in told[setting] if row["images"] == kind]]
        ),
        left=3,
    )


def head(setting: Setting) -> tuple[str, str]:
    return f"{setting.dataset}, {setting.partition}", setting.method


def table(heading: str, rows: Any, left: int) -> str:
    heads = heading.split("|")
    lines = [f"| {heading.strip()} |", "|" + "---|" * left + "---:|" * (len(heads) - left)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def verdicts(rows: Sequence[Told]) -> list[str]:
    """The shares of newcomers with enough samples that are called alike and unlike; where none has, of all."""
    large = [row for row in rows if row["samples"] >= LARGE] or rows
    words = ("alike", "unlike") if large else ()
    return [f"{np.mean([row['verdict'] == word for row in large]):.0%}" for word in words] or ["", ""]


def gates(rows: Sequence[Told]) -> str:
    """What label-shift did, in how many partitions."""
    words = {"its own mix": "open", "the calibrated model": "closed"}
    found = [next((word for part, word in words.items() if part in row["decision"]), "as it is") for row in rows]
    return ", ".join(dict.fromkeys(found))


def figures(rows: Sequence[Told]) -> list[str]:
    return [right(rows, 0), right(rows, 1), off(rows), *covered(rows), width(rows)]


def right(rows: Sequence[Told], k: int) -> str:
    samples = sum(row["samples"] for row in rows)
    return f"{100 * sum(row['samples'] * row['accuracy'][k] for row in rows) / samples:.1f}" if samples else ""


def off(rows: Sequence[Told]) -> str:
    return f"{100 * np.mean([row['mix_off'] for row in rows]):.1f}" if rows else ""


def covered(rows: Sequence[Told]) -> list[str]:
    """The share of 95% intervals, before and after, that hold the accuracy."""
    pairs = [[(row["accuracy"][k], *row["estimates"][k][1:]) for row in rows if row["estimates"]] for k in range(2)]
    return [f"{np.mean([low <= truth <= high for truth, low, high in one]):.0%}" if one else "" for one in pairs]


def width(rows: Sequence[Told]) -> str:
    """Of the intervals after, in points."""
    widths = [row["estimates"][1][2] - row["estimates"][1][1] for row in rows if row["estimates"]]
    return f"{100 * np.mean(widths):.1f}" if widths else ""


def estimated(rows: Sequence[Told]) -> str:
    """The accuracy after in the mean, as newcomers were told that were told one."""
    values = [row["estimates"][1][0] for row in rows if row["estimates"]]
    return f"{100 * np.mean(values):.1f}" if values else ""


# Few training clients


def with_few(clients: int) -> Iterator[Told]:
    for kind, partition in KINDS.items():
        if kind == "two classes" and clients < 3:
            continue  # four clients of two classes would leave some classes to nobody
        settings = [f"partition.{key}={value}" for key, value in (partition | {"clients": 2 * clients}).items()]
        for seed in THREE[:2]:
            config = upfl.configure(
                "fedavg", "digits", rounds=20, partition_seed=seed, evaluate_every=20, score=SCORED, settings=settings
            )
            with tempfile.TemporaryDirectory() as folder:
                rows = upfl.train(config, Path(folder) / "run", workers=1).result["rows"]
            found = {row["row"]: row["test"] for row in rows}
            scores = {name: found[upfl.methods.row_name("fedavg", name)] for name in SCORED}
            yield {"clients": clients, "kind": kind, "seed": seed, "scores": scores}


def few_table(rows: list[Told]) -> str:
    """New clients' accuracy in the mean over partitions, and over kinds; and the difference from none."""
    lines = []
    for clients in dict.fromkeys(row["clients"] for row in rows):
        for kind in (*KINDS, "mean"):
            some = [row["scores"] for row in rows if row["clients"] == clients and kind in (row["kind"], "mean")]
            if some:
                means = {name: np.mean([scores[name] for scores in some]) for name in SCORED}
                against = [f"{means[name] - means['none']:+.1f}" for name in ("label-shift", "auto")]
                lines.append([f"{clients}, {kind}", *(f"{value:.1f}" for value in means.values()), *against])
    return table(
        f"training clients, who holds what | {' | '.join(SCORED)} | label-shift - none | auto - none", lines, 1
    )


if __name__ == "__main__":
    main()
