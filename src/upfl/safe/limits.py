"""How much memory what comes from elsewhere may take. Each limit has a name in the messages, by which a user raises it.

UPFL_LIMIT_UNPACKED=2GiB upfl personalize bundle many.npz -o me
"""

import os
import re

from upfl.errors import ConfigError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DEFAULTS = {
    "FILE": 2**32,  # bytes of one file that is read as a whole: an array, a state
    "UNPACKED": 2**29,  # bytes that one compressed file may yield
    "MODEL": 2**28,  # bytes of a model that a bundle describes but does not hold, and of one sample's way through it
    "TEXT": 2**27,  # bytes of one file that is read as text
    "MANIFEST": 2**22,  # bytes of a bundle's texts
}


def limit(name: str) -> int:
    """A limit in bytes: the environment's, or the default."""
    text = os.environ.get(variable(name), "").strip()
    if not text:
        return DEFAULTS[name]
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{variable(name)} is {text!r}: give a number of bytes, as in 2GiB")
    return int(match[1]) * UNITS[match[2].upper()]


def variable(name: str) -> str:
    return f"UPFL_LIMIT_{name}"


def exceeded(name: str, size: int | None = None) -> str:
    """What to say of something that is larger than a limit."""
    found = f"{in_words(size)} are" if size is not None else "it is"
    return f"{found} more than {in_words(limit(name))}; if you trust it, {variable(name)}=... raises this limit"


def in_words(size: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.4g} {unit}"
    return f"{size} bytes"
