"""What a user says about data of their own, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from upfl.errors import DataError

LENGTH, VOCABULARY = 64, 10_000


@dataclass(frozen=True)
class Options:
    """The columns that count, and how samples are taken. What does not apply to a format is refused."""

    label: str | None = None
    client: str | None = None
    newcomer: str | None = None
    features: tuple[str, ...] = ()
    image: str | None = None
    tokens: str | None = None
    text: str | None = None
    length: int | None = None
    vocabulary: int | None = None
    scale: float | None = None
    resize: tuple[int, int] | None = None  # width, height
    allow_duplicates: bool = False

    def __post_init__(self) -> None:
        chosen = [f"--{name}" for name in ("features", "image", "tokens", "text") if getattr(self, name)]
        if len(chosen) > 1:
            raise DataError(f"{' and '.join(chosen)}: samples are one of these; name one")
        if self.resize is not None and not all(1 <= side <= 4096 for side in self.resize):
            raise DataError(f"--resize {self.resize[0]} {self.resize[1]}: sides have 1 to 4096 pixels")
        if self.length is not None and not 1 <= self.length <= 2**16:
            raise DataError(f"--length {self.length}: 1 to {2**16} tokens")
        if self.vocabulary is not None and not 2 <= self.vocabulary <= 2**24:
            raise DataError(f"--vocabulary {self.vocabulary}: 2 to {2**24} different tokens")
        if self.scale is not None and not 0 < self.scale <= 255:
            raise DataError(f"--scale {self.scale:g}: the value of full intensity is above 0, and 255 at most")

    def only(self, what: str, *allowed: str) -> None:
        """Refuse options that mean nothing to a format."""
        for field in fields(self):
            if getattr(self, field.name) != field.default and field.name not in allowed:
                raise DataError(f"--{field.name.replace('_', '-')} does not apply to {what}")


def existing(path: str | Path) -> Path:
    path = Path(path).expanduser()
    try:
        path.stat()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return path


def scale_of(options: Options, where: str, largest: Any) -> float:
    scale = options.scale or 255.0
    if largest > scale:
        raise DataError(f"{where}: has pixels up to {largest}; whole numbers up to {scale:g} are expected (--scale)")
    return scale
