"""Bundles from elsewhere: a small one can neither take the machine's memory, nor hang, nor lead out of its folder."""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sealed import edited, put, resealed
from upfl.bundle import Bundle, load, write
from upfl.contract import Published, Task
from upfl.data.forms import Pixels
from upfl.errors import BundleError
from upfl.methods import TRAININGS
from upfl.models import convnet, mlp
from upfl.randomness import generator

INPUT = Pixels(shape=(1, 8, 8), scale=16.0, mean=(0.3,), std=(0.4,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles")
    kind = TRAININGS["fedavg"]
    for name, model in (("mlp", mlp(64, (12, 12), 3)), ("conv", convnet((1, 8, 8), 3, 16, 0.25))):
        training = kind(Task(model, 3, 5), kind.Hyper())
        write(
            path / name,
            task="<b>shapes</b>",
            classes=["=cat", "dog<script>", "emu"],
            input=INPUT,
            training=training,
            published=Published(training.publish(training.init(generator(3))), 7),
            personalizers={"none": {}, "tent": {"lr": 0.5, "steps": 3}},
            default="tent",
            summary={"notes": ["<img src=x onerror=alert(1)>", "[a](javascript:b)"]},
        )
    return path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "mlp", tmp_path / "bundle")
    return tmp_path / "bundle"


def bounded(path: Path) -> None:
    """Loading is refused by name, in seconds, within a gigabyte."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(BundleError):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "in kibibytes: a gigabyte"
    assert time.monotonic() - start < 60, "hangs"


@pytest.mark.parametrize(
    "change",
    [
        put("members", value=200_000_000),
        put("public", value=10**9),
        put("training", "clients", value=10**15),
        put("training", "round", value=10**12),
        put("fitted", value=["../../etc/passwd"]),
        put("personalizers", value={"none" + "+label-shift" * 3000: {}}),
        put("personalizers", value={f"none{'+label-shift' * 5}": {}}),
        put("personalizers", value={"tent": {"lr": 0.1, "steps": 10**9}}),
        put("task", "name", value="a\x1b[31m"),
        put("task", "name", value="n" * 10**5),
        put("task", "classes", value=["a\x1b[2J", "b", "c"]),
        put("model", 1, "outputs", value=2**62),
        put("model", value=[]),
        put("model", value=[{"kind": "relu"}] * 10**5),
        put("made_with", value="x\r\nerror: all is lost"),
    ],
)
def test_counts_names_and_sizes_of_a_manifest_are_bounded(change: Callable[[Any], None], bundle: Path) -> None:
    bounded(edited(bundle, change))


def test_a_forward_pass_that_would_take_gigabytes_is_not_run(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "conv", tmp_path / "conv")
    bounded(edited(tmp_path / "conv", put("task", "input", "shape", value=[1, 4096, 4096])))
    with pytest.raises(BundleError, match=r"products on its way through the model.*UPFL_LIMIT_MODEL="):
        load(tmp_path / "conv")


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "README.md", "SHA256SUMS"])
def test_pipes_devices_and_links_in_a_bundle_are_not_opened(name: str, bundle: Path, tmp_path: Path) -> None:
    (bundle / name).rename(tmp_path / "moved")
    os.mkfifo(bundle / name)
    with pytest.raises(BundleError, match="not a regular file"):
        load(bundle)
    for target in ("/dev/zero", tmp_path / "moved"):
        (bundle / name).unlink()
        (bundle / name).symlink_to(target)
        with pytest.raises(BundleError, match="it is a link"):
            load(bundle)


def test_nested_metadata_and_order_are_refused(bundle: Path) -> None:
    weights = bundle / "weights.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for order in ("[" * 5000 + "]" * 5000, '{"a":' * 5000, "[[]]"):
        text = json.dumps(header | {"__metadata__": {"order": order}}).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + data)
        with pytest.raises(BundleError, match=r"weights\.safetensors: damaged"):
            load(resealed(bundle))
    (bundle / "manifest.json").write_text('{"a":' * 10**5)
    with pytest.raises(BundleError, match="nested deeper than"):
        load(resealed(bundle))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 3072]},
        {"dtype": "F32", "shape": [2**47], "data_offsets": [0, 2**49]},
        {"dtype": "F32", "shape": [-12, -64], "data_offsets": [0, 3072]},
        {"dtype": "F32", "shape": [12, 64.0], "data_offsets": [0, 3072]},
        {"dtype": "F32", "shape": [12, True], "data_offsets": [0, 3072]},
        {"dtype": "O", "shape": [12, 64], "data_offsets": [0, 3072]},
        {"dtype": "F32", "shape": [12, 64], "data_offsets": [8, 3080]},
        {"dtype": "F32", "shape": [1] * 99, "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_a_header_decides_about_no_memory(change: Any, bundle: Path) -> None:
    weights = bundle / "weights.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {"state.psi.fc1.weight": change}
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    bounded(resealed(bundle))


def test_a_file_that_is_mostly_holes_is_refused_by_its_size(bundle: Path) -> None:
    for name in ("README.md", "manifest.json", "SHA256SUMS", "weights.safetensors"):
        content = (bundle / name).read_bytes()
        os.truncate(bundle / name, 2**40)
        bounded(bundle)
        (bundle / name).write_bytes(content)
    Bundle.load(bundle)


def test_the_model_card_holds_no_html_and_no_link_of_others(made: Path) -> None:
    card = (made / "mlp" / "README.md").read_text()
    assert "<b>" not in card.replace("\\<", "")
    assert "\\<img src=x onerror=alert(1)\\>" in card
    assert "](javascript" not in card.replace("\\]", "")
    mine = Bundle.load(made / "mlp").personalize(torch.zeros(3, 8, 8).numpy())
    mine.save(made / "me")
    assert "dog\\<script\\>" in (made / "me" / "README.md").read_text()


def test_loading_does_not_import_what_a_bundle_names(bundle: Path) -> None:
    before = set(sys.modules)
    edited(bundle, put("training", "name", value="os.path"))
    with pytest.raises(BundleError, match="unknown training"):
        load(bundle)
    assert not {name for name in set(sys.modules) - before if not name.startswith(("upfl", "torch", "_pytest"))}
