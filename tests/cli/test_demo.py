"""The demonstration: what it leaves behind, that its rows have the same terms, and that the start page says which."""

import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import demo as benchmark

from tests.plugin_methods import Said, upfl
from upfl.cli.demo import FEDERATIONS, RATES, ROUNDS, TRAININGS, configuration, partition_seeds, together
from upfl.methods import row_name, row_title

ROOT = Path(__file__).parents[2]


SMALL = ("--rounds", "1", "--workers", "1", "--federations", "1")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A demonstration of one round: its folder, and what it said."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    return out, upfl("demo", *SMALL, "--out", out)


def test_demo_prints_its_table_draws_its_picture_and_does_nothing_twice(shown: tuple[Path, Said]) -> None:
    out, said = shown
    assert all(title in said.ended().out for title in ("FedAvg", "TENT", "FedTTA", "FedTTA-Prox", "FedTTA++"))
    (picture,) = out.glob("*.png")
    assert picture.stat().st_size > 10_000
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.json*")}
    assert upfl("demo", *SMALL, "--out", out).code == 0
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.json*")} == before
    upfl("demo", "--rounds", "2", "--workers", "1", "--out", out).ended(4, "--out")


def test_a_row_over_several_federations_is_the_mean_of_theirs_and_has_all_clients() -> None:
    def result(test: float, clients: int) -> dict[str, Any]:
        found = [{"kind": "new", "accuracy": test, "before": 50.0}] * clients
        return {"rows": [{"row": "fedavg", "test_before": 50.0, "test": test, "clients": found}]}

    (row,) = together([result(80.0, 3), result(90.0, 5)])
    assert (row["row"], row["test_before"], row["test"], row["tests"]) == ("fedavg", 50.0, 85.0, [80.0, 90.0])
    assert len(row["clients"]) == 8
    assert partition_seeds(3, 2) == [3, 103]


def test_all_rows_have_the_same_federation_budget_and_round_and_differ_in_rates() -> None:
    configs = [configuration(method) for method in TRAININGS]
    own = {"method", "training", "personalize"}
    budgets = [
        config.model_dump(exclude=own)
        | {key: config.training[key] for key in ("iterations", "batch_size", "weight_decay", "clip", "decay")}
        for config in configs
    ]
    assert all(budget == budgets[0] for budget in budgets)
    assert configs[0].evaluate_every == configs[0].rounds, "the last round, and no choice among rounds"
    assert configs[0].partition_seed == 0
    for config in configs:
        assert RATES[config.method].items() <= config.training.items()


def test_the_rates_are_among_those_that_were_tried_and_as_many_were_tried_for_each() -> None:
    assert RATES.keys() == benchmark.TRIED.keys() == TRAININGS.keys()
    assert {len(tried) for tried in benchmark.TRIED.values()} == {12}
    for method, tried in benchmark.TRIED.items():
        assert RATES[method] in tried
        assert len({tuple(rates.items()) for rates in tried}) == 12


def test_the_start_page_says_what_the_demo_does() -> None:
    readme = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    config = configuration("fedavg")
    half = config.partition.clients // 2
    assert (
        f"`upfl demo`: seed 0, partition seed 0, {FEDERATIONS} federations, {ROUNDS} rounds of all {half} clients"
        in readme
    )
    assert f"{half} clients with images of at most two digits" in readme
    for training, personalizers in TRAININGS.items():
        for personalizer in personalizers:
            title = row_title(row_name(training, personalizer))
            assert re.search(rf"\| {re.escape(title)} \| \d\d\.\d \| \d\d\.\d \|", readme), title


def test_the_benchmark_trains_what_the_demo_trains(shown: tuple[Path, Said], tmp_path: Path) -> None:
    lines = list(benchmark.table(["fedavg"], [0], tmp_path / "table", rounds=1, federations=1))
    one, other = tmp_path / "table" / "fedavg-p0", shown[0] / "fedavg-p0"
    for kind in ("config.toml", "result.json"):
        assert (one / kind).read_text() == (other / kind).read_text()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["0", "mean"]
