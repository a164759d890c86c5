"""What local trainings have in common: their rates, and the server's mean."""

from typing import Any

import pytest
import torch

from tests.helpers.rounds import total_of
from tests.reference import CASES, CLASSES, Somebody
from upfl.contract import Task
from upfl.randomness import generator
from upfl.training.base import LocalTraining
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.fedtta import FedTTA, FedTTAProx

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("make", [FedAvg, FedTTA, FedTTAProx])
def test_local_rates_decay_by_a_hundredth_in_ten_rounds(make: type[LocalTraining[Any]]) -> None:
    training = make(Task(CASES["mlp"].model, CLASSES, 3), make.Hyper())
    assert training.local_rate(10) == pytest.approx(0.99 * training.local_rate(0), rel=1e-12)
    assert training.local_rate(7) == pytest.approx(0.99**0.7 * training.local_rate(0), rel=1e-12)


@pytest.mark.parametrize(("aggregation", "mean"), [("uniform", 2.5), ("samples", 3.25)])
def test_the_server_adds_the_mean_change(aggregation: str, mean: float) -> None:
    """Two clients: one of 10 samples moves every value by 1, one of 30 samples by 4."""
    case = CASES["mlp"]
    training = FedAvg(Task(case.model, CLASSES, 2), FedAvgHyper(aggregation=aggregation))
    server = training.init(generator(1))
    ups = []
    for count, change in ((10, 1.0), (30, 4.0)):
        client = Somebody(count)
        carry = training.begin(server, {}, client)
        carry = {name: value + change if name in server else value for name, value in carry.items()}
        ups.append(training.finish(server, carry, client)[0])
    after = training.aggregate(server, total_of(training, ups), 0)
    for name, value in server.items():
        torch.testing.assert_close(after[name], value + mean, rtol=0, atol=1e-5)
        assert after[name].dtype == torch.float32
