"""Closed form: features and last layer from sums over clients, without a gradient and without a learning rate. Ours.

Local steps drift towards a client's own classes; sums do not. What is made of sums over all clients does not depend on
who holds which samples: a federation whose clients hold two classes each ends exactly where one machine with all the
data would. A pass counts every client once, on its train split. With p~ the normalized patches of an image
(`models/patches.py`), or a standardized vector as a whole (`models/projections.py`):

    whitening (one pass)    m = mean p~,   U diag(e) U^T = cov p~,   W = U diag(e + whitening)^-1/2 U^T
    filters (`iterations`)  z = <d_k, W (p~ - m)>;  k = argmax |z|;   d_k <- sum of z W (p~ - m), of length one
    last layer (one pass)   n_c, sum of h over class c, sum of h h^T;   h the features of the filters W d_k

With `mirror`, every patch counts as itself and as its mirror image, and h as the mean over both: then a classifier need
not learn from samples what left and right have in common.

The filters d_k start as random directions. The second step is spherical k-means (Coates and Ng, 2012) with a sign, as
the features look at z from both sides. Whitening and filters take `patches` patches of each image, at places that are
drawn by a hash of the image itself and the seed: so they are the same whoever holds it. The last layer comes from
standardized features: Fisher's discriminant (`personalize/refit.py`), or ridge regression of the classes' indicators,

    discriminant   S' = (1 - g) S + g tr(S) / D I,   logits_c = mu_c^T S'^-1 h - mu_c^T S'^-1 mu_c / 2 + log n_c / n
    ridge          logits = (H^T H + g n I)^-1 H^T Y   on centred H and Y;   g = shrinkage

All that goes up are integers (`models/filters.py` says why that loses nothing), so the same samples give the same bits
however they are dealt out, to however many clients and workers. The server keeps the last pass's sums: a client's part
can be added later, or taken away (`upfl join`, `upfl forget`).

Where only some clients take part in a round, a pass takes as many rounds as it needs for every client to be asked once,
in order. One client's second moments tell a server more about its data than a gradient does; those of all clients do
not. This method needs secure aggregation most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from upfl.contract import Batch, Client, Hyper, Phase, Published, Task, Total, Training, Unlabelled
from upfl.errors import BadClientError, ConfigError
from upfl.last_layer import discriminant, ridge
from upfl.models import Layered, Linear, Model
from upfl.models.filters import EXACT, FEATURE, FILTER, LARGEST_FEATURE, WINDOW, Filters, rounded_filters
from upfl.models.patches import Patches
from upfl.models.projections import Projections, too_long
from upfl.models.remembered import Remembered
from upfl.models.surgery import filters_below
from upfl.state import State, prefixed, select

BLOCK = 256  # rows of the second moments that are formed at once
WHITENING, FILTERS, LAYER, DONE = "whitening", "filters", "layer", "done"


class ClosedFormHyper(Hyper):
    filters: int = Field(128, ge=1, description="2 grid^2 features each (vectors: 2); work grows with the square")
    mirror: bool = Field(False, description="whether a class's mirror images are of that class: features of both")
    patch: int | None = Field(None, ge=2, description="side of a patch in pixels; by the image's size where silent")
    grid: int = Field(3, ge=1, description="features are means over so many by so many cells of the image")
    patches: int = Field(12, ge=1, description="drawn of each image, for whitening and filters")
    iterations: int = Field(10, ge=0, description="passes of k-means for the filters")
    whitening: float = Field(0.1, ge=1e-3, description="added to the eigenvalues of the patches' covariance")
    contrast: float = Field(0.0025, gt=0, description="added to a patch's variance")
    threshold: float = Field(0.25, ge=0, le=4, description="below which a filter's answer does not count")
    layer: Literal["discriminant", "ridge"] = Field("discriminant", description="how the last layer is fitted")
    shrinkage: float = Field(0.01, gt=0, le=1, description="of the covariance of features towards the identity")
    batch_size: int = Field(512, ge=1, description="samples at once: for memory and speed, the result is the same")


class ClosedForm(Training[ClosedFormHyper]):
    name = "closed-form"
    title = "Closed form"
    Hyper = ClosedFormHyper
    refuses_models = "it makes a model of its own: a layer of patches, and a linear one"
    in_turn = True
    takes_steps = False

    def __init__(self, task: Task, hyper: ClosedFormHyper) -> None:
        super().__init__(task, hyper)
        layer = filters_below(task.model)
        assert layer is not None, self.why_not(task)
        self.layer = layer
        self.last = Layered((Linear("last", layer.features, task.classes),))
        self.remembered = Remembered()

    @classmethod
    def why_not(cls, task: Task) -> str | None:
        if filters_below(task.model) is None:
            return cls.refuses_models
        return super().why_not(task)

    @classmethod
    def own_model(cls, shape: tuple[int, ...], classes: int, hyper: Any) -> Model | None:
        layer = _of_vectors(shape[0], hyper) if len(shape) == 1 else _of_images(shape, hyper)
        return Layered((layer, Linear("last", layer.features, classes)))

    # The passes

    @classmethod
    def passes(cls, hyper: Any) -> int:
        return int(hyper.iterations) + 2

    def form(self, round: int) -> str:
        number = round // self.rounds_a_pass
        if number >= self.passes(self.hyper):
            return DONE
        return WHITENING if number == 0 else FILTERS if number <= self.hyper.iterations else LAYER

    def phases(self, round: int) -> tuple[Phase, ...]:
        step = {WHITENING: self.whitening_step, FILTERS: self.filters_step, LAYER: self.layer_step}
        return (Phase(step.get(self.form(round), self.idle_step), None, self.hyper.batch_size, cost=0.0),)

    def init(self, generator: torch.Generator) -> State:
        size, filters, features = self.layer.size, self.layer.outputs, self.layer.features
        first = F.normalize(torch.randn(filters, size, generator=generator), dim=1)
        state = {
            **prefixed("psi", {name: torch.zeros(shape) for name, shape in self.model.shapes.items()}),
            "mean": torch.zeros(size),
            "whitening": torch.eye(size),
            "filters": first,
        }
        for stage in (WHITENING, FILTERS, LAYER):
            state |= prefixed(f"sum.{stage}", self._no_sums(stage))
        assert state[f"sum.{LAYER}.products"].shape == (triangle_size(features),)
        return state

    def _no_sums(self, stage: str) -> State:
        size, filters, features, classes = self.layer.size, self.layer.outputs, self.layer.features, self.task.classes
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            WHITENING: {"count": (1,), "sums": (size,), "products": (size, size)},
            FILTERS: {"pull": (filters, size), "mass": (filters,)},
            LAYER: {"counts": (classes,), "sums": (classes, features), "products": (triangle_size(features),)},
            DONE: {"count": (1,)},
        }
        return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes[stage].items()}

    def sent(self, server: State, round: int) -> State:
        """The filters, once there are some; sums stay at the server, as do those of the clients asked before."""
        if self.form(round) == WHITENING:
            return {}
        return {name: value for name, value in server.items() if name.startswith(f"psi.{self.layer.name}.")}

    def begin(self, server: State, memory: State, client: Client) -> State:
        return (
            select(server, "psi")
            | prefixed("sum", self._no_sums(self.form(client.round)))
            | {"seed": torch.tensor(client.seed)}
        )

    def whitening_step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        windows = self._drawn(carry, batch).double()
        carry["sum.count"] += len(windows)
        carry["sum.sums"] += windows.sum(0).long().cpu()
        carry["sum.products"] += (windows.t() @ windows).long().cpu()
        return carry, windows.square().mean().sqrt() / WINDOW

    def filters_step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        windows = self._drawn(carry, batch)
        chosen, largest, windows = self.layer.nearest(self.layer.answers(*self._weights(carry), windows), windows)
        answer = largest.double()
        pull = torch.zeros(carry["sum.pull"].shape, dtype=torch.float64, device=answer.device)
        carry["sum.pull"] += pull.index_add_(0, chosen, answer * windows.double()).long().cpu()
        mass = torch.zeros(len(pull), dtype=torch.float64, device=answer.device)
        carry["sum.mass"] += mass.index_add_(0, chosen, answer[:, 0]).long().cpu()
        return carry, -(answer / (FILTER * WINDOW)).square().mean()  # k-means makes these large

    def layer_step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        x, y = _counting(batch)
        h = self.layer.apply(*self._weights(carry), x) * FEATURE
        carry["sum.counts"] += torch.bincount(y, minlength=self.task.classes).cpu()
        carry["sum.sums"] += (F.one_hot(y, self.task.classes).t().to(h) @ h).long().cpu()
        add_products_(carry["sum.products"], h)
        return carry, h.mean() / FEATURE

    def idle_step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        return carry, torch.zeros(())

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        return select(carry, "sum"), {}

    def _drawn(self, carry: State, batch: Batch) -> Tensor:
        """Windows of the samples that count."""
        return self.layer.windows(_counting(batch)[0], int(carry["seed"]), self.hyper.patches)

    def _weights(self, params: State) -> tuple[Tensor, Tensor]:
        return params[f"{self.layer.name}.weight"], params[f"{self.layer.name}.bias"]

    def checked(self, up: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sums of features and of their products lie between bounds that the number of samples gives."""
        if "counts" in up:
            counts, sums, products = up["counts"], up["sums"], up["products"]
            most = counts.sum() * LARGEST_FEATURE
            bad = (counts < 0).any() or (sums < 0).any() or (sums.sum(0) > most).any()
            if bad or (products < 0).any() or (products > most * LARGEST_FEATURE).any():
                raise BadClientError("its sums are not those of features: negative, or larger than its samples allow")
        return up

    # What comes of the sums

    def aggregate(self, server: State, total: Total, round: int) -> State:
        stage = self.form(round)
        if stage == DONE:
            return server
        begins, ends = round % self.rounds_a_pass == 0, (round + 1) % self.rounds_a_pass == 0
        for name in self._no_sums(stage):
            kept = server[f"sum.{stage}.{name}"]
            server[f"sum.{stage}.{name}"] = total[name].to(kept.device, copy=True) + (0 if begins else kept)
        if not ends:
            return server
        sums = {name: value.cpu() for name, value in select(server, f"sum.{stage}").items()}
        made = {WHITENING: self._whitening, FILTERS: self._filters, LAYER: self._layer}[stage](server, sums)
        return server | {name: value.float().contiguous().to(server[name]) for name, value in made.items()}

    def _whitening(self, server: State, sums: State) -> State:
        count = sums["count"].double().clamp(min=1)
        mean = sums["sums"] / count
        mean, covariance = self.layer.moments(mean, sums["products"] / count - torch.outer(mean, mean))
        values, vectors = torch.linalg.eigh(covariance / WINDOW**2)
        scale = (values.clamp(min=0) + self.hyper.whitening).rsqrt()
        new = {"mean": mean / WINDOW, "whitening": vectors * scale @ vectors.T}
        return new | self._filters_of(new, server["filters"].cpu().double())

    def _filters(self, server: State, sums: State) -> State:
        mean, whitening, filters = (server[name].cpu().double() for name in ("mean", "whitening", "filters"))
        pull = (sums["pull"].double() / WINDOW - sums["mass"].unsqueeze(1) * mean) @ whitening
        length = torch.linalg.vector_norm(pull, dim=1, keepdim=True)
        filters = torch.where(length > 0, pull / length.clamp(min=1e-300), filters)  # nobody's filter stays
        return {"filters": filters} | self._filters_of({"mean": mean, "whitening": whitening}, filters)

    def _filters_of(self, known: State, filters: Tensor) -> State:
        weight = filters @ known["whitening"]
        weight, bias = rounded_filters(weight, -weight @ known["mean"])
        return {f"psi.{self.layer.name}.weight": weight, f"psi.{self.layer.name}.bias": bias}

    def _layer(self, server: State, sums: State) -> State:
        fit = discriminant if self.hyper.layer == "discriminant" else ridge
        products = full(sums["products"], self.layer.features).div_(FEATURE**2)
        weight, bias = fit(
            sums["counts"], sums["sums"].double() / FEATURE, products, self.hyper.shrinkage, standardize=True
        )
        return {"psi.last.weight": weight, "psi.last.bias": bias}

    @property
    def last_round(self) -> int:
        """The last round of the last pass, counted from 0."""
        return self.passes(self.hyper) * self.rounds_a_pass - 1

    def recounted(self, server: State, up: Mapping[str, Tensor], times: int) -> State:
        """The state with a client's part of the last pass's sums once more (times = 1) or taken away (-1).

        Sums are integers: what comes of them has the bits of a last pass with, or without, that client.
        """
        sums = {name: server[f"sum.{LAYER}.{name}"] + times * up[name] for name in self._no_sums(LAYER)}
        self.checked(sums)
        made = self._layer(server, {name: value.cpu() for name, value in sums.items()})
        made = {name: value.float().contiguous().to(server[name]) for name, value in made.items()}
        return server | prefixed(f"sum.{LAYER}", sums) | made

    # What newcomers receive

    def publish(self, server: State) -> State:
        return {name: value for name, value in server.items() if name.startswith("psi.")}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        return select(published.state, "psi")

    def features(self, params: State, x: Tensor) -> Tensor:
        weight, bias = self._weights(params)
        if torch.compiler.is_exporting() or not x.isfinite().all():  # what is no number must show
            return self.layer.apply(weight, bias, x)

        def in_steps(x: Tensor) -> Tensor:
            return (self.layer.apply(weight, bias, x) * FEATURE).to(torch.int16)

        return self.remembered(in_steps, x, weight, bias) / FEATURE

    def logits(self, params: State, x: Tensor) -> Tensor:
        return self.last.apply(params, self.features(params, x))

    @property
    def size(self) -> int:
        return self.model.size + 2 * triangle_size(self.layer.features)  # in integers of 64 bits

    def local_rate(self, round: int) -> float:
        return 0.0

    def remark(self) -> str:
        return (
            f"{self.passes(self.hyper)} passes over {self.task.clients} clients, {self.rounds_a_pass} round(s) each; "
            f"{self.layer.features:,} features; {triangle_size(self.layer.features):,} sums in the last pass"
        )


