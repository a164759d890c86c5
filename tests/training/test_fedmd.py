"""Distillation between different models: the digest against references, and what is sent."""

from typing import Any

import pytest
import torch

from tests.helpers.fedmd import PUBLIC, DigestStep, hetero, kl, made, public_batch, teacher
from tests.helpers.params import descend, difference, distance, doubled, gradient, leaves, norm
from tests.helpers.rounds import total_of
from tests.reference import CASES, CLASSES, Case, Somebody, entropy_step, guided_step
from upfl.contract import Batch, Task
from upfl.randomness import generator
from upfl.state import State, prefixed, select
from upfl.training.fedmd import FedMD, distillation
from upfl.training.fedtta import FedTTAProxHyper
from upfl.training.hetero_fedtta import HeteroFedTTAHyper
from upfl.training.hetero_tent import HeteroTent

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_distillation_loss_of_hand_made_logits() -> None:
    """Teacher (1/2, 1/2), student (3/4, 1/4): log 2 - (log 3/4 + log 1/4) / -2 and so on, by hand."""
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    batch = Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), index=torch.tensor([2]))
    target = torch.cat([quarter, quarter, half])  # the batch is the third of the public set's samples
    logits = quarter + 7.0  # a shift changes nothing
    forward, _ = distillation(logits, target, batch, HeteroFedTTAHyper())
    backward, _ = distillation(logits, target, batch, HeteroFedTTAHyper(kl="own-first"))
    assert float(forward) == pytest.approx(0.5 * 0.2876820724517809, rel=1e-5)  # log(4/3) / 2
    assert float(backward) == pytest.approx(0.13081203594113694, rel=1e-5)  # 3/4 log 3/2 + 1/4 log 1/2


@pytest.mark.parametrize("direction", ["target-first", "own-first"])
def test_the_distillation_loss_and_its_gradient_equal_pytorchs(direction: Any) -> None:
    batch = public_batch(CASES["mlp"], [3, 1, 8, 11])
    student, target = teacher(1)["base"][:4].requires_grad_(), teacher(2)["base"]
    with torch.enable_grad():
        pair = (target[[3, 1, 8, 11]], student)
        expected = kl(*(pair if direction == "target-first" else pair[::-1]))
        (slope,) = torch.autograd.grad(expected, student)
    loss, dz = distillation(student.detach(), target, batch, HeteroFedTTAHyper(kl=direction))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(dz, slope)


def digested(training: FedMD[Any], models: State, taught: State, batches: list[Batch]) -> tuple[State, list[float]]:
    student = training.students[""]
    carry, losses = student.digest.carry(models) | prefixed("teacher", taught), []
    with torch.no_grad():
        for batch in batches:
            carry, loss = training.digest(carry, batch, 0)
            losses.append(float(loss))
    return {name: carry[name].clone() for name in models}, losses


def models_of(training: FedMD[Any], seed: int) -> State:
    return doubled(training.students[""].revisit.init(generator(seed, "models")))


BARE: dict[str, Any] = {"outer_lr": 1.0, "adapt_lr": 1.0, "momentum": 0.0, "clip": 1e9}


@pytest.mark.parametrize("direction", ["target-first", "own-first"])
@pytest.mark.parametrize("lambda_", [0.0, 0.8])
def test_a_digest_step_equals_plain_double_backward(case: Case, lambda_: float, direction: Any) -> None:
    training = hetero(case, **BARE, lambda_=lambda_, kl=direction)
    models, taught, batch = models_of(training, 1), teacher(3), public_batch(case, [7, 0, 3, 9, 4])
    after, (loss,) = digested(training, models, taught, [batch])
    reference = DigestStep(case, lambda_, direction)
    expected, *slopes = reference.gradients(select(models, "psi"), select(models, "phi"), batch, taught)
    assert loss == pytest.approx(expected, rel=1e-9)
    for name, slope in zip(("psi", "phi"), slopes, strict=True):
        before = select(models, name)
        moved = difference(before, select(after, name))
        decay = {key: 1e-4 * value for key, value in before.items()}
        assert distance(difference(moved, decay), slope) < 1e-6, name


