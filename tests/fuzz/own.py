"""Data of one's own, damaged: tables, arrays, image folders, Hugging Face folders, and what was added before."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.fuzz.changes import changed_bytes, changed_document
from tests.helpers.own import write_csv
from upfl.data import kept
from upfl.data.own.options import Options
from upfl.data.own.reading import read
from upfl.errors import UpflError

NAMED = Options(label="y", client="who")
KINDS = {"t.csv": NAMED, "t.parquet": NAMED, "t.npz": Options(), "images": Options(), "set": NAMED}


def make(folder: Path) -> None:
    """One of each kind, all good."""
    rng, count = np.random.default_rng(0), 24
    x, y, who = rng.normal(size=(count, 3)), ["ab"[i % 2] for i in range(count)], [f"c{i % 4}" for i in range(count)]
    folder.mkdir(parents=True)
    write_csv(folder / "t.csv", ["f", "g", "h", "y", "who"], [[*x[i], y[i], who[i]] for i in range(count)])
    table = pa.table({"f": x[:, 0], "g": x[:, 1], "h": x[:, 2], "y": y, "who": who})
    pq.write_table(table, folder / "t.parquet")
    np.savez(folder / "t.npz", x=x, y=np.array(y), client=np.array(who))
    for i in range(8):
        path = folder / "images" / who[i] / y[i // 4]
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 4), np.uint8)).save(path / f"{i}.png")
    (folder / "set").mkdir()
    with pa.OSFile(str(folder / "set" / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (folder / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "d.arrow"}]}))
    (folder / "set" / "dataset_info.json").write_text(json.dumps({"features": {"y": {"_type": "Value"}}}))


def own_data(folder: Path, outside: Path) -> Callable[[random.Random], None]:
    make(folder / "good")

    def case(random: random.Random) -> None:
        name = random.choice(list(KINDS))
        path, cache = folder / "case", folder / "cache"
        for old in (path, cache):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(folder / "good", path)
        with mock.patch.dict(os.environ, {"UPFL_CACHE": str(cache)}):
            if random.random() < 0.25:  # what was added is damaged afterwards
                kept.add(read(path / name, KINDS[name]), "mine")
                target = random.choice(sorted((cache / "own" / "mine").iterdir()))
                target.write_bytes(changed_bytes(target.read_bytes(), random))
                kept.check("mine")
                return
            files = [path / name] if (path / name).is_file() else [f for f in (path / name).rglob("*") if f.is_file()]
            target = random.choice(sorted(files))
            if target.suffix == ".json":
                document = changed_document(json.loads(target.read_text()), random)
                target.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
            else:
                target.write_bytes(changed_bytes(target.read_bytes(), random))
            try:
                kept.add(read(path / name, KINDS[name]), "mine")
            except UpflError:
                left = list((cache / "own").iterdir()) if (cache / "own").exists() else []
                assert left == [], f"a partial data set is left: {left}"
                raise
            kept.check("mine")

    return case
