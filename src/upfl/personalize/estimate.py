"""How accurate a newcomer's predictions are, told without its labels.

With posteriors r that mean what they say, a prediction d_i is right with probability r_i,d_i:

    accuracy = mean_i r_i,d_i           of the model before (d its own predictions) and after (d = argmax r)
    variance = mean_i r_i,d_i (1 - r_i,d_i) / n   of the accuracy on these very samples, r given

Posteriors are never quite what they say. How far they are off, the training clients know: each plays the newcomer and
compares its estimate with its labels. The mean of the differences corrects the estimate, and what they scatter beyond
the variance above widens the interval: +- 1.96 sqrt(variance + scatter).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from upfl.personalize.base import Estimate
from upfl.personalize.fitting import FITS, Fit, takes_part
from upfl.state import State
from upfl.training.base import Client, Total


class Reliability(Fit):
    """The mean and the scatter of the estimates' errors over training clients, before and after personalization."""

    key = "reliability"

    def init(self, generator: torch.Generator) -> State:
        return {name: torch.zeros(FITS, 2, dtype=torch.float64) for name in ("offset", "scatter")}

    def memory(self, client: Client) -> State:
        newcomer, y = self.play(client)
        personalized = self.personalizer.personalize(self.given.without(client.id), newcomer)
        posterior = personalized.logits.double().softmax(1).cpu()
        errors, variances = [], []
        for logits in (personalized.before, personalized.logits):
            value, variance = raw_estimate(logits, posterior)
            errors.append(value - accuracy_of(logits, y))
            variances.append(variance)
        return {"error": torch.tensor(errors).double(), "variance": torch.tensor(variances).double()}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        taking = takes_part(client.id).double().unsqueeze(1)
        error, variance = carry["error"], carry["variance"]
        return {"clients": taking, "error": taking * error, "excess": taking * (error.square() - variance)}, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        clients = total["clients"].clamp(min=1)
        offset = total["error"] / clients
        return {"offset": offset, "scatter": (total["excess"] / clients - offset.square()).clamp(min=0)}


def raw_estimate(predictions: Tensor, posterior: Tensor) -> tuple[float, float]:
    """(the accuracy that the posteriors give to predictions, its variance)"""
    right = posterior.gather(1, predictions.cpu().argmax(1, keepdim=True))
    return right.mean().item(), (right * (1 - right)).mean().item() / len(right)


def estimates(before: Tensor, posterior: Tensor, known: State) -> list[Estimate]:
    """The accuracy before and after, with what training clients taught about such estimates where they did."""
    result = []
    for i, predictions in enumerate((before, posterior)):
        value, variance = raw_estimate(predictions, posterior)
        if known:
            value, variance = value - known["offset"][i].item(), variance + known["scatter"][i].item()
        value = min(max(value, 0.0), 1.0)
        half = 1.96 * math.sqrt(variance)
        result.append(Estimate(value, max(value - half, 0.0), min(value + half, 1.0)))
    return result


def accuracy_of(logits: Tensor, y: Tensor) -> float:
    return (logits.cpu().argmax(1) == y).double().mean().item()
