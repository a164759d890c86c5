"""Tables of the report against the runs."""

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.reports import read
from tests.plugin_methods import result, small
from upfl import api
from upfl.cli.tables import markdown_table
from upfl.data.partition import default_partition
from upfl.report import figures, rendering
from upfl.report.collect import collect
from upfl.report.lines import arrange
from upfl.report.page import write_report
from upfl.report.paper import paper_figure
from upfl.report.tables import Cell, Column, Table, setting_table

pytestmark = pytest.mark.usefixtures("wide")


def test_the_table_has_the_runs_means_and_spreads(runs: Path, page: Path) -> None:
    for line in read(page / "tables" / "digits.csv"):
        row, training = {"FedAvg": ("fedavg", "fedavg"), "TENT": ("tent", "fedavg"), "FedTTA": ("fedtta", "fedtta")}[
            line["Method"]
        ]
        found = [next(r for r in result(runs / f"{training}-{seed}")["rows"] if r["row"] == row) for seed in (0, 1)]
        for title, key in (("Validation", "validation"), ("Before", "test_before"), ("Test", "test")):
            values = [entry[key] for entry in found]
            assert float(line[title]) == pytest.approx(np.mean(values))
            assert float(line[f"{title} spread"]) == pytest.approx(np.std(values, ddof=1))
        assert line["Runs"] == "2"


def test_the_difference_to_the_reference_is_that_of_the_accuracies(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upfl.report.lines.FEW", 2)
    write_report([runs], tmp_path)
    rows = {line["Method"]: line for line in read(tmp_path / "tables" / "digits.csv")}
    for name in ("TENT", "FedTTA"):
        difference = float(rows[name]["Test"]) - float(rows["FedAvg"]["Test"])
        assert float(rows[name]["Against FedAvg [95%]"]) == pytest.approx(difference)
        low, high = (float(rows[name][f"Against FedAvg [95%] {end}"]) for end in ("low", "high"))
        assert low <= difference <= high
    assert rows["FedAvg"]["Against FedAvg [95%]"] == "reference"


def test_who_gained_and_who_lost_is_counted(runs: Path, page: Path) -> None:
    (line,) = [line for line in read(page / "tables" / "digits-clients.csv") if line["Method"] == "TENT"]
    found = [next(r for r in result(runs / f"fedavg-{seed}")["rows"] if r["row"] == "tent") for seed in (0, 1)]
    new = [[c for c in row["clients"] if c["kind"] == "new"] for row in found]
    gains = [sum(c["accuracy"] - c["before"] for c in both) for both in zip(*new, strict=True)]
    counts = [sum(g > 0 for g in gains), sum(g < 0 for g in gains), sum(g == 0 for g in gains)]
    assert [int(line[f"after against before {what}"]) for what in ("Gained", "Lost", "Same")] == counts


def test_best_and_second_best_are_marked_by_the_printed_digits(runs: Path) -> None:
    (setting,) = arrange(collect([runs]))
    table = setting_table(setting, "t", "fedavg")
    tests = [(round(row[3].value, 2), row[3].mark) for row in table.rows if isinstance(row[3].value, float)]
    ranking = sorted({value for value, _ in tests}, reverse=True)
    for value, mark in tests:
        assert mark == ("best" if value == ranking[0] else "second" if value == ranking[1] else "")


def test_clients_that_validate_for_others_are_told_from_those_who_train(tmp_path: Path) -> None:
    config = small("fedavg", "partition.held_out=0.5", score=["tent"])
    run = api.train(config, tmp_path / "run", workers=1)
    (setting,) = arrange(collect([tmp_path]))
    table = setting_table(setting, "t", None)
    assert [column.title for column in table.columns[1:5]] == ["Validation", "Own validation", "Before", "Test"]
    keys = ("validation", "validation_own", "test_before", "test")
    for cells, row in zip(table.rows, run.result["rows"], strict=True):
        assert [cell.value for cell in cells[1:5]] == [row[key] for key in keys]
    assert {bool(cell.mark) for cells in table.rows for cell in cells[2:4]} == {False}
    assert any(cells[4].mark for cells in table.rows)
    assert "those who train" in markdown_table([run])
    assert "50% of the training clients held out" in table.notes[0]
    figure = figures.learning_curves(setting)
    assert figure is not None
    assert figure.axes[0].get_title() == "Training clients that are held out"


def test_a_sweep_is_told_apart_by_what_differs(tmp_path: Path) -> None:
    for rate in (0.1, 0.3):
        api.train(small("fedtta", f"inner_lr={rate}"), tmp_path / f"run-{rate}", workers=1)
    (setting,) = arrange(collect([tmp_path]))
    assert [line.label for line in setting.lines] == ["FedTTA (inner_lr 0.1)", "FedTTA (inner_lr 0.3)"]
    with_figure = figures.drawn(figures.sweep, setting)
    assert with_figure is not None


def test_the_papers_figures_stand_where_they_belong() -> None:
    shift = {"kind": "dirichlet", "alpha_training": 0.1, "alpha_new": 0.01}
    for dataset, changes, row, test in (
        ("mnist", {}, "fedtta++", 98.66),
        ("cifar10", shift, "fedtta++", 94.49),
        ("cifar10", {"new_fraction": 0.1}, "fedtta", 75.40),
    ):
        found = paper_figure(dataset, default_partition(dataset).revised(changes), row)
        assert found is not None
        assert found.test == test
        assert dataset != "mnist" or found.validation == 98.94
    assert paper_figure("mnist", default_partition("mnist").revised({"clients": 40}), "fedtta") is None
    assert paper_figure("digits", default_partition("digits"), "fedtta") is None


TABLE = Table(
    "t",
    "A table",
    [Column("Method", text=True), Column("Test", group="A & B"), Column("Against [95%]", group="A & B")],
    [
        [Cell("a_b|<i>"), Cell(50.0, spread=1.0, mark="best"), Cell(-1.5, interval=(-2.0, 0.25), signed=True)],
        [Cell("50% \\ ~"), Cell(), Cell(2.0, flag=True, aside="paper 3 (-1)")],
    ],
    ["A note with 5% & <b>."],
)


def test_markdown_keeps_its_shape_whatever_the_texts() -> None:
    lines = rendering.markdown(TABLE).splitlines()
    assert lines[2].replace("\N{MINUS SIGN}", "-") == r"| a\_b\|\<i\> | **50.00 ± 1.00** | -1.50 [-2.00, +0.25] |"
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines[:4])


def test_latex_escapes_what_it_must() -> None:
    text = rendering.latex(TABLE)
    assert r"\multicolumn{2}{c}{A \& B}" in text
    assert r"a\_b|<i> & \textbf{50.00 $\pm$ 1.00} & $-$1.50 [$-$2.00, +0.25] \\" in text
    assert r"50\% \textbackslash{} \textasciitilde{} &  & 2.00 $\dagger$ {\scriptsize(paper 3 (-1))} \\" in text
    assert text.count(r"\\") == 4


def test_csv_has_numbers_in_full() -> None:
    first, second = csv.DictReader(io.StringIO(rendering.to_csv(TABLE)))
    found = [first[f"A & B {what}"] for what in ("Test", "Test spread", "Against [95%] low")]
    assert found == ["50.0", "1.0", "-2.0"]
    assert (second["A & B Test"], second["A & B Against [95%] beyond sampling error"]) == ("", "True")
    assert second["A & B Against [95%] note"] == "paper 3 (-1)"
