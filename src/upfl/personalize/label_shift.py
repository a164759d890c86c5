"""Label-shift correction: the newcomer's own mix of classes, on a frozen, calibrated model. Beyond the paper.

With l_ic = log p_ic - log pi_c of the calibrated model, for each prior strength s in a grid, s >= s_min:

    q ~ Dirichlet(s pi):   responsibilities r^s and evidence L_s by variational Bayes (class_mix.py)
    s = infinity:          r = p, q = pi, L = 0
    w_s proportional to exp(L_s);   r = sum_s w_s r^s,   q = sum_s w_s q^s

The newcomer's own samples are predicted by argmax r, later ones by argmax l_c + log q_c.

The gate. Evidence alone is fooled by feature shift: unlike inputs look like an unlike mix. So the federation says how
weak a prior is justified: each training client plays the newcomer on its validation split, with the calibration fitted
on other clients, and counts the negative log-likelihood of its labels for each s_min. The least sum wins; within one
standard error of it (of the paired difference, over clients) the largest s_min. The newcomer's evidence may choose less
adaptation than the training clients justify, never more. Labels that those other clients do not have are not counted:
no mix can give them a probability, and each would outweigh hundreds of others. And a hundredth of the labels is taken
for chance, -log(0.99 r + 0.01 / classes): a few confident mistakes in small splits must not outvote the rest.

`em` is plain expectation-maximisation (Saerens, Latinne, Decaestecker 2002), `map-em` its mode under a Dirichlet prior,
`bbse` black-box shift estimation (Lipton, Wang, Smola 2018): without evidence, and without a gate.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import FITS, Client, Fit, Hyper, Need, Personalized, Published, Total, varies
from upfl.personalize import class_mix
from upfl.personalize.calibration import Calibrator, Corrected, Correction, fitted
from upfl.personalize.class_mix import STRENGTHS, Posterior, variational
from upfl.state import State

SLIP = 0.01  # the share of labels that the gate takes for chance
MENUS = (*STRENGTHS, math.inf)  # what s_min is chosen from


class LabelShiftHyper(Hyper):
    prior: Literal["grid"] = Field("grid", description="what a newcomer's class mix is expected to be: any")
    gate: float | None = Field(None, ge=0, description="s_min; by default what training clients justify")


class LabelShift(Correction[LabelShiftHyper]):
    name = "label-shift"
    title = "label-shift correction"
    Hyper = LabelShiftHyper

    def own_needs(self) -> tuple[Need, ...]:
        return (Need.of(Gate, self),)

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        posterior, menus = self.posterior(calibrator.log_posterior(base.logits), calibrator)
        if self.hyper.gate is None:
            menu = int(fitted(published, f"{Gate.key}.{self.name}")["menu"])
        else:
            menu = sum(s < self.hyper.gate for s in MENUS)
        r, mix, weights = posterior.averaged(menus[menu])
        return Corrected(r, mix, self._explained(menu, weights))

    def posterior(self, log_p: Tensor, calibrator: Calibrator) -> tuple[Posterior, Tensor]:
        """Posteriors under every prior, and log weights [menus, priors] of what each menu allows.

        The priors: the grid from weak to strong, infinity. The menus: each s_min. So later ones adapt less.
        """
        pi = calibrator.prior
        strengths = torch.tensor(MENUS, dtype=pi.dtype)
        alpha = strengths[:-1].unsqueeze(1) * pi
        menus = torch.where(strengths >= strengths.unsqueeze(1), 0.0, -math.inf).double()
        p = log_p.exp()
        return class_mix.with_unadapted(variational(log_p - pi.log(), alpha, p), p, pi), menus

    def _explained(self, menu: int, weights: Tensor) -> str:
        unadapted = float(weights[-1])
        if menu == len(MENUS) - 1:
            why = "training clients justify" if self.hyper.gate is None else "the configured gate allows"
            return f"the calibrated model, because {why} no adaptation of the class mix"
        allowed = f"prior strengths from {MENUS[menu]:g} on"
        why = "justified by training clients" if self.hyper.gate is None else "as configured"
        strength = f", most on {STRENGTHS[int(weights[:-1].argmax())]:g}"
        return f"its own mix of classes, {why} ({allowed}{strength}; {unadapted:.0%} of the weight on no adaptation)"


class Gate(Fit):
    """Which menu of priors the training clients justify. Later menus adapt less."""

    key = "gate"
    scales: ClassVar = {"gain": 30, "products": 20}
    personalizer: LabelShift

    def init(self, generator: torch.Generator) -> State:
        fits = FITS
        return {"menu": torch.full((fits,), len(MENUS) - 1), "loss": torch.zeros(fits, len(MENUS)).double()}

    def memory(self, client: Client) -> State:
        """For each menu, the client's loss less that of no adaptation: negative log-likelihoods of its labels."""
        y = self.labels(client)
        gain = torch.zeros(FITS, len(MENUS), dtype=torch.float64)
        samples = torch.zeros(FITS, dtype=torch.int64)
        base = self.personalizer.base
        for fit, published, personalized in self.plays(client, base.personalize, varies(base)):
            calibrator = Calibrator.of(published, base.name)
            log_p = calibrator.log_posterior(personalized.logits)
            posterior, menus = self.personalizer.posterior(log_p, calibrator)
            known = calibrator.confusion.sum(0)[y] > 0
            chosen = posterior.r[:, torch.arange(len(y)), y][:, known]  # [priors, n]
            weights = (posterior.evidence + menus).softmax(1)
            losses = -((1 - SLIP) * (weights @ chosen) + SLIP / self.classes).log().sum(1)
            gain[fit], samples[fit] = losses - losses[-1], known.sum()
        return {"gain": gain, "samples": samples}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        gain = carry["gain"]
        return {
            "clients": self.takes_part(client.id),
            "samples": carry["samples"],
            "gain": gain,
            "products": gain.unsqueeze(2) * gain.unsqueeze(1),
        }, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        clients, samples = total["clients"], total["samples"].clamp(min=1)
        menus = [choose(*sums) for sums in zip(total["gain"], total["products"], clients.tolist(), strict=True)]
        return {"menu": torch.tensor(menus), "loss": total["gain"] / samples.unsqueeze(1)}

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {"menu": (0, len(MENUS) - 1)}

    def facts(self, server: State) -> dict[str, float]:
        menu = int(server["menu"][0])
        return {"menu": menu, "gain_nats": -server["loss"][0, menu].item()}


