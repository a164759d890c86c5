"""What is taken in: each family makes something good, and gives a function that changes and takes it in."""

import gzip
import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fuzz.changes import VALUES, changed_array_header, changed_bytes, changed_document, changed_header, other_kind
from tests.fuzz.own import own_data
from tests.sealed import resealed
from upfl import api
from upfl.bundle import Bundle, PersonalModel, load, write
from upfl.config import configure
from upfl.contract import Published, Task
from upfl.data.files import load_labelled, load_unlabelled
from upfl.data.forms import Pixels
from upfl.engine.fold import FixedPointSum
from upfl.engine.folder import CHECKPOINT, RunFolder
from upfl.engine.setup import assemble
from upfl.errors import UpflError
from upfl.methods import TRAININGS
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.report.collect import collect
from upfl.safe.tensors import reseal

CPU = torch.device("cpu")


def make_bundles(folder: Path) -> list[Path]:
    kind, tta = TRAININGS["fedavg"], TRAININGS["fedprox"]
    shape = Pixels(shape=(1, 8, 8), scale=16.0, mean=(0.3,), std=(0.4,))
    for name, training in (
        ("mlp", kind(Task(mlp(64, (9, 9), 3), 3, 5), kind.Hyper())),
        ("conv", kind(Task(convnet((1, 8, 8), 3, 16, 0.25), 3, 5), kind.Hyper())),
        ("tta", tta(Task(mlp(64, (9, 9), 3), 3, 5), tta.Hyper())),
    ):
        write(
            folder / name,
            task="shapes",
            classes=["cat", "dog", "emu"],
            input=shape,
            training=training,
            published=Published(training.publish(training.init(generator(3))), 7),
            personalizers={"none": {}, "tent": {"lr": 0.5, "steps": 3}},
            default="tent",
            summary={"notes": ["a"], "scores": {}},
        )
    Bundle.load(folder / "mlp").personalize(np.zeros((3, 8, 8), np.uint8)).save(folder / "me")
    return [folder / name for name in ("mlp", "conv", "tta", "me")]


def bundles(folder: Path, outside: Path) -> Callable[[random.Random], None]:
    made = make_bundles(folder / "good")

    def case(random: random.Random) -> None:
        path = folder / "case"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(random.choice(made), path)
        action = random.randrange(10)
        if action < 5:
            document = changed_document(json.loads((path / "manifest.json").read_text()), random)
            (path / "manifest.json").write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
        elif action < 8:
            weights = path / "weights.safetensors"
            weights.write_bytes(changed_header(weights.read_bytes(), random))
        elif action < 9:
            file = path / random.choice(("manifest.json", "weights.safetensors", "README.md"))
            file.write_bytes(changed_bytes(file.read_bytes(), random))
        resealed(path)
        if action == 9:
            name = random.choice(("manifest.json", "weights.safetensors", "README.md", "SHA256SUMS"))
            if random.random() < 0.5:
                other_kind(path / name, outside, random)
            else:
                (path / name).write_bytes(changed_bytes((path / name).read_bytes(), random))
        found = load(path)
        x = np.zeros((2, *found.manifest.task.input.shape), np.uint8)
        if x.size < 10**6 and random.random() < 0.2:
            found.predict(x) if isinstance(found, PersonalModel) else found.personalize(x)

    return case


def run_folders(folder: Path, outside: Path) -> Callable[[random.Random], None]:
    config = configure(
        *("scaffold", "digits"),
        profile="smoke",
        settings=["iterations=1", "model.hidden=8", "partition.clients=8", "evaluate_clients=2"],
        rounds=2,
        clients_per_round=2,
        evaluate_every=2,
    )
    api.train(config, folder / "good", workers=1)
    training = assemble(config).training
    files = ("config.toml", "metrics.jsonl", "result.json", "environment.json", CHECKPOINT)

    def case(random: random.Random) -> None:
        path = folder / "case"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "good", path)
        states = sorted(path.rglob("*.safetensors"))
        action = random.randrange(10)
        if action < 3:
            file = path / CHECKPOINT if random.random() < 0.5 else random.choice(states)
            file.write_bytes(reseal(changed_header(file.read_bytes(), random)))
        elif action < 5:
            content = (path / CHECKPOINT).read_bytes()
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            facts = changed_document(json.loads(header["__metadata__"]["upfl"]), random)
            header["__metadata__"]["upfl"] = json.dumps(facts)
            text = json.dumps(header, separators=(",", ":")).encode()
            (path / CHECKPOINT).write_bytes(reseal(len(text).to_bytes(8, "little") + text + content[8 + length :]))
        elif action < 7:
            name = random.choice(("result.json", "metrics.jsonl", "environment.json"))
            lines = (path / name).read_text().splitlines() if name == "metrics.jsonl" else [(path / name).read_text()]
            lines = [json.dumps(changed_document(json.loads(line), random)) for line in lines]
            (path / name).write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        elif action < 9:
            file = path / random.choice(files)
            file.write_bytes(changed_bytes(file.read_bytes(), random))
        else:
            other_kind(path / random.choice((*files, "memory", "memory/0", "best")), outside, random)
        refused = []
        for use in (_looked_at, lambda path: _resumed(path, training), lambda path: collect([path])):
            try:
                use(path)
            except UpflError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    return case


