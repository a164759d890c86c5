"""A node that stays warm: `python -m upfl.flower.node OPTIONS`, with the options of `flower-supernode`.

Flower starts a new process for every message, which imports PyTorch first, and a SuperNode that had nothing to do looks
for a message every three seconds. (Flower's own warm executors are for other kinds of apps, on Kubernetes.) Here one
process has all imported and forks for each message:

    this process ---forks--> flower-supernode --isolation process      talks to the link
          |                       |  a task, over loopback, for whoever knows this start's secret
          '---forks for each <----'
                 message --> Flower's own `run_clientapp`, over upfl's own ClientApp

So a message still has a process of its own: what it leaves behind ends with it, and a crash costs the node that message
alone. **Such a node executes no code that the link sends**: whatever app a run has, what answers is the ClientApp of
the upfl that is installed here. When the SuperNode ends, this process ends with its status; when this one is told to
end, all end.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.runtime import run_clientapp

from upfl.errors import ConfigError, UpflError
from upfl.flower.client import app  # with all that a message needs: imported once
from upfl.models import compiled

LOOK = 0.5  # seconds between a SuperNode's looks for a message, in place of Flower's three
TASKS = 0.05  # seconds between looks for what the SuperNode has received
PR_SET_PDEATHSIG = 1
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def main() -> NoReturn:
    given = _parse_args_run_supernode().parse_args()
    try:
        if given.ssl_certfile or given.superexec_auth_secret_file or given.isolation != "subprocess":
            raise ConfigError("a warm node has --isolation, the SuperExec secret and its loopback connection to itself")
        sys.exit(run(f"{given.host}:{given.port}", sys.argv[1:]))
    except UpflError as error:
        sys.exit(f"error: {error}")


def run(address: str, options: list[str]) -> int:
    """Serve messages until the SuperNode ends; returns its status."""
    secret = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(prefix="upfl-node-") as folder:  # which this user alone can read
        file = Path(folder, "secret")
        file.write_bytes(secret)
        mode = ["--isolation", "process", "--superexec-auth-secret-file", str(file)]
        supernode = forked(partial(_supernode, [*options, *mode], os.getpid()))
        running = {supernode}

        def end(number: int, frame: FrameType | None) -> None:
            for process in running:
                os.kill(process, signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if compiled.installed():  # once, not for each message
            compiled.loaded("winners").warm()
            if compiled.skipping_outruns_mkl() and compiled.torch_library():
                compiled.loaded("rows").register()
            if compiled.summing_outruns_others():
                compiled.loaded("dots").register()
        return _serve(address, secret, supernode, running)


def _serve(address: str, secret: bytes, supernode: int, running: set[int]) -> int:
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=frozenset({ACQUIRE})),
        ],
    )
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while True:
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            if ended[0] == supernode:
                return os.waitstatus_to_exitcode(ended[1]) % 256
        try:
            found = client.AcquireTask(wanted)
        except httpx.HTTPError:  # it is starting, or ending
            time.sleep(10 * TASKS)
            continue
        if found.HasField("task") and found.token:
            running.add(forked(partial(_answer, address, found.token, os.getpid())))
        time.sleep(TASKS)


def _answer(address: str, token: str, parent: int) -> None:
    """Answer one message by the app that is installed; the run's own files are neither unpacked nor loaded."""
    run_clientapp.install_from_fab = lambda *fab, **how: None  # type: ignore[assignment, attr-defined]
    run_clientapp.get_load_client_app_fn = lambda **what: lambda *names: app  # type: ignore[attr-defined]
    run_clientapp.run_clientapp(address, token, insecure=True, parent_pid=parent)


def _supernode(options: list[str], parent: int) -> None:
    """Flower's SuperNode, with shorter waits."""
    start_parent_process_monitor(parent)
    sys.argv = ["flower-supernode", *options]
    start_client_internal.time = _Impatient()  # type: ignore[assignment, attr-defined]
    flower_supernode()


class _Impatient:
    """The module `time`, as the SuperNode sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, LOOK))


def forked(work: Callable[[], Any]) -> int:
    """Do something in a process of its own that has all of this one's modules, and is killed when this one is."""
    if process := os.fork():
        return process
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
