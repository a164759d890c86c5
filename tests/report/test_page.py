"""The page: it needs nothing but itself, and opens in a real browser."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, MISSING, check, opened
from tests.helpers.reports import read
from tests.plugin_methods import lines, result
from upfl.report.page import write_report

pytestmark = pytest.mark.usefixtures("wide")


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
    told = lines(tmp_path / "run")
    silent = [{key: value for key, value in line.items() if not key.startswith("bytes_")} for line in told]
    rewrite(tmp_path / "run", silent)
    assert "Sent up" not in write_and_read(tmp_path / "run", tmp_path / "without")
    rewrite(tmp_path / "run", [line | {"bytes_up": 2_000_000, "bytes_down": 500_000} for line in told])
    write_and_read(tmp_path / "run", tmp_path / "with")
    (line,) = read(tmp_path / "with" / "tables" / "costs.csv")
    assert (float(line["Sent up, MB"]), float(line["Sent down, MB"])) == (12.0, 3.0)


def rewrite(run: Path, metrics: list[dict[str, Any]]) -> None:
    """Other metrics; the checkpoint, which has their digest, is gone."""
    (run / "checkpoint.safetensors").unlink(missing_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def write_and_read(run: Path, out: Path) -> str:
    write_report([run], out)
    return (out / "index.html").read_text()


def test_runs_of_an_older_version_without_work_and_commit_can_be_shown(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedtta-0", tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    told = lines(tmp_path / "run")
    rewrite(tmp_path / "run", [{key: value for key, value in line.items() if key != "gradients"} for line in told])
    write_report([tmp_path / "run"], tmp_path / "out")
    (line,) = read(tmp_path / "out" / "tables" / "costs.csv")
    assert (line["Gradient evaluations"], line["Commit"]) == ("unknown", "unknown")


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


def test_the_headline_goes_by_validation_and_no_interval_over_few_clients(
    runs: Path, page: Path, tmp_path: Path
) -> None:
    """Whoever wins on new clients' labels is not the one that a federation could have known to choose."""
    shutil.copytree(runs / "fedavg-0", tmp_path / "run")
    value = result(tmp_path / "run")
    for row, validation, test in zip(value["rows"], (99.0, 10.0), (20.0, 95.0), strict=True):
        row |= {"validation": validation, "test": test}
    (tmp_path / "run" / "result.json").write_text(json.dumps(value))
    write_report([tmp_path / "run"], tmp_path / "out")
    card = re.findall(r'<a class="card".*?</a>', (tmp_path / "out" / "index.html").read_text())
    assert len(card) == 1
    assert "20.0%" in card[0]
    assert "FedAvg" in card[0]
    assert "TENT" not in card[0]
    text = (page / "index.html").read_text()
    assert re.search(r"\b[1-9] new clients are too few for an interval", text)
    assert "Against FedAvg [95%] low" not in (page / "tables" / "digits.csv").read_text()
