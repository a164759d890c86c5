"""What a trained federation ships to newcomers, and what a newcomer makes of it.

    mine = Bundle.load("bundle").personalize(x)     x: a newcomer's images, without labels
    mine.predict(x), mine.predict_proba(x)          its own model, on these images or on later ones
    mine.save("me"); PersonalModel.load("me")

A bundle is a folder. Nothing in it is code, and nothing says on which machine it was made:

    manifest.json           what it is: task, input, model, training, personalizers; for a person and for `load`
    weights.safetensors     the published state (`state.`), what was fitted after training (`fitted.`); in a newcomer's
                            own bundle its parameters (`0.`, one number for each model of an ensemble) and `bias`
    members/N.safetensors   training clients' own layers, only where the method hands them out
    README.md               the model card
    SHA256SUMS              of all these files: `sha256sum -c` checks it, `load` does

`load` reads the files that the manifest asks for and no others, and refuses what does not fit: another schema, a wrong
checksum, tensors of other names, shapes or types than the training needs, numbers that are not finite. Checksums find
damage, they do not tell who made a bundle: take bundles from those you trust.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from upfl import models
from upfl.contract import (
    Architecture,
    CrossFitted,
    Diary,
    Personalized,
    Personalizer,
    Predictor,
    Published,
    Task,
    Training,
    Unlabelled,
    needs_of,
)
from upfl.data.files import Samples, from_array, load_unlabelled
from upfl.data.inputs import InputFormat, Inputs
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.engine.rounds import one_thread
from upfl.errors import BundleError, ConfigError, DataError, UpflError
from upfl.manifest import (
    CARD,
    MANIFEST,
    SCHEMA,
    SUMS,
    WEIGHTS,
    ArchitectureSection,
    FederationManifest,
    LayerSection,
    Manifest,
    PersonalManifest,
    TaskSection,
    TrainingSection,
    member_file,
)
from upfl.methods import make_personalizer, make_training, personalizer_class, row_name, training_class
from upfl.randomness import generator
from upfl.report.card import federation_card, personal_card
from upfl.state import State, aligned, contiguous, prefixed, select
from upfl.suggest import unknown

if TYPE_CHECKING:
    from upfl.api import Run

TEXT_LIMIT = 2**24  # bytes of a file that is read as text
FRESH_LIMIT = 2**32  # bytes of a model that a newcomer starts afresh
CHUNK = 4096  # samples that are made floats at once

Images: TypeAlias = ArrayLike | Samples | str | Path


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
        return _opened(path, cls, "it is a newcomer's own model: `upfl predict`, or PersonalModel.load")

    @property
    def classes_(self) -> NDArray[np.str_]:
        return np.array(self.manifest.task.classes)

    def __repr__(self) -> str:
        task, names = self.manifest.task, ", ".join(self.personalizers)
        return (
            f"<Bundle: {self.training.title} on {task.name}, {len(task.classes)} classes, images "
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
        (mostly 255), or floats in [0, 1]; or the path of a folder of images, of an .npy, .npz or idx file. Where the
        federation has models of several sizes, `architecture` names one of them; by default the first.
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
            normalized = task.input.normalized(_samples(x, task))
            client = Unlabelled(0, normalized, seed, kind)
            personalized = self.personalizers[name].personalize(self.published, client)
        predictor = personalized.predictor
        manifest = PersonalManifest(
            made_with=_version(),
            task=task,
            model=self.manifest.model,
            architectures=self.manifest.architectures,
            training=self.manifest.training,
            personalizer=name,
            hyper=self.manifest.personalizers[name],
            architecture=kind,
            samples=len(normalized),
            diary=personalized.diary,
            models=len(predictor.params),
            temperature=predictor.temperature,
        )
        return PersonalModel(manifest, predictor, personalized)


@dataclass(frozen=True, eq=False, repr=False)
class PersonalModel:
    """A newcomer's own model; predicts as scikit-learn's classifiers do."""

    manifest: PersonalManifest
    predictor: Predictor
    personalized: Personalized | None = None  # what a stored model does not remember

    @classmethod
    def load(cls, path: str | Path) -> PersonalModel:
        return _opened(path, cls, "it is a federation's bundle: `upfl personalize` makes a model of it")

    @property
    def classes_(self) -> NDArray[np.str_]:
        return np.array(self.manifest.task.classes)

    def __repr__(self) -> str:
        made, classes = self.manifest, len(self.classes_)
        return f"<PersonalModel: {made.task.name}, {classes} classes; {made.personalizer} on {made.samples} images>"

    @property
    def diary(self) -> Diary:
        """What the personalizer saw, did and decided."""
        return self.manifest.diary

    def predict_logits(self, x: Images) -> Tensor:
        """Each class's logit: `predict_proba` before the softmax."""
        task = self.manifest.task
        samples = _samples(x, task)
        with one_thread():
            return torch.cat(
                [
                    self.predictor.logits(task.input.normalized(replace(samples, images=samples.images[i : i + CHUNK])))
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
            raise DataError(f"y: {len(predicted)} images need as many classes; found shape {list(names.shape)}")
        if strange := sorted(set(names.tolist()) - set(self.classes_.tolist())):
            raise unknown("class", strange[0], self.classes_.tolist())
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
        _write(path, self.manifest, state, (), personal_card(self.manifest))


class ClassMix(NamedTuple):
    """Each class's share of the samples that a model was personalized on."""

    before: list[float]
    after: list[float]


def class_mix(mine: PersonalModel) -> ClassMix:
    """By the model before, and by the newcomer's own; where its personalizer estimated the mix, that."""
    assert mine.personalized is not None
    before = _probabilities(mine.personalized.before).mean(0).tolist()
    return ClassMix(before, mine.diary.mix or mine.label_distributions_.mean(0).tolist())


def export(run: Run, out: str | Path, add: Sequence[str] = ()) -> Bundle:
    """Write the bundle of a finished run: its best row's state by validation accuracy, and all its personalizers.

    `none` is always among them, for comparison, where the training has a model for newcomers without personalization.
    `add` names personalizers that the run was not scored under; what they need is fitted here, over the run's clients.
    """
    require_new(out)
    rows = {row["row"]: row for row in run.result["rows"]}
    named = {name: row_name(run.training.name, name) for name in run.config.personalize}
    if unscored := [row for row in named.values() if row not in rows]:
        raise BundleError(f"{run.path}: no row '{unscored[0]}' was scored in this run; it has {', '.join(rows)}")
    scored = {name: rows[row] for name, row in named.items()}
    default = max(scored, key=lambda name: float(scored[name]["validation"]))
    config, source, published = run.config, run.federation.source, run.published(default)
    plain = ["none"] if run.training.serves_newcomers else []
    names = dict.fromkeys([*config.personalize, *add, *plain])
    personalizers = {name: config.personalizer_hyper(name) for name in names}
    if add:
        made = [make_personalizer(name, run.training, hyper) for name, hyper in personalizers.items()]
        with one_thread(), torch.no_grad():
            bare = replace(published, fitted={})
            given, _ = fit_needs(made, bare, run.federation, Inputs(source), config.seed, Group())
        published = given.published
    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "rounds": run.result["rounds"],
        "partition": config.partition.model_dump(mode="json", exclude_defaults=True),
        "new_clients": len(run.federation.new),
        "seed": config.seed,
        "partition_seed": config.partition_seed,
        "notes": run.result["notes"],
        "scores": {
            name: {
                "round": row["best_round"],
                "validation": row["validation"],
                "before": row["test_before"],
                "after": row["test"],
            }
            for name, row in scored.items()
        },
    }
    return write(
        out,
        task=config.dataset,
        classes=source.class_names,
        input=InputFormat.of(source),
        training=run.training,
        published=published,
        personalizers={name: hyper.model_dump(exclude_none=True) for name, hyper in personalizers.items()},
        default=default,
        summary=summary,
    )


def write(
    out: str | Path,
    *,
    task: str,
    classes: Sequence[str],
    input: InputFormat,  # noqa: A002 - the manifest's word
    training: Training[Any],
    published: Published,
    personalizers: Mapping[str, Mapping[str, Any]],
    default: str,
    summary: Mapping[str, Any],
) -> Bundle:
    """Write what a training published as a bundle; `personalizers` are names with their hyper-parameters."""
    manifest = FederationManifest(
        made_with=_version(),
        task=TaskSection(name=task, classes=tuple(classes), input=input),
        model=_layers(training.task.model),
        architectures={
            name: ArchitectureSection(layers=_layers(kind.model), adaptation_width=kind.adaptation_width)
            for name, kind in training.task.architectures.items()
        },
        training=TrainingSection(
            name=training.name,
            clients=training.task.clients,
            round=published.round,
            hyper=training.hyper.model_dump(mode="json", exclude_none=True),
        ),
        personalizers={
            name: personalizer_class(name).Hyper(**values).model_dump(mode="json", exclude_none=True)
            for name, values in personalizers.items()
        },
        default=default,
        fitted=tuple(dict.fromkeys(name.rpartition(".")[0] for name in published.fitted)),
        members=len(published.members),
        public=0 if training.task.public is None else len(training.task.public),
        summary=dict(summary),
    )
    state = prefixed("state", published.state) | prefixed("fitted", published.fitted)
    _write(out, manifest, state, published.members, federation_card(manifest))
    try:
        return Bundle.load(out)
    except BundleError:  # what nobody could load is not handed out
        shutil.rmtree(Path(out).expanduser())
        raise


def _layers(model: models.Model) -> tuple[LayerSection, ...]:
    return tuple(LayerSection(**layer) for layer in model.describe())


def _model(layers: Iterable[LayerSection]) -> models.Model:
    return models.described(layer.model_dump(exclude_none=True) for layer in layers)


# Writing


def require_new(out: str | Path) -> Path:
    """The folder for a bundle, if there is nothing there yet."""
    target = Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BundleError(f"{target}: is there already; choose another folder")
    return target


def _write(out: str | Path, manifest: Manifest, state: State, members: Sequence[State], card: str) -> None:
    """Put a complete bundle in its place, in one step."""
    target = require_new(out)
    _check_finite(state, WEIGHTS)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".upfl-", dir=target.parent) as temporary:
            folder = Path(temporary) / "bundle"
            folder.mkdir()
            (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
            (folder / CARD).write_text(card, encoding="utf-8")
            _save(folder / WEIGHTS, state)
            for i in range(len(members)):
                (folder / member_file(i)).parent.mkdir(exist_ok=True)
                _save(folder / member_file(i), members[i])
            sums = [f"{_digest(folder / name)}  {name}\n" for name in manifest.files()]
            (folder / SUMS).write_text("".join(sums), encoding="utf-8")
            folder.rename(target)
    except OSError as error:
        raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error


def _save(path: Path, state: State) -> None:
    # The file sorts names by size; a state keeps its order, on which the order of floating-point sums may depend.
    order = json.dumps(list(state))
    path.touch()
    mode = path.stat().st_mode
    save_file(contiguous({name: value.cpu() for name, value in state.items()}), path, {"order": order})
    path.chmod(mode)  # a bundle is made to be passed on; the library keeps its files to their owner


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version() -> str:
    from upfl import __version__  # here, because the package imports this module

    return f"upfl {__version__}"


# Reading

B = TypeVar("B", Bundle, PersonalModel)


def load(path: str | Path) -> Bundle | PersonalModel:
    """Open either kind of bundle."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BundleError(f"{folder}: is not a bundle's folder")
    if not any((folder / name).exists() for name in (MANIFEST, SUMS)):
        run = (folder / "config.toml").exists()
        instead = f"a run's folder: `upfl export {path} -o BUNDLE` makes a bundle of it" if run else "no bundle"
        raise BundleError(f"{folder}: is {instead} (there is no {MANIFEST})")
    sums = _read_sums(folder)
    manifest = _read_manifest(folder, sums)
    for name in manifest.files():
        _check_sum(folder, name, sums)
    if extra := sorted(sums.keys() - set(manifest.files())):
        raise BundleError(f"{folder / SUMS}: names {extra[0]}, which is no part of such a bundle")
    training = _make_training(folder, manifest)
    if isinstance(manifest, FederationManifest):
        return _open_federation(folder, manifest, training)
    assert isinstance(manifest, PersonalManifest)
    return _open_personal(folder, manifest, training)


def _opened(path: str | Path, kind: type[B], instead: str) -> B:
    found = load(path)
    if not isinstance(found, kind):
        raise BundleError(f"{path}: {instead}")
    return found


def _read_text(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(TEXT_LIMIT + 1)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > TEXT_LIMIT:
        raise BundleError(f"{path}: is too large to be a bundle's")
    return content


def _read_sums(folder: Path) -> dict[str, str]:
    sums: dict[str, str] = {}
    for line in _read_text(folder / SUMS).split(b"\n")[:-1]:
        match = re.fullmatch(rb"([0-9a-f]{64})  ([\w./-]+)", line)
        if not match:
            raise BundleError(f"{folder / SUMS}: damaged")
        sums[match[2].decode()] = match[1].decode()
    return sums


def _check_sum(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    path = folder / name
    try:
        digest = _digest(path)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    if sums.get(name) != digest:
        raise BundleError(f"{path}: does not have its checksum in {SUMS}: damaged or changed; get the bundle anew")


def _read_manifest(folder: Path, sums: Mapping[str, str]) -> Manifest:
    path = folder / MANIFEST
    _check_sum(folder, MANIFEST, sums)
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: is not JSON ({error})") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA:
        raise BundleError(f"{path}: its schema_version is {version!r}, and this version of upfl reads {SCHEMA}")
    kinds: dict[str, type[Manifest]] = {"federation": FederationManifest, "personal": PersonalManifest}
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise BundleError(f"{path}: its kind is {kind!r}, and should be {' or '.join(kinds)}")
    try:
        return kinds[kind].model_validate_json(_read_text(path))
    except ValidationError as error:
        raise BundleError(f"{path}: {_explained(error)}") from None


def _explained(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or '(whole)'}: {first['msg']}"


def _make_training(folder: Path, manifest: Manifest) -> Training[Any]:
    path, section, classes = folder / MANIFEST, manifest.training, len(manifest.task.classes)
    public = manifest.public if isinstance(manifest, FederationManifest) else 1
    try:
        kind = training_class(section.name)
        architectures = {
            name: Architecture(_model(one.layers), one.adaptation_width) for name, one in manifest.architectures.items()
        }
        task = Task(
            _model(manifest.model),
            classes,
            section.clients,
            architectures,
            # Newcomers learn from the samples among what is published; here their number is enough.
            torch.empty(public, *manifest.task.input.shape, device="meta") if kind.heterogeneous else None,
        )
        _check_size(folder, manifest, task, kind.heterogeneous)
        training = make_training(section.name, task, kind.Hyper(**section.hyper))
    except (UpflError, ValidationError, AssertionError) as error:
        hint = "; a method of your own is made known by UPFL_PLUGINS" if isinstance(error, ConfigError) else ""
        raise BundleError(f"{path}: training: {_explained(error)}{hint}") from error
    x = torch.zeros(2, *manifest.task.input.shape)
    for model in training.client_models.values():
        try:  # for real: on the meta device this would import a second's worth of torch
            logits = training.logits({name: torch.zeros(shape) for name, shape in model.shapes.items()}, x)
        except (RuntimeError, IndexError) as error:
            raise BundleError(
                f"{path}: the model does not take images of shape {list(x.shape[1:])} ({error})"
            ) from error
        if logits.shape != (2, classes):
            raise BundleError(f"{path}: the model tells {logits.shape[-1]} classes apart, and {classes} are named")
    return training


def _check_size(folder: Path, manifest: Manifest, task: Task, fresh: bool) -> None:
    """Refuse models that are larger than the bundle's files can hold, or than anything where newcomers start afresh."""
    there = sum((folder / name).stat().st_size for name in manifest.files())
    sets = manifest.models if isinstance(manifest, PersonalManifest) else 1
    largest = max(model.size for model in (task.model, *(one.model for one in task.architectures.values())))
    if 4 * sets * largest > (FRESH_LIMIT if fresh else there):
        raise BundleError(f"model: has {sets * largest} parameters, more than the bundle's files can hold")


def _parameters(model: models.Model) -> State:
    """A client's parameters as its model needs them, without values."""
    return {name: torch.empty(shape, device="meta") for name, shape in model.shapes.items()}


def _open_federation(folder: Path, manifest: FederationManifest, training: Training[Any]) -> Bundle:
    path = folder / MANIFEST
    try:
        personalizers = {
            name: make_personalizer(name, training, personalizer_class(name).Hyper(**hyper))
            for name, hyper in manifest.personalizers.items()
        }
        needs = needs_of(list(personalizers.values()))
    except (UpflError, ValidationError) as error:
        raise BundleError(f"{path}: personalizers: {_explained(error)}") from error
    if manifest.default not in personalizers:
        raise BundleError(f"{path}: default: {unknown('personalizer', manifest.default, personalizers)}")
    if bool(manifest.members) != training.publishes_memory:
        raise BundleError(f"{path}: members: {manifest.members}, which does not fit {training.name}")
    with torch.device("meta"):
        expected = prefixed("state", training.publish(training.init(generator(0))))
    given = CrossFitted(Published({}, manifest.training.round))
    ranges: dict[str, tuple[float, float]] = {}
    for key, need in needs.items():
        fit = need.stage(given)
        ranges |= {f"fitted.{key}.{name}": limits for name, limits in fit.ranges().items()}
        expected |= prefixed("fitted", fit.results(fit.init(generator(0)))[0])
    tensors = _tensors(folder / WEIGHTS, expected)
    for name, (low, high) in ranges.items():
        if not ((tensors[name] >= low) & (tensors[name] <= high)).all():
            raise BundleError(f"{folder / WEIGHTS}: tensor {name} has values that are not from {low:g} to {high:g}")
    members = _StoredMembers([folder / member_file(i) for i in range(manifest.members)], training)
    for i in range(len(members)):
        members[i]
    published = Published(select(tensors, "state"), manifest.training.round, members, select(tensors, "fitted"))
    return Bundle(manifest, training, published, personalizers)


class _StoredMembers(Sequence[State]):
    """Training clients' own layers, read and checked when they are asked for."""

    def __init__(self, files: list[Path], training: Training[Any]) -> None:
        self.files = files
        with torch.device("meta"):
            shared = training.publish(training.init(generator(0)))
        self.expected = {
            name: value for name, value in prefixed("psi", _parameters(training.model)).items() if name not in shared
        }

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return _tensors(self.files[index], self.expected)


def _open_personal(folder: Path, manifest: PersonalManifest, training: Training[Any]) -> PersonalModel:
    try:
        personalizer_class(manifest.personalizer)
    except UpflError as error:
        raise BundleError(f"{folder / MANIFEST}: {error}") from error
    if manifest.architecture not in training.client_models:
        wrong = unknown("architecture", manifest.architecture, training.client_models)
        raise BundleError(f"{folder / MANIFEST}: {wrong}")
    expected: State = {}
    for i in range(manifest.models):
        expected |= prefixed(str(i), _parameters(training.client_models[manifest.architecture]))
    bias = torch.empty(len(manifest.task.classes), device="meta")
    tensors = _tensors(folder / WEIGHTS, expected, {"bias": bias})
    # In the layout that it had when it was personalized: sums are formed in the same order, to the same bits.
    params = [training.model.layout(select(tensors, str(i))) for i in range(manifest.models)]
    return PersonalModel(manifest, Predictor(training, params, manifest.temperature, tensors.get("bias")))


def _tensors(path: Path, expected: State, optional: Mapping[str, Tensor] = {}) -> State:
    """The tensors of a file, if they are those expected, by name, shape and type."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = json.loads(metadata.get("order", "null"))
            if not isinstance(names, list) or sorted(map(str, names)) != sorted(file.keys()):
                raise BundleError(f"{path}: the order of its tensors is missing or wrong")
            allowed = expected | dict(optional)
            if missing := [name for name in expected if name not in names]:
                raise BundleError(f"{path}: tensor {missing[0]} is missing")
            if extra := [name for name in names if name not in allowed]:
                raise BundleError(f"{path}: tensor {extra[0]} is not one of a bundle like this")
            for name in names:
                shape, wanted = file.get_slice(name).get_shape(), list(allowed[name].shape)
                if shape != wanted:
                    raise BundleError(f"{path}: tensor {name} has the shape {shape} instead of {wanted}")
            tensors = {name: aligned(file.get_tensor(name)) for name in names}
    except (SafetensorError, ValueError, OSError) as error:
        raise BundleError(f"{path}: damaged ({error})") from error
    for name, value in tensors.items():
        if value.dtype != allowed[name].dtype:
            raise BundleError(f"{path}: tensor {name} is of type {value.dtype} instead of {allowed[name].dtype}")
    _check_finite(tensors, str(path))
    return tensors


def _check_finite(state: State, where: str) -> None:
    for name, value in state.items():
        if not value.isfinite().all():
            raise BundleError(f"{where}: tensor {name} has values that are not finite")


# Data


def _samples(x: Images, task: TaskSection) -> Samples:
    if isinstance(x, Samples):
        return x
    if isinstance(x, (str, Path)):
        return load_unlabelled(x, task.input.image, task.input.scale)
    return from_array(x, task.input.image, task.input.scale)


def _probabilities(logits: Tensor) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = logits.double().softmax(1).numpy()
    return probabilities
