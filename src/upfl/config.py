"""What a run is: one validated, complete description, from which the run follows to the bit.

It is put together from, later ones winning: the paper's values for the method and the data set, the profile (the
scale), a configuration file, options, and `key=value` settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from upfl import models
from upfl.data.forms import Tokens
from upfl.data.partition import Partition
from upfl.data.source import Source
from upfl.data.sources import Facts, partition_of, training_clients
from upfl.data.sources import describe as describe_data
from upfl.errors import ConfigError
from upfl.methods import PERSONALIZERS, TRAININGS, personalizer_class, resolve, training_class
from upfl.model_config import ModelConfig as ModelConfig
from upfl.model_config import chosen, own_model
from upfl.safe import parse
from upfl.suggest import unknown

Count = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(gt=0, le=1, strict=True)]
TABLES = ("model", "partition", "training", "personalize")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Config(_Strict):
    """A run, completely described."""

    method: str
    dataset: str
    profile: str = "paper"
    seed: int = Field(0, ge=0, description="initialisation, participation, batches")
    partition_seed: int = Field(0, ge=0, description="who holds which samples")
    rounds: int = Field(ge=1)
    clients_per_round: Count | Fraction | None = Field(None, description="a number or a fraction; all where silent")
    evaluate_every: int = Field(5, ge=1, description="rounds between evaluations; the last round is always evaluated")
    evaluate_clients: int | None = Field(None, ge=1, description="score only the first so many clients of each kind")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    device: str = "cpu"
    vectorize: int = Field(1, ge=1, description="clients trained side by side as one; pays on an accelerator")
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32", description="of matrix products, where the device has a faster way; weights stay float32"
    )
    model: ModelConfig
    partition: Partition
    training: dict[str, Any]
    personalize: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _check_names(self) -> Config:
        training, fixed = self.training_name, dict(self.training)
        if self.model.sizes and not training_class(training).heterogeneous:
            able = [name for name, kind in TRAININGS.items() if kind.heterogeneous]
            raise ValueError(
                f"model.sizes: all clients of {training} have the same model; {', '.join(able)} allow sizes"
            )
        fixed.pop("name", None)
        hyper = validated(training_class(training).Hyper, fixed, "training")
        object.__setattr__(self, "training", {"name": training, **hyper.model_dump(exclude_none=True)})
        personalize = {}
        for name, values in self.personalize.items():
            valid = validated(personalizer_class(name).Hyper, values, f"personalize.{name}")
            personalize[name] = valid.model_dump(exclude_none=True)
        object.__setattr__(self, "personalize", personalize)
        return self

    @property
    def training_name(self) -> str:
        return str(self.training.get("name") or resolve(self.method)[0])

    def training_hyper(self) -> Any:
        values = {key: value for key, value in self.training.items() if key != "name"}
        return training_class(self.training_name).Hyper(**values)

    def personalizer_hyper(self, name: str) -> Any:
        """A personalizer's hyper-parameters: the run's, or the paper's for the data set where the run has it not."""
        values = self.personalize.get(name)
        if values is None:
            values = _personalizer_defaults(_searched(self.dataset), name)
        return personalizer_class(name).Hyper(**values)

    def participants(self, clients: int) -> int:
        """How many of the existing clients take part in a round."""
        return participants(self.clients_per_round, clients)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, path: Path) -> Config:
        return cls.parsed(_content(path), str(path))

    @classmethod
    def parsed(cls, content: bytes, where: str) -> Config:
        """A stored description; `where` names it in errors."""
        config: Config = validated(cls, _toml(content, where), where)
        return config


# The paper's: convolutions of 16 and 32, 32 and 64, 64 and 128 channels.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"width": 0.5, "adaptation": 32},
    "medium": {"width": 1.0, "adaptation": 64},
    "big": {"width": 2.0, "adaptation": 128},
}

PROFILES: dict[str, dict[str, Any]] = {
    "paper": {"evaluate_every": 5},
    "study": {"rounds": 300, "clients_per_round": 20, "evaluate_every": 20, "model": {"width": 0.5}},
    "lite": {"rounds": 40, "clients_per_round": 20, "evaluate_every": 10, "model": {"width": 0.5}},
    "smoke": {
        "rounds": 3,
        "clients_per_round": 4,
        "evaluate_every": 1,
        "evaluate_clients": 4,
        "model": {"width": 0.25, "hidden": 64},
    },
}

PUBLIC = {
    "paper": 0.1,
    "study": 0.1,
    "lite": 0.1,
    "smoke": 0.01,
}  # the public set that clients with different models share
# Training clients with models of their own know their classes from the start: others must choose the round.
HELD_OUT = 0.2
ROUNDS = ("rounds", "clients_per_round", "evaluate_every")  # what a training that asks clients in turn settles itself


