"""A client more or a client less in a run that has ended: by sums, where the last layer comes from sums.

`closed-form` keeps the sums that its last layer was made of. They are integers, so a client's part can be added or
taken away, and the layer has the bits of a last pass with or without that client. Scores, and all that is fitted for
personalizers, are made anew: of a client that left nothing is used any more. But whitening and filters are those of the
run, and were fitted with the client's patches (without those of one that joins): only a training from the start differs
in that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from upfl.config import Config
from upfl.engine.folder import Progress, RunFolder
from upfl.engine.local import LOSS, train_client
from upfl.engine.rounds import Engine, Observer, one_thread
from upfl.engine.setup import Setup, assemble
from upfl.errors import BadClientError, ConfigError, RunError
from upfl.training.closed_form import ClosedForm


def without(config: Config, client: int) -> Config:
    """The same run, in which a training client holds nothing."""
    if client in config.partition.without:
        raise ConfigError(f"--client {client}: is not part of this run (partition.without); `upfl join` adds it")
    return _with(config, (*config.partition.without, client))


def with_(config: Config, client: int) -> Config:
    """The same run, in which a client that was left out takes part."""
    if client not in config.partition.without:
        raise ConfigError(
            f"--client {client}: is part of this run; only clients that were left out (partition.without) can join"
        )
    return _with(config, tuple(one for one in config.partition.without if one != client))


def _with(config: Config, gone: tuple[int, ...]) -> Config:
    return config.model_copy(update={"partition": config.partition.revised({"without": tuple(sorted(gone))})})


def forget(run: Path, client: int, out: Path, observer: Observer | None = None) -> None:
    """A run without a client's part of the last layer, in a folder of its own."""
    folder = RunFolder.open(run)
    changed = without(folder.config(), client)
    progress, setup = _ended(folder, folder.config())
    last_pass = folder.metrics()[-_training(setup).rounds_a_pass :]
    if any(left["client"] == client for line in last_pass for left in line["left_out"]):
        raise ConfigError(f"--client {client}: was left out of the run's last pass, so its sums are not in it")
    _recount(progress, setup, client, -1, changed, out, observer)


def join(run: Path, client: int, out: Path, observer: Observer | None = None) -> None:
    """A run with a client more in the last layer, in a folder of its own."""
    folder = RunFolder.open(run)
    changed = with_(folder.config(), client)
    progress, _ = _ended(folder, folder.config())
    _recount(progress, assemble(changed), client, 1, changed, out, observer)


def _ended(folder: RunFolder, config: Config) -> tuple[Progress, Setup]:
    setup = assemble(config)
    progress = folder.load(setup.device, setup.training)
    if progress is None or progress.round <= _training(setup).last_round:
        raise RunError(f"{folder.path}: has not come to its last pass yet; {folder.go_on} goes on")
    return progress, setup


def _training(setup: Setup) -> ClosedForm:
    if not isinstance(setup.training, ClosedForm):
        raise ConfigError(
            f"{setup.training.name} comes from steps, and no client's part of it can be told: train anew, with "
            "--set 'partition.without=[...]'. closed-form comes from sums"
        )
    return setup.training


def _recount(
    progress: Progress, setup: Setup, client: int, times: int, changed: Config, out: Path, observer: Observer | None
) -> None:
    """`setup` has the client's data."""
    training = _training(setup)
    if not 0 <= client < setup.clients:
        raise ConfigError(f"--client {client}: there are {setup.clients} training clients, counted from 0")
    sent = training.sent(progress.server, training.last_round)
    try:
        with one_thread():
            up, _ = train_client(training, sent, {}, setup.client(client, training.last_round))
            server = training.recounted(progress.server, up, times)
    except BadClientError as error:
        raise RunError(f"client {client}: its part does not fit the run's sums: {error}") from error
    after = assemble(changed)
    engine = Engine.local(RunFolder.create(out, changed), setup=after)
    facts = {
        "round": progress.round,
        "clients": 1,
        "left_out": [],
        "loss": float(up[LOSS]),
        "gradients": 0.0,
        "bytes_up": sum(value.nbytes for name, value in up.items() if name != LOSS),
        "bytes_down": training.bytes_down(progress.server, training.last_round),
        "joined" if times > 0 else "forgot": client,
    }
    engine.end_with(replace(progress, server=server, metrics_bytes=0, left_out=0, best={}, correct={}), facts, observer)
