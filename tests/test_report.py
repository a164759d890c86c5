"""The report: its statistics against known cases, its tables against the runs, and the page in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from tests.browser import CHROMIUM, MISSING, check, opened
from tests.plugin_methods import result, small, upfl
from upfl import api
from upfl.data.partition import default_partition
from upfl.methods import ROWS
from upfl.report import figures, rendering
from upfl.report.collect import collect, names
from upfl.report.lines import arrange
from upfl.report.page import write_report
from upfl.report.paper import paper_figure
from upfl.report.tables import (
    Cell,
    Column,
    Table,
    clients_table,
    cost_table,
    newcomer_variables,
    newcomers_table,
    setting_table,
)
from upfl.statistics import bootstrap, mean_over_seeds, paired, spread


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings with two seeds each, on all clients of a small federation."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for method, score in (("fedavg", ["tent"]), ("fedtta", [])):
            config = small(method, "iterations=5", score=score, seed=seed, rounds=6, clients_per_round=8)
            api.train(config, folder / f"{method}-{seed}", workers=1)
    return folder


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    write_report([runs], out)
    return out


def test_every_row_has_a_colour_of_its_own_and_others_have_one_too() -> None:
    lines: Any = [SimpleNamespace(row=row) for row in [*(method.row for method in ROWS), "tent+calibrated", "em"]]
    colours = [to_hex(figures.colour(lines, line)) for line in lines]
    assert len(set(colours)) == len(lines)


# Statistics


def test_a_constant_difference_has_no_spread() -> None:
    samples = np.array([10.0, 20.0, 40.0])
    interval = bootstrap([(0.05 * samples, samples)])
    assert (interval.value, interval.low, interval.high) == pytest.approx((5, 5, 5))
    assert interval.error == pytest.approx(0)


def test_the_interval_of_equal_clients_is_that_of_the_mean() -> None:
    """With clients of one size the bootstrap of the mean has the standard error sd / sqrt(n) (sd of the sample)."""
    rng = np.random.default_rng(0)
    accuracy = rng.normal(0.6, 0.1, 400)
    interval = bootstrap([(100 * accuracy, np.full(400, 100.0))])
    error = 100 * accuracy.std() / np.sqrt(400)
    assert interval.value == pytest.approx(100 * accuracy.mean())
    assert interval.error == pytest.approx(error, rel=0.03)
    assert interval.low == pytest.approx(interval.value - 1.96 * error, abs=0.08)
    assert interval.high == pytest.approx(interval.value + 1.96 * error, abs=0.08)


def test_two_clients_are_drawn_in_the_four_ways() -> None:
    """Of (0 of 10, 30 of 30): both first 0%, both second 100%, one of each 75%, twice as often."""
    interval = bootstrap([(np.array([0.0, 30.0]), np.array([10.0, 30.0]))])
    assert (interval.low, interval.high) == (0, 100)
    assert interval.error == pytest.approx(np.std([0, 75, 75, 100]), rel=0.02)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        sizes = rng.integers(20, 200, 60).astype(float)
        found = bootstrap([(rng.binomial(sizes.astype(int), 0.7).astype(float), sizes)], draws=500)
        covered += found.low <= 70 <= found.high
    assert 0.90 < covered / 300 < 0.985


def test_partitions_have_clients_of_their_own() -> None:
    """The error of a mean over two independent partitions is 1 / sqrt(2) of one's."""
    rng = np.random.default_rng(2)
    first, second = ((rng.normal(50, 10, 200), np.full(200, 100.0)) for _ in range(2))
    one, both = bootstrap([first]), bootstrap([first, second])
    assert both.value == pytest.approx((one.value + bootstrap([second]).value) / 2)
    assert both.error == pytest.approx(one.error / np.sqrt(2), rel=0.12)


def test_pairing_takes_away_what_clients_have_in_common() -> None:
    rng = np.random.default_rng(3)
    hard = {c: (float(rng.integers(20, 90)), 100) for c in range(50)}
    better = {c: (correct + 2 + c % 2, 100) for c, (correct, _) in hard.items()}
    difference = bootstrap([paired([better], [hard])])
    assert difference.value == pytest.approx(2.5)
    assert difference.error < 0.1 < bootstrap([mean_over_seeds([hard])]).error


