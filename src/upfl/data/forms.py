"""What a sample is: pixels of an image, a vector of features, or tokens of a text.

A form says what a model receives for a sample (`shape`), in which type samples are kept, and how a batch of them is
made a tensor: images are divided by their full intensity and normalized by channel, vectors are standardized by
feature, tokens are whole numbers and stay so. A bundle's manifest holds the form, so that a newcomer's samples are
treated alike.

`Vectors` without mean and std are not standardized yet: a federation does it from sums over its training clients
(`data/standardize.py`).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = 2**24  # values of a sample
VOCABULARY = 2**24  # token ids
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Samples as they are kept, and the angle by which images are turned, to what a model takes.
Read: TypeAlias = "Callable[[NDArray[Any], float], Tensor]"


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dtype: ClassVar[type[np.generic]]  # of samples as they are kept
    noun: ClassVar[str]  # several samples, in a word


class Pixels(_Form):
    """Images of a shape, normalized by (pixel / scale - mean) / std."""

    dtype = np.uint8
    noun = "images"

    kind: Literal["pixels"] = "pixels"
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(description="channels, height, width")
    scale: float = Field(gt=0, description="the value of full intensity, where pixels are integers")
    mean: tuple[float, ...] = Field(description="of each channel")
    std: tuple[Positive, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.shape) != 3 or not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError("shape is channels, height, width; mean and std have a value for each channel")
        if math.prod(self.shape) > LARGEST:
            raise ValueError(f"images of {math.prod(self.shape)} values are larger than any that can be used")
        return self

    @property
    def image(self) -> tuple[int, int, int]:
        channels, height, width = self.shape
        return channels, height, width

    @property
    def in_words(self) -> str:
        channels, height, width = self.shape
        colours = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
        return f"Images of {height} x {width} pixels (height x width), {colours}"

    def affine(self, scale: float) -> tuple[Tensor, Tensor]:
        """The normalization of pixels up to `scale`, as one multiplication and one addition."""
        import torch

        std = torch.tensor(self.std).view(-1, 1, 1)
        return 1 / (scale * std), -torch.tensor(self.mean).view(-1, 1, 1) / std

    def reader(self, scale: float | None = None, device: torch.device | str = "cpu") -> Read:
        """Images with values up to `scale`, the data set's own unless told, as a model takes them: channels last."""
        import torch

        factor, offset = (value.to(device) for value in self.affine(scale or self.scale))

        def read(pixels: NDArray[Any], angle: float = 0.0) -> Tensor:
            given = torch.from_numpy(pixels).to(device)
            if angle or self.shape[0] == 1:
                x = given.to(torch.float32, memory_format=torch.channels_last, copy=True)
                return (rotate(x, angle) if angle else x).mul_(factor).add_(offset)
            x = torch.empty(given.shape, device=device, memory_format=torch.channels_last)
            for ours, some in zip(torch.split(x, 64), torch.split(given, 64), strict=True):
                # Before its pixels are interleaved with others, a channel is one long multiplication.
                ours.copy_(some.to(torch.float32, copy=True).mul_(factor).add_(offset))
            return x

        return read

    def unit(self, x: Tensor) -> Tensor:
        """Images in [0, 1] as the model takes them: for export."""
        factor, offset = self.affine(1.0)
        return x * factor + offset

    def example(self, count: int, random: bool = False) -> Tensor:
        import torch

        return (torch.rand if random else torch.zeros)(count, *self.shape)


