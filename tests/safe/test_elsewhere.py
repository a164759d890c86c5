"""Arrays, messages, text, workers' folders: what comes from elsewhere takes no memory and gives no orders."""

import csv
import gzip
import io
import os
import random
import resource
import signal
import struct
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fuzz.changes import changed_array_header
from tests.plugin_methods import upfl
from upfl.bundle import Bundle
from upfl.cli.console import Console
from upfl.data.catalog import CATALOG
from upfl.data.files import load_unlabelled
from upfl.engine import group
from upfl.errors import BadClientError, ConfigError, DataError, RunError
from upfl.safe import limits, parse, text

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def grown(before: int) -> int:
    """Bytes that the process has taken since."""
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


# Arrays that unpack to more than there is room for


def test_a_small_archive_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    header = (
        b"\x93NUMPY\x01\x00v\x00"
        + str({"descr": "|u1", "fortran_order": False, "shape": (66_000_000, 8, 8)}).encode().ljust(117)
        + b"\n"
    )
    assert len(header) == 128
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header)
        for _ in range(8):
            member.write(bytes(2**26))  # enough of it to be a bomb
    assert (tmp_path / "bomb.npz").stat().st_size < 2**23
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"more than 512 MiB; if you trust it, UPFL_LIMIT_UNPACKED=\.\.\. raises"):
        load_unlabelled(tmp_path / "bomb.npz", (1, 8, 8), 16.0)
    assert grown(before) < 2**28


def test_an_idx_file_is_read_no_further_than_its_header_says_and_the_limit_allows(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    zeros = gzip.compress(bytes(2**28), 1)  # twice that is above the limit
    for count, says in ((5, "announces"), (2**26, "UPFL_LIMIT_UNPACKED")):
        content = gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", count, 8, 8)) + zeros
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(DataError, match=says):
            load_unlabelled(tmp_path / "a.gz", (1, 8, 8), 16.0)
    assert grown(before) < 2**28


def test_limits_are_told_in_words_and_raised_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.limit("FILE") == 2**32
    monkeypatch.setenv("UPFL_LIMIT_FILE", "12 kB")
    assert limits.limit("FILE") == 12 * 1024
    assert limits.exceeded("FILE", 3 * 2**30) == (
        "3 GiB are more than 12 KiB; if you trust it, UPFL_LIMIT_FILE=... raises this limit"
    )
    for wrong in ("-1", "many", "1.5G", "9" * 99):
        monkeypatch.setenv("UPFL_LIMIT_FILE", wrong)
        with pytest.raises(ConfigError, match="UPFL_LIMIT_FILE"):
            limits.limit("FILE")


# Headers of arrays, from files and from nodes


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': (\n",
        "(" * 3000,
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)",
        "[1]",
        "{}",
        "9" * 4000,
        "{" * 99,
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "__import__('os').abort()",
    ],
)
def test_a_header_that_numpy_would_stumble_over_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match=r"its header|its values"):
        parse.read_array(npy(header))


def test_headers_that_numpy_writes_are_read_to_the_same_arrays() -> None:
    rng = np.random.default_rng(3)
    for dtype in ("u1", "<i8", ">i2", "<f4", "<f8", "?", "<c16"):
        for shape in ((), (0,), (3,), (2, 3, 4), (1, 0, 2)):
            for order in ("C", "F"):
                array = np.asarray(rng.integers(0, 2, shape).astype(dtype), order=order)
                stream = io.BytesIO()
                np.save(stream, array)
                read = parse.read_array(stream.getvalue())
                assert read.dtype == array.dtype
                np.testing.assert_array_equal(read, array)


def test_whatever_arrays_a_node_sends_it_is_that_node_that_is_refused() -> None:
    """Over a thousand headers, of which NumPy's reader ends in other errors than ValueError for every fourth."""
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from flwr.app import Array, ArrayRecord

    from upfl.flower.messages import from_record

    stream, refused, others = io.BytesIO(), 0, 0
    np.save(stream, np.zeros((3, 4), np.float32))
    for case in range(1000):
        data = changed_array_header(stream.getvalue(), random.Random(case))
        try:
            np.lib.format.read_array(io.BytesIO(data))
        except ValueError:
            pass
        except Exception:  # what stopped a run
            others += 1
        try:
            from_record(ArrayRecord({"a": Array("float32", (3, 4), "numpy.ndarray", data)}))
        except BadClientError:
            refused += 1
    assert refused > 900
    assert others > 50


