"""A bundle, and the model that a newcomer makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from upfl.bundle.card import personal_card
from upfl.bundle.in_words import summary
from upfl.bundle.manifest import FederationManifest, PersonalManifest, version
from upfl.bundle.read import FederationParts, read
from upfl.bundle.write import write_folder
from upfl.contract import Diary, Likeness, Personalized, Personalizer, Predictor, Published, Training, Unlabelled
from upfl.data.given import Given, unlabelled
from upfl.data.inputs import normalized
from upfl.engine.rounds import one_thread
from upfl.errors import BundleError, DataError
from upfl.personalize import likeness
from upfl.state import State, prefixed
from upfl.suggest import unknown

CHUNK = 4096  # samples that are made floats at once

Images: TypeAlias = Given  # a newcomer's samples: images, rows of features, texts


@dataclass(frozen=True, eq=False, repr=False)
class Bundle:
    """What a federation hands to newcomers: a trained model, and personalizers that make a newcomer's own of it."""

    manifest: FederationManifest
    training: Training[Any]
    published: Published
    personalizers: Mapping[str, Personalizer[Any]]

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Open a bundle, after everything in it was checked."""
        found = load(path)
        if not isinstance(found, cls):
            raise BundleError(f"{path}: it is a newcomer's own model: `upfl predict`, or PersonalModel.load")
        return found

    @property
    def classes_(self) -> NDArray[np.str_]:
        return np.array(self.manifest.task.classes)

    def __repr__(self) -> str:
        task, names = self.manifest.task, ", ".join(self.personalizers)
        return (
            f"<Bundle: {self.training.title} on {task.name}, {len(task.classes)} classes, {task.input.noun} "
            f"{list(task.input.shape)}; personalizers {names}>"
        )

    @property
    def warning(self) -> str:
        """What everyone who passes the bundle on should know."""
        if not self.manifest.members:
            return ""
        return f"It holds {self.manifest.members} training clients' own layers, which may tell about their data."

    def personalize(
        self, x: Images, personalizer: str | None = None, *, architecture: str | None = None, seed: int = 0
    ) -> PersonalModel:
        """A newcomer's own model, from images without labels, by the bundle's default personalizer or another of its.

        x is an array of images [n, h, w], [n, h, w, c] or [n, c, h, w]: integers up to the data set's full intensity
        (mostly 255), or floats in [0, 1]; rows of features [n, d]; texts; or the path of a folder of images, of an
        .npy, .npz, idx, .csv or .parquet file. Where the federation has models of several sizes, `architecture` names
        one of them; by default the first.
        """
        name = personalizer or self.manifest.default
        if name not in self.personalizers:
            raise unknown("personalizer", name, self.personalizers)
        kinds = self.training.client_models
        kind = next(iter(kinds)) if architecture is None else architecture
        if kind not in kinds:
            raise unknown("architecture", kind, kinds)
        task = self.manifest.task
        with one_thread():
            client = Unlabelled(0, normalized(task.input, unlabelled(x, task.input)), seed, kind)
            personalized = self.personalizers[name].personalize(self.published, client)
            known, found, outlying = self._checked(client, personalized)
        predictor = personalized.predictor
        manifest = PersonalManifest(
            made_with=version(),
            task=task,
            model=self.manifest.model,
            architectures=self.manifest.architectures,
            training=self.manifest.training,
            personalizer=name,
            hyper=self.manifest.personalizers[name],
            architecture=kind,
            samples=len(client.x),
            diary=found,
            checked=tuple(space for space in likeness.SPACES if f"{space}_means" in known),
            models=len(predictor.params),
            temperature=predictor.temperature,
        )
        return PersonalModel(manifest, predictor, personalized, known, outlying)

    def _checked(self, client: Unlabelled, personalized: Personalized) -> tuple[State, Diary, Tensor | None]:
        """Compare the data with the federation's: what later data will be compared with, the diary, outlying samples.

        Nothing is said about the accuracy on data that are unlike. Features that adaptation changed are no use later.
        """
        known = likeness.known_of(self.published)
        if not known:
            return {}, personalized.diary, None
        serves, params = "features_means" in known, None
        if serves:
            params = self.training.start(self.published, client, None)
        found, outlying = likeness.check(self.training, known, params, client.x)
        diary = replace(personalized.diary, likeness=found)
        if found.unlike:
            diary = replace(diary, accuracy=[], mix_error=None, no_accuracy="the data are unlike the federation's")
        same = serves and self._same_features(params, personalized)
        kept = tuple(space for space in likeness.SPACES if same or space != "features")
        return likeness.stored(known, kept), diary, outlying

    def _same_features(self, start: State | None, personalized: Personalized) -> bool:
        params, head = personalized.predictor.params, self.training.head
        return (
            start is not None
            and len(params) == 1
            and all(
                name in (f"{head}.weight", f"{head}.bias") or torch.equal(value, start[name])
                for name, value in params[0].items()
            )
        )


@dataclass(frozen=True, eq=False, repr=False)
class PersonalModel:
    """A newcomer's own model; predicts as scikit-learn's classifiers do."""

    manifest: PersonalManifest
    predictor: Predictor
    personalized: Personalized | None = None  # what a stored model does not remember
    known: State = field(default_factory=dict)  # what later data are compared with, where the federation published it
    outlying: Tensor | None = None  # which samples are; what a stored model does not remember

    @classmethod
    def load(cls, path: str | Path) -> PersonalModel:
        found = load(path)
        if not isinstance(found, cls):
            raise BundleError(f"{path}: it is a federation's bundle: `upfl personalize` makes a model of it")
        return found

    @property
    def classes_(self) -> NDArray[np.str_]:
        return np.array(self.manifest.task.classes)

    def __repr__(self) -> str:
        made, classes, noun = self.manifest, len(self.classes_), self.manifest.task.input.noun
        return f"<PersonalModel: {made.task.name}, {classes} classes; {made.personalizer} on {made.samples} {noun}>"

    @property
    def diary(self) -> Diary:
        """What the personalizer saw, did and decided."""
        return self.manifest.diary

    @property
    def summary(self) -> str:
        """What its owner should know, in words: whether the data are alike, the decision, class mix and accuracy."""
        return summary(self.diary, self.manifest.samples, self.manifest.task.classes)

    def check(self, x: Images) -> tuple[Likeness, NDArray[np.bool_]] | None:
        """Whether later data are like the federation's, and which samples are outlying; None where nobody can tell."""
        if not self.known:
            return None
        form, predictor = self.manifest.task.input, self.predictor
        with one_thread(), torch.no_grad():
            inputs = normalized(form, unlabelled(x, form))
            found, outlying = likeness.check(predictor.training, self.known, predictor.params[0], inputs)
        return found, outlying.numpy()

    @property
    def outlying_(self) -> NDArray[np.bool_]:
        """Which of the samples that it was personalized on are unlike what the federation holds."""
        samples = len(self.label_distributions_)
        return np.zeros(samples, np.bool_) if self.outlying is None else self.outlying.numpy()

    def predict_logits(self, x: Images) -> Tensor:
        """Each class's logit: `predict_proba` before the softmax."""
        task = self.manifest.task
        samples = unlabelled(x, task.input)
        with one_thread():
            return torch.cat(
                [
                    self.predictor.logits(normalized(task.input, replace(samples, x=samples.x[i : i + CHUNK])))
                    for i in range(0, len(samples), CHUNK)
                ]
            )

    def predict_proba(self, x: Images) -> NDArray[np.float64]:
        """Each class's probability, one row a sample, in the order of `classes_`."""
        return _probabilities(self.predict_logits(x))

    def predict(self, x: Images) -> NDArray[np.str_]:
        """Each sample's most probable class, by its name."""
        return self._named(self.predict_proba(x))

    def score(self, x: Images, y: ArrayLike) -> float:
        """The share of samples whose class is predicted right; y are names of classes."""
        predicted, names = self.predict(x), np.asarray(y).astype(np.str_)
        if names.shape != predicted.shape:
            noun = self.manifest.task.input.noun
            raise DataError(f"y: {len(predicted)} {noun} need as many classes; found shape {list(names.shape)}")
        if others := sorted(set(names.tolist()) - set(self.classes_.tolist())):
            raise unknown("class", others[0], self.classes_.tolist())
        return float((predicted == names).mean())

    @cached_property
    def label_distributions_(self) -> NDArray[np.float64]:
        """The probabilities of the samples that it was personalized on, which were judged together."""
        if self.personalized is None:
            raise BundleError("a stored model does not remember the samples that it was personalized on")
        return _probabilities(self.personalized.logits)

    @property
    def transduction_(self) -> NDArray[np.str_]:
        """The most probable classes of these samples."""
        return self._named(self.label_distributions_)

    def _named(self, probabilities: NDArray[np.float64]) -> NDArray[np.str_]:
        names: NDArray[np.str_] = self.classes_[probabilities.argmax(1)]
        return names

    def save(self, path: str | Path) -> None:
        """Write it as a bundle of its own."""
        predictor = self.predictor
        state: State = {}
        for i in range(len(predictor.params)):  # an ensemble's models may share tensors, which a file cannot
            state |= prefixed(str(i), {name: value.clone() for name, value in predictor.params[i].items()})
        if predictor.bias is not None:
            state["bias"] = predictor.bias
        state |= prefixed("likeness", self.known)
        write_folder(path, self.manifest, state, (), personal_card(self.manifest))


def load(path: str | Path) -> Bundle | PersonalModel:
    """Open either kind of bundle, after everything in it was checked."""
    found = read(path)
    if isinstance(found, FederationParts):
        return Bundle(*found)
    return PersonalModel(found.manifest, found.predictor, known=found.known)


class ClassMix(NamedTuple):
    """Each class's share of the samples that a model was personalized on."""

    before: list[float]
    after: list[float]


def class_mix(mine: PersonalModel) -> ClassMix:
    """By what the model before predicts, and the newcomer's own; where its personalizer estimated the mix, that.

    Predictions are counted: probabilities that nobody calibrated blur a mix, or sharpen it.
    """
    assert mine.personalized is not None
    before, after = (_counted(logits) for logits in (mine.personalized.before, mine.personalized.logits))
    return ClassMix(before, mine.diary.mix or after)


def _counted(logits: Tensor) -> list[float]:
    counts = torch.bincount(logits.argmax(1), minlength=logits.shape[1])
    return (counts.double() / len(logits)).tolist()


def _probabilities(logits: Tensor) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = logits.double().softmax(1).numpy()
    return probabilities