def _of_images(shape: tuple[int, ...], hyper: Any) -> Filters:
    channels, height, width = shape
    patch = hyper.patch or max(3, round(min(height, width) * 3 / 16))
    if min(height, width) - patch + 1 < hyper.grid:
        raise ConfigError(
            f"images of {height} x {width} pixels have too few patches of {patch} x {patch} for a grid of "
            f"{hyper.grid} x {hyper.grid}: set a smaller patch or grid"
        )
    return Patches("patches", channels, hyper.filters, patch, hyper.grid, hyper.threshold, hyper.contrast, hyper.mirror)


def _of_vectors(size: int, hyper: Any) -> Filters:
    if hyper.mirror or hyper.patch is not None:
        raise ConfigError("mirror and patch are for images, and samples here are vectors: leave them out")
    if too_long(size, hyper.whitening):
        raise ConfigError(
            f"vectors of {size} values are too long for exact sums with whitening = {hyper.whitening}: set a larger one"
        )
    return Projections("projections", size, hyper.filters, hyper.threshold)


def _counting(batch: Batch) -> tuple[Tensor, Tensor]:
    """The samples that are no padding."""
    if batch.mask is None:
        return batch.x, batch.y
    counts = batch.mask > 0
    return batch.x[counts], batch.y[counts]


