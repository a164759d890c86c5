"""How near few rounds of sums come to the best calibration: `python -m benchmarks.calibration RUN...`.

For each run folder, the calibration of what personalizers (--score) make of its last state: over the first clients that
validate (--clients), against Newton's method on their pooled scores until no step helps. Prints how many nats of
cross-entropy, with what holds a and b, the federation's calibration is above the least; how far any probability is from
the best one's; and how far pi is from the mean posterior.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upfl.contract import CrossFitted, Personalizer
from upfl.engine.clients import Population
from upfl.engine.fitting import clients_of, run_fit
from upfl.engine.folder import RunFolder
from upfl.engine.group import Group
from upfl.engine.rounds import Engine, one_thread
from upfl.methods import personalizer_class
from upfl.personalize.calibration import Calibration
from upfl.personalize.newton import Newton, newton_sums


class Pooled:
    """The problem of fit 0 on scores and labels that are all here."""

    def __init__(self, fit: Calibration, scores: Tensor, y: Tensor) -> None:
        self.scores, self.y = scores.unsqueeze(0), y
        count = torch.tensor([float(len(y))]).double()
        self.weight = fit.penalty(count).repeat(1, 1 + fit.classes)
        self.weight[:, 0] = 1 / count

    def at(self, theta: Tensor) -> tuple[float, Newton]:
        sums, n = newton_sums(theta, self.scores, self.y), len(self.y)
        away = theta.clone()
        away[:, 0] -= 1
        loss = sums["loss"] / n + 0.5 * (self.weight * away.square()).sum(1)
        gradient = sums["gradient"] / n + self.weight * away
        return loss.item(), Newton.at(theta, gradient, sums["hessian"] / n, self.weight)

    def best(self) -> tuple[float, Tensor]:
        theta = torch.zeros(1, self.scores.shape[2] + 1, dtype=torch.float64)
        theta[:, 0] = 1
        loss, found = self.at(theta)
        for _ in range(200):
            part = 1.0
            while self.at(theta + part * found.step)[0] > loss and part > 1e-9:
                part /= 2
            if found.decrement < 1e-13 or part <= 1e-9:
                break
            theta = theta + part * found.step
            loss, found = self.at(theta)
        return loss, theta

    def posterior(self, theta: Tensor) -> Tensor:
        return (theta[0, 0] * self.scores[0] + theta[0, 1:]).softmax(1)


def measure(engine: Engine[Any], personalizer: Personalizer[Any], most: int, rounds: int) -> None:
    given = CrossFitted(engine.published())
    population = Population(engine.federation, engine.setup.inputs, engine.config.seed)
    for need in personalizer.needs():
        clients = [population.training(id) for id in clients_of(need.kind, engine.federation)]
        stage = need.stage(given)
        given = given.plus(stage.results(run_fit(stage, clients, engine.config.seed, Group())[0]))
    fit = Calibration(personalizer, given)
    fit.rounds = rounds or fit.rounds  # type: ignore[misc]
    clients = [population.training(id) for id in clients_of(Calibration, engine.federation)][:most]
    found = fit.fitted(run_fit(fit, clients, engine.config.seed, Group())[0], 0)
    memories = [{name: value.detach() for name, value in fit.memory(client).items()} for client in clients]
    pooled = Pooled(fit, torch.cat([m["scores"][0] for m in memories]), torch.cat([m["y"] for m in memories]))
    ours, (least, theirs) = torch.cat([found["scale"].view(1), found["bias"]]).unsqueeze(0), pooled.best()
    smoothed = pooled.posterior(ours).mean(0) + (1e-4 if fit.classes >= 62 else 1e-6)
    print(
        f"{engine.folder.path.name} {personalizer.name}: {len(pooled.y)} labels, scale {ours[0, 0]:.2f}, largest bias "
        f"{ours[0, 1:].abs().max():.1f}, at most {fit.rounds} rounds: {pooled.at(ours)[0] - least:.1e} nats above the "
        f"least, a probability off by {(pooled.posterior(ours) - pooled.posterior(theirs)).abs().max():.0e}, "
        f"pi by {(smoothed / smoothed.sum() - found['prior']).abs().max():.0e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--score", default="none,refit", help="personalizers whose predictions are calibrated")
    parser.add_argument("--rounds", type=int, default=0, help="of sums at most; by default as many as there are")
    asked = parser.parse_args()
    for path in asked.runs:
        engine = Engine.standing(RunFolder.open(path))
        with one_thread():
            for kind in map(personalizer_class, asked.score.split(",")):
                if kind.why_not(engine.training) is None:
                    measure(engine, kind(engine.training, kind.Hyper()), asked.clients, asked.rounds)


if __name__ == "__main__":
    main()
