"""From a bundle's folder to a bundle, with nothing taken on trust.

Counts and sizes are compared before anything is made of them: members with the checksums that there are, models with
the files that hold them, a model's work on one image with a limit; tensors, by their header, with what the training and
its personalizers would have (made on the meta device, where they take no memory).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from upfl import models
from upfl.bundle.manifest import (
    MANIFEST,
    SCHEMA,
    SUMS,
    WEIGHTS,
    WIDTH,
    FederationManifest,
    Manifest,
    ModelSection,
    NamedSection,
    PersonalManifest,
    member_file,
)
from upfl.contract import (
    Architecture,
    CrossFitted,
    Personalizer,
    Predictor,
    Published,
    Task,
    Training,
    needs_of,
)
from upfl.data.forms import Pixels
from upfl.errors import BundleError, ConfigError, UpflError
from upfl.methods import make_personalizer, make_training, personalizer_class, training_class
from upfl.models.patches import Patches
from upfl.models.projections import Projections
from upfl.personalize import likeness
from upfl.personalize.likeness import LikenessCheck
from upfl.randomness import generator
from upfl.safe import tensors as stored
from upfl.safe.archive import Unpacked
from upfl.safe.folder import Folder, expanded
from upfl.safe.limits import exceeded, limit, variable
from upfl.safe.parse import read_json
from upfl.state import State, prefixed, select
from upfl.suggest import unknown

Shapes = Mapping[str, Tensor]
NOTHING: Shapes = {}


class FederationParts(NamedTuple):
    manifest: FederationManifest
    training: Training[Any]
    published: Published
    personalizers: dict[str, Personalizer[Any]]


class PersonalParts(NamedTuple):
    manifest: PersonalManifest
    predictor: Predictor
    known: State


def read(path: str | Path) -> FederationParts | PersonalParts:
    """What either kind of bundle, a folder or a .zip of one, is made of."""
    where = expanded(path)
    if not where.is_file():
        return _read(Folder(where, BundleError, BundleError))
    folder = Unpacked(where, BundleError)
    try:
        return _read(folder)
    except BundleError as error:
        raise BundleError(str(error).replace(str(folder.path), str(where))) from error


def _read(folder: Folder) -> FederationParts | PersonalParts:
    if not folder.path.is_dir():
        raise BundleError(f"{folder.path}: is not a bundle's folder")
    if not any(folder.exists(name) for name in (MANIFEST, SUMS)):
        run = folder.exists("config.toml")
        instead = f"a run's folder: `upfl export {folder.path} -o BUNDLE` makes a bundle of it" if run else "no bundle"
        raise BundleError(f"{folder.path}: is {instead} (there is no {MANIFEST})")
    sums = _read_sums(folder)
    manifest = _read_manifest(folder, sums)
    if isinstance(manifest, FederationManifest) and manifest.members > len(sums):
        raise BundleError(
            f"{folder.path / SUMS}: {len(sums)} files are named, and {manifest.members} members announced"
        )
    for name in manifest.files():
        _check_sum(folder, name, sums)
    if extra := sorted(sums.keys() - set(manifest.files())):
        raise BundleError(f"{folder.path / SUMS}: names {extra[0]}, which is no part of such a bundle")
    training = _make_training(folder, manifest)
    if isinstance(manifest, FederationManifest):
        return _open_federation(folder, manifest, training)
    assert isinstance(manifest, PersonalManifest)
    return _open_personal(folder, manifest, training)


# Checksums and manifest


def _read_sums(folder: Folder) -> dict[str, str]:
    sums: dict[str, str] = {}
    for line in folder.read(SUMS, "MANIFEST").split(b"\n")[:-1]:
        match = re.fullmatch(rb"([0-9a-f]{64})  ([\w./-]+)", line)
        if not match:
            raise BundleError(f"{folder.path / SUMS}: damaged")
        sums[match[2].decode()] = match[1].decode()
    return sums


def digest(folder: Folder, name: str) -> str:
    with folder.opened(name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _check_sum(folder: Folder, name: str, sums: Mapping[str, str]) -> None:
    kind = "FILE" if name.endswith(".safetensors") else "MANIFEST"
    if (size := folder.size(name)) > limit(kind):
        raise BundleError(f"{folder.path / name}: too large: {exceeded(kind, size)}")
    if sums.get(name) != digest(folder, name):
        path = folder.path / name
        raise BundleError(f"{path}: does not have its checksum in {SUMS}: damaged or changed; get the bundle anew")


def _read_manifest(folder: Folder, sums: Mapping[str, str]) -> Manifest:
    path = folder.path / MANIFEST
    _check_sum(folder, MANIFEST, sums)
    content = folder.read(MANIFEST, "MANIFEST")
    try:
        document = read_json(content)
    except ValueError as error:
        raise BundleError(f"{path}: is not JSON ({error})") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is not int or version != SCHEMA:
        raise BundleError(f"{path}: its schema_version is {version!r:.80}, and this version of upfl reads {SCHEMA}")
    kinds: dict[str, type[Manifest]] = {"federation": FederationManifest, "personal": PersonalManifest}
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise BundleError(f"{path}: its kind is {kind!r:.80}, and should be {' or '.join(kinds)}")
    try:
        return kinds[kind].model_validate_json(content)
    except ValidationError as error:
        raise BundleError(f"{path}: {_explained(error)}") from None


def _explained(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))
    return f"{place or '(whole)'}: {first['msg']}"


# The training and its models


def _make_training(folder: Folder, manifest: Manifest) -> Training[Any]:
    path, section, classes = folder.path / MANIFEST, manifest.training, len(manifest.task.classes)
    public = manifest.public if isinstance(manifest, FederationManifest) else 1
    try:
        kind = training_class(section.name)
        architectures = {
            name: Architecture(_model(one.layers, folder, manifest), one.adaptation_width)
            for name, one in manifest.architectures.items()
        }
        task = Task(
            _model(manifest.model, folder, manifest),
            classes,
            section.clients,
            architectures,
            # Newcomers learn from the samples among what is published; here their number is enough.
            torch.empty(public, *manifest.task.input.shape, device="meta") if kind.heterogeneous else None,
            images=isinstance(manifest.task.input, Pixels),
        )
        if not kind.heterogeneous and isinstance(manifest, FederationManifest) and public:
            raise BundleError(f"public: {public} samples, and {kind.name} has no public set")
        _check_size(folder, manifest, task, kind.heterogeneous)
        training = make_training(section.name, task, kind.Hyper(**section.hyper))
        if getattr(training.hyper, "adaptation_width", 1) > WIDTH:
            raise BundleError(f"hyper.adaptation_width: at most {WIDTH} is taken from a bundle")
    except (UpflError, ValidationError, AssertionError, RuntimeError, OverflowError) as error:
        hint = (
            "; a method or a model of your own is made known by --plugin or UPFL_PLUGINS"
            if isinstance(error, ConfigError) and "UPFL_PLUGINS" not in str(error)
            else ""
        )
        raise BundleError(f"{path}: training: {_explained(error)}{hint}") from error
    image = manifest.task.input.shape
    for model in training.client_models.values():
        if isinstance(model, models.Layered):
            _check_work(model, image, path)
        try:  # for real: on the meta device this would import a second's worth of torch
            zeros = {name: torch.zeros(value.shape) for name, value in _parameters(model).items()}
            logits = training.logits(zeros, manifest.task.input.example(2))
        except (RuntimeError, IndexError, KeyError) as error:
            raise BundleError(
                f"{path}: the model does not take {manifest.task.input.noun} of shape {list(image)} ({error})"
            ) from error
        if logits.shape != (2, classes):
            raise BundleError(f"{path}: the model tells {logits.shape[-1]} classes apart, and {classes} are named")
    return training


def _model(section: ModelSection, folder: Folder, manifest: Manifest) -> models.Model:
    if isinstance(section, NamedSection):
        return _registered(section, folder, manifest)
    model = models.described(layer.model_dump(exclude_none=True) for layer in section)
    names = [name for layer in model.layers for name in layer.shapes()]
    if not names or len(set(names)) < len(names):
        raise BundleError("model: no layer has parameters, or two have the same name")
    return model


def _registered(section: NamedSection, folder: Folder, manifest: Manifest) -> models.Model:
    """A model that is registered here; it is made after its size is known to fit, where that can be known."""
    known, shape, classes = models.entry(section.name), manifest.task.input.shape, len(manifest.task.classes)
    size = known.size(shape, classes, section.options)
    there = max(sum(folder.size(name) for name in manifest.files()), limit("MODEL") if manifest.architectures else 0)
    if size is not None and 4 * size > there:
        raise BundleError(f"model: '{section.name}' has {size} parameters, more than the bundle's files can hold")
    return known.make(shape, classes, section.options)


def _check_size(folder: Folder, manifest: Manifest, task: Task, fresh: bool) -> None:
    """Refuse models that are larger than the bundle's files can hold, or than anything where newcomers start afresh."""
    sets = manifest.models if isinstance(manifest, PersonalManifest) else 1
    largest = max(model.size for model in (task.model, *(one.model for one in task.architectures.values())))
    if not fresh and 4 * sets * largest > sum(folder.size(name) for name in manifest.files()):
        raise BundleError(f"model: has {sets * largest} parameters, more than the bundle's files can hold")
    if fresh and 4 * sets * largest > limit("MODEL"):
        raise BundleError(f"model: has {sets * largest} parameters: {exceeded('MODEL', 4 * sets * largest)}")


