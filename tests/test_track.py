"""Trackers: what TensorBoard and MLflow read back is what the run's metrics say, also after a resumption."""

import sys
from pathlib import Path

import pytest

from tests.helpers.cli import refused, train
from tests.observers import Interrupting
from tests.plugin_methods import lines, small
from upfl import api
from upfl.track import Several, tracker


def stopped_and_resumed(run: Path, name: str) -> None:
    """A run whose third round is tracked twice: its checkpoint is older."""
    config = small("fedtta-prox", score=["early-stopped"], checkpoint_every=2, evaluate_every=1)
    with pytest.raises(KeyboardInterrupt):
        api.train(config, run, workers=1, observer=Several([tracker(name), Interrupting(3)]))
    api.resume(run, workers=1, observer=tracker(name))


def test_tensorboard_shows_each_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    stopped_and_resumed(run, "tensorboard")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for tag, wanted in wanted_numbers(run).items():
        assert [(event.step, event.value) for event in events.Scalars(tag)] == [
            (step, pytest.approx(value)) for step, value in wanted
        ]


def test_mlflow_has_the_numbers_and_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from mlflow import MlflowClient

    run = tmp_path / "run"
    stopped_and_resumed(run, "mlflow")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mlflow.db"}
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("upfl")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["training.inner_lr"] == "0.5"
    assert found.data.params["dataset"] == "digits"
    for tag, wanted in wanted_numbers(run).items():
        history = client.get_metric_history(found.info.run_id, tag.replace("+", "p"))
        assert {(metric.step, metric.value) for metric in history} == set(wanted)


def wanted_numbers(run: Path) -> dict[str, list[tuple[int, float]]]:
    metrics = lines(run)
    return {
        "loss": [(line["round"], line["loss"]) for line in metrics],
        "gradients": [(line["round"], line["gradients"]) for line in metrics],
        "test/fedtta++": [(line["round"], line["rows"]["fedtta++"]["test"]) for line in metrics],
        "validation/fedtta-prox": [(line["round"], line["rows"]["fedtta-prox"]["validation"]) for line in metrics],
    }


def test_a_tracked_run_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    train(tmp_path / "tracked", "--track", "tensorboard").ended()
    plain = api.train(small("fedavg"), tmp_path / "plain", workers=1)
    assert api.Run(tmp_path / "tracked").result == plain.result


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_tracker_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for loaded in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    refused(train(tmp_path / "run", "--track", name), tmp_path / "run", f'pip install "upfl[{name}]"')


def test_an_unknown_tracker_gets_the_nearest(tmp_path: Path) -> None:
    refused(train(tmp_path / "run", "--track", "mlfow"), tmp_path / "run", "did you mean mlflow")
