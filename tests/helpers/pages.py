"""Pages of the documentation, run as they stand: their code and their commands, in their order.

A page runs in a process of its own, forked from one that has imported everything: a command as a new process would
spend most of its time on that. Trainings get one worker.
"""

import contextlib
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.plugin_methods import start_fork_server
from tests.plugin_methods import upfl as command
from upfl import api

Block = tuple[str, str]  # its language, its text


def blocks(page: Path, languages: str = "python|sh") -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```({languages})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(found: list[Block], folder: Path, shared: dict[str, Any] | None = None) -> str:
    """What the blocks print, run in a folder. Python's share their names where `shared` is given."""
    start_fork_server()
    environment = {"UPFL_PLUGINS": "", "UPFL_CACHE": str(folder / "cache"), "COLUMNS": "120"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(found, folder, environment, shared))
    process.start()
    process.join(240)
    said = (folder / "said.txt").read_text(encoding="utf-8")
    assert process.exitcode == 0, said
    return said


def _run(found: list[Block], folder: Path, environment: Mapping[str, str], shared: dict[str, Any] | None) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    with (
        Path("said.txt").open("w", encoding="utf-8") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.object(api, "cores", return_value=1),
    ):
        try:
            for language, text in found:
                if language == "python":
                    _python(text, {"__name__": "__main__"} if shared is None else shared)
                else:
                    for line in text.splitlines():
                        _command(line)
        except BaseException:
            traceback.print_exc()
            raise


def _python(text: str, names: dict[str, Any]) -> None:
    """A block that begins with a file's name is that file."""
    if named := re.match(r"# (\w+\.py)\n", text):
        Path(named[1]).write_text(text, encoding="utf-8")
    else:
        exec(compile(text, "a block", "exec"), names)


def _command(line: str) -> None:
    match shlex.split(line, comments=True):
        case ["upfl", *words]:
            said = command(*words)
            sys.stdout.write(f"{said.out}{said.err}")
            assert said.code == 0, f"{line}: ends with {said.code}"
        case ["python", "-c", text]:
            exec(compile(text, line, "exec"), {"__name__": "__main__"})
        case ["python", file]:
            runpy.run_path(file, run_name="__main__")
        case [_, *_]:
            subprocess.run(["bash", "-c", line], check=True)
