"""Models by name: the built-in ones, and those that a user registers.

    upfl.models.register("my-net", MyNet)                     a class or a function: MyNet(shape, classes, **options)

A factory takes the shape of a sample and the number of classes, and gives a `torch.nn.Module`. Its further parameters
are the model's options; `Hyper`, a pydantic model, may check them. A run names the model and its options, and so does a
bundle. Neither causes an import: `module:Factory` is looked up in modules that the user has named (`upfl.plugins`), and
in no others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import nn

from upfl import plugins
from upfl.errors import ConfigError
from upfl.models.base import Model
from upfl.models.module import Module
from upfl.suggest import unknown

OWN = (
    "One of your own is made known by --plugin MODULE or UPFL_PLUGINS=MODULE, of a module that registers it, "
    "or in Python by upfl.models.register('{name}', FACTORY)"
)
Shape = tuple[int, ...]
Factory = Callable[..., nn.Module | Model]


class Options(BaseModel):
    """What a model can be told beside its input and its classes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Entry:
    """A registered model."""

    name: str
    factory: Factory
    Hyper: type[BaseModel]

    def options(self, given: Mapping[str, Any]) -> BaseModel:
        """The options, checked and complete."""
        return self.Hyper(**given)

    def scaled(self, given: Mapping[str, Any], factor: float) -> dict[str, Any]:
        """The options of the same model, so many times as wide."""
        options: Any = self.options(given)
        if not hasattr(options, "scaled"):
            raise ConfigError(f"model '{self.name}' has no width to be scaled")
        wide: BaseModel = options.scaled(factor)
        return wide.model_dump()

    def size(self, shape: Shape, classes: int, given: Mapping[str, Any]) -> int | None:
        """How many values it would have, without making them; None where that cannot be known."""
        options = self.options(given).model_dump(exclude_none=True)
        try:
            with torch.device("meta"):
                found: Any = self.factory(shape, classes, **options)
        except Exception:  # a factory that computes with what it makes; it will be asked again for real
            return None
        if isinstance(found, nn.Module):
            return sum(value.numel() for value in (*found.parameters(), *found.buffers()))
        return int(found.size)

    def make(self, shape: Shape, classes: int, given: Mapping[str, Any]) -> Model:
        options = self.options(given).model_dump(exclude_none=True)

        def make() -> nn.Module | Model:
            try:
                return self.factory(shape, classes, **options)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call, not the code
                    raise ConfigError(
                        f"model '{self.name}': {error}; a factory takes the shape of a sample, such as {shape}, "
                        "and the number of classes"
                    ) from error
                raise

        found = make()
        if not isinstance(found, nn.Module) and hasattr(found, "trace"):
            return found
        return Module(make, shape, classes, {"name": self.name, "options": options})  # type: ignore[arg-type]


_ENTRIES: dict[str, Entry] = {}


def register(name: str, factory: Factory, Hyper: type[BaseModel] | None = None) -> None:
    """Enter a model of one's own. Worker processes import the module that the factory is defined in."""
    if not re.fullmatch(r"[\w.:+-]+", name):
        raise ConfigError(f"model name {name!r}: letters, digits and - . : + _ only")
    module = getattr(factory, "__module__", None) or "__main__"
    _ENTRIES[name] = Entry(name, factory, Hyper or _options_of(name, factory))
    if not module.startswith("upfl."):
        plugins.note(module)


def names() -> list[str]:
    return list(_ENTRIES)


def entry(name: str) -> Entry:
    """A registered model, or `module:Factory` where the user has named the module."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    module, colon, path = name.partition(":")
    if not colon:
        raise unknown("model", name, _ENTRIES, OWN.format(name=name))
    if (found := plugins.named(module)) is None:
        raise ConfigError(
            f"model '{name}' is not known here, and no file makes upfl import a module: name it yourself, by "
            f"--plugin {module} or UPFL_PLUGINS={module}, or in Python by upfl.models.register('{name}', FACTORY)"
        )
    factory: Any = found
    for part in path.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise ConfigError(f"model '{name}': module {module} has no class or function '{path}'")
    register(name, factory)
    return _ENTRIES[name]


def named(model: object) -> str:
    """The name of a model that is given as a name, a class or a function; the latter are registered."""
    if isinstance(model, str):
        return model
    for name, known in _ENTRIES.items():
        if known.factory is model:
            return name
    place = f"{getattr(model, '__module__', '')}:{getattr(model, '__qualname__', '<')}"
    if not callable(model) or isinstance(model, nn.Module) or "<" in place:
        raise ConfigError(
            f"model={model!r}: give a name, a class, or a function with a name of its own that takes the shape of a "
            "sample and the number of classes; upfl.models.register(NAME, FACTORY) takes any other"
        )
    register(place, model)
    return place


def load(name: str) -> str:
    """A name from the command line: the module before a colon is one that the user has named."""
    module, colon, _ = name.partition(":")
    if colon and name not in _ENTRIES:
        plugins.load([module])
    return name


def _options_of(name: str, factory: Factory) -> type[BaseModel]:
    """A factory's parameters but the first two, as options: those with a default may be left out."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    fields: dict[str, Any] = {}
    further = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)][2:]
    for one in further:
        fields[one.name] = (Any, ... if one.default is one.empty else one.default)
    free = any(one.kind is one.VAR_KEYWORD for one in parameters)
    extra: Any = ConfigDict(extra="allow" if free else "forbid", frozen=True)
    try:
        return create_model(f"{name} options", __config__=extra, **fields)
    except (NameError, ValidationError) as error:  # a name that pydantic keeps for itself
        raise ConfigError(f"model '{name}': its options cannot be read from its signature: {error}") from error
