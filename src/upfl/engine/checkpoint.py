"""What a checkpoint holds, and what is checked before a run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from upfl.contract import Training
from upfl.errors import RunError
from upfl.randomness import generator
from upfl.safe.parse import read_json
from upfl.safe.tensors import Header
from upfl.state import State, prefixed, select

FORMAT = 2  # 1, which had no digests, is read, too
ROUNDS = 2**31
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Score = Annotated[float, Field(ge=-1, le=100)]


@dataclass
class Best:
    """A row so far: scores in percent at the round with the best validation accuracy, and what else is reported."""

    round: int = 0
    validation: float = -1.0
    test: float = -1.0
    before: float = -1.0  # test accuracy of the model before it was personalized, at the same round
    test_last: float = -1.0
    test_best: float = -1.0


@dataclass
class Progress:
    """All that a run has come to: what a checkpoint holds."""

    server: State
    round: int = 0  # rounds done
    metrics_bytes: int = 0
    left_out: int = 0
    best: dict[str, Best] = field(default_factory=dict)
    correct: State = field(default_factory=dict)  # `row.kind`: correct predictions of each client at the best round
    memory_rounds: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def copied(self) -> Progress:
        """As it is now, whatever the run does next."""
        server = {name: value.clone() for name, value in self.server.items()}
        best = {row: replace(best) for row, best in self.best.items()}
        return replace(self, server=server, best=best, correct=dict(self.correct))


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class _StoredBest(_Strict):
    round: int = Field(ge=0, lt=ROUNDS)
    validation: Score
    test: Score
    before: Score
    test_last: Score
    test_best: Score


class Commit(_Strict):
    """What stands beside the tensors: where the run is, and the digests of the other files that count."""

    format: Literal[1, 2]
    run: str = Field(max_length=64, description="what the run is, as a digest of its configuration")
    round: int = Field(ge=0, lt=ROUNDS)
    metrics_bytes: int = Field(ge=0, lt=2**48)
    left_out: int = Field(ge=0, lt=2**48)
    best: dict[str, _StoredBest] = Field(max_length=10_000)
    tensors: int
    metrics: Digest | None = Field(None, description="of the metrics file as far as it counts")
    states: dict[str, Digest] = Field({}, description="of best states, by file name")


def commit_of(header: Header, path: Path) -> Commit:
    """What a checkpoint's header says."""
    try:
        facts = read_json(header.metadata.get("upfl", "null").encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise RunError(f"{path}: damaged ({error})") from None
    number = facts.get("format") if isinstance(facts, dict) else None
    if number not in (1, FORMAT):
        raise RunError(f"{path}: its format ({number!r:.40}) is not one of this version's (1, {FORMAT})")
    try:
        commit = Commit.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{path}: damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None
    if commit.tensors != len(header.tensors):
        raise RunError(f"{path}: damaged (missing: tensors)")
    if (header.digest is None) != (commit.format == 1):
        raise RunError(f"{path}: damaged (its digest is missing)")
    return commit


def metadata_of(progress: Progress, tensors: int, run: str, metrics: str, states: Mapping[str, str]) -> dict[str, str]:
    facts = {
        "format": FORMAT,
        "run": run,
        "round": progress.round,
        "metrics_bytes": progress.metrics_bytes,
        "left_out": progress.left_out,
        "best": {row: asdict(best) for row, best in progress.best.items()},
        "tensors": tensors,
        "metrics": metrics,
        "states": dict(states),
    }
    return {"upfl": json.dumps(facts)}


def tensors_of(progress: Progress, memory_digests: Tensor) -> State:
    tensors = prefixed("server", progress.server) | prefixed("correct", progress.correct)
    if len(progress.memory_rounds):
        tensors |= {"memory_rounds": progress.memory_rounds, "memory_digests": memory_digests}
    return tensors


def require_fit(header: Header, training: Training[Any], path: Path) -> None:
    """Refuse a checkpoint whose tensors are not this training's, before they are read."""
    with torch.device("meta"):
        expected = prefixed("server", training.init(generator(0)))
    clients = (training.task.clients,)
    found = {name: (place.dtype, place.shape) for name, place in header.tensors.items()}
    wanted = {name: (value.dtype, tuple(value.shape)) for name, value in expected.items()}
    wanted |= {name: (torch.int64, clients) for name in ("memory_rounds", "memory_digests") if name in found}
    for name in dict.fromkeys([*wanted, *found]):
        if name.startswith("correct."):
            dtype, shape = found[name]
            if dtype != torch.int64 or len(shape) != 2 or shape[1] != 3:
                raise RunError(f"{path}: damaged (tensor {name} does not hold counts)")
        elif found.get(name) != wanted.get(name):
            raise RunError(f"{path}: damaged (tensor {name} is missing, or not of this training's form)")


def progress_of(tensors: State, commit: Commit, device: torch.device, path: Path) -> Progress:
    """A checkpoint as the run goes on from it, after its numbers were checked."""
    memory_rounds = tensors.get("memory_rounds", torch.empty(0, dtype=torch.int64))
    if len(memory_rounds) and not (-1 <= int(memory_rounds.min()) <= int(memory_rounds.max()) < max(commit.round, 1)):
        raise RunError(f"{path}: damaged (memories of rounds that were not there yet)")
    correct = select(tensors, "correct")
    for row in commit.best:
        if not {f"{row}.training", f"{row}.new"} <= correct.keys():
            raise RunError(f"{path}: damaged (best.{row}: its clients' counts are missing)")
    for name, counts in correct.items():
        if bool((counts < 0).any()) or bool((counts[:, :2] > counts[:, 2:]).any()):
            raise RunError(f"{path}: damaged (tensor correct.{name} has counts that cannot be)")
    if any(best.round > commit.round for best in commit.best.values()):
        raise RunError(f"{path}: damaged (a best round that was not there yet)")
    return Progress(
        server={name: value.to(device) for name, value in select(tensors, "server").items()},
        round=commit.round,
        metrics_bytes=commit.metrics_bytes,
        left_out=commit.left_out,
        best={row: Best(**best.model_dump()) for row, best in commit.best.items()},
        correct=correct,
        memory_rounds=memory_rounds,
    )
