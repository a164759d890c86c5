"""The report's tables, as data: what is in them is decided here, what they look like in `formats`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from upfl.methods import ROWS
from upfl.report.collect import RunData
from upfl.report.lines import Line, Setting, titles
from upfl.report.paper import paper_figure
from upfl.statistics import spread


@dataclass(frozen=True)
class Cell:
    """A value with what belongs to it; formats choose the characters."""

    value: float | str | None = None
    spread: float | None = None  # standard deviation over seeds
    interval: tuple[float, float] | None = None
    digits: int = 2
    signed: bool = False
    mark: Literal["", "best", "second"] = ""
    flag: bool = False  # beyond the sampling error
    aside: str = ""  # what stands beside the value, smaller

    def number(self, value: float) -> str:
        text = f"{value:{'+' if self.signed else ''}.{self.digits}f}"
        return text.replace("-", "\N{MINUS SIGN}")  # as wide as a plus

    def text(self) -> str:
        if self.value is None:
            return ""
        if isinstance(self.value, str):
            return self.value
        text = self.number(self.value)
        if self.spread is not None:
            text += f" ± {self.spread:.{self.digits}f}"
        if self.interval is not None:
            text += f" [{self.number(self.interval[0])}, {self.number(self.interval[1])}]"
        return text + (" †" if self.flag else "")


@dataclass(frozen=True)
class Column:
    title: str
    text: bool = False  # left-aligned
    group: str = ""


@dataclass
class Table:
    name: str  # of its files
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)


def setting_table(setting: Setting, name: str, reference: str | None) -> Table:
    """A setting's rows: validation, before and after, against the reference, beside the paper."""
    base = setting.reference(reference)
    figures = {line.row: setting.figure(line.row) for line in setting.lines}
    compare = any(figures.values())
    columns = [Column("Method", text=True), Column("Validation"), Column("Before"), Column("Test")]
    if setting.held_out:
        columns.insert(2, Column("Own validation"))
    if base:
        columns.append(Column(f"Against {base.label} [95%]"))
    if compare:
        columns += [Column("Paper"), Column("Difference")]
    columns.append(Column("Runs"))
    rows = []
    for line in setting.lines:
        row = [
            Cell(line.label),
            Cell(line.mean(lambda row: row.validation), line.spread(lambda row: row.validation)),
            Cell(line.mean(lambda row: row.test_before), line.spread(lambda row: row.test_before)),
            Cell(line.mean(lambda row: row.test), line.spread(lambda row: row.test)),
        ]
        if setting.held_out:
            own = Cell(line.mean(lambda row: row.validation_own), line.spread(lambda row: row.validation_own))
            row.insert(2, own)
        if base:
            difference = line.against(base) if line is not base else None
            row.append(
                Cell(
                    difference.value,
                    interval=None if setting.few else (difference.low, difference.high),
                    signed=True,
                )
                if difference
                else Cell("reference" if line is base else None)
            )
        if compare:
            row += _beside_the_paper(setting, line)
        row.append(Cell(len(line.runs), digits=0))
        rows.append(row)
    _mark(rows, [1, 4 if setting.held_out else 3])
    notes = [f"{setting.title}: {setting.description}. Percent; test is the accuracy on new clients."]
    if setting.held_out:
        notes.append("Validation is that of training clients that never train, own validation that of the others.")
    if not setting.new_clients:
        notes.append("No new client has labels, so that there is no score.")
    if setting.few:
        notes.append(f"{setting.new_clients} new clients are too few for an interval over clients.")
    if compare and not setting.is_the_papers:
        notes.append("The scale is not the paper's, so its figures are for orientation only.")
    elif compare:
        error = "1.96 standard errors of the difference of two draws of so many clients, one of them the paper's"
        if any(cell.flag for row in rows for cell in row):
            notes.append(f"† beyond the sampling error over clients: more than {error}.")
        else:
            notes.append(f"No difference is beyond the sampling error over clients, {error}.")
    return Table(name, f"{setting.title}: accuracy", columns, rows, notes)


def _beside_the_paper(setting: Setting, line: Line) -> list[Cell]:
    figure = setting.figure(line.row)
    if figure is None:
        return [Cell(), Cell()]
    if line.test is None:
        return [Cell(figure.test, figure.test_spread), Cell()]
    difference = (line.mean(lambda row: row.test) or 0.0) - figure.test
    beyond = setting.is_the_papers and abs(difference) > 1.96 * math.sqrt(2) * line.test.error
    return [Cell(figure.test, figure.test_spread), Cell(difference, signed=True, flag=beyond)]


