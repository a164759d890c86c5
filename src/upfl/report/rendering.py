"""A table as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from html import escape
from itertools import groupby

from upfl.report.tables import Cell, Column, Table
from upfl.safe import text as safe_text

Groups = list[tuple[str, int]]


def markdown(table: Table) -> str:
    """Markdown's tables have one line of titles: the first column of a group carries its name, too."""
    titles = []
    for group, columns in groupby(table.columns, key=lambda column: column.group):
        first, *others = (column.title for column in columns)
        titles += [f"{group}: {first}" if group else first, *others]
    lines = [
        f"| {' | '.join(map(_markdown_text, titles))} |",
        f"|{'|'.join('---' if column.text else '---:' for column in table.columns)}|",
        *(f"| {' | '.join(_markdown_cell(cell) for cell in row)} |" for row in table.rows),
    ]
    notes = [f"\n{_markdown_text(note)}" for note in table.notes]
    return "\n".join([*lines, *notes]) + "\n"


def _markdown_cell(cell: Cell) -> str:
    text = _markdown_text(cell.text())
    if cell.mark and text:
        text = f"**{text}**" if cell.mark == "best" else f"<u>{text}</u>"
    return f"{text} ({_markdown_text(cell.aside)})" if cell.aside else text


def _markdown_text(text: str) -> str:
    return safe_text.markdown(text)


def latex(table: Table) -> str:
    """A tabular for the package booktabs."""
    columns = "".join("l" if column.text else "r" for column in table.columns)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    if any(column.group for column in table.columns):
        lines.append(" & ".join(_latex_group(group, size) for group, size in _groups(table.columns)) + r" \\")
    lines.append(" & ".join(_latex_text(column.title) for column in table.columns) + r" \\")
    lines.append(r"\midrule")
    lines += [" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in table.rows]
    notes = [f"% {_latex_text(note)}" for note in table.notes]
    return "\n".join([*notes, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_group(group: str, size: int) -> str:
    return rf"\multicolumn{{{size}}}{{c}}{{{_latex_text(group)}}}" if group else " & " * (size - 1)


def _latex_cell(cell: Cell) -> str:
    text = _latex_text(cell.text())
    if cell.mark and text:
        text = rf"\textbf{{{text}}}" if cell.mark == "best" else rf"\underline{{{text}}}"
    return rf"{text} {{\scriptsize({_latex_text(cell.aside)})}}" if cell.aside else text


_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "\N{MINUS SIGN}": r"$-$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\n": " ",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(table: Table) -> str:
    """Numbers in full, and what belongs to them in columns of their own."""
    parts: list[tuple[str, Callable[[Cell], object]]] = [
        ("", lambda cell: cell.value),
        ("spread", lambda cell: cell.spread),
        ("low", lambda cell: cell.interval[0] if cell.interval else None),
        ("high", lambda cell: cell.interval[1] if cell.interval else None),
        ("beyond sampling error", lambda cell: True if cell.flag else None),
        ("note", lambda cell: cell.aside or None),
    ]
    used = [
        (place, suffix, value)
        for place in range(len(table.columns))
        for suffix, value in parts
        if not suffix or any(value(row[place]) is not None for row in table.rows)
    ]
    names = [" ".join(filter(None, (column.group, column.title))) for column in table.columns]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([_csv_value(" ".join(filter(None, (names[place], suffix)))) for place, suffix, _ in used])
    for row in table.rows:
        values = [value(row[place]) for place, _, value in used]
        writer.writerow(["" if value is None else _csv_value(value) for value in values])
    return output.getvalue()


def _csv_value(value: object) -> object:
    return safe_text.csv_cell(value) if isinstance(value, str) else value


def html(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{"" if column.text else " class=n"}>{escape(column.title)}</th>' for column in table.columns
    )
    groups = ""
    if any(column.group for column in table.columns):
        cells = "".join(
            f'<th colspan="{size}" class="g">{escape(group)}</th>' for group, size in _groups(table.columns)
        )
        groups = f"<tr>{cells}</tr>"
    body = "".join(
        f"<tr>{''.join(_html_cell(cell, column) for cell, column in zip(row, table.columns, strict=True))}</tr>\n"
        for row in table.rows
    )
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in table.notes)
    return (
        f'<div class="scroll"><table id="{escape(table.name)}"><thead>{groups}<tr class="h">{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>{notes}"
    )


def _html_cell(cell: Cell, column: Column) -> str:
    value = escape(str(cell.value)) if cell.value is not None else ""
    kind = " ".join(filter(None, ("" if column.text else "n", cell.mark)))
    text = escape(cell.text())
    for sign, name in ((" ±", "s"), (" [", "i")):  # what follows the value is quieter
        before, found, after = text.partition(sign)
        if found and not isinstance(cell.value, str):
            text = f'{before}<span class="{name}">{found}{after}</span>'
            break
    aside = f"<small>{escape(cell.aside)}</small>" if cell.aside else ""
    return f'<td class="{kind}" data-value="{value}">{text}{aside}</td>'


def _groups(columns: list[Column]) -> Groups:
    return [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
