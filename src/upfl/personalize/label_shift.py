"""Label-shift correction: the newcomer's own mix of classes, on a frozen, calibrated model. Beyond the paper.

With l_ic = log p_ic - log pi_c of the calibrated model, for each prior strength s in a grid, s >= s_min:

    q ~ Dirichlet(s pi):   responsibilities r^s and evidence L_s by variational Bayes (class_mix.py)
    s = infinity:          r = p, q = pi, L = 0
    w_s proportional to exp(L_s);   r = sum_s w_s r^s,   q = sum_s w_s q^s

The newcomer's own samples are predicted by argmax r, later ones by argmax l_c + log q_c.

The gate. Evidence alone is fooled by feature shift: unlike inputs look like an unlike mix. So the federation says how
weak a prior is justified: each training client plays the newcomer on its validation split, with the calibration fitted
on other clients, and counts the negative log-likelihood of its labels for each s_min. Every s_min within one standard
error of the least sum (of the paired difference, over clients) is as good as the best. Among these the clients' own
mixes decide, of which their labels tell directly: the largest s under which the labels' counts n_c are as likely as
under any other, but for two nats,

    sum over clients of log Dirichlet-multinomial(n | s pi)

or the nearest to it among them. Where nearly every label is right anyway, the first says little, and the second much:
in a federation whose clients hold two classes each, adaptation is then right, and in one whose mixes are alike none.
The newcomer's evidence may choose less adaptation than the training clients justify, never more. Labels that those
other clients do not have are not counted: no mix can give them a probability, and each would outweigh hundreds of
others. And a hundredth of the labels is taken for chance, -log(0.99 r + 0.01 / classes): a few confident mistakes in
small splits must not outvote the rest.

No harm. Where fewer labels come out right so than with the model as it is, the gate says `as it is`: of the calibration
the temperature alone is used, which changes no prediction; where so few clients or labels taught them that nothing can
be said, not even that.

`em` is plain expectation-maximisation (Saerens, Latinne, Decaestecker 2002), `map-em` its mode under a Dirichlet prior,
`bbse` black-box shift estimation (Lipton, Wang, Smola 2018): without evidence, and without a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from upfl.contract import FITS, Client, Fit, Hyper, Need, Personalized, Published, Total, varies
from upfl.personalize import class_mix
from upfl.personalize.calibration import Calibrator, Corrected, Correction, fitted
from upfl.personalize.class_mix import STRENGTHS, Posterior
from upfl.state import State

SLIP = 0.01  # the share of labels that the gate takes for chance
LIKELY = 2.0  # nats by which the likelihood of the clients' mixes may fall for a stronger prior
MENUS = (*STRENGTHS, math.inf)  # what s_min is chosen from
CLOSED, AS_IS = len(MENUS) - 1, len(MENUS)  # the calibrated model; the base's predictions, unchanged


class LabelShiftHyper(Hyper):
    prior: Literal["grid"] = Field("grid", description="what a newcomer's class mix is expected to be: any")
    gate: float | None = Field(None, ge=0, description="s_min; by default what training clients justify")


class LabelShift(Correction[LabelShiftHyper]):
    name = "label-shift"
    title = "label-shift correction"
    Hyper = LabelShiftHyper
    choices = 1 + AS_IS

    def own_needs(self) -> tuple[Need, ...]:
        return (Need.of(Gate, self),)

    def choice(self, fitted_so_far: State) -> int:
        if self.hyper.gate is None:
            return int(fitted_so_far[f"{Gate.key}.{self.name}.menu"])
        return sum(s < self.hyper.gate for s in MENUS)

    def correct(self, base: Personalized, calibrator: Calibrator, published: Published) -> Corrected:
        if self.hyper.gate is None:
            fitted(published, f"{Gate.key}.{self.name}")  # or says that there is none
        return self._by([self.choice(published.fitted)], base, calibrator)[0]

    def all_corrections(self, base: Personalized, calibrator: Calibrator, published: Published) -> list[Corrected]:
        return self._by(range(self.choices), base, calibrator)

    def _by(self, chosen: Iterable[int], base: Personalized, calibrator: Calibrator) -> list[Corrected]:
        """What becomes of the base's logits by each of these menus."""
        posterior, menus = self.posterior(calibrator.log_posterior(base.logits), calibrator)
        own_mix = posterior.averaged(menus[0])[0].mean(0)
        found = []
        for menu in chosen:
            if menu == AS_IS:
                why = "left as it is, because on training clients the uncorrected model is right more often"
                found.append(Corrected(posterior.r[-1], None, why, own_mix, as_is=True))
            else:
                r, mix, weights = posterior.averaged(menus[menu])
                found.append(Corrected(r, mix, self._explained(menu, weights), own_mix))
        return found

    def posterior(self, log_p: Tensor, calibrator: Calibrator) -> tuple[Posterior, Tensor]:
        """Posteriors under every prior, and log weights [menus, priors] of what each menu allows.

        The priors: the grid from weak to strong, infinity. The menus: each s_min. So later ones adapt less.
        """
        strengths = torch.tensor(MENUS, dtype=log_p.dtype)
        menus = torch.where(strengths >= strengths.unsqueeze(1), 0.0, -math.inf).double()
        return class_mix.on_grid(log_p, calibrator.prior), menus

    def _explained(self, menu: int, weights: Tensor) -> str:
        unadapted = float(weights[-1])
        if menu == CLOSED:
            why = "training clients justify" if self.hyper.gate is None else "the configured gate allows"
            return f"the calibrated model, because {why} no adaptation of the class mix"
        allowed = f"prior strengths from {MENUS[menu]:g} on"
        why = "justified by training clients" if self.hyper.gate is None else "as configured"
        strength = f", most on {STRENGTHS[int(weights[:-1].argmax())]:g}"
        return f"its own mix of classes, {why} ({allowed}{strength}; {unadapted:.0%} of the weight on no adaptation)"