def choose(loss: Tensor, products: Tensor, clients: int) -> int:
    """The last menu whose loss is within one standard error of the least, from sums over clients of losses and of
    their products."""
    if clients < 2:
        return len(loss) - 1
    best = int(loss.argmin())
    squares = products.diag() - 2 * products[best] + products[best, best]
    excess = loss - loss[best]
    variance = (squares - excess.square() / clients).clamp(min=0) * clients / (clients - 1)
    return int((excess <= variance.sqrt()).nonzero().max())


class Em(Correction[Hyper]):
    name = "em"
    title = "expectation-maximisation of the class mix"

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        likelihood = calibrator.log_posterior(base.logits) - calibrator.prior.log()
        r, mix = class_mix.expectation_maximisation(likelihood, calibrator.prior)
        return Corrected(r, mix.clamp(min=1e-12), "the most likely class mix")


class MapEmHyper(Hyper):
    strength: float = Field(5.0, gt=0, description="how many samples the federation's class mix counts for")


class MapEm(Correction[MapEmHyper]):
    name = "map-em"
    title = "most probable class mix"
    Hyper = MapEmHyper

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        likelihood = calibrator.log_posterior(base.logits) - calibrator.prior.log()
        r, mix = class_mix.expectation_maximisation(likelihood, calibrator.prior, self.hyper.strength)
        return Corrected(r, mix, f"the class mix at the mode under a prior worth {self.hyper.strength:g} samples")


class Bbse(Correction[Hyper]):
    name = "bbse"
    title = "black-box shift estimation"

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        log_p = calibrator.log_posterior(base.logits)
        predicted = torch.bincount(log_p.argmax(1), minlength=log_p.shape[1]).double() / len(log_p)
        mix = class_mix.black_box(calibrator.confusion, predicted, calibrator.prior).clamp(min=1e-12)
        posterior = (log_p - calibrator.prior.log() + mix.log()).softmax(1)
        return Corrected(posterior, mix, "the class mix by the confusion matrix")
