"""Lines of Python by package at two commits, and where the lines of the second one come from (`git blame`).

python -m benchmarks.lines ac082f2 HEAD
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Commits after ac082f2 that put the same features into other words and places: the redesign, and bits on every machine;
# later ones say so by their first word (HOUSE), so that what they write anew counts here, too, and not as a feature.
# All other commits since brought features. Whoever adds to the one or the other here reads the commit first.
SAME_FEATURES = re.compile(
    "20f3d74|318dabf|241000b|e679ca5|5a5dbe7|84f213c|21f42c4|c915919|1dc83b1|2822235|157b189|3f0983d|f3505b9|5eda178|"
    "d5e0255|5f4fced|2374348|4910218|4455915|9fbcefa|8118e8b|d59655d|4809f7a|8ff2ef4|58b3337|a7de8f2|2288991|b0f17b2"
)
HOUSE = "^House: "
# One commit did both: what it wrote for the bundle is its division into a package, all else is checks of files.
BOTH, DIVIDED = "dc81699", "src/upfl/bundle/"
KINDS = ("older", "the same features in other words", "new features")


def git(*words: str) -> str:
    command = [shutil.which("git") or "git", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=True).stdout


def lines(commit: str) -> dict[str, int]:
    """Lines of every Python file below src and tests."""
    found = (line.rsplit(":", 2) for line in git("grep", "-c", "", commit, "--", "src/*.py", "tests/*.py").splitlines())
    return {path: int(count) for _, path, count in found}


def package(path: str) -> str:
    first, *parts = path.split("/")
    inner = parts[1:] if first == "src" else parts
    return "/".join([first, *([inner[0]] if len(inner) > 1 else [])])


def origins(path: str, after: str, since: set[str], house: set[str]) -> Counter[str]:
    """A file's lines by what the commit that wrote them was for; a line that was moved or copied keeps its origin."""
    found = Counter[str]()
    for line in git("blame", "-w", "-M", "-C", "-C", "--line-porcelain", after, "--", path).splitlines():
        if head := re.match(r"([0-9a-f]{40}) \d+ \d+", line):
            commit = head[1]
            same = commit in house or bool(SAME_FEATURES.match(commit))
            same = same or (commit.startswith(BOTH) and path.startswith(DIVIDED))
            found[KINDS[0] if commit not in since else KINDS[1] if same else KINDS[2]] += 1
    return found


def main(before: str, after: str) -> None:
    counts = [lines(before), lines(after)]
    by_package = [Counter[str](), Counter[str]()]
    for total, files in zip(by_package, counts, strict=True):
        for path, count in files.items():
            total[package(path)] += count
    print(f"| | {before} | {after} |\n|---|---:|---:|")
    for name in sorted(by_package[0].keys() | by_package[1].keys()):
        print(f"| {name} | {by_package[0][name] or ''} | {by_package[1][name] or ''} |")
    since = set(git("rev-list", f"{before}..{after}").split())
    house = set(git("rev-list", "--grep", HOUSE, f"{before}..{after}").split())
    written = {"src": Counter[str](), "tests": Counter[str]()}
    for path in counts[1]:
        written[path.split("/")[0]] += origins(path, after, since, house)
    print(f"\n| lines at {after} | src | tests |\n|---|---:|---:|")
    for kind in KINDS:
        print(f"| {kind} | {written['src'][kind]} | {written['tests'][kind]} |")
    sums = [sum(count for path, count in counts[0].items() if path.startswith(place)) for place in ("src/", "tests/")]
    print(f"| {before}, all | {sums[0]} | {sums[1]} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
