"""Score a finished run on other new clients: the training is the same, so it need not be done again.

The new clients follow from the run's partition with some of its fields changed. Those fields concern new clients only;
the training clients must stay as they are, and this is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from upfl.api import Run
from upfl.data.federation import with_newcomers
from upfl.engine.evaluate import score_newcomer, unscored
from upfl.engine.rounds import one_thread
from upfl.methods import row_name
from upfl.safe.folder import write_file


def newcomers_file(run: Path, changes: Mapping[str, Any]) -> Path:
    return run / "newcomers" / f"{','.join(f'{key}={value}' for key, value in changes.items())}.json"


def score_on_newcomers(run: Run, changes: Mapping[str, Any], workers: int = 1) -> dict[str, Any]:
    """The rows' scores on the new clients of the changed partition; stored in the run folder, and read from there."""
    file = newcomers_file(run.path, changes)
    if file.exists():
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stored
    config = run.config
    federation = with_newcomers(run.federation, config.partition, changes)
    population = replace(run.setup.population, federation=federation)
    chosen = range(len(federation.new))[: config.evaluate_clients]
    clients = [client for client in chosen if federation.has_labels(client)]
    rows = []
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        for name, personalizer in run.personalizers.items():
            published = run.published(name)

            def score(client: int) -> dict[str, Any]:
                with torch.no_grad():  # which holds for a thread
                    counts, _ = score_newcomer(population, personalizer, published, client)  # noqa: B023 - called within its turn of the loop
                before, after, size = counts.tolist()
                return {
                    "client": client,
                    "kind": "new",
                    "accuracy": 100 * after / size,
                    "before": 100 * before / size,
                    "size": size,
                }

            row: dict[str, Any] = {"row": row_name(run.training.name, name), "clients": list(pool.map(score, clients))}
            for figure, of_client in (("test", "accuracy"), ("test_before", "before")) if clients else ():
                row[figure] = _mean(row["clients"], of_client)
            with torch.no_grad():
                told = unscored(population, personalizer, published, config.evaluate_clients)
            rows.append(row | ({"unscored": told} if told else {}))
    result = {"changes": dict(changes), "notes": list(federation.notes), "rows": rows}
    file.parent.mkdir(exist_ok=True)
    write_file(file, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _mean(clients: Sequence[Mapping[str, Any]], figure: str) -> float:
    """Over the samples of all clients."""
    total = sum(client["size"] for client in clients)
    return float(sum(client[figure] * client["size"] for client in clients) / total)
