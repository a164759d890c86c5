"""Who has which model: the paper's sizes, and a user's own."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fedmd import made, small
from tests.reference import CASES, CLASSES, Somebody
from upfl import api, data
from upfl.config import SIZES, configure
from upfl.contract import Architecture, Published, Task, Unlabelled
from upfl.errors import ConfigError
from upfl.models import adaptation_model, mlp
from upfl.randomness import generator
from upfl.state import select
from upfl.training.hetero_fedtta import HeteroFedTTA

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_papers_sizes_on_cifar10() -> None:
    architectures = configure("hetero-fedtta", "cifar10").model.architectures((3, 32, 32), 10)
    sizes = {name: (entry.model.size, entry.adaptation_width) for name, entry in architectures.items()}
    assert sizes == {"small": (1_068_266, 32), "medium": (2_156_490, 64), "big": (4_409_738, 128)}
    task = Task(architectures["medium"].model, 10, 3, architectures, torch.zeros(4, 3, 32, 32))
    training = made(HeteroFedTTA, task)
    for name, width in (("small", 32), ("medium", 64), ("big", 128)):
        memory = training.memory(Somebody(architecture=name))
        assert sum(v.numel() for v in select(memory, "phi").values()) == adaptation_model(10, width).size
        assert sum(v.numel() for v in select(memory, "psi").values()) == architectures[name].model.size


def test_sizes_are_equally_likely_and_a_function_of_the_partitions_seed_and_the_client() -> None:
    federation = data.build_federation(data.load("digits"), small().partition, 0, SIZES)
    for role in ("training", "new"):
        drawn = Counter(federation.architecture(role, client) for client in range(6000))
        assert set(drawn) == set(SIZES)
        assert all(abs(count - 2000) < 5 * (6000 * 2 / 9) ** 0.5 for count in drawn.values())
    again = data.build_federation(data.load("digits"), small().partition, 0, SIZES)
    other = data.build_federation(data.load("digits"), small().partition, 1, SIZES)
    first = [federation.architecture("training", client) for client in range(50)]
    assert first == [again.architecture("training", client) for client in range(50)]
    assert first != [other.architecture("training", client) for client in range(50)]
    assert first != [federation.architecture("new", client) for client in range(50)]


def test_a_user_may_name_any_set_of_models(tmp_path: Path) -> None:
    sizes = "model.sizes={tiny = {hidden = 4}, picture = {name = 'convnet', width = 0.125, hidden = 8, adaptation = 5}}"
    config = small("hetero-fedtta", sizes, rounds=2)
    assert list(config.model.sizes) == ["tiny", "picture"]
    run = api.train(config, tmp_path / "run", workers=1)
    assert set(run.result["rows"][0]["architectures"]) == {"tiny", "picture"}
    training: Any = run.training
    assert training.students["tiny"].revisit.model.size == mlp(64, (4, 4), 10).size
    assert "conv1.weight" in training.students["picture"].revisit.model.shapes
    assert training.students["picture"].revisit.g.size == adaptation_model(10, 5).size
    for name in ("tiny", "picture"):
        client = replace(run.newcomer(1), architecture=name)
        assert run.personalize(client).logits.isfinite().all()


def test_a_files_sizes_take_the_place_of_the_papers_and_settings_reach_into_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[model.sizes.one]\nwidth = 0.25\n[model.sizes.other]\nadaptation = 8\n")
    config = configure("hetero-tent", "mnist", file=file, settings=["model.sizes.one.width=3"])
    assert {name: size.width for name, size in config.model.sizes.items()} == {"one": 3.0, "other": 1.0}
    file.write_text(config.to_toml())
    assert configure("hetero-tent", "mnist", file=file) == config


def test_without_sizes_all_clients_have_the_one_model(tmp_path: Path) -> None:
    run = api.train(small("hetero-tent", "model.sizes={}", rounds=1), tmp_path / "run", workers=1)
    assert run.newcomer(0).architecture == ""
    assert "architectures" not in run.result["rows"][0]
    assert run.personalize(run.newcomer(0)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("fedavg", "model.sizes={small = {width = 0.5}}", "fedavg have the same model; hetero-fedtta, hetero-tent"),
        ("hetero-fedtta", "model.sizes.smal.width=0.5", "unknown table 'smal'; did you mean small"),
        ("hetero-fedtta", "model.sizes.small.wdth=0.5", "did you mean model.sizes.small.width"),
        ("hetero-fedtta", "model.sizes.small.width=0", "model.sizes.small.width"),
        ("hetero-fedtta", "model.sizes=3", "model.sizes"),
        ("hetero-fedtta", "lambda=0.5", "did you mean lambda_"),
        ("hetero-fedtta", "lambda_=-1", "lambda_"),
        ("hetero-fedtta", "kl=backward", "target-first"),
    ],
)
def test_what_does_not_fit_is_named(method: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        configure(method, "digits", settings=[setting])


def test_a_federation_without_a_public_set_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hetero-fedtta needs a public set: set partition\.public"):
        api.train(small("hetero-fedtta", "partition.public=0"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_architecture_is_answered_with_the_known_ones() -> None:
    architectures = {"small": Architecture(CASES["mlp"].model)}
    task = Task(CASES["mlp"].model, CLASSES, 3, architectures, torch.zeros(4, 2, 8, 8))
    training = made(HeteroFedTTA, task)
    published = Published(training.publish(training.init(generator(0))), 1)
    with pytest.raises(ConfigError, match="architecture is 'huge', and this federation knows small"):
        training.start(published, Unlabelled(0, torch.zeros(1, 2, 8, 8), architecture="huge"), None)