# Where the paper has no values: by what the data are. What a run takes is in its config.toml, and `upfl search` looks
# for better ones.
OWN_ROUNDS, OWN_PARTICIPANTS, OWN_SCORED = 100, 100, 1000


def configure(
    method: str,
    dataset: str | Source,
    *,
    profile: str | None = None,
    file: Path | None = None,
    settings: Iterable[str] = (),
    score: Iterable[str] = (),
    **options: Any,
) -> Config:
    """The complete description of a run. Options that are None do not count."""
    facts = describe_data(dataset)
    dataset = facts.name
    from_file = read_toml(file) if file else {}
    for key, asked in (("method", method), ("dataset", dataset)):
        if from_file.get(key, asked) != asked:
            raise ConfigError(f"{file}: {key} is '{from_file[key]}', but '{asked}' was asked for")
    profile = profile or str(from_file.get("profile", "paper"))
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    training, personalizers = resolve(method)
    _check_tables(from_file, str(file))
    scored = dict.fromkeys([*personalizers, *from_file.get("personalize", {}), *score])
    values = _defaults(facts, profile, training, tuple(scored))
    given = {key: value for key, value in options.items() if value is not None}
    asked, by_profile = given.pop("model", None), PROFILES[profile].get("model", {})
    unasked = chosen(values["model"], by_profile, {}, None)
    values["model"] = chosen(values["model"], by_profile, from_file.get("model", {}), asked)
    in_turn = training_class(training).in_turn
    scale = {key: value for key, value in PROFILES[profile].items() if not in_turn or key not in ROUNDS}
    for layer, where in ((scale, "profile"), (from_file, str(file)), (given, "options")):
        _check_tables(layer, where)
        values = _merged(values, {key: value for key, value in layer.items() if key != "model"})
    values = _merged(values, {"method": method, "dataset": dataset, "profile": profile})
    if training_class(training).heterogeneous:
        values["model"].setdefault("sizes", {name: dict(size) for name, size in SIZES.items()})
    if values["training"]["name"] != training:
        raise ConfigError(
            f"{file}: training.name is {values['training']['name']!r}, but {method} trains by '{training}'"
        )
    for setting in settings:
        _set(values, setting)
    if (reason := training_class(training).refuses_models) and (asked or _model_of(values) != unasked):
        raise ConfigError(
            f"{method}: no model can be chosen for it; {reason}. Leave out --model, settings of `model`, and [model]"
        )
    if isinstance(facts.form, Tokens) and "vocabulary" in models.entry(values["model"]["name"]).Hyper.model_fields:
        values["model"].setdefault("vocabulary", facts.form.vocabulary)
    partition = values["partition"] = partition_of(facts).revised(values["partition"])
    clients = training_clients(partition, facts)
    if facts.own:
        _set_own_scale(values, clients, partition.clients - clients, in_turn)
    if in_turn:
        values.setdefault("rounds", rounds_needed(values, clients))
        values.setdefault("evaluate_every", values["rounds"])  # before the last pass there is nothing to score
    config: Config = validated(Config, values, str(file) if file else "the configuration")
    return config


def _model_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the model, as it would be without a word on sizes where there are none."""
    return {key: value for key, value in values["model"].items() if (key, value) != ("sizes", {})}


def rounds_needed(values: Mapping[str, Any], clients: int) -> int:
    """How many rounds a training takes that asks so many training clients in turn; others may stop at any round."""
    kind, asked = training_class(values["training"]["name"]), values.get("clients_per_round")
    hyper = validated(
        kind.Hyper, {key: value for key, value in values["training"].items() if key != "name"}, "training"
    )
    return kind.passes(hyper) * -(-clients // participants(asked, clients))


def _set_own_scale(values: dict[str, Any], training: int, new: int, in_turn: bool) -> None:
    """A run's scale on data of one's own, where nothing is said: many clients are asked and scored in part."""
    if training > OWN_PARTICIPANTS and not in_turn:
        values.setdefault("clients_per_round", OWN_PARTICIPANTS)
    if max(training, new) > OWN_SCORED:
        values.setdefault("evaluate_clients", OWN_SCORED)


def participants(asked: float | None, clients: int) -> int:
    """How many of the existing clients take part in a round: a number or a fraction of them, or all."""
    if asked is None:
        return clients
    return min(asked, clients) if isinstance(asked, int) else max(1, round(asked * clients))


def read_toml(path: Path) -> dict[str, Any]:
    return _toml(_content(path), str(path))


def _content(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _toml(content: bytes, where: str) -> dict[str, Any]:
    try:
        return parse.read_toml(content)
    except ValueError as error:
        raise ConfigError(f"{where}: not a TOML file: {error}") from error


@cache
def paper() -> dict[str, Any]:
    """The paper's values, as shipped."""
    return tomllib.loads(resources.files("upfl").joinpath("paper.toml").read_text(encoding="utf-8"))


