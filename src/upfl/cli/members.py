"""`upfl join`, `upfl forget`: a client more or a client less, in a run that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upfl.cli.console import echo
from upfl.cli.options import AsJson, Workers

if TYPE_CHECKING:
    from upfl.engine.rounds import Observer

Run = Annotated[Path, typer.Argument(help="A run of closed-form that has ended.", metavar="RUN")]
Client = Annotated[int, typer.Option("--client", "-c", min=0, help="The training client's number, from 0.")]
Out = Annotated[Path | None, typer.Option(help="The new run folder.", show_default="RUN-with-K or RUN-without-K")]
FromScratch = Annotated[
    bool, typer.Option("--from-scratch", help="Train all anew: whitening and filters, too, are then others'.")
]


def forget(
    run: Run,
    client: Client,
    from_scratch: FromScratch = False,
    out: Out = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Take a client's part out of a run's last layer, exactly, into a new run folder.

    The layer, the scores and all that is fitted for personalizers are then those of a last pass without the client,
    to the bit. Whitening and filters were fitted with it and stay: --from-scratch trains these anew, too.

    Example: upfl forget runs/cifar10-closed-form-label-shift-paper-s0 --client 3
    """
    from upfl import api
    from upfl.engine import members
    from upfl.engine.folder import RunFolder

    with _new_run(run, "without", client, out, as_json) as (target, observer):
        if from_scratch:
            changed = members.without(RunFolder.open(run).config(), client)
            api.train(changed, target, workers=workers, observer=observer)
        else:
            members.forget(run, client, target, observer)
    if not as_json:
        kept = "" if from_scratch else " Whitening and filters are the run's, fitted with it: --from-scratch for these."
        echo(f"Nothing here comes from client {client}'s labels or features.{kept}")
        echo(f"{run} still holds its part, and so do copies of what was exported from it.")


def join(
    run: Run,
    client: Client,
    from_scratch: FromScratch = False,
    out: Out = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Add a client that was left out to a run's last layer, exactly, into a new run folder.

    It is one of the partition's training clients that the run was trained without: `--set 'partition.without=[3]'`, or
    `upfl forget`. Whitening and filters stay as they are; --from-scratch trains all anew, with the client.

    Example: upfl join runs/cifar10-closed-form-label-shift-paper-s0-without-3 --client 3
    """
    from upfl import api
    from upfl.engine import members
    from upfl.engine.folder import RunFolder

    with _new_run(run, "with", client, out, as_json) as (target, observer):
        if from_scratch:
            changed = members.with_(RunFolder.open(run).config(), client)
            api.train(changed, target, workers=workers, observer=observer)
        else:
            members.join(run, client, target, observer)


@contextmanager
def _new_run(
    run: Path, word: str, client: int, out: Path | None, as_json: bool
) -> Iterator[tuple[Path, Observer | None]]:
    """A folder to train the changed run into, and who watches; the run is shown afterwards."""
    from upfl import api
    from upfl.cli.progress import watched
    from upfl.cli.tables import show_runs

    target = out or run.with_name(f"{run.name}-{word}-{client}")
    with watched(target, f"{run.name} {word} client {client}", as_json) as observer:
        yield target, observer
    show_runs([api.Run(target)], as_json)
    if not as_json:
        echo(f"run folder: {target}")
