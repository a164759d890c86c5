"""A newcomer's model, as a classifier of scikit-learn's kind."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.bundles import small_convnet
from upfl.bundle import PersonalModel
from upfl.errors import BundleError, ConfigError, DataError


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
