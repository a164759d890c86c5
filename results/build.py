"""Keep summaries of runs, and make the tables and figures of the results pages from them.

    python -m results.build add NAME RUNS...    keep what the pages need of finished runs, below results/summaries/NAME
    python -m results.build                     make every marked block of every page anew

A summary is a run folder without its states: `config.toml`, `result.json`, `environment.json`, scores on other new
clients, and the metrics, compressed. `upfl report results/summaries/NAME` reads it like a run folder, and the pages
can be made again without training.

A page is written by hand, but for blocks such as this one; what stands between the two marks is made:

    <!-- build: accuracy mnist -->
    <!-- end -->

The blocks are `accuracy`, `clients`, `newcomers` and `costs`, and the figures `curves`, `sweep` and `diary`, each of a
NAME. Rows may be named behind it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from upfl.errors import RunError, UpflError
from upfl.report import figures, rendering, tables
from upfl.report.collect import METRICS_PACKED, Collected, collect, names
from upfl.report.lines import Setting, arrange

HERE = Path(__file__).parent
SUMMARIES = HERE / "summaries"
LIMIT = 5_000_000  # bytes of all summaries together
KEPT = ("config.toml", "environment.json", "diary.json")
_BLOCK = re.compile(r"(<!-- build: (?P<what>[^>]*?) -->\n)(?P<made>.*?)(<!-- end -->)", re.DOTALL)


# Keeping


def add(name: str, paths: Sequence[Path], summaries: Path = SUMMARIES) -> list[str]:
    """Keep summaries of the finished runs in these folders; returns what was left out, and why."""
    collected = collect(paths)
    for run in collected.runs:
        _keep(run.path, summaries / name / run.path.name)
    size = sum(file.stat().st_size for file in summaries.rglob("*") if file.is_file())
    if size > LIMIT:
        raise RunError(f"{summaries}: {size:,} bytes, more than {LIMIT:,}: keep fewer rows, or evaluate less often")
    return [f"{path}: {reason}" for path, reason in collected.left_out]


def _keep(run: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in KEPT:
        if (run / name).exists():
            shutil.copyfile(run / name, to / name)
    for file in (run / "result.json", *sorted(run.glob("newcomers/*.json"))):
        target = to / file.relative_to(run)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":")) + "\n")
    packed = run / METRICS_PACKED
    content = lzma.decompress(packed.read_bytes()) if packed.exists() else (run / "metrics.jsonl").read_bytes()
    (to / METRICS_PACKED).write_bytes(lzma.compress(content, preset=9))


# Making pages


def pages(folder: Path = HERE) -> list[Path]:
    return sorted(page for page in folder.glob("*.md") if _BLOCK.search(page.read_text(encoding="utf-8")))


def made(page: Path, summaries: Path = SUMMARIES, draw: bool = True) -> str:
    """The page with every block made anew; figures are written beside it, if they are to be drawn."""

    def block(match: re.Match[str]) -> str:
        kind, name, *rows = match["what"].split()
        if kind not in BLOCKS:
            raise RunError(f"{page}: block '{kind}': there are {', '.join(BLOCKS)}")
        if kind in FIGURES and not draw:
            return match[0]
        return f"{match[1]}{BLOCKS[kind](page, name, _settings(summaries / name, rows))}{match[4]}"

    return _BLOCK.sub(block, page.read_text(encoding="utf-8"))


def _settings(folder: Path, rows: Sequence[str]) -> list[Setting]:
    settings = arrange(_collected(folder))
    for setting in settings:
        setting.lines = [line for line in setting.lines if not rows or line.row in rows]
    return [setting for setting in settings if setting.lines]


def _collected(folder: Path) -> Collected:
    collected = collect([folder])
    if collected.left_out:
        raise RunError(f"{folder}: {'; '.join(reason for _, reason in collected.left_out)}")
    return collected


def _accuracy(page: Path, name: str, settings: Sequence[Setting]) -> str:
    return "\n".join(rendering.markdown(tables.setting_table(setting, name, None)) for setting in settings)


def _clients(page: Path, name: str, settings: Sequence[Setting]) -> str:
    return "\n".join(rendering.markdown(tables.clients_table(setting, name, None)) for setting in settings)


def _newcomers(page: Path, name: str, settings: Sequence[Setting]) -> str:
    return "\n".join(
        rendering.markdown(tables.newcomers_table(setting, name, variable))
        for setting in settings
        for variable in tables.newcomer_variables(setting)
    )


def _costs(page: Path, name: str, settings: Sequence[Setting]) -> str:
    runs = [run for setting in settings for run in setting.runs]
    table = tables.cost_table(runs, names(runs))
    return rendering.markdown(replace(table, notes=table.notes[:1]))


def _figure(kind: str, page: Path, name: str, settings: Sequence[Setting]) -> str:
    draw, caption, missing = FIGURES[kind]
    text = ""
    for place, setting in enumerate(settings):
        parts = [
            page.stem,
            name,
            *([kind] if kind != "curves" else []),
            *([str(place + 1)] if len(settings) > 1 else []),
        ]
        file = page.with_name(f"{'-'.join(parts)}.png")
        drawn = figures.drawn(draw, setting)
        if drawn is None:
            raise RunError(f"{page}: {kind} {name}: {missing}")
        file.write_bytes(drawn[1])
        text += f"![{setting.title}: {caption}]({file.name})\n"
    return text


Block = Callable[[Path, str, Sequence[Setting]], str]
FIGURES: dict[str, tuple[Callable[[Setting], Any], str, str]] = {  # what is drawn, its caption, why it may be missing
    "curves": (
        figures.learning_curves,
        "accuracy while training, against rounds and against gradient work",
        "its runs were scored once only",
    ),
    "sweep": (figures.sweep, "accuracy against a hyper-parameter", "no row comes with several values of one"),
    "diary": (figures.diary, "one client's adaptation, step by step", "no run has a diary"),
}
BLOCKS: dict[str, Block] = {
    "accuracy": _accuracy,
    "clients": _clients,
    "newcomers": _newcomers,
    "costs": _costs,
    **{kind: partial(_figure, kind) for kind in FIGURES},
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.build", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    keep = commands.add_parser("add", help="keep summaries of finished runs")
    keep.add_argument("name", help="of the folder below results/summaries")
    keep.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold some")
    given = parser.parse_args(arguments)
    try:
        if given.command == "add":
            for reason in add(given.name, given.runs):
                print(f"left out: {reason}", file=sys.stderr)
        for page in pages():
            page.write_text(made(page), encoding="utf-8")
            print(page.relative_to(HERE.parent))
    except UpflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
