"""Reports, written and read."""

import csv
import io
from pathlib import Path


def read(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text())))
