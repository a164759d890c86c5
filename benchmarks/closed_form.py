"""The tables of results/closed-form.md from scored runs: `python -m benchmarks.closed_form NAME=FILE ...`.

`upfl score RUN --score none,calibrated,label-shift,auto --oracles oracle-prior --inductive -o FILE` writes the files.
*Later*: personalized on one half of a newcomer's samples, scored on the other. *Bound*: with the true mix of classes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HEAD = ("data", "validation", "closed form", "with label shift", "validation", "later", "bound", "auto")


def line(name: str, file: Path) -> str:
    rows = {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    plain, shifted = rows["none"], rows["label-shift"]
    figures = (
        *(plain["validation"], plain["test"], shifted["test"], shifted["validation"], shifted["inductive"]),
        *(rows["oracle-prior"]["test"], rows["auto"]["test"]),
    )
    return f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}")
    for name, _, file in (given.partition("=") for given in parser.parse_args().files):
        print(line(name, Path(file)))


if __name__ == "__main__":
    main()
