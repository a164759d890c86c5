r"""Differential privacy of what training clients send: clipping on the node, Gaussian noise on the sum.

    u_i <- u_i * min(1, C / |u_i|)         on client i's node, over all that it sends (a Flower mod)
    sum <- sum_i u_i + N(0, (z C)^2 I)     on the server, once a round

z is the noise multiplier. Two runs are neighbours if they differ in one client, all of whose updates are zero in one of
them. After k rounds the released sums are (epsilon, delta)-private for every such client, with mu = sqrt(k) / z and

    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)

which is exact for k Gaussian mechanisms one after another (Balle and Wang, ICML 2018; Dong, Roth and Su, 2022). No
benefit is claimed from taking part in some rounds only: nodes know the seed that chooses them.

The noise is added to the fixed-point sum as an integer, so that the grid of floating-point numbers says nothing about
the sum, and it comes from the system's generator for secrets, never from the run's seed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from pydantic import Field
from torch import Tensor

from upfl.contract import Hyper
from upfl.engine.fold import FixedPointSum
from upfl.engine.local import LOSS
from upfl.errors import BadClientError, ConfigError
from upfl.flower.messages import ARRAYS, facts_of, from_record, to_record
from upfl.state import State, norm

CLIP = "clip"  # the fact of a train message by which a node knows the norm
APART = ("weight", LOSS)  # what goes up beside the update: 1, and with clipping 0
BELOW = 1 - 1e-6  # the share of C that a node uses: rounding stays below the server's limit


class Privacy(Hyper):
    clip: float = Field(gt=0, description="C: largest norm of what a client sends")
    noise: float = Field(gt=0, description="z: standard deviation of the noise on the sum, in units of C")
    delta: float = Field(1e-5, gt=0, lt=1)

    def epsilon(self, rounds: int) -> float:
        return epsilon(self.noise, rounds, self.delta)

    def check(self, up: Mapping[str, Tensor]) -> None:
        """Refuse what would break the promise: a weight that tells something, an update that was not clipped."""
        if float(up["weight"]) != 1:
            raise BadClientError("its weight is not 1, as privacy needs it")
        if not float(norm(floating(up))) <= self.clip:
            raise BadClientError(f"the norm of its update is above the clipping norm {self.clip:g}")

    def disturb(self, total: FixedPointSum, shares: int = 1) -> None:
        """Add noise; or a share of it, where so many members of a secure sum add one each."""
        scale = self.noise * self.clip / math.sqrt(shares)
        for name in total:
            if name not in APART:
                total.disturb(name, secret_normal(total[name].numel()) * scale)


def require_private(like: Mapping[str, Tensor], server: State, training: str) -> None:
    """Only a training whose clients send changes of the server's state with weight 1 can have its sum disturbed."""
    if like.keys() - set(APART) != server.keys() or float(like.get("weight", torch.tensor(0.0))) != 1:
        raise ConfigError(
            f"{training} cannot run with clip and noise: its clients send more than equally weighted changes of the "
            "server's state. Take a training that does (fedavg, fedprox, fedtta, fedtta-prox, scaffold, fedsr, fedadg) "
            'with aggregation = "uniform"'
        )


def floating(up: Mapping[str, Tensor]) -> list[Tensor]:
    """The values of an update, without what goes up beside it."""
    return [value.double() for name, value in up.items() if name not in APART and value.is_floating_point()]


def clipping(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod for the train handler: where the server asks for it, what goes up is clipped, and the loss is 0."""
    reply = call_next(message, context)
    limit = facts_of(message).get(CLIP)
    if limit is None or not reply.has_content() or ARRAYS not in reply.content.array_records:
        return reply
    up = from_record(reply.content.array_records[ARRAYS])
    reply.content[ARRAYS] = to_record(clipped(up, float(limit)))  # type: ignore[arg-type]
    return reply


def clipped(up: Mapping[str, Tensor], limit: float) -> State:
    """An update of at most that norm, and no word about the loss."""
    scale = min(1.0, limit * BELOW / max(float(norm(floating(up))), 1e-30))
    short = {name: value if name in APART else (value.double() * scale).to(value) for name, value in up.items()}
    return short | {LOSS: torch.zeros_like(up[LOSS])}


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """The least epsilon for `rounds` Gaussian mechanisms of a noise multiplier, by bisection on the exact delta."""
    if not rounds:
        return 0.0
    mu, low, high = math.sqrt(rounds) / noise, 0.0, 1.0
    while _log_delta(mu, high) > math.log(delta):
        low, high = high, 2 * high
    if _log_delta(mu, 0.0) <= math.log(delta):
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_delta(mu, middle) > math.log(delta) else (low, middle)
    return high


def _log_delta(mu: float, epsilon: float) -> float:
    """log of Phi(a) - e^epsilon Phi(b), in logarithms because both terms may be far below the smallest float."""
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    log_a, log_b = (float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64))) for x in (a, b))
    share = math.exp(epsilon + log_b - log_a)  # below 1, but for rounding
    return log_a + math.log1p(-share) if share < 1 else -math.inf


def secret_normal(count: int) -> Tensor:
    """Standard normal values from the system's generator for secrets, by Box and Muller's transform."""
    bits = np.frombuffer(os.urandom(16 * ((count + 1) // 2)), np.uint64).reshape(2, -1) >> np.uint64(11)
    radius, angle = torch.from_numpy((bits.astype(np.float64) + 0.5) / 2.0**53)
    radius = (-2 * radius.log()).sqrt()
    angle = angle * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
