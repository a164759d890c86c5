"""Options that several commands have, and what their texts say.

The command line answers at once: modules of commands import nothing that takes long. What a command needs of upfl it
imports when it is run; where a help text lists names of upfl's tables, a test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upfl.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Workers = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, help="Worker processes.", show_default="one a core")
]
Track = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Live views, written to local files: tensorboard, mlflow.")
]
MethodName = Annotated[str, typer.Argument(help="A row of the table or a training: see `upfl methods`.")]
DatasetName = Annotated[str, typer.Argument(help="A data set: see `upfl data list`.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of training.", show_default="the profile's")]
ClientsPerRound = Annotated[
    str | None, typer.Option(metavar="N", help="A number (20) or a fraction (0.4).", show_default="the profile's")
]
EvaluateEvery = Annotated[
    int | None, typer.Option(min=1, help="Rounds between evaluations.", show_default="the profile's")
]
PartitionSeed = Annotated[int | None, typer.Option(min=0, help="Who holds which samples.", show_default="0")]
PROFILE = "Scale: paper, study, lite, smoke."


def numbers(option: str, text: str | None, least: int = 0) -> list[int]:
    """The whole numbers in a comma-separated option."""
    from upfl.config import listed

    try:
        found = [int(number) for number in listed(text)]
        if any(number < least for number in found):
            raise ValueError
    except ValueError:
        example = f"{least},{least + 1},{least + 2}"
        raise ConfigError(f"{option} {text}: give whole numbers from {least}, comma-separated: {example}") from None
    return found


def participation(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        given = float(text) if "." in text else int(text)
        if given <= 0 or (isinstance(given, float) and not given <= 1):
            raise ValueError
        return given
    except ValueError:
        raise ConfigError(f"--clients-per-round {text}: give a number (20) or a fraction (0.4)") from None
