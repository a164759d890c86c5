"""Clients with different models: the distillation against references, what newcomers need, who has which model."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import (
    CASES,
    CLASSES,
    Case,
    Params,
    Somebody,
    descend,
    difference,
    distance,
    doubled,
    entropy_step,
    forward_mlp,
    gradient,
    guided_step,
    leaves,
    norm,
)
from upfl import api, data
from upfl.cli.runs import show
from upfl.config import SIZES, Config, configure
from upfl.contract import Architecture, Batch, Published, Task, Unlabelled
from upfl.engine.fold import FixedPointSum
from upfl.engine.setup import assemble
from upfl.errors import ConfigError
from upfl.methods import make_training
from upfl.models import adaptation_model, mlp
from upfl.personalize.fedtta import OneStep, OneStepHyper
from upfl.randomness import generator
from upfl.safe.tensors import read_file
from upfl.state import State, prefixed, select
from upfl.training.fedmd import FedMD, distillation
from upfl.training.hetero_fedtta import HeteroFedTTA, HeteroFedTTAHyper
from upfl.training.hetero_tent import HeteroTent

pytestmark = pytest.mark.usefixtures("one_thread")

PUBLIC = 12  # samples
CPU = torch.device("cpu")


T = TypeVar("T", bound=FedMD[Any])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def made(kind: type[T], task: Task, **hyper: Any) -> T:
    training = make_training(kind.name, task, kind.Hyper(**hyper))
    assert isinstance(training, kind)
    return training


def hetero(case: Case, public: int = PUBLIC, **hyper: Any) -> HeteroFedTTA:
    """One architecture: that of the case."""
    task = Task(case.model, CLASSES, 3, public=case.x(public, 5, torch.float32))
    return made(HeteroFedTTA, task, **hyper)


def teacher(seed: int, scale: float = 3.0) -> State:
    drawn = torch.randn(2, PUBLIC, CLASSES, generator=generator(seed, "teacher"), dtype=torch.float64)
    return {"base": scale * drawn[0], "personalized": scale * drawn[1]}


def public_batch(case: Case, places: list[int]) -> Batch:
    return Batch(case.x(PUBLIC, 5)[places], torch.zeros(len(places), dtype=torch.int64), index=torch.tensor(places))


def kl(first: Tensor, second: Tensor) -> Tensor:
    """The mean over samples of KL(softmax(first) || softmax(second)), by PyTorch's own function."""
    return F.kl_div(second.log_softmax(1), first.log_softmax(1), reduction="batchmean", log_target=True)


# The loss


def test_the_distillation_loss_of_hand_made_logits() -> None:
    """Teacher (1/2, 1/2), student (3/4, 1/4): log 2 - (log 3/4 + log 1/4) / -2 and so on, by hand."""
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    batch = Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), index=torch.tensor([2]))
    target = torch.cat([quarter, quarter, half])  # the batch is the third of the public set's samples
    logits = quarter + 7.0  # a shift changes nothing
    forward, _ = distillation(logits, target, batch, HeteroFedTTAHyper())
    backward, _ = distillation(logits, target, batch, HeteroFedTTAHyper(kl="student-first"))
    assert float(forward) == pytest.approx(0.5 * 0.2876820724517809, rel=1e-5)  # log(4/3) / 2
    assert float(backward) == pytest.approx(0.13081203594113694, rel=1e-5)  # 3/4 log 3/2 + 1/4 log 1/2


@pytest.mark.parametrize("direction", ["teacher-first", "student-first"])
def test_the_distillation_loss_and_its_gradient_equal_pytorchs(direction: Any) -> None:
    batch = public_batch(CASES["mlp"], [3, 1, 8, 11])
    student, target = teacher(1)["base"][:4].requires_grad_(), teacher(2)["base"]
    with torch.enable_grad():
        pair = (target[[3, 1, 8, 11]], student)
        expected = kl(*(pair if direction == "teacher-first" else pair[::-1]))
        (slope,) = torch.autograd.grad(expected, student)
    loss, dz = distillation(student.detach(), target, batch, HeteroFedTTAHyper(kl=direction))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(dz, slope)


