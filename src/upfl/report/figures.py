"""The report's figures, drawn once: as PNG and SVG files, and as SVG inside the page.

Inside the page, lines and text of the colour `INK` take the page's own text colour, so that figures are readable on
light and dark ground.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from upfl.methods import ROWS
from upfl.report.lines import Line, Setting
from upfl.report.paper import paper_figure
from upfl.report.tables import NEW_CLIENTS, newcomer_values

INK = "#1d2733"
QUIET = "#8b97a5"
GAIN, LOSS = "#1b9e77", "#d1495b"
_COLOURS = (
    *("#8b97a5", "#b07aa1", "#5b8def", "#c98a3c", "#9c755f", "#76b7b2", "#c3a6d8"),
    *("#b8b052", "#7f8f3f", "#4c9f70", "#f28e2b", "#d1495b", "#7b4fd0", "#1273c4"),
    *("#00b371", "#e0b000", "#00b5c4", "#ff6f91", "#a0522d", "#6f6fb5", "#b5004a", "#ffb37a"),
)
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names come from run folders: a dollar sign is a dollar sign
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.unicode_minus": True,
    "grid.color": QUIET,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "upfl",
}


def styled(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Figure) -> bytes:
    output = io.BytesIO()
    figure.savefig(output, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return output.getvalue()


def svg(figure: Figure) -> str:
    output = io.StringIO()
    figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    return output.getvalue()


def inline(svg: str, name: str, caption: str) -> str:
    """An SVG file as a part of a page: without its header, names of its own, in the page's text colour."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", body).replace(INK, "currentColor")
    body = re.sub(r' (?:width|height)="[^"]*pt"', "", body, count=2)
    # As wide as the page, but not so wide that its letters become larger than the page's.
    width = 1.5 * float(re.findall(r'viewBox="0 0 ([\d.]+)', body)[0])
    return body.replace("<svg ", f'<svg role="img" aria-label="{caption}" style="max-width:{width:.0f}px" ', 1)


def colour(lines: Sequence[Line], line: Line) -> Any:
    """A row's colour, the same in every figure; a row with several hyper-parameters goes from light to dark."""
    same = [other for other in lines if other.row == line.row]
    if len(same) == 1:
        own = {method.row: of_row for method, of_row in zip(ROWS, _COLOURS, strict=False)}
        further = list(dict.fromkeys(other.row for other in lines if other.row not in own))
        return own[line.row] if line.row in own else mpl.colormaps["Dark2"](further.index(line.row) % 8)
    return mpl.colormaps["viridis"](0.1 + 0.8 * same.index(line) / (len(same) - 1))


def learning_curves(setting: Setting) -> Figure | None:
    """Validation and test accuracy against rounds, and test accuracy against gradient work."""
    work = all(round.gradients is not None for run in setting.runs for round in run.rounds)
    if not any(len(_curve(line, "validation", by_work=False)[0]) > 1 for line in setting.lines):
        return None
    validated = "Training clients that are held out" if setting.held_out else "Training clients' validation data"
    wanted = [("validation", False, validated)]
    if setting.new_clients:
        wanted += [("test", by_work, "New clients") for by_work in ((False, True) if work else (False,))]
    figure = styled(11, 3.9)
    panels = figure.subplots(1, len(wanted), sharey=True, squeeze=False)[0]
    for panel, (field, by_work, title) in zip(panels, wanted, strict=True):
        for line in setting.lines:
            x, mean, low, high = _curve(line, field, by_work)
            own = colour(setting.lines, line)
            panel.plot(x, mean, color=own, label=line.label, marker="o" if len(x) < 12 else "", markersize=3)
            if len(line.runs) > 1:
                panel.fill_between(x, low, high, color=own, alpha=0.15, linewidth=0)
        panel.set_title(title)
        panel.set_xlabel("gradient evaluations" if by_work else "rounds")
        panel.xaxis.set_major_locator(MaxNLocator(4 if by_work else 6, integer=True))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[0].set_ylabel("accuracy, %")
    _legend(figure, panels[0])
    return figure