def test_without_lambda_the_loss_is_end_to_end(case: Case) -> None:
    """What the teacher's base models say makes no difference; with lambda it does."""
    taught, other = teacher(3), teacher(3) | {"base": teacher(4)["base"]}
    for lambda_, same in ((0.0, True), (0.8, False)):
        training = hetero(case, lambda_=lambda_)
        ends = [
            digested(training, models_of(training, 1), said, [public_batch(case, [0, 5, 2])])
            for said in (taught, other)
        ]
        assert (ends[0][1] == ends[1][1]) == same
        assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0]) == same


def test_gradients_reach_phi_through_the_digest(case: Case) -> None:
    """Finite differences of the loss in phi, also where lambda holds the base model."""
    training = hetero(case, **BARE, weight_decay=0.0, lambda_=0.8)
    models, taught, batch = models_of(training, 2), teacher(6), public_batch(case, list(range(PUBLIC)))
    after, _ = digested(training, models, taught, [batch])
    slope = select(difference(models, after), "phi")
    along = {name: torch.randn(v.shape, generator=generator(1, name), dtype=v.dtype) for name, v in slope.items()}
    h = 1e-5

    def at(step: float) -> float:
        moved = {f"phi.{name}": models[f"phi.{name}"] + step * value for name, value in along.items()}
        return digested(training, models | moved, taught, [batch])[1][0]

    expected = sum(float((slope[name] * value).sum()) for name, value in along.items())
    assert abs(expected) > 1e-3
    assert (at(h) - at(-h)) / (2 * h) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("lambda_", [0.0, 0.8])
def test_a_client_that_is_its_own_teacher_starts_at_zero(case: Case, lambda_: float) -> None:
    """One architecture, one client: what it sent is what it says when the next round's digest begins.

    The public set is a batch of the digest, and more than one of the local steps.
    """
    public = HeteroFedTTAHyper().digest_batch
    assert public > HeteroFedTTAHyper().batch_size
    training = hetero(case, public, lambda_=lambda_, decay=1.0)
    server = training.init(generator(0, "init"))
    memory = training.memory(Somebody())
    with torch.no_grad():
        carry = training.begin(server, memory, Somebody())
        for seed in range(3):
            carry, _ = training.revisit(carry, case.batch(10, seed, torch.float32), 0)
        up, memory = training.finish(server, carry, Somebody())
        server = training.aggregate(server, total_of(training, [up]), 0)
        whole = Batch(training.public, torch.zeros(public, dtype=torch.int64), index=torch.arange(public))
        others = {name: value.flip(0) for name, value in server.items()}
        for knowledge, expected in ((server, 0.0), (others, 1.0)):
            carry = training.begin(knowledge, memory, Somebody(round=1))
            _, loss = training.digest(carry, whole, 1)
            assert (float(loss) < 1e-6) == (expected == 0.0)


def test_a_tent_digest_step_is_plain_distillation(case: Case) -> None:
    task = Task(case.model, CLASSES, 3, public=case.x(PUBLIC, 5, torch.float32))
    training = made(HeteroTent, task, lr=0.3, weight_decay=0.01, clip=0.5)
    models, taught = models_of(training, 1), {"personalized": teacher(3)["personalized"]}
    batches = [public_batch(case, [7, 0, 3, 9, 4]), public_batch(case, [1, 2])]
    after, losses = digested(training, models, taught, batches)
    psi = select(models, "psi")
    for batch, loss in zip(batches, losses, strict=True):
        params = leaves(psi)
        with torch.enable_grad():
            expected = kl(taught["personalized"][batch.index], case.forward(params, batch.x))
            grads = gradient(expected, params)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
        assert norm(grads) > 0.5, "the case does not clip"
        psi = descend(params, grads, 0.3, 0.01, 0.5)
    assert distance(select(after, "psi"), psi) < 1e-8