def paper_model(dataset: str) -> ModelConfig:
    """The paper's prediction model for a data set."""
    if dataset in ("digits", "mnist"):
        return ModelConfig(name="mlp", hidden=200)
    return ModelConfig(name="convnet", hidden=2048 if dataset == "femnist" else 512)


def _defaults(facts: Facts, profile: str, training: str, personalizers: tuple[str, ...]) -> dict[str, Any]:
    dataset, searched = facts.name, _searched(facts.name)
    for name in personalizers:
        personalizer_class(name)
    return {
        **({} if training_class(training).in_turn else {"rounds": paper()["rounds"].get(dataset, OWN_ROUNDS)}),
        "model": (own_model(facts.form) if facts.own else paper_model(dataset)).model_dump(exclude={"sizes"}),
        "partition": {"public": PUBLIC[profile], "held_out": HELD_OUT}
        if training_class(training).heterogeneous
        else {},
        "training": {"name": training, **searched.get(training, {})},
        "personalize": {name: _personalizer_defaults(searched, name) for name in personalizers},
    }


def _searched(dataset: str) -> dict[str, Any]:
    """What the paper searched for a data set; digits takes MNIST's values, but for what is its own."""
    return paper()["mnist"] | paper()["digits"] if dataset == "digits" else dict(paper().get(dataset, {}))


def _personalizer_defaults(searched: Mapping[str, Any], name: str) -> dict[str, Any]:
    base, plus, last = name.rpartition("+")
    own = dict(searched.get(personalizer_class(last).takes_settings_of or last, {}))
    return own | {"base": _personalizer_defaults(searched, base)} if plus and base != "none" else own


def _merged(values: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in layer.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _check_tables(layer: Mapping[str, Any], where: str) -> None:
    for name in TABLES:
        if not isinstance(layer.get(name, {}), Mapping):
            raise ConfigError(f"{where}: {name} is a table, not {layer[name]!r}")
    for name, table in layer.get("personalize", {}).items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: personalize.{name} is a table, not {table!r}")


def listed(text: str | None) -> list[str]:
    """The names in a comma-separated text, each once."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:  # not TOML, or a number that Python refuses to read
        return text  # a bare word is a string


def _set(values: dict[str, Any], setting: str) -> None:
    """Apply `key=value`: a field of the run, `model.width`, `partition.clients`, or any hyper-parameter by its name."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting}: write key=value, for example inner_lr=0.3 or partition.clients=40")
    value = toml_value(text)
    *path, last = key.split(".")
    if key in ("method", "dataset", "profile", "training.name", *TABLES) or key == "personalize":
        raise ConfigError(f"--set {setting}: {key} cannot be set so: give it as an argument, or set one of its fields")
    if path:
        if path[0] in values["personalize"] or path[0] in PERSONALIZERS:
            path = ["personalize", *path]
        target, known = values, [*TABLES, *PERSONALIZERS]
        for part in path:
            target = target.get(part)  # type: ignore[assignment]
            if not isinstance(target, dict):
                raise unknown("table", part, known)
            known = [name for name, value in target.items() if isinstance(value, dict)] or known
        target[last] = value
        return
    places: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (TRAININGS[values["training"]["name"]].Hyper, values["training"]),
        *((personalizer_class(name).Hyper, table) for name, table in values["personalize"].items()),
    ]
    holders = [table for hyper, table in places if last in hyper.model_fields]
    if holders:
        holders[0][last] = value
    elif last in Config.model_fields:
        values[last] = value
    else:
        valid = [name for hyper, _ in places for name in hyper.model_fields]
        raise unknown("setting", last, dict.fromkeys([*valid, *Config.model_fields]))


def validated(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A model of these values; what does not fit is named, with `where` it stands."""
    try:
        return kind(**values)
    except ValidationError as error:
        lines = [f"{where}: {len(error.errors())} value(s) do not fit"]
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"]) or "(whole)"
            given = "" if item["type"] in ("missing", "value_error") else f" (given: {item['input']!r})"
            if item["type"] == "extra_forbidden":
                lines.append(f"  {unknown('field', field, _fields(kind, item['loc']))}")
            else:
                lines.append(f"  {field}: {item['msg']}{given}")
        raise ConfigError("\n".join(lines)) from None


def _fields(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The fields that there are in the place of one that there is not."""
    for part in path[:-1]:
        if str(part) not in kind.model_fields:
            continue  # a name of the user's own, in a table of tables
        annotation: Any = kind.model_fields[str(part)].annotation
        annotation = get_args(annotation)[-1] if get_origin(annotation) is dict else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        kind = annotation
    prefix = ".".join(str(part) for part in path[:-1])
    return [f"{prefix}.{name}" if prefix else name for name in kind.model_fields]
