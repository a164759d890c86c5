"""LAME against slow loops."""

import math

import numpy as np
import pytest
import torch

from tests.helpers.class_mix import personalize
from upfl.personalize.lame import affinity, agree

pytestmark = pytest.mark.usefixtures("one_thread")


def test_lame_is_that_of_slow_loops() -> None:
    rng = np.random.default_rng(0)
    features, scores = rng.normal(size=(12, 5)), rng.normal(size=(12, 3))
    h = features / np.linalg.norm(features, axis=1, keepdims=True)
    distance = np.array([[math.dist(a, b) for b in h] for a in h])
    sigma = np.mean([sorted(row)[5] for row in distance])  # place 0 is the sample itself
    kernel = np.exp(-(distance**2) / (2 * sigma**2))
    np.fill_diagonal(kernel, 0)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    y = p.copy()
    for _ in range(100):
        new = np.empty_like(y)
        for i in range(12):
            score = [math.log(p[i, c]) + sum(kernel[i, j] * y[j, c] for j in range(12)) for c in range(3)]
            weights = [math.exp(one) for one in score]
            new[i] = [weight / sum(weights) for weight in weights]
        y = new
    ours = affinity(torch.tensor(features), 5)
    np.testing.assert_allclose(ours, kernel, atol=1e-6)
    np.testing.assert_allclose(agree(torch.tensor(p).log(), ours, 100), y, atol=1e-4)


def test_lame_leaves_the_model_alone_and_lets_neighbours_agree() -> None:
    x = torch.cat([torch.tensor([[3.0, 1.0]]).repeat(9, 1), torch.tensor([[0.9, 1.0]])])
    x[:, 1] += 0.01 * torch.arange(10)
    found = personalize("lame", x, {}, neighbours=2)
    assert torch.equal(found.predict_logits(x), found.before)
    assert found.logits.softmax(1)[:9, 0].min() > found.before.softmax(1)[:9, 0].min()


def test_lame_treats_equal_samples_equally() -> None:
    """All features equal: no distance has a scale, and everyone is everyone's neighbour."""
    found = personalize("lame", torch.tensor([[2.0, 1.0, 0.0]]).repeat(8, 1), {})
    assert found.logits.isfinite().all()
    torch.testing.assert_close(found.logits, found.logits[:1].expand(8, 3))
