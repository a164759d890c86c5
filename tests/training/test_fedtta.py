"""FedTTA and FedTTA-Prox: local steps against plain double backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.fedtta import padded_batch, server_state, trained
from tests.helpers.params import Params, difference, distance, leaves, norm
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


@pytest.mark.parametrize("round", [0, 7])
@in_every_setting
def test_consecutive_fedtta_steps_equal_plain_double_backward(case: Case, hyper: dict[str, Any], round: int) -> None:
    training, reference = fedtta(case, **hyper), MetaStep(case.forward, **hyper)
    server = server_state(training, 1)
    batches = [case.batch(n, seed) for seed, n in enumerate((12, 12, 7, 12))]
    ours, losses = trained(training, server, batches, round)
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
    server = server_state(training, 1, torch.float32)
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
    server = server_state(training, 1, torch.float32)
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
    training = fedtta(case, inner_lr=0.4, weight_decay=1e-3, **BARE, **prox)
    training_without_decay = fedtta(case, inner_lr=0.4, weight_decay=0.0, **BARE, **prox)
    for method in (training, training_without_decay):
        server = server_state(method, 2)
        batch = case.batch(10, 3)
        psi, phi = select(server, "psi"), select(server, "phi")
        reference = MetaStep(case.forward, inner_lr=0.4, weight_decay=method.hyper.weight_decay, mu=mu or 0.0)

        def loss(at: Params, reference: MetaStep = reference, psi: Params = psi, batch: Batch = batch) -> float:
            return float(reference.loss(leaves(psi), at, batch.x, batch.y, psi).detach())

        _, ours = gradients(method, server, batch)
        ours = {name: grad - method.hyper.weight_decay * phi[name] for name, grad in ours.items()}
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


@in_every_setting
def test_padding_does_not_count_in_a_fedtta_step(case: Case, hyper: dict[str, Any]) -> None:
    training = fedtta(case, **hyper)
    server = server_state(training, 1)
    batches = [case.batch(9, seed) for seed in range(3)]
    padded = [padded_batch(batch, case.batch(4, 50 + seed)) for seed, batch in enumerate(batches)]
    plain, losses = trained(training, server, batches)
    with_padding, padded_losses = trained(training, server, padded)
    assert padded_losses == pytest.approx(losses, rel=1e-7)
    assert distance(with_padding, plain, scale=difference(plain, server)) < 1e-6


@pytest.mark.parametrize("second_order", [True, False])
def test_zero_inner_rate_makes_fedtta_plain_fedavg(case: Case, second_order: bool) -> None:
    training = fedtta(case, inner_lr=0.0, outer_lr=0.2, second_order=second_order, weight_decay=0.01)
    fedavg = FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(lr=0.2, weight_decay=0.01))
    server = server_state(training, 1)
    batches = [case.batch(9, seed) for seed in range(3)]
    ours, losses = trained(training, server, batches, round=7)
    plain, plain_losses = trained(fedavg, prefixed("psi", select(server, "psi")), batches, round=7)
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    moved = difference(select(plain, "psi"), select(server, "psi"))
    assert distance(select(ours, "psi"), select(plain, "psi"), scale=moved) < 1e-10


@pytest.mark.parametrize("weight_decay", [0.01, 0.0])
def test_zero_inner_rate_leaves_phi_to_weight_decay_alone(case: Case, weight_decay: float) -> None:
    training = fedtta(case, inner_lr=0.0, adapt_lr=0.1, momentum=0.0, weight_decay=weight_decay)
    server = server_state(training, 1)
    ours, _ = trained(training, server, [case.batch(9, 0)])
    for name, value in select(server, "phi").items():
        torch.testing.assert_close(ours[f"phi.{name}"], value * (1 - 0.1 * weight_decay), rtol=1e-14, atol=0)


@pytest.mark.parametrize("prox", [{}, {"mu": 2.0}], ids=str)
def test_first_order_keeps_phis_gradient_and_drops_psis_hessian_term(case: Case, prox: dict[str, float]) -> None:
    hyper: dict[str, Any] = {"inner_lr": 0.5, "weight_decay": 0.0} | prox
    first, second = (fedtta(case, second_order=order, **hyper, **BARE) for order in (False, True))
    server, batch = server_state(first, 1), case.batch(9, 0)
    psi_first, phi_first = gradients(first, server, batch)
    psi_second, phi_second = gradients(second, server, batch)
    assert distance(phi_first, phi_second) < 1e-12
    assert distance(psi_first, psi_second) > 1e-3
    reference = MetaStep(case.forward, second_order=False, **hyper)
    _, expected, _ = reference.gradients(select(server, "psi"), select(server, "phi"), batch, select(server, "psi"))
    assert distance(psi_first, expected) < 1e-9


@in_every_setting
def test_a_step_does_not_depend_on_the_order_of_its_samples(case: Case, hyper: dict[str, Any]) -> None:
    training = fedtta(case, **hyper)
    server, batch = server_state(training, 1), case.batch(11, 0)
    order = torch.randperm(11, generator=generator(5))
    shuffled = Batch(batch.x[order], batch.y[order])
    ours, losses = trained(training, server, [batch])
    others, other_losses = trained(training, server, [shuffled])
    assert losses == pytest.approx(other_losses, rel=1e-12)
    assert distance(ours, others, scale=difference(ours, server)) < 1e-10


def test_phis_momentum_restarts_every_round(case: Case) -> None:
    training, reference = fedtta(case, **PLAIN), MetaStep(case.forward, **PLAIN)
    server = server_state(training, 1)
    rounds = [[case.batch(9, seed) for seed in range(3)], [case.batch(9, 10 + seed) for seed in range(3)]]
    ours, psi, phi = server, select(server, "psi"), select(server, "phi")
    for round, batches in enumerate(rounds):
        ours, _ = trained(training, ours, batches, round)
        expected = reference.run(psi, phi, batches, round)
        psi, phi = expected.psi, expected.phi
    before = select(server, "phi")
    assert distance(select(ours, "phi"), phi, scale=difference(phi, before)) < 1e-9
    unbroken = reference.run(select(server, "psi"), before, [*rounds[0], *rounds[1]])
    assert distance(unbroken.phi, phi, scale=difference(phi, before)) > 1e-3, "the case cannot tell the two apart"


def test_prox_without_weight_is_fedtta_to_the_bit(case: Case) -> None:
    batches = [case.batch(9, seed, torch.float32) for seed in range(3)]
    plain = fedtta(case, **PLAIN)
    server = server_state(plain, 1, torch.float32)
    ours, _ = trained(fedtta(case, mu=0.0, **PLAIN), server, batches)
    expected, _ = trained(plain, server, batches)
    for name in server:
        assert torch.equal(ours[name], expected[name])


def test_proxs_first_step_feels_no_pull_towards_the_received_model(case: Case) -> None:
    """At the received model the divergence and its gradient are zero, however large mu is."""
    server, batches = server_state(fedtta(case, **PLAIN), 1), [case.batch(9, seed) for seed in range(2)]
    loose, tight = fedtta(case, **PLAIN), fedtta(case, mu=100.0, **PLAIN)
    assert distance(trained(loose, server, batches[:1])[0], trained(tight, server, batches[:1])[0]) < 1e-12
    assert distance(trained(loose, server, batches)[0], trained(tight, server, batches)[0]) > 1e-3
