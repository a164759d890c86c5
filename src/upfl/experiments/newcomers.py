"""Score a finished run on other new clients: the training is the same, so it need not be done again.

The new clients follow from the run's partition with some of its fields changed. Those fields concern new clients only;
the training clients must stay as they are, and this is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from upfl.api import Run
from upfl.contract import Personalizer, Published
from upfl.data.federation import Federation, with_newcomers
from upfl.data.inputs import Inputs
from upfl.engine.clients import newcomer
from upfl.engine.folder import write_file
from upfl.engine.rounds import checked_device, one_thread
from upfl.methods import row_name


def newcomers_file(run: Path, changes: Mapping[str, Any]) -> Path:
    return run / "newcomers" / f"{','.join(f'{key}={value}' for key, value in changes.items())}.json"


def score_newcomers(run: Run, changes: Mapping[str, Any], workers: int = 1) -> dict[str, Any]:
    """The rows' scores on the new clients of the changed partition; stored in the run folder, and read from there."""
    file = newcomers_file(run.path, changes)
    if file.exists():
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stored
    config, source = run.config, run.federation.source
    federation = with_newcomers(run.federation, config.partition, changes)
    inputs = Inputs(source, checked_device(config.device))
    clients = range(min(len(federation.new), config.evaluate_clients or len(federation.new)))
    rows = []
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        for name, personalizer in run.personalizers.items():
            score = partial(_score, federation, inputs, personalizer, run.published(name), config.seed)
            scored = list(pool.map(score, clients))
            total = sum(client["size"] for client in scored)
            rows.append(
                {
                    "row": row_name(run.training.name, name),
                    "test": sum(client["accuracy"] * client["size"] for client in scored) / total,
                    "test_before": sum(client["before"] * client["size"] for client in scored) / total,
                    "clients": scored,
                }
            )
    result = {"changes": dict(changes), "notes": list(federation.notes), "rows": rows}
    file.parent.mkdir(exist_ok=True)
    write_file(file, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _score(
    federation: Federation, inputs: Inputs, personalizer: Personalizer[Any], published: Published, seed: int, id: int
) -> dict[str, Any]:
    """Personalize without labels, then look at them."""
    with torch.no_grad():
        personalized = personalizer.personalize(published, newcomer(federation, inputs, seed, id))
    y = inputs.y(federation.new.all(id))
    before, after = (int((z.argmax(1) == y).sum()) for z in (personalized.before, personalized.logits))
    size = len(y)
    return {"client": id, "kind": "new", "accuracy": 100 * after / size, "before": 100 * before / size, "size": size}