def overview_table(settings: Sequence[Setting]) -> Table:
    """All settings side by side, as the paper's Table 1."""
    labels = list(dict.fromkeys(line.label for setting in settings for line in setting.lines))
    order = {method.title: place for place, method in enumerate(ROWS)}
    labels.sort(key=lambda label: order.get(label, len(order)))
    columns = [Column("Method", text=True)]
    rows = [[Cell(label)] for label in labels]
    named = list(zip(titles(settings), settings, strict=True))
    for title, setting in named:
        columns += [Column("Validation", group=title), Column("Test", group=title)]
        lines = {line.label: line for line in setting.lines}
        for row, label in zip(rows, labels, strict=True):
            line = lines.get(label)
            row += (
                [
                    Cell(line.mean(lambda row: row.validation), line.spread(lambda row: row.validation)),
                    Cell(line.mean(lambda row: row.test), line.spread(lambda row: row.test)),
                ]
                if line
                else [Cell(), Cell()]
            )
    _mark(rows, range(1, len(columns)))
    notes = [f"{title}: {setting.description}." for title, setting in named]
    return Table("overview", "All settings", columns, rows, notes)


NEW_CLIENTS = {"alpha_new": "Dirichlet concentration of new clients", "new_fraction": "fraction of new clients' data"}


def newcomer_values(setting: Setting, line: Line, variable: str) -> dict[float, list[float]]:
    """The line's test accuracies by the value of a partition's field, over seeds; its own new clients included."""
    values: dict[float, list[float]] = {}
    for run, row in line.runs.values():
        if not run.newcomers:
            continue
        scored = [(float(getattr(run.config.partition, variable)), row.test)]
        for other in run.newcomers:
            if list(other.changes) == [variable]:
                scored += [(float(other.changes[variable]), r.test) for r in other.rows if r.row == line.row]
        for value, test in scored:
            if test is not None:
                values.setdefault(value, []).append(test)
    return dict(sorted(values.items()))


def newcomer_variables(setting: Setting) -> list[str]:
    """The fields of the partition by which new clients were varied."""
    changed = [list(other.changes) for run in setting.runs for other in run.newcomers]
    return list(dict.fromkeys(keys[0] for keys in changed if len(keys) == 1))


def newcomers_table(setting: Setting, name: str, variable: str) -> Table:
    """The same trainings on other new clients."""
    by_line = {line.label: newcomer_values(setting, line, variable) for line in setting.lines}
    values = sorted({value for found in by_line.values() for value in found})
    columns = [Column("Method", text=True), Column("Validation")]
    columns += [Column(f"{value:g}", group=NEW_CLIENTS.get(variable, variable)) for value in values]
    rows = []
    for line in setting.lines:
        row = [Cell(line.label), Cell(line.mean(lambda row: row.validation), line.spread(lambda row: row.validation))]
        for value in values:
            found = by_line[line.label].get(value, [])
            cell = Cell(float(np.mean(found)), spread(found)) if found else Cell()
            figure = paper_figure(setting.dataset, setting.partition.revised({variable: value}), line.row)
            if found and figure:
                gap = Cell(float(np.mean(found)) - figure.test, signed=True)
                cell = replace(cell, aside=f"paper {figure.test:.2f} ({gap.text()})")
            row.append(cell)
        rows.append(row)
    _mark(rows, range(1, len(columns)))
    notes = [
        f"{setting.title}: {setting.description}. Percent, on new clients; the training is the same in all columns."
    ]
    if not setting.is_the_papers:
        notes.append("The scale is not the paper's, so its figures are for orientation only.")
    return Table(name, f"{setting.title}: other new clients", columns, rows, notes)


def clients_table(setting: Setting, name: str, reference: str | None) -> Table:
    """Who gained and who lost, of the new clients that have labels."""
    base = setting.reference(reference)
    columns = [Column("Method", text=True)]
    columns += [Column(title, group="accuracy of a new client") for title in ("10%", "Median", "90%")]
    columns += [Column(title, group="after against before") for title in ("Gained", "Lost", "Same")]
    if base:
        columns += [Column(title, group=f"against {base.label}") for title in ("Better", "Worse", "Alike")]
    rows = []
    for line in setting.lines if setting.new_clients else ():
        before, after = line.clients()
        row = [Cell(line.label), *(Cell(float(p), digits=1) for p in np.percentile(after, [10, 50, 90]))]
        row += _signs(after - before)
        if base:
            row += _signs(line.client_differences(base)) if line is not base else [Cell()] * 3
        rows.append(row)
    return Table(name, f"{setting.title}: who gained, who lost", columns, rows, ["Numbers of new clients."])


