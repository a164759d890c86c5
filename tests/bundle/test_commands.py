"""Bundles on the command line."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.bundles import personalize, pixels_of
from tests.plugin_methods import upfl
from upfl import api
from upfl.bundle import Bundle, PersonalModel
from upfl.data.files import load_unlabelled


def images_of(run: api.Run, folder: Path, client: int = 0) -> Path:
    folder.mkdir()
    for i, image in enumerate(pixels_of(run, client)):
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(folder / f"{i:03}.png")
    return folder


def test_from_a_run_to_predictions(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run, me = run_of("fedavg"), tmp_path / "me"
    said = upfl("export", run.path, "-o", tmp_path / "bundle").ended()
    assert "personalizers: none, tent" in said.out
    data = images_of(run, tmp_path / "data")
    (data / "notes.txt").write_text("mine")
    said = personalize(tmp_path / "bundle", data, me, "--personalizer", "label-shift").ended()
    assert "1 file(s) left out, no images: notes.txt" in said.out
    assert "Class mix" in said.out
    assert "estimated accuracy" in said.out
    assert "nats" in said.out
    rows = list(csv.DictReader((me / "predictions.csv").open()))
    assert [row["sample"] for row in rows] == sorted(file.name for file in data.glob("*.png"))
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)
    said = upfl("predict", me, data).ended()
    stored = PersonalModel.load(me)
    predicted = stored.predict(load_unlabelled(data, (1, 8, 8))).tolist()
    assert [row["class"] for row in csv.DictReader(said.out.splitlines())] == predicted
    assert "notes.txt" in said.err
    assert upfl("predict", me, data, "-o", tmp_path / "p.csv").code == 0
    assert (tmp_path / "p.csv").read_text() == said.out
    listed = json.loads(upfl("predict", me, data, "--json").out)
    assert [row["class"] for row in listed] == predicted


def test_what_was_found_is_there_for_scripts(run_of: Callable[[str], api.Run], fedavg: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", pixels_of(run_of("fedavg"))[:7])
    said = personalize(fedavg, tmp_path / "x.npy", tmp_path / "me", "--personalizer", "tent", "--json")
    found = json.loads(said.out)
    assert found["samples"] == 7
    assert found["personalizer"] == "tent"
    assert len(found["entropy"]) == 2
    assert sum(found["mix"].values()) == pytest.approx(1)
    assert list(found["mix"]) == [str(digit) for digit in range(10)]
    assert "are few" in found["warnings"][0]
    assert found["accuracy"] == []


def test_the_summary_page_needs_nothing_else(run_of: Callable[[str], api.Run], fedavg: Path, tmp_path: Path) -> None:
    data = images_of(run_of("fedavg"), tmp_path / "data")
    for name in range(24, 1000):
        (data / f"{name:03}.png").unlink(missing_ok=True)
    (data / "000.png").rename(data / "<script>alert(1)&.png")
    personalize(fedavg, data, tmp_path / "me")
    page = (tmp_path / "me" / "summary.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert page.count("data:image/png;base64,") == 24
    assert "Class mix" in page


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda data: None, "there are no images in it"),
        (lambda data: (data / "a.txt").write_text("x"), r"no images in it (found a.txt)"),
        (lambda data: Image.new("L", (28, 28)).save(data / "a.png"), "a.png: has 28 x 28 pixels"),
        (lambda data: Image.new("RGB", (8, 8), "red").save(data / "a.png"), "a.png: is in colour"),
        (lambda data: (data / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n"), "a.png: "),
    ],
)
def test_wrong_data_ends_with_a_message_and_no_folder(
    make: Callable[[Path], Any], says: str, fedavg: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    personalize(fedavg, tmp_path / "data", tmp_path / "me").ended(3, says)
    assert not (tmp_path / "me").exists()


def test_wrong_commands_end_with_a_message(fedavg: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((30, 8, 8), np.uint8))
    x, me = tmp_path / "x.npy", tmp_path / "me"
    personalize(fedavg, x, me, "--personalizer", "tnet").ended(2, "did you mean tent")
    personalize(fedavg, x, fedavg).ended(2, "is there already")
    upfl("predict", fedavg, x).ended(3, "`upfl personalize` makes a model of it")
    (fedavg / "README.md").write_text("changed")
    personalize(fedavg, x, me).ended(3, "README.md: does not have its checksum")


def test_one_sample_is_enough(run_of: Callable[[str], api.Run], fedavg: Path, tmp_path: Path) -> None:
    data = images_of(run_of("fedavg"), tmp_path / "data")
    said = personalize(fedavg, data / "000.png", tmp_path / "me").ended()
    assert "1 sample(s) are few" in said.out


def test_the_newcomers_commands_import_nothing_slow() -> None:
    script = (
        "import sys, upfl.cli, upfl.bundle, upfl.report.personal\n"
        "print([name for name in ('matplotlib', 'sklearn', 'scipy', 'onnx', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_unlike_the_federations_are_told_first_and_nothing_is_estimated(
    run_of: Callable[[str], api.Run], fedavg: Path, tmp_path: Path
) -> None:
    pixels = pixels_of(run_of("fedavg"))[:40]
    for name, images in (("own", pixels), ("inverted", 16 - pixels)):
        np.save(tmp_path / f"{name}.npy", images)
        said = personalize(fedavg, tmp_path / f"{name}.npy", tmp_path / name, "--personalizer", "label-shift", "--json")
        found, page = json.loads(said.ended().out), (tmp_path / name / "summary.html").read_text()
        unlike = name == "inverted"
        assert (found["likeness"]["verdict"] == "unlike") == unlike
        assert found["accuracy"] == [] or not unlike
        assert found["mix_error"] is None or not unlike
        assert ("unlike" in found["no_accuracy"]) == unlike
        assert ("UNLIKE" in page) == unlike
        marked = [row["outlying"] for row in csv.DictReader((tmp_path / name / "predictions.csv").open())]
        assert (marked.count("yes") > 20) == unlike
    said = upfl("predict", tmp_path / "own", tmp_path / "own.npy").ended()
    assert "drift" not in said.err
    said = upfl("predict", tmp_path / "own", tmp_path / "inverted.npy", "--json").ended(0, "drift")
    assert sum(row["outlying"] for row in json.loads(said.out)) > 20


def test_adapted_models_compare_later_data_by_their_inputs_alone(
    run_of: Callable[[str], api.Run], fedavg: Path
) -> None:
    bundle, pixels = Bundle.load(fedavg), pixels_of(run_of("fedavg"))[:40]
    assert bundle.personalize(pixels, "label-shift").manifest.checked == ("inputs", "features", "edges")
    assert bundle.personalize(pixels, "tent").manifest.checked == ("inputs", "edges")
