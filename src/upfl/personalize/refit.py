"""Refit: the published model with its last layer fitted anew, in closed form, over all training clients.

Where clients hold few classes each, local steps bend the last layer towards each client's own classes, and the mean of
such layers is far from the layer that the mean features deserve. That one takes no training: with h the features before
the last layer, every training client sums over its train split

    n_c,   sum of h over class c,   sum of h h^T

and from the sums over clients come class means mu_c, the covariance S within classes, and Fisher's discriminant

    S = (sum h h^T - sum_c n_c mu_c mu_c^T) / n,         S' = (1 - g) S + g tr(S) / D I
    logits_c = mu_c^T S'^-1 h - mu_c^T S'^-1 mu_c / 2 + log n_c / n

which is the posterior of Gaussian classes. The sums do not depend on who holds which samples, and so neither does the
layer: clients without any class in common come to the layer that one machine with all the data would find. Related:
CCVR (Luo et al., NeurIPS 2021) trains the layer on samples of such Gaussians; `one_shot.py` has two that take other
layers from the same sums.

Settled: g = 0.01. A class that nobody holds has the mean of all. Classes weigh (n_c + 1) / (n + C), so that such a
class weighs as one sample. Sums come from the train splits of all clients, however few are evaluated, so that
validation scores need no cross-fitting for them. A server that sees single clients' sums, not only the total, sees how
many samples of each class a client holds, their mean features and the features' second moments: more than a
calibration tells it, and where a class has one sample, that sample's features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import (
    Client,
    Diary,
    Fit,
    Hyper,
    Need,
    Personalized,
    Personalizer,
    Predictor,
    Published,
    Total,
    Training,
    Unlabelled,
    all_logits,
)
from upfl.errors import BadClientError
from upfl.last_layer import discriminant
from upfl.personalize.adaptation import entropy
from upfl.personalize.calibration import fitted
from upfl.state import State

H = TypeVar("H", bound=Hyper)


class NewLayer(Personalizer[H]):
    """The published model with a last layer that all training clients fitted: `Layer`."""

    Layer: ClassVar[type[LastLayer]]

    @classmethod
    def why_not(cls, training: Training[Any]) -> str | None:
        if training.heterogeneous:
            return "it fits one last layer for all, and architectures differ in theirs"
        if training.head is None:
            return f"the model of {training.name} does not end in a linear layer on its features"
        return super().why_not(training)

    def needs(self) -> tuple[Need, ...]:
        return (Need.of(self.Layer, self, after=()),)

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        layer = fitted(published, f"{self.Layer.key}.{self.name}")
        theta = self.training.start(published, client, memory)
        names = {f"{self.training.head}.{kind}": kind for kind in ("weight", "bias")}
        refitted = theta | {name: layer[kind].to(theta[name]) for name, kind in names.items()}
        features = all_logits(self.training.features, theta, client.x)
        before, logits = (all_logits(self._last, params, features) for params in (theta, refitted))
        diary = Diary(
            entropy=[entropy(before).mean().item(), entropy(logits).mean().item()],
            decision="the last layer that the federation fitted anew",
        )
        return Personalized(before, logits, Predictor(self.training, [refitted]), diary)

    def _last(self, params: State, features: Tensor) -> Tensor:
        head = self.training.head
        return torch.nn.functional.linear(features, params[f"{head}.weight"], params[f"{head}.bias"])


class LastLayer(Fit):
    """A last layer from sums over all training clients: n_c, sums of features over each class, sum of h h^T."""

    split = "train"
    scales: ClassVar = {"sums": 24, "products": 24}
    second_moments: ClassVar[bool] = True  # whether it needs the last
    personalizer: NewLayer[Any]

    @abstractmethod
    def solve(self, counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's weight and bias. Without second moments, products are empty."""

    def init(self, generator: torch.Generator) -> State:
        shapes, head = self.training.model.shapes, self.training.head
        return {kind: torch.zeros(shapes[f"{head}.{kind}"], dtype=torch.float64) for kind in ("weight", "bias")}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        classes, size = server["weight"].shape
        up = {
            "counts": torch.zeros(classes, dtype=torch.int64),
            "sums": torch.zeros(classes, size, dtype=torch.float64),
        }
        products = torch.zeros(size, size, dtype=torch.float64) if self.second_moments else None
        batches = list(client.batches("train", 256))
        x = torch.cat([batch.x for batch in batches])
        newcomer = Unlabelled(client.id, x, client.seed, client.architecture)
        theta = self.training.start(self.given.published, newcomer, None)
        for batch in batches:
            h, y = self.training.features(theta, batch.x).cpu().double(), batch.y.cpu()
            up["counts"] += torch.bincount(y, minlength=classes)
            up["sums"].index_add_(0, y, h)
            if products is not None:
                products.addmm_(h.T, h)
        return up if products is None else up | {"products": products[*_triangle(size)]}, {}

    def checked(self, up: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rows, columns = _triangle(self.training.model.shapes[f"{self.training.head}.weight"][1])
        none = torch.zeros_like(rows)  # what is of another form is refused by the sum
        counts, products = up.get("counts", none), up.get("products", none)
        if (counts < 0).any() or (products.shape == rows.shape and (products[rows == columns] < 0).any()):
            raise BadClientError("its sums are not those of samples: a count or a sum of squares is negative")
        return up

    def aggregate(self, server: State, total: Total, round: int) -> State:
        products = torch.empty(0)
        if self.second_moments:
            rows, columns = _triangle(size := server["weight"].shape[1])
            products = torch.empty(size, size, dtype=torch.float64)
            products[rows, columns] = products[columns, rows] = total["products"]
        weight, bias = self.solve(total["counts"], total["sums"], products)
        return {"weight": weight, "bias": bias}

    def fitted(self, server: State, fit: int) -> State:
        return server


class Discriminant(LastLayer):
    key = "discriminant"

    def solve(self, counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        return discriminant(counts, sums, products, self.personalizer.hyper.shrinkage)


class RefitHyper(Hyper):
    shrinkage: float = Field(0.01, gt=0, le=1, description="of the covariance towards a multiple of the identity")


class Refit(NewLayer[RefitHyper]):
    name = "refit"
    title = "last layer refitted"
    Hyper = RefitHyper
    Layer = Discriminant


def _triangle(size: int) -> Tensor:
    """Rows and columns of a symmetric matrix's upper half, which is all of it."""
    return torch.triu_indices(size, size)
