"""Step 6 of docs/deploy.md on this machine, timed by message: `python -m benchmarks.deployment`.

A SuperLink and two SuperNodes as processes, with TLS and authenticated nodes; each node has digits of its own in a
file. Prints the run's log lines that say how long each exchange with the nodes took, and how long the run took.
With --secure, sums are secure. With --rejoin N, no run: node 1 is killed N times and started every five seconds, as the
unit of docs/deploy.md has it, until the link takes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from upfl import data
from upfl.data.forms import Pixels
from upfl.flower.keys import make_keys

ROOT, BIN = Path(__file__).parents[1], Path(sys.executable).parent
APP = 'method="fedavg" set="rounds=2 iterations=100 evaluate_every=2" min-nodes=2'
SAMPLES = 300  # on each node
RESTART = 5.0  # seconds after which systemd starts a node again


class Deployment:
    """A SuperLink and SuperNodes, each with a home and a log of its own."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.keys, self.nodes, self.port = folder, folder / "keys", nodes, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        make_keys(self.keys, ["localhost", "127.0.0.1"], nodes, f"127.0.0.1:{self.port}")

    def environment(self, home: Path) -> dict[str, str]:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
        return os.environ | quiet | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def start(self, name: str, *command: str) -> None:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=self.environment(home)
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def link(self) -> None:
        tls = {"ca-certfile": "ca.crt", "certfile": "superlink.pem", "keyfile": "superlink.key"}
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        certificates = [f"--ssl-{what}={self.keys / file}" for what, file in tls.items()]
        self.start("link", str(BIN / "flower-superlink"), *certificates, *where, "--enable-supernode-auth")
        self.wait(lambda: "Application startup complete" in self.log("link").read_text())
        for number in range(1, self.nodes + 1):
            self.flwr("supernode", "register", str(self.keys / f"node-{number}.pub"), "upfl")

    def node(self, number: int, config: str, warm: bool) -> None:
        program = [sys.executable, "-m", "upfl.flower.node"] if warm else [str(BIN / "flower-supernode")]
        there = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(self.keys / "ca.crt")]
        own = ["--auth-supernode-private-key", str(self.keys / f"node-{number}.key"), "--port", str(free_port())]
        self.start(f"node-{number}", *program, *there, *own, "--node-config", config)

    def flwr(self, *arguments: str) -> str:
        command = [str(BIN / "flwr"), *arguments]
        return subprocess.run(
            command, env=self.environment(self.keys), capture_output=True, text=True, check=True
        ).stdout

    def wait(self, until: Callable[[], bool], limit: float = 600) -> None:
        end = time.monotonic() + limit
        while not until():
            if time.monotonic() > end:
                sys.exit(f"waited in vain; the logs are in {self.folder}")
            time.sleep(0.1)

    def activated(self) -> int:
        return self.log("link").read_text().count("Activated node_id")

    def run(self, config: str, out: Path) -> tuple[float, str]:
        """Run the app until its bundle is there; returns the seconds, from `flwr run` on, and the run's log."""
        started = time.monotonic()
        about = self.flwr("run", str(ROOT / "flower"), "upfl", "-c", f'{config} out="{out}"', "--format", "json")
        self.wait(lambda: (out / "bundle").exists(), 3600)
        seconds = time.monotonic() - started
        time.sleep(5)  # until the log is with the link
        return seconds, self.flwr("log", str(json.loads(about)["run-id"]), "upfl", "--show")

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_data(folder: Path, nodes: int) -> Path:
    """Digits of each node's own, and the task that they belong to; returns its file."""
    source, order = data.load("digits"), np.random.default_rng(0)
    for node in range(nodes):
        chosen = order.choice(len(source.labels), SAMPLES, replace=False)
        np.savez(folder / f"mine-{node}.npz", x=source.x[chosen], y=source.labels[chosen])
    task, form = folder / "task.toml", source.form
    assert isinstance(form, Pixels)
    task.write_text(
        f'name = "my digits"\nclasses = {json.dumps(source.class_names)}\nclients = {nodes}\n'
        f"[input]\nshape = [1, 8, 8]\nscale = {form.scale}\nmean = {list(form.mean)}\nstd = {list(form.std)}\n"
    )
    return task


def rejoin(deployment: Deployment, start: Callable[[], None]) -> float:
    """Seconds from a node's crash until the link takes it again, where the system starts it again and again."""
    before, began = deployment.activated(), time.monotonic()
    deployment.processes["node-1"].kill()
    deployment.processes["node-1"].wait()
    while deployment.activated() == before:
        time.sleep(RESTART)
        start()
        deployment.wait(lambda: deployment.activated() > before or deployment.processes["node-1"].poll() is not None)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="Flower's own way: a new process for every message")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--score", default="label-shift")
    parser.add_argument("--rejoin", type=int, default=0, metavar="N")
    given = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory(prefix="upfl-deployment-") as name:
        folder = Path(name)
        task, deployment = own_data(folder, given.nodes), Deployment(folder, given.nodes)
        keys = deployment.keys

        def start(number: int) -> None:
            config = f'client={number - 1} data="{folder / f"mine-{number - 1}.npz"}"'
            if given.secure:
                config += f' secure=true key="{keys / f"node-{number}.key"}" peers="{keys / "peers"}"'
            deployment.node(number, config, not given.cold)

        try:
            deployment.link()
            for number in range(1, given.nodes + 1):
                start(number)
            deployment.wait(lambda: deployment.activated() == given.nodes)
            for _ in range(given.rejoin):
                print(f"back after {rejoin(deployment, lambda: start(1)):.0f} s", flush=True)
            if given.rejoin:
                return
            secure = " secure=true" if given.secure else ""
            about = f'{APP} score="{given.score}" task="{task}"{secure}'
            seconds, said = deployment.run(about, folder / "run")
            for line in said.splitlines():
                if found := re.search(r"[^\x1b:]*(: \w+)?: \d+ of \d+ replies in .*", line):
                    print(found[0].strip(), flush=True)
            print(f"the run: {seconds:.0f} s", flush=True)
            print((folder / "run" / "metrics.jsonl").read_text())
        finally:
            deployment.stop()


if __name__ == "__main__":
    main()