class Gate(Fit):
    """Which menu of priors the training clients justify. Later menus adapt less."""

    key = "gate"
    scales: ClassVar = {"gain": 30, "products": 20, "mixes": 30}
    personalizer: LabelShift

    def init(self, generator: torch.Generator) -> State:
        fits = FITS
        return {"menu": torch.full((fits,), AS_IS), "loss": torch.zeros(fits, len(MENUS)).double()}

    def memory(self, client: Client) -> State:
        """For each menu, the client's loss less that of no adaptation (negative log-likelihoods of its labels), and how
        many labels come out wrong, the last by the base alone. And how likely its mix is for each strength."""
        y = self.labels(client)
        gain, mixes = torch.zeros(2, FITS, len(MENUS), dtype=torch.float64)
        wrong = torch.zeros(FITS, len(MENUS) + 1, dtype=torch.int64)
        samples = torch.zeros(FITS, dtype=torch.int64)
        base = self.personalizer.base
        for fit, published, personalized in self.plays(client, base.personalize, varies(base)):
            calibrator = Calibrator.of(published, base.name)
            log_p = calibrator.log_posterior(personalized.logits)
            posterior, menus = self.personalizer.posterior(log_p, calibrator)
            known = calibrator.confusion.sum(0)[y] > 0
            weights = (posterior.evidence + menus).softmax(1)
            r = torch.einsum("ms,snc->mnc", weights, posterior.r)[:, known]
            labels = y[known]
            losses = -((1 - SLIP) * r[:, torch.arange(len(labels)), labels] + SLIP / self.classes).log().sum(1)
            gain[fit], samples[fit] = losses - losses[-1], len(labels)
            predicted = torch.cat([r.argmax(2), personalized.logits.cpu().argmax(1)[known].unsqueeze(0)])
            wrong[fit] = (predicted != labels).sum(1)
            mixes[fit] = log_mixes(torch.bincount(labels, minlength=self.classes), calibrator.prior)
        return {"gain": gain, "samples": samples, "wrong": wrong, "mixes": mixes}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        gain = carry["gain"]
        products = gain.unsqueeze(2) * gain.unsqueeze(1)
        return {"clients": self.takes_part(client.id), "products": products, **carry}, carry

    def aggregate(self, server: State, total: Total, round: int) -> State:
        clients, samples = total["clients"], total["samples"]
        menus = []
        for fit, few in enumerate(self.too_few(clients, samples)):
            gain, products, mixes, wrong = (total[name][fit] for name in ("gain", "products", "mixes", "wrong"))
            menus.append(AS_IS if few else choose(gain, products, mixes, wrong, int(clients[fit])))
        return {"menu": torch.tensor(menus), "loss": total["gain"] / samples.clamp(min=1).unsqueeze(1)}

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {"menu": (0, AS_IS)}

    def facts(self, server: State) -> dict[str, float]:
        menu = int(server["menu"][0])
        return {"menu": menu, "gain_nats": -server["loss"][0, min(menu, CLOSED)].item()}


def log_mixes(counts: Tensor, prior: Tensor) -> Tensor:
    """The log-likelihood of labels in some order with these counts, for each strength of a Dirichlet prior."""
    alpha = torch.tensor(STRENGTHS, dtype=prior.dtype).unsqueeze(1) * prior
    total, n = alpha.sum(1), counts.sum()
    finite = (torch.lgamma(alpha + counts) - torch.lgamma(alpha)).sum(1) + torch.lgamma(total) - torch.lgamma(total + n)
    return torch.cat([finite, (counts * prior.log()).sum().unsqueeze(0)])


def choose(loss: Tensor, products: Tensor, mixes: Tensor, wrong: Tensor, clients: int) -> int:
    """The menu, from sums over clients: of losses, their products, their mixes' log-likelihoods, wrong labels."""
    best = int(loss.argmin())
    squares = products.diag() - 2 * products[best] + products[best, best]
    excess = loss - loss[best]
    variance = (squares - excess.square() / clients).clamp(min=0) * clients / (clients - 1)
    as_good = (excess <= variance.sqrt()).nonzero().squeeze(1)
    nearest = (as_good - (mixes >= mixes.max() - LIKELY).nonzero().max()).abs()
    menu = int(as_good[nearest == nearest.min()].max())
    return AS_IS if wrong[menu] > wrong[-1] else menu


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
