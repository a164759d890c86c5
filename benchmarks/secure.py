"""Secure sums against plain ones: `python -m benchmarks.secure`, 50 nodes in process with the ConvNet.

Rounds of the Flower app over a grid in this process, plain and then secure: a node after the other, so that the time of
a step is the sum of all nodes' and the link's. Local training is one iteration, so that what is seen is the sum. Prints
the seconds of each round, and the share of each step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.in_process_grid import InProcessGrid

from benchmarks.machine import machine
from upfl import data
from upfl.config import Config, configure
from upfl.flower import messages, server
from upfl.flower.keys import make_keys
from upfl.flower.terms import Settings


def run(config: Config, out: Path, nodes: dict[int, dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    server.describe = lambda settings: config  # type: ignore[attr-defined]
    server.train(InProcessGrid(nodes), Settings(out=out, min_nodes=2, timeout=3600, wait=60, **more))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--iterations", type=int, default=1)
    given = parser.parse_args()
    messages.POLL = 0.001
    data.load = functools.cache(data.load)  # a node has its own data, and need not cut them out of all
    print(json.dumps(machine()), flush=True)
    settings = ["partition.kind=iid", f"partition.clients={2 * given.nodes}", "clients_per_round=1.0"]
    settings += [f"iterations={given.iterations}", f"rounds={given.rounds + 1}"]
    settings += ["evaluate_every=1000000", "evaluate_clients=2"]  # the last round is evaluated, and does not count
    config = configure("fedavg", given.dataset, settings=settings)
    with tempfile.TemporaryDirectory(prefix="upfl-secure-") as name:
        folder = Path(name)
        make_keys(folder / "keys", ["localhost"], given.nodes, "127.0.0.1:1")
        plain = {100 + client: {"client": client} for client in range(given.nodes)}
        own = {"secure": True, "peers": str(folder / "keys" / "peers")}
        secure = {
            node: {**about, **own, "key": str(folder / "keys" / f"node-{about['client'] + 1}.key")}
            for node, about in plain.items()
        }
        started = time.perf_counter()
        lines = {
            "plain": run(config, folder / "plain", plain),
            "secure": run(config, folder / "secure", secure, secure=True),
        }
        seconds = {kind: [round(line["train_s"], 2) for line in found] for kind, found in lines.items()}
        steps = [line["secure"]["seconds"] for line in lines["secure"]]
        print(json.dumps({"seconds_a_round": seconds, "all": round(time.perf_counter() - started)}))
        medians = {step: statistics.median(found[step] for found in steps) for step in steps[0]}
        whole = sum(medians.values())
        print(json.dumps({step: f"{value:.2f} s, {value / whole:.0%}" for step, value in medians.items()}))
        print(json.dumps({kind: found[0]["bytes_up"] for kind, found in lines.items()}))


if __name__ == "__main__":
    main()
