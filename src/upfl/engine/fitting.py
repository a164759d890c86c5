"""Fitting over a trained model: the fold of a training's round, with what clients remember kept in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from upfl.contract import CrossFitted, Fit, HasNeeds, Published, needs_of
from upfl.data.federation import Federation
from upfl.engine.clients import LocalClient, Population
from upfl.engine.fold import FixedPointSum
from upfl.engine.group import Group
from upfl.errors import BadClientError, ConfigError, StoppedError
from upfl.randomness import generator
from upfl.state import State, all_aligned


def fit_needs(
    personalizers: Sequence[HasNeeds],
    published: Published,
    population: Population,
    group: Group,
    tell: Callable[[str], None] = lambda what: None,
) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
    """Fit what the personalizers need on the training clients of a federation that is here."""
    require_data(personalizers, population.federation)

    def by_workers(key: str, fit: Fit) -> tuple[State, int]:
        clients = [population.training(i) for i in clients_of(type(fit), population.federation)]
        return run_fit(fit, clients, population.seed, group)

    return fit_by(by_workers, personalizers, published, tell)


def fit_by(
    run: Callable[[str, Fit], tuple[State, int]],
    personalizers: Sequence[HasNeeds],
    published: Published,
    tell: Callable[[str], None],
) -> tuple[CrossFitted, dict[str, dict[str, float]]]:
    """Fit what the personalizers need, in order. `run` gives a fit's last state, and how many clients were left out.

    Returns what was fitted, with facts about each fit for the metrics.
    """
    given, facts = CrossFitted(published), {}
    for key, need in needs_of(personalizers).items():
        tell(f"fitting {key}")
        fit = need.stage(given)
        server, left_out = run(key, fit)
        given = given.plus(fit.results(server))
        facts[key] = fit.facts(server) | ({"left_out": left_out} if left_out else {})
    return given, facts


def require_data(personalizers: Sequence[HasNeeds], federation: Federation, limit: int | None = None) -> None:
    """Refuse personalizers for which something must be fitted on data that no client has."""
    for key, need in needs_of(personalizers).items():
        if not clients_of(need.kind, federation, limit):
            other = "larger" if need.kind.split == "validation" else "smaller"
            raise ConfigError(
                f"'{key}' is fitted on training clients' {need.kind.split} data, and there is none: "
                f"take a {other} partition.validation, or personalizers that need no fit"
            )


def clients_of(kind: type[Fit], federation: Federation, limit: int | None = None) -> list[int]:
    """The clients that a fit is made on: all that trained, or of the first `limit` those that validate.

    Clients that are held out have a part in no fit: their labels choose the round, and nothing else.
    """
    held = federation.training.counts(kind.split) * ~federation.training.held_out
    return [int(i) for i in np.flatnonzero(held[: kind.most(limit)])]


def run_fit(fit: Fit, clients: list[LocalClient], seed: int, group: Group) -> tuple[State, int]:
    """A fit's rounds over clients that are dealt out among the workers once; and how many clients were left out."""
    counts = clients[0].federation.training.counts(fit.split)
    ours = group.share(clients, [int(counts[client.id]) for client in clients])
    memories = {client.id: fit.memory(client) for client in ours}
    refused: set[int] = set()

    def collect(server: State, round: int, total: FixedPointSum) -> None:
        for client in ours:
            group.check()
            up, memories[client.id] = fit_client(fit, server, memories[client.id], replace(client, round=round))
            try:
                total.add(fit.checked(up))
            except BadClientError:
                refused.add(client.id)
        group.sum_(total.buffer)
        total.merged()
        if not total.count:
            raise StoppedError(f"{fit.key}: what every client sent was not finite or too large; the model has diverged")

    example = ours[0] if ours else clients[0]
    memory = memories.get(example.id) or fit.memory(example)
    server = fit_rounds(fit, example, memory, len(clients), seed, collect)
    left_out = torch.tensor([len(refused)])
    group.sum_(left_out)
    return server, int(left_out)


def fit_rounds(
    fit: Fit,
    example: LocalClient,
    memory: State,
    clients: int,
    seed: int,
    collect: Callable[[State, int, FixedPointSum], bool | None],
) -> State:
    """The rounds of a fit, until it is done: `collect` adds to the sum what at most `clients` clients send in a round.

    It says whether these are others than in the round before. What they send has the form of what the example, with
    its memory, would send.
    """
    server = fit.init(generator(seed, "fit", fit.key))
    like, _ = fit.finish(server, fit.begin(server, memory, example), example)
    total = FixedPointSum(like, clients, fit.scales)
    for round in range(fit.rounds):
        total.reset(clients)
        if collect(server, round, total):
            server = fit.over_others(server)
        server = fit.aggregate(server, total, round)
        if fit.done(server):
            break
    return server


def fit_client(fit: Fit, server: State, memory: State, client: LocalClient) -> tuple[Mapping[str, Tensor], State]:
    """A client's part in a round of a fit: what goes up, what it keeps."""
    server = all_aligned(server)
    carry = all_aligned(fit.begin(server, all_aligned(memory), client))
    for phase in fit.phases(client.round):
        for batch in client.phase(phase):
            carry, _ = phase.step(carry, batch, client.round)
    return fit.finish(server, carry, client)