def _curve(line: Line, field: str, by_work: bool) -> tuple[NDArray[Any], ...]:
    """Where the line was evaluated, and its mean, lowest and highest accuracy over seeds there."""
    curves: dict[float, list[float]] = {}
    for run, _ in line.runs.values():
        work = 0.0
        for round in run.rounds:
            work += round.gradients or 0.0
            if line.row in round.rows and (score := getattr(round.rows[line.row], field)) is not None:
                curves.setdefault(work if by_work else round.round, []).append(score)
    full = {x: values for x, values in curves.items() if len(values) == len(line.runs)}
    return (
        np.array(list(full)),
        *(np.array([reduce(values) for values in full.values()]) for reduce in (np.mean, np.min, np.max)),
    )


def client_changes(setting: Setting) -> Figure | None:
    """Every new client before and after, for the rows that change anything."""
    lines = [line for line in setting.lines if not np.array_equal(*line.clients())]
    if not lines:
        return None
    lowest = min(float(min(values.min() for values in line.clients())) for line in lines)
    across = min(5, len(lines))
    down = -(-len(lines) // across)
    figure = styled(max(5.0, 2.2 * across), 0.5 + 2.3 * down)
    panels = np.atleast_1d(figure.subplots(down, across, sharey=True, squeeze=False)).ravel()
    for panel in panels[len(lines) :]:
        panel.set_axis_off()
    for panel, line in zip(panels, lines, strict=False):
        before, after = line.clients()
        order = np.lexsort((after, before))
        before, after, place = before[order], after[order], np.arange(len(order))
        for chosen, own in ((after > before, GAIN), (after < before, LOSS), (after == before, QUIET)):
            panel.vlines(place[chosen], before[chosen], after[chosen], color=own, linewidth=1.4)
            panel.scatter(place[chosen], after[chosen], s=11, color=own, zorder=3)
        panel.scatter(place, before, s=5, color=QUIET, zorder=2)
        gained, lost = int((after > before).sum()), int((after < before).sum())
        panel.set_title(f"{line.label}\n{gained} gained, {lost} lost", fontsize=9)
        panel.set_xticks([])
        panel.grid(axis="x", visible=False)
        panel.spines["bottom"].set_visible(False)
        panel.set_ylim(10 * (lowest // 10) - 3, 103)
    for panel in panels[::across]:
        panel.set_ylabel("accuracy, %")
    return figure


def client_differences(setting: Setting, reference: str | None) -> Figure | None:
    """Each new client's difference to the reference row."""
    base = setting.reference(reference)
    lines = [line for line in setting.lines if base and line is not base and len(line.client_differences(base))]
    if base is None or not lines:
        return None
    figure = styled(9, 1.1 + 0.42 * len(lines))
    panel = figure.subplots()
    for place, line in enumerate(lines):
        values = np.sort(line.client_differences(base))
        nudge = 0.22 * np.sin(np.arange(len(values)) * 2.4)  # dots beside one another, in a fixed order
        own = np.where(values > 0, GAIN, np.where(values < 0, LOSS, QUIET))
        panel.scatter(values, place + nudge, s=14, c=own, alpha=0.75, linewidths=0)
        interval = line.against(base)
        if interval:
            panel.plot([interval.low, interval.high], [place, place], color=INK, linewidth=2.6, solid_capstyle="round")
            panel.scatter([interval.value], [place], s=34, color=INK, zorder=4)
    panel.axvline(0, color=INK, linewidth=0.8)
    panel.set_yticks(range(len(lines)), [line.label for line in lines])
    panel.invert_yaxis()
    panel.set_xlabel(
        f"difference to {base.label}, percentage points: dots are clients, the bar is the mean's 95% interval"
    )
    return figure


def newcomer_curves(setting: Setting, variable: str) -> Figure:
    """Test accuracy against what was varied among new clients; the paper's figures are hollow."""
    figure = styled(7.5, 4)
    panel = figure.subplots()
    for line in setting.lines:
        values = newcomer_values(setting, line, variable)
        own = colour(setting.lines, line)
        panel.plot(
            list(values), [np.mean(v) for v in values.values()], color=own, marker="o", markersize=3.5, label=line.label
        )
        figures = {x: paper_figure(setting.dataset, setting.partition.revised({variable: x}), line.row) for x in values}
        known = {x: found.test for x, found in figures.items() if found}
        panel.scatter(list(known), list(known.values()), s=26, facecolors="none", edgecolors=own, linewidths=0.9)
    if variable == "alpha_new":
        panel.set_xscale("log")
    panel.set_xlabel(NEW_CLIENTS.get(variable, variable))
    panel.set_ylabel("new clients' accuracy, %")
    _legend(figure, panel)
    return figure


def sweep(setting: Setting) -> Figure | None:
    """Test accuracy against a hyper-parameter, where a row comes with several values of one."""
    for row in dict.fromkeys(line.row for line in setting.lines):
        lines = [line for line in setting.lines if line.row == row]
        keys = [key for key in lines[0].hyper if len({repr(line.hyper.get(key)) for line in lines}) > 1]
        if len(keys) != 1 or not all(isinstance(line.hyper.get(keys[0]), int | float) for line in lines):
            continue
        lines.sort(key=lambda line: float(line.hyper[keys[0]]))
        x = [float(line.hyper[keys[0]]) for line in lines]
        intervals = [line.test for line in lines if line.test]
        if len(intervals) < len(lines):
            continue
        figure = styled(6, 3.4)
        panel = figure.subplots()
        before = [line.mean(lambda row: row.test_before) or 0.0 for line in lines]
        panel.plot(x, before, color=_COLOURS[-1], marker=".", linewidth=1, alpha=0.5, label=f"{row}, before")
        panel.plot(x, [i.value for i in intervals], color=_COLOURS[-1], marker="o", label=row)
        panel.fill_between(
            x, [i.low for i in intervals], [i.high for i in intervals], color=_COLOURS[-1], alpha=0.15, linewidth=0
        )
        for line in setting.lines:
            if line.row != row and line.test:
                panel.axhline(line.test.value, color=colour(setting.lines, line), linestyle="--", label=line.label)
        panel.set_xlabel(keys[0].rstrip("_"))
        panel.set_ylabel("new clients' accuracy, %")
        _legend(figure, panel)
        return figure
    return None


def diary(setting: Setting) -> Figure | None:
    """One client's accuracy, personalization loss and entropy against adaptation steps."""
    entries = [
        (line, entry)
        for line in setting.lines
        for run, _ in list(line.runs.values())[:1]
        for entry in run.diary
        if entry.row == line.row
    ]
    if not entries:
        return None
    figure = styled(11, 3.3)
    panels = figure.subplots(1, 3)
    for line, entry in entries:
        own = colour(setting.lines, line)
        least, best = int(np.argmin(entry.entropy)), int(np.argmax(entry.accuracy))
        for panel, values in zip(panels, (entry.accuracy, entry.loss, entry.entropy), strict=True):
            panel.plot(values, color=own, label=f"{line.label}, client {entry.client}")
            panel.axvline(least, color=own, linestyle=":", linewidth=1)
            panel.scatter([least], [values[least]], s=26, color=own, zorder=3)
        panels[0].scatter([best], [entry.accuracy[best]], s=46, facecolors="none", edgecolors=own, zorder=4)
    for panel, title in zip(panels, ("Accuracy, %", "Personalization loss", "Entropy, nats"), strict=True):
        panel.set_title(title)
        panel.set_xlabel("adaptation steps")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(fontsize=8)
    return figure


def _legend(figure: Figure, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, handlelength=1.4)


def drawn(draw: Callable[..., Figure | None], *arguments: Any) -> tuple[str, bytes] | None:
    """A figure as SVG and PNG, or None where there is nothing to draw."""
    with mpl.rc_context(STYLE):
        figure = draw(*arguments)
        return (svg(figure), png(figure)) if figure else None
