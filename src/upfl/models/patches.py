"""Features from an image's patches: one layer of filters, exact in integers.

For every patch p of C x P x P values of an image x, K filters w_k, b_k, a threshold a:

    p~  = (p - mean(p)) / sqrt(var(p) + contrast)
    z_k = <w_k, p~> + b_k
    h   = means of relu(z_k - a) and of relu(-z_k - a) over the patches of each cell of a G x G grid: 2 K G^2 features

With `mirror`, h is the mean of this and of what the mirrored filters give in the mirrored cell: the features of an
image and of its mirror image, which a classifier then cannot tell apart.

What is rounded, and where it is cut off (`models/filters.py` says why):

    x     to 2^-6, at the size at which D squares (D = C P P) still add up
    p~    to 2^-5; it is at most sqrt(D) long
    w, b  to 2^-7, by whoever makes them (`rounded_filters`)
    z     is then a multiple of 2^-12, and is cut off where the sum over a cell could leave the range
    h     to 2^-9, at 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upfl.models.filters import EXACT, FEATURE, FILTER, LARGEST_FEATURE, WINDOW, Filters
from upfl.randomness import generator

PIXEL = 2**6  # steps to one
CACHE = 2**18  # values of z at once, so that they stay in the cache


@dataclass(frozen=True)
class Patches(Filters):
    """The layer. `inputs` are the image's channels, `outputs` the filters."""

    name: str
    inputs: int
    outputs: int
    patch: int
    grid: int
    threshold: float
    contrast: float
    mirror: bool = False

    @property
    def size(self) -> int:
        return self.inputs * self.patch**2

    @property
    def features(self) -> int:
        return 2 * self.outputs * self.grid**2

    def apply(self, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        """[n, C, H, W] to [n, features]"""
        weight, bias = self.both(weight) * FILTER, self.twice(bias) * (FILTER * WINDOW)
        side = -(-(x.shape[2] - self.patch + 1) // self.grid) * -(-(x.shape[3] - self.patch + 1) // self.grid)
        chunk = max(1, CACHE // (side * len(weight)))
        if torch.compiler.is_exporting() or len(x) <= chunk:
            return self._apply(weight.t(), bias, x)
        parts: list[Tensor] = [self._apply(weight.t(), bias, part) for part in x.split(chunk)]  # type: ignore[no-untyped-call]
        return torch.cat(parts)

    def _apply(self, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        pixels = self.pixels(x)
        mean, factor = self._statistics(self._box(pixels.sum(3)), self._box(pixels.square().sum(3)))
        windows = self._windows(pixels)
        pooled = []
        for rows, columns in self._cells(windows.shape[1], windows.shape[2]):
            part = windows[:, rows, columns]
            positions = part.shape[1] * part.shape[2]
            centre, scale = (value[:, rows, columns].reshape(-1, 1) for value in (mean, factor))
            patches = (part.reshape(-1, self.size) - centre).mul_(scale).round_()
            z = torch.addmm(bias, patches, weight).view(-1, positions, len(bias))
            least, most = float(round(self.threshold * FILTER * WINDOW)), float(EXACT // positions)
            above, below = z.clamp(least, most).sum(1), z.clamp_(-most, -least).sum(1).neg()
            pooled.append((torch.stack([above, below], 1) - positions * least) / positions)
        cells = torch.stack(pooled, 1).view(-1, self.grid, self.grid, 2, len(bias))
        if self.mirror:
            cells = (cells[..., : self.outputs] + cells[..., self.outputs :].flip(2)) / 2
        h = cells.flatten(1) * (FEATURE / (FILTER * WINDOW))
        return h.round().clamp(max=LARGEST_FEATURE) / FEATURE

    def both(self, filters: Tensor) -> Tensor:
        """The filters and, where images are taken with their mirror images, the mirrored ones."""
        return torch.cat([filters, self.mirrored(filters)]) if self.mirror else filters

    def twice(self, bias: Tensor) -> Tensor:
        return bias.repeat(2) if self.mirror else bias

    def windows(self, x: Tensor, seed: int, count: int) -> Tensor:
        """Normalized patches, in steps, at places that are drawn by a hash of the image and the seed."""
        pixels = self.pixels(x)
        number = hashes(pixels.sum(1).flatten(1), seed, count)
        return self.patches_at(pixels, number % self.places(pixels)).flatten(0, 1)

    def answers(self, weight: Tensor, bias: Tensor, windows: Tensor) -> Tensor:
        return super().answers(self.both(weight), self.twice(bias), windows)

    def nearest(self, answers: Tensor, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen, answer, windows = super().nearest(answers, windows)
        turned = chosen >= self.outputs  # what is near to a mirrored filter is, mirrored, near to the filter
        windows[turned] = self.mirrored(windows[turned])
        return chosen % self.outputs, answer, windows

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """With `mirror`, of all patches and all mirrored ones."""
        if not self.mirror:
            return mean, covariance
        spread = (mean - self.mirrored(mean)) / 2
        turned = self.mirrored(self.mirrored(covariance).T.contiguous())
        return mean - spread, (covariance + turned) / 2 + torch.outer(spread, spread)

    def mirrored(self, patches: Tensor) -> Tensor:
        """Patches, or filters of such, [..., D], with left and right exchanged."""
        return patches.view(*patches.shape[:-1], self.patch, self.patch, self.inputs).flip(-2).flatten(-3)

    def pixels(self, x: Tensor) -> Tensor:
        """Inputs in steps, channels last."""
        limit = int((EXACT / self.size) ** 0.5)
        return (x.permute(0, 2, 3, 1) * PIXEL).round_().clamp_(-limit, limit).contiguous()

    def patches_at(self, pixels: Tensor, places: Tensor) -> Tensor:
        """Normalized patches, in steps, at some places of each image [n, m]: [n, m, D]. Places are numbered by rows."""
        windows = self._windows(pixels)
        rows, columns = places // windows.shape[2], places % windows.shape[2]
        found = windows[torch.arange(len(pixels)).unsqueeze(1), rows, columns].flatten(2)
        mean, factor = self._statistics(found.sum(2), found.square().sum(2))
        return (found - mean.unsqueeze(2)).mul_(factor.unsqueeze(2)).round_()

    def places(self, pixels: Tensor) -> int:
        """How many patches an image has."""
        return int((pixels.shape[1] - self.patch + 1) * (pixels.shape[2] - self.patch + 1))

    def _windows(self, pixels: Tensor) -> Tensor:
        """[n, rows, columns, P, P, C]"""
        return pixels.unfold(1, self.patch, 1).unfold(2, self.patch, 1).permute(0, 1, 2, 4, 5, 3)

    def _box(self, values: Tensor) -> Tensor:
        """The sums over all patches of [n, H, W]: products with matrices of ones in a band."""
        height, width = (
            torch.ones(side - self.patch + 1, side, device=values.device).triu().tril(self.patch - 1)
            for side in values.shape[1:]
        )
        return height @ values @ width.t()

    def _statistics(self, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """A patch's mean, and what its deviations are multiplied with, from exact sums of its values."""
        one, two = total.double(), squares.double()
        variance = (self.size * two - one.square()) / self.size**2
        return total / self.size, (WINDOW / (variance + self.contrast * PIXEL**2).sqrt()).float()

    def _cells(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        cuts = [[round(side * i / self.grid) for i in range(self.grid + 1)] for side in (rows, columns)]
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
            for left, right in zip(cuts[1], cuts[1][1:], strict=False):
                yield slice(top, bottom), slice(left, right)


def hashes(rows: Tensor, seed: int, count: int) -> Tensor:
    """`count` numbers for each row of integers, from 0 to 2^31 - 1: a function of the row and the seed."""
    source = generator(seed, "closed-form", "places")
    factors = torch.randint(-(2**63), 2**63 - 1, (rows.shape[1],), generator=source).to(rows.device)
    number = (rows.long() * factors).sum(1, keepdim=True) + torch.arange(count, device=rows.device) * 0x1E3779B97F4A7C15
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):  # integers wrap; a multiplication mixes upwards only
        number = (number ^ (number >> 31)) * factor
    return (number >> 32) & 0x7FFFFFFF
