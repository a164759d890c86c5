"""A report in a real browser: `python -m tests.browser REPORT/index.html` fails for whatever is wrong with the page."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MISSING = "no Chromium on this machine: the page is not tried in a browser"


def opened(file: Path) -> tuple[str, list[str]]:
    """A page as Chromium has it after its scripts ran, and what it said on its console."""
    assert CHROMIUM is not None, MISSING
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    with tempfile.TemporaryDirectory(prefix="upfl-browser-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *arguments, f"--user-data-dir={profile}", file.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def check(page: Path) -> str:
    """Every table and figure that was written is in the page, its script ran, and nothing was said on the console."""
    dom, console = opened(page)
    assert console == [], console
    tables = {file.stem for file in (page.parent / "tables").iterdir()}
    figures = {file.stem for file in (page.parent / "figures").iterdir()}
    assert tables
    assert figures
    assert [name for name in tables if f'<table id="{name}">' not in dom] == []
    assert [name for name in figures if not re.search(rf'<figure id="{name}-figure"><svg[^>]*role="img"', dom)] == []
    assert dom.count('tabindex="0"') == dom.count('scope="col"') > 0, "the script that sorts tables did not run"
    return f"{len(tables)} tables, {len(figures)} figures, no console error"


if __name__ == "__main__":
    sys.stdout.write(f"{check(Path(sys.argv[1]))}\n")
