"""A real federation on this machine: a SuperLink and SuperNodes as processes, TLS, authentication, a 10 MB model.

Two nodes train, a third is killed in a round, a fourth joins after training and personalizes, a fifth has a key that
nobody registered. One test, because starting all this is most of its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from tests.plugin_methods import ROOT, lines, result
from upfl import data
from upfl.bundle import Bundle, PersonalModel
from upfl.flower.keys import make_keys

BIN = Path(sys.executable).parent
RUN = (
    'method="tent" profile="smoke" set="rounds=2 evaluate_every=2 clients_per_round=1.0 iterations=20 '
    'model.hidden=1600 partition.kind=iid partition.clients=6"'
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are followed through /proc")


class Deployment:
    """Processes of Flower, each with a home and a log of its own; all that they start is remembered."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.port = folder, folder / "keys", free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: set[tuple[int, str]] = set()
        make_keys(self.keys, ["localhost", "127.0.0.1"], 5, f"127.0.0.1:{self.port}")

    def environment(self, home: Path) -> dict[str, str]:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        # Flower starts its helpers by name: they must be found on the path.
        found = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
        compiled = {"UPFL_NUMBA": "1" if home.name == "home-node-1" else "0"}  # which takes a node four seconds
        return os.environ | quiet | found | compiled | {"FLWR_HOME": str(home)}

    def start(self, name: str, *command: str) -> None:
        home = self.folder / f"home-{name}"
        home.mkdir()
        with self.log(name).open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment(home),
                cwd=self.folder,
            )

    def superlink(self) -> None:
        keys = self.keys
        tls = [f"--ssl-{what}={keys / file}" for what, file in TLS.items()]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("link", "flower-superlink", *tls, *where, "--enable-supernode-auth")
        self.wait(lambda: "Application startup complete" in self.log("link").read_text(), "the SuperLink starts")

    def node(self, number: int, config: str) -> None:
        keys, name = self.keys, f"node-{number}"
        there = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(keys / "ca.crt")]
        own = ["--auth-supernode-private-key", str(keys / f"{name}.key"), "--port", str(free_port())]
        self.start(name, "python", "-m", "upfl.flower.node", *there, *own, "--node-config", config)

    def register(self, *nodes: int) -> None:
        """All in one process: each would take seconds of a processor to start."""
        keys = [str(self.keys / f"node-{number}.pub") for number in nodes]
        each = "app(['supernode', 'register', key, 'upfl'], standalone_mode=False)"
        self.command("-c", f"from flwr.cli.app import app\nfor key in {keys}: {each}", program=sys.executable)

    def command(self, *arguments: str, program: str = str(BIN / "flwr")) -> str:
        """What a command of `flwr` says."""
        done = subprocess.run(
            [program, *arguments],
            env=self.environment(self.keys),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def flwr(self, *arguments: str) -> dict[str, Any]:
        answer = json.loads(self.command(*arguments, "--format", "json"))
        assert isinstance(answer, dict)
        return answer

    def run(self, config: str) -> str:
        return str(self.flwr("run", str(ROOT / "flower"), "upfl", "-c", config)["run-id"])

    def finish(self, run: str, last: Path) -> None:
        """Wait for a run's end, near once its last file is there: asking Flower takes seconds of a processor."""
        status, asked = "", time.monotonic()

        def ended() -> bool:
            nonlocal status, asked
            if not last.exists() and time.monotonic() < asked + 30:
                return False
            (about,) = self.flwr("list", "upfl", "--run-id", run)["runs"]
            status, asked = str(about["status"]), time.monotonic()
            return status.startswith("finished")

        self.wait(ended, f"run {run} ends", every=1)
        assert status == "finished:completed", f"{status}\n{self.log('link').read_text()[-5000:]}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait(self, until: Callable[[], bool], what: str, every: float = 0.3) -> None:
        end = time.monotonic() + 600
        while not until():
            self.remember()
            if time.monotonic() > end or self.processes["link"].poll() is not None:
                logs = "\n".join(f"--- {name}\n{self.log(name).read_text()[-3000:]}" for name in self.processes)
                pytest.fail(f"waited in vain: {what}\n{logs}")
            time.sleep(every)

    def remember(self) -> None:
        children: dict[int, list[int]] = {}
        for pid, parent, _ in processes():
            children.setdefault(parent, []).append(pid)
        found = [process.pid for process in self.processes.values()]
        for pid in found:
            found += children.get(pid, [])
        self.started |= {(pid, born) for pid, _, born in processes() if pid in found}

    def alive(self) -> list[int]:
        return [pid for pid, _, born in processes() if (pid, born) in self.started]

    def stop(self) -> list[int]:
        """End all by SIGTERM, nodes first; returns what was still there after a while, and is then killed."""
        self.remember()
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + 60
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


TLS = {"ca-certfile": "ca.crt", "certfile": "superlink.pem", "keyfile": "superlink.key"}


def processes() -> list[tuple[int, int, str]]:
    """Every process that is not a zombie: its number, its parent's, and when it was born."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found.append((int(path.parent.name), int(fields[1]), fields[19]))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployed = Deployment(tmp_path)
    try:
        yield deployed
    finally:
        left = deployed.stop()
    assert left == [], "processes were left behind"


@pytest.mark.timeout(1500)
def test_a_federation_trains_and_a_newcomer_personalizes(deployment: Deployment, tmp_path: Path) -> None:
    source = data.load("digits")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(source.labels))
    np.savez(tmp_path / "hospital.npz", x=source.x[order[:300]], y=source.labels[order[:300]])
    mine = order[600:][np.isin(source.labels[order[600:]], [3, 8])]
    np.save(tmp_path / "mine.npy", source.x[mine])

    deployment.superlink()
    deployment.register(1, 2, 3, 4)
    deployment.node(1, f'client=0 data="{tmp_path / "hospital.npz"}"')
    deployment.node(2, "client=1")
    deployment.node(3, "client=2")
    deployment.node(5, "client=2")
    link = deployment.log("link")
    deployment.wait(lambda: link.read_text().count("Activated node_id") == 3, "three nodes connect")

    # A key that was not registered is refused, and its node ends.
    deployment.wait(lambda: deployment.processes["node-5"].poll() is not None, "the stranger is refused")
    assert deployment.processes["node-5"].returncode != 0
    assert "Failed to activate SuperNode" in deployment.log("node-5").read_text()
    assert "No SuperNode found with the given public key" in link.read_text()

    out = tmp_path / "run"
    run = deployment.run(f'{RUN} out="{out}" min-nodes=2')
    log = deployment.log("node-3")
    deployment.wait(lambda: "Receiving: train message" in log.read_text(), "node 3 is asked to train", every=0.05)
    deployment.processes["node-3"].kill()
    deployment.finish(run, out / "bundle" / "manifest.json")

    # The round went on without the node that was killed, which is named; so did the next.
    first, second = lines(out)
    assert [entry["client"] for entry in first["left_out"]] == [2]
    assert (first["clients"], second["clients"]) == (2, 2)
    assert second["left_out"] == []
    assert second["absent"] == [2]
    assert result(out)["rows"][0]["validation"] > 50
    # Nodes answered by the upfl that is installed: they did not even unpack what the link sent.
    assert list(tmp_path.glob("home-node-*"))
    assert not list(tmp_path.glob("home-node-*/apps/*"))
    weights = out / "bundle" / "weights.safetensors"
    assert weights.stat().st_size > 10_000_000

    # A newcomer that was not there joins, and its accuracy rises; the server hears of nothing but a count.
    deployment.node(4, f'data="{tmp_path / "mine.npy"}" out="{tmp_path / "me"}"')
    deployment.wait(lambda: link.read_text().count("Activated node_id") == 4, "the newcomer connects")
    run = deployment.run(f'{RUN} mode="personalize" bundle="{out / "bundle"}" min-nodes=1')
    deployment.finish(run, tmp_path / "me" / "manifest.json")
    labels = np.array(source.class_names)[source.labels[mine]]
    before = Bundle.load(out / "bundle").personalize(source.x[mine]).personalized
    assert before is not None
    accuracy_before = float((before.before.argmax(1).numpy() == source.labels[mine]).mean())
    accuracy = float((PersonalModel.load(tmp_path / "me").predict(source.x[mine]) == labels).mean())
    assert accuracy > accuracy_before + 0.02
    told = [line for line in deployment.command("log", run, "upfl", "--show").splitlines() if '"samples"' in line]
    (newcomer,) = [json.loads(line[line.index("{") : line.index("}") + 1]) for line in told]
    assert newcomer.keys() == {"node", "samples"}
    assert newcomer["samples"] == len(mine)
