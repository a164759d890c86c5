"""Any torch.nn.Module as a model.

A module's parameters are taken out of it and given back at every call (`torch.func.functional_call`), so that it is a
pure function of them like any other model here. What it is made of, and what would not work, see `inspection.py`.

Buffers that are floats and persistent (BatchNorm's running statistics), and parameters that are frozen, belong to the
state under `buffers.`: the server averages them with the parameters, no step moves them. Integers (how many batches a
layer has seen) and buffers that are not persistent stay in the module as they were made.

    apply       evaluation mode: running statistics, no dropout
    learning    training mode: the batch's statistics, which move the running ones; dropout, by the default generator
    batchwise   evaluation mode, but normalised by the statistics of x, which is one batch
    trace       the derivatives of `learning`

Settled: a batch of one sample has no statistics; the running ones serve. A trace updates running statistics once, at
the parameters that it is given, not at those that are `moved`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from upfl.models import inspection
from upfl.models.autograd import AutogradTrace
from upfl.models.base import Kind
from upfl.models.factored import Shapes
from upfl.models.layered import Layered
from upfl.models.layers import Linear
from upfl.randomness import default_generator, generator
from upfl.state import BUFFERS, State

Mode = Literal["evaluate", "learn", "batchwise"]


class Functional(ABC):
    """A model whose derivatives are autograd's. Subclasses say what it computes."""

    records = False
    vectorizes = False
    head: str | None
    random: bool
    shapes: Shapes
    buffers: Shapes
    kinds: Mapping[str, Kind]

    @abstractmethod
    def run(self, params: State, x: Tensor, mode: Mode) -> Tensor:
        """The logits of x."""

    @abstractmethod
    def init(self, generator: torch.Generator) -> State: ...

    @abstractmethod
    def features(self, params: State, x: Tensor) -> Tensor: ...

    @abstractmethod
    def observed(self, params: State, x: Tensor) -> State: ...

    @abstractmethod
    def why_not_twice(self) -> str | None: ...

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in (*self.shapes.values(), *self.buffers.values()))

    def apply(self, params: State, x: Tensor) -> Tensor:
        return self.run(params, x, "evaluate")

    def learning(self, params: State, x: Tensor) -> Tensor:
        return self.run(params, x, "learn")

    def batchwise(self, params: State, x: Tensor) -> Tensor:
        return self.run(params, x, "batchwise")

    def trace(self, params: State, x: Tensor) -> AutogradTrace:
        x = x.clone() if x.is_inference() else x
        return AutogradTrace(lambda params: self.run(params, x, "learn"), params)

    def layout(self, params: State) -> State:
        return params


