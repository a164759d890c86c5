"""Small runs by one process."""

from pathlib import Path

from upfl import api
from upfl.config import Config


def run(config: Config, path: Path) -> Path:
    api.train(config, path, workers=1)
    return path
