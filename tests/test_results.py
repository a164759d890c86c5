"""The results pages: made of summaries that are kept, and the README says nothing that does not stand there."""

import json
import lzma
import re
from pathlib import Path

import pytest
from results import build

import upfl
from upfl.errors import RunError
from upfl.report.collect import METRICS_PACKED, collect

ROOT = Path(__file__).parents[1]
PAGE = "# A page\n\n<!-- build: accuracy small fedavg tent -->\nold\n<!-- end -->\n\nBy hand.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = upfl.configure("fedavg", "digits", profile="smoke", rounds=2, score=["tent"])
    return upfl.train(config, tmp_path_factory.mktemp("runs") / "digits-fedavg-s0-p0", workers=1).path


def test_a_summary_reads_like_its_run_without_its_states(run: Path, tmp_path: Path) -> None:
    assert build.add("small", [run], tmp_path) == []
    kept = tmp_path / "small" / run.name
    (whole,), (summary,) = collect([run]).runs, collect([kept]).runs
    assert (summary.config, summary.result, summary.rounds) == (whole.config, whole.result, whole.rounds)
    assert not list(kept.rglob("*.safetensors"))
    again = tmp_path / "again"
    build.add("small", [kept], again)  # a summary of a summary is the same
    assert (again / "small" / run.name / "result.json").read_bytes() == (kept / "result.json").read_bytes()


def test_a_page_is_made_anew_between_its_marks_only(run: Path, tmp_path: Path) -> None:
    build.add("small", [run], tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    text = build.made(page, tmp_path)
    test = next(row["test"] for row in json.loads((run / "result.json").read_text())["rows"] if row["row"] == "tent")
    assert "| TENT |" in text
    assert f"{test:.2f}" in text
    assert "old" not in text
    assert text.endswith("By hand.\n")
    page.write_text(text)
    assert build.made(page, tmp_path) == text


def test_a_damaged_summary_or_an_unknown_block_is_named(run: Path, tmp_path: Path) -> None:
    build.add("small", [run], tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("accuracy", "accurac"))
    with pytest.raises(RunError, match="accuracy, clients"):
        build.made(page, tmp_path)
    packed = tmp_path / "small" / run.name / METRICS_PACKED
    packed.write_bytes(packed.read_bytes()[:-20])
    page.write_text(PAGE)
    with pytest.raises(RunError, match=r"metrics\.jsonl\.xz"):
        build.made(page, tmp_path)
    packed.write_bytes(lzma.compress(b"{not json}\n"))
    with pytest.raises(RunError, match="damaged"):
        build.made(page, tmp_path)


def test_the_pages_say_what_the_summaries_say() -> None:
    for page in build.pages():
        tables = build._BLOCK.findall(page.read_text(encoding="utf-8"))
        assert all(made.strip() for _, _, made, _ in tables), f"{page.name}: run python -m results.build"
        assert build.made(page, draw=False) == page.read_text(encoding="utf-8"), f"{page.name}: run results.build"


def test_the_summaries_are_small() -> None:
    files = [file for file in build.SUMMARIES.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= build.LIMIT


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_accuracy_in_the_readme_and_on_the_start_page_stands_in_the_results(page: str) -> None:
    readme = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    cells = {cell.strip(" *") for line in readme.splitlines() if line.startswith("|") for cell in line.split("|")}
    shown = {cell for cell in cells if re.fullmatch(r"\d+\.\d+", cell)}
    measured = "\n".join(page.read_text(encoding="utf-8") for page in build.HERE.glob("*.md"))
    there = {float(number) for number in re.findall(r"\d+\.\d+", measured)}
    missing = [cell for cell in shown if not any(_rounds_to(number, cell) for number in there)]
    assert shown
    assert not missing


def _rounds_to(number: float, cell: str) -> bool:
    digits = len(cell.partition(".")[2])
    return abs(number - float(cell)) <= 0.5 / 10.0**digits + 1e-9
