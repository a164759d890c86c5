"""FedTTA's guided step and early stopping, against references and on hand-made situations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.params import Params, doubled
from tests.helpers.personalize import assert_logits, fedavg, fedtta, personalize, psi_of, publish
from tests.reference import CASES, Case, entropy_in_bits, guide_gradient_norm, guided_step, guided_step_by_batches
from upfl.contract import Personalized, Published, Task
from upfl.errors import ConfigError
from upfl.methods import PERSONALIZERS, make_personalizer
from upfl.models import mlp
from upfl.randomness import generator
from upfl.state import select
from upfl.training.fedtta import FedTTA, FedTTAProx, FedTTAProxHyper

pytestmark = pytest.mark.usefixtures("one_thread")


def phi_of(published: Published) -> Params:
    return doubled(select(published.state, "phi"))


# One step


def assert_step(training: FedTTA, published: Published, case: Case, x: Tensor, adapted: Params, **hyper: Any) -> None:
    """A client's logits move as a reference's do."""
    personalized, psi = personalize("one-step", training, published, x.float(), **hyper), psi_of(published)
    assert_logits(personalized.logits, case.forward(adapted, x), case.forward(psi, x))
    torch.testing.assert_close(personalized.before.double(), case.forward(psi, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "batch"), [(1, 64), (10, 64), (64, 64), (65, 64), (600, 64), (100, 25)])
def test_one_step_is_the_method_cards_formula_for_any_number_of_samples(case: Case, n: int, batch: int) -> None:
    training = fedtta(case, inner_lr=0.5, weight_decay=0.01, batch_size=batch)
    published, x = publish(training, 33), case.x(n, 1)
    psi, phi = psi_of(published), phi_of(published)
    assert guide_gradient_norm(case.forward, psi, phi, x) < 10, "the case clips"
    adapted = guided_step(case.forward, psi, phi, x, 0.5 * 0.99**3.3, 0.01, batch)
    assert_step(training, published, case, x, adapted)


@pytest.mark.parametrize(("n", "batch"), [(90, 64), (64, 64), (30, 64), (90, 100), (600, 32)])
def test_one_step_may_average_the_norms_of_batches_as_the_authors_code_does(case: Case, n: int, batch: int) -> None:
    training = fedtta(case, inner_lr=0.5, weight_decay=0.01, batch_size=batch)
    published, x = publish(training, 0), case.x(n, 1)
    adapted = guided_step_by_batches(case.forward, psi_of(published), phi_of(published), x, 0.5, 0.01, batch)
    assert_step(training, published, case, x, adapted, norm="batches")
    ours, theirs = (personalize("one-step", training, published, x.float(), norm=norm) for norm in ("rms", "batches"))
    torch.testing.assert_close(theirs.diary.loss, ours.diary.loss, rtol=1e-4 if n <= batch else 0.5, atol=1e-5)


@pytest.mark.parametrize("n", [10, 600])
def test_one_step_clips_the_gradient_to_ten(case: Case, n: int) -> None:
    training = fedtta(case, inner_lr=0.02)
    published, x = publish(training, 0, phi_scale=8.0, psi_scale=2.0), case.x(n, 1)
    psi, phi = psi_of(published), phi_of(published)
    assert guide_gradient_norm(case.forward, psi, phi, x) > 20, "the case does not clip"
    assert_step(training, published, case, x, guided_step(case.forward, psi, phi, x, 0.02, 1e-4))


# Early stopping, on a model whose entropy along the steps is known


BOTH = 2  # classes


def slide(first: float, second: float, step: float, n: int = 1, **hyper: Any) -> Personalized:
    """Personalize a model with logits (first, second) whatever the input; each step takes `step` off the first.

    The model's weights are zero, so only its last bias counts; g is the first logit while that is positive, so
    l = sqrt(n) * first. Below zero the guide is silent and the steps stand still.
    """
    model = mlp(3, (4, 4), BOTH)
    training = FedTTAProx(
        Task(model, BOTH, 1), FedTTAProxHyper(inner_lr=step / math.sqrt(n), weight_decay=0.0, adaptation_width=4)
    )
    state = {name: torch.zeros_like(value) for name, value in training.init(generator(0)).items()}
    state["psi.fc3.bias"] = torch.tensor([first, second])
    for layer in ("fc1", "fc2", "fc3", "fc4"):
        state[f"phi.{layer}.weight"][0, 0] = 1.0
    return personalize("early-stopped", training, Published(state, 0), torch.ones(n, 3), **hyper)


def binary_entropy(gap: float) -> float:
    logits = torch.tensor([[gap, 0.0]], dtype=torch.float64)
    return float(entropy_in_bits(logits)) * math.log(2)


# From a gap of 0.8 by steps of 0.5: the entropy rises to the third model, falls, and is least at the fifth, where the
# first logit is zero and the guide falls silent.
HILL: dict[str, Any] = {"first": 2.0, "second": 1.2, "step": 0.5}
# From a gap of -0.2: the entropy falls from the start until the guide falls silent after four steps.
SLOPE: dict[str, Any] = {"first": 2.0, "second": 2.2, "step": 0.5}
SLOPE_GAPS = [-0.2, -0.7, -1.2, -1.7, -2.2]


def assert_gap(personalized: Personalized, gap: float) -> None:
    got = personalized.logits[:, 0] - personalized.logits[:, 1]
    torch.testing.assert_close(got, torch.full_like(got, gap), rtol=0, atol=1e-5)
    later = personalized.predict_logits(torch.randn(2, 3, generator=generator(1)))
    torch.testing.assert_close(later[:, 0] - later[:, 1], got[:1].expand(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 64])
def test_the_diary_holds_the_entropy_before_and_after_each_step(n: int) -> None:
    personalized = slide(**SLOPE, n=n, patience=1)
    expected = [binary_entropy(gap) for gap in [*SLOPE_GAPS, SLOPE_GAPS[-1]]]
    assert personalized.diary.entropy == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("situation", "steps", "looks", "gap"),
    [
        # Falling entropy is followed to its end.
        (SLOPE | {"patience": 1}, 4, 1 + 4 + 1, -2.2),
        (SLOPE | {"patience": 3}, 4, 1 + 4 + 3, -2.2),
        # Steps that do not lower it end with the unadapted model; the third lowers it against the second only.
        (HILL | {"patience": 1}, 0, 1 + 1, 0.8),
        (HILL | {"patience": 2}, 0, 1 + 2, 0.8),
        (HILL | {"patience": 3}, 0, 1 + 3, 0.8),
        # Patience crosses a hill and keeps the least entropy beyond.
        (HILL | {"patience": 4}, 4, 1 + 4 + 4, -1.2),
        # No more steps are taken than allowed, and fifty by default.
        (SLOPE | {"patience": 50, "steps": 1}, 1, 1 + 1, -0.7),
        (SLOPE | {"patience": 50, "steps": 2}, 2, 1 + 2, -1.2),
        (SLOPE | {"patience": 50, "steps": 3}, 3, 1 + 3, -1.7),
        ({"first": 60.0, "second": 60.0, "step": 0.5}, 50, 1 + 50, -25.0),
        # Adapted candidates are compared with each other only, though the unadapted model's 0.8 has less entropy.
        (HILL | {"patience": 1, "candidates": "adapted"}, 1, 1 + 2, 0.3),
        (HILL | {"patience": 3, "steps": 3, "candidates": "adapted"}, 3, 1 + 3, -0.7),
        # A tie is no fall: the guide is silent from the start.
        ({"first": -1.0, "second": 0.0, "step": 0.5, "patience": 3}, 0, 1 + 3, -1.0),
    ],
)
def test_steps_go_on_while_the_entropy_falls_and_the_least_is_kept(
    situation: dict[str, Any], steps: int, looks: int, gap: float
) -> None:
    personalized = slide(**situation)
    assert (personalized.diary.steps, len(personalized.diary.entropy)) == (steps, looks)
    assert_gap(personalized, gap)


@pytest.mark.parametrize("candidates", ["all", "adapted"])
@pytest.mark.parametrize("patience", [1, 3, 50])
def test_the_kept_model_has_the_least_entropy_of_the_diary(case: Case, patience: int, candidates: str) -> None:
    training = fedtta(case, inner_lr=0.3)
    for n in (1, 12, 300):
        x = case.x(n, n, torch.float32)
        personalized = personalize(
            "early-stopped", training, publish(training, 0), x, patience=patience, candidates=candidates
        )
        entropies = personalized.diary.entropy
        assert len(entropies) <= 51
        least = min(entropies if candidates == "all" else entropies[1:])
        assert entropies[personalized.diary.steps] == least
        assert personalized.diary.steps >= (candidates == "adapted")
        kept = float(entropy_in_bits(personalized.logits.double())) * math.log(2)
        assert kept == pytest.approx(least, rel=1e-4, abs=1e-5)


def test_each_of_the_steps_is_the_one_steps(case: Case) -> None:
    training = fedtta(case, inner_lr=0.2, weight_decay=0.01)
    published = publish(training, 21)
    x = case.x(100, 1)
    personalized = personalize(
        "early-stopped", training, published, x.float(), steps=3, patience=50, candidates="adapted"
    )
    psi, phi = psi_of(published), phi_of(published)
    models = [psi]
    for _ in range(3):
        models.append(guided_step(case.forward, models[-1], phi, x, 0.2 * 0.99**2.1, 0.01))
    entropies = [float(entropy_in_bits(case.forward(model, x))) * math.log(2) for model in models]
    assert personalized.diary.entropy == pytest.approx(entropies, rel=1e-4)
    kept = models[personalized.diary.steps]
    assert_logits(personalized.logits, case.forward(kept, x), case.forward(psi, x))


# What fits


@pytest.mark.parametrize("name", ["one-step", "early-stopped"])
def test_guided_steps_do_not_fit_a_training_without_a_guide(name: str) -> None:
    training = fedavg(CASES["mlp"])
    assert PERSONALIZERS[name].why_not(training)
    with pytest.raises(ConfigError, match=f"{name}.*fedavg"):
        make_personalizer(name, training, PERSONALIZERS[name].Hyper())
