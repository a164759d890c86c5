"""The public checks: they pass for what is right, and find what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import plugin_models
from tests.runs import Interrupter, StopError, assert_same, outcome, ran
from upfl import api, models
from upfl.config import Config
from upfl.contract import Batch, Client, Personalized, Published, Task, Unlabelled
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.errors import ConfigError
from upfl.methods import PERSONALIZERS, TRAININGS
from upfl.personalize.nothing import Nothing
from upfl.state import State
from upfl.testing import CheckError, check_model, check_personalizer, check_training
from upfl.testing.parts import parts_of, small
from upfl.testing.personalizers import check_personalizers
from upfl.training.fedavg import FedAvg


@pytest.mark.parametrize("name", ["mlp", "convnet", "linear", "resnet8", "own-batchnorm", "own-dropout", "own-convnet"])
def test_models_that_are_right_pass(name: str) -> None:
    remarks = check_model(name, shape=(2, 8, 8), classes=5)
    assert ("running statistics" in remarks) == (name == "own-batchnorm")


def test_a_model_says_which_methods_cannot_take_it() -> None:
    models.register("no-head", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Tanh()))
    assert "refit, FedADG, FedSR and ODPFL-HN cannot take it" in check_model("no-head")


class Leaky(plugin_models.Mlp):
    """Remembers the last batch."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        before, self.last = getattr(self, "last", z.detach()), z.detach()
        return z + 0.1 * before.mean()


class Neighbourly(plugin_models.Mlp):
    """Looks at the samples beside one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Leaky, "apply: other bits the second time"),
        (Neighbourly, "apply: a prediction depends on the samples beside it"),
        (lambda shape, classes: plugin_models.Mlp(shape, classes + 1), "classes need"),
    ],
)
def test_models_that_are_wrong_are_found(model: Any, found: str) -> None:
    models.register("wrong", model)
    with pytest.raises(CheckError, match=found):
        check_model("wrong")


@pytest.mark.parametrize(("name", "model"), [("fedavg", "own-batchnorm"), ("fedtta", "own-dropout"), ("fedper", None)])
def test_trainings_that_are_right_pass(name: str, model: str | None) -> None:
    check_training(name, model=model)


class Grasping(FedAvg):
    """Trains the server's own tensors."""

    name = "grasping"
    title = "Grasping"

    def carry(self, models: State) -> State:
        return dict(models)


class Counting(FedAvg):
    """Remembers by itself how many steps it has made."""

    name = "counting-itself"
    title = "Counting"
    steps = 0

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        self.steps += 1
        carry["psi.fc1.bias"].add_(self.steps * 1e-3)
        return super().step(carry, batch, round)


class Hoarding(FedAvg):
    """Keeps what it does not say."""

    name = "hoarding"
    title = "Hoarding"

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        up, _ = super().finish(server, carry, client)
        return up, {"seen": torch.ones(1)}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Grasping, "changed the server's state|the state is as it was"),
        (Counting, "a client's round, again"),
        (Hoarding, "remembers = False, and a client keeps 1 tensors"),
    ],
)
def test_trainings_that_are_wrong_are_found(kind: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAININGS, kind.name, kind)
    with pytest.raises(CheckError, match=found):
        check_training(kind)


@pytest.mark.parametrize("name", ["tent", "refit", "label-shift", "lame"])
def test_personalizers_that_are_right_pass(name: str) -> None:
    check_personalizer(name, model="own-batchnorm")


@pytest.mark.parametrize("name", ["fedavg", "fedsr", "hetero-tent"])
def test_every_trainings_predictions_can_be_normalised_by_the_statistics_of_a_batch(name: str) -> None:
    """As Tent needs it, whatever a training makes of its model's layers."""
    settings = ["model.sizes={}"] if TRAININGS[name].heterogeneous else []
    check_personalizer("tent", training=name, model="own-batchnorm", settings=settings)
    parts = parts_of(small(name, "own-batchnorm", settings))
    training, client = parts.training, parts.population.newcomer(1)
    with torch.no_grad():
        params = training.start(parts.published, client, None)
        observed = training.model_of(params).observed(params, client.x)
        found = training.batchwise(params, client.x)
        torch.testing.assert_close(training.logits(observed, client.x), found, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(training.logits(params, client.x), found, atol=1e-3)


class Shrinking(Nothing):
    """Changes what was published."""

    name = "shrinking"
    title = "Shrinking"

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        for value in published.state.values():
            value.mul_(0.9)
        return super().personalize(published, client, memory)


class Transductive(Nothing):
    """Judges its own samples together and does not say so."""

    name = "transductive"
    title = "Transductive"

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        plain = super().personalize(published, client, memory)
        return Personalized(plain.before, plain.logits - plain.logits.mean(0), plain.predictor, plain.diary)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Shrinking, "personalize changed what it was given"),
        (Transductive, "later = 'same', and the predictor says something else"),
    ],
)
def test_personalizers_that_are_wrong_are_found(kind: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PERSONALIZERS, kind.name, kind)
    with pytest.raises(CheckError, match=found):
        check_personalizer(kind)


def test_what_is_not_registered_is_told() -> None:
    with pytest.raises(CheckError, match="grasping: register it first"):
        check_training(Grasping)


def on_modules(config: Config, tmp_path: Path) -> None:
    """A run to the same bits by one process, by two, and stopped after its first round."""
    expected = ran(config, tmp_path / "alone")
    api.train(config, tmp_path / "two", workers=2)
    folder = RunFolder.create(tmp_path / "stopped", config)
    with pytest.raises(StopError):
        Engine.local(folder).run(Interrupter("round", 1))
    torch.manual_seed(77)
    Engine.local(folder).run()
    for other in (RunFolder.open(tmp_path / "two"), folder):
        assert_same(outcome(other), expected)


@pytest.mark.full
@pytest.mark.bits
@pytest.mark.parametrize("model", ["resnet8", "own-batchnorm"])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_that_fits_runs_on_modules_with_every_personalizer_that_fits(
    model: str, name: str, tmp_path: Path
) -> None:
    kind, options = TRAININGS[name], {"name": "resnet8", "width": 0.25} if model == "resnet8" else model
    sizes = ["model.sizes={}"] if kind.heterogeneous else []
    if kind.refuses_models:
        with pytest.raises(ConfigError, match="no model can be chosen for it"):
            small(name, options, sizes)
        return
    config = small(name, options, sizes)
    if reason := kind.why_not(Task(config.model.build((1, 8, 8), 10), 10, 7)):
        assert "running statistics" in reason, "the only reason that keeps one of the two networks from a training"
        with pytest.raises(ConfigError, match=reason):
            parts_of(config)
        return
    training = parts_of(config).training
    fitting = [key for key, one in PERSONALIZERS.items() if one.why_not(training) is None]
    check_training(name, model=options, settings=sizes)
    check_personalizers(config, fitting)
    scored = small(name, options, sizes, score=fitting)
    on_modules(scored.model_copy(update={"evaluate_every": 2, "evaluate_clients": None}), tmp_path)
