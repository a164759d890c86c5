"""The search: what it looks at, that it goes on after any stop, and that what it finds can be trained with."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.plugin_methods import eventually, upfl
from upfl.config import configure
from upfl.engine.folder import RunFolder
from upfl.errors import ConfigError, RunError
from upfl.experiments import search as module
from upfl.experiments.search import SPACES, Search, Tried, best_validation, run
from upfl.methods import PERSONALIZERS, ROWS, TRAININGS

optuna = pytest.importorskip("optuna", reason="the extra `search` is not installed")

SCALE = {"profile": "smoke", "rounds": 2}


def searching(folder: Path, method: str = "fedavg", **options: object) -> Search:
    return Search(folder, method, "digits", options=SCALE, **options)  # type: ignore[arg-type]


def test_every_row_of_the_table_has_a_grid_of_fields_that_exist() -> None:
    for name, choices in SPACES.items():
        kind = TRAININGS.get(name) or PERSONALIZERS.get(name)
        assert kind is not None or name.startswith("hetero"), name
        if kind is not None:
            assert choices.keys() <= kind.Hyper.model_fields.keys()
    for row in ROWS[:14]:
        assert searching(Path("unused"), row.row).size


def test_the_papers_grids() -> None:
    sizes = {
        name: searching(Path("unused"), name).size for name in ("fedavg", "fedprox", "fedgma", "fedtta", "fedtta++")
    }
    assert sizes == {"fedavg": 9, "fedprox": 36, "fedgma": 9 * 5 * 9, "fedtta": 9**3, "fedtta++": 9**3 * 4 * 3}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, list[Tried]]:
    search = searching(tmp_path_factory.mktemp("honest") / "s", "fedprox")
    return search, list(run(search, trials=2, parallel=2))


def test_a_search_reaches_the_training_and_the_personalizer() -> None:
    search = searching(Path("unused"), "fedtta++")
    config = search.config(dict.fromkeys(search.choices, 1) | {"training.inner_lr": 0.03, "early-stopped.patience": 3})
    assert config.training["inner_lr"] == 0.03
    assert config.personalize["early-stopped"]["patience"] == 3


def test_the_best_hyper_parameters_can_be_trained_with(honest: tuple[Search, list[Tried]], tmp_path: Path) -> None:
    search, tried = honest
    assert [trial.error for trial in tried] == ["", ""]
    assert tried[0].values != tried[1].values
    best = max(trial.validation or 0 for trial in tried)
    config = configure("fedprox", "digits", file=search.folder / "best.toml")
    first = (search.folder / "best.toml").read_text().splitlines()[0]
    assert re.fullmatch(r"# Validation accuracy \d+\.\d\d, the best of \d+ trials?: [\w ,.]+\.", first), first
    found = [trial.values for trial in tried if trial.validation == best]
    assert {f"training.{key}": config.training[key] for key in ("lr", "mu")} in found
    assert config.rounds == 60, "the scale of the search is not part of what was found"
    out = ("--rounds", "1", "--workers", "1", "--out", tmp_path / "run")
    assert upfl("train", "fedprox", "digits", "--config", search.folder / "best.toml", *out).code == 0


def test_what_is_known_of_new_clients_plays_no_part(
    honest: tuple[Search, list[Tried]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same search with every test accuracy taken out of what trials leave behind."""

    def blinded(self: module._Processes, search: Search, values: dict[str, float]) -> str:
        path = search.trial_folder(values)
        shutil.copytree(honest[0].trial_folder(values), path)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            for row in line.get("rows", {}).values():
                for key in [key for key in row if key.startswith("test")]:
                    del row[key]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for file in (path / "result.json", *path.glob("checkpoint*")):  # a checkpoint knows its metrics
            file.unlink()
        return ""

    monkeypatch.setattr(module._Processes, "train", blinded)
    blind = searching(tmp_path / "blind", "fedprox")
    found = {repr(trial.values): trial.validation for trial in run(blind, trials=2)}
    assert found == {repr(trial.values): trial.validation for trial in honest[1]}
    assert (blind.folder / "best.toml").read_text() == (honest[0].folder / "best.toml").read_text()


def test_a_search_that_was_killed_goes_on_and_its_trials_end_with_it(tmp_path: Path) -> None:
    out = tmp_path / "s"
    options = {"profile": "smoke", "rounds": 60, "evaluate_every": 60}
    command = ["search", "fedavg", "digits", "--profile", "smoke", "--rounds", "60", "--evaluate-every", "60"]
    arguments = [*command, "--space", "free", "--trials", "2", "--parallel", "2", "--out", str(out)]

    def rounds() -> list[int]:
        return [file.read_bytes().count(b"\n") for file in out.glob("trials/*/metrics.jsonl")]

    with subprocess.Popen([sys.executable, "-m", "upfl", *arguments], stdout=subprocess.DEVNULL) as process:
        assert eventually(lambda: len(rounds()) == 2 and min(rounds()) > 2, 240)
        process.send_signal(signal.SIGKILL)
    begun = {file.parent.name for file in out.glob("trials/*/metrics.jsonl")}
    search = Search(out, "fedavg", "digits", "free", options=options)

    def free() -> bool:
        try:
            for name in begun:
                with RunFolder(out / "trials" / name).lock():
                    pass
        except RunError:
            return False
        return True

    assert eventually(free, 30), "a trial's process outlived the search"
    tried = list(run(search, trials=2, parallel=2))
    assert {search.trial_folder(trial.values).name for trial in tried} == begun
    for name in begun:
        sessions = json.loads((out / "trials" / name / "environment.json").read_text())
        assert [session["after"] > 0 for session in sessions] == [False, True], "the trial started anew"
    assert list(run(search, trials=2)) == [], "two trials are done"


