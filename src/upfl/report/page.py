"""The report: from run folders to one page that needs nothing else, with its tables and figures as files beside it.

    OUT/index.html              everything; opens from the file, without a network
    OUT/tables/NAME.{md,tex,csv}
    OUT/figures/NAME.{svg,png}

Every text that comes from a run folder is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path

from upfl import __version__
from upfl.errors import RunError
from upfl.methods import ROWS
from upfl.report import figures, rendering, tables
from upfl.report.collect import Collected, RunData, collect, names
from upfl.report.lines import Setting, arrange, titles
from upfl.report.tables import Table
from upfl.safe.folder import write_file
from upfl.suggest import unknown


@dataclass
class Report:
    """What was made of the runs."""

    settings: list[Setting]
    collected: Collected
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # name: SVG, PNG


def write_report(runs: Iterable[Path], out: Path, reference: str | None = None) -> Report:
    """Write a report on the runs in these folders; what cannot be shown is named in it."""
    collected = collect(runs)
    settings = arrange(collected)
    if not settings:
        reasons = "".join(f"\n  {path}: {reason}" for path, reason in collected.left_out)
        raise RunError(f"there is no finished run to report on{reasons}")
    rows = dict.fromkeys(line.row for setting in settings for line in setting.lines)
    if reference and reference not in rows:
        raise unknown("reference row", reference, rows)
    report = Report(settings, collected)
    content = _page(report, reference)
    for folder in ("tables", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for table in report.tables:
        for ending, form in (("md", rendering.markdown), ("tex", rendering.latex), ("csv", rendering.to_csv)):
            write_file(out / "tables" / f"{table.name}.{ending}", form(table).encode())
    for name, (svg, png) in report.figures.items():
        write_file(out / "figures" / f"{name}.svg", svg.encode())
        write_file(out / "figures" / f"{name}.png", png)
    write_file(out / "index.html", content.encode())
    return report


def _page(report: Report, reference: str | None) -> str:
    called = names(report.collected.runs)
    named = list(zip(report.settings, titles(report.settings), _stems(report.settings), strict=True))
    overview = _table(report, tables.overview_table(report.settings)) if len(report.settings) > 1 else ""
    sections = [_setting(report, setting, title, stem, reference) for setting, title, stem in named]
    cards = "".join(_card(setting, title, stem, reference) for setting, title, stem in named)
    costs = _table(report, tables.cost_table(report.collected.runs, called))
    links = [(f"{stem}-section", title) for _, title, stem in named]
    links += [("costs-section", "Costs"), ("runs", "Runs"), ("reading", "How to read this")]
    anchors = "".join(f'<a href="#{escape(target)}">{escape(text)}</a>' for target, text in links)
    navigation = f"<nav>{anchors}</nav>"
    count, runs = len(report.collected.runs), "".join(_run(run, called[run.path]) for run in report.collected.runs)
    facts = f"{count} run{'s' * (count != 1)}, {sum(len(setting.lines) for setting in report.settings)} rows"
    body = "\n".join(
        [
            f"<header><div><strong>upfl report</strong><span class=facts>{facts}</span>{navigation}</div></header>",
            "<main>",
            _left_out(report.collected.left_out),
            f'<div class="cards">{cards}</div>',
            f"<section><h2>Overview</h2>{overview}</section>" if overview else "",
            *sections,
            f'<section id="costs-section"><h2>Costs</h2>{costs}</section>',
            f'<section id="runs"><h2>Runs</h2>{runs}</section>',
            _READING,
            f"<p class=note>Made by upfl {escape(__version__)}.</p>",
            "</main>",
        ]
    )
    style, script = (
        resources.files("upfl.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>upfl report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>\n{style}</style></head>\n<body>\n{body}\n<script>\n{script}</script>\n</body></html>\n"
    )


def _stems(settings: Sequence[Setting]) -> list[str]:
    """Names for a setting's files: the data set, numbered where it comes more than once."""
    plain = [re.sub(r"\W", "_", setting.dataset) for setting in settings]
    return [
        f"{name}-{plain[: place + 1].count(name)}" if plain.count(name) > 1 else name
        for place, name in enumerate(plain)
    ]


def _card(setting: Setting, title: str, stem: str, reference: str | None) -> str:
    """The row of a setting that validation chooses, at a glance: who picks by test accuracy picks luck, too."""
    best = max(setting.lines, key=lambda line: line.mean(lambda row: row.validation) or 0.0)
    base = setting.reference(reference)
    against = best.against(base) if base and best is not base else None
    words = f"{title}: {best.label}"
    if against and base:
        interval = "" if setting.few else f" [{against.low:+.1f}, {against.high:+.1f}]"
        words += f", {against.value:+.1f}{interval} against {base.label}"
    if setting.few:
        words += f"; {setting.new_clients} new clients are too few for an interval"
    test = best.mean(lambda row: row.test)
    return (
        f'<a class="card" href="#{escape(stem)}-section">'
        '<div class="what">new clients, under the row of best validation</div>'
        f'<div class="big">{"no labels" if test is None else f"{test:.1f}%"}</div><div>{escape(words)}</div></a>'
    )


