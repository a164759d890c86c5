"""Live views of a run in TensorBoard or MLflow: observers that write local files, and nothing to a network.

TensorBoard's events go to RUN/tensorboard (`tensorboard --logdir runs`), MLflow's to mlflow.db beside the run folder
(`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`). A resumed run goes on in the same curves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from upfl.errors import ConfigError
from upfl.suggest import unknown

if TYPE_CHECKING:
    from upfl.engine.rounds import Engine, Observer


def tracker(name: str) -> Observer:
    """A tracker by its name; says what to install where its package is missing."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise ConfigError(f'--track {name}: {error}; pip install "upfl[{name}]"') from error


class Several:
    """Observers that watch together."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def begin(self, run: Engine[Any]) -> None:
        for observer in self.observers:
            observer.begin(run)

    def note(self, text: str) -> None:
        for observer in self.observers:
            observer.note(text)

    def stage(self, what: str) -> None:
        for observer in self.observers:
            observer.stage(what)

    def round(self, metrics: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.round(metrics)


class TensorBoard:
    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter

    def begin(self, run: Engine[Any]) -> None:
        # Events of rounds after the checkpoint, from before a stop, are no longer shown.
        folder, config = run.folder.path / "tensorboard", run.config.to_toml()
        self._writer = self._open(str(folder), purge_step=run.progress.round + 1)
        self._rounds = run.config.rounds
        if run.progress.round == 0:
            self._writer.add_text("configuration", "\n".join(f"    {line}" for line in config.splitlines()))

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None:
        for name, value in _numbers(metrics):
            self._writer.add_scalar(name, value, metrics["round"])
        self._writer.flush()
        if metrics["round"] == self._rounds:
            self._writer.close()


class MLflow:
    def __init__(self) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would call home
        from mlflow import MlflowClient

        self._open = MlflowClient

    def begin(self, run: Engine[Any]) -> None:
        path = run.folder.path.resolve()
        self._client = self._open(f"sqlite:///{path.parent / 'mlflow.db'}")
        self._rounds = run.config.rounds
        experiment = self._client.get_experiment_by_name("upfl")
        where = experiment.experiment_id if experiment else self._client.create_experiment("upfl")
        found = [one for one in self._client.search_runs([where]) if one.data.tags.get("folder") == path.name]
        if found and run.progress.round:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(where, run_name=path.name, tags={"folder": path.name}).info.run_id
        for key, value in _leaves(run.config.model_dump(mode="json", exclude_none=True)):
            self._client.log_param(self._run, key, value)

    def note(self, text: str) -> None: ...

    def stage(self, what: str) -> None: ...

    def round(self, metrics: dict[str, Any]) -> None:
        for name, value in _numbers(metrics):
            allowed = re.sub(r"[^\w\-. :/]", "_", name.replace("+", "p"))
            self._client.log_metric(self._run, allowed, value, step=metrics["round"])
        if metrics["round"] == self._rounds:
            self._client.set_terminated(self._run)


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def _numbers(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A round's numbers by name; a row's as `test/fedtta`, so that rows are shown in one chart."""
    for name, value in metrics.items():
        if isinstance(value, int | float) and name != "round":
            yield name, float(value)
    yield "left_out", float(len(metrics["left_out"]))
    for row, scores in metrics.get("rows", {}).items():
        for name, value in scores.items():
            if isinstance(value, int | float):
                yield f"{name}/{row}", float(value)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
