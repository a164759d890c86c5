"""`upfl join`, `upfl forget`: a client more or a client less, in a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upfl.cli.console import echo
from upfl.cli.options import AsJson, Workers

Run = Annotated[Path, typer.Argument(help="A run of closed-form that has ended.", metavar="RUN")]
Client = Annotated[int, typer.Option("--client", "-c", min=0, help="The training client's number, from 0.")]
Out = Annotated[Path | None, typer.Option(help="The new run folder.", show_default="RUN-with-K or RUN-without-K")]
Anew = Annotated[
    bool, typer.Option("--from-scratch", help="Train all anew: whitening and filters, too, are then others'.")
]


def forget(
    run: Run, client: Client, anew: Anew = False, out: Out = None, workers: Workers = None, as_json: AsJson = False
) -> None:
    """Take a client's part out of a run's last layer, exactly, into a new run folder.

    The layer, the scores and all that is fitted for personalizers are then those of a last pass without the client,
    to the bit. Whitening and filters were fitted with it and stay: --from-scratch trains these anew, too.

    Example: upfl forget runs/cifar10-closed-form-label-shift-paper-s0 --client 3
    """
    _changed("without", run, client, anew, out, workers, as_json)
    if not as_json:
        kept = "" if anew else " Whitening and filters are the run's, fitted with it: --from-scratch for these."
        echo(f"Nothing here comes from client {client}'s labels or features.{kept}")
        echo(f"{run} still holds its part, and so do copies of what was exported from it.")


def join(
    run: Run, client: Client, anew: Anew = False, out: Out = None, workers: Workers = None, as_json: AsJson = False
) -> None:
    """Add a client that was left out to a run's last layer, exactly, into a new run folder.

    It is one of the partition's training clients that the run was trained without: `--set 'partition.without=[3]'`, or
    `upfl forget`. Whitening and filters stay as they are; --from-scratch trains all anew, with the client.

    Example: upfl join runs/cifar10-closed-form-label-shift-paper-s0-without-3 --client 3
    """
    _changed("with", run, client, anew, out, workers, as_json)


def _changed(
    word: str, run: Path, client: int, anew: bool, out: Path | None, workers: int | None, as_json: bool
) -> None:
    """Make the run `with` or `without` a client, and show it."""
    from upfl import api
    from upfl.cli.progress import watched
    from upfl.cli.tables import show_runs
    from upfl.engine import members
    from upfl.engine.folder import RunFolder

    target = out or run.with_name(f"{run.name}-{word}-{client}")
    config, change = (members.with_, members.join) if word == "with" else (members.without, members.forget)
    with watched(target, f"{run.name} {word} client {client}", as_json) as observer:
        if anew:
            api.train(config(RunFolder.open(run).config(), client), target, workers=workers, observer=observer)
        else:
            change(run, client, target, observer)
    show_runs([api.Run(target)], as_json)
    if not as_json:
        echo(f"run folder: {target}")
