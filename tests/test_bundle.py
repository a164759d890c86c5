"""Bundles: what goes out, what is refused when it comes back, and the model that a newcomer makes of it."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.plugin_methods import Said, upfl
from tests.sealed import edited, put, resealed, retensored
from upfl import api
from upfl.bundle import Bundle, PersonalModel, export, load, write
from upfl.bundle.manifest import PersonalManifest, TaskSection, TrainingSection
from upfl.config import configure
from upfl.contract import Diary, Estimate, Published, Task, Unlabelled
from upfl.data.files import load_unlabelled
from upfl.data.inputs import InputFormat
from upfl.engine.folder import RunFolder
from upfl.errors import BundleError, ConfigError, DataError
from upfl.methods import ROWS, TRAININGS
from upfl.models import convnet, described, mlp
from upfl.randomness import generator
from upfl.state import State

FILES = ["README.md", "SHA256SUMS", "manifest.json", "weights.safetensors"]
EXTRA = {"fedavg": ["tent", "label-shift", "auto"], "fedtta": ["one-step+label-shift"]}  # beside the table's
of_every_training = pytest.mark.parametrize("name", TRAININGS)


@pytest.fixture(autouse=True)
def _alike(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


_runs: dict[str, api.Run] = {}


@pytest.fixture
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], api.Run]:
    """A finished run of a training on digits, made once."""

    def run(name: str) -> api.Run:
        if name not in _runs:
            table = [row.personalizer for row in ROWS if row.training == name]
            config = configure(
                name,
                "digits",
                profile="smoke",
                score=dict.fromkeys([*table, *EXTRA.get(name, [])]),
                settings=["iterations=4", "batch_size=16"],
                rounds=2,
                clients_per_round=3,
                evaluate_every=2,
                model={"hidden": 12},
                partition={"clients": 10},
            )
            _runs[name] = api.train(config, tmp_path_factory.mktemp("runs") / name, workers=1)
        return _runs[name]

    return run


@pytest.fixture
def fedavg(run_of: Callable[[str], api.Run], tmp_path: Path) -> Path:
    export(run_of("fedavg"), tmp_path / "bundle")
    return tmp_path / "bundle"


def pixels_of(run: api.Run, client: int = 0) -> NDArray[np.uint8]:
    source = run.federation.source
    return source.images[run.federation.new.all(client)][:, 0]


# What goes out, and back in


@of_every_training
def test_every_training_goes_out_comes_back_and_personalizes_to_the_same_bits(
    name: str, run_of: Callable[[str], api.Run], tmp_path: Path
) -> None:
    run = run_of(name)
    bundle = export(run, tmp_path / "bundle")
    assert set(bundle.personalizers) == {*run.config.personalize, *(["none"] if name != "fedper" else [])}
    x, later = pixels_of(run), pixels_of(run, 1)
    published = run.published(bundle.manifest.default)
    architecture = next(iter(bundle.training.client_models))
    client = Unlabelled(0, run.newcomer(0).x, 0, architecture)
    for personalizer, method in run.personalizers.items():
        expected = method.personalize(published, client)
        mine = bundle.personalize(x, personalizer)
        assert mine.personalized is not None
        assert torch.equal(mine.personalized.logits, expected.logits), personalizer
        assert mine.diary == expected.diary
        mine.save(tmp_path / personalizer)
        stored = PersonalModel.load(tmp_path / personalizer)
        assert torch.equal(stored.predict_logits(later), mine.predict_logits(later))
        assert torch.equal(stored.predict_logits(later), expected.predict_logits(run.newcomer(1).x))
        assert stored.diary == mine.diary
        assert stored.manifest == mine.manifest


def small_convnet(tmp_path: Path, name: str = "fedavg", **more: Any) -> tuple[Bundle, NDArray[np.uint8]]:
    """A bundle of a ConvNet, without a run."""
    kind = TRAININGS[name]
    training = kind(Task(convnet((3, 8, 8), 4, 16, 0.25), 4, 5), kind.Hyper())
    values: dict[str, Any] = {
        "task": "animals",
        "classes": ["cat", "dog", "emu", "fox"],
        "input": InputFormat(shape=(3, 8, 8), scale=255.0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        "training": training,
        "published": Published(training.publish(training.init(generator(3))), 7),
        "personalizers": {"none": {}, "tent": {"lr": 0.5, "steps": 3}},
        "default": "tent",
        "summary": {"nodes": 5, "what": ["a", "b"]},
    }
    x = np.random.default_rng(1).integers(0, 256, (30, 8, 8, 3), np.uint8)
    return write(tmp_path / "animals", **(values | more)), x


@pytest.mark.parametrize("name", ["fedavg", "fedsr", "fedadg", "odpfl-hn"])
def test_a_convnet_written_without_a_run_comes_back_to_the_same_bits(name: str, tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path, name)
    mine = bundle.personalize(x)
    mine.save(tmp_path / "me")
    again = Bundle.load(tmp_path / "animals").personalize(x)
    for other in (PersonalModel.load(tmp_path / "me"), again):
        assert torch.equal(other.predict_logits(x), mine.predict_logits(x))
    assert list(bundle.published.state) == list(Bundle.load(tmp_path / "animals").published.state)


def test_the_temperature_and_the_bias_of_a_model_are_stored(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    plain = bundle.personalize(x, "none")
    bias = torch.tensor([0.1, -2.0, 3.0, 0.7])
    predictor = replace(plain.predictor, temperature=1 / 3, bias=bias)
    shifted = PersonalModel(plain.manifest.model_copy(update={"temperature": 1 / 3}), predictor)
    shifted.save(tmp_path / "me")
    stored = PersonalModel.load(tmp_path / "me")
    assert torch.equal(stored.predict_logits(x), shifted.predict_logits(x))
    torch.testing.assert_close(stored.predict_logits(x), plain.predict_logits(x) * 3 + bias)


def test_a_run_exports_to_the_same_bytes_each_time(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    for out in ("one", "two"):
        export(run_of("fedtta"), tmp_path / out)
    for file in FILES:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_default_is_the_personalizer_with_the_best_validation_accuracy(
    run_of: Callable[[str], api.Run], tmp_path: Path
) -> None:
    run = run_of("fedavg")
    bundle = export(run, tmp_path / "bundle")
    best = max(run.result["rows"], key=lambda row: row["validation"])
    scores = bundle.manifest.summary["scores"]
    assert scores[bundle.manifest.default]["validation"] == best["validation"]
    assert bundle.manifest.training.round == scores[bundle.manifest.default]["round"]


def test_personalizers_can_be_added_at_export(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run = run_of("fedprox")
    bundle = export(run, tmp_path / "bundle", ["label-shift"])
    assert list(bundle.personalizers) == ["none", "label-shift"]
    assert list(export(run_of("fedtta-prox"), tmp_path / "tta").personalizers) == ["one-step", "early-stopped", "none"]
    mine = bundle.personalize(pixels_of(run), "label-shift")
    assert sum(mine.diary.mix) == pytest.approx(1)
    assert len(mine.diary.accuracy) == 2
    with pytest.raises(ConfigError, match="unknown personalizer 'lable-shift'; did you mean label-shift"):
        export(run, tmp_path / "wrong", ["lable-shift"])
    with pytest.raises(ConfigError, match="does not fit training"):
        export(run, tmp_path / "wrong", ["one-step"])
    assert not (tmp_path / "wrong").exists()


@given(st.lists(st.floats(allow_nan=False), max_size=3), st.floats(0, 1))
def test_whatever_a_diary_holds_comes_back(entropy: list[float], value: float) -> None:
    diary = Diary(entropy, [1.0], 3, "so [be] it\n {1}", [0.5, 0.5], [Estimate(value, 0.0, 1.0)])
    manifest = PersonalManifest(
        made_with="upfl",
        task=TaskSection(
            name="t", classes=("a  b", "[c]"), input=InputFormat(shape=(1, 2, 2), scale=1, mean=(0,), std=(1,))
        ),
        model=(),
        training=TrainingSection(name="fedavg", clients=1, round=0, hyper={}),
        personalizer="none",
        hyper={},
        samples=1,
        diary=diary,
    )
    assert PersonalManifest.model_validate_json(manifest.to_json()) == manifest


def test_layers_as_data_make_the_same_model() -> None:
    for model in (mlp(4, (3, 2), 2), convnet((3, 8, 8), 4, 16, 0.25)):
        assert described(model.describe()).shapes == model.shapes
        assert json.loads(json.dumps(model.describe())) == model.describe()


# Privacy


def test_a_bundle_has_only_what_newcomers_need(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    for name in TRAININGS:
        run, out = run_of(name), tmp_path / name
        export(run, out)
        files = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
        members = [file for file in files if file.startswith("members/")]
        assert [file for file in files if file not in members] == FILES
        assert len(members) == (5 if name == "fedper" else 0)
        names = set(load_file(out / "weights.safetensors"))
        assert {name.split(".")[0] for name in names} <= {"state", "fitted"}
        allowed = {"encoder", "trunk", "head"} if name == "odpfl-hn" else {"psi", "phi"}
        if TRAININGS[name].heterogeneous:
            allowed = {"base", "personalized", "public"}
        assert {name.split(".")[1] for name in names if name.startswith("state.")} <= allowed


def test_nothing_of_the_training_data_and_no_memory_is_in_a_bundle(
    run_of: Callable[[str], api.Run], tmp_path: Path
) -> None:
    for name in ("scaffold", "fedavg"):
        run, out = run_of(name), tmp_path / name
        export(run, out)
        content = b"".join(file.read_bytes() for file in out.rglob("*") if file.is_file())
        for image in run.federation.source.images[::50]:
            for value in (image, image.astype(np.float32), run.setup.inputs.x(np.array([0]))[0].numpy()):
                assert value.tobytes() not in content
        for file in (run.path / "memory").rglob("*.safetensors"):
            for tensor in load_file(file).values():
                if tensor.numel() > 4 and tensor.any():
                    assert tensor.numpy().tobytes() not in content


def test_a_bundle_does_not_tell_on_which_machine_it_was_made(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run = run_of("fedavg")
    bundle = export(run, tmp_path / "bundle")
    bundle.personalize(pixels_of(run)).save(tmp_path / "me")
    for folder in ("bundle", "me"):
        content = b"".join(file.read_bytes() for file in (tmp_path / folder).iterdir())
        for secret in (str(tmp_path), str(run.path), str(Path.home()), str(Path.cwd()), "/tmp"):
            assert secret.encode() not in content


def test_layers_of_training_clients_are_announced(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run = run_of("fedper")
    said = upfl("export", run.path, "-o", tmp_path / "bundle")
    assert said.code == 0
    assert "warning: It holds 5 training clients' own layers" in said.out
    assert "**Warning.**" in (tmp_path / "bundle" / "README.md").read_text()
    mine = Bundle.load(tmp_path / "bundle").personalize(pixels_of(run), "ensemble")
    mine.save(tmp_path / "me")
    assert "training clients' own layers" in (tmp_path / "me" / "README.md").read_text()
    assert mine.manifest.models == 5


def test_a_newcomer_chooses_among_architectures(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run = run_of("hetero-fedtta")
    bundle = export(run, tmp_path / "bundle")
    np.save(tmp_path / "x.npy", pixels_of(run))
    assert "small, medium, big" in (tmp_path / "bundle" / "README.md").read_text()
    for architecture in ("small", "big"):
        out = tmp_path / architecture
        said = personalize(tmp_path / "bundle", tmp_path / "x.npy", out, "--architecture", architecture)
        assert said.code == 0, said.err
        client = Unlabelled(0, run.newcomer(0).x, 0, architecture)
        expected = run.personalizers["one-step"].personalize(run.published("one-step"), client)
        assert torch.equal(PersonalModel.load(out).predict_logits(pixels_of(run)), expected.predict_logits(client.x))
    with pytest.raises(ConfigError, match="unknown architecture 'bigg'; did you mean big"):
        bundle.personalize(pixels_of(run), architecture="bigg")
    with pytest.raises(BundleError, match="unknown architecture 'huge'"):
        PersonalModel.load(edited(tmp_path / "big", put("architecture", value="huge")))
    with pytest.raises(BundleError, match=r"tensor 0\.fc1\.\w+ has the shape"):
        PersonalModel.load(edited(tmp_path / "small", put("architecture", value="big")))


# What is refused


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(fedavg: Path, data: st.DataObject, bit: int) -> None:
    file = fedavg / data.draw(st.sampled_from(FILES))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    file.write_bytes(flipped)
    try:
        with pytest.raises(BundleError):
            Bundle.load(fedavg)
    finally:
        file.write_bytes(content)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), seal=st.booleans())
def test_a_truncated_file_is_noticed_with_or_without_its_checksum(
    fedavg: Path, data: st.DataObject, seal: bool
) -> None:
    file = fedavg / data.draw(st.sampled_from(["manifest.json", "weights.safetensors"]))
    content, sums = file.read_bytes(), (fedavg / "SHA256SUMS").read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    if seal:
        resealed(fedavg)
    try:
        with pytest.raises(BundleError, match=file.name):
            Bundle.load(fedavg)
    finally:
        file.write_bytes(content)
        (fedavg / "SHA256SUMS").write_bytes(sums)


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


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_manifest_with_any_value_replaced_is_refused_or_used_never_a_crash(fedavg: Path, data: st.DataObject) -> None:
    content, sums = (fedavg / "manifest.json").read_text(), (fedavg / "SHA256SUMS").read_text()
    manifest = json.loads(content)
    *path, last = data.draw(st.sampled_from(places(manifest)[1:]))
    target = manifest
    for key in path:
        target = target[key]
    if data.draw(st.booleans()):
        target[last] = data.draw(JSON)
    else:
        del target[last]
    (fedavg / "manifest.json").write_text(json.dumps(manifest))
    resealed(fedavg)
    try:
        load(fedavg)
    except BundleError:
        pass
    finally:
        (fedavg / "manifest.json").write_text(content)
        (fedavg / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("schema_version", value=2), "schema_version is 2, and this version of upfl reads 1"),
        (put("kind", value="other"), "kind is 'other'"),
        (put("kind", value=[]), r"kind is \[\]"),
        (put("kind", value="personal"), "personalizer: Field required"),
        (put("training", "name", value="fedavgg"), "unknown training 'fedavgg'; did you mean fedavg.*UPFL_PLUGINS"),
        (put("training", "name", value="fedtta"), "training: .*lr"),
        (put("training", "hyper", "lr", value=-1), "training: .*lr"),
        (put("personalizers", "tent", "steps", value=-1), "personalizers: .*steps"),
        (put("personalizers", "one-step", value={}), "personalizers: .*does not fit training"),
        (put("default", value="tnet"), "default: unknown personalizer 'tnet'; did you mean tent"),
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
        (put("model", 1, "name", value=None), "belong to layers with parameters"),
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
        (lambda state: state["fitted.gate.label-shift.menu"].fill_(10), r"menu has values that are not from 0 to 9"),
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
    with pytest.raises(BundleError, match="is not a bundle's folder"):
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
    for client in (-1, 5):
        for ask in (run.newcomer, run.labels):
            with pytest.raises(IndexError, match=f"client {client}: there are 5, counted from 0"):
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
    with pytest.raises(BundleError, match="is there already"):
        export(run_of("fedavg"), fedavg)
    assert {file: file.read_bytes() for file in fedavg.iterdir()} == before
    (tmp_path / "empty").mkdir()
    export(run_of("fedavg"), tmp_path / "empty")  # an empty folder is as good as none
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == FILES
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_an_unfinished_run_has_no_bundle(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    config = run_of("fedavg").config
    RunFolder.create(tmp_path / "run", config)
    said = upfl("export", tmp_path / "run", "-o", tmp_path / "bundle")
    assert said.code == 4
    assert "the run is not finished" in said.err
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


# As a classifier of scikit-learn's kind


def test_it_predicts_as_classifiers_do(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    mine = bundle.personalize(x)
    assert mine.classes_.tolist() == ["cat", "dog", "emu", "fox"]
    probabilities = mine.predict_proba(x)
    assert probabilities.shape == (30, 4)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert mine.predict(x).tolist() == mine.classes_[probabilities.argmax(1)].tolist()
    assert mine.predict(x[:1]).shape == (1,)
    assert mine.transduction_.shape == (30,)
    np.testing.assert_allclose(mine.label_distributions_.sum(1), 1)
    assert mine.score(x, mine.predict(x)) == 1
    assert mine.score(x[:4], np.roll(mine.classes_, 1)[np.searchsorted(mine.classes_, mine.predict(x[:4]))]) == 0
    with pytest.raises(DataError, match="30 images need as many classes"):
        mine.score(x, ["cat"])
    with pytest.raises(ConfigError, match="unknown class 'bat'; did you mean cat"):
        mine.score(x[:1], ["bat"])
    assert mine != bundle.personalize(x)
    assert repr(mine) == "<PersonalModel: animals, 4 classes; tent on 30 images>"
    assert repr(bundle).startswith("<Bundle: FedAvg on ")


def test_a_path_serves_where_an_array_does(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    np.save(tmp_path / "x.npy", x)
    mine = bundle.personalize(tmp_path / "x.npy")
    np.testing.assert_array_equal(mine.predict_proba(str(tmp_path / "x.npy")), bundle.personalize(x).predict_proba(x))


def test_bytes_floats_and_layouts_mean_the_same(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    mine = bundle.personalize(x)
    expected = mine.predict_proba(x)
    floats = x / 255
    np.testing.assert_array_equal(mine.predict_proba(x.transpose(0, 3, 1, 2)), expected)
    np.testing.assert_array_equal(mine.predict_proba(torch.from_numpy(x)), expected)
    np.testing.assert_allclose(mine.predict_proba(floats), expected, atol=1e-5)
    np.testing.assert_array_equal(floats, x / 255)  # not normalized in place
    kept = floats.astype(np.float32)
    mine.predict_proba(kept)
    np.testing.assert_array_equal(kept, floats.astype(np.float32))


def test_many_samples_are_predicted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, x = small_convnet(tmp_path)
    mine = bundle.personalize(x)
    expected = mine.predict_logits(x)
    monkeypatch.setattr("upfl.bundle.model.CHUNK", 7)
    torch.testing.assert_close(mine.predict_logits(x), expected)


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    mine = bundle.personalize(x)
    for wrong in (x[..., 0], x[:, :7], x[:0], x / 128, np.full(x.shape, np.nan), x[0]):
        for use in (bundle.personalize, mine.predict, mine.predict_proba):
            with pytest.raises(DataError, match=r"^x: "):
                use(wrong)
    with pytest.raises(ConfigError, match="unknown personalizer 'tnet'; did you mean tent"):
        bundle.personalize(x, "tnet")


def test_a_stored_model_does_not_remember_its_samples(tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path)
    bundle.personalize(x).save(tmp_path / "me")
    with pytest.raises(BundleError, match="does not remember"):
        PersonalModel.load(tmp_path / "me").transduction_  # noqa: B018
    content = b"".join(file.read_bytes() for file in (tmp_path / "me").iterdir())
    assert not any(image.tobytes() in content for image in x)


# On the command line


def images_of(run: api.Run, folder: Path, client: int = 0) -> Path:
    folder.mkdir()
    for i, image in enumerate(pixels_of(run, client)):
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(folder / f"{i:03}.png")
    return folder


def personalize(bundle: Path, data: Path, out: Path, *more: str) -> Said:
    return upfl("personalize", bundle, data, "-o", out, *more)


def test_from_a_run_to_predictions(run_of: Callable[[str], api.Run], tmp_path: Path) -> None:
    run, me = run_of("fedavg"), tmp_path / "me"
    said = upfl("export", run.path, "-o", tmp_path / "bundle")
    assert said.code == 0, said.err
    assert "personalizers: none, tent" in said.out
    data = images_of(run, tmp_path / "data")
    (data / "notes.txt").write_text("mine")
    said = personalize(tmp_path / "bundle", data, me, "--personalizer", "label-shift")
    assert said.code == 0, said.err
    assert "1 file(s) left out, no images: notes.txt" in said.out
    assert "Class mix" in said.out
    assert "estimated accuracy" in said.out
    assert "nats" in said.out
    rows = list(csv.DictReader((me / "predictions.csv").open()))
    assert [row["sample"] for row in rows] == sorted(file.name for file in data.glob("*.png"))
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)
    said = upfl("predict", me, data)
    assert said.code == 0
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
    ("make", "code", "says"),
    [
        (lambda data: None, 3, "there are no images in it"),
        (lambda data: (data / "a.txt").write_text("x"), 3, r"no images in it (found a.txt)"),
        (lambda data: Image.new("L", (28, 28)).save(data / "a.png"), 3, "a.png: has 28 x 28 pixels"),
        (lambda data: Image.new("RGB", (8, 8), "red").save(data / "a.png"), 3, "a.png: is in colour"),
        (lambda data: (data / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n"), 3, "a.png: "),
    ],
)
def test_wrong_data_ends_with_a_message_and_no_folder(
    make: Callable[[Path], Any], code: int, says: str, fedavg: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    said = personalize(fedavg, tmp_path / "data", tmp_path / "me")
    assert said.code == code
    assert says in said.err
    assert not (tmp_path / "me").exists()


def test_wrong_commands_end_with_a_message(fedavg: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((30, 8, 8), np.uint8))
    said = personalize(fedavg, tmp_path / "x.npy", tmp_path / "me", "--personalizer", "tnet")
    assert (said.code, "did you mean tent" in said.err) == (2, True)
    said = personalize(fedavg, tmp_path / "x.npy", fedavg)
    assert (said.code, "is there already" in said.err) == (3, True)
    said = upfl("predict", fedavg, tmp_path / "x.npy")
    assert (said.code, "`upfl personalize` makes a model of it" in said.err) == (3, True)
    (fedavg / "README.md").write_text("changed")
    said = personalize(fedavg, tmp_path / "x.npy", tmp_path / "me")
    assert (said.code, "README.md: does not have its checksum" in said.err) == (3, True)


def test_one_sample_is_enough(run_of: Callable[[str], api.Run], fedavg: Path, tmp_path: Path) -> None:
    data = images_of(run_of("fedavg"), tmp_path / "data")
    said = personalize(fedavg, data / "000.png", tmp_path / "me")
    assert said.code == 0
    assert "1 sample(s) are few" in said.out


def test_the_newcomers_commands_import_nothing_slow() -> None:
    script = (
        "import sys, upfl.cli, upfl.bundle, upfl.report.personal\n"
        "print([name for name in ('matplotlib', 'sklearn', 'scipy', 'onnx', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ONNX


@pytest.mark.parametrize("name", ["fedavg", "fedsr"])
def test_an_onnx_file_gives_the_models_probabilities(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    bundle, x = small_convnet(tmp_path, name)
    mine = bundle.personalize(x)
    mine.save(tmp_path / "me")
    said = upfl("export-onnx", tmp_path / "me", "-o", tmp_path / "me.onnx")
    assert said.code == 0, said.err
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    images = (x.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    for count in (1, 2, 30):
        (probabilities,) = session.run(None, {"images": images[:count]})
        np.testing.assert_allclose(probabilities, mine.predict_proba(x[:count]), atol=1e-5)
    properties = session.get_modelmeta().custom_metadata_map
    assert properties["classes"].split("\n") == mine.classes_.tolist()
    assert str(tmp_path).encode() not in (tmp_path / "me.onnx").read_bytes()


def test_bundles_do_not_hold_what_safetensors_files_could_hide(fedavg: Path) -> None:
    """The header's metadata is the order of the tensors and nothing else."""
    with safe_open(fedavg / "weights.safetensors", "pt") as file:
        assert list(file.metadata()) == ["order"]
