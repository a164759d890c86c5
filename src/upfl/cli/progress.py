"""A run as one line that moves: round, loss, accuracies, time left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from upfl.cli.console import Console, echo
from upfl.engine.group import under_torchrun
from upfl.engine.rounds import Engine, Observer
from upfl.errors import StoppedError
from upfl.methods import resolve, row_name
from upfl.safe.text import counted
from upfl.track import Several, tracker


@contextmanager
def watched(
    path: Path, title: str, quiet: bool, track: Sequence[str] = (), notes: bool = True
) -> Iterator[Observer | None]:
    """A progress bar and trackers around a run, and the way back into it when it is interrupted."""
    follows = under_torchrun() and os.environ["RANK"] != "0"
    trackers = [] if follows else [tracker(name) for name in track]
    try:
        if quiet or follows:
            yield Several(trackers) if trackers else None
        else:
            with ProgressBar(title, notes) as bar:
                yield Several([bar, *trackers])
    except KeyboardInterrupt:
        if not follows:
            echo(f"stopped; go on with upfl resume {path}", err=True)
        raise typer.Exit(130) from None
    except StoppedError as error:
        raise StoppedError(f"{error}\nThe run can be resumed: upfl resume {path}") from error


class ProgressBar:
    """An observer that draws a progress bar on standard error."""

    def __init__(self, title: str, notes: bool = True) -> None:
        self.console, self._notes = Console(stderr=True), notes
        wide = self.console.width >= 110
        self._bar = Progress(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=30 if wide else 8),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            *([TextColumn("[dim]{task.fields[stage]}")] if wide else []),
            console=self.console,
        )
        self._task = self._bar.add_task(title, total=None, facts="", stage="loading", start=True)
        self._title, self._wide, self._loss, self._scores, self._row = title, wide, "", "", ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.update(self._task, stage="" if error is None else "stopped")
        self._bar.stop()

    def begin(self, run: Engine[Any]) -> None:
        self._bar.update(self._task, total=run.config.rounds, completed=run.progress.round)
        own = resolve(run.config.method)[1][0]
        self._row = row_name(
            run.training.name, own if own in run.setup.personalizers else next(iter(run.setup.personalizers))
        )
        for note in (*_scale(run), *run.setup.notes) if self._notes and run.progress.round == 0 else ():
            self.note(note)

    def note(self, text: str) -> None:
        self.console.print(f"[dim]note: {text}[/dim]")

    def stage(self, what: str) -> None:
        self._bar.update(self._task, stage=what)

    def round(self, metrics: dict[str, Any]) -> None:
        self._loss = f"loss {metrics['loss']:.3f}"
        if (rows := metrics.get("rows")) and self._row in rows:
            own = rows[self._row]
            test = f" test {own['test']:.1f}" if "test" in own else ""  # unless new clients have no labels
            self._scores = f"{self._row}: validation {own['validation']:.1f}{test}"
            if not self.console.is_terminal:  # a log: one line for each evaluation
                self.console.print(f"round {metrics['round']}: {self._loss} {self._scores}")
        for client in metrics["left_out"]:
            self.console.print(
                f"[yellow]round {metrics['round']}: client {client['client']} left out: {client['reason']}[/yellow]"
            )
        facts = f"{self._loss} {self._scores}"
        if not self._wide and self._scores:  # no room for the loss, nor for a name that the title has
            named = self._title.partition(",")[0].strip() == self._row
            facts = self._scores.removeprefix(f"{self._row}: ") if named else self._scores
        self._bar.update(self._task, completed=metrics["round"], facts=facts)


def _scale(run: Engine[Any]) -> Iterator[str]:
    """What a run on data of one's own took where nothing was said; config.toml has all of it."""
    if run.federation.source.digest:
        config, clients = run.config, run.setup.clients
        model = "" if run.training.refuses_models else f"model {config.model.name}, "
        asked = f"{config.participants(clients)} of {counted(clients, 'training client')} in each"
        yield f"{model}{counted(config.rounds, 'round')}, {asked}; {counted(len(run.federation.new), 'newcomer')}"