def _check_work(model: models.Layered, image: Sequence[int], path: Path) -> None:
    """Refuse a model that would take much memory or time for an image, by arithmetic alone."""
    shape, values, products = tuple(image), math.prod(image), 0
    for layer in model.layers:
        match layer:
            case models.Conv():
                full = layer.outputs * math.prod(shape[1:])
                products += 25 * layer.inputs * full
                values += full
                shape = (layer.outputs, *(side // 2 for side in shape[1:]))
            case Patches():
                values += math.prod(shape[1:]) * layer.size
                products += math.prod(shape[1:]) * layer.size * layer.outputs * (1 + layer.mirror)
                shape = (layer.features,)
            case Projections():
                products += layer.inputs * layer.outputs
                shape = (layer.features,)
            case models.Linear():
                shape = (*shape[:-1], layer.outputs)
                products += layer.inputs * math.prod(shape)
            case models.Flatten():
                shape = (math.prod(shape),)
        values += math.prod(shape)
        if 8 * values > limit("MODEL") or products > 32 * limit("MODEL"):
            raise BundleError(
                f"{path}: model: an image takes {values} values and {products} products on its way through the model, "
                f"more than a bundle's should; if you trust it, {variable('MODEL')}=... raises this limit"
            )


def _parameters(model: models.Model) -> State:
    """A client's parameters as its model needs them, without values."""
    return {name: torch.empty(shape, device="meta") for name, shape in (model.shapes | model.buffers).items()}


# Tensors


def _open_federation(folder: Folder, manifest: FederationManifest, training: Training[Any]) -> FederationParts:
    path, weights = folder.path / MANIFEST, folder.path / WEIGHTS
    try:
        personalizers = {
            name: make_personalizer(name, training, personalizer_class(name).Hyper(**hyper))
            for name, hyper in manifest.personalizers.items()
        }
        check = [LikenessCheck(training)] if likeness.KEY in manifest.fitted else []
        needs = needs_of([*personalizers.values(), *check])
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
    tensors = _tensors(folder, WEIGHTS, expected)
    fitted = {name.removeprefix("fitted.").rpartition(".")[0] for name in expected if name.startswith("fitted.")}
    if set(manifest.fitted) != fitted:
        raise BundleError(f"{path}: fitted: it names {manifest.fitted}, and holds {tuple(sorted(fitted))}")
    for name, (low, high) in ranges.items():
        if not ((tensors[name] >= low) & (tensors[name] <= high)).all():
            raise BundleError(f"{weights}: tensor {name} has values that are not from {low:g} to {high:g}")
    members = _StoredMembers(folder, manifest.members, training)
    for i in range(len(members)):
        members[i]
    published = Published(select(tensors, "state"), manifest.training.round, members, select(tensors, "fitted"))
    return FederationParts(manifest, training, published, personalizers)


class _StoredMembers(Sequence[State]):
    """Training clients' own layers, read and checked when they are asked for."""

    def __init__(self, folder: Folder, count: int, training: Training[Any]) -> None:
        self.folder, self.members = folder, range(count)
        with torch.device("meta"):
            shared = training.publish(training.init(generator(0)))
        self.expected = {
            name: value for name, value in prefixed("psi", _parameters(training.model)).items() if name not in shared
        }

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        return _tensors(self.folder, member_file(self.members[index]), self.expected)


def _open_personal(folder: Folder, manifest: PersonalManifest, training: Training[Any]) -> PersonalParts:
    path = folder.path / MANIFEST
    try:
        personalizer_class(manifest.personalizer)
    except UpflError as error:
        raise BundleError(f"{path}: {error}") from error
    if manifest.architecture not in training.client_models:
        raise BundleError(f"{path}: {unknown('architecture', manifest.architecture, training.client_models)}")
    model = training.client_models[manifest.architecture]
    if 4 * manifest.models > folder.size(WEIGHTS):
        raise BundleError(f"{path}: models: {manifest.models}, more than {WEIGHTS} can hold")
    expected: State = {}
    for i in range(manifest.models):
        expected |= prefixed(str(i), _parameters(model))
    expected |= prefixed("likeness", likeness.expected(len(manifest.task.classes), manifest.checked))
    bias = torch.empty(len(manifest.task.classes), device="meta")
    tensors = _tensors(folder, WEIGHTS, expected, {"bias": bias})
    # In the layout that it had when it was personalized: sums are formed in the same order, to the same bits.
    params = [training.model.layout(select(tensors, str(i))) for i in range(manifest.models)]
    predictor = Predictor(training, params, manifest.temperature, tensors.get("bias"))
    return PersonalParts(manifest, predictor, select(tensors, "likeness"))


def _tensors(folder: Folder, name: str, expected: Shapes, optional: Shapes = NOTHING) -> State:
    """The tensors of a file, if they are those expected, by name, shape and type."""
    path, allowed = folder.path / name, {**expected, **optional}

    def check(header: stored.Header) -> None:
        found = header.tensors
        if header.metadata.keys() != {"order"}:
            raise BundleError(f"{path}: the order of its tensors is missing, or there is more than that")
        if missing := [key for key in expected if key not in found]:
            raise BundleError(f"{path}: tensor {missing[0]} is missing")
        if extra := [key for key in found if key not in allowed]:
            raise BundleError(f"{path}: tensor {extra[0]} is not one of a bundle like this")
        for key, place in found.items():
            wanted = allowed[key]
            if place.shape != tuple(wanted.shape):
                raise BundleError(
                    f"{path}: tensor {key} has the shape {list(place.shape)} instead of {list(wanted.shape)}"
                )
            if place.dtype != wanted.dtype:
                raise BundleError(f"{path}: tensor {key} is of type {place.dtype} instead of {wanted.dtype}")

    tensors = stored.load(folder, name, check)[0]
    check_finite(tensors, str(path))
    return tensors


def check_finite(state: State, where: str) -> None:
    for name, value in state.items():
        if not value.isfinite().all():
            raise BundleError(f"{where}: tensor {name} has values that are not finite")
