"""What scores say beside each other: differences with their intervals, and whom a personalizer harmed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from upfl.experiments.score import Score
from upfl.statistics import bootstrap, mcnemar

HARM = 2.0  # points that a client may lose before it counts as harmed
LARGE = 100  # samples from which on a client is judged by itself; smaller ones are pooled


def summaries(scores: Sequence[Score], clients: bool = False) -> list[dict[str, Any]]:
    """The figures of each score; differences, with intervals, and harm against `none` and `calibrated`."""
    references = {score.name: score for score in scores if score.name in ("none", "calibrated")}
    rows = []
    for score in scores:
        row: dict[str, Any] = {"name": score.name, "title": score.title, "bound": score.bound}
        if score.right:
            row["test"] = score.accuracy
        if score.unscored:
            row["unscored"] = score.unscored
        if score.validation is not None:
            row["validation"] = score.validation
        if score.later:
            right, total = np.array(score.later).sum(0)
            row["inductive"] = 100 * right / max(total, 1)
        if score.estimates:
            value, low, high, truth = np.array(score.estimates).T
            row["estimate"] = {
                "mean_error": 100 * float((value - truth).mean()),
                "mean_absolute_error": 100 * float(np.abs(value - truth).mean()),
                "covered": 100 * float(((low <= truth) & (truth <= high)).mean()),
            }
        for name, reference in references.items():
            if name != score.name and not score.bound and score.right:
                row[f"against_{name}"] = _against(score, reference)
        if clients:
            row["clients"] = [{"accuracy": 100 * float(r.mean()), "size": len(r)} for r in score.right]
        rows.append(row)
    return rows


def _against(score: Score, reference: Score) -> dict[str, Any]:
    """The difference with its interval; harm to each large client, and to all smaller ones together."""
    pairs = harm(score, reference)
    difference = np.array([one["won"] - one["lost"] for one in pairs], np.float64)
    sizes = np.array([one["size"] for one in pairs], np.float64)
    interval = bootstrap([(difference, sizes)])
    large, small = ([one for one in pairs if (one["size"] >= LARGE) == is_large] for is_large in (True, False))
    lost, won = (sum(int(one[way]) for one in small) for way in ("lost", "won"))
    harmed = [one for one in large if 100 * (one["lost"] - one["won"]) / one["size"] > HARM and one["p"] < 0.05]
    return {
        "difference": interval.value,
        "low": interval.low,
        "high": interval.high,
        "large_clients": len(large),
        "harmed_large_clients": len(harmed),
        "small_clients": {
            "clients": len(small),
            "samples": sum(int(one["size"]) for one in small),
            "lost": lost,
            "won": won,
            "p": mcnemar(lost, won),
        },
    }


def harm(score: Score, reference: Score) -> list[dict[str, float]]:
    """For each client, how many samples one gets right that the other gets wrong, and McNemar's exact p."""
    result = []
    for ours, theirs in zip(score.right, reference.right, strict=True):
        lost, won = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
        result.append({"lost": lost, "won": won, "size": len(ours), "p": mcnemar(lost, won)})
    return result