def test_clients_that_only_one_row_has_do_not_count() -> None:
    correct, samples = paired([{0: (5, 10), 1: (9, 10)}], [{1: (4, 10), 2: (1, 10)}])
    assert (correct.tolist(), samples.tolist()) == ([5], [10])


def test_spread_is_the_sample_standard_deviation_and_one_run_has_none() -> None:
    assert spread([1.0, 3.0]) == pytest.approx(np.sqrt(2))
    assert spread([1.0]) is None


# Tables against the runs


def read(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text())))


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


def test_the_difference_to_the_reference_is_that_of_the_accuracies(page: Path) -> None:
    rows = {line["Method"]: line for line in read(page / "tables" / "digits.csv")}
    for name in ("TENT", "FedTTA"):
        difference = float(rows[name]["Test"]) - float(rows["FedAvg"]["Test"])
        assert float(rows[name]["Against FedAvg [95%]"]) == pytest.approx(difference)
        assert (
            float(rows[name]["Against FedAvg [95%] low"])
            <= difference
            <= float(rows[name]["Against FedAvg [95%] high"])
        )
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


def test_a_sweep_is_told_apart_by_what_differs(tmp_path: Path) -> None:
    for rate in (0.1, 0.3):
        api.train(small("fedtta", f"inner_lr={rate}"), tmp_path / f"run-{rate}", workers=1)
    (setting,) = arrange(collect([tmp_path]))
    assert [line.label for line in setting.lines] == ["FedTTA (inner_lr 0.1)", "FedTTA (inner_lr 0.3)"]
    with_figure = figures.drawn(figures.sweep, setting)
    assert with_figure is not None


def test_the_papers_figures_stand_where_they_belong() -> None:
    mnist = paper_figure("mnist", default_partition("mnist"), "fedtta++")
    assert mnist is not None
    assert (mnist.test, mnist.validation) == (98.66, 98.94)
    shifted = default_partition("cifar10").revised({"kind": "dirichlet", "alpha_training": 0.1, "alpha_new": 0.01})
    table_2 = paper_figure("cifar10", shifted, "fedtta++")
    assert table_2 is not None
    assert table_2.test == 94.49
    less = paper_figure("cifar10", default_partition("cifar10").revised({"new_fraction": 0.1}), "fedtta")
    assert less is not None
    assert less.test == 75.40
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
    assert (first["A & B Test"], first["A & B Test spread"], first["A & B Against [95%] low"]) == (
        "50.0",
        "1.0",
        "-2.0",
    )
    assert (second["A & B Test"], second["A & B Against [95%] beyond sampling error"]) == ("", "True")
    assert second["A & B Against [95%] note"] == "paper 3 (-1)"


