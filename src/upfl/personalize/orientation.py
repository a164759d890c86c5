"""Whether images would be more like the federation's if they were turned or mirrored.

Where there are many classes and many hands, an image that is turned is no farther from the nearest class than a
stranger's hand is. But everybody can turn their own images and look which way fits best: what a hand does to an
image, it does to all eight views of it, and it cancels in the difference. An image is told in 128 numbers,

    h = sqrt of how much it changes in each of eight directions, in the mean over each cell of a grid of four by four,

and turning by quarters and mirroring only changes their order. With t(h) the distance to the nearest class c by sums
over training clients (`reference.py`), and g one of the seven other views,

    d_g = t(g h) - t(h)        how much worse the other view fits
    u_g = mean_i (d_g,i - m_c(i),g)

m_c,g is the mean over samples that are nearest to class c (an 8 upside down is an 8). Training clients play the
newcomer on their validation split, their own sums taken out: u_g ~ m + N(0, b + s / n), s within clients, b between
them, by moments. A newcomer whose u_g is far below has images of which g is the usual view. Seven tests.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from upfl.contract import Client, Fit, Total, chunks
from upfl.personalize.reference import Reference, class_sums, spread, usual_distance
from upfl.state import State

CELLS, DIRECTIONS = 4, 8
SIZE = DIRECTIONS * CELLS**2
KEY = "orientation.none"
VIEWS = (
    "turned by 90 degrees to the left",
    "turned by 180 degrees",
    "turned by 90 degrees to the right",
    "mirrored",
    "transposed along the other diagonal",
    "mirrored upside down",
    "transposed",
)


def edges(x: Tensor) -> Tensor:
    """SIZE numbers of each image: how much it changes in each direction, in each cell."""
    return torch.cat([_edges(part.detach().cpu().double().mean(1)) for part in chunks(x)])


def _edges(x: Tensor) -> Tensor:
    x = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    across, down = x[:, 1:-1, 2:] - x[:, 1:-1, :-2], x[:, 2:, 1:-1] - x[:, :-2, 1:-1]
    angles = [2 * math.pi * k / DIRECTIONS for k in range(DIRECTIONS)]
    changes = torch.stack([(across * math.cos(a) + down * math.sin(a)).clamp(min=0) for a in angles], 1)
    return torch.nn.functional.adaptive_avg_pool2d(changes, CELLS).flatten(1).sqrt()


def orders() -> Tensor:
    """[8, SIZE]: where each number of a view is found among those of the image; first the image as it is."""
    index = torch.arange(SIZE).view(DIRECTIONS, CELLS, CELLS)
    quarter = DIRECTIONS // 4
    turned = [torch.rot90(index, k, (1, 2)).roll(-quarter * k, 0) for k in range(4)]
    opposite = [(DIRECTIONS // 2 - k) % DIRECTIONS for k in range(DIRECTIONS)]
    return torch.stack([*turned, *(view.flip(2)[opposite] for view in turned)]).flatten(1)


def margins(reference: Reference, h: Tensor) -> tuple[Tensor, Tensor]:
    """(how much worse each other view fits, the nearest class of the image as it is) of each sample."""
    t, nearest, _ = zip(*(reference.judge(h[:, order]) for order in orders()), strict=True)
    return torch.stack(t[1:], 1) - t[0].unsqueeze(1), nearest[0]


class Orientation(Fit):
    """Three rounds of sums: class means and covariance; usual margins; how clients differ."""

    key = "orientation"
    split = "train"
    rounds = 3
    REFERENCE: ClassVar = ("sums", "products")
    USUAL: ClassVar = ("seen", "margin")
    MOMENTS: ClassVar = ("mean", "square", "within")
    PLAYERS: ClassVar = ("clients", "samples", "squared_samples")
    scales: ClassVar = dict.fromkeys((*REFERENCE, *USUAL, *MOMENTS), 24)

    def init(self, generator: torch.Generator) -> State:
        shapes = published(self.classes) | {
            "samples": (),
            "squared_samples": (),
            "sums": (self.classes, SIZE),
            "products": (SIZE * (SIZE + 1) // 2,),
            "seen": (self.classes,),
            "margin": (self.classes, len(VIEWS)),
            "square": (len(VIEWS),),
        }
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def memory(self, client: Client) -> State:
        """The client's own sums over its train split, and what its validation images come to."""
        train = list(client.batches("train", 256))
        y, h = torch.cat([batch.y.cpu() for batch in train]), torch.cat([edges(batch.x) for batch in train])
        sums, products = class_sums(h, y, self.classes)
        counts = torch.bincount(y, minlength=self.classes).double()
        played = [edges(batch.x) for batch in client.batches("validation", 256)]
        return {"counts": counts, "sums": sums, "products": products, "played": torch.cat([h[:0], *played])}

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        found = self._played(server, carry)
        plays = torch.tensor(0 if found is None else len(carry["played"]))
        if found is None:
            found = {name: torch.zeros_like(server[name]) for name in (*self.USUAL, *self.MOMENTS)}
        up = {name: carry[name] for name in self.REFERENCE} | found | {"counts": carry["counts"].long()}
        return up | {"clients": (plays > 0).long(), "samples": plays, "squared_samples": plays**2}, carry

    def _played(self, server: State, carry: State) -> State | None:
        """What the client's validation images come to, judged by what others summed; nothing before that is there."""
        h = carry["played"]
        others = [server[name] - carry[name] for name in ("counts", *self.REFERENCE)]
        reference = Reference.of(*others) if len(h) and server["counts"].any() else None
        if reference is None:
            return None
        d, nearest = margins(reference, h)
        seen = torch.bincount(nearest, minlength=self.classes).double()
        margin = d.new_zeros(self.classes, d.shape[1]).index_add_(0, nearest, d)
        u = d - usual_distance((server["seen"] - seen).clamp(min=0), server["margin"] - margin)[nearest]
        mean = u.mean(0)
        moments = {"mean": u.sum(0), "square": len(u) * mean.square(), "within": (u - mean).square().sum(0)}
        return {"seen": seen, "margin": margin} | moments

    def aggregate(self, server: State, total: Total, round: int) -> State:
        if round == 0:
            server = server | {name: total[name].double() for name in ("counts", *self.REFERENCE)}
            found = Reference.of(*(server[name] for name in ("counts", *self.REFERENCE)))
            return server | ({} if found is None else {"means": found.means, "factor": found.factor})
        if round == 1:
            usual = {name: total[name] for name in self.USUAL}
            return server | usual | {"usual": usual_distance(*usual.values())}
        clients, samples, squared = (total[name].double() for name in self.PLAYERS)
        mean = total["mean"] / samples.clamp(min=1)
        within, between = spread(clients, samples, squared, mean.square(), total["square"], total["within"])
        moments = {"mean": mean, "within": within, "between": between}
        return server | {"clients": clients, "samples": samples, "squared_samples": squared} | moments

    def fitted(self, server: State, fit: int) -> State:
        return {name: server[name] for name in published(self.classes)}

    def ranges(self) -> dict[str, tuple[float, float]]:
        return dict.fromkeys(("clients", "counts", "within", "between"), (0.0, math.inf))

    def facts(self, server: State) -> dict[str, float]:
        return {name: server[name].mean().sqrt().item() for name in ("within", "between")}


def published(classes: int) -> dict[str, tuple[int, ...]]:
    """What newcomers receive, with its shapes."""
    others = len(VIEWS)
    return {
        "clients": (),
        "counts": (classes,),
        "means": (classes, SIZE),
        "factor": (SIZE, SIZE),
        "usual": (classes, others),
        **dict.fromkeys(("mean", "within", "between"), (others,)),
    }


def best_view(known: State, x: Tensor) -> tuple[str, float]:
    """The other view that fits best, and by how many standard deviations of clients another view fits too well."""
    d, nearest = margins(Reference(known["means"], known["factor"], known["counts"] > 0), edges(x))
    u = d - known["usual"][nearest] - known["mean"]
    deviation = (known["between"] * (1 + 1 / known["clients"].clamp(min=1)) + known["within"] / len(x)).sqrt()
    return VIEWS[int(d.mean(0).argmin())], float((-u.mean(0) / deviation).max())
