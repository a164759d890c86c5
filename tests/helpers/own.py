"""Data of one's own, made on the spot: patients in a table, digits as images in folders, notes as texts."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

TOPICS = {
    "sport": ["ball", "team", "goal", "match", "win", "score", "play", "league", "coach", "run"],
    "food": ["bread", "soup", "salt", "oven", "cook", "taste", "sweet", "plate", "dish", "oil"],
    "travel": ["train", "road", "hotel", "map", "sea", "flight", "bag", "ticket", "city", "beach"],
}
FILLERS = ["the", "a", "and", "of", "to", "in", "it", "was", "we", "day", "very", "good", "time", "then"]


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def patients(folder: Path, hospitals: int = 24) -> Path:
    """scikit-learn's breast cancer data, dealt out to hospitals with different shares of malignant cases."""
    found, rng = load_breast_cancer(), np.random.default_rng(0)
    order = np.lexsort((rng.random(len(found.target)), found.target + rng.random(len(found.target))))
    rows = [
        [*found.data[i].tolist(), found.target_names[found.target[i]], f"hospital-{hospitals * place // len(order)}"]
        for place, i in enumerate(order)
    ]
    return write_csv(folder / "patients.csv", [*found.feature_names, "diagnosis", "hospital"], rows)


def scans(folder: Path, clinics: int = 20, images: int = 200) -> Path:
    """Digits as PNG files: scans/clinic/class/image."""
    found = load_digits()
    for place in range(images):
        path = folder / "scans" / f"clinic-{place % clinics}" / str(found.target[place])
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray((found.images[place] * 15.9).astype(np.uint8)).save(path / f"{place}.png")
    return folder / "scans"


def notes(folder: Path, writers: int = 20, each: int = 12) -> Path:
    """Short notes about three topics, of which each writer prefers some."""
    rng, rows = np.random.default_rng(0), []
    for writer in range(writers):
        shares = rng.dirichlet([0.5] * len(TOPICS))
        for _ in range(each):
            topic = str(rng.choice(list(TOPICS), p=shares))
            words = [*rng.choice(TOPICS[topic], 4), *rng.choice(FILLERS, 6)]
            rng.shuffle(words)
            rows.append([" ".join(words), topic, f"writer-{writer}"])
    return write_csv(folder / "notes.csv", ["note", "topic", "writer"], rows)