@pytest.mark.parametrize("steps", [0, 1])
def test_clients_send_their_logits_before_and_after_a_guided_step_on_the_public_set(case: Case, steps: int) -> None:
    training = hetero(case, inner_lr=0.3, weight_decay=0.01, public_steps=steps)
    client = Somebody(round=20)
    memory = training.memory(client)
    with torch.no_grad():
        up, kept = training.finish({}, training.begin(training.init(generator(0)), memory, client), client)
    assert all(torch.equal(kept[name], memory[name]) for name in memory)
    psi, x = doubled(select(memory, "psi")), training.public.double()
    adapted = guided_step(case.forward, psi, doubled(select(memory, "phi")), x, 0.3 * 0.99**2, 0.01) if steps else psi
    torch.testing.assert_close(up["base"].double(), case.forward(psi, x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(up["personalized"].double(), case.forward(adapted, x), rtol=1e-4, atol=1e-5)
    assert torch.allclose(up["base"], up["personalized"], atol=1e-3) != bool(steps)


@pytest.mark.parametrize("steps", [0, 1])
def test_tents_clients_send_their_logits_after_steps_down_the_entropy(case: Case, steps: int) -> None:
    task = Task(case.model, CLASSES, 3, public=case.x(PUBLIC, 5, torch.float32))
    training = made(HeteroTent, task, lr=0.9, public_steps=steps)
    memory = {name: 3 * value for name, value in training.memory(Somebody()).items()}
    with torch.no_grad():
        up, _ = training.finish({}, training.begin(training.init(generator(0)), memory, Somebody()), Somebody())
    assert up.keys() == {"personalized", "weight"}
    psi, x = doubled(select(memory, "psi")), training.public.double()
    adapted = entropy_step(case.forward, psi, x, 0.9, 1e-4, 10.0) if steps else psi
    torch.testing.assert_close(up["personalized"].double(), case.forward(adapted, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_the_teacher_is_the_mean_of_what_clients_said(aggregation: Any) -> None:
    training = hetero(CASES["mlp"], aggregation=aggregation)
    server, clients = training.init(generator(0)), [Somebody(count=30, id=0), Somebody(count=10, id=1)]
    with torch.no_grad():
        ups = [training.finish(server, training.begin(server, training.memory(c), c), c)[0] for c in clients]
    after = training.aggregate(server, total_of(training, ups), 0)
    alone = hetero(CASES["mlp"])
    with torch.no_grad():
        said = [alone.finish(server, alone.begin(server, alone.memory(c), c), c)[0] for c in clients]
    share = 0.75 if aggregation == "samples" else 0.5
    for kind in ("base", "personalized"):
        expected = share * said[0][kind] + (1 - share) * said[1][kind]
        torch.testing.assert_close(after[kind], expected, rtol=1e-5, atol=1e-6)


def test_the_first_round_has_nothing_to_digest_and_later_ones_whole_epochs() -> None:
    training = hetero(CASES["mlp"], digest_batch=5, digest_epochs=2, iterations=7)
    (revisit,) = training.phases(0)
    assert (revisit.split, revisit.iterations) == ("train", 7)
    digest, revisit = training.phases(1)
    assert (digest.split, digest.iterations, digest.batch_size) == ("public", 6, 5)
    assert training.bytes_down(training.init(generator(0)), 0) == 0
    assert training.bytes_down(training.init(generator(0)), 1) == 2 * PUBLIC * CLASSES * 4


def test_words_of_earlier_versions_are_read() -> None:
    assert [FedTTAProxHyper(kl=word).kl for word in ("reverse", "forward")] == ["target-first", "own-first"]
    taught = [HeteroFedTTAHyper(kl=f"{word}-first").kl for word in ("teacher", "student")]
    assert taught == ["target-first", "own-first"]
