"""The run folder: configuration, metrics, checkpoint, best states, client memory, result.

    config.toml               the run, completely described; `upfl train --config` takes it
    metrics.jsonl             one object a round
    checkpoint.safetensors    the server's state and where everything else stands
    best/round-R.safetensors  what newcomers receive, for rounds at which a row's validation accuracy was best
    memory/.../C-R.safetensors   client C's memory after round R
    result.json               the scores
    environment.json          where and with which version the run was worked on, one object for each session

The checkpoint is the commit. It is written under another name, flushed and renamed; whatever else is found in the
folder counts only as far as the checkpoint says. So a stop at any moment loses at most the rounds since the last
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from upfl.config import Config
from upfl.contract import Published
from upfl.errors import RunError
from upfl.state import State, aligned, contiguous, prefixed, select

try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None  # type: ignore[assignment]

FORMAT = 1


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


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: is a file; --out takes a folder")
        if path.exists() and any(entry.name != "config.toml.part" for entry in path.iterdir()):
            if (path / "config.toml").exists():
                raise RunError(
                    f"{path}: there is a run already; `upfl resume {path}` goes on, --out takes another folder"
                )
            raise RunError(f"{path}: the folder is not empty; choose another --out")
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        write_file(path / "config.toml", config.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            raise RunError(f"{path}: not a run folder (there is no config.toml)")
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from working in this folder; the system lifts it when this one ends, however it ends."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"{self.path}: another process is at work in this run folder") from None
            yield
        finally:
            os.close(descriptor)

    def config(self) -> Config:
        return Config.from_toml(self.path / "config.toml")

    # What a federation of Flower's nodes needs beside the configuration

    def save_terms(self, terms: str) -> None:
        write_file(self.path / "terms.json", terms.encode())

    def terms(self) -> str:
        path = self.path / "terms.json"
        if not path.is_file():
            raise RunError(f"{self.path}: not a run of a Flower federation (there is no terms.json)")
        return path.read_text()

    # Metrics

    def append_metrics(self, metrics: dict[str, Any]) -> int:
        """Add a line; returns the file's length."""
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(json.dumps(metrics).encode() + b"\n")
            file.flush()
            return file.tell()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        try:
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        except ValueError as error:
            raise RunError(f"{path}: damaged ({error}); `upfl resume {self.path}` mends an unfinished run") from error

    # Environment

    def add_session(self, facts: dict[str, Any]) -> None:
        write_file(self.path / "environment.json", (json.dumps([*self.sessions(), facts], indent=1) + "\n").encode())

    def sessions(self) -> list[dict[str, Any]]:
        """What is known of where the run was worked on; nothing where the file is missing or damaged."""
        try:
            sessions = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [facts for facts in sessions if isinstance(facts, dict)] if isinstance(sessions, list) else []

    # Checkpoint

    def save(self, progress: Progress) -> None:
        """Commit: from here on this is what a resumed run starts from."""
        _sync(self.path / "metrics.jsonl")
        facts = {
            "format": FORMAT,
            "run": self._identity(),
            "round": progress.round,
            "metrics_bytes": progress.metrics_bytes,
            "left_out": progress.left_out,
            "best": {row: asdict(best) for row, best in progress.best.items()},
        }
        tensors = prefixed("server", progress.server) | prefixed("correct", progress.correct)
        if len(progress.memory_rounds):
            tensors["memory_rounds"] = progress.memory_rounds
        facts["tensors"] = len(tensors)
        _save_state(self.path / "checkpoint.safetensors", tensors, {"upfl": json.dumps(facts)})
        self._remove(best for best in self._best_files() if best.stem not in _best_names(progress))

    def load(self, device: torch.device) -> Progress | None:
        """Where the run stands; None before its first checkpoint."""
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        tensors, facts = read_state(path)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            found = facts.get("format") if isinstance(facts, dict) else facts
            raise RunError(f"{path}: its format ({found}) is not this version's ({FORMAT})")
        missing = {"run", "round", "metrics_bytes", "left_out", "best", "tensors"} - facts.keys()
        if missing or facts["tensors"] != len(tensors):
            raise RunError(f"{path}: damaged (missing: {', '.join(sorted(missing)) or 'tensors'})")
        if facts["run"] != self._identity():
            raise RunError(f"{path}: belongs to a run with another data set, partition, model, training or seed")
        return Progress(
            server={name: value.to(device) for name, value in select(tensors, "server").items()},
            round=facts["round"],
            metrics_bytes=facts["metrics_bytes"],
            left_out=facts["left_out"],
            best={row: Best(**best) for row, best in facts["best"].items()},
            correct=select(tensors, "correct"),
            memory_rounds=tensors.get("memory_rounds", torch.empty(0, dtype=torch.int64)),
        )

    def _identity(self) -> str:
        """What a checkpoint may not be mixed up in: everything that decides about states, not how far to go.

        Defaults are left out, so that a setting that a later version adds leaves old runs what they are.
        """
        config = self.config()
        same = {"dataset", "seed", "partition_seed", "clients_per_round", "model", "partition"}
        decides = config.model_dump(mode="json", include=same, exclude_defaults=True)
        decides["training"] = [config.training_name, config.training_hyper().model_dump(exclude_defaults=True)]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    def roll_back(self, progress: Progress | None) -> None:
        """Remove what was written after the checkpoint, by a run that was stopped."""
        metrics = self.path / "metrics.jsonl"
        length = progress.metrics_bytes if progress else 0
        if metrics.exists():
            if metrics.stat().st_size < length:
                raise RunError(
                    f"{metrics}: shorter than the checkpoint says; it was changed, the run cannot be resumed"
                )
            os.truncate(metrics, length)
        elif length:
            raise RunError(f"{metrics}: missing, the run cannot be resumed")
        (self.path / "result.json").unlink(missing_ok=True)
        self._remove(best for best in self._best_files() if not progress or best.stem not in _best_names(progress))
        rounds = progress.memory_rounds.tolist() if progress else []
        for file in self.path.glob("memory/*/*"):
            client, _, round = file.stem.partition("-")
            committed = client.isdigit() and int(client) < len(rounds) and str(rounds[int(client)]) == round
            if not (committed and file.suffix == ".safetensors"):
                file.unlink()
        for leftover in (*self.path.glob("*.part"), *self.path.glob("best/*.part")):
            leftover.unlink()

    # Best states

    def save_best(self, published: Published) -> None:
        (self.path / "best").mkdir(exist_ok=True)
        path = self.path / "best" / f"round-{published.round}.safetensors"
        for client, member in enumerate(published.members):
            file = path.with_suffix("") / f"{client}.safetensors"
            file.parent.mkdir(exist_ok=True)
            _save_state(file, member, {})
        tensors = published.state | prefixed("fitted", published.fitted)
        _save_state(path, tensors, {"upfl": json.dumps({"round": published.round})})

    def load_best(self, round: int) -> Published:
        path = self.path / "best" / f"round-{round}.safetensors"
        members = sorted(path.with_suffix("").glob("*.safetensors"), key=lambda file: int(file.stem))
        tensors = read_state(path)[0]
        fitted = select(tensors, "fitted")
        state = {name: value for name, value in tensors.items() if not name.startswith("fitted.")}
        return Published(state, round, _StoredStates(members), fitted)

    def _best_files(self) -> list[Path]:
        """State files, and folders of members' states, named by their round."""
        return sorted(self.path.glob("best/round-*"))

    # Client memory

    def _memory_file(self, client: int, round: int) -> Path:
        return self.path / "memory" / str(client // 1000) / f"{client}-{round}.safetensors"

    def save_memory(self, client: int, round: int, memory: State) -> None:
        path = self._memory_file(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save_state(path, memory, {})

    def load_memory(self, client: int, round: int, device: torch.device) -> State:
        return {name: value.to(device) for name, value in read_state(self._memory_file(client, round))[0].items()}

    def remove_memory(self, versions: Iterable[tuple[int, int]]) -> None:
        self._remove(self._memory_file(client, round) for client, round in versions)

    # Result

    @property
    def finished(self) -> bool:
        try:
            return bool(self.result())
        except RunError:
            return False

    def save_result(self, result: dict[str, Any]) -> None:
        write_file(self.path / "result.json", (json.dumps(result, indent=1) + "\n").encode())

    def result(self) -> dict[str, Any]:
        path = self.path / "result.json"
        if not path.exists():
            raise RunError(f"{self.path}: the run is not finished; go on with `upfl resume {self.path}`")
        try:
            result: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(result, dict) or "rows" not in result:
                raise ValueError("there are no rows")
        except ValueError as error:
            raise RunError(f"{path}: damaged ({error}); `upfl resume {self.path}` writes it anew") from error
        return result

    @staticmethod
    def _remove(files: Iterable[Path]) -> None:
        for file in files:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)


class _StoredStates(Sequence[State]):
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return read_state(self.files[index])[0]


def read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a safetensors file, and the facts stored with them."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = json.loads(metadata.get("order", "null")) or file.keys()
            return {name: aligned(file.get_tensor(name)) for name in names}, json.loads(metadata.get("upfl", "{}"))
    except FileNotFoundError as error:
        raise RunError(f"{path}: missing") from error
    except (SafetensorError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); put a copy in its place, or train anew elsewhere") from error


def _best_names(progress: Progress) -> set[str]:
    return {f"round-{best.round}" for best in progress.best.values()}


def _save_state(path: Path, state: State, metadata: dict[str, str]) -> None:
    part = path.with_name(path.name + ".part")
    # The file sorts names by size; a state keeps its order, on which the order of floating-point sums may depend.
    metadata = metadata | {"order": json.dumps(list(state))}
    save_file(contiguous({name: value.cpu() for name, value in state.items()}), part, metadata)
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all, whatever happens."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make sure that a file's content, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
