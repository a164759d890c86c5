"""Configurations: what wins over what, what is refused and how, and the paper's figures."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from upfl.config import PROFILES, Config, configure
from upfl.errors import ConfigError
from upfl.methods import ROWS

# The paper's hyper-parameter table, copied by hand: FedAvg's rate; FedTTA's inner, outer and adaptation rates; those of
# FedTTA-Prox, and mu; FedTTA++'s patience; rounds. FedTTA++ trains as FedTTA-Prox, TENT as FedAvg.
PAPER: dict[str, tuple[float, tuple[float, ...], tuple[float, ...], int, int]] = {
    "mnist": (0.1, (0.5, 0.3, 0.01), (0.5, 0.3, 0.001, 0.01), 1, 200),
    "cifar10": (0.1, (0.5, 0.05, 0.005), (0.3, 0.1, 0.003, 0.001), 1, 1000),
    "femnist": (0.1, (0.3, 0.1, 0.003), (0.3, 0.1, 0.003, 0.001), 5, 200),
    "cifar100": (0.1, (0.5, 0.1, 0.001), (0.5, 0.1, 0.001, 0.01), 5, 1500),
    "fashion_mnist": (0.3, (0.05, 0.1, 0.001), (0.05, 0.1, 0.001, 0.001), 5, 300),
}
RATES = ("inner_lr", "outer_lr", "adapt_lr", "mu")
COMMON = {
    "iterations": 20,
    "batch_size": 64,
    "weight_decay": 1e-4,
    "clip": 10.0,
    "decay": 0.99,
    "aggregation": "uniform",
}
GUIDED = COMMON | {"momentum": 0.9, "adaptation_width": 32, "second_order": True}
of_the_papers_rows = pytest.mark.parametrize("row", ["fedavg", "tent", "fedtta", "fedtta-prox", "fedtta++"])


@pytest.mark.parametrize("dataset", PAPER)
@of_the_papers_rows
def test_the_papers_hyper_parameters_are_the_defaults(row: str, dataset: str) -> None:
    config, (lr, fedtta, prox, patience, rounds) = configure(row, dataset), PAPER[dataset]
    expected: dict[str, Any] = COMMON | {"lr": lr}
    if row == "fedtta":
        expected = GUIDED | dict(zip(RATES, fedtta, strict=False))
    elif row in ("fedtta-prox", "fedtta++"):
        expected = GUIDED | {"kl": "target-first"} | dict(zip(RATES, prox, strict=True))
    hyper = config.training_hyper().model_dump()
    assert {name: hyper[name] for name in expected} == expected
    assert (config.rounds, config.participants(50), config.partition.validation) == (rounds, 50, 0.15)
    if row == "fedtta++":
        early = {"norm": "rms", "steps": 50, "patience": patience, "candidates": "all"}
        assert config.personalize == {"early-stopped": early}


def test_tent_takes_over_the_trainings_rate_for_one_step() -> None:
    values = configure("tent", "fashion_mnist").personalize["tent"]
    assert values == {"steps": 1, "weight_decay": 1e-4, "clip": 10.0, "parameters": "auto"}


@of_the_papers_rows
def test_digits_takes_mnists_values(row: str) -> None:
    digits, mnist = configure(row, "digits"), configure(row, "mnist")
    assert digits.training == mnist.training
    assert digits.personalize == mnist.personalize
    assert digits.model == mnist.model


# Layers


def test_later_layers_win(tmp_path: Path) -> None:
    """Rounds, a field of the run: paper 1000, lite 40, file 7, option 9, the last of its settings 11."""
    file = tmp_path / "run.toml"
    file.write_text("rounds = 7\n")
    settings = {"settings": ["rounds=10", "rounds=11"]}
    layers: list[dict[str, Any]] = [{}, {"profile": "lite"}, {"file": file}, {"rounds": 9}, settings]
    for until, rounds in enumerate((1000, 40, 7, 9, 11)):
        arguments = {key: value for layer in layers[: until + 1] for key, value in layer.items()}
        assert configure("fedtta", "cifar10", **arguments).rounds == rounds


def test_later_layers_win_for_hyper_parameters_and_leave_their_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\ninner_lr = 0.7\nouter_lr = 0.8\n[personalize.early-stopped]\nsteps = 12\n")
    layers: list[dict[str, Any]] = [{}, {"file": file}, {"file": file, "settings": ["inner_lr=0.9", "patience=2"]}]
    configs = [configure("fedtta++", "femnist", **layer) for layer in layers]
    trained, early = ([c.training for c in configs], [c.personalize["early-stopped"] for c in configs])
    assert [values["inner_lr"] for values in trained] == [0.3, 0.7, 0.9]
    assert [values["outer_lr"] for values in trained] == [0.1, 0.8, 0.8]
    assert [values["adapt_lr"] for values in trained] == [0.003, 0.003, 0.003]
    assert [(values["steps"], values["patience"]) for values in early] == [(50, 5), (12, 5), (12, 2)]


def test_profiles_change_the_scale_and_not_the_method() -> None:
    paper, lite, smoke = (configure("fedtta-prox", "cifar10", profile=name) for name in ("paper", "lite", "smoke"))
    assert paper.training == lite.training == smoke.training
    assert paper.personalize == lite.personalize == smoke.personalize
    assert paper.partition == lite.partition == smoke.partition
    assert paper.rounds > lite.rounds > smoke.rounds
    widths = [config.model.options["width"] for config in (paper, lite, smoke)]
    assert widths == sorted(set(widths), reverse=True)
    assert paper.participants(50) > lite.participants(50) > smoke.participants(50)


def test_a_file_may_name_the_profile_and_an_argument_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('profile = "smoke"\n')
    assert configure("fedavg", "mnist", file=file).rounds == configure("fedavg", "mnist", profile="smoke").rounds
    assert configure("fedavg", "mnist", file=file, profile="lite").rounds == 40


def test_a_runs_own_configuration_file_describes_the_same_run(tmp_path: Path) -> None:
    config = configure("fedtta++", "cifar10", profile="lite", score=["none", "tent"], settings=["partition.clients=20"])
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert configure("fedtta++", "cifar10", file=file) == config


def test_further_personalizers_are_scored_beside_the_rows_own() -> None:
    assert list(configure("fedtta", "mnist", score=["none", "tent"]).personalize) == ["one-step", "none", "tent"]


@pytest.mark.parametrize(("asked", "taken"), [(None, 20), (5, 5), (50, 20), (0.25, 5), (1.0, 20), (0.001, 1), (1, 1)])
def test_participants_are_a_number_or_a_fraction(asked: float | None, taken: int) -> None:
    assert configure("fedavg", "digits", clients_per_round=asked).participants(20) == taken


# Refusals


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"method": "fedtta-prx"}, "fedtta-prox"),
        ({"method": "fedta++"}, r"fedtta\+\+"),
        ({"method": "FedAvg2"}, "fedavg"),
        ({"dataset": "minst"}, "mnist"),
        ({"dataset": "CIFAR-10"}, "cifar10"),
        ({"profile": "papper"}, "paper"),
        ({"score": ["none", "tnet"]}, "tent"),
        ({"score": ["early_stopped"]}, "early-stopped"),
        ({"settings": ["iner_lr=0.3"]}, "inner_lr"),
        ({"settings": ["round=4"]}, "rounds"),
        ({"settings": ["training.iner_lr=0.1"]}, "inner_lr"),
        ({"settings": ["model.widht=0.1"]}, "width"),
        ({"settings": ["modle.width=0.1"]}, "model"),
        ({"settings": ["partition.client=4"]}, "clients"),
        ({"settings": ["one-stp.norm=rms"]}, "one-step"),
    ],
    ids=str,
)
def test_unknown_names_are_answered_with_the_nearest(arguments: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean [^?]*(?<![\\w+-]){nearest}(?![\\w+-])"):
        configure(**({"method": "fedtta", "dataset": "digits"} | arguments))


@pytest.mark.parametrize(
    "setting",
    [
        *("rounds=0", "rounds=two", "rounds=2.5", "rounds=inf", "rounds={a = 1}", "seed=-1", "device=3"),
        *("clients_per_round=0", "clients_per_round=1.5", "clients_per_round=all"),
        *("inner_lr=-0.1", "inner_lr=nan", "inner_lr=abc", "inner_lr=[1]", "outer_lr=inf", "batch_size=0", "decay=1.1"),
        *("aggregation=median", "training.momentum=1", "training.no_such_field=1", "training=fedavg"),
        *("model.width=0", "model.hidden=0", "model.name=resnet", "model.depth=3", "model=mlp", "model=3"),
        *("partition.clients=1", "partition.clients=many", "partition.kind=random", "partition.new_fraction=2"),
        *("partition=iid", "partition=[1]", "partition=3", "one-step.clip=1", "personalize=tent", "personalize=[]"),
    ],
)
def test_a_value_that_does_not_fit_is_named(setting: str) -> None:
    key = setting.partition("=")[0]
    field = re.escape(key) if key.startswith("model.") else key.rpartition(".")[2]
    with pytest.raises(ConfigError, match=field):
        configure("fedtta", "digits", settings=[setting])


CONTRADICTING = ["dataset=mnist", "dataset=minst", "method=fedavg", "method=fedtat", "method=3", "profile=lite"]
BAD_TABLES = [
    *("training=3", "training.name=fedtat", "training.name=[]", "training.name=3", "training={}", "personalize=3"),
    *("personalize={tnet = {}}", "personalize.one-step=3", "partition.samples.x=3"),
]
MALFORMED = ["", "=", "=1", "rounds", "a.b.c=1", "rounds.a=1", "training..lr=1", ".=1", "inner_lr=", "inner_lr.x=3"]


@pytest.mark.parametrize("later", [[], ["iterations=2"], ["inner_lr=x"]], ids=str)
@pytest.mark.parametrize("setting", [*CONTRADICTING, *BAD_TABLES, *MALFORMED])
def test_a_setting_that_cannot_be_is_refused_whatever_is_set_after_it(setting: str, later: list[str]) -> None:
    """By then the model, the partition and the hyper-parameters are those of the method and data set asked for."""
    with pytest.raises(ConfigError):
        configure("fedtta", "digits", profile="smoke", settings=[setting, *later])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\x00", ()),
        ("rounds = ", ()),
        ("rounds = 'x'", ("rounds",)),
        ("roundz = 1", ("'roundz'", "rounds")),
        ("method = 'fedtta'", ("fedtta", "fedavg")),
        ("dataset = 'mnist'", ("mnist", "digits")),
        ("profile = 'huge'", ("huge",)),
        ("profile = 3", ("profile",)),
        ("partition = 3", ("partition",)),
        ("partition = [1]", ("partition",)),
        ("partition = {client = 3}", ("client",)),
        ("training = 3", ("training",)),
        ("training = {lrr = 3}", ("lrr", "lr")),
        ("[[training]]", ("training",)),
        ("personalize = 3", ("personalize",)),
        ("personalize = ['tent']", ("personalize",)),
        ("[personalize]\ntent = 3", ("personalize",)),
        ("[personalize.tnet]\nlr = 1", ("tnet", "tent")),
        ("model = []", ("model",)),
        ("[model]\nname = 'mlp'\ndepth = 3", ("depth",)),
    ],
)
def test_a_bad_file_is_refused(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        configure("fedavg", "digits", file=file)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "absent.toml", tmp_path, binary):
        with pytest.raises(ConfigError, match=file.name):
            configure("fedtta", "digits", file=file)


# Any value


scalars = st.one_of(
    st.integers(),
    st.integers(-3, 50),
    st.floats(),
    st.floats(0, 1),
    st.booleans(),
    st.text(max_size=8),
    st.none(),
    st.sampled_from(["mlp", "convnet", "own-first", "iid", "dirichlet", "adapted", "last", "norm", "cuda:0"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from(
    [
        *("seed", "partition_seed", "rounds", "clients_per_round", "evaluate_every", "evaluate_clients"),
        *("checkpoint_every", "device", "vectorize", "precision", "model", "partition", "training", "personalize"),
        *("model.name", "model.hidden", "model.width"),
        *("partition.kind", "partition.clients", "partition.samples", "partition.public", "partition.rotations_new"),
        *("partition.alpha_new", "partition.labels_per_client", "partition.validation"),
        *("inner_lr", "outer_lr", "adapt_lr", "momentum", "mu", "kl", "second_order", "iterations", "weight_decay"),
        *("steps", "patience", "candidates", "tent.lr", "tent.parameters", "training.name", "training.lr"),
    ]
)
texts = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["true", "[]", "[1, 2.5]", "{}", "{a = 1}", "''", "2020-01-01", "'x'", "1e999", "iid", "mlp"]),
)


def _outcome(**arguments: Any) -> Config | None:
    """The configuration, or None where it was refused; any other error is the test's."""
    try:
        return configure("fedtta++", "digits", score=["tent"], **arguments)
    except ConfigError:
        return None


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.toml"


