"""Modules that cannot work, and trainings that do not take a model: told in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import plugin_models
from tests.modules import own
from tests.reference import CLASSES
from upfl import models
from upfl.config import configure
from upfl.contract import Task
from upfl.engine.setup import assemble
from upfl.errors import ConfigError
from upfl.methods import TRAININGS, make_training
from upfl.testing import check_training
from upfl.training.fedavg import FedAvg
from upfl.training.fedtta import FedTTA

pytestmark = pytest.mark.usefixtures("one_thread")


class _Complex(plugin_models.Dropping):
    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class _Tied(nn.Module):
    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, classes)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.two(self.one(x.flatten(1))))
        return logits


class _InPlace(plugin_models.Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class _Noisy(plugin_models.Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(1)


class _Counting(plugin_models.Dropping):
    calls: Tensor

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class _Pair(plugin_models.Dropping):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def _frozen(shape: Any, classes: int) -> nn.Module:
    return plugin_models.Mlp(shape, classes).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "complex": (_Complex, "'phase' is complex"),
    "tied": (_Tied, r"'one.weight' and 'two.weight' are the same tensor \(tied weights\)"),
    "lazy": (lambda s, c: nn.Sequential(nn.Flatten(), nn.LazyLinear(c)), "'1' is lazy"),
    "frozen": (_frozen, "no parameter that can be trained"),
    "width": (lambda s, c: plugin_models.Mlp(s, c + 1), r"gives \[2, 6\] for 2 samples, and 5 classes"),
    "in-place": (_InPlace, "changes its input in place"),
    "noisy": (_Noisy, "draws random numbers in evaluation mode"),
    "counting": (_Counting, "changes its buffer 'calls' in evaluation mode"),
    "pair": (_Pair, "gives tuple, and should give a tensor"),
    "input": (lambda s, c: nn.Linear(7, c), r"does not take a batch of shape \[2, 2, 8, 8\]: RuntimeError"),
    "double": (lambda s, c: plugin_models.Mlp(s, c).double(), "float64: training is in float32"),
    "no-statistics": (
        lambda s, c: nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(128, c)),
        "'0' keeps no running statistics",
    ),
    "momentum": (
        lambda s, c: nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.Flatten(), nn.Linear(128, c)),
        "momentum=None",
    ),
    "no-module": (lambda s, c: 3, "gave int, not a torch.nn.Module"),
    "arguments": (lambda s: nn.Linear(7, 3), "a factory takes the shape of a sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_cannot_work_is_told_why(name: str) -> None:
    factory, reason = REFUSED[name]
    models.register(f"refused-{name}", factory)
    with pytest.raises(ConfigError, match=f"model 'refused-{name}'.*{reason}"):
        own(f"refused-{name}")


class _Branching(plugin_models.Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > 0 else -x)  # vmap could not: it has one answer for many clients


def test_control_flow_that_looks_at_data_trains_one_client_at_a_time_and_side_by_side_is_refused() -> None:
    models.register("branching", _Branching)
    check_training("fedtta", model="branching")
    with pytest.raises(ConfigError, match="vectorize = 2: model 'branching' trains one client at a time; leave it"):
        assemble(configure("fedavg", "digits", model="branching", vectorize=2))


@pytest.mark.parametrize("last", [False, True], ids=["within", "last"])
def test_a_gradient_that_cannot_be_differentiated_again_is_told_before_fedtta_trains(last: bool) -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable  # autograd leaves the second derivative out without a word
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

    class Net(plugin_models.Dropping):
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = Once.apply(super().forward(x) if last else self.hidden(x.flatten(1)))  # type: ignore[no-untyped-call]
            return z if last else self.head(z.sigmoid())

    models.register("once", Net)
    task = Task(own("once"), CLASSES, 2)
    with pytest.raises(ConfigError, match="'fedtta' does not fit this model: the model's gradient cannot be diff"):
        make_training("fedtta", task, FedTTA.Hyper())
    make_training("fedavg", task, FedAvg.Hyper())


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("fedsr", "own-headless", "last layer reads, which must be linear"),
        ("fedadg", "own-headless", "does not end in a linear layer"),
        ("odpfl-hn", "own-headless", "up to the last, which must be linear"),
        ("odpfl-hn", "own-batchnorm", "running statistics"),
        ("odpfl-hn", "own-dropout", "dropout"),
    ],
)
def test_a_training_says_in_words_which_models_it_does_not_take(name: str, model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"training '{name}' does not fit this model: .*{reason}"):
        make_training(name, Task(own(model), CLASSES, 2), TRAININGS[name].Hyper())
