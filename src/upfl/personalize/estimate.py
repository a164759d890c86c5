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
from typing import Any

import torch
from torch import Tensor

from upfl.contract import FITS, Client, Estimate, Fit, Total, varies
from upfl.state import State


class Reliability(Fit):
    """The mean and the scatter of the estimates' errors over training clients, before and after personalization."""

    key = "reliability"
    personalizer: Any  # a Correction

    def init(self, generator: torch.Generator) -> State:
        return {name: torch.zeros(FITS, 2, dtype=torch.float64) for name in ("offset", "scatter")}

    def memory(self, client: Client) -> State:
        y = self.labels(client)
        error, variance = torch.zeros(2, FITS, 2, dtype=torch.float64)
        base = self.personalizer.base
        for fit, published, personalized in self.plays(client, base.personalize, varies(base)):
            corrected = self.personalizer.corrected(personalized, published)
            posterior = corrected.logits.double().softmax(1).cpu()
            for i, logits in enumerate((corrected.before, corrected.logits)):
                value, variance[fit, i] = raw_estimate(logits, posterior)
                error[fit, i] = value - accuracy_of(logits, y)
        return {"error": error, "variance": variance}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        error = carry["error"]
        clients = self.takes_part(client.id).double().unsqueeze(1)
        return {"clients": clients, "error": error, "excess": error.square() - carry["variance"]}, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        clients = total["clients"].clamp(min=1)
        offset = total["error"] / clients
        return {"offset": offset, "scatter": (total["excess"] / clients - offset.square()).clamp(min=0)}

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {"offset": (-1, 1), "scatter": (0, 1)}


def raw_estimate(predictions: Tensor, posterior: Tensor) -> tuple[float, float]:
    """(the accuracy that the posteriors give to predictions, its variance)"""
    right = posterior.gather(1, predictions.cpu().argmax(1, keepdim=True)).clamp(max=1)  # rounding may take it past 1
    return right.mean().item(), (right * (1 - right)).mean().item() / len(right)


def estimates(before: Tensor, posterior: Tensor, known: State) -> list[Estimate]:
    """The accuracy before and after, with what training clients taught about such estimates where they did."""
    result = []
    for i, predictions in enumerate((before, posterior)):
        value, variance = raw_estimate(predictions, posterior)
        if known:
            value, variance = value - known["offset"][i].item(), variance + known["scatter"][i].item()
        result.append(interval(value, variance))
    return result


def interval(value: float, variance: float) -> Estimate:
    value, half = min(max(value, 0.0), 1.0), 1.96 * math.sqrt(variance)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def accuracy_of(logits: Tensor, y: Tensor) -> float:
    return (logits.cpu().argmax(1) == y).double().mean().item()