def _assert_round_trip(config: Config, file: Path) -> None:
    file.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert Config.from_toml(file) == config


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(keys.filter(lambda key: "." not in key), values, min_size=1, max_size=2))
@example({"device": "\x00\r\n\x7f\u2028"})
@example({"clients_per_round": 1})
@example({"clients_per_round": 1.0})
@example({"clients_per_round": True})
@example({"personalize": {"tent": {"lr": None}}})
@example({"training": {"name": None}})
def test_any_option_gives_a_run_that_survives_its_file_or_a_config_error(file: Path, options: dict[str, Any]) -> None:
    fields = {key: value for key, value in options.items() if key in Config.model_fields}
    if (config := _outcome(**fields)) is not None:
        _assert_round_trip(config, file)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(keys, texts).map("=".join), min_size=1, max_size=3))
@example(["seed=" + "9" * 5000])
def test_any_setting_gives_a_run_that_survives_its_file_or_a_config_error(file: Path, settings: list[str]) -> None:
    if (config := _outcome(settings=settings)) is not None:
        _assert_round_trip(config, file)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40) | st.binary(max_size=40))
def test_any_file_gives_a_run_or_a_config_error(file: Path, content: str | bytes) -> None:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError):  # so short a file cannot be complete
        Config.from_toml(file)
    if (config := _outcome(file=file)) is not None:
        _assert_round_trip(config, file)


@pytest.mark.parametrize("row", [row.row for row in ROWS])
def test_every_shipped_configuration_survives_its_file(row: str, tmp_path: Path) -> None:
    for dataset, profile in itertools.product([*PAPER, "digits"], PROFILES):
        _assert_round_trip(configure(row, dataset, profile=profile), tmp_path / "config.toml")