# The page


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    text = (page / "index.html").read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert [link for link in links if not link.startswith("#") and link != "data:,"] == []
    assert re.findall(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", text) == []


def test_figures_are_valid_files_and_the_same_every_time(runs: Path, page: Path, tmp_path: Path) -> None:
    names = {file.stem for file in (page / "figures").iterdir()}
    assert names == {"digits-curves", "digits-changes", "digits-differences"}
    write_report([runs], tmp_path)
    for name in names:
        ET.parse(page / "figures" / f"{name}.svg")
        assert (page / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        for ending in ("svg", "png"):
            ours, theirs = (folder / "figures" / f"{name}.{ending}" for folder in (page, tmp_path))
            assert ours.read_bytes() == theirs.read_bytes()
    assert (page / "index.html").read_text() == (tmp_path / "index.html").read_text()


def test_configuration_and_commit_of_each_run_are_shown(runs: Path, page: Path) -> None:
    text = (page / "index.html").read_text()
    for run in sorted(runs.iterdir()):
        (session,) = json.loads((run / "environment.json").read_text())
        assert f"<code>{run.name}</code>" in text
        assert session["commit"] in text
    assert "[training]\nname = &quot;fedtta&quot;" in text


def damaged(runs: Path, folder: Path) -> Path:
    """The runs beside a broken, an unfinished and a foreign one."""
    shutil.copytree(runs, folder)
    for name in ("broken-config", "broken-result", "broken-rows", "broken-metrics", "unfinished"):
        shutil.copytree(runs / "fedtta-0", folder / name)
    (folder / "broken-config" / "config.toml").write_text("method = ")
    (folder / "broken-result" / "result.json").write_text('{"rows": [')
    value = result(folder / "broken-rows")
    value["rows"][0]["clients"][0]["accuracy"] = float("nan")
    (folder / "broken-rows" / "result.json").write_text(json.dumps(value))
    lines = (folder / "broken-metrics" / "metrics.jsonl").read_text().splitlines()
    (folder / "broken-metrics" / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (folder / "unfinished" / "result.json").unlink()
    (folder / "foreign").mkdir()
    (folder / "foreign" / "events.log").write_text("something else\n")
    (folder / "also-foreign").mkdir()
    (folder / "also-foreign" / "config.toml").write_text('title = "another program"\n')
    return folder


BAD = ("also-foreign", "broken-config", "broken-metrics", "broken-result", "broken-rows", "foreign", "unfinished")


def test_broken_unfinished_and_foreign_runs_are_named_and_the_others_shown(
    runs: Path, page: Path, tmp_path: Path
) -> None:
    folder = damaged(runs, tmp_path / "runs")
    said = upfl("report", folder, "-o", tmp_path / "out")
    assert said.code == 0
    text = (tmp_path / "out" / "index.html").read_text()
    left_out = text[text.index('id="left-out"') : text.index('class="cards"')]
    for name in BAD:
        assert re.search(rf"left out: \S*/{name}: ", said.err), said.err
        assert f"/{name}</code>: " in left_out
    assert "upfl resume" in left_out
    for table in sorted((page / "tables").glob("digits*")):
        assert (tmp_path / "out" / "tables" / table.name).read_text() == table.read_text()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of a list, those in its first item."""
    yield path
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@pytest.mark.parametrize("name", ["result.json", "newcomers/alpha_new=0.1.json", "diary.json", "environment.json"])
@pytest.mark.parametrize("wrong", [None, "<x>", -1, 1e308, [], {}], ids=repr)
def test_whatever_stands_in_a_run_folder_a_report_is_made_or_it_is_named(
    runs: Path, tmp_path: Path, name: str, wrong: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fedavg-0", run)
    good = {
        "result.json": result(run),
        "newcomers/alpha_new=0.1.json": {"changes": {"alpha_new": 0.1}, "rows": result(run)["rows"]},
        "diary.json": [{"row": "tent", "client": 0, "samples": 5, "accuracy": [1.0], "loss": [1.0], "entropy": [1.0]}],
        "environment.json": json.loads((run / "environment.json").read_text()),
    }[name]
    (run / name).parent.mkdir(exist_ok=True)
    for place in places(good):
        value = json.loads(json.dumps(good))
        target = value
        for key in place[:-1]:
            target = target[key]
        if place:
            target[place[-1]] = wrong
        (run / name).write_text(json.dumps(value if place else wrong))
        collected = collect([run])
        settings = arrange(collected)
        assert len(settings) + len(collected.left_out) == 1
        for setting in settings:
            for table in (
                setting_table(setting, "t", None),
                clients_table(setting, "t", None),
                cost_table(collected.runs, names(collected.runs)),
                *(newcomers_table(setting, "t", variable) for variable in newcomer_variables(setting)),
            ):
                for form in (rendering.markdown, rendering.latex, rendering.to_csv, rendering.html):
                    assert "<x>" not in form(table) or form is not rendering.html


def test_a_run_that_is_there_twice_counts_once(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedtta-0", tmp_path / "copy")
    collected = collect([runs, tmp_path, runs / "fedtta-0"])
    (setting,) = arrange(collected)
    assert [len(line.runs) for line in setting.lines] == [2, 2, 2]
    assert [(Path(path).name, "repeats" in reason) for path, reason in collected.left_out] == [("copy", True)]


def test_nothing_to_report_on_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = upfl("report", tmp_path / "empty", tmp_path / "missing", "-o", tmp_path / "out")
    assert said.code == 4
    assert "missing: there is no such folder" in said.err
    assert "empty: not a run folder" in said.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_reference_gets_the_nearest(runs: Path, tmp_path: Path) -> None:
    said = upfl("report", runs, "-o", tmp_path / "out", "--reference", "tnet")
    assert said.code == 2
    assert "did you mean tent" in said.err
    said = upfl("report", runs, "-o", tmp_path / "out", "--reference", "tent")
    assert said.code == 0
    assert "Against TENT" in (tmp_path / "out" / "tables" / "digits.md").read_text()


def test_text_from_a_run_folder_cannot_become_part_of_the_page(runs: Path, tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">$\\alpha$'
    run = tmp_path / "runs" / "<b>run"
    shutil.copytree(runs / "fedavg-0", run)
    value = result(run)
    value["rows"][0]["row"] = evil
    value["notes"] = [evil]
    (run / "result.json").write_text(json.dumps(value))
    metrics = (run / "metrics.jsonl").read_text().replace('"fedavg"', json.dumps(evil))
    (run / "metrics.jsonl").write_text(metrics)
    (run / "checkpoint.safetensors").unlink()  # who changes the metrics can do so
    (run / "environment.json").write_text(json.dumps([{"commit": evil, "workers": evil}]))
    (tmp_path / "runs" / "<i>foreign").mkdir()
    write_report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    assert "<img" not in text
    assert "<b>run" not in text
    assert "<i>" not in text
    assert "&lt;img src=x" in text
    for svg in (tmp_path / "out" / "figures").glob("*.svg"):
        ET.parse(svg)


def test_bytes_sent_are_shown_where_runs_have_them(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-0", tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").unlink()  # it has the metrics' digest
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    silent = [{key: value for key, value in line.items() if not key.startswith("bytes_")} for line in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in silent))
    assert "Sent up" not in write_and_read(tmp_path / "run", tmp_path / "without")
    told = [line | {"bytes_up": 2_000_000, "bytes_down": 500_000} for line in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    write_and_read(tmp_path / "run", tmp_path / "with")
    (line,) = read(tmp_path / "with" / "tables" / "costs.csv")
    assert (float(line["Sent up, MB"]), float(line["Sent down, MB"])) == (12.0, 3.0)


def write_and_read(run: Path, out: Path) -> str:
    write_report([run], out)
    return (out / "index.html").read_text()


def test_runs_of_an_older_version_without_work_and_commit_can_be_shown(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedtta-0", tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    (tmp_path / "run" / "checkpoint.safetensors").unlink()  # which had no digest of the metrics
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["gradients"]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([tmp_path / "run"], tmp_path / "out")
    (line,) = read(tmp_path / "out" / "tables" / "costs.csv")
    assert (line["Gradient evaluations"], line["Commit"]) == ("unknown", "unknown")


# In a browser


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_page_opens_in_a_browser_without_a_console_error(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><script>throw new Error('seen')</script>")
    assert any("seen" in line for line in opened(broken)[1]), "this test would see no error"
    assert check(page / "index.html") == "3 tables, 3 figures, no console error"


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_click_on_a_title_sorts_the_table(page: Path, tmp_path: Path) -> None:
    click = "<script>document.querySelectorAll('#digits tr.h th')[3].click()</script></body>"
    clicked = tmp_path / "clicked.html"
    clicked.write_text((page / "index.html").read_text().replace("</body>", click))
    dom, console = opened(clicked)
    assert console == []
    table = dom[dom.index('<table id="digits">') : dom.index("</table>")]
    order = re.findall(r'<tr><td class="" data-value="([^"]+)"', table)
    tests: dict[str, Any] = {line["Method"]: float(line["Test"]) for line in read(page / "tables" / "digits.csv")}
    assert order == sorted(tests, key=lambda name: -tests[name])
