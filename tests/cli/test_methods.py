"""`upfl methods`."""

import json
import re

import pytest

from tests.plugin_methods import upfl
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS, personalizer_class
from upfl.rows import FURTHER

pytestmark = pytest.mark.usefixtures("methods")


def test_methods_as_json_are_the_table() -> None:
    rows = json.loads(upfl("methods", "--json").ended().out)
    assert isinstance(rows, list)
    assert [row["row"] for row in rows] == [row.row for row in ROWS]
    assert all(row["training"] in TRAININGS and personalizer_class(row["personalizer"]) for row in rows)
    table = {row["row"]: (row["training"], row["personalizer"]) for row in rows}
    assert table["fedtta++"] == ("fedtta-prox", "early-stopped")
    assert table["tent"] == ("fedavg", "tent")
    assert table["fedavg"] == ("fedavg", "none")


def test_methods_name_every_row_and_personalizer() -> None:
    rows = re.findall(r"^([a-z]\S*)", upfl("methods").out, re.MULTILINE)
    assert {row.row for row in ROWS} <= set(rows)
    built_in = {name for name, kind in PERSONALIZERS.items() if kind.__module__.startswith("upfl.")}
    assert {row.personalizer for row in ROWS} | FURTHER.keys() >= built_in
    assert FURTHER.keys() <= built_in & set(rows)


def test_the_summary_fits_a_terminal_of_80_columns_and_breaks_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (("methods",), ("methods", "closed-form-label-shift"), ("data", "list")):
        assert all(len(line) <= 80 for line in upfl(*command).out.splitlines())
    assert "closed-form-label-shift " in upfl("methods").out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedtta++", ("fedtta-prox", "early-stopped", "inner_lr", "adapt_lr")),
        ("refit-label-shift", ("fedavg", "refit", "label-shift")),
        ("auto", ("auto",)),
        ("tent+label-shift", ("tent", "label-shift")),
    ],
)
def test_a_methods_details_have_its_equations_and_hyper_parameters(name: str, words: tuple[str, ...]) -> None:
    said = upfl("methods", name).ended()
    assert all(word in said.out for word in words)
    assert json.loads(upfl("methods", name, "--json").out)["parts"]


def test_methods_say_in_words_which_of_them_take_a_model() -> None:
    said = upfl("methods", "--json", "--plugin", "tests.plugin_models", "--model", "own-batchnorm")
    reasons = {row["row"]: row["why_not"] for row in json.loads(said.out)}
    assert {row for row, reason in reasons.items() if reason} == {"odpfl-hn", "closed-form", "closed-form-label-shift"}
    assert "running statistics" in reasons["odpfl-hn"]
    assert "it makes a model of its own" in reasons["closed-form"]
    headless = json.loads(upfl("methods", "--json", "--model", "tests.plugin_models:Headless").out)
    refused = {row["row"] for row in headless if row["why_not"]}
    assert {"refit", "refit-label-shift", "fedsr", "fedadg", "odpfl-hn", "fed3r", "fedncm"} <= refused
    assert not {"fedavg", "tent", "fedtta", "label-shift"} & refused
    assert "fedper.personal" in next(row["why_not"] for row in headless if row["row"] == "pfl-ensemble")
    assert "no: a hypernetwork" in upfl("methods", "odpfl-hn", "--model", "own-batchnorm").out
    assert upfl("methods", "fedta", "--model", "own-batchnorm").code == 2


def test_an_unknown_method_is_refused() -> None:
    upfl("methods", "fedta").ended(2, "fedtta")