class Vectors(_Form):
    """Rows of features, standardized by (value - mean) / std."""

    dtype = np.float32
    noun = "rows"

    kind: Literal["vectors"] = "vectors"
    features: tuple[Annotated[str, Field(max_length=500)], ...] = Field(
        min_length=1, max_length=2**16, description="their names, in order"
    )
    mean: tuple[Finite, ...] = Field((), description="of each feature over the training clients; empty: not yet known")
    std: tuple[Positive, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(set(self.features)) < len(self.features):
            raise ValueError("two features have the same name")
        if not len(self.mean) == len(self.std) or (self.mean and len(self.mean) != len(self.features)):
            raise ValueError("mean and std have a value for each feature, or are both empty")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.features),)

    @property
    def unchanged(self) -> Vectors:
        """The form that takes values as they are."""
        width = len(self.features)
        return self.model_copy(update={"mean": (0.0,) * width, "std": (1.0,) * width})

    @property
    def in_words(self) -> str:
        some = ", ".join(self.features[:8]) + (", ..." if len(self.features) > 8 else "")
        return f"Rows of {len(self.features)} features ({some})"

    def reader(self, scale: float | None = None, device: torch.device | str = "cpu") -> Read:
        import torch

        assert self.mean, "vectors are standardized before they are read"
        mean, std = (torch.tensor(value, device=device) for value in (self.mean, self.std))

        def read(values: NDArray[Any], angle: float = 0.0) -> Tensor:
            return torch.from_numpy(values).to(device, torch.float32, copy=True).sub_(mean).div_(std)

        return read

    def unit(self, x: Tensor) -> Tensor:
        import torch

        return (x - torch.tensor(self.mean)) / torch.tensor(self.std)

    def example(self, count: int, random: bool = False) -> Tensor:
        """Rows with the mean that is known, or drawn as the training clients' are spread."""
        import torch

        shape, mean, std = (count, *self.shape), torch.tensor(self.mean), torch.tensor(self.std)
        return torch.randn(shape) * std + mean if random else torch.zeros(shape)


class Tokens(_Form):
    """Texts as whole numbers below `vocabulary`, so many each; 0 fills up what is shorter.

    With `words`, texts themselves are read: a word's token is a hash of it, so nobody has to agree on a dictionary, or
    to tell which words occur.
    """

    dtype = np.int32
    noun = "texts"

    kind: Literal["tokens"] = "tokens"
    length: int = Field(ge=1, le=2**16, description="tokens of a sample; longer ones are cut")
    vocabulary: int = Field(ge=2, le=VOCABULARY, description="how many different tokens there can be, with padding")
    words: bool = Field(False, description="whether texts are split into words, whose hashes are the tokens")
    column: str = Field("text", max_length=500, description="what tables call them")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def in_words(self) -> str:
        what = "Texts, cut after" if self.words else "Lists of tokens, cut after"
        return f"{what} {self.length} {'words' if self.words else 'tokens'}"

    def reader(self, scale: float | None = None, device: torch.device | str = "cpu") -> Read:
        import torch

        def read(tokens: NDArray[Any], angle: float = 0.0) -> Tensor:
            return torch.from_numpy(tokens).to(device, torch.int64)

        return read

    def unit(self, x: Tensor) -> Tensor:
        return x

    def example(self, count: int, random: bool = False) -> Tensor:
        import torch

        shape = (count, self.length)
        return torch.randint(self.vocabulary, shape) if random else torch.zeros(shape, dtype=torch.int64)

    def tokens(self, text: str) -> list[int]:
        """A text's tokens, without padding: numbers and words in small letters."""
        found = _WORD.findall(text.lower())[: self.length]
        return [1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % (self.vocabulary - 1) for word in found]

    def padded(self, lists: Sequence[Sequence[int]]) -> NDArray[np.int32]:
        rows = np.zeros((len(lists), self.length), np.int32)
        for row, tokens in zip(rows, lists, strict=True):
            kept = tokens[: self.length]
            row[: len(kept)] = kept
        return rows


_WORD = re.compile(r"\w+")

# Which one it is tells the kind; the tags are no part of a field's name (`bundle/read.py`). Images came first.
Form: TypeAlias = Annotated[
    Annotated[Pixels, Tag("<pixels>")] | Annotated[Vectors, Tag("<vectors>")] | Annotated[Tokens, Tag("<tokens>")],
    Discriminator(lambda given: f"<{_kind(given)}>"),
]


def _kind(given: object) -> object:
    return given.get("kind", "pixels") if isinstance(given, dict) else getattr(given, "kind", type(given).__name__)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre, bilinear, with zeros where nothing was."""
    import torch
    import torch.nn.functional as F

    turn = math.radians(degrees)
    cosine, sine = math.cos(turn), math.sin(turn)
    # The grid says where each target pixel comes from: the inverse turn, in a frame whose y axis points down.
    inverse = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]], device=images.device)
    grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
