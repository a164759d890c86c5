"""Secure sums against plain ones: `python -m benchmarks.secure`, 50 nodes in process with the ConvNet.

Rounds of the Flower app over a grid in this process, plain and then secure: a node after the other, so that the time of
a step is the sum of all nodes' and the link's. Local training is one iteration, so that what is seen is the sum. Prints
the processor seconds of each round (all is one thread of this process), and the share of each step. With --core, no
Flower and no training: the processor time of the protocol's steps, of a node and of the link, for vectors of the
ConvNet's length; masks of two nodes, all else of all.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from tests.in_process_grid import InProcessGrid

from benchmarks.machine import machine
from upfl import data
from upfl.config import Config, configure
from upfl.engine import rounds
from upfl.flower import messages, server, sums
from upfl.flower.keys import make_keys
from upfl.flower.secure import Collector, Member, Session
from upfl.flower.secure.primitives import Vector, add_mask
from upfl.flower.terms import Settings


def run(config: Config, out: Path, nodes: dict[int, dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    server.describe = lambda settings: config  # type: ignore[attr-defined]
    server._checked = lambda engine, published, private: published  # four more messages, of no interest here
    server.train(InProcessGrid(nodes), Settings(out=out, min_nodes=2, timeout=3600, wait=60, **more))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][:-1]


def core(nodes: int, size: int) -> dict[str, float]:
    """Processor seconds: of one node for each step, of the link for the unmasking and for adding up."""
    seconds: dict[str, float] = {}
    keys = {client: ec.generate_private_key(ec.SECP384R1()) for client in range(nodes)}
    peers = {client: key.public_key() for client, key in keys.items()}

    def add_all(collector: Collector, vectors: Mapping[int, Vector]) -> None:
        for client, vector in vectors.items():
            collector.add(client, vector)

    def timed(step: str, times: int, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = work()
        seconds[step] = (time.process_time() - started) / times
        return found

    def follow(size: int, masking: int) -> None:
        session = Session("run", f"train/{size}", 1, -(-2 * nodes // 3), size)
        members = {client: Member(client, keys[client], peers) for client in keys}
        collector, vector = Collector(session, members), np.zeros(size, np.uint64)
        adverts = timed("advertise", nodes, lambda: [m.advertise(session) for m in members.values()])
        adverts = collector.advertised(adverts)
        sealed = timed("share", nodes, lambda: {c: m.share(adverts) for c, m in members.items()})
        boxes, some = collector.shared(sealed), list(members.items())[:masking]
        masked = timed("mask", masking, lambda: {c: m.mask(boxes[c], vector) for c, m in some})
        timed("link: add", masking, lambda: add_all(collector, masked))
        if masking < nodes:
            return
        live = collector.masked()
        signatures = timed("agree", nodes, lambda: collector.agreed({c: m.agree(live) for c, m in members.items()}))
        shares = timed("unmask", nodes, lambda: {c: m.unmask(signatures) for c, m in members.items()})
        timed("link: restore secrets", 1, lambda: collector.unmasked(shares))

    follow(1, nodes)  # all but masks does not depend on the length
    small = dict(seconds)
    follow(size, 2)
    total = np.zeros(size, np.uint64)
    timed("link: one mask", 1, lambda: add_mask(total, bytes(32), -1))
    own = {step: small[step] for step in ("advertise", "share")} | {"mask": seconds["mask"]}
    own |= {step: small[step] for step in ("agree", "unmask")}
    link = small["link: restore secrets"] + nodes * (seconds["link: one mask"] + seconds["link: add"])
    return own | {"link, if nobody drops out": link, "one mask": seconds["link: one mask"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--core", type=int, default=0, metavar="LENGTH", help="the ConvNet's: 2156491")
    given = parser.parse_args()
    messages.POLL = 0.001
    for module in (rounds, sums):
        vars(module)["time"] = SimpleNamespace(perf_counter=time.process_time)
    data.load = functools.cache(data.load)  # a node has its own data, and need not cut them out of all
    print(json.dumps(machine()), flush=True)
    if given.core:
        print(json.dumps({step: round(value, 4) for step, value in core(given.nodes, given.core).items()}))
        return
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
        print(json.dumps({"processor_seconds_a_round": seconds, "all": round(time.perf_counter() - started)}))
        medians = {step: statistics.median(found[step] for found in steps) for step in steps[0]}
        whole = statistics.median(line["train_s"] for line in lines["secure"])
        medians["the link's unmasking, and all else"] = whole - sum(medians.values())
        print(json.dumps({step: f"{value:.2f} s, {value / whole:.0%}" for step, value in medians.items()}))
        print(json.dumps({kind: found[0]["bytes_up"] for kind, found in lines.items()}))


if __name__ == "__main__":
    main()
