"""Find run folders and read them; what is broken, unfinished or not a run is named and left out."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from upfl.config import Config
from upfl.engine.folder import RunFolder
from upfl.engine.result import Part
from upfl.errors import RunError, UpflError

OWN = {"failures", "tensorboard", "best", "memory", "newcomers", "trials"}  # folders that other parts of upfl write
MARK = "index.html"  # a folder with this file is a report
METRICS_PACKED = "metrics.jsonl.xz"  # of a run of which only a summary was kept
METRICS_LIMIT = 2**28  # bytes that packed metrics may come to


Percent = Annotated[float, Field(ge=0, le=100)]


class ClientScore(Part):
    client: int = Field(ge=0)
    kind: Literal["training", "new"]
    accuracy: Percent
    before: Percent
    size: int = Field(ge=1)


class Unscored(Part):
    """A new client without labels."""

    client: int = Field(ge=0)
    name: str | None = None
    samples: int = Field(ge=1)
    mix: dict[str, float]
    estimates: tuple[tuple[float, float, float], ...] = ()


class NewRow(Part):
    row: str
    test: Percent | None = None  # none where no new client has labels, or none is known
    test_before: Percent | None = None
    clients: tuple[ClientScore, ...]
    unscored: tuple[Unscored, ...] = ()

    @model_validator(mode="after")
    def _scored_or_not(self) -> Self:
        if len({self.test is None, self.test_before is None, not self.new_clients}) > 1:
            raise ValueError("test, test_before and new clients with a score belong together")
        return self

    @property
    def new_clients(self) -> dict[int, ClientScore]:
        return {client.client: client for client in self.clients if client.kind == "new"}


class Row(NewRow):
    validation: Percent
    validation_own: Percent | None = None  # that of those who train, where others that are held out validate
    best_round: int


class Result(Part):
    rounds: int
    left_out: int
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = Field(min_length=1)


class RoundRow(Part):
    validation: Percent
    test: Percent | None = None


class Round(Part):
    round: int
    clients: int
    loss: float
    gradients: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    train_s: float = 0.0
    evaluate_s: float = 0.0
    round_s: float = 0.0
    rows: dict[str, RoundRow] = Field(default_factory=dict)


class Newcomers(Part):
    """A run's rows on other new clients."""

    changes: dict[str, float]  # of the partition
    rows: tuple[NewRow, ...]


class DiaryEntry(Part):
    row: str
    client: int
    samples: int
    accuracy: tuple[float, ...] = Field(min_length=1)
    loss: tuple[float, ...]
    entropy: tuple[float, ...]

    @model_validator(mode="after")
    def _same_steps(self) -> Self:
        if not len(self.accuracy) == len(self.loss) == len(self.entropy):
            raise ValueError("accuracy, loss and entropy do not have the same number of steps")
        return self


@dataclass(frozen=True)
class RunData:
    """A finished run, as a report shows it."""

    path: Path
    config: Config
    result: Result
    rounds: tuple[Round, ...]
    sessions: tuple[dict[str, Any], ...]
    newcomers: tuple[Newcomers, ...]
    diary: tuple[DiaryEntry, ...]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass
class Collected:
    runs: list[RunData] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # folder, why


def collect(paths: Iterable[Path]) -> Collected:
    """The runs in these folders: run folders themselves, or folders that hold some."""
    collected = Collected()
    for path in dict.fromkeys(folder for given in paths for folder in _candidates(given)):
        try:
            collected.runs.append(_read(path))
        except UpflError as error:
            reason = str(error).removeprefix(f"{path}: ")
            collected.left_out.append((str(path), f"{reason}{_failure(path)}"))
    return collected


def _candidates(path: Path) -> Iterator[Path]:
    """Run folders at or below a path, and folders that hold none although they might be taken for some."""
    if not path.is_dir() or (path / "config.toml").exists():
        yield path
    else:
        inner = [
            child
            for child in sorted(path.iterdir())
            if child.is_dir() and not child.is_symlink() and not child.name.startswith(".") and child.name not in OWN
        ]
        found = [candidate for child in inner if not (child / MARK).exists() for candidate in _candidates(child)]
        yield from found or [path]


def _read(path: Path) -> RunData:
    if not path.is_dir():
        raise RunError(f"{path}: there is no such folder")
    folder = RunFolder.open(path)
    config = folder.config()
    result = _parsed(Result, folder.result(), path / "result.json")
    packed = path / METRICS_PACKED
    metrics = _unpacked(packed) if packed.exists() else folder.metrics()
    rounds = _parsed(tuple[Round, ...], metrics, path / "metrics.jsonl")
    if len(rounds) != result.rounds:
        raise RunError(f"{path}: metrics.jsonl has {len(rounds)} rounds, and result.json says {result.rounds}")
    newcomers = [_newcomers(config, file) for file in sorted(path.glob("newcomers/*.json"))]
    diary = path / "diary.json"
    diaries = _parsed(tuple[DiaryEntry, ...], _json(diary), diary) if diary.exists() else ()
    return RunData(path, config, result, rounds, tuple(folder.sessions()), tuple(newcomers), diaries)


def _unpacked(path: Path) -> list[Any]:
    """The metrics of a summary."""
    try:
        with lzma.open(path) as file:
            content = file.read(METRICS_LIMIT + 1)
        if len(content) > METRICS_LIMIT:
            raise ValueError(f"more than {METRICS_LIMIT:,} bytes")
        return [json.loads(line) for line in content.splitlines()]
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise RunError(f"{path}: damaged ({error})") from error


def _newcomers(config: Config, file: Path) -> Newcomers:
    found = _parsed(Newcomers, _json(file), file)
    config.partition.revised(found.changes)  # raises for what does not fit
    if not all(isinstance(getattr(config.partition, key), float) for key in found.changes):
        raise RunError(f"{file}: damaged (changes: {found.changes})")
    return found


def _failure(path: Path) -> str:
    """What an experiment noted about a training that failed."""
    try:
        return f" (it failed: {(path.parent / 'failures' / f'{path.name}.txt').read_text(encoding='utf-8').strip()})"
    except (OSError, UnicodeDecodeError):
        return ""


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error})") from error


T = TypeVar("T")


def _parsed(kind: type[T], value: Any, path: Path) -> T:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: damaged ({where}: {first['msg']})") from None


def names(runs: Sequence[RunData]) -> dict[Path, str]:
    """What to call each run: its folder's name, with as many folders above it as it takes to tell them apart."""
    called = {}
    for run in runs:
        parts = run.path.resolve().parts
        for length in range(1, len(parts)):
            name = "/".join(parts[-length:])
            if sum(other.path.resolve().parts[-length:] == parts[-length:] for other in runs) == 1:
                break
        called[run.path] = name
    return called
