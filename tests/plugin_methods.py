"""Methods of one's own for tests, found through UPFL_PLUGINS: a training that counts, and what goes wrong when told to.

Below them, what tests of whole runs share: small runs, what is to be equal of two runs, processes that die.

`UPFL_TEST_FAULTS` is a list such as `loss:2:3 kill:1:*:1`: what, in which round (from 0), for which client, in which
worker (`*`: any). It is read when it is needed, so that a resumed run can be spared what stopped the first.
"""

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from upfl import api
from upfl.cli import main
from upfl.config import Config, configure
from upfl.contract import Batch, Client, Personalized, Published, Total, Unlabelled
from upfl.methods import PERSONALIZERS, TRAININGS, register, resolve
from upfl.personalize.nothing import Nothing
from upfl.state import State, select
from upfl.training.fedavg import FedAvg

FAULTS = "UPFL_TEST_FAULTS"
SLOTS = 64  # client c has slot c mod 64, so that the server's state does not grow with the clients


def told(what: str, round: int, client: int | None = None) -> bool:
    """Whether `what` is to go wrong here and now."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for fault in os.environ.get(FAULTS, "").split():
        kind, *places = fault.split(":")
        here = (round, client, rank)
        if kind == what and all(p in ("*", str(h)) for p, h in zip(places, here, strict=False)):
            return True
    return False


def fail_if_told(what: str, round: int, client: int | None = None) -> None:
    if told(f"{what}-kill", round, client):
        os.kill(os.getpid(), signal.SIGKILL)
    if told(f"{what}-raise", round, client):
        raise ValueError(f"told to fail at {what} in round {round}")
    if told(f"{what}-unpickle", round, client):
        pickle.loads(pickle.dumps(Path()))


class Counting(FedAvg):
    """FedAvg whose clients remember how often they took part, and send it up.

    The server keeps, for each slot, how many updates came (`took`) and the sum of what they said (`said`): a client
    that took part n times must have said 1 + 2 + ... + n. Memory that counts twice, or is lost, breaks this. A client
    also remembers how its own model drifted and adds that to its update, so a wrong memory shows in the model, too.
    """

    name = "counting"
    title = "Counting"
    remembers = True

    def init(self, generator: torch.Generator) -> State:
        zeros = {name: torch.zeros(SLOTS, dtype=torch.int64) for name in ("took", "said")}
        return super().init(generator) | zeros

    def memory(self, client: Client) -> State:
        return {"count": torch.zeros((), dtype=torch.int64), "drift": torch.zeros(())}

    def begin(self, server: State, memory: State, client: Client) -> State:
        fail_if_told("begin", client.round, client.id)
        model = {name: value for name, value in server.items() if name.startswith("psi.")}
        own = {name: value.clone() for name, value in memory.items()}
        nan = {"nan": torch.tensor(float("nan") if told("loss", client.round, client.id) else 0.0)}
        return super().begin(model, {}, client) | own | nan

    def step(self, carry: State, batch: Batch, round: int) -> tuple[State, Tensor]:
        carry, loss = super().step(carry, batch, round)
        return carry, loss + carry["nan"]

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        fail_if_told("finish", client.round, client.id)
        model = {name: value for name, value in server.items() if name.startswith("psi.")}
        up, _ = super().finish(model, carry, client)
        first = min(model)
        up[first] = up[first] + 0.01 * carry["drift"]
        for what, value in (("inf", float("inf")), ("nan", float("nan")), ("huge", 1e30)):
            if told(what, client.round, client.id):
                up[first] = up[first].flatten().index_fill(0, torch.tensor([0]), value).view_as(up[first])
        count = carry["count"] + 1
        for name, value in (("took", 1), ("said", int(count))):
            up[name] = torch.zeros(SLOTS, dtype=torch.int64).index_fill(0, torch.tensor([client.id % SLOTS]), value)
        return up, {"count": count, "drift": 0.5 * carry["drift"] + up[first].mean()}

    def aggregate(self, server: State, total: Total, round: int) -> State:
        fail_if_told("aggregate", round)
        model = {name: value for name, value in server.items() if name.startswith("psi.")}
        return super().aggregate(model, total, round) | {name: server[name] + total[name] for name in ("took", "said")}

    def publish(self, server: State) -> State:
        return {name: value for name, value in server.items() if name.startswith("psi.")}

    def start(self, published: Published, client: Unlabelled, memory: State | None) -> State:
        params = self.model.layout(select(published.state, "psi"))
        if memory is not None:  # what a training client remembers shows in its validation
            params = params | {name: value + 0.01 * memory["drift"] for name, value in params.items()}
        return params


class Fragile(Nothing):
    """No personalization, and an end to it when told so."""

    name = "fragile"
    title = "Fragile"

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        fail_if_told("score", published.round - 1, client.id)
        return super().personalize(published, client, memory)


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """The methods above in the table, for a while: other tests take every method that they find there."""
    if Counting.name in TRAININGS:  # inside another of these
        yield
        return
    register(training=Counting, personalizer=Fragile)
    yield
    del TRAININGS[Counting.name], PERSONALIZERS[Fragile.name]


WORKER = "upfl.engine.worker" in sys.orig_argv  # which may know test modules, too, and import pytest with them
if WORKER or "pytest" not in sys.modules:  # a plugin of a process of its own
    register(training=Counting, personalizer=Fragile)
if WORKER:
    fail_if_told("import", 0)


# Small runs

ROOT = Path(__file__).parent.parent
PLUGIN = "tests.plugin_methods"
SMALL = ("iterations=2", "partition.clients=16", "evaluate_clients=6", "partition.held_out=0")


def small(method: str = "counting", *settings: str, **options: Any) -> Config:
    """A run of a second: 8 training clients, 3 of them a round, 4 rounds, or as many as it takes to ask all in turn."""
    asked = scale(method) | options
    return configure(method, "digits", profile="smoke", settings=(*small_settings(method), *settings), **asked)


def small_settings(method: str) -> tuple[str, ...]:
    return SMALL if TRAININGS[resolve(method)[0]].refuses_models else (*SMALL, "model.hidden=16")


def scale(method: str) -> dict[str, int]:
    limited: dict[str, int] = {} if TRAININGS[resolve(method)[0]].in_turn else {"rounds": 4, "evaluate_every": 2}
    return {"clients_per_round": 3, **limited}


def arguments(method: str = "counting", *more: str) -> list[str]:
    """The command line of the same run."""
    settings = [part for setting in small_settings(method) for part in ("--set", setting)]
    asked = [part for key, value in scale(method).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return ["train", method, "digits", "--profile", "smoke", *settings, *asked, *more]


def lines(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, as they stand in its file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def result(run: Path) -> dict[str, Any]:
    value = json.loads((run / "result.json").read_text())
    assert isinstance(value, dict)
    return value


def timeless(value: Any) -> Any:
    """A value without what may differ: the fields whose names end in `_s`."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if not key.endswith("_s")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The content of a safetensors file, comparable bit for bit."""
    return {
        name: (str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, value in load_file(file).items()
    }


def assert_same(run: Path, reference: Path) -> None:
    """All that a finished run leaves behind is as the other run's, apart from times and the place."""
    assert [timeless(line) for line in lines(run)] == [timeless(line) for line in lines(reference)]
    assert result(run) == result(reference)
    assert (run / "config.toml").read_text() == (reference / "config.toml").read_text()
    found, expected = ({str(p.relative_to(r)) for p in r.rglob("*") if p.is_file()} for r in (run, reference))
    assert found == expected, "files left over or lost"
    for name in sorted(found):
        if name.endswith(".safetensors"):
            ours, theirs = tensors(run / name), tensors(reference / name)
            assert ours.keys() == theirs.keys()
            assert [key for key in ours if ours[key] != theirs[key]] == [], f"{name}: bits differ"


def server(run: Path) -> State:
    return select(load_file(run / "checkpoint.safetensors"), "server")


def assert_memory_counted_once(run: Path) -> None:
    """Every client that took part n times said 1 + 2 + ... + n: no memory counted twice, none was lost."""
    state = server(run)
    took = state["took"]
    assert int(took.sum()) == sum(line["clients"] for line in lines(run))
    assert torch.equal(state["said"], took * (took + 1) // 2)


# The command line, in this process


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def ended(self, code: int = 0, *words: str) -> Self:
        """As it should have: with this exit code, and these words among those on standard error."""
        assert self.code == code, self.err
        assert [word for word in words if word not in self.err] == [], self.err
        return self


def upfl(*arguments: str | Path) -> Said:
    """Run a command; whatever else than an exit leaves `main` comes through, as a person would see a traceback."""
    out, err, term = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    code: Any = 0
    try:
        with (
            mock.patch.object(sys, "argv", ["upfl", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        signal.signal(signal.SIGTERM, term)
    assert isinstance(code, int), f"a message for an exit code: {code}"
    assert "Traceback" not in err.getvalue() or "last words" in err.getvalue()
    return Said(code, out.getvalue(), err.getvalue())


# Processes that die

MARK = "UPFL_TEST_MARK"


def marked(mark: str) -> dict[int, list[str]]:
    """The processes (and their commands) that were started with a mark in their environment."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        try:
            ours = process.name.isdigit() and wanted in (process / "environ").read_bytes().split(b"\0")
            if ours and " Z " not in (process / "stat").read_text().rpartition(")")[2][:3]:
                found[int(process.name)] = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether a condition comes true in time; `seconds` only bounds how long a failing test takes."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def start_fork_server() -> None:
    """Start the process that others are forked from, once, before a test changes its environment."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["upfl.cli", PLUGIN])
    resource_tracker.ensure_running()
    forkserver.ensure_running()


class Child:
    """`train` or `resume` in a process of its own, forked from one that has imported everything already.

    In it, unpickling anything that names a class is an error.
    """

    def __init__(
        self,
        run: Path,
        config: Config | None = None,
        *,
        workers: int = 1,
        environment: Mapping[str, str] | None = None,
        die_at: int = 0,
        torn: bool = False,
    ) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._receive, send = context.Pipe(duplex=False)
        arguments = (run, config, workers, dict(environment or {}), die_at, torn, send)
        self.process = context.Process(target=_at_work, args=arguments)
        self.process.start()
        send.close()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        self.process.join(240)
        assert self.process.exitcode is not None, "the process hangs"
        return self.process.exitcode

    def operations(self) -> int:
        """How many operations on files of the run folder it did; for a process that did not die."""
        assert self.end() == 0
        return int(self._receive.recv())


def _at_work(
    run: Path, config: Config | None, workers: int, environment: dict[str, str], die_at: int, torn: bool, send: Any
) -> None:
    os.environ.update(environment)
    tempfile.tempdir = environment.get("TMPDIR")
    torch.set_num_threads(1)
    done = _die_at_operation(run, die_at, torn)
    with entered():
        if config is not None:
            api.train(config, run, workers=workers)
        else:
            api.resume(run, workers=workers)
    send.send(done[0])


def _die_at_operation(run: Path, number: int, torn: bool) -> list[int]:
    """Have this process kill itself just before its n-th operation on a file or folder of the run.

    `torn` also cuts a file that is not yet flushed short, as a power cut may.
    """
    done, at_rest = [0], [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise RuntimeError(f"unpickled {arguments}")
        if event != "upfl.folder" or not at_rest[0] or not Path(arguments[1]).is_relative_to(run):
            return
        done[0] += 1
        if done[0] == number:
            at_rest[0] = False
            operation, path = arguments[0], Path(arguments[1])
            if torn and operation == "flush":
                written = path.with_name(path.name + ".part")
                written = written if written.is_file() else path
                os.truncate(written, written.stat().st_size - 5)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return done
