"""Models of the test plugin at one size, batches for them, and a module's own forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests import plugin_models as plugin_models
from tests.reference import CLASSES
from upfl import models
from upfl.contract import Batch
from upfl.models import Model
from upfl.randomness import generator
from upfl.state import State, is_buffer, select

SHAPE = (2, 8, 8)


def own(name: str, **options: Any) -> Model:
    return models.entry(name).make(SHAPE, CLASSES, options)


def batch(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    x = torch.randn(n, *SHAPE, generator=generator(seed, "x"), dtype=torch.float64).to(dtype)
    return Batch(x, torch.randint(CLASSES, (n,), generator=generator(seed, "y")))


def as_it_is(net: nn.Module, training: bool = True) -> Callable[[State, Tensor], Tensor]:
    """A module's own forward pass; running statistics that it would change are copies."""

    def forward(params: State, x: Tensor) -> Tensor:
        net.train(training)
        given = {name.removeprefix("buffers."): v.clone() if is_buffer(name) else v for name, v in params.items()}
        logits: Tensor = functional_call(net, given, (x,))
        return logits

    return forward


def loaded(net: nn.Module, state: State) -> nn.Module:
    """A module with a state's psi."""
    psi = {key.removeprefix("buffers."): value for key, value in select(state, "psi").items()}
    net.load_state_dict(psi, strict=False)
    return net
