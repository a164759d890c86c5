"""Errors for names that do not exist: they offer the nearest ones that do."""

from collections.abc import Iterable
from difflib import get_close_matches

from upfl.errors import ConfigError


def unknown(kind: str, name: str, valid: Iterable[str], hint: str = "") -> ConfigError:
    """The error to raise for an unknown `name`: "unknown data set 'minst'; did you mean mnist? (valid: ...)"."""
    names = list(valid)
    nearest = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    question = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return ConfigError(f"unknown {kind} {name!r}{question} (valid: {', '.join(names)}){f'. {hint}' if hint else ''}")
