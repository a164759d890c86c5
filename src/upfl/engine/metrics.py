"""The metrics file: one line of JSON a round, with a running digest that checkpoints commit to."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from upfl.engine.result import checked_round
from upfl.errors import RunError
from upfl.safe.folder import Folder
from upfl.safe.parse import read_json

FILE = "metrics.jsonl"


class Metrics:
    def __init__(self, files: Folder) -> None:
        self.files, self.path = files, files.path / FILE
        self._digest: Any = None  # SHA-256 of the file so far, once it is known

    def append(self, metrics: dict[str, Any]) -> int:
        """Add a line; returns the file's length."""
        line = json.dumps(metrics).encode() + b"\n"
        digest = self._digest or self._digested(None)
        length = self.files.append(FILE, line)
        digest.update(line)
        self._digest = digest
        return length

    def committed(self, length: int) -> str:
        """The digest of the file up to a length, after it was made sure that it survives a power cut."""
        if length:
            self.files.flush(FILE)
        digest: str = (self._digest or self._digested(length)).hexdigest()
        return digest

    def read(self, length: int, digest: str | None) -> list[dict[str, Any]]:
        """All lines; what a checkpoint counts must have the digest that it names."""
        if not self.files.exists(FILE):
            return []
        content = self.files.read(FILE, "FILE")
        try:
            if digest and hashlib.sha256(content[:length]).hexdigest() != digest:
                raise ValueError("a line that the checkpoint counts was changed")
            return [checked_round(read_json(line)) for line in content.splitlines()]
        except ValueError as error:
            mend = f"; `upfl resume {self.files.path}` mends an unfinished run"
            raise RunError(f"{self.path}: damaged ({error}){mend}") from error

    def roll_back(self, length: int, digest: str | None) -> None:
        """Cut off what was added after the checkpoint, if what it counts is as it was."""
        if not self.files.exists(FILE):
            if length:
                raise RunError(f"{self.path}: missing, the run cannot be resumed")
            return
        with self.files.opened(FILE) as file:
            if os.fstat(file.fileno()).st_size < length:
                raise RunError(
                    f"{self.path}: shorter than the checkpoint says; it was changed, the run cannot be resumed"
                )
        self._digest = self._digested(length)
        if digest and self._digest.hexdigest() != digest:
            raise RunError(
                f"{self.path}: damaged: a line of a round that the checkpoint counts was changed; "
                "put a copy in its place, or train anew elsewhere"
            )
        self.files.truncate(FILE, length)

    def _digested(self, length: int | None) -> Any:
        """The digest so far of a file that is there already, up to a length."""
        digest = hashlib.sha256()
        if self.files.exists(FILE):
            with self.files.opened(FILE) as file:
                left = os.fstat(file.fileno()).st_size if length is None else length
                while left and (chunk := file.read(min(left, 2**20))):
                    digest.update(chunk)
                    left -= len(chunk)
        return digest
