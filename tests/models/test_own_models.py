"""A model of one's own, from its registration to a newcomer's file: by name, by class, on the command line."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests import plugin_models
from tests.plugin_methods import upfl as command
from tests.runs import Interrupter, StopError, assert_same, outcome
from upfl import api, bundle, cli, configure, models, plugins
from upfl.bundle.manifest import MANIFEST, SUMS
from upfl.config import Config
from upfl.engine.folder import RunFolder
from upfl.engine.local import train_alone
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import BundleError, ConfigError
from upfl.state import State
from upfl.testing.parts import parts_of
from upfl.testing.parts import small as config_of

SMALL = ("iterations=2", "batch_size=8", "partition.clients=8")
SCALE: dict[str, Any] = {"rounds": 2, "clients_per_round": 2, "evaluate_every": 2, "evaluate_clients": 2}


def small(method: str = "fedavg", model: Any = "own-batchnorm", *settings: str, **options: Any) -> Config:
    return configure(method, "digits", settings=(*SMALL, *settings), model=model, **SCALE | options)


# Configuration


def test_a_configuration_names_a_model_and_its_options() -> None:
    config = small(model={"name": "own-convnet", "hidden": 8})
    assert (config.model.name, config.model.options) == ("own-convnet", {"hidden": 8, "width": 0.25})
    assert small("fedavg", "own-convnet", "model.hidden=8").model == config.model
    assert small(model="linear").model.options == {}


def test_a_configuration_comes_back_from_its_file(tmp_path: Path) -> None:
    config, file = small(model={"name": "own-convnet", "hidden": 8}), tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert Config.from_toml(file) == config
    assert configure("fedavg", "digits", file=file) == config


def test_a_profiles_options_count_where_the_model_has_them() -> None:
    assert configure("fedavg", "cifar10", profile="smoke", model="resnet8").model.options == {"width": 0.25}
    assert configure("fedavg", "cifar10", profile="smoke", model="linear").model.options == {}
    assert configure("fedavg", "mnist", profile="lite").model.build((1, 28, 28), 10).shapes["fc1.weight"] == (200, 784)


def test_options_of_another_model_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\nname = "own-convnet"\nhidden = 7\n')
    assert configure("fedavg", "digits", file=file).model.options["hidden"] == 7
    assert configure("fedavg", "digits", file=file, model="resnet8").model.options == {"width": 1.0}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet9", "unknown model 'resnet9'; did you mean resnet8 or resnet18"),
        ({"name": "own-mlp", "hiden": 3}, "unknown option 'model.hiden'; did you mean model.hidden"),
        ({"name": "resnet8", "width": 0}, "model.width: Input should be greater than 0"),
        ("os:system", "model 'os:system' is not known here, and no file makes upfl import a module"),
        ("tests.plugin_models:Nothing", "has no class or function 'Nothing'"),
        (lambda shape, classes: nn.Linear(3, 4), "a function with a name of its own"),
        (nn.Linear(3, 4), "a function with a name of its own"),
    ],
)
def test_what_does_not_fit_is_named(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        small(model=model)


@pytest.mark.parametrize(
    ("options", "settings", "table"),
    [
        ({"model": "resnet8"}, (), ""),
        ({"model": {"name": "resnet8"}}, (), ""),
        ({"model": {"hidden": 16}}, (), ""),
        ({}, ("model.hidden=16",), ""),
        ({}, ("model.sizes={one = {width = 1}}",), ""),
        ({}, (), '[model]\nname = "resnet8"\n'),
    ],
)
def test_a_model_for_a_training_that_makes_its_own_is_refused_however_it_is_asked_for(
    options: dict[str, Any], settings: tuple[str, ...], table: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(table)
    with pytest.raises(ConfigError, match="closed-form: no model can be chosen for it; it makes a model of its own"):
        configure("closed-form", "digits", settings=settings, file=file, **options)


@pytest.mark.parametrize("profile", ["paper", "smoke"])
def test_a_run_whose_training_makes_its_own_model_is_configured_by_its_own_file(profile: str, tmp_path: Path) -> None:
    config, file = configure("closed-form", "digits", profile=profile), tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert configure("closed-form", "digits", file=file) == config


def test_a_class_is_its_own_name() -> None:
    class Local(plugin_models.Mlp):
        pass

    config = small(model=plugin_models.Dropping)
    assert config.model.name == "own-dropout"  # as it is registered
    with pytest.raises(ConfigError, match="a function with a name of its own"):
        small(model=Local)  # nobody else could find it
    assert small(model=Net).model.name == "tests.models.test_own_models:Net"
    assert models.entry("tests.plugin_models:Mlp").factory is plugin_models.Mlp


class Net(plugin_models.Mlp):
    """Nobody registered it."""


def test_sizes_may_be_models_of_any_kind() -> None:
    sizes = "{phone = {name = 'own-mlp', hidden = 4}, server = {name = 'resnet8', width = 0.25}, wide = {width = 2}}"
    config = configure("hetero-tent", "digits", settings=[f"model.sizes={sizes}"], model={"name": "mlp", "hidden": 8})
    built = config.model.architectures((1, 8, 8), 10)
    assert built["phone"].model.shapes["fc1.weight"] == (4, 64)
    assert built["server"].model.shapes["conv.weight"] == (4, 1, 3, 3)
    assert built["wide"].model.shapes["fc1.weight"] == (16, 64)
    with pytest.raises(ConfigError, match=r"model\.sizes\.one: model 'linear' has no width"):
        configure("hetero-tent", "digits", settings=["model.sizes={one = {name = 'linear', width = 2}}"])


def test_sizes_that_parameters_do_not_tell_apart_are_refused() -> None:
    class Other(plugin_models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    models.register("own-other", Other)
    sizes = "model.sizes={one = {name = 'own-mlp'}, two = {name = 'own-other'}}"
    config = configure("hetero-tent", "digits", settings=[sizes], model="own-mlp")
    with pytest.raises(ConfigError, match="the sizes one and two are different models with the same parameters"):
        assemble(config)


def test_a_module_trains_one_client_at_a_time() -> None:
    with pytest.raises(ConfigError, match="model 'own-batchnorm' trains one client at a time"):
        assemble(small(vectorize=2))


# Runs


@pytest.mark.parametrize("model", ["own-dropout", pytest.param("own-batchnorm", marks=pytest.mark.full)])
def test_workers_and_resume_give_the_same_bits(model: str, tmp_path: Path) -> None:
    """Workers are processes, which draw random numbers of their own."""
    config = small("fedtta", model, rounds=3)
    alone = api.train(config, tmp_path / "alone", workers=1)
    api.train(config, tmp_path / "two", workers=2)
    folder = RunFolder.create(tmp_path / "stopped", config)
    with pytest.raises(StopError):
        Engine.local(folder).run(Interrupter("round", 1))
    torch.manual_seed(77)
    api.resume(tmp_path / "stopped", workers=1)
    expected = outcome(RunFolder.open(alone.path))
    for other in ("two", "stopped"):
        assert_same(outcome(RunFolder.open(tmp_path / other)), expected)


def test_what_a_step_draws_depends_on_seed_client_round_and_step_alone() -> None:
    """Not on how much the steps before it drew."""
    parts = parts_of(config_of("fedavg", "own-dropout"))

    def drawn(id: int, round: int, burnt: int) -> list[float]:
        seen = []

        def steps(phase: Any, carry: State, batches: Any, round: int) -> tuple[State, list[Tensor]]:
            assert len(batches) == 1
            seen.append(float(torch.rand(())))
            torch.rand(burnt)
            return carry, [torch.zeros(())]

        train_alone(parts.training, {}, parts.client(id, round), round, steps)
        return seen

    few = drawn(0, 0, 1)
    assert drawn(0, 0, 100) == few
    assert len({*few, *drawn(1, 0, 1), *drawn(0, 1, 1)}) == 3 * len(few)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    path = tmp_path_factory.mktemp("own") / "run"
    return api.train(small("tent", "own-batchnorm", score=("refit+label-shift",)), path, workers=1)


def test_a_bundle_of_a_module_makes_a_newcomers_model_that_is_stored_and_comes_back(
    trained: api.Run, tmp_path: Path
) -> None:
    made = bundle.export(trained, tmp_path / "bundle")
    images = trained.federation.source.x[trained.federation.new.all(0)]
    for name in made.personalizers:
        mine = made.personalize(images, name)
        mine.save(tmp_path / name)
        again = bundle.PersonalModel.load(tmp_path / name)
        assert torch.equal(again.predict_logits(images), mine.predict_logits(images))
    manifest = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    assert manifest["model"] == {"name": "own-batchnorm", "options": {"channels": 4}}


def test_an_onnx_file_of_a_module_says_what_the_model_says(trained: api.Run, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from upfl import onnx_export

    made = bundle.export(trained, tmp_path / "bundle")
    mine = made.personalize(trained.federation.source.x[trained.federation.new.all(0)], "tent")
    assert onnx_export.export(mine, tmp_path / "me.onnx") < 1e-4


def rewritten(folder: Path, model: Any) -> None:
    """Another model in a manifest, with a checksum that fits."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text()) | {"model": model}
    path.write_text(json.dumps(manifest))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums = [line for line in (folder / SUMS).read_text().splitlines() if not line.endswith(MANIFEST)]
    (folder / SUMS).write_text("\n".join([f"{digest}  {MANIFEST}", *sums]) + "\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"name": "nobodys"},
            r"unknown model 'nobodys'.*--plugin MODULE.*upfl\.models\.register\('nobodys', FACTORY\)",
        ),
        ({"name": "own-batchnorm", "options": {"channels": 5}}, "shape|parameters"),
        ({"name": "own-batchnorm", "options": {"depth": 5}}, "depth"),
        ({"name": "own-mlp"}, "missing|not one of"),
        ({"name": "resnet18", "options": {"width": 500.0}}, "more than the bundle's files can hold"),
        ({"name": "trap:Net"}, r"model 'trap:Net' is not known here.*--plugin trap"),
        ({"name": "os:system"}, "model 'os:system' is not known here"),
        ({"name": "os.path;x"}, "model"),
    ],
)
def test_a_bundle_that_names_another_model_is_refused_and_imports_nothing(
    trained: api.Run, model: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.export(trained, tmp_path / "bundle")
    rewritten(tmp_path / "bundle", model)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n")
    with pytest.raises(BundleError, match=message):
        bundle.load(tmp_path / "bundle")
    assert not (tmp_path / "sprung").exists()
    assert "trap" not in sys.modules


def test_a_runs_folder_imports_nothing_either(
    trained: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunFolder.open(trained.path).config().to_toml().replace('name = "own-batchnorm"', 'name = "trap:Net"')
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n")
    file = tmp_path / "config.toml"
    file.write_text(config)
    with pytest.raises(ConfigError, match="'trap:Net' is not known here"):
        Config.from_toml(file)
    assert not (tmp_path / "sprung").exists()


# The command line

PLUGIN = """
from torch import nn
from upfl import models

def flat(shape, classes, units=4):
    size = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(size, units), nn.Dropout(0.2), nn.ReLU(), nn.Linear(units, classes))

models.register("flat", flat)
"""


def upfl(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upfl", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, text=True, capture_output=True, check=False)


def test_the_command_line_takes_a_model_from_a_plugin_in_processes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(PLUGIN)
    scale = [word for setting in (*SMALL, "evaluate_clients=2") for word in ("--set", setting)]
    scale += ["--rounds", "1", "--clients-per-round", "2"]
    train = ("train", "tent", "digits", *scale, "--workers", "2", "--out", "run")
    done = upfl(*train, "--model", "my_nets:flat", "--set", "model.units=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'name = "my_nets:flat"' in (tmp_path / "run" / "config.toml").read_text()
    command("export", tmp_path / "run", "-o", tmp_path / "bundle").ended(2, "--plugin my_nets")
    done = upfl("score", "run", cwd=tmp_path, UPFL_PLUGINS="my_nets")
    assert done.returncode == 0, done.stderr


def test_plugin_may_stand_anywhere_and_is_said_in_the_help() -> None:
    anywhere = ["train", "x", "--plugin", "a", "y", "--plugin=b"]
    assert cli._plugins_first(anywhere) == ["--plugin", "a", "--plugin=b", "train", "x", "y"]
    assert cli._plugins_first(["train", "--", "--plugin", "a"]) == ["train", "--", "--plugin", "a"]
    assert "--plugin" in CliRunner().invoke(cli.app, ["--help"]).output
    refused = CliRunner().invoke(cli.app, ["--plugin", "no_such_module", "methods"])
    assert isinstance(refused.exception, ConfigError)
    assert "plugin 'no_such_module'" in str(refused.exception)


def test_a_module_is_looked_up_in_what_the_user_named_and_nowhere_else() -> None:
    assert plugins.named("os") is None
    assert plugins.named("tests.plugin_models") is plugin_models
