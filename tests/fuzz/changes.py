"""Changes to what is good, each by a source of random numbers."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**53, 2**63, -(2**70), 10**30, 0.0, -0.5, 1e308, 1e-308),
    *(
        "",
        "a",
        "../../x",
        "/etc/passwd",
        "\x1b[31m",
        "=1+1",
        "nan",
        "\ud800",
        "n" * 5000,
        "none+label-shift+label-shift",
    ),
    *([], [[]], {}, {"a": 1}, [1, 2], [2**40] * 9, json.loads("[" * 30 + "]" * 30), "0" * 64),
)


def changed_document(document: Any, random: random.Random) -> Any:
    """One value somewhere in it replaced, removed or doubled."""
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(document)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        target, key = random.choice(places)
        if (isinstance(target, list) and not 0 <= key < len(target)) or (
            isinstance(target, dict) and key not in target
        ):
            continue
        action = random.randrange(6)
        if action == 0:
            del target[key]
        elif action == 1 and isinstance(target, dict):
            target[random.choice(("x", "", "\x1b", "n" * 300))] = target[key]
        elif action == 2 and isinstance(target[key], int | float) and not isinstance(target[key], bool):
            target[key] = target[key] * random.choice((-1, 0, 2, 1000, 2**40)) + random.choice((0, 1, -1, 0.5))
        else:
            target[key] = random.choice(VALUES)
    return document


def changed_bytes(content: bytes, random: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        action, place = random.randrange(5), random.randrange(max(len(changed), 1))
        if action == 0:
            del changed[place:]
        elif action == 1:
            changed[place:place] = random.randbytes(random.choice((1, 8, 100)))
        elif action == 2:
            changed[place : place + random.choice((1, 4, 64))] = b""
        elif changed and place < len(changed):
            changed[place] ^= 1 << random.randrange(8)
    return bytes(changed)


def changed_header(content: bytes, random: random.Random) -> bytes:
    """A safetensors file with another header, or with other values under the same one."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if random.random() < 0.2:
        return content[: 8 + length] + changed_bytes(data, random)
    text = json.dumps(changed_document(header, random)).encode("utf-8", "surrogatepass")
    return (len(text) if random.random() < 0.95 else random.randrange(2**40)).to_bytes(8, "little") + text + data


def other_kind(path: Path, outside: Path, random: random.Random) -> None:
    """A link, a pipe, a folder or nothing in place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kind = random.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind < 5:
        path.symlink_to(random.choice((outside, outside / "file", outside / "folder", Path("/dev/zero"), path)))


def changed_array_header(content: bytes, random: random.Random) -> bytes:
    """An array whose header was changed as text: fields, brackets, types, sizes."""
    length = int.from_bytes(content[8:10], "little")
    text = content[10 : 10 + length].decode()
    if random.random() < 0.5:  # a header that can be read
        descr = random.choice(("|u1", "<u1", "<i8", ">i2", "<f4", "<f8", "<c8", "|b1", "<U4", "|O", "<M8[s]", "|V8"))
        shape = tuple(random.choice((0, 1, 3, 6, 8, 64, 2**20, 2**47)) for _ in range(random.randrange(5)))
        text = str({"descr": descr, "fortran_order": random.random() < 0.2, "shape": shape}) + "\n"
        return content[:8] + len(text).to_bytes(2, "little") + text.encode() + content[10 + length :]
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(text))
        bits = (
            "(",
            ")",
            "{",
            "}",
            "'",
            "\n",
            "\\",
            "[",
            "9" * 20,
            "-",
            "'O'",
            "'<f8'",
            "'>u2'",
            "lambda:0",
            "#",
            "\x00",
        )
        text = text[:place] + random.choice(bits) + text[place + random.randrange(4) :]
    coded = text.encode()
    return content[:8] + (len(coded) % 2**16).to_bytes(2, "little") + coded + content[10 + length :]
