"""Which model a run trains: a registered name with its options, as `[model]` of a configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from upfl import models
from upfl.contract import Architecture
from upfl.data.forms import Form, Pixels, Tokens
from upfl.errors import ConfigError
from upfl.suggest import unknown


class _Options(BaseModel):
    """A name, and whatever options the model of that name has."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class SizeConfig(_Options):
    """One of the models of a federation whose clients differ: the prediction model, but for what is said here."""

    name: str | None = None
    width: float = Field(1.0, gt=0, description="factor on the model's width: the MLP's hidden units, or channels")
    adaptation: int | None = Field(None, ge=1, description="hidden units of g; the training's where silent")


class ModelConfig(_Options):
    """The prediction model: a registered name, and its options.

    Where clients differ in their models, `sizes` has these by name; each client has one of them, all equally likely.
    """

    name: str
    sizes: dict[str, SizeConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        try:
            known = models.entry(self.name)
        except ConfigError as error:
            raise ValueError(f"model.name: {error}") from error
        _check_names("model", known, self.options)
        extra = known.options(self.options).model_dump(exclude_none=True)
        object.__setattr__(self, "__pydantic_extra__", extra)
        for name, size in self.sizes.items():
            where = f"model.sizes.{name}"
            try:
                _check_names(where, models.entry(size.name or self.name), size.options, ("width", "adaptation"))
                entry, options = self._of(size)
                entry.options(options)
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(f"{where}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
            except ConfigError as error:
                raise ValueError(str(error) if str(error).startswith("unknown") else f"{where}: {error}") from error
        return self

    def _of(self, size: SizeConfig | None) -> tuple[models.Entry, dict[str, Any]]:
        """The model, or that of a size, and its options: what a size does not say is the prediction model's."""
        if size is None:
            return models.entry(self.name), self.options
        entry = models.entry(size.name or self.name)
        options = {key: value for key, value in self.options.items() if key in entry.Hyper.model_fields} | size.options
        return entry, options if size.width == 1 else entry.scaled(options, size.width)

    def build(self, shape: tuple[int, ...], classes: int, size: SizeConfig | None = None) -> models.Model:
        """The model, or that of a size."""
        entry, options = self._of(size)
        return entry.make(shape, classes, options)

    def architectures(self, shape: tuple[int, ...], classes: int) -> dict[str, Architecture]:
        return {
            name: Architecture(self.build(shape, classes, size), size.adaptation) for name, size in self.sizes.items()
        }


def own_model(form: Form) -> ModelConfig:
    """The model for data of one's own where none is named."""
    if isinstance(form, Tokens):
        return ModelConfig(name="embedding", vocabulary=form.vocabulary)
    if isinstance(form, Pixels) and min(form.shape[1:]) >= 16:
        return ModelConfig(name="convnet", hidden=512)
    return ModelConfig(name="mlp", hidden=200)


def chosen(
    default: Mapping[str, Any], profile: Mapping[str, Any], file: Mapping[str, Any], given: Any
) -> dict[str, Any]:
    """The `[model]` table that a configuration starts from, later ones winning.

    Options belong to a model: those of another one than is asked for in the end do not count, and a profile's count as
    far as the model has them.
    """
    table = given if isinstance(given, Mapping) else {} if given is None else {"name": models.named(given)}
    name = str(table.get("name") or file.get("name") or default["name"])
    fields = models.entry(name).Hyper.model_fields
    values: dict[str, Any] = dict(default) if default["name"] == name else {"name": name}
    values |= {key: value for key, value in profile.items() if key in fields}
    values |= file if file.get("name", name) == name else {}
    return values | dict(table)


def _check_names(where: str, entry: models.Entry, given: Mapping[str, Any], further: tuple[str, ...] = ()) -> None:
    fields = entry.Hyper.model_fields
    others = [key for key in given if key not in fields]
    if others and entry.Hyper.model_config.get("extra") != "allow":
        valid = dict.fromkeys(f"{where}.{key}" for key in ("name", *further, *fields))
        raise ConfigError(f"model '{entry.name}': {unknown('option', f'{where}.{others[0]}', valid)}")
