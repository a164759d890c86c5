"""FedTTA and FedTTA-Prox: local steps against plain double backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.params import Params, difference, distance, leaves, norm
from tests.helpers.rounds import double_server, trained
from tests.reference import CLASSES, Case, MetaStep, forward_convnet, forward_mlp
from upfl.contract import Batch, Task
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.fedtta import FedTTA, FedTTAHyper, FedTTAProx, FedTTAProxHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def fedtta(case: Case, **hyper: Any) -> FedTTA:
    task = Task(case.model, CLASSES, 3)
    if "mu" in hyper:
        return FedTTAProx(task, FedTTAProxHyper(**hyper))
    return FedTTA(task, FedTTAHyper(**hyper))


def gradients(training: FedTTA, server: State, batch: Batch) -> tuple[Params, Params]:
    """The gradients behind a step with rates 1, without momentum, decay of weights and clipping."""
    assert training.hyper.outer_lr == training.hyper.adapt_lr == 1
    assert training.hyper.momentum == 0
    after, _ = trained(training, server, [batch])
    change = difference(server, after)
    return select(change, "psi"), select(change, "phi")


BARE: dict[str, Any] = {"outer_lr": 1.0, "adapt_lr": 1.0, "momentum": 0.0, "clip": 1e9}


PLAIN: dict[str, Any] = {"inner_lr": 0.5, "outer_lr": 0.3, "adapt_lr": 0.1, "weight_decay": 1e-4, "clip": 10.0}
PROX = PLAIN | {"mu": 5.0, "kl": "own-first"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "much decay of weights": PLAIN | {"weight_decay": 0.05},
    "clipped": PLAIN | {"clip": 0.05},
    "first order": PLAIN | {"weight_decay": 0.05, "second_order": False},
    "prox": PROX,
    "prox, target first": PROX | {"kl": "target-first"},
    "prox, target first, clipped, first order": PROX
    | {"kl": "target-first", "clip": 0.05, "weight_decay": 0.05, "second_order": False},
}
in_every_setting = pytest.mark.parametrize("hyper", SETTINGS.values(), ids=list(SETTINGS))


@in_every_setting
def test_consecutive_fedtta_steps_equal_plain_double_backward(case: Case, hyper: dict[str, Any]) -> None:
    """In two rounds: phi's momentum and what Prox holds on to begin anew, rates have decayed."""
    training, reference = fedtta(case, **hyper), MetaStep(case.forward, **hyper)
    ours = double_server(training)
    for round in (0, 7):
        batches = [case.batch(n, round + seed) for seed, n in enumerate((12, 12, 7, 12))]
        server, (ours, losses) = ours, trained(training, ours, batches, round)
        expected = reference.run(select(server, "psi"), select(server, "phi"), batches, round)
        largest_psi, largest_phi = (max(norms) for norms in zip(*expected.norms, strict=True))
        if hyper["clip"] < 1:
            assert min(largest_psi, largest_phi) > hyper["clip"], "the case does not clip"
        else:
            assert max(largest_psi, largest_phi) < hyper["clip"], "the case clips"
        assert losses == pytest.approx(expected.losses, rel=1e-7)
        for model, theirs in (("psi", expected.psi), ("phi", expected.phi)):
            before, after = select(server, model), select(ours, model)
            assert distance(difference(after, before), difference(theirs, before)) < 1e-6


@in_every_setting
def test_fedtta_steps_in_single_precision_equal_the_reference_to_1e_5(case: Case, hyper: dict[str, Any]) -> None:
    training, reference = fedtta(case, **hyper), MetaStep(case.forward, **hyper)
    server = training.init(generator(1, "server"))
    batches = [case.batch(n, seed, torch.float32) for seed, n in enumerate((12, 7, 12))]
    ours, losses = trained(training, server, batches)
    expected = reference.run(select(server, "psi"), select(server, "phi"), batches)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert distance(select(ours, "psi"), expected.psi) < 1e-5
    assert distance(select(ours, "phi"), expected.phi) < 1e-5


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_fedtta_step_of_the_papers_models_equals_the_reference_to_1e_5(name: str) -> None:
    """The gradients themselves, not only the parameters that they hardly move."""
    if name == "mnist":
        case = Case(mlp(784, (200, 200), 10), forward_mlp, (1, 28, 28))
    else:
        case = Case(convnet((3, 32, 32), 10), forward_convnet, (3, 32, 32))
    training = FedTTA(Task(case.model, 10, 3), FedTTAHyper(inner_lr=0.5, weight_decay=0.0, **BARE))
    server = training.init(generator(1, "server"))
    batch = case.batch(16, 5, torch.float32)
    batch = replace(batch, x=batch.x.contiguous(memory_format=torch.channels_last))
    psi, phi = gradients(training, server, batch)
    reference = MetaStep(case.forward, inner_lr=0.5, weight_decay=0.0)
    _, expected_psi, expected_phi = reference.gradients(
        select(server, "psi"), select(server, "phi"), batch, select(server, "psi")
    )
    assert distance(psi, expected_psi) < 1e-5
    assert distance(phi, expected_phi) < 1e-5