def test_a_trial_that_fails_is_reported_and_counts_for_nothing(tmp_path: Path) -> None:
    """A rate at which training diverges: every client's update is refused."""
    scale = ("--profile", "smoke", "--rounds", "2", "--trials", "1")
    said = upfl("search", "fedavg", "digits", *scale, "--range", "lr=1e25:1e30", "--out", tmp_path / "s")
    assert "every one of the 4 clients had to be left out" in said.ended(4, "no trial succeeded").out
    assert not (tmp_path / "s" / "best.toml").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that do nothing and are the better the higher their rate; 0.3 fails."""
    monkeypatch.setattr(
        module._Processes, "train", lambda self, search, values: "bad" if values["training.lr"] == 0.3 else ""
    )
    monkeypatch.setattr(module, "best_validation", lambda path, row: float(path.name.partition("=")[2]))


@pytest.mark.usefixtures("quick")
def test_a_grid_ends_when_all_of_it_was_tried(tmp_path: Path) -> None:
    tried = list(run(searching(tmp_path), trials=4, parallel=3))
    assert len(tried) == 4
    tried += run(searching(tmp_path), trials=100, parallel=3)
    assert sorted(trial.values["training.lr"] for trial in tried) == list(module.RATE.grid)
    assert [trial.error for trial in tried if trial.validation is None] == ["bad"]
    assert tomllib.loads((tmp_path / "best.toml").read_text())["training"]["lr"] == 0.5
    assert list(run(searching(tmp_path), trials=100)) == []


@pytest.mark.usefixtures("quick")
def test_a_free_search_that_goes_on_does_not_propose_the_same_again(tmp_path: Path) -> None:
    tried = [trial for wanted in (2, 4, 6) for trial in run(searching(tmp_path, space="free"), trials=wanted)]
    assert len({trial.values["training.lr"] for trial in tried}) == 6
    assert all(1e-4 <= trial.values["training.lr"] <= 1 for trial in tried)


def test_a_folder_with_another_search_is_refused(tmp_path: Path) -> None:
    searching(tmp_path / "s").study()
    with pytest.raises(RunError, match="space is paper, and free was asked for"):
        searching(tmp_path / "s", space="free").study()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(RunError, match="not empty"):
        searching(tmp_path / "mine").study()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fedavgg", "digits"), ["fedavg"]),
        (("fedavg", "digits", "--space", "fre"), ["free"]),
        (("fedavg", "digits", "--range", "lrr=0.1:1"), ["lr"]),
        (("fedavg", "digits", "--range", "lr=1:0.1"), ["LOW:HIGH"]),
        (("fedavg", "digits", "--profile", "smok"), ["smoke"]),
    ],
)
def test_a_wrong_name_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    upfl("search", *arguments, "--out", tmp_path / "out").ended(2, *words)
    assert not (tmp_path / "out").exists()


def test_without_optuna_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    upfl("search", "fedavg", "digits", "--out", tmp_path / "out").ended(2, 'pip install "upfl[search]"')
    with pytest.raises(ConfigError):
        module.import_optuna()


def test_validation_is_that_of_the_row(tmp_path: Path) -> None:
    rows = [{"tent": {"validation": 50.0}, "fedavg": {"validation": 90.0}}, {"tent": {"validation": 60.0}}]
    lines = [{"round": 1, "rows": rows[0]}, {"round": 2, "rows": rows[1]}, {"round": 3, "loss": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_validation(tmp_path, "tent") == 60.0


def test_a_range_is_the_trainings_where_the_personalizer_has_one_of_that_name() -> None:
    ranges = {"lr": (0.01, 1.0), "tent.lr": (0.001, 0.1)}
    assert list(searching(Path("unused"), "tent", ranges=ranges).choices) == ["training.lr", "tent.lr"]


def test_settings_are_the_same_in_every_trial_and_part_of_the_search(tmp_path: Path) -> None:
    search = searching(tmp_path / "s", settings=("iterations=7",))
    assert search.config({"training.lr": 0.3}).training["iterations"] == 7
    search.study()
    with pytest.raises(RunError, match="another search"):
        searching(tmp_path / "s", settings=("iterations=8",)).study()
