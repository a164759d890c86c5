"""Whether data are like the federation's: alarms where they are not, none where classes alone differ."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.synthetic import Floats, Given, even, pairs
from upfl.bundle.in_words import in_words
from upfl.contract import CrossFitted, Likeness, Published, Task
from upfl.data.federation import Clients, Federation
from upfl.data.forms import Pixels
from upfl.data.source import Source
from upfl.engine.clients import LocalClient, Population
from upfl.engine.fitting import fit_needs
from upfl.engine.group import Group
from upfl.models import mlp
from upfl.personalize import likeness
from upfl.personalize.likeness import LikenessCheck, Spread, check, known_of, sketch
from upfl.personalize.nothing import Nothing
from upfl.personalize.reference import Reference, class_sums
from upfl.training.fedavg import FedAvg, FedAvgHyper

pytestmark = pytest.mark.usefixtures("alone")

CLASSES, SIZE = 6, 10
MEANS = 3 * np.random.default_rng(7).normal(size=(CLASSES, SIZE))
STATE = {"psi.fc1.weight": torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(0))} | {
    "psi.fc1.bias": torch.zeros(CLASSES)
}


def some(mix: Floats, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([seed, samples])
    y = rng.choice(CLASSES, samples, p=mix)
    return torch.tensor(MEANS[y] + rng.normal(size=(samples, SIZE))).float(), torch.tensor(y)


def federation(mixes: list[Floats], train: int = 60, validation: int = 15) -> tuple[FedAvg, Federation, Given]:
    held = [some(mix, train + validation, i) for i, mix in enumerate(mixes)]
    x, y = torch.cat([one for one, _ in held]), torch.cat([one for _, one in held])
    offsets = np.arange(len(mixes) + 1, dtype=np.int64) * (train + validation)
    clients = Clients(np.arange(len(x)), offsets, np.full(len(mixes), train), np.zeros(len(mixes)))
    names = tuple(map(str, range(CLASSES)))
    form = Pixels(shape=(1, 1, 1), scale=255.0, mean=(0.0,), std=(1.0,))
    pixels = np.zeros((len(x), 1, 1, 1), np.uint8)
    source = Source("synthetic", pixels, y.numpy(), names, len(y), None, form)
    training = FedAvg(Task(mlp(SIZE, (), CLASSES), CLASSES, len(mixes)), FedAvgHyper())
    return training, Federation(source, clients, clients, np.empty(0, np.int64), ()), Given(x, y)


def published(mixes: list[Floats], **sizes: int) -> tuple[FedAvg, Published]:
    training, held, inputs = federation(mixes, **sizes)
    given, facts = fit_needs([LikenessCheck(training)], Published(STATE, 1), Population(held, inputs, 0), Group())
    assert facts[likeness.KEY]["inputs.within"] > 0
    return training, given.published


def looked_at(training: FedAvg, known: Published, x: Tensor) -> Likeness:
    params = {name.removeprefix("psi."): value for name, value in STATE.items()}
    return check(training, known_of(known), params, x)[0]


@pytest.mark.parametrize("mixes", [pairs(CLASSES, 12), [even(CLASSES)] * 12], ids=["two classes", "i.i.d."])
def test_classes_of_its_own_are_no_alarm_and_other_inputs_are(mixes: list[Floats]) -> None:
    """Newcomers hold a single class, two of them, or all: nothing that their inputs have in common is unusual."""
    training, known = published(mixes)
    own = [*pairs(CLASSES, 30), *[even(CLASSES)] * 10, *np.eye(CLASSES)]
    verdicts = [looked_at(training, known, some(mix, 50, 100 + i)[0]).verdict for i, mix in enumerate(own)]
    assert verdicts.count("alike") >= 0.95 * len(verdicts)
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: -x, lambda x: 2 * x, lambda x: x + 1, lambda x: x.flip(1)]
    for change in changes:
        found = [looked_at(training, known, change(some(mix, 50, 100 + i)[0])) for i, mix in enumerate(own[:10])]
        assert all(one.unlike for one in found)
        assert all(one.p < 0.002 for one in found)
        assert all("UNLIKE" in in_words(one, 60) for one in found)


def test_few_samples_are_unlike_or_too_few_to_tell() -> None:
    training, known = published(pairs(CLASSES, 12))
    x = some(even(CLASSES), 19, 5)[0]
    assert looked_at(training, known, x).verdict == "too few"
    assert looked_at(training, known, x[:1]).verdict == "too few"
    assert looked_at(training, known, 5 * x[:1]).unlike


def test_few_training_clients_call_nothing_alike() -> None:
    training, known = published(pairs(CLASSES, 5))
    assert looked_at(training, known, some(even(CLASSES), 100, 5)[0]).verdict == "too few"


def test_outlying_samples_are_marked() -> None:
    training, known = published(pairs(CLASSES, 12))
    params = {name.removeprefix("psi."): value for name, value in STATE.items()}
    x = some(even(CLASSES), 400, 5)[0]
    x[7] *= 6
    found = check(training, known_of(known), params, x)[1]
    assert found[7]
    assert found.sum() <= 6


def test_a_sample_is_judged_by_mahalanobis_distance_to_the_nearest_class() -> None:
    x, y = some(even(CLASSES), 500, 0)
    h = sketch(x)
    counts = torch.bincount(y, minlength=CLASSES).double()
    reference = Reference.of(counts, *class_sums(h, y, CLASSES))
    assert reference is not None
    t, nearest, _ = reference.judge(h)
    means = np.stack([h[y == c].mean(0) for c in range(CLASSES)])
    within = np.sum([np.cov(h[y == c].T, bias=True) * int((y == c).sum()) for c in range(CLASSES)], 0) / len(y)
    within = 0.98 * within + 0.02 * np.trace(within) / len(within) * np.eye(len(within))
    off = h.numpy()[:, None] - means
    squares = np.einsum("icp,pq,icq->ic", off, np.linalg.inv(within), off)
    np.testing.assert_allclose(t, np.log(squares.min(1) / likeness.SIZE) / 2, atol=1e-8)
    assert nearest.tolist() == squares.argmin(1).tolist()


def test_a_client_is_not_judged_by_its_own_samples() -> None:
    """Its own part of the sums is taken out: what it says of its validation samples is what others alone would."""
    mixes = pairs(CLASSES, 8)
    training, held, inputs = federation(mixes)
    fit = Spread(Nothing(training, Nothing.Hyper()), CrossFitted(Published(STATE, 1)))
    clients = [LocalClient(held, inputs, 0, i, 0) for i in range(len(mixes))]
    memories = [fit.memory(client) for client in clients]

    def total(of: list[int]) -> dict[str, Tensor]:
        names = ("counts", "inputs_sums", "inputs_products", "features_sums", "features_products")
        return fit.init(torch.Generator()) | {
            name: torch.stack([memories[i][name] for i in of]).sum(0) for name in names
        }

    everyone, others = list(range(8)), list(range(1, 8))
    ours, _ = fit.finish(total(everyone), memories[0], clients[0])
    nothing = memories[0] | {name: torch.zeros_like(memories[0][name]) for name in total([0]) if name in memories[0]}
    theirs, _ = fit.finish(total(others), nothing, clients[0])
    for name in ("inputs_distance", "features_distance", "inputs_drift", "features_drift_square"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-6)


def test_large_inputs_are_sketched_alike_everywhere() -> None:
    x = torch.randn(5, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    first = sketch(x)
    assert first.shape == (5, likeness.SIZE)
    assert torch.equal(first, sketch(x.clone()))
    assert float(first.square().sum() / x.square().sum()) == pytest.approx(1, abs=0.3)


def test_tokens_are_counted_whatever_their_order() -> None:
    tokens = torch.randint(1, 30_000, (4, 50), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([tokens.flip(1), torch.zeros(4, 10, dtype=torch.int64)], 1)
    assert torch.equal(sketch(tokens), sketch(padded))
    assert (sketch(tokens) != 0).double().mean() > 0.3
    assert not torch.equal(sketch(tokens)[0], sketch(tokens)[1])


def test_values_that_are_no_numbers_are_unlike() -> None:
    training, known = published(pairs(CLASSES, 12))
    broken = known_of(known) | {"inputs_means": known_of(known)["inputs_means"] * torch.nan}
    params = {name.removeprefix("psi."): value for name, value in STATE.items()}
    assert check(training, broken, params, some(even(CLASSES), 50, 5)[0])[0].unlike
    assert replace(Likeness("alike", 1.0, {}), verdict="unlike").unlike
