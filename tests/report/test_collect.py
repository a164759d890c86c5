"""Run folders that a report is made of, whatever they hold."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugin_methods import result, upfl
from upfl.report import rendering
from upfl.report.collect import collect, names
from upfl.report.lines import arrange
from upfl.report.tables import clients_table, cost_table, newcomer_variables, newcomers_table, setting_table

pytestmark = pytest.mark.usefixtures("wide")


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
    said = upfl("report", folder, "-o", tmp_path / "out").ended()
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
    said.ended(4, "missing: there is no such folder", "empty: not a run folder")
    assert not (tmp_path / "out").exists()


def test_an_unknown_reference_gets_the_nearest(runs: Path, tmp_path: Path) -> None:
    upfl("report", runs, "-o", tmp_path / "out", "--reference", "tnet").ended(2, "did you mean tent")
    upfl("report", runs, "-o", tmp_path / "out", "--reference", "tent").ended()
    assert "Against TENT" in (tmp_path / "out" / "tables" / "digits.md").read_text()