@pytest.mark.parametrize("mu", [None, 3.0])
def test_phis_gradient_agrees_with_central_differences(case: Case, mu: float | None) -> None:
    prox = {} if mu is None else {"mu": mu}
    for weight_decay in (1e-3, 0.0):
        method = fedtta(case, inner_lr=0.4, weight_decay=weight_decay, **BARE, **prox)
        server, batch = double_server(method, 2), case.batch(10, 3)
        psi, phi = select(server, "psi"), select(server, "phi")
        reference = MetaStep(case.forward, inner_lr=0.4, weight_decay=weight_decay, mu=mu or 0.0)

        def loss(at: Params, reference: MetaStep = reference, psi: Params = psi, batch: Batch = batch) -> float:
            return float(reference.loss(leaves(psi), at, batch.x, batch.y, psi).detach())

        _, ours = gradients(method, server, batch)
        ours = {name: grad - weight_decay * phi[name] for name, grad in ours.items()}
        source, h = generator(4), 1e-6
        for _ in range(4):
            direction = {
                name: torch.randn(value.shape, generator=source, dtype=value.dtype) for name, value in phi.items()
            }
            ahead = loss({name: value + h * direction[name] for name, value in phi.items()})
            behind = loss({name: value - h * direction[name] for name, value in phi.items()})
            along = sum(float((ours[name] * direction[name]).sum()) for name in phi)
            assert along == pytest.approx((ahead - behind) / (2 * h), rel=1e-4, abs=1e-8)
        assert norm(ours) > 1e-4


@pytest.mark.parametrize("second_order", [True, False])
def test_zero_inner_rate_makes_fedtta_fedavg_and_leaves_phi_to_weight_decay(case: Case, second_order: bool) -> None:
    hyper: dict[str, Any] = {"outer_lr": 0.2, "adapt_lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}
    training = fedtta(case, inner_lr=0.0, second_order=second_order, **hyper)
    fedavg = FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(lr=0.2, weight_decay=0.01))
    server = double_server(training)
    batches = [case.batch(9, seed) for seed in range(3)]
    ours, losses = trained(training, server, batches, round=7)
    for name, value in select(server, "phi").items():
        kept = (1 - 0.1 * 0.99**0.7 * 0.01) ** 3
        torch.testing.assert_close(ours[f"phi.{name}"], value * kept, rtol=1e-14, atol=0)
    plain, plain_losses = trained(fedavg, prefixed("psi", select(server, "psi")), batches, round=7)
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    moved = difference(select(plain, "psi"), select(server, "psi"))
    assert distance(select(ours, "psi"), select(plain, "psi"), scale=moved) < 1e-10


def test_prox_without_weight_is_fedtta_to_the_bit(case: Case) -> None:
    batches = [case.batch(9, seed, torch.float32) for seed in range(3)]
    plain = fedtta(case, **PLAIN)
    server = plain.init(generator(1, "server"))
    ours, _ = trained(fedtta(case, mu=0.0, **PLAIN), server, batches)
    expected, _ = trained(plain, server, batches)
    for name in server:
        assert torch.equal(ours[name], expected[name])


def test_proxs_first_step_feels_no_pull_towards_the_received_model(case: Case) -> None:
    """At the received model the divergence and its gradient are zero, however large mu is."""
    server, batches = double_server(fedtta(case, **PLAIN)), [case.batch(9, seed) for seed in range(2)]
    loose, tight = fedtta(case, **PLAIN), fedtta(case, mu=100.0, **PLAIN)
    assert distance(trained(loose, server, batches[:1])[0], trained(tight, server, batches[:1])[0]) < 1e-12
    assert distance(trained(loose, server, batches)[0], trained(tight, server, batches)[0]) > 1e-3
