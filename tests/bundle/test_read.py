"""Bundles that do not fit are refused by name."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.bundles import FILES, small_convnet
from tests.plugin_methods import upfl
from tests.sealed import edited, put, resealed, retensored
from upfl import api
from upfl.bundle import Bundle, PersonalModel, export, load
from upfl.contract import Published, Task
from upfl.engine.folder import RunFolder
from upfl.errors import BundleError, ConfigError
from upfl.methods import TRAININGS
from upfl.models import convnet
from upfl.randomness import generator
from upfl.state import State

anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@contextmanager
def restored(folder: Path) -> Iterator[None]:
    """What is changed here is as it was afterwards."""
    before = {file: file.read_bytes() for file in folder.iterdir()}
    try:
        yield
    finally:
        for file, content in before.items():
            file.write_bytes(content)


@settings(anything, max_examples=150)
@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(fedavg: Path, data: st.DataObject, bit: int) -> None:
    file = fedavg / data.draw(st.sampled_from(FILES))
    flipped = bytearray(file.read_bytes())
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << bit
    with restored(fedavg):
        file.write_bytes(flipped)
        with pytest.raises(BundleError):
            Bundle.load(fedavg)


@settings(anything, max_examples=40)
@given(data=st.data(), seal=st.booleans())
def test_a_truncated_file_is_noticed_with_or_without_its_checksum(
    fedavg: Path, data: st.DataObject, seal: bool
) -> None:
    file = fedavg / data.draw(st.sampled_from(["manifest.json", "weights.safetensors"]))
    content = file.read_bytes()
    with restored(fedavg):
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
        if seal:
            resealed(fedavg)
        with pytest.raises(BundleError, match=file.name):
            Bundle.load(fedavg)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)


@settings(anything, max_examples=200)
@given(data=st.data())
def test_a_manifest_with_any_value_replaced_is_refused_or_used_never_a_crash(fedavg: Path, data: st.DataObject) -> None:
    manifest = json.loads((fedavg / "manifest.json").read_text())
    *path, last = data.draw(st.sampled_from(places(manifest)[1:]))
    target = manifest
    for key in path:
        target = target[key]
    if data.draw(st.booleans()):
        target[last] = data.draw(JSON)
    else:
        del target[last]
    with restored(fedavg), suppress(BundleError):
        (fedavg / "manifest.json").write_text(json.dumps(manifest))
        load(resealed(fedavg))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("schema_version", value=2), "schema_version is 2, and this version of upfl reads 1"),
        (put("schema_version", value=0), "schema_version is 0, and this version of upfl reads 1"),
        (put("kind", value="other"), "kind is 'other'"),
        (put("kind", value=[]), r"kind is \[\]"),
        (put("kind", value="personal"), "personalizer: Field required"),
        (put("training", "name", value="fedavgg"), "unknown training 'fedavgg'; did you mean fedavg.*UPFL_PLUGINS"),
        (put("training", "name", value="fedtta"), "training: .*lr"),
        (put("training", "hyper", "lr", value=-1), "training: .*lr"),
        (put("personalizers", "tent", "steps", value=-1), "personalizers: .*steps"),
        (put("personalizers", "one-step", value={}), "personalizers: .*does not fit training"),
        (put("default", value="tnet"), "default: unknown personalizer 'tnet'; did you mean tent"),
        (lambda manifest: manifest["fitted"].append("calibration.tent"), "fitted: it names .*calibration.tent"),
        (put("members", value=3), r"members/0\.safetensors: cannot be read"),
        (put("task", "classes", 9, value="10"), None),
        (put("task", "classes", 9, value="0"), "two classes have the same name"),
        (put("task", "classes", value=["0", "1"]), "tells 10 classes apart, and 2 are named"),
        (put("task", "input", "shape", value=[1, 9, 9]), r"does not take images of shape \[1, 9, 9\]"),
        (put("task", "input", "shape", value=[1, 10**9, 10**9]), "larger than any"),
        (put("task", "input", "std", value=[0.0]), r"std\.0"),
        (put("model", 1, "outputs", value=10**12), "model: has .* parameters, more than"),
        (put("model", 1, "outputs", value=13), "does not take images|tensor"),
        (put("model", 1, "name", value="fc2"), "two have the same name"),
        (put("model", 1, "name", value=None), "a layer of kind .linear. needs name"),
        (put("model", 0, "kind", value="pickle"), r"model\.0\.kind"),
        (put("surplus", value=1), "surplus"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], says: str | None, fedavg: Path
) -> None:
    edited(fedavg, change)
    if says is None:
        Bundle.load(fedavg)
        return
    with pytest.raises(BundleError, match=says):
        Bundle.load(fedavg)


WEIGHT = "state.psi.fc1.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop(WEIGHT), f"tensor {WEIGHT} is missing"),
        (lambda state: state.update(more=torch.zeros(1)), "tensor more is not one of a bundle like this"),
        (lambda state: state.update({WEIGHT: torch.zeros(12, 63)}), r"has the shape \[12, 63\] instead of \[12, 64\]"),
        (lambda state: state.update({WEIGHT: state[WEIGHT].double()}), r"torch\.float64 instead of torch\.float32"),
        (lambda state: state.update({WEIGHT: state[WEIGHT] * torch.nan}), f"{WEIGHT} has values that are not finite"),
        (lambda state: state.pop("fitted.calibration.none.bias"), "fitted.calibration.none.bias is missing"),
        (lambda state: state.update({"fitted.calibration.none.bias": torch.zeros(3).double()}), r"shape \[3\]"),
        (lambda state: state["fitted.calibration.none.scale"].zero_(), r"none\.scale has values that are not from"),
        (lambda state: state["fitted.calibration.none.prior"].neg_(), r"none\.prior has values that are not from"),
        (lambda state: state["fitted.gate.label-shift.menu"].fill_(11), r"menu has values that are not from 0 to 10"),
        (lambda state: state["fitted.reliability.label-shift.scatter"].sub_(2), r"scatter has values that are not"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: Callable[[State], Any], says: str, fedavg: Path) -> None:
    retensored(fedavg, change)
    with pytest.raises(BundleError, match=rf"weights\.safetensors: .*{says}"):
        Bundle.load(fedavg)


def test_members_that_do_not_fit_are_refused_by_name(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    export(run_of("fedper"), tmp_path / "bundle")
    retensored(tmp_path / "bundle", lambda state: state.pop("psi.fc3.bias"), "members/3.safetensors")
    with pytest.raises(BundleError, match=r"members/3\.safetensors: tensor psi\.fc3\.bias is missing"):
        Bundle.load(tmp_path / "bundle")
    edited(tmp_path / "bundle", put("members", value=0))
    with pytest.raises(BundleError, match=r"SHA256SUMS: names members/0\.safetensors"):
        Bundle.load(tmp_path / "bundle")


def test_tensors_out_of_order_are_refused(fedavg: Path) -> None:
    for order in (None, "[]", '["a"]', "3", "{"):
        state = load_file(fedavg / "weights.safetensors")
        save_file(state, fedavg / "weights.safetensors", {"order": order} if order else None)
        with pytest.raises(BundleError, match=r"weights\.safetensors"):
            Bundle.load(resealed(fedavg))


def test_weights_that_are_not_finite_do_not_go_out(tmp_path: Path) -> None:
    kind = TRAININGS["fedavg"]
    training = kind(Task(convnet((3, 8, 8), 4, 16, 0.25), 4, 5), kind.Hyper())
    state = {name: value * math.inf for name, value in training.init(generator(0)).items()}
    with pytest.raises(BundleError, match="not finite"):
        small_convnet(tmp_path, training=training, published=Published(state, 1))
    assert list(tmp_path.iterdir()) == []
    bundle, x = small_convnet(tmp_path)
    mine = bundle.personalize(x, "none")
    endless = [{name: value * math.inf for name, value in mine.predictor.params[0].items()}]
    with pytest.raises(BundleError, match="not finite"):
        replace(mine, predictor=replace(mine.predictor, params=endless)).save(tmp_path / "me")
    assert not (tmp_path / "me").exists()


def test_what_personalizers_need_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"fitted\.calibration\.none\.scale is missing"):
        small_convnet(tmp_path, personalizers={"label-shift": {}}, default="label-shift")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_listed_do_not_count(fedavg: Path) -> None:
    (fedavg / "weights2.safetensors").write_bytes(b"harmful")
    (fedavg / "sitecustomize.py").write_text("raise SystemExit")
    Bundle.load(fedavg)
    sums = fedavg / "SHA256SUMS"
    for line in ("0" * 64 + "  ../secret\n", "0" * 64 + "  sitecustomize.py\n", "x\n"):
        before = sums.read_text()
        sums.write_text(before + line)
        with pytest.raises(BundleError, match="SHA256SUMS"):
            Bundle.load(fedavg)
        sums.write_text(before)


def test_a_missing_file_is_named(fedavg: Path) -> None:
    for name in FILES:
        content = (fedavg / name).read_bytes()
        (fedavg / name).unlink()
        with pytest.raises(BundleError, match=rf"{name}: cannot be read: No such file"):
            Bundle.load(fedavg)
        (fedavg / name).write_bytes(content)
    with pytest.raises(BundleError, match="cannot be used: File is not a zip file"):
        Bundle.load(fedavg / "manifest.json")


def test_each_kind_of_bundle_says_what_it_is_for(fedavg: Path, tmp_path: Path) -> None:
    Bundle.load(fedavg).personalize(np.zeros((3, 8, 8), np.uint8), "none").save(tmp_path / "me")
    with pytest.raises(BundleError, match="newcomer's own model: `upfl predict`"):
        Bundle.load(tmp_path / "me")
    with pytest.raises(BundleError, match="federation's bundle: `upfl personalize`"):
        PersonalModel.load(fedavg)


def test_what_is_no_bundle_is_told_so(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is a run's folder: `upfl export .* -o BUNDLE` makes a bundle of it"):
        Bundle.load(run_of("fedavg").path)
    with pytest.raises(BundleError, match="is no bundle"):
        Bundle.load(tmp_path)


def test_a_client_that_there_is_not_is_named(run_of: Callable[[str], api.Run]) -> None:
    run = api.Run(str(run_of("fedavg").path))  # a path as text serves, too
    there = len(run.federation.new)
    for client in (-1, there):
        for ask in (run.newcomer, run.labels):
            with pytest.raises(IndexError, match=f"client {client}: there are {there}, counted from 0"):
                ask(client)


def test_a_personal_model_that_does_not_fit_is_refused(fedavg: Path, tmp_path: Path) -> None:
    Bundle.load(fedavg).personalize(np.zeros((3, 8, 8), np.uint8), "none").save(tmp_path / "me")
    for change, says in (
        (put("models", value=10**9), "has 1066000000000 parameters, more than"),
        (put("temperature", value=0), "temperature"),
        (put("personalizer", value="nine"), "unknown personalizer"),
    ):
        shutil.copytree(tmp_path / "me", tmp_path / "changed", dirs_exist_ok=True)
        with pytest.raises(BundleError, match=says):
            PersonalModel.load(edited(tmp_path / "changed", change))
    with pytest.raises(BundleError, match=r"tensor 0\.fc1\.bias is missing"):
        PersonalModel.load(retensored(tmp_path / "me", lambda state: state.pop("0.fc1.bias")))


def test_nothing_is_overwritten(fedavg: Path, run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in fedavg.iterdir()}
    with pytest.raises(ConfigError, match="is there already"):
        export(run_of("fedavg"), fedavg)
    assert {file: file.read_bytes() for file in fedavg.iterdir()} == before
    (tmp_path / "empty").mkdir()
    export(run_of("fedavg"), tmp_path / "empty")  # an empty folder is as good as none
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == FILES
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_an_unfinished_run_has_no_bundle(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    config = run_of("fedavg").config
    RunFolder.create(tmp_path / "run", config)
    upfl("export", tmp_path / "run", "-o", tmp_path / "bundle").ended(4, "the run is not finished")
    assert not (tmp_path / "bundle").exists()


def test_a_run_without_the_rows_of_its_configuration_has_no_bundle(
    run_of: Callable[[str], api.Run], tmp_path: Path
) -> None:
    shutil.copytree(run_of("fedprox").path, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    result["rows"][0]["row"] = "another"
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    with pytest.raises(BundleError, match="no row 'fedprox' was scored in this run; it has another"):
        export(api.Run(tmp_path / "run"), tmp_path / "bundle")


def test_bundles_do_not_hold_what_safetensors_files_could_hide(fedavg: Path) -> None:
    """The header's metadata is the order of the tensors and nothing else."""
    with safe_open(fedavg / "weights.safetensors", "pt") as file:
        assert list(file.metadata()) == ["order"]
