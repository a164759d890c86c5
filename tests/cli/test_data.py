"""`upfl data`: what people and scripts see of data sets and partitions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.small_data import write_small
from upfl.cli.data import app
from upfl.data.catalog import CATALOG
from upfl.errors import ConfigError, DataError

Upfl = Callable[..., Result]


@pytest.fixture
def upfl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upfl:
    """`upfl data ...` on a machine that has small MNIST and CIFAR-100 only; errors come through as they are."""
    for name in CATALOG:
        monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], system_folders=(), downloads=()))
    for name in ("mnist", "cifar100"):
        monkeypatch.setitem(CATALOG, name, write_small(name, tmp_path / "data"))
    monkeypatch.setenv("UPFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("UPFL_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(app, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_list_says_what_is_here(upfl: Upfl, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(upfl("list", "--json").stdout)}
    assert {name for name, row in rows.items() if row["available"]} == {"digits", "mnist", "cifar100"}
    assert rows["mnist"]["folder"] == str(tmp_path / "data" / "mnist")
    assert "not here yet" in upfl("list").stdout


def test_fetch_leaves_alone_what_is_here(upfl: Upfl) -> None:
    assert "36 samples" in upfl("fetch", "mnist", "digits").stdout


def test_check_passes_what_is_good_and_names_what_is_bad_or_not_here(upfl: Upfl, tmp_path: Path) -> None:
    assert upfl("check").stdout.count("good") == 3
    assert all(row["problem"] is None for row in json.loads(upfl("check", "mnist", "--json").stdout))
    (tmp_path / "data" / "cifar-100-binary" / "test.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.bin"):
        upfl("check", "cifar100")
    with pytest.raises(DataError, match="CIFAR-10 is not on this machine"):
        upfl("check", "cifar10")


def test_show_pictures_every_client(upfl: Upfl) -> None:
    text = upfl("show", "digits").stdout
    assert "20 training clients" in text
    assert "20 new clients" in text
    assert "█" in text


def test_show_as_json_counts_every_sample_and_depends_on_the_seed(upfl: Upfl) -> None:
    first, again, other = (
        json.loads(upfl("show", "digits", "--json", "--partition-seed", seed).stdout) for seed in ("1", "1", "2")
    )
    total = sum(sum(map(sum, first[role]["class_counts"])) for role in ("training", "new"))
    assert total == 1797
    assert first == again
    assert first["training"] != other["training"]


def test_show_takes_changes_to_the_partition(upfl: Upfl) -> None:
    changes = ["kind=iid", "clients=6", "samples=60", "rotations_new=[15, 45]", "public=0.1"]
    arguments = [part for change in changes for part in ("--set", change)]
    shown = json.loads(upfl("show", "digits", "--json", *arguments).stdout)
    assert len(shown["training"]["class_counts"]) == 3
    assert set(shown["new"]["angles"]) <= {15, 45}
    assert shown["public"] == 6
    assert "45°" in upfl("show", "digits", *arguments).stdout


@pytest.mark.parametrize("change", ["clients", "client=4", "clients=many", "alpha_new=1"])
def test_a_change_that_does_not_fit_is_refused(upfl: Upfl, change: str) -> None:
    with pytest.raises(ConfigError):
        upfl("show", "digits", "--set", change)


@pytest.mark.parametrize(("name", "clients"), [("digits", "40"), ("cifar100", "22")])
def test_show_writes_a_picture(upfl: Upfl, tmp_path: Path, name: str, clients: str) -> None:
    picture = tmp_path / "picture.png"
    upfl("show", name, "--set", f"clients={clients}", "-o", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["nowhere/picture.png", "picture.xyz"])
def test_a_picture_that_cannot_be_written_is_named(upfl: Upfl, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        upfl("show", "digits", "-o", str(tmp_path / name))
