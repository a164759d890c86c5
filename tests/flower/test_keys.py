"""Keys for a trial."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from upfl.errors import UpflError
from upfl.flower.keys import make_keys


def test_keys_are_for_their_owner_alone_and_are_not_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1"], 2, "127.0.0.1:8000")
    found = {path.name for path in (tmp_path / "keys").iterdir()}
    assert found >= {"ca.crt", "superlink.pem", "superlink.key", "node-1.key", "node-1.pub", "node-2.key"}
    assert "ca.key" not in found, "who has it could pose as the SuperLink"
    for path in [tmp_path / "keys", *(tmp_path / "keys").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    with pytest.raises(UpflError, match="is there already"):
        make_keys(tmp_path / "keys", ["localhost"], 1, "127.0.0.1:8000")
