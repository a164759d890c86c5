"""Configurations: what wins over what, what is refused and how, and the paper's figures."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from upfl.config import PROFILES, Config, configure
from upfl.errors import ConfigError
from upfl.methods import ROWS

# The paper's hyper-parameter table, copied by hand. FedTTA++ trains as FedTTA-Prox, TENT as FedAvg.

PAPER: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "fedavg": {"lr": 0.1},
        "tent": {"lr": 0.1},
        "fedtta": {"inner_lr": 0.5, "outer_lr": 0.3, "adapt_lr": 0.01},
        "fedtta-prox": {"inner_lr": 0.5, "outer_lr": 0.3, "adapt_lr": 0.001, "mu": 0.01},
        "fedtta++": {"inner_lr": 0.5, "outer_lr": 0.3, "adapt_lr": 0.001, "mu": 0.01},
    },
    "cifar10": {
        "fedavg": {"lr": 0.1},
        "tent": {"lr": 0.1},
        "fedtta": {"inner_lr": 0.5, "outer_lr": 0.05, "adapt_lr": 0.005},
        "fedtta-prox": {"inner_lr": 0.3, "outer_lr": 0.1, "adapt_lr": 0.003, "mu": 0.001},
        "fedtta++": {"inner_lr": 0.3, "outer_lr": 0.1, "adapt_lr": 0.003, "mu": 0.001},
    },
    "femnist": {
        "fedavg": {"lr": 0.1},
        "tent": {"lr": 0.1},
        "fedtta": {"inner_lr": 0.3, "outer_lr": 0.1, "adapt_lr": 0.003},
        "fedtta-prox": {"inner_lr": 0.3, "outer_lr": 0.1, "adapt_lr": 0.003, "mu": 0.001},
        "fedtta++": {"inner_lr": 0.3, "outer_lr": 0.1, "adapt_lr": 0.003, "mu": 0.001},
    },
    "cifar100": {
        "fedavg": {"lr": 0.1},
        "tent": {"lr": 0.1},
        "fedtta": {"inner_lr": 0.5, "outer_lr": 0.1, "adapt_lr": 0.001},
        "fedtta-prox": {"inner_lr": 0.5, "outer_lr": 0.1, "adapt_lr": 0.001, "mu": 0.01},
        "fedtta++": {"inner_lr": 0.5, "outer_lr": 0.1, "adapt_lr": 0.001, "mu": 0.01},
    },
    "fashion_mnist": {
        "fedavg": {"lr": 0.3},
        "tent": {"lr": 0.3},
        "fedtta": {"inner_lr": 0.05, "outer_lr": 0.1, "adapt_lr": 0.001},
        "fedtta-prox": {"inner_lr": 0.05, "outer_lr": 0.1, "adapt_lr": 0.001, "mu": 0.001},
        "fedtta++": {"inner_lr": 0.05, "outer_lr": 0.1, "adapt_lr": 0.001, "mu": 0.001},
    },
}
PATIENCE = {"mnist": 1, "cifar10": 1, "femnist": 5, "cifar100": 5, "fashion_mnist": 5}
ROUNDS = {"mnist": 200, "cifar10": 1000, "femnist": 200, "cifar100": 1500, "fashion_mnist": 300}
COMMON = {
    "iterations": 20,
    "batch_size": 64,
    "weight_decay": 1e-4,
    "clip": 10.0,
    "decay": 0.99,
    "aggregation": "uniform",
}


@pytest.mark.parametrize("dataset", PAPER)
@pytest.mark.parametrize("row", ["fedavg", "tent", "fedtta", "fedtta-prox", "fedtta++"])
def test_the_papers_hyper_parameters_are_the_defaults(row: str, dataset: str) -> None:
    config = configure(row, dataset)
    hyper = config.training_hyper().model_dump()
    assert {name: hyper[name] for name in PAPER[dataset][row]} == PAPER[dataset][row]
    assert {name: hyper[name] for name in COMMON} == COMMON
    if row.startswith("fedtta"):
        assert (hyper["momentum"], hyper["adaptation_width"], hyper["second_order"]) == (0.9, 32, True)
    if row in ("fedtta-prox", "fedtta++"):
        assert hyper["kl"] == "target-first"
    assert config.rounds == ROUNDS[dataset]
    assert config.participants(50) == 50
    assert config.partition.validation == 0.15


@pytest.mark.parametrize("dataset", PAPER)
def test_fedtta_pp_has_the_papers_patience_and_fifty_steps(dataset: str) -> None:
    values = configure("fedtta++", dataset).personalize
    expected = {"norm": "rms", "steps": 50, "patience": PATIENCE[dataset], "candidates": "all"}
    assert values == {"early-stopped": expected}


def test_tent_takes_over_the_trainings_rate_for_one_step() -> None:
    values = configure("tent", "fashion_mnist").personalize["tent"]
    assert values == {"steps": 1, "weight_decay": 1e-4, "clip": 10.0, "parameters": "auto"}


@pytest.mark.parametrize("row", ["fedavg", "tent", "fedtta", "fedtta-prox", "fedtta++"])
def test_digits_takes_mnists_values(row: str) -> None:
    digits, mnist = configure(row, "digits"), configure(row, "mnist")
    assert digits.training == mnist.training
    assert digits.personalize == mnist.personalize
    assert digits.model == mnist.model


# Layers


def test_later_layers_win(tmp_path: Path) -> None:
    """Rounds, a field of the run: paper 1000, lite 40, file 7, option 9, setting 11."""
    file = tmp_path / "run.toml"
    file.write_text("rounds = 7\n")
    layers: list[dict[str, Any]] = [
        {},
        {"profile": "lite"},
        {"file": file},
        {"rounds": 9},
        {"settings": ["rounds=11"]},
    ]
    for until, rounds in enumerate((1000, 40, 7, 9, 11)):
        arguments = {key: value for layer in layers[: until + 1] for key, value in layer.items()}
        assert configure("fedtta", "cifar10", **arguments).rounds == rounds


def test_later_layers_win_for_hyper_parameters_and_leave_their_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\ninner_lr = 0.7\nouter_lr = 0.8\n[personalize.early-stopped]\nsteps = 12\n")
    paper = configure("fedtta++", "femnist")
    from_file = configure("fedtta++", "femnist", file=file)
    as_set = configure("fedtta++", "femnist", file=file, settings=["inner_lr=0.9", "patience=2"])
    assert [config.training["inner_lr"] for config in (paper, from_file, as_set)] == [0.3, 0.7, 0.9]
    assert [config.training["outer_lr"] for config in (paper, from_file, as_set)] == [0.1, 0.8, 0.8]
    assert [config.training["adapt_lr"] for config in (paper, from_file, as_set)] == [0.003, 0.003, 0.003]
    assert [config.personalize["early-stopped"]["steps"] for config in (paper, from_file, as_set)] == [50, 12, 12]
    assert [config.personalize["early-stopped"]["patience"] for config in (paper, from_file, as_set)] == [5, 5, 2]


def test_profiles_change_the_scale_and_not_the_method() -> None:
    paper, lite, smoke = (configure("fedtta-prox", "cifar10", profile=name) for name in ("paper", "lite", "smoke"))
    assert paper.training == lite.training == smoke.training
    assert paper.personalize == lite.personalize == smoke.personalize
    assert paper.partition == lite.partition == smoke.partition
    assert paper.rounds > lite.rounds > smoke.rounds
    widths = [config.model.options["width"] for config in (paper, lite, smoke)]
    assert widths == sorted(set(widths), reverse=True)
    assert paper.participants(50) > lite.participants(50) > smoke.participants(50)


def test_the_last_of_several_settings_of_a_name_wins() -> None:
    assert configure("fedavg", "digits", settings=["lr=0.2", "lr=0.3"]).training["lr"] == 0.3


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
        ({"method": "FedAvg2"}, "fedavg"),
        ({"dataset": "minst"}, "mnist"),
        ({"dataset": "CIFAR-10"}, "cifar10"),
        ({"profile": "papper"}, "paper"),
        ({"score": ["tnet"]}, "tent"),
        ({"settings": ["iner_lr=0.3"]}, "inner_lr"),
        ({"settings": ["partition.client=4"]}, "clients"),
    ],
    ids=str,
)
def test_unknown_names_are_answered_with_the_nearest(arguments: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean [^?]*{nearest}"):
        configure(**({"method": "fedtta", "dataset": "digits"} | arguments))


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("rounds=0", "rounds"),
        ("rounds=two", "rounds"),
        ("seed=-1", "seed"),
        ("clients_per_round=0", "clients_per_round"),
        ("clients_per_round=1.5", "clients_per_round"),
        ("inner_lr=-0.1", "inner_lr"),
        ("inner_lr=nan", "inner_lr"),
        ("outer_lr=inf", "outer_lr"),
        ("batch_size=0", "batch_size"),
        ("decay=1.1", "decay"),
        ("aggregation=median", "aggregation"),
        ("training.momentum=1", "momentum"),
        ("training.no_such_field=1", "no_such_field"),
        ("model.width=0", "model.width"),
        ("model.name=resnet", "model.name"),
        ("model.depth=3", "model.depth"),
        ("partition.clients=1", "clients"),
        ("partition.kind=random", "kind"),
        ("partition.new_fraction=2", "new_fraction"),
        ("one-step.clip=1", "clip"),
        ("rounds={a = 1}", "rounds"),
        ("model=mlp", "model"),
        ("training=fedavg", "training"),
        ("partition=iid", "partition"),
        ("partition=[1]", "partition"),
        ("partition=3", "partition"),
        ("personalize=tent", "personalize"),
    ],
)
def test_a_value_that_does_not_fit_is_named(setting: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        configure("fedtta", "digits", settings=[setting])


@pytest.mark.parametrize(
    "setting", ["dataset=mnist", "dataset=minst", "method=fedavg", "method=fedtat", "profile=lite"]
)
def test_settings_cannot_contradict_what_the_run_was_put_together_for(setting: str) -> None:
    """By then the model, the partition and the hyper-parameters are those of the method and data set asked for."""
    with pytest.raises(ConfigError):
        configure("fedtta", "digits", profile="smoke", settings=[setting])


@pytest.mark.parametrize(
    "first",
    [
        "training=3",
        "training.name=fedtat",
        "training.name=[]",
        "training={}",
        "personalize=3",
        "personalize={tnet = {}}",
        "personalize.one-step=3",
    ],
)
def test_a_bad_table_is_refused_whatever_is_set_after_it(first: str) -> None:
    with pytest.raises(ConfigError):
        configure("fedtta", "digits", settings=[first, "inner_lr=x"])


@pytest.mark.parametrize("setting", ["", "=", "=1", "rounds", "a.b.c=1", "rounds.a=1", "training..lr=1", ".=1"])
def test_a_malformed_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        configure("fedtta", "digits", settings=[setting])


@pytest.mark.parametrize(
    "text",
    [
        "rounds = ",
        "rounds = 'x'",
        "no_such_field = 1",
        "method = 'fedavg'",
        "dataset = 'mnist'",
        "profile = 'huge'",
        "profile = 3",
        "partition = 3",
        "partition = [1]",
        "training = 3",
        "personalize = 3",
        "personalize = ['tent']",
        "[personalize]\ntent = 3",
        "[personalize.tnet]\nlr = 1",
        "[model]\nname = 'mlp'\ndepth = 3",
    ],
)
def test_a_bad_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        configure("fedtta", "digits", file=file)


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
@example({"partition": 3})
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
@example(["training=3", "inner_lr=1"])
@example(["training.name=fedtat", "inner_lr=1"])
@example(["personalize=3", "patience=1"])
@example(["partition=3"])
@example(["personalize={tnet = {}}", "patience=1"])
@example(["training.name=[]", "patience=1"])
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