# Text


def test_control_characters_are_spelled_out_wherever_they_are_printed() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200)
    from rich.markup import escape
    from rich.table import Table

    table = Table(escape(f"head {ESCAPE}"))
    table.add_row(escape(f"cell {ESCAPE}"))
    console.print(f"[bold]{escape(ESCAPE)}[/bold]", table)
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count(r"\x1b]0;owned") == 3
    assert text.plain("a\nb\u202ec\ud800\x9b") == "a\nb\\u202ec\\ud800\\x9b"
    assert text.markdown("<b>|[x](y)\n# *h*") == r"\<b\>\|[x\](y) # \*h\*"
    for cell in ("=1+1", "+1", "-1", "@x", "\t=1"):
        assert text.csv_cell(cell).startswith(("'", "\\x09"))
    assert text.csv_cell("cat-1.png") == "cat-1.png"


def test_names_of_files_give_no_orders_to_the_terminal_nor_to_a_spreadsheet(tmp_path: Path) -> None:
    from tests.fuzz.families import make_bundles

    bundle = make_bundles(tmp_path / "bundles")[0]
    (tmp_path / "data").mkdir()
    for name in ("=cmd.png", f"a{ESCAPE}b.png"):
        Image.new("L", (8, 8)).save(tmp_path / "data" / name)
    (tmp_path / "data" / f"{ESCAPE}.txt").write_text("no image")
    said = upfl("personalize", bundle, tmp_path / "data", "-o", tmp_path / "me").ended()
    predicted = upfl("predict", tmp_path / "me", tmp_path / "data")
    wrong = upfl("personalize", bundle, tmp_path / f"nowhere{ESCAPE}", "-o", tmp_path / "other")
    for printed in (said.out, said.err, predicted.out, predicted.err, wrong.err):
        assert "\x1b" not in printed
    rows = list(csv.DictReader((tmp_path / "me" / "predictions.csv").open()))
    assert sorted(row["sample"] for row in rows) == ["'=cmd.png", r"a\x1b]0;owned\x07\x1b[31mb.png"]


# What nodes tell, and what is left behind


def test_errors_tell_other_machines_nothing_of_files_and_data() -> None:
    for error in (
        DataError("/home/me/x.npz: sample 3 has [0, 17]"),
        RunError("/var/lib/x"),
        ConfigError("given: '/x'"),
    ):
        assert "/" not in error.reason
        assert "17" not in error.reason
    assert BadClientError("its loss is not finite").reason == "its loss is not finite"
    assert ConfigError("client is 9").public().reason == "client is 9"


def test_every_mirror_of_a_data_set_is_authenticated() -> None:
    urls = [url for one in CATALOG.values() for item in one.downloads for url in item.urls]
    assert urls
    assert all(url.startswith("https://") for url in urls)


def test_the_folder_of_a_killed_process_is_removed_at_the_next_start_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, _ = in_a_process(kill=True)
    working, alive = in_a_process(kill=False)
    assert left.is_dir()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("")
    (tmp_path / f"{group.PLACE}link").symlink_to(victim)
    old = time.time() - 10 * group.FRESH
    for folder in (left, working):
        os.utime(folder, (old, old))
    with group.meeting_place() as mine:
        assert not left.exists()
        assert working.is_dir()
        assert Path(mine).is_dir()
        assert (victim / "precious").exists()
    os.kill(alive, signal.SIGKILL)
    os.waitpid(alive, 0)


def in_a_process(kill: bool) -> tuple[Path, int]:
    """The folder that a process of its own holds, or held until it was killed."""
    read, write = os.pipe()
    if not (child := os.fork()):
        with group.meeting_place() as held:
            os.write(write, held.encode())
            os.kill(os.getpid(), signal.SIGKILL) if kill else time.sleep(600)
    folder = Path(os.read(read, 1000).decode())
    for end in (read, write):
        os.close(end)
    if kill:
        os.waitpid(child, 0)
    return folder, child


def test_a_bundle_that_was_made_by_this_version_is_read_by_the_library_that_the_format_is_from(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.fuzz.families import make_bundles

    for path in make_bundles(tmp_path / "bundles")[:2]:
        theirs, ours = load_file(path / "weights.safetensors"), Bundle.load(path).published.state
        assert {name.removeprefix("state.") for name in theirs} == ours.keys()
        assert all((theirs[f"state.{name}"] == value).all() for name, value in ours.items())
