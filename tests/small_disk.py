"""A run that is resumed on disks that are too small: `unshare -rm python -m tests.small_disk RUN FOLDER`.

RUN is copied to a tmpfs that is mounted at FOLDER, and resumed there with less and less room, then with a folder that
can only be read, at last with room enough. One JSON object a line says how each attempt ended.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.plugin_methods import upfl

ROOM = (0, 4)  # KiB beside what is there


def main(run: Path, folder: Path) -> None:
    mount("-t", "tmpfs", "-o", "size=64m", "none", folder)
    used = sum(-(-file.stat().st_size // 4096) * 4 for file in run.rglob("*") if file.is_file())  # KiB in pages
    for name, options in [(f"{room} KiB", f"size={used + room}k") for room in ROOM] + [("read only", "ro")]:
        mount("-o", "remount,rw,size=64m", folder)
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(run, folder / "run")
        mount("-o", f"remount,{options}", folder)
        resume(name, folder / "run")
    mount("-o", "remount,rw,size=64m", folder)
    resume("enough", folder / "run")
    shutil.copytree(folder / "run", run.parent / "resumed")


def resume(disk: str, run: Path) -> None:
    said = upfl("resume", run, "--workers", "1")
    sys.stdout.write(json.dumps({"disk": disk, "code": said.code, "said": said.err.replace("\n", "")}) + "\n")


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
