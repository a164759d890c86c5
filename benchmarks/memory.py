"""Memory of a training with several workers: `python -m benchmarks.memory --dataset cifar10`.

Trains a few clients and sums the proportional set sizes (PSS: a page shared by n processes counts 1/n in each) of the
process and its workers, sampled while they run. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--method", default="fedtta")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--workers", type=int, help="by default as `upfl train` chooses")
    parser.add_argument("--clients", type=int, default=10, help="clients a round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "upfl", "train", arguments.method, arguments.dataset, "--rounds", "1"]
        command += ["--clients-per-round", str(arguments.clients)]
        command += ["--workers", str(arguments.workers)] if arguments.workers else []
        command += ["--set", "evaluate_clients=6", "--out", f"{folder}/run", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak, processes = 0, 0
        while process.poll() is None:
            family = [process.pid, *descendants(process.pid)]
            peak, processes = max(peak, sum(proportional(pid) for pid in family)), max(processes, len(family))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(process.returncode)
    print(
        f"{arguments.method} on {arguments.dataset}, {processes} process(es): peak of summed PSS {peak / 2**30:.2f} GiB"
    )


def descendants(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in path.read_text().split()] if path.exists() else []
    return children + [grandchild for child in children for grandchild in descendants(child)]


def proportional(pid: int, kind: str = "Pss") -> int:
    """Bytes of the proportional set size; `Pss_Anon` without what is mapped from files, which the system may drop."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended
    return 0


if __name__ == "__main__":
    main()
