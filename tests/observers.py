"""Observers for tests: what watches a run, and stops it."""

from typing import Any

from upfl.engine.rounds import Engine


class Watching:
    """An observer that does nothing."""

    def begin(self, run: Engine[Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None: ...


class Interrupting(Watching):
    """Stops a run after a round, as Ctrl-C does."""

    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.last:
            raise KeyboardInterrupt
