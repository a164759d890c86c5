"""Local steps against references, aggregation and the exact sum, and the order of a client's batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.reference import (
    CASES,
    CLASSES,
    Case,
    MetaStep,
    Params,
    Somebody,
    difference,
    distance,
    forward_convnet,
    forward_mlp,
    leaves,
    norm,
)
from upfl.contract import Batch, Phase, Task
from upfl.data import Clients, Partition, build_federation, load
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.fold import FixedPointSum
from upfl.errors import BadClientError
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training.base import LocalTraining
from upfl.training.fedavg import FedAvg, FedAvgHyper
from upfl.training.fedtta import FedTTA, FedTTAHyper, FedTTAProx, FedTTAProxHyper

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def fedtta(case: Case, **hyper: Any) -> FedTTA:
    task = Task(case.model, CLASSES, 3)
    if "mu" in hyper:
        return FedTTAProx(task, FedTTAProxHyper(**hyper))
    return FedTTA(task, FedTTAHyper(**hyper))


def server_state(training: LocalTraining[Any], seed: int, dtype: torch.dtype = torch.float64) -> State:
    return {name: value.to(dtype) for name, value in training.init(generator(seed, "server")).items()}


def trained(
    training: LocalTraining[Any], server: State, batches: Sequence[Batch], round: int = 0
) -> tuple[State, list[float]]:
    """The server's entries after a client's steps, and the losses."""
    carry, losses = training.begin(server, {}, Somebody(round=round)), []
    with torch.no_grad():
        for batch in batches:
            carry, loss = training.step(carry, batch, round)
            losses.append(float(loss))
    return {name: carry[name].detach().clone() for name in server}, losses


def gradients(training: FedTTA, server: State, batch: Batch) -> tuple[Params, Params]:
    """The gradients behind a step with rates 1, without momentum, decay of weights and clipping."""
    assert training.hyper.outer_lr == training.hyper.adapt_lr == 1
    assert training.hyper.momentum == 0
    after, _ = trained(training, server, [batch])
    change = difference(server, after)
    return select(change, "psi"), select(change, "phi")


BARE: dict[str, Any] = {"outer_lr": 1.0, "adapt_lr": 1.0, "momentum": 0.0, "clip": 1e9}

PLAIN: dict[str, Any] = {"inner_lr": 0.5, "outer_lr": 0.3, "adapt_lr": 0.1, "weight_decay": 1e-4, "clip": 10.0}
PROX = PLAIN | {"mu": 5.0, "kl": "forward"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "much decay of weights": PLAIN | {"weight_decay": 0.05},
    "clipped": PLAIN | {"clip": 0.05},
    "first order": PLAIN | {"weight_decay": 0.05, "second_order": False},
    "prox": PROX,
    "prox, reverse": PROX | {"kl": "reverse"},
    "prox, reverse, clipped, first order": PROX
    | {"kl": "reverse", "clip": 0.05, "weight_decay": 0.05, "second_order": False},
}
in_every_setting = pytest.mark.parametrize("hyper", SETTINGS.values(), ids=list(SETTINGS))


# FedTTA


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


def _padded(batch: Batch, extra: Batch) -> Batch:
    """The batch with other samples between its own, masked out."""
    order = torch.randperm(len(batch.x) + len(extra.x), generator=generator(9))
    return Batch(
        torch.cat([batch.x, extra.x])[order],
        torch.cat([batch.y, extra.y])[order],
        torch.cat([batch.x.new_ones(len(batch.x)), batch.x.new_zeros(len(extra.x))])[order],
    )


@in_every_setting
def test_padding_does_not_count_in_a_fedtta_step(case: Case, hyper: dict[str, Any]) -> None:
    training = fedtta(case, **hyper)
    server = server_state(training, 1)
    batches = [case.batch(9, seed) for seed in range(3)]
    padded = [_padded(batch, case.batch(4, 50 + seed)) for seed, batch in enumerate(batches)]
    plain, losses = trained(training, server, batches)
    with_padding, padded_losses = trained(training, server, padded)
    assert padded_losses == pytest.approx(losses, rel=1e-7)
    assert distance(with_padding, plain, scale=difference(plain, server)) < 1e-6


@in_every_setting
def test_a_mask_of_ones_is_no_mask(case: Case, hyper: dict[str, Any]) -> None:
    training = fedtta(case, **hyper)
    server = server_state(training, 1)
    batches = [case.batch(9, seed) for seed in range(3)]
    masked = [replace(batch, mask=batch.x.new_ones(9)) for batch in batches]
    plain, losses = trained(training, server, batches)
    with_mask, masked_losses = trained(training, server, masked)
    assert masked_losses == pytest.approx(losses, rel=1e-7)
    assert distance(with_mask, plain, scale=difference(plain, server)) < 1e-6


def test_padding_does_not_count_in_a_fedavg_step(case: Case) -> None:
    training = FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(lr=0.3))
    server = server_state(training, 1)
    batch = case.batch(9, 0)
    plain, losses = trained(training, server, [batch])
    with_padding, padded_losses = trained(training, server, [_padded(batch, case.batch(4, 50))])
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


def test_zero_inner_rate_leaves_phi_to_weight_decay_alone(case: Case) -> None:
    training = fedtta(case, inner_lr=0.0, adapt_lr=0.1, momentum=0.0, weight_decay=0.01)
    server = server_state(training, 1)
    ours, _ = trained(training, server, [case.batch(9, 0)])
    for name, value in select(server, "phi").items():
        torch.testing.assert_close(ours[f"phi.{name}"], value * (1 - 0.1 * 0.01), rtol=1e-14, atol=0)


def test_zero_inner_rate_and_no_weight_decay_leave_phi_as_it_is(case: Case) -> None:
    training = fedtta(case, inner_lr=0.0, adapt_lr=0.1, weight_decay=0.0)
    server = server_state(training, 1)
    ours, _ = trained(training, server, [case.batch(9, seed) for seed in range(3)])
    for name, value in select(server, "phi").items():
        assert torch.equal(ours[f"phi.{name}"], value)


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


# FedAvg


@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_fedavg_steps_are_torchs_sgd_with_clipping(case: Case, clip: float) -> None:
    training = FedAvg(Task(case.model, CLASSES, 3), FedAvgHyper(lr=0.2, weight_decay=0.01, clip=clip))
    server = server_state(training, 1)
    batches = [case.batch(n, seed) for seed, n in enumerate((12, 7, 12, 12))]
    ours, losses = trained(training, server, batches, round=7)
    params = {name: nn.Parameter(value.clone()) for name, value in select(server, "psi").items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.2 * 0.99**0.7, weight_decay=0.01)
    expected_losses, norms = [], []
    for batch in batches:
        loss = nn.functional.cross_entropy(case.forward(dict(params), batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(params.values(), clip)))
        optimizer.step()
        expected_losses.append(float(loss))
    assert (min(norms) > clip) == (clip < 1), "the case is not what it says"
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    expected = {name: value.detach() for name, value in params.items()}
    moved = difference(expected, select(server, "psi"))
    assert distance(select(ours, "psi"), expected, scale=moved) < 1e-4  # torch divides by norm + 1e-6


@pytest.mark.parametrize("make", [FedAvg, FedTTA, FedTTAProx])
def test_local_rates_decay_by_a_hundredth_in_ten_rounds(make: type[LocalTraining[Any]]) -> None:
    training = make(Task(CASES["mlp"].model, CLASSES, 3), make.Hyper())
    assert training.local_rate(10) == pytest.approx(0.99 * training.local_rate(0), rel=1e-12)
    assert training.local_rate(7) == pytest.approx(0.99**0.7 * training.local_rate(0), rel=1e-12)


# Aggregation


@pytest.mark.parametrize(("aggregation", "mean"), [("uniform", 2.5), ("samples", 3.25)])
def test_the_server_adds_the_mean_change(aggregation: str, mean: float) -> None:
    """Two clients: one of 10 samples moves every value by 1, one of 30 samples by 4."""
    case = CASES["mlp"]
    training = FedAvg(Task(case.model, CLASSES, 2), FedAvgHyper(aggregation=aggregation))
    server = server_state(training, 1, torch.float32)
    ups = []
    for count, change in ((10, 1.0), (30, 4.0)):
        client = Somebody(count)
        carry = training.begin(server, {}, client)
        carry = {name: value + change if name in server else value for name, value in carry.items()}
        ups.append(training.finish(server, carry, client)[0])
    total = FixedPointSum(ups[0], 2)
    for up in ups:
        total.add(up)
    after = training.aggregate(server, total, 0)
    for name, value in server.items():
        torch.testing.assert_close(after[name], value + mean, rtol=0, atol=1e-5)
        assert after[name].dtype == torch.float32


# The sum over clients

finite = st.floats(-1e4, 1e4, width=32)


def _ups(data: list[list[float]], counts: list[int]) -> list[State]:
    return [
        {
            "a.weight": torch.tensor(values[:6]).reshape(2, 3),
            "b": torch.tensor(values[6], dtype=torch.float64),
            "n": torch.tensor([count, -count]),
        }
        for values, count in zip(data, counts, strict=True)
    ]


uploads = st.integers(1, 8).flatmap(
    lambda k: st.builds(
        _ups,
        st.lists(st.lists(finite, min_size=7, max_size=7), min_size=k, max_size=k),
        st.lists(st.integers(-(2**40), 2**40), min_size=k, max_size=k),
    )
)


def _summed(ups: Sequence[State], like: State, clients: int) -> FixedPointSum:
    total = FixedPointSum(like, clients)
    for up in ups:
        total.add(up)
    return total


@settings(deadline=None, max_examples=60)
@given(uploads, st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_sum_depends_neither_on_order_nor_on_who_forms_which_part(ups: list[State], random: Any, k: int) -> None:
    whole = _summed(ups, ups[0], len(ups))
    shuffled = list(ups)
    random.shuffle(shuffled)
    parts = [_summed(shuffled[rank::k], ups[0], len(ups)) for rank in range(k)]
    merged = FixedPointSum(ups[0], len(ups))
    for part in parts:
        merged.buffer += part.buffer
    merged.merged()
    assert merged.count == whole.count == len(ups)
    assert set(merged) == set(ups[0])
    for name in ups[0]:
        assert torch.equal(merged[name], whole[name])
        assert merged[name].shape == ups[0][name].shape


@settings(deadline=None, max_examples=60)
@given(uploads)
def test_the_sum_is_exact_to_its_last_bit_a_client(ups: list[State]) -> None:
    total = _summed(ups, ups[0], len(ups))
    for name in ups[0]:
        for position in range(ups[0][name].numel()):
            values = [up[name].flatten()[position].item() for up in ups]
            exact = sum(map(Fraction, values), Fraction())
            got = Fraction(total[name].flatten()[position].item())
            if name == "n":
                assert got == exact
            else:  # reading it as a float64 rounds once more
                assert abs(got - exact) <= len(ups) * Fraction(1, 2**41) + abs(exact) * Fraction(1, 2**52)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 58), st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
def test_a_declared_scale_sets_the_precision(bits: int, values: list[float]) -> None:
    total = FixedPointSum({"x": torch.tensor(0.0)}, len(values), {"x": bits})
    for value in values:
        total.add({"x": torch.tensor(value)})
    exact = sum(map(Fraction, values), Fraction())
    allowed = len(values) * Fraction(1, 2 ** (bits + 1)) + abs(exact) * Fraction(1, 2**52)
    assert abs(Fraction(float(total["x"])) - exact) <= allowed


def test_a_sum_of_many_values_is_formed_in_chunks_without_seams() -> None:
    n = 3 * (1 << 16) + 5
    value = torch.randn(n, generator=generator(0))
    total = _summed([{"x": value}, {"x": value}], {"x": value}, 2)
    torch.testing.assert_close(total["x"], 2 * value.double(), rtol=0, atol=2.0**-39)


LIKE: State = {"x": torch.zeros(3), "y": torch.zeros(2, 2), "n": torch.tensor(0)}


def _up(**changes: Tensor) -> State:
    return {"x": torch.ones(3), "y": torch.ones(2, 2), "n": torch.tensor(1)} | changes


@pytest.mark.parametrize(
    "bad",
    [
        _up(y=torch.tensor([[1.0, 1.0], [1.0, math.nan]])),
        _up(y=torch.tensor([[1.0, math.inf], [1.0, 1.0]])),
        _up(y=torch.tensor([[1.0, 1.0], [-math.inf, 1.0]])),
        _up(y=torch.full((2, 2), 1e30)),
        _up(y=torch.full((2, 2), -(2.0**22))),
        _up(y=torch.ones(2, 3)),
        _up(y=torch.ones(4)),
        _up(y=torch.ones(2, 2, dtype=torch.float64)),
        _up(n=torch.tensor(2**62)),  # four of these do not fit in 64 bits
        _up(n=torch.tensor(-(2**63))),
        _up(n=torch.tensor(1, dtype=torch.int32)),
        _up(n=torch.tensor(1.0)),
        _up(z=torch.ones(1)),
        {"x": torch.ones(3), "n": torch.tensor(1)},
        {},
    ],
    ids=lambda up: ",".join(f"{name}:{value.dtype}{value.flatten()[-1:].tolist()}" for name, value in up.items()),
)
def test_a_bad_upload_is_refused_whole(bad: State) -> None:
    total = FixedPointSum(LIKE, 4)
    total.add(_up())
    before = total.buffer.clone()
    with pytest.raises(BadClientError):
        total.add(bad)
    assert torch.equal(total.buffer, before)
    assert total.count == 1
    total.add(_up())
    assert torch.equal(total["x"], torch.full((3,), 2.0, dtype=torch.float64))
    assert int(total["n"]) == 2


@pytest.mark.parametrize("clients", [1, 3, 64])
def test_the_largest_values_that_are_accepted_do_not_overflow(clients: int) -> None:
    total = FixedPointSum({"x": torch.zeros(2)}, clients)
    largest = math.floor(2.0**22 / clients)
    for _ in range(clients):
        total.add({"x": torch.tensor([largest, -largest], dtype=torch.float32)})
    assert total["x"].tolist() == [largest * clients, -largest * clients]


def test_a_reset_sum_is_empty() -> None:
    total = _summed([_up(), _up()], LIKE, 2)
    total.reset(2)
    assert total.count == 0
    assert all(not total[name].any() for name in total)


def test_a_mean_divides_by_the_sum_of_weights() -> None:
    total = FixedPointSum({"x": torch.zeros(2), "weight": torch.tensor(0.0)}, 2)
    total.add({"x": torch.tensor([2.0, 4.0]), "weight": torch.tensor(2.0)})
    total.add({"x": torch.tensor([9.0, -3.0]), "weight": torch.tensor(3.0)})
    assert total.mean("x").tolist() == pytest.approx([2.2, 0.2])


# A client's batches


@pytest.mark.parametrize(("batch_size", "iterations"), [(16, 5), (7, 3), (1000, 2)])
def test_a_clients_shuffled_pass_goes_on_across_rounds(batch_size: int, iterations: int) -> None:
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    inputs = Inputs(federation.source)
    own = federation.training.train(1)
    phase = Phase(_no_step, iterations, batch_size)
    in_pass = math.ceil(len(own) / batch_size)
    rounds = math.ceil(3 * in_pass / iterations)
    seen = [batch for round in range(rounds) for batch in LocalClient(federation, inputs, 5, 1, round).phase(phase)]
    assert len(seen) == rounds * iterations
    passes = [seen[i * in_pass : (i + 1) * in_pass] for i in range(3)]
    expected = _rows(inputs.x(own))
    orders = []
    for one in passes:
        assert [len(batch.x) for batch in one[:-1]] == [batch_size] * (in_pass - 1)
        x = torch.cat([batch.x for batch in one])
        assert sorted(_rows(x)) == sorted(expected)  # every sample once; the partial last batch is kept
        assert all(batch.mask is None or bool((batch.mask == 1).all()) for batch in one)
        orders.append(_rows(x))
    assert orders[0] != orders[1] != orders[2]


def _no_step(carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
    return carry, torch.zeros(())


def _rows(x: Tensor) -> list[bytes]:
    return [sample.contiguous().numpy().tobytes() for sample in x]


def test_a_clients_order_of_samples_follows_from_seed_and_client() -> None:
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    own = federation.training.train(0)
    twins = Clients(np.tile(own, 2), np.array([0, len(own), 2 * len(own)]), np.full(2, len(own)), np.zeros(2))
    shared = replace(federation, training=twins)
    inputs, phase = Inputs(federation.source), Phase(_no_step, 3, 16)

    def order(seed: int, client: int) -> list[bytes]:
        return [row for batch in LocalClient(shared, inputs, seed, client, 0).phase(phase) for row in _rows(batch.x)]

    assert order(5, 0) == order(5, 0)
    assert order(5, 0) != order(6, 0)
    assert order(5, 0) != order(5, 1)


def test_batches_keep_samples_and_labels_together() -> None:
    source = load("digits")
    federation = build_federation(source, Partition(kind="iid", clients=20), 0)
    inputs = Inputs(source)
    client = LocalClient(federation, inputs, 5, 1, 0)
    own = federation.training.train(1)
    label_of = dict(zip(_rows(inputs.x(own)), source.labels[own].tolist(), strict=True))
    assert len(label_of) == len(own)
    for batch in client.phase(Phase(_no_step, 4, 16)):
        assert [label_of[row] for row in _rows(batch.x)] == batch.y.tolist()