MOST = 50  # clients without labels that are listed for a line


def unscored_table(setting: Setting, name: str) -> Table:
    """New clients without labels: their class mix, and the accuracy that is estimated."""
    columns = [Column("Method", text=True), Column("Run", text=True), Column("Client", text=True), Column("Samples")]
    columns += [Column("Estimated accuracy", text=True), Column("Class mix", text=True)]
    rows, more = list[list[Cell]](), 0
    for line in setting.lines:
        for run, row in line.runs.values():
            more += max(len(row.unscored) - MOST, 0)
            for client in row.unscored[:MOST]:
                likeliest = sorted(client.mix.items(), key=lambda one: -one[1])[:5]
                estimate = "{:.0%} ({:.0%} to {:.0%})".format(*client.estimates[-1]) if client.estimates else "none"
                mix = ", ".join(f"{name} {share:.0%}" for name, share in likeliest)
                told = (line.label, run.name, str(client.client) if client.name is None else client.name)
                rows.append([*map(Cell, told), Cell(client.samples, digits=0), Cell(estimate), Cell(mix)])
    notes = ["They cannot be scored. The accuracy is estimated without labels, with its 95% interval."]
    if more:
        notes.append(f"{more} more are in the runs' result.json.")
    return Table(name, f"{setting.title}: new clients without labels", columns, rows, notes)


def _signs(differences: Any) -> list[Cell]:
    counts = [(differences > 1e-9).sum(), (differences < -1e-9).sum(), (abs(differences) <= 1e-9).sum()]
    return [Cell(int(count), digits=0) for count in counts]


def cost_table(runs: Sequence[RunData], called: dict[Any, str]) -> Table:
    """What each training took."""
    traffic = any(line.bytes_up is not None for run in runs for line in run.rounds)
    columns = [Column("Run", text=True), Column("Rows", text=True), Column("Rounds"), Column("Gradient evaluations")]
    columns += [Column("Sent up, MB"), Column("Sent down, MB")] if traffic else []
    columns += [Column("Training, s"), Column("Scoring, s"), Column("Workers", text=True)]
    columns += [Column("Left out"), Column("Commit", text=True)]
    rows = []
    for run in runs:
        row = [
            Cell(called[run.path]),
            Cell(", ".join(row.row for row in run.result.rows)),
            Cell(len(run.rounds), digits=0),
        ]
        row.append(_total((line.gradients for line in run.rounds), 1))
        if traffic:
            row += [_total((getattr(line, key) for line in run.rounds), 1e6) for key in ("bytes_up", "bytes_down")]
        row += [_total((line.train_s for line in run.rounds), 1), _total((line.evaluate_s for line in run.rounds), 1)]
        row.append(Cell(", ".join(dict.fromkeys(str(session.get("workers", "?")) for session in run.sessions))))
        row += [Cell(run.result.left_out, digits=0), Cell(", ".join(c[:10] for c in commits(run)))]
        rows.append(row)
    note = (
        "A gradient evaluation is a forward and a backward pass of the prediction model over one batch, counted by "
        "matrix products: an SGD step is 1, a FedTTA step 4. Adaptation by new clients and scoring are not in it. "
        "Times depend on the machine and on what else ran on it."
    )
    return Table("costs", "Work, time and traffic", columns, rows, [note])


def commits(run: RunData) -> list[str]:
    """The commits that a run was worked on with."""
    return list(dict.fromkeys(str(session.get("commit", "unknown")) for session in run.sessions)) or ["unknown"]


def _total(values: Iterable[float | None], unit: float) -> Cell:
    known = list(values)
    if any(value is None for value in known):
        return Cell("unknown")
    return Cell(sum(value for value in known if value is not None) / unit, digits=0 if unit == 1 else 1)


def _mark(rows: list[list[Cell]], columns: Iterable[int]) -> None:
    """The best and the second best value of each column, as they are printed."""
    for column in columns:
        printed = {
            place: round(cell.value, cell.digits)
            for place, cell in enumerate(row[column] for row in rows)
            if isinstance(cell.value, float)
        }
        ranking = sorted(set(printed.values()), reverse=True)
        if len(printed) < 2:
            continue
        for place, value in printed.items():
            if value in ranking[:2]:
                rows[place][column] = replace(rows[place][column], mark="best" if value == ranking[0] else "second")
