"""Lines of Python by package at two commits, with what serves features that came between them counted apart.

python -m benchmarks.lines ac082f2 HEAD
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Files (or folders) that serve one feature alone, which the first commit did not have; what files that were there grew
# by for these features is not taken out.
FEATURES = {
    "files from elsewhere, digests (17)": [
        "src/upfl/safe/",
        "src/upfl/engine/checkpoint.py",
        "src/upfl/engine/metrics.py",
        "src/upfl/engine/result.py",
        "src/upfl/data/arrays.py",
        "tests/safe/",
        "tests/fuzz/",
        "tests/test_fuzz.py",
        "tests/small_disk.py",
        "tests/sealed.py",
    ],
    "own models (19)": [
        *(
            f"src/upfl/models/{name}.py"
            for name in ("autograd", "inspection", "module", "registry", "resnet", "surgery")
        ),
        "src/upfl/model_config.py",
        "src/upfl/plugins.py",
        "src/upfl/testing/",
        *(f"tests/models/test_{name}.py" for name in ("module", "own_models", "refused_models", "statistics")),
        "tests/modules.py",
        "tests/plugin_models.py",
        "tests/test_testing.py",
    ],
    "own data (20)": [
        "src/upfl/data/own/",
        *(f"src/upfl/data/{name}.py" for name in ("cache", "draft", "forms", "given", "kept", "large", "standardize")),
        "src/upfl/models/embedding.py",
        "src/upfl/cli/own.py",
        "src/upfl/cli/partition_text.py",
        "src/upfl/report/partition_picture.py",
        "tests/data/own/",
        "tests/data/test_newcomers.py",
        "tests/data/test_standardize.py",
        "tests/helpers/own.py",
        "tests/test_own_data_page.py",
        "tests/flower/test_own_data.py",
        "tests/flower/test_forms.py",
    ],
    "closed form, join, forget (21)": [
        "src/upfl/training/closed_form.py",
        "src/upfl/models/patches.py",
        "src/upfl/models/remembered.py",
        "src/upfl/engine/members.py",
        "src/upfl/cli/members.py",
        "src/upfl/personalize/one_shot.py",
        "tests/training/test_closed_form.py",
        "tests/models/test_remembered.py",
        "tests/engine/test_members.py",
        "tests/personalize/test_one_shot.py",
    ],
    "newcomers' data checked (22)": [
        "src/upfl/personalize/likeness.py",
        "src/upfl/bundle/in_words.py",
        "tests/personalize/test_likeness.py",
        "tests/test_leakage.py",
    ],
    "held-out clients (24)": ["tests/engine/test_held_out.py"],
    "warm nodes, secure sums (25)": [
        "src/upfl/flower/secure/",
        *(f"src/upfl/flower/{name}.py" for name in ("masked", "node", "sums")),
        "tests/flower/secure/",
        "tests/flower/test_sums.py",
        "tests/helpers/secure.py",
    ],
    "documentation site (26)": ["src/upfl/cli/help.py", "tests/test_docs.py", "tests/helpers/pages.py"],
    "mutants, bits on other processors (16, 18)": [
        "tests/mutants.py",
        "tests/other_processor.py",
        "tests/shifted.py",
        "tests/test_alignment.py",
        "tests/test_structure.py",
    ],
}


def lines(commit: str) -> dict[str, int]:
    """Lines of every Python file below src and tests."""
    git = shutil.which("git") or "git"
    command = [git, "grep", "-c", "", commit, "--", "src/*.py", "tests/*.py"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = (line.rsplit(":", 2) for line in said.splitlines())
    return {path: int(count) for _, path, count in found}


def package(path: str) -> str:
    first, *parts = path.split("/")
    inner = parts[1:] if first == "src" else parts
    return "/".join([first, *([inner[0]] if len(inner) > 1 else [])])


def feature(path: str) -> str | None:
    return next((name for name, parts in FEATURES.items() if path.startswith(tuple(parts))), None)


def main(before: str, after: str) -> None:
    counts = [lines(before), lines(after)]
    by_package = [Counter[str](), Counter[str]()]
    for total, files in zip(by_package, counts, strict=True):
        for path, count in files.items():
            total[package(path)] += count
    print(f"| | {before} | {after} |\n|---|---:|---:|")
    for name in sorted(by_package[0].keys() | by_package[1].keys()):
        print(f"| {name} | {by_package[0][name] or ''} | {by_package[1][name] or ''} |")
    print("\n| files that serve a new feature alone | src | tests |\n|---|---:|---:|")
    apart: Counter[tuple[str | None, str]] = Counter()
    for path, count in counts[1].items():
        apart[feature(path), path.split("/")[0]] += count
    for name in FEATURES:
        print(f"| {name} | {apart[name, 'src'] or ''} | {apart[name, 'tests'] or ''} |")
    print(f"| **all else** | **{apart[None, 'src']}** | **{apart[None, 'tests']}** |")
    sums = [sum(count for path, count in counts[0].items() if path.startswith(place)) for place in ("src/", "tests/")]
    print(f"| before, all | {sums[0]} | {sums[1]} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