def _looked_at(path: Path) -> None:
    run = api.Run(path)
    for row in run.result["rows"]:
        len(RunFolder(path).load_best(row["best_round"]).members)
    _ = run.metrics, RunFolder(path).sessions()


def _resumed(path: Path, training: Any) -> None:
    """What a resumed run does before its first round, and at its end."""
    folder = RunFolder.open(path)
    folder.config()
    progress = folder.load(CPU, training)
    folder.roll_back(progress)
    if progress is None:
        return
    for client in (progress.memory_rounds >= 0).nonzero().flatten().tolist():
        folder.load_memory(client, int(progress.memory_rounds[client]), CPU)
    folder.append_metrics({"round": 3, "bytes_up": 1, "bytes_down": 1})
    folder.save(progress)


def arrays(folder: Path, outside: Path) -> Callable[[random.Random], None]:
    images = np.random.default_rng(0).integers(0, 16, (6, 8, 8), np.uint8)
    plain, packed, idx = io.BytesIO(), io.BytesIO(), b"\0\0\x08\x03" + struct.pack(">3I", *images.shape)
    np.save(plain, images)
    np.savez_compressed(packed, x=images, y=np.arange(6) % 3)
    good = {"a.npy": plain.getvalue(), "a.npz": packed.getvalue(), "a-images-idx3-ubyte": idx + images.tobytes()}

    def case(random: random.Random) -> None:
        name = random.choice(list(good))
        content = good[name]
        if name == "a.npy" and random.random() < 0.7:
            content = changed_array_header(content, random)
        elif name == "a.npz" and random.random() < 0.5:
            archive = io.BytesIO()
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
                for member in ("x.npy", "y.npy")[: random.randrange(3)]:
                    file.writestr(member, changed_array_header(plain.getvalue(), random))
            content = archive.getvalue()
        else:
            content = changed_bytes(content, random)
        if name.endswith("ubyte") and random.random() < 0.5:
            name, content = f"{name}.gz", gzip.compress(content)
            content = changed_bytes(content, random) if random.random() < 0.3 else content
        (folder / name).write_bytes(content)
        try:
            load_unlabelled(folder / name, (1, 8, 8), 16.0)
            load_labelled(folder / name, (1, 8, 8), ("cat", "dog", "emu"), 16.0)
        finally:
            (folder / name).unlink()

    return case


def messages(folder: Path, outside: Path) -> Callable[[random.Random], None]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # here, because it is an extra

    from upfl.flower.messages import ARRAYS, FACTS, TOGETHER, arrays_of, facts_of, from_record, problem_in, to_record

    like = {"a": torch.zeros(3, 4), "b": torch.zeros((), dtype=torch.int64), "weight": torch.ones(())}
    total = FixedPointSum(like, 4, {})

    def case(random: random.Random) -> None:
        together = to_record(like)
        inner = Array(
            np.frombuffer(
                changed_bytes(from_record(ArrayRecord({"x": together[TOGETHER]}))["x"].numpy().tobytes(), random),
                np.uint8,
            )
        )
        apart = ArrayRecord({name: Array(value.numpy()) for name, value in like.items()})
        record = random.choice((together, ArrayRecord({TOGETHER: inner}), apart))
        name = random.choice(list(record))
        data = record[name].data
        data = changed_array_header(data, random) if random.random() < 0.7 else changed_bytes(data, random)
        stype = "numpy.ndarray" if random.random() < 0.98 else "pickle"
        changed = Array(dtype=random.choice(("float32", "x")), shape=(3, 4), stype=stype, data=data)
        records = {key: changed if key == name else value for key, value in record.items()}
        if random.random() < 0.1:
            records[random.choice(("x", "a.b", "\x1b", "n" * 10**4))] = changed
        content = RecordDict({ARRAYS: ArrayRecord(records)})
        if random.random() < 0.2:
            values = [value for value in VALUES if isinstance(value, str) and value != "\ud800"]
            content[FACTS] = ConfigRecord({random.choice(("problem", "client", "no_data")): random.choice(values)})
        reply: Any = Reply(content)
        problem_in(reply), facts_of(reply)
        total.reset(4)
        total.add(arrays_of(reply))

    return case


@dataclass
class Reply:
    """A message as far as its content goes."""

    content: Any

    def has_error(self) -> bool:
        return False


FAMILIES = {
    "bundles": bundles,
    "run folders": run_folders,
    "arrays": arrays,
    "messages": messages,
    "own data": own_data,
}
