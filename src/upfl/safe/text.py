"""Text that others wrote, made harmless for where it is shown: a terminal, a CSV file, a Markdown page."""

import re
import unicodedata

# Control characters (a terminal obeys them), marks that turn the order of letters around, and halves of characters.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet computes when a cell begins with it


def plain(text: str) -> str:
    """Text for a terminal: line breaks stay, other control characters are spelled out."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] == "\n" else spelled(found[0]), text)


def one_line(text: str, longest: int) -> str:
    """A reason that somebody else gives, short and in one line."""
    return plain(" ".join(text[: 4 * longest].split()))[:longest]


def spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def has_control(text: str) -> bool:
    return _UNSEEN.search(text) is not None or any(unicodedata.category(c) == "Cc" for c in text)


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula, and no terminal for a command."""
    text = _UNSEEN.sub(lambda found: spelled(found[0]), text) if _UNSEEN.search(text) else text
    return f"'{text}" if text.startswith(_FORMULA) else text


def markdown(text: str) -> str:
    """Text within a line of Markdown: no HTML, no link, no table cell of its own."""
    text = re.sub(r"([\\`*_|<>&])", r"\\\1", plain(text.replace("\n", " ")))
    return re.sub(r"\](?=[(\[:])", r"\]", text)


def counted(number: int, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {what}{'s' * (number != 1)}"
