"""The run folder: configuration, metrics, checkpoint, best states, client memory, result.

    config.toml               the run, completely described; `upfl train --config` takes it
    metrics.jsonl             one object a round
    checkpoint.safetensors    the server's state and where everything else stands
    checkpoint.previous.safetensors  the one before, while the run is under way: for a damaged one
    best/round-R.safetensors  what newcomers receive, for rounds at which a row's validation accuracy was best
    memory/.../C-R.safetensors   client C's memory after round R
    result.json               the scores
    environment.json          where and with which version the run was worked on, one object for each session

The checkpoint is the commit. It is written under another name, flushed and renamed; whatever else is found in the
folder counts only as far as the checkpoint says. So a stop at any moment loses at most the rounds since the last
checkpoint. Every state file has a digest, and the checkpoint has those of the files that count, and of the metrics:
what was damaged or exchanged is named when it is read. Nothing is read, written or removed outside the folder
(`upfl.safe.folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upfl.config import Config
from upfl.contract import Published, Training
from upfl.engine.checkpoint import (
    Best,
    Commit,
    Progress,
    commit_of,
    metadata_of,
    progress_of,
    require_fit,
    tensors_of,
)
from upfl.engine.metrics import Metrics
from upfl.engine.result import checked_result
from upfl.errors import RunError
from upfl.safe import tensors as stored
from upfl.safe.folder import PART, Folder, reason
from upfl.safe.parse import read_json
from upfl.state import State, prefixed, select

try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Best", "Progress", "RunFolder"]

CONFIG, RESULT, TERMS, SESSIONS = "config.toml", "result.json", "terms.json", "environment.json"
CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = Folder(path)
        self.files.advice = f"Resume after that is mended: {self.go_on}"
        self._metrics = Metrics(self.files)
        self._states: dict[str, str] = {}  # digests of best states
        self._kept: set[str] = set()  # best states that the last checkpoint names
        self._memory_rounds = self._memory_digests = torch.empty(0, dtype=torch.int64)  # as the checkpoint has them
        self._superseded: list[tuple[int, int]] = []  # memories that the checkpoint before the last one names

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        try:
            if path.exists() and not path.is_dir():
                raise RunError(f"{path}: is a file; --out takes a folder")
            if path.exists() and any(entry.name != CONFIG + PART for entry in path.iterdir()):
                if (path / CONFIG).exists():
                    raise RunError(
                        f"{path}: there is a run already; {cls(path).go_on} goes on, --out takes another folder"
                    )
                raise RunError(f"{path}: the folder is not empty; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: the run folder cannot be made: {error.strerror or error}") from error
        folder = cls(path)
        folder.files.write(CONFIG, config.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        folder = cls(path)
        if not folder.files.is_file(CONFIG):
            raise RunError(f"{path}: not a run folder (there is no config.toml)")
        return folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from working in this folder; the system lifts it when this one ends, however it ends."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be opened: {reason(error)}") from error
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"{self.path}: another process is at work in this run folder") from None
            yield
        finally:
            os.close(descriptor)

    @property
    def go_on(self) -> str:
        """The command that goes on with this run, for messages."""
        nodes = self.files.is_file(TERMS)
        return f"the `flwr run` that began it, with out={self.path}," if nodes else f"`upfl resume {self.path}`"

    def require_local(self) -> None:
        """Refuse a run whose clients are on Flower's nodes."""
        if self.files.is_file(TERMS):
            raise RunError(f"{self.path}: its clients are nodes of a Flower federation; {self.go_on} goes on")

    def config(self) -> Config:
        return Config.parsed(self.files.read(CONFIG), str(self.path / CONFIG))

    # What a federation of Flower's nodes needs beside the configuration

    def save_terms(self, terms: str) -> None:
        self.files.write(TERMS, terms.encode())
        self.files.advice = f"Resume after that is mended: {self.go_on}"

    def terms(self) -> str:
        if not self.files.exists(TERMS):
            raise RunError(f"{self.path}: not a run of a Flower federation (there is no terms.json)")
        return self.files.read(TERMS).decode("utf-8", "replace")

    # Metrics

    def append_metrics(self, metrics: dict[str, Any]) -> int:
        """Add a line; returns the file's length."""
        return self._metrics.append(metrics)

    def metrics(self) -> list[dict[str, Any]]:
        commit = self._commit()
        return self._metrics.read(commit.metrics_bytes if commit else 0, commit.metrics if commit else None)

    # Environment

    def add_session(self, facts: dict[str, Any]) -> None:
        self.files.write(SESSIONS, (json.dumps([*self.sessions(), facts], indent=1) + "\n").encode())

    def sessions(self) -> list[dict[str, Any]]:
        """What is known of where the run was worked on; nothing where the file is missing or damaged."""
        try:
            sessions = self.files.json(SESSIONS)
        except RunError:
            return []
        return [facts for facts in sessions if isinstance(facts, dict)] if isinstance(sessions, list) else []

    # Checkpoint

    def save(self, progress: Progress) -> None:
        """Commit: from here on this is what a resumed run starts from."""
        names = _best_names(progress)
        memory_digests = self._digests_of(progress.memory_rounds)
        tensors = tensors_of(progress, memory_digests)
        metrics = self._metrics.committed(progress.metrics_bytes)
        states = {name: digest for name, digest in self._states.items() if name in names}
        if self.files.is_file(CHECKPOINT):
            self.files.keep(CHECKPOINT, PREVIOUS)
        facts = metadata_of(progress, len(tensors), self._identity, metrics, states)
        stored.save(self.files, CHECKPOINT, tensors, facts)
        self._remove_best(but=names | self._kept)
        self._kept = names
        self._memory_rounds, self._memory_digests = progress.memory_rounds.clone(), memory_digests

    def load(self, device: torch.device, training: Training[Any] | None = None) -> Progress | None:
        """Where the run stands, if it is of a training's form; None before its first checkpoint."""
        if not self.files.exists(CHECKPOINT):
            return None
        path = self.path / CHECKPOINT
        commits: list[Commit] = []

        def check(header: stored.Header) -> None:
            commits.append(commit_of(header, path))
            if training is not None:
                require_fit(header, training, path)

        with self._advising():
            tensors, _ = stored.load(self.files, CHECKPOINT, check, bounded=training is None)
            (commit,) = commits
            if commit.run != self._identity:
                raise RunError(f"{path}: belongs to a run with another data set, partition, model, training or seed")
            progress = progress_of(tensors, commit, device, path)
        self._states, self._kept = dict(commit.states), _best_names(progress)
        self._memory_rounds = progress.memory_rounds.clone()
        self._memory_digests = tensors.get("memory_digests", torch.zeros_like(progress.memory_rounds))
        return progress

    @contextmanager
    def _advising(self) -> Iterator[None]:
        """Say what can be done about a state that cannot be used."""
        try:
            yield
        except RunError as error:
            if self.files.is_file(PREVIOUS):
                command = f"upfl resume {self.path} --from-previous"
                advice = f"`{command}` goes on from the checkpoint before, to the same bits"
            else:
                advice = "put a copy in its place, or train anew elsewhere"
            raise RunError(f"{error}; {advice}") from error

    def go_back(self) -> None:
        """Let the checkpoint before the last one be the one that counts."""
        if not self.files.is_file(PREVIOUS):
            raise RunError(f"{self.path}: there is no checkpoint before the last one ({PREVIOUS})")
        self.files.rename(PREVIOUS, CHECKPOINT)

    def _commit(self) -> Commit | None:
        """What the checkpoint's header says of the other files; none before the first one."""
        if not self.files.exists(CHECKPOINT):
            return None
        return commit_of(stored.read_header(self.files, CHECKPOINT), self.path / CHECKPOINT)

    @cached_property
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
        """Remove what was written after the checkpoint, by a run that was stopped, and the checkpoint before it."""
        commit = self._commit() if progress else None
        self._metrics.roll_back(progress.metrics_bytes if progress else 0, commit.metrics if commit else None)
        for name in (RESULT, PREVIOUS):
            self.files.remove(name)
        self._remove_best(but=_best_names(progress) if progress else set())
        rounds = progress.memory_rounds.tolist() if progress else []
        for folder in self.files.names("memory"):
            for name in self.files.names(f"memory/{folder}"):
                client, _, round = name.removesuffix(".safetensors").partition("-")
                counts = client.isdecimal() and len(client) < 19 and int(client) < len(rounds)
                if not (counts and str(rounds[int(client)]) == round and name.endswith(".safetensors")):
                    self.files.remove(f"memory/{folder}/{name}")
        for name in self.files.names():
            if name.endswith(PART):
                self.files.remove(name)

    # Best states

    def save_best(self, published: Published) -> None:
        name = f"round-{published.round}"
        members = [
            stored.save(self.files, f"best/{name}/{client}.safetensors", member, {})
            for client, member in enumerate(published.members)
        ]
        tensors = published.state | prefixed("fitted", published.fitted)
        facts = {"upfl": json.dumps({"round": published.round, "members": members})}
        self._states[name] = stored.save(self.files, f"best/{name}.safetensors", tensors, facts)

    def load_best(self, round: int) -> Published:
        name, commit = f"round-{round}", self._commit()
        digest = commit.states.get(name) if commit else None
        tensors, header = stored.load(self.files, f"best/{name}.safetensors", digest=digest)
        try:
            facts = read_json(header.metadata.get("upfl", "{}").encode("utf-8", "surrogatepass"))
            digests = facts.get("members") if isinstance(facts, dict) else None
        except ValueError as error:
            raise RunError(f"{self.path}/best/{name}.safetensors: damaged ({error})") from None
        numbers = [file.removesuffix(".safetensors") for file in self.files.names(f"best/{name}")]
        members = sorted(int(number) for number in numbers if number.isdecimal() and len(number) < 19)
        if digests is not None and members != list(range(len(digests))):
            raise RunError(f"{self.path}/best/{name}: {len(digests)} members' states were there, now {len(members)}")
        files = [f"best/{name}/{member}.safetensors" for member in members]
        state = {name: value for name, value in tensors.items() if not name.startswith("fitted.")}
        return Published(state, round, _StoredStates(self.files, files, digests), select(tensors, "fitted"))

    def _remove_best(self, but: set[str]) -> None:
        """Remove state files, and folders of members' states, of other rounds."""
        for name in self.files.names("best"):
            if name.removesuffix(".safetensors") not in but and (name.startswith("round-") or name.endswith(PART)):
                self.files.remove(f"best/{name}")

    # Client memory

    def save_memory(self, client: int, round: int, memory: State) -> None:
        stored.save(self.files, _memory_file(client, round), memory, {})

    def load_memory(self, client: int, round: int, device: torch.device) -> State:
        name = _memory_file(client, round)
        with self._advising():
            memory, header = stored.load(self.files, name)
            if self._committed(client, round) and _short(header) != int(self._memory_digests[client]):
                raise RunError(f"{self.path / name}: is not the file that the checkpoint names (its digest differs)")
        return {name: value.to(device) for name, value in memory.items()}

    def _committed(self, client: int, round: int) -> bool:
        known = client < len(self._memory_rounds) and int(self._memory_rounds[client]) == round
        return known and int(self._memory_digests[client]) != 0

    def _digests_of(self, rounds: Tensor) -> Tensor:
        """The digest of each client's memory, in short; 0 where it is kept elsewhere or was written without one."""
        digests = torch.zeros_like(rounds)
        same = len(self._memory_rounds) == len(rounds)
        for client in (rounds >= 0).nonzero().flatten().tolist():
            round = int(rounds[client])
            if same and int(self._memory_rounds[client]) == round:
                digests[client] = self._memory_digests[client]
            elif self.files.is_file(name := _memory_file(client, round)):
                digests[client] = _short(stored.read_header(self.files, name))
        return digests

    def memory_versions(self, client: int) -> list[int]:
        """The rounds of which a client's memory is here."""
        names = (name.removesuffix(".safetensors") for name in self.files.names(f"memory/{client // 1000}"))
        rounds = (name.removeprefix(f"{client}-") for name in names if name.startswith(f"{client}-"))
        return [int(round) for round in rounds if round.isdecimal() and len(round) < 19]

    def supersede_memory(self, versions: Sequence[tuple[int, int]]) -> None:
        """Versions that the last checkpoint does not name any more: they go when the one before it does, too."""
        self.remove_memory(self._superseded)
        self._superseded = list(versions)

    def remove_memory(self, versions: Iterable[tuple[int, int]]) -> None:
        for client, round in versions:
            self.files.remove(_memory_file(client, round))

    # Result

    @property
    def finished(self) -> bool:
        try:
            return bool(self.result())
        except RunError:
            return False

    def save_result(self, result: dict[str, Any]) -> None:
        self.files.remove(PREVIOUS)  # and what it alone needs; the result, which says that all is done, comes last
        self.supersede_memory(())
        self._remove_best(but=self._kept)
        self.files.write(RESULT, (json.dumps(result, indent=1) + "\n").encode())

    def result(self) -> dict[str, Any]:
        if not self.files.exists(RESULT):
            raise RunError(f"{self.path}: the run is not finished; {self.go_on} goes on")
        try:
            return checked_result(self.files.json(RESULT))
        except (RunError, ValueError) as error:
            found = str(error) if isinstance(error, RunError) else f"{self.path / RESULT}: damaged ({error})"
            raise RunError(f"{found}; {self.go_on} writes it anew") from error


class _StoredStates(Sequence[State]):
    def __init__(self, folder: Folder, files: list[str], digests: list[str] | None) -> None:
        self.folder, self.files, self.digests = folder, files, digests

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return stored.load(self.folder, self.files[index], digest=self.digests[index] if self.digests else None)[0]


def _memory_file(client: int, round: int) -> str:
    return f"memory/{client // 1000}/{client}-{round}.safetensors"


def _best_names(progress: Progress) -> set[str]:
    return {f"round-{best.round}" for best in progress.best.values()}


def _short(header: stored.Header) -> int:
    """The first 64 bits of a digest, as a signed integer; 0 of a file that has none."""
    return int.from_bytes(bytes.fromhex(header.digest[:16]), "little", signed=True) if header.digest else 0