class Module(Functional):
    """A module that a factory makes, for inputs of a shape and a number of classes."""

    def __init__(
        self, make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, description: Mapping[str, Any]
    ) -> None:
        self._make, self._shape, self._description = make, shape, dict(description)
        with default_generator("module", "skeleton"), torch.inference_mode(False), torch.enable_grad():
            self._net = make()
            inspection.checked(str(description["name"]), self._net, self._example(), classes)
            self.random = inspection.draws(self._net, self._example())
            self._net.eval()
            self.head = inspection.head(self._net, self._example())
        state = self._state(self._net)
        self.shapes = {name: tuple(value.shape) for name, value in state.items() if not name.startswith(BUFFERS)}
        self.buffers = {name: tuple(value.shape) for name, value in state.items() if name.startswith(BUFFERS)}
        self.kinds = inspection.kinds(self._net)
        self._norms = inspection.batch_norms(self._net)
        self._mode, self._device = "", torch.device("cpu")

    def init(self, generator: torch.Generator) -> State:
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        if torch.empty(0).device.type == "meta":  # who asks for names, shapes and types alone
            return {name: torch.empty(shape) for name, shape in (self.shapes | self.buffers).items()}
        with default_generator("init", seed):
            return {name: value.detach().clone().contiguous() for name, value in self._state(self._make()).items()}

    def _state(self, net: nn.Module) -> State:
        stored = {name: one for name, one in net.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
        still = {name: value for name, value in stored.items() if not value.requires_grad and value.is_floating_point()}
        moving = {name: value for name, value in net.named_parameters() if value.requires_grad}
        return moving | {f"{BUFFERS}{name}": value for name, value in still.items()}

    def run(self, params: State, x: Tensor, mode: Mode) -> Tensor:
        return self._call(params, x, mode)

    def _call(self, params: State, x: Tensor, mode: Mode, without: str | None = None) -> Tensor:
        self._prepare("single" if mode != "evaluate" and len(x) == 1 else mode, mode == "learn", x.device)
        given = {name: params[name] for name in self.shapes if without is None or not name.startswith(f"{without}.")}
        for name in self.buffers:
            value = params[name]
            given[name.removeprefix(BUFFERS)] = value.clone() if mode == "batchwise" else value
        logits: Tensor = functional_call(self._net, given, (_channels_first(x),), tie_weights=False)
        return logits

    def _prepare(self, mode: str, learns: bool, device: torch.device) -> None:
        """Put the module, and all that is in it, into a mode, on a device."""
        wanted = f"{mode} {learns}"
        if wanted != self._mode:
            self._net.train(learns)
            for norm in self._norms.values():
                norm.train(mode in ("learn", "batchwise"))
            self._mode = wanted
        if device != self._device:  # what is not part of the state
            self._net.to(device)
            self._device = device

    def features(self, params: State, x: Tensor) -> Tensor:
        return self.read_by_head(params, x, "evaluate")

    def read_by_head(self, params: State, x: Tensor, mode: Mode) -> Tensor:
        """What the head reads; the head's own parameters need not be there."""
        if self.head is None:
            return self.run(params, x, mode)

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _ReadError(args[0])

        hook = self._net.get_submodule(self.head).register_forward_pre_hook(stop)
        try:
            self._call(params, x, mode, without=self.head)
        except _ReadError as read:
            return read.features
        finally:
            hook.remove()
        raise AssertionError(f"'{self.head}' was not called")

    def observed(self, params: State, x: Tensor) -> State:
        """The parameters with running statistics that are those of x: `apply` on x is then `batchwise`."""
        if not self._norms or len(x) < 2:
            return params
        found: State = {}

        def look(name: str, rows: Tensor) -> None:
            over = [i for i in range(rows.dim()) if i != 1]
            var, mean = torch.var_mean(rows.detach(), over, correction=0)
            found[f"{BUFFERS}{name}.running_mean"], found[f"{BUFFERS}{name}.running_var"] = mean, var

        hooks = [
            norm.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
            for name, norm in self._norms.items()
        ]
        try:
            with torch.no_grad():
                self.read_by_head(params, x, "batchwise")
        finally:
            for hook in hooks:
                hook.remove()
        return params | {name: found[name] for name in self.buffers if name in found}

    def describe(self) -> dict[str, Any]:
        return dict(self._description)

    def why_not_twice(self) -> str | None:
        with default_generator("module", "twice"), torch.inference_mode(False):
            return inspection.why_not_twice(self._make(), self._example())

    def _example(self) -> Tensor:
        """Two samples of noise: tokens for a model that has a vocabulary among its options, numbers for any other."""
        source, shape = generator("module", "example"), (2, *self._shape)
        vocabulary = self._description.get("options", {}).get("vocabulary")
        return torch.randn(shape, generator=source) if vocabulary is None else tokens(vocabulary, shape, source)


class _ReadError(Exception):
    """The head was reached: what it reads is here, and nothing else is wanted."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


class Headed(Functional):
    """A module with other layers in the place of its head."""

    def __init__(self, body: Module, layers: tuple[Linear, ...]) -> None:
        assert body.head is not None
        self._body, self._top = body, Layered(layers)
        self.random, self.head, self.buffers = body.random, layers[-1].name, body.buffers
        below = {name: shape for name, shape in body.shapes.items() if not name.startswith(f"{body.head}.")}
        self.shapes = below | self._top.shapes
        self.kinds = {name: kind for name, kind in body.kinds.items() if name != body.head} | self._top.kinds

    def init(self, generator: torch.Generator) -> State:
        state = self._body.init(generator) | self._top.init(generator)
        return {name: state[name] for name in (*self.shapes, *self.buffers)}

    def run(self, params: State, x: Tensor, mode: Mode) -> Tensor:
        return self._top.apply(params, self._body.read_by_head(params, x, mode))

    def features(self, params: State, x: Tensor) -> Tensor:
        return self._top.features(params, self._body.features(params, x))

    def observed(self, params: State, x: Tensor) -> State:
        return self._body.observed(params, x)

    def describe(self) -> dict[str, Any]:
        return self._body.describe()

    def why_not_twice(self) -> str | None:
        return self._body.why_not_twice()


def tokens(vocabulary: int, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randint(vocabulary, shape, generator=source)


def _channels_first(x: Tensor) -> Tensor:
    """The same samples as modules expect them in memory, strides included.

    Images of one channel pass for either layout, and a convolution then takes the strides' word for it. With channels
    last and fewer than eight of them, oneDNN's gradient of a 1x1 convolution with a stride writes past its memory
    (PyTorch 2.13 on AVX2): the process dies later, somewhere else.
    """
    return x.contiguous().flatten().view(x.shape)
