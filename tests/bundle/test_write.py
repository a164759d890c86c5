"""What goes into a bundle, comes back to the same bits, and what must not be in it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.helpers.bundles import FILES, personalize, pixels_of, small_convnet
from tests.plugin_methods import upfl
from tests.sealed import edited, put
from upfl import api
from upfl.bundle import Bundle, PersonalModel, export
from upfl.bundle.manifest import PersonalManifest, TaskSection, TrainingSection
from upfl.contract import Diary, Estimate, Unlabelled
from upfl.data.forms import Pixels
from upfl.errors import BundleError, ConfigError
from upfl.methods import TRAININGS
from upfl.models import convnet, described, mlp

of_every_training = pytest.mark.parametrize("name", TRAININGS)


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
        assert replace(mine.diary, likeness=None) == expected.diary
        mine.save(tmp_path / personalizer)
        stored = PersonalModel.load(tmp_path / personalizer)
        assert torch.equal(stored.predict_logits(later), mine.predict_logits(later))
        assert torch.equal(stored.predict_logits(later), expected.predict_logits(run.newcomer(1).x))
        assert stored.diary == mine.diary
        assert stored.manifest == mine.manifest


@pytest.mark.parametrize("name", ["fedavg", "fedsr", "fedadg", "odpfl-hn"])
def test_a_convnet_written_without_a_run_comes_back_to_the_same_bits(name: str, tmp_path: Path) -> None:
    bundle, x = small_convnet(tmp_path, name)
    mine = bundle.personalize(x)
    mine.save(tmp_path / "me")
    stored, again = PersonalModel.load(tmp_path / "me"), Bundle.load(tmp_path / "animals").personalize(x)
    for ours, theirs in zip(stored.predictor.params, mine.predictor.params, strict=True):
        # Where values lie in another order, some processors sum in another.
        assert all(ours[name].stride() == value.stride() for name, value in theirs.items())
    for other in (stored, again):
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
    diary = Diary(entropy, [1.0], 3, "so [be] it\n {1}", [0.5, 0.5], value, [Estimate(value, 0.0, 1.0)])
    form = Pixels(shape=(1, 2, 2), scale=1, mean=(0,), std=(1,))
    task = TaskSection(name="t", classes=("a  b", "[c]"), input=form)
    training = TrainingSection(name="fedavg", clients=1, round=0, hyper={})
    about: dict[str, Any] = {"made_with": "upfl", "model": (), "personalizer": "none", "hyper": {}, "samples": 1}
    manifest = PersonalManifest(task=task, training=training, diary=diary, **about)
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
        for image in run.federation.source.x[::50]:
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
    said = upfl("export", run.path, "-o", tmp_path / "bundle").ended()
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
        personalize(tmp_path / "bundle", tmp_path / "x.npy", out, "--architecture", architecture).ended()
        client = Unlabelled(0, run.newcomer(0).x, 0, architecture)
        expected = run.personalizers["one-step"].personalize(run.published("one-step"), client)
        assert torch.equal(PersonalModel.load(out).predict_logits(pixels_of(run)), expected.predict_logits(client.x))
    with pytest.raises(ConfigError, match="unknown architecture 'bigg'; did you mean big"):
        bundle.personalize(pixels_of(run), architecture="bigg")
    with pytest.raises(BundleError, match="unknown architecture 'huge'"):
        PersonalModel.load(edited(tmp_path / "big", put("architecture", value="huge")))
    with pytest.raises(BundleError, match=r"tensor 0\.fc1\.\w+ has the shape"):
        PersonalModel.load(edited(tmp_path / "small", put("architecture", value="big")))