def _setting(report: Report, setting: Setting, title: str, stem: str, reference: str | None) -> str:
    parts = [
        f'<section id="{escape(stem)}-section"><h2>{escape(title)}</h2>',
        _warnings(setting),
        _table(report, tables.setting_table(setting, stem, reference)),
        _figure(
            report,
            f"{stem}-curves",
            "Learning curves; bands are the lowest and highest of several seeds",
            "Accuracy while training. Right: against the work of local training instead of rounds.",
            figures.learning_curves,
            setting,
        ),
    ]
    for variable in tables.newcomer_variables(setting):
        parts += [
            "<h3>Other new clients</h3>",
            _table(report, tables.newcomers_table(setting, f"{stem}-{variable}", variable)),
            _figure(
                report,
                f"{stem}-{variable}-curves",
                "Accuracy on other new clients",
                "The same trainings on other new clients. Hollow: the paper's figures.",
                figures.newcomer_curves,
                setting,
                variable,
            ),
        ]
    parts += [
        _figure(
            report,
            f"{stem}-sweep",
            "Accuracy against a hyper-parameter",
            "New clients' accuracy against the hyper-parameter; the band is the 95% interval over clients.",
            figures.sweep,
            setting,
        ),
        _figure(
            report,
            f"{stem}-diary",
            "One client's adaptation",
            "One new client, step by step. Dotted: the step with the least entropy. Ring: the step with the best "
            "accuracy, which only the labels know.",
            figures.diary,
            setting,
        ),
        _part(report, "Who gained, who lost", tables.clients_table(setting, f"{stem}-clients", reference)),
        _figure(
            report,
            f"{stem}-changes",
            "Each new client before and after personalization",
            "Every line is a new client, from its accuracy before personalization (grey) to that after "
            "(green gained, red lost), ordered by the former; a mean over training seeds. Rows that change nothing "
            "are not shown.",
            figures.client_changes,
            setting,
        ),
        _figure(
            report,
            f"{stem}-differences",
            "Each new client against the reference row",
            "The same new clients under the reference row.",
            figures.client_differences,
            setting,
            reference,
        ),
        _part(report, "New clients without labels", tables.unscored_table(setting, f"{stem}-unscored")),
        "</section>",
    ]
    return "\n".join(parts)


def _part(report: Report, title: str, table: Table) -> str:
    return f"<h3>{escape(title)}</h3>{_table(report, table)}" if table.rows else ""


def _table(report: Report, table: Table) -> str:
    report.tables.append(table)
    return rendering.html(table)


def _figure(report: Report, name: str, label: str, caption: str, *draw: object) -> str:
    made = figures.drawn(*draw)  # type: ignore[arg-type]
    if made is None:
        return ""
    report.figures[name] = made
    picture = figures.inline(made[0], name, escape(label))
    return f'<figure id="{escape(name)}-figure">{picture}<figcaption>{escape(caption)}</figcaption></figure>'


def _warnings(setting: Setting) -> str:
    """What everyone who sees these rows should know."""
    shown = {line.row for line in setting.lines}
    texts = [f"{method.title} {method.warning}." for method in ROWS if method.row in shown and method.warning]
    for run in setting.runs:
        texts += [f"{note}." for note in run.result.notes]
        if run.result.left_out:
            texts.append(f"{run.name}: {run.result.left_out} client(s) were left out of rounds: see its metrics.jsonl.")
    items = "".join(f"<li>{escape(text)}</li>" for text in dict.fromkeys(texts))
    return f'<div class="warn"><ul>{items}</ul></div>' if items else ""


def _left_out(left_out: Sequence[tuple[str, str]]) -> str:
    if not left_out:
        return ""
    items = "".join(f"<li><code>{escape(path)}</code>: {escape(reason)}</li>" for path, reason in left_out)
    return f'<div class="warn" id="left-out"><strong>Left out</strong><ul>{items}</ul></div>'


def _run(run: RunData, name: str) -> str:
    sessions = "".join(
        f"<li>{escape(', '.join(f'{key} {value}' for key, value in session.items()))}</li>" for session in run.sessions
    )
    commits = ", ".join(tables.commits(run))
    return (
        f"<details><summary><code>{escape(name)}</code>: seed {run.config.seed}, partition seed "
        f"{run.config.partition_seed}, commit <code>{escape(commits[:12])}</code></summary>"
        f"<p><code>{escape(str(run.path))}</code></p><p>Commit: <code>{escape(commits)}</code></p>"
        f"<ul>{sessions or '<li>worked on by: unknown</li>'}</ul><pre>{escape(run.config.to_toml())}</pre></details>\n"
    )


_READING = """<section id="reading"><h2>How to read this</h2><dl>
<dt>Validation, before, test</dt><dd>Percent of samples, all clients together. Validation: training clients,
personalized on their unlabelled validation data; where some are held out, who never train, it is these that validate,
as newcomers, and own validation is that of those who train. Test: new clients after personalization on their own
unlabelled data; before: the model that they receive (where the last layer is refitted, the model as it was trained,
without that layer). All at the round with the best validation accuracy of the row.</dd>
<dt>&plusmn;</dt><dd>Standard deviation over runs with other seeds, where there are several.</dd>
<dt>[low, high]</dt><dd>95% interval of the difference between two rows, from a bootstrap over new clients: clients are
drawn anew with replacement, the same for both rows (paired), 10,000 times. Where it excludes 0, the difference is not
an accident of who the clients are. It says nothing about other partitions or seeds than those shown.</dd>
<dt>Best and second best</dt><dd>Bold and underlined, by the printed digits.</dd>
<dt>Paper, difference</dt><dd>The figure that the paper prints for the row on this data set and kind of partition, and
ours minus it. The paper's clients are another draw than ours.</dd>
<dt>Gradient evaluations</dt><dd>Clients that counted &times; local steps &times; cost of a step, summed over rounds.
The cost is in forward and backward passes of the prediction model.</dd>
</dl></section>"""
