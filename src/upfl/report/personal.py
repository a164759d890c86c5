"""A newcomer's summary: one page of HTML that needs nothing else, and loads nothing from anywhere."""

from __future__ import annotations

import base64
import io
from html import escape

import numpy as np
from numpy.typing import NDArray

from upfl.bundle import PersonalModel, class_mix
from upfl.bundle.in_words import about_mix, in_words, why_no_estimate
from upfl.data.samples import Samples

LEAST_CERTAIN = 24
CLASSES = 30

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .1rem .8rem .1rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } .bar { width: 18rem; text-align: left; font-weight: 400 }
.bar i { display: block; height: .5rem; background: #9aa5b1 } .bar i + i { background: #1b7f5c }
svg { max-width: 100%; height: auto } .alarm { color: #b00020; font-weight: 700 }
.note { color: #52606d } .cards { display: flex; flex-wrap: wrap; gap: .8rem }
.cards figure { margin: 0; width: 5.5rem; font-size: .75rem; overflow-wrap: anywhere }
.cards img { width: 5.5rem; height: 5.5rem; image-rendering: pixelated; background: #eee; object-fit: contain }
@media (prefers-color-scheme: dark) { body { background: #12171c; color: #d9e2ec } .note { color: #9aa5b1 } }
"""


def page(mine: PersonalModel, samples: Samples) -> str:
    """What was found about the samples that a model was personalized on."""
    manifest, diary = mine.manifest, mine.diary
    title = f"{manifest.samples} {manifest.task.input.noun}, personalized by {manifest.personalizer}"
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    made = f"Task {manifest.task.name}, training {manifest.training.name}, round {manifest.training.round}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *_likeness(mine),
        f"<p>{escape(diary.decision[:1].upper() + diary.decision[1:])}.</p>",
        f"<p class=note>{escape(made)}; {escape(manifest.made_with)}.",
        f"This page tells about your {manifest.task.input.noun}: pass it on as you would pass them on.</p>",
        *_accuracy(mine),
        *_mix(mine),
        *_diary(mine),
        *_least_certain(mine, samples),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _likeness(mine: PersonalModel) -> list[str]:
    found = mine.diary.likeness
    alarm = " class=alarm" if found is not None and found.unlike else ""
    parts = [f"<p{alarm}>{escape(in_words(found, mine.manifest.samples))}</p>"]
    if found is not None:
        rows = [f"<tr><td>{escape(name)}</td><td>{score:.1f}</td></tr>" for name, score in found.scores.items()]
        table = f"<table><tr><th>check</th><th>standard deviations of clients</th></tr>{''.join(rows)}</table>"
        parts.append(f"<details><summary>The checks (p = {found.p:.2g})</summary>{table}</details>")
    return parts


def _accuracy(mine: PersonalModel) -> list[str]:
    if not mine.diary.accuracy:
        return ["<h2>Estimated accuracy</h2>", f"<p>{escape(why_no_estimate(mine.diary).capitalize())}.</p>"]
    rows = [
        f"<tr><td>{when}</td><td>{estimate.value:.1%}</td><td>{estimate.low:.1%} to {estimate.high:.1%}</td></tr>"
        for when, estimate in zip(("before", "after"), mine.diary.accuracy, strict=True)
    ]
    head = "<tr><th></th><th>accuracy</th><th>95% interval</th></tr>"
    return ["<h2>Estimated accuracy, told without labels</h2>", f"<table>{head}{''.join(rows)}</table>"]


def _mix(mine: PersonalModel) -> list[str]:
    mix = class_mix(mine)
    largest = max(max(mix.before), max(mix.after))
    order = np.argsort(-np.maximum(mix.before, mix.after), kind="stable")[:CLASSES]
    rows = [
        f"<tr><td>{escape(str(mine.classes_[c]))}</td><td>{mix.before[c]:.1%}</td><td>{mix.after[c]:.1%}</td>"
        f'<td class=bar><i style="width:{100 * mix.before[c] / largest:.1f}%"></i>'
        f'<i style="width:{100 * mix.after[c] / largest:.1f}%"></i></td></tr>'
        for c in order
    ]
    head = "<tr><th>class</th><th>before</th><th>after</th><th class=bar>before (grey), after (green)</th></tr>"
    more = len(mine.classes_) - len(order)
    note = f"<p class=note>{more} rarer classes are not shown.</p>" if more else ""
    about = f"<p class=note>The mix after: {escape(about_mix(mine.diary))}.</p>"
    return ["<h2>Class mix</h2>", f"<table>{head}{''.join(rows)}</table>{note}{about}"]


def _diary(mine: PersonalModel) -> list[str]:
    entropy, steps = mine.diary.entropy, len(mine.diary.loss)
    if len(entropy) < 2:
        return []
    width, height, edge, top = 560, 160, 40, max(*entropy, 1e-9)
    points = [
        (edge + (width - 2 * edge) * i / (len(entropy) - 1), height - 25 - (height - 45) * value / top)
        for i, value in enumerate(entropy)
    ]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{value:.4f}</title></circle>'
        for (x, y), value in zip(points, entropy, strict=True)
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f"<h2>Uncertainty{', step by step' if steps else ''}</h2>",
        f'<svg viewBox="0 0 {width} {height}" width="{width}" fill="#1b7f5c" font-size="12" role="img">',
        f'<polyline points="{line}" fill="none" stroke="#1b7f5c" stroke-width="2"/>{dots}',
        f'<text x="{points[0][0]:.0f}" y="{points[0][1] - 8:.0f}">{entropy[0]:.3f}</text>',
        f'<text x="{points[-1][0]:.0f}" y="{points[-1][1] - 8:.0f}" text-anchor="end">{entropy[-1]:.3f}</text>',
        f'<text x="{edge}" y="{height - 5}">before</text>',
        f'<text x="{width - edge}" y="{height - 5}" text-anchor="end">{"last step" if steps else "after"}</text></svg>',
        "<p class=note>Mean entropy of the predictions, in nats.</p>",
    ]


def _least_certain(mine: PersonalModel, samples: Samples) -> list[str]:
    probabilities = mine.label_distributions_
    best = probabilities.argmax(1)
    certainty = probabilities.max(1)
    figures = [
        f"<figure>{_picture(mine, samples, int(i))}<figcaption>"
        f"<b>{escape(str(mine.classes_[best[i]]))}</b> {certainty[i]:.0%}<br>{escape(_readable(samples.names[i]))}"
        "</figcaption></figure>"
        for i in np.argsort(certainty, kind="stable")[:LEAST_CERTAIN]
    ]
    return ["<h2>Least certain predictions</h2>", f"<div class=cards>{''.join(figures)}</div>"]


def _picture(mine: PersonalModel, samples: Samples, index: int) -> str:
    """A sample to look at, where it is an image."""
    return f'<img alt="" src="{_data_url(samples, index)}">' if mine.manifest.task.input.kind == "pixels" else ""


def _readable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _data_url(samples: Samples, index: int) -> str:
    from PIL import Image  # here, because it is needed for this page alone

    values: NDArray[np.float64] = samples.x[index].astype(np.float64) * (255 / samples.scale)
    pixels = np.rint(values).astype(np.uint8)
    image = pixels[0] if len(pixels) != 3 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
