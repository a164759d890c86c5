"""Settings of the app."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.in_process_grid import InProcessGrid
from tests.plugin_methods import ROOT
from upfl.errors import ConfigError
from upfl.flower.server import train
from upfl.flower.terms import Settings


def test_the_app_offers_every_setting_with_its_default() -> None:
    offered = tomllib.loads((ROOT / "flower" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {key.replace("-", "_") for key in offered} == Settings.model_fields.keys()
    assert Settings.of(offered, "pyproject.toml") == Settings()


def test_the_app_installs_nothing() -> None:
    app = tomllib.loads((ROOT / "flower" / "pyproject.toml").read_text())
    assert app["project"]["dependencies"] == []


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run-config: .*\n.*mode"):
        Settings.of({"mode": "trian"}, "run-config")
    with pytest.raises(ConfigError, match="clip and noise belong together"):
        Settings.of({"clip": 1.0}, "run-config")
    with pytest.raises(ConfigError, match="absolute path"):
        train(InProcessGrid({}), Settings(out=Path("here")))
