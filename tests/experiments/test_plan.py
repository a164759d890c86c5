"""From experiments to trainings: each training once, whoever asks for it."""

import pytest

from upfl.data.partition import default_partition
from upfl.experiments.definitions import EXPERIMENTS, SEEDS, TABLE_1
from upfl.experiments.plan import campaign, plan


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("profile", SEEDS)
def test_every_experiment_can_be_planned_at_every_scale(name: str, profile: str) -> None:
    jobs = plan(EXPERIMENTS[name], profile=profile)
    assert jobs
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.config.profile for job in jobs} == {profile}
    assert {row for job in jobs for row in job.rows} == set(EXPERIMENTS[name].rows)


def test_the_fourteen_rows_of_table_1_cost_eleven_trainings() -> None:
    jobs = plan(EXPERIMENTS["overall"], datasets=["mnist"], seeds=[0])
    assert len(jobs) == 11
    assert sorted(row for job in jobs for row in job.rows) == sorted(TABLE_1)
    assert {job.config.partition == default_partition("mnist") for job in jobs} == {True}
    assert {job.config.rounds for job in jobs} == {200}


def test_seeds_and_partitions_multiply_the_trainings() -> None:
    jobs = plan(
        EXPERIMENTS["overall"], datasets=["mnist", "digits"], methods=["tent"], seeds=[0, 3], partition_seeds=[1, 2]
    )
    assert {(job.config.dataset, job.config.seed, job.config.partition_seed) for job in jobs} == {
        (dataset, seed, partition) for dataset in ("mnist", "digits") for seed in (0, 3) for partition in (1, 2)
    }


def test_distribution_shift_trains_once_for_all_new_clients() -> None:
    jobs = plan(EXPERIMENTS["distribution-shift"], seeds=[0])
    assert len(jobs) == 11
    (partition,) = {job.config.partition for job in jobs}
    assert (partition.kind, partition.clients, partition.alpha_training) == ("dirichlet", 100, 0.1)
    alphas = {partition.alpha_new, *(changes["alpha_new"] for changes in jobs[0].newcomers)}
    assert alphas == {0.01, 0.03, 0.05, 0.1, 0.3, 0.5}


def test_any_pair_of_training_and_personalizer_is_a_row() -> None:
    (job,) = plan(EXPERIMENTS["overall"], datasets=["digits"], methods=["scaffold+tent", "scaffold"], seeds=[0])
    assert job.rows == ["scaffold", "scaffold+tent"]


def test_experiments_in_one_campaign_share_trainings() -> None:
    plans = {
        name: plan(EXPERIMENTS[name], datasets=["cifar10"], methods=["tent", "fedtta"], seeds=[0], profile="study")
        for name in ("overall", "dataset-size", "distribution-shift")
    }
    jobs = {job.name: job for job in campaign(plans)}
    assert list(jobs) == [
        *("cifar10-fedavg-s0-p0", "cifar10-fedtta-s0-p0"),
        *("distribution-shift-cifar10-fedavg-s0-p0", "distribution-shift-cifar10-fedtta-s0-p0"),
    ]
    assert len(jobs["cifar10-fedavg-s0-p0"].newcomers) == 9
    assert jobs["distribution-shift-cifar10-fedtta-s0-p0"].config.partition.kind == "dirichlet"


def test_rows_of_one_training_meet_in_a_campaign() -> None:
    plans = {
        name: plan(EXPERIMENTS[name], datasets=["cifar10"], methods=[row], seeds=[0])
        for name, row in (("overall", "fedavg"), ("dataset-size", "tent"))
    }
    (job,) = campaign(plans)
    assert job.rows == ["fedavg", "tent"]
