"""`python -m tests.fuzz --cases 20000`"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from tests.fuzz.families import FAMILIES
from tests.fuzz.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage bundles, run folders, arrays and messages by a seed.")
    parser.add_argument("--cases", type=int, default=20_000, help="over all families")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families = given.family or list(FAMILIES)
    for family in families:
        with tempfile.TemporaryDirectory(prefix="upfl-fuzz-") as folder:
            print(json.dumps(run(family, given.cases // len(families), given.seed, Path(folder))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