@dataclass(frozen=True)
class DigestStep:
    """HeteroFedTTA's digest with plain double backward."""

    case: Case
    lambda_: float
    direction: str = "teacher-first"
    inner_lr: float = 0.5
    weight_decay: float = 1e-4

    def loss(self, psi: Params, phi: Params, x: Tensor, base: Tensor, personalized: Tensor) -> Tensor:
        z = self.case.forward(psi, x)
        guide = (forward_mlp(phi, z).square().sum() + 1e-12).sqrt()
        grads = gradient(guide, psi, create_graph=True)
        adapted = {k: v - self.inner_lr * (grads[k] + self.weight_decay * v) for k, v in psi.items()}
        return self._kl(personalized, self.case.forward(adapted, x)) + self.lambda_ * self._kl(base, z)

    def _kl(self, taught: Tensor, student: Tensor) -> Tensor:
        return kl(taught, student) if self.direction == "teacher-first" else kl(student, taught)

    def gradients(self, psi: Params, phi: Params, batch: Batch, taught: State) -> tuple[float, Params, Params]:
        psi, phi = leaves(psi), leaves(phi)
        with torch.enable_grad():
            loss = self.loss(psi, phi, batch.x, taught["base"][batch.index], taught["personalized"][batch.index])
            both = gradient(loss, prefixed("psi", psi) | prefixed("phi", phi))
        return float(loss.detach()), select(both, "psi"), select(both, "phi")


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


@pytest.mark.parametrize("direction", ["teacher-first", "student-first"])
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
        total = FixedPointSum(up, 1)
        total.add(up)
        server = training.aggregate(server, total, 0)
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


# What is sent


