"""LAME: Boudiaf, Mueller, Ben Ayed, Bertinetto, Parameter-free Online Test-time Adaptation, CVPR 2022.

Neighbours should have like predictions. With p the model's predictions and K an affinity of the samples,

    Y <- softmax(log p + K Y)        from Y = p, 100 times or until it is still
    K_ij = exp(-|h_i - h_j|^2 / (2 sigma^2)), i != j;   h the features before the last layer, of length 1

Settled: sigma is the mean distance to the fifth neighbour; a sample is no neighbour of its own. The method predicts a
client's samples together and leaves the model alone: later samples are the model's own.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import Diary, Hyper, Personalized, Personalizer, Predictor, Published, Unlabelled, all_logits
from upfl.personalize.adaptation import entropy
from upfl.state import State


class LameHyper(Hyper):
    neighbours: int = Field(5, ge=1, description="the neighbour whose mean distance is the affinity's scale")
    iterations: int = Field(100, ge=1)


class Lame(Personalizer[LameHyper]):
    name = "lame"
    title = "agreement of neighbours"
    later = "before"
    Hyper = LameHyper

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        predictor = Predictor(self.training, [self.training.start(published, client, memory)])
        before = predictor.logits(client.x)
        features = all_logits(self.training.features, predictor.params[0], client.x)
        y = agree(before.log_softmax(1), affinity(features, self.hyper.neighbours), self.hyper.iterations)
        logits = y.clamp(min=1e-30).log()
        diary = Diary(
            entropy=[entropy(before).mean().item(), entropy(logits).mean().item()],
            decision="predictions brought into agreement with their neighbours'; the model is unchanged",
        )
        return Personalized(before, logits, predictor, diary)


def affinity(features: Tensor, neighbours: int) -> Tensor:
    h = torch.nn.functional.normalize(features.flatten(1), dim=1)
    distance = torch.cdist(h, h)
    nearest = min(neighbours, len(h) - 1)
    scale = distance.kthvalue(nearest + 1).values.mean().clamp(min=1e-6)  # the nearest of all is the sample itself
    return (-distance.square() / (2 * scale.square())).exp().fill_diagonal_(0)


def agree(log_p: Tensor, affinity: Tensor, iterations: int) -> Tensor:
    y = log_p.exp()
    for _ in range(iterations):
        swept = (log_p + affinity @ y).softmax(1)
        still = (swept - y).abs().max() < 1e-6
        y = swept
        if still:
            break
    return y
