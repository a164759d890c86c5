"""Small configurations of runs that are scored anew."""

from typing import Any

from upfl.config import Config, configure

SMALL = ("iterations=10", "model.hidden=32", "partition.clients=20")


def small(method: str = "fedavg", *settings: str, **options: Any) -> Config:
    asked = {"rounds": 12, "clients_per_round": 10, "evaluate_every": 12} | options
    return configure(method, "digits", settings=(*SMALL, *settings), **asked)
