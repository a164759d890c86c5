"""Last layers of one-shot federated learning, from `refit`'s sums: what a refitted layer is to be compared with.

Fed3R: Fani, Camoriano, Caputo, Ciccone, Accelerating Heterogeneous Federated Learning with Closed-form Classifiers,
ICML 2024. Ridge regression of the classes' indicators on features h with a 1 appended,

    A = sum [h, 1] [h, 1]^T,   B = sum [h, 1] y^T,   [W, b] = (A + lambda I)^-1 B,   each class's W_c and b_c over |W_c|

FedNCM: Legate, Bernier, Page-Caccia, Oyallon, Belilovsky, Guiding the Last Layer in Federated Learning with Pre-Trained
Models, NeurIPS 2023. Class means:

    W_c = mu_c / |mu_c|,   b = 0

The papers take the features of a network that was pre-trained elsewhere, and train on from there. Here they are those
of whatever the federation trained, and the layer is the end. A class that nobody holds has no logit but 0.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from upfl.contract import Hyper
from upfl.personalize.refit import LastLayer, NewLayer


class Fed3RHyper(Hyper):
    lambda_: float = Field(0.01, gt=0, description="of ridge regression")


class Fed3RLayer(LastLayer):
    key = "ridge"

    def solve(self, counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        hyper: Fed3RHyper = self.personalizer.hyper
        total, n = sums.sum(0), counts.double()
        gram = torch.cat(
            [torch.cat([products, total.unsqueeze(1)], 1), torch.cat([total, n.sum(0, True)]).unsqueeze(0)]
        )
        gram.diagonal().add_(hyper.lambda_)
        solution = torch.linalg.solve(gram, torch.cat([sums.T, n.unsqueeze(0)])).T
        weight, bias = solution[:, :-1], solution[:, -1]
        length = torch.linalg.vector_norm(weight, dim=1).clamp(min=1e-6)
        return (weight / length.unsqueeze(1)).contiguous(), bias / length


class Fed3R(NewLayer[Fed3RHyper]):
    name = "fed3r"
    title = "last layer by ridge regression"
    Hyper = Fed3RHyper
    Layer = Fed3RLayer


class ClassMeans(LastLayer):
    key = "means"
    second_moments = False

    def solve(self, counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(sums, dim=1), torch.zeros_like(sums[:, 0])  # of a sum and of a mean, the direction is the same


class FedNCM(NewLayer[Hyper]):
    name = "fedncm"
    title = "class means as last layer"
    Layer = ClassMeans