# The second moments are symmetric: of each block of rows, what is not left of it, one block after another.


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """The rows of each block: from, to."""
    return ((start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def triangle_size(size: int) -> int:
    return sum((stop - start) * (size - start) for start, stop in blocks(size))


def add_products_(total: Tensor, h: Tensor) -> None:
    """total <- total + h^T h, for rows of integers from 0 to 2^12, exactly."""
    # Terms are not negative: where the sum stays in the range, so does every part of it. None is above the diagonal's.
    if len(h) > 1 and not h.square().sum(0).max() < EXACT:
        half = len(h) // 2
        add_products_(total, h[:half])
        add_products_(total, h[half:])
        return
    size, at = h.shape[1], 0
    for start, stop in blocks(size):
        rows = total[at : at + (stop - start) * (size - start)].view(stop - start, size - start)
        rows += (h[:, start:stop].t() @ h[:, start:]).long().cpu()
        at += rows.numel()


def full(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix, in double precision."""
    matrix, at = torch.empty(size, size, dtype=torch.float64), 0
    for start, stop in blocks(size):
        rows = triangle[at : at + (stop - start) * (size - start)].view(stop - start, size - start).double()
        matrix[start:stop, start:], matrix[start:, start:stop] = rows, rows.t()
        at += rows.numel()
    return matrix