def test_clients_send_their_logits_before_and_after_a_guided_step_on_the_public_set(case: Case) -> None:
    training = hetero(case, inner_lr=0.3, weight_decay=0.01)
    client = Somebody(round=20)
    memory = training.memory(client)
    with torch.no_grad():
        up, kept = training.finish({}, training.begin(training.init(generator(0)), memory, client), client)
    assert all(torch.equal(kept[name], memory[name]) for name in memory)
    psi, x = doubled(select(memory, "psi")), training.public.double()
    adapted = guided_step(case.forward, psi, doubled(select(memory, "phi")), x, 0.3 * 0.99**2, 0.01)
    torch.testing.assert_close(up["base"].double(), case.forward(psi, x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(up["personalized"].double(), case.forward(adapted, x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(up["base"], up["personalized"], atol=1e-3)


def test_tents_clients_send_their_logits_after_a_step_down_the_entropy(case: Case) -> None:
    task = Task(case.model, CLASSES, 3, public=case.x(PUBLIC, 5, torch.float32))
    training = made(HeteroTent, task, lr=0.9)
    memory = {name: 3 * value for name, value in training.memory(Somebody()).items()}
    with torch.no_grad():
        up, _ = training.finish({}, training.begin(training.init(generator(0)), memory, Somebody()), Somebody())
    assert up.keys() == {"personalized", "weight"}
    psi, x = doubled(select(memory, "psi")), training.public.double()
    adapted = entropy_step(case.forward, psi, x, 0.9, 1e-4, 10.0)
    torch.testing.assert_close(up["personalized"].double(), case.forward(adapted, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_the_teacher_is_the_mean_of_what_clients_said(aggregation: Any) -> None:
    training = hetero(CASES["mlp"], aggregation=aggregation)
    server, clients = training.init(generator(0)), [Somebody(count=30, id=0), Somebody(count=10, id=1)]
    with torch.no_grad():
        ups = [training.finish(server, training.begin(server, training.memory(c), c), c)[0] for c in clients]
    total = FixedPointSum(ups[0], 2)
    for up in ups:
        total.add(up)
    after = training.aggregate(server, total, 0)
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


# A federation of digits


def small(method: str = "hetero-fedtta", *settings: str, **options: Any) -> Config:
    settings = ("iterations=3", "digest_epochs=1", "newcomer_epochs=2", "digest_batch=50", *settings)
    scale: dict[str, Any] = {"rounds": 2, "model": {"hidden": 16}, "partition": {"clients": 24, "public": 0.1}}
    return configure(method, "digits", settings=settings, **(scale | options))


@pytest.fixture(scope="module", params=["hetero-fedtta", "hetero-tent"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.train(small(request.param), tmp_path_factory.mktemp(request.param) / "run", workers=1)


def test_batches_of_the_public_set_know_their_places() -> None:
    setup = assemble(small())
    client, training = setup.client(1, 1), setup.training
    seen = []
    for batch in client.phase(training.phases(1)[0]):
        assert batch.index is not None
        assert torch.equal(batch.x, training.public[batch.index])  # type: ignore[attr-defined]
        assert not batch.y.any()
        seen += batch.index.tolist()
    assert sorted(seen) == list(range(round(0.1 * 1797)))
    whole = torch.cat([batch.index for batch in client.batches("public", 64) if batch.index is not None])
    assert torch.equal(whole, torch.arange(len(seen)))


def test_nobody_holds_a_public_sample() -> None:
    federation = assemble(small()).federation
    held = set(federation.training.indices.tolist()) | set(federation.new.indices.tolist())
    assert not held & set(federation.public.tolist())


def test_newcomers_of_each_size_need_only_what_is_published(run: api.Run, tmp_path: Path) -> None:
    """Without any training client's memory, and without the data but their own: from the stored file alone."""
    alone = api.Run(tmp_path / "run")
    shutil.copytree(run.path, alone.path)
    shutil.rmtree(alone.path / "memory")
    (alone.path / "checkpoint.safetensors").unlink()
    newcomer, sizes = run.newcomer(0), set()
    for name in SIZES:
        client = replace(newcomer, architecture=name)
        mine, theirs = run.personalize(client), alone.personalize(client)
        assert torch.equal(mine.logits, theirs.logits)
        assert mine.logits.isfinite().all()
        assert torch.equal(mine.predict(client.x), mine.logits.argmax(1))
        (params,) = mine.predictor.params
        sizes.add(sum(value.numel() for value in params.values()))
    assert sizes == {mlp(64, (units, units), 10).size for units in (8, 16, 32)}


def test_no_training_clients_weights_are_published(run: api.Run) -> None:
    """Only logits on the public set and the public set; single values may agree with a weight by chance."""
    published = run.published(next(iter(run.config.personalize)))
    training: Any = run.training
    assert not training.publishes_memory
    assert not len(published.members)
    assert published.state.keys() == {*training.knowledge, "public"}
    shapes = {tuple(value.shape) for name, value in published.state.items() if name != "public"}
    assert shapes == {(len(training.public), 10)}
    assert torch.equal(published.state["public"], training.public)
    values = torch.cat([value.flatten() for name, value in published.state.items() if name != "public"])
    files = sorted(run.path.glob("memory/*/*.safetensors"))
    assert len(files) == 12
    for file in files:
        weights = torch.cat([value.flatten() for value in read_file(file).values()])
        assert torch.isin(values, weights).float().mean() < 0.01


def test_a_newcomers_models_are_a_digest_of_what_is_published(case: Case) -> None:
    """Two epochs in shuffled batches from fresh models, then one guided step: with a reference for both."""
    training = hetero(case, digest_batch=5, clip=1e9, lambda_=0.8)
    state = training.publish({name: value.float() for name, value in teacher(3).items()})
    published, client = Published(state, 10), Unlabelled(4, case.x(20, 1, torch.float32), seed=3)
    fresh = doubled(training.students[""].revisit.init(client.generator("models")))
    psi, phi = select(fresh, "psi"), select(fresh, "phi")
    velocity = {name: torch.zeros_like(value) for name, value in phi.items()}
    decay, order = 0.99, client.generator("digest")
    reference = DigestStep(case, 0.8, inner_lr=0.5 * decay)
    taught = doubled({name: state[name] for name in ("base", "personalized")})
    for _ in range(2):
        shuffled = torch.randperm(PUBLIC, generator=order).tolist()
        for start in range(0, PUBLIC, 5):
            batch = public_batch(case, shuffled[start : start + 5])
            batch = replace(batch, x=batch.x.float().double())
            _, to_psi, to_phi = reference.gradients(psi, phi, batch, taught)
            velocity = {k: 0.9 * velocity[k] + to_phi[k] + 1e-4 * phi[k] for k in phi}
            psi = descend(psi, to_psi, 0.3 * decay, 1e-4)
            phi = {k: v - 0.01 * decay * velocity[k] for k, v in phi.items()}
    ours = training.models(published, client, None)
    for name, expected in (("psi", psi), ("phi", phi)):
        started = select(fresh, name)
        moved = difference(doubled(select(ours, name)), started)
        assert distance(moved, difference(expected, started)) < 1e-3, name
    x = client.x.double()
    adapted = guided_step(case.forward, psi, phi, x, 0.5 * decay, 1e-4)
    personalized = OneStep(training, OneStepHyper()).personalize(published, client)
    torch.testing.assert_close(personalized.before.double(), case.forward(psi, x), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(personalized.logits.double(), case.forward(adapted, x), rtol=1e-2, atol=1e-3)


def test_training_clients_validate_with_their_own_models() -> None:
    training = hetero(CASES["mlp"])
    memory = training.memory(Somebody(id=2))
    client = Unlabelled(2, CASES["mlp"].x(5, 1, torch.float32))
    published = Published(training.publish(training.init(generator(0))), 3)
    own = training.start(published, client, memory)
    assert all(torch.equal(own[name], memory[f"psi.{name}"]) for name in own)
    assert torch.equal(training.logits(own, client.x), CASES["mlp"].model.apply(own, client.x))


# Sizes


def test_the_papers_sizes_on_cifar10() -> None:
    architectures = configure("hetero-fedtta", "cifar10").model.architectures((3, 32, 32), 10)
    sizes = {name: (entry.model.size, entry.adaptation_width) for name, entry in architectures.items()}
    assert sizes == {"small": (1_068_266, 32), "medium": (2_156_490, 64), "big": (4_409_738, 128)}
    task = Task(architectures["medium"].model, 10, 3, architectures, torch.zeros(4, 3, 32, 32))
    training = made(HeteroFedTTA, task)
    for name, width in (("small", 32), ("medium", 64), ("big", 128)):
        memory = training.memory(Somebody(architecture=name))
        assert sum(v.numel() for v in select(memory, "phi").values()) == adaptation_model(10, width).size
        assert sum(v.numel() for v in select(memory, "psi").values()) == architectures[name].model.size


def test_sizes_are_equally_likely_and_a_function_of_the_partitions_seed_and_the_client() -> None:
    federation = data.build_federation(data.load("digits"), small().partition, 0, SIZES)
    for role in ("training", "new"):
        drawn = Counter(federation.architecture(role, client) for client in range(6000))
        assert set(drawn) == set(SIZES)
        assert all(abs(count - 2000) < 5 * (6000 * 2 / 9) ** 0.5 for count in drawn.values())
    again = data.build_federation(data.load("digits"), small().partition, 0, SIZES)
    other = data.build_federation(data.load("digits"), small().partition, 1, SIZES)
    first = [federation.architecture("training", client) for client in range(50)]
    assert first == [again.architecture("training", client) for client in range(50)]
    assert first != [other.architecture("training", client) for client in range(50)]
    assert first != [federation.architecture("new", client) for client in range(50)]


def test_a_user_may_name_any_set_of_models(tmp_path: Path) -> None:
    sizes = "model.sizes={tiny = {hidden = 4}, picture = {name = 'convnet', width = 0.125, hidden = 8, adaptation = 5}}"
    config = small("hetero-fedtta", sizes, rounds=2)
    assert list(config.model.sizes) == ["tiny", "picture"]
    run = api.train(config, tmp_path / "run", workers=1)
    assert set(run.result["rows"][0]["architectures"]) == {"tiny", "picture"}
    training: Any = run.training
    assert training.students["tiny"].revisit.model.size == mlp(64, (4, 4), 10).size
    assert "conv1.weight" in training.students["picture"].revisit.model.shapes
    assert training.students["picture"].revisit.g.size == adaptation_model(10, 5).size
    for name in ("tiny", "picture"):
        client = replace(run.newcomer(1), architecture=name)
        assert run.personalize(client).logits.isfinite().all()


def test_a_files_sizes_take_the_place_of_the_papers_and_settings_reach_into_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[model.sizes.one]\nwidth = 0.25\n[model.sizes.other]\nadaptation = 8\n")
    config = configure("hetero-tent", "mnist", file=file, settings=["model.sizes.one.width=3"])
    assert {name: size.width for name, size in config.model.sizes.items()} == {"one": 3.0, "other": 1.0}
    file.write_text(config.to_toml())
    assert configure("hetero-tent", "mnist", file=file) == config


def test_without_sizes_all_clients_have_the_one_model(tmp_path: Path) -> None:
    run = api.train(small("hetero-tent", "model.sizes={}", rounds=1), tmp_path / "run", workers=1)
    assert run.newcomer(0).architecture == ""
    assert "architectures" not in run.result["rows"][0]
    assert run.personalize(run.newcomer(0)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("fedavg", "model.sizes={small = {width = 0.5}}", "fedavg have the same model; hetero-fedtta, hetero-tent"),
        ("hetero-fedtta", "model.sizes.smal.width=0.5", "unknown table 'smal'; did you mean small"),
        ("hetero-fedtta", "model.sizes.small.wdth=0.5", "did you mean model.sizes.small.width"),
        ("hetero-fedtta", "model.sizes.small.width=0", "model.sizes.small.width"),
        ("hetero-fedtta", "model.sizes=3", "model.sizes"),
        ("hetero-fedtta", "lambda=0.5", "did you mean lambda_"),
        ("hetero-fedtta", "lambda_=-1", "lambda_"),
        ("hetero-fedtta", "kl=forward", "teacher-first"),
    ],
)
def test_what_does_not_fit_is_named(method: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        configure(method, "digits", settings=[setting])


def test_a_federation_without_a_public_set_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hetero-fedtta needs a public set: set partition\.public"):
        api.train(small("hetero-fedtta", "partition.public=0"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_architecture_is_answered_with_the_known_ones() -> None:
    architectures = {"small": Architecture(CASES["mlp"].model)}
    task = Task(CASES["mlp"].model, CLASSES, 3, architectures, torch.zeros(4, 2, 8, 8))
    training = made(HeteroFedTTA, task)
    published = Published(training.publish(training.init(generator(0))), 1)
    with pytest.raises(ConfigError, match="architecture is 'huge', and this federation knows small"):
        training.start(published, Unlabelled(0, torch.zeros(1, 2, 8, 8), architecture="huge"), None)


# Scores


def test_scores_by_architecture_are_those_of_its_clients(run: api.Run) -> None:
    (row,) = run.result["rows"]
    metrics = run.metrics[row["best_round"] - 1]["rows"][row["row"]]
    assert metrics["architectures"] == row["architectures"]
    assert set(row["architectures"]) == set(SIZES)
    for kind, score in (("training", "validation"), ("new", "test")):
        for name, scores in row["architectures"].items():
            mine = [c for c in row["clients"] if c["kind"] == kind and c["architecture"] == name]
            assert all(run.federation.architecture(kind, c["client"]) == name for c in mine)  # type: ignore[arg-type]
            if not mine:
                assert scores[score] is None
                continue
            correct = sum(c["accuracy"] * c["size"] for c in mine)
            assert scores[score] == pytest.approx(correct / sum(c["size"] for c in mine))
            assert kind == "training" or scores["clients"] == len(mine)


def test_upfl_show_has_a_line_for_each_architecture(
    run: api.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (row,) = run.result["rows"]
    for markdown in (False, True):
        show([run.path], markdown=markdown)
        shown = capsys.readouterr().out
        for name, scores in row["architectures"].items():
            (line,) = (line for line in shown.splitlines() if f" {name} ({scores['clients']})" in line)
            assert f"{scores['test']:.2f}" in line if scores["clients"] else " - " in line
