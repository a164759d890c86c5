"""What a newcomer is told, in words: on the terminal, on its page, in its node's log."""

from collections.abc import Sequence

from upfl.contract import Diary, Estimate, Likeness
from upfl.personalize.likeness import SAMPLES
from upfl.safe.text import counted

SHOWN = 5  # classes of a mix, in a sentence
WHAT = {
    "inputs distance": "The samples are far from every class that it knows",
    "inputs drift": "The samples are all off in one direction",
    "features distance": "What its model makes of the samples is far from every class that it knows",
    "features drift": "What its model makes of the samples is off in one direction",
}


def in_words(found: Likeness | None, samples: int) -> str:
    """What was found about a newcomer's data, so many samples, and what to do about it."""
    if found is None:
        return "Whether your data are like the federation's is not known: this bundle has nothing to compare them with."
    if found.verdict == "alike":
        return f"Your data look like the federation's (p = {found.p:.2g})."
    if found.verdict == "too few" or not found.scores:
        few = f": {counted(samples, 'sample')}, of {SAMPLES} at least," if samples < SAMPLES else " training clients"
        return f"Too few{few} to tell whether your data are like the federation's."
    worst = max(found.scores, key=lambda name: found.scores[name])
    view = worst.partition("(")[2].rstrip(")")
    what = f"The images would fit better {view}" if worst.startswith("orientation") else WHAT.get(worst, worst)
    return (
        f"YOUR DATA ARE UNLIKE THE FEDERATION'S: do not rely on the predictions. {what} "
        f"({worst}: {found.scores[worst]:.0f} standard deviations of clients, p = {found.p:.1g}). Typical causes: "
        "images that are inverted, scaled, turned or shifted; columns in other units or another order; classes that it "
        "does not know; another domain."
    )


def why_no_estimate(diary: Diary) -> str:
    """Why a diary has no accuracy."""
    if diary.likeness is not None and diary.likeness.unlike:
        return "withheld, because the data are unlike the federation's"
    return f"none: {diary.no_accuracy or 'this personalizer makes none; label-shift and auto do'}"


def about_mix(diary: Diary) -> str:
    """How far the class mix can be relied on."""
    if diary.likeness is not None and diary.likeness.unlike:
        return "do not rely on it: the data are unlike the federation's"
    if not diary.mix:
        return "counted from the predictions; this personalizer does not estimate how far that is off"
    if diary.mix_error is None:
        return "how far it is off is not known: too few training clients or labels taught it"
    return f"off by about {100 * diary.mix_error:.0f} points, as training clients' was"


def in_percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.0f}% ({100 * estimate.low:.0f}-{100 * estimate.high:.0f})"


def about_accuracy(diary: Diary) -> str:
    """What is estimated before and after, or why nothing is."""
    if not diary.accuracy:
        return why_no_estimate(diary)
    before, after = map(in_percent, diary.accuracy)
    return f"{before} before, {after} after (95% intervals)"


def summary(diary: Diary, samples: int, classes: Sequence[str]) -> str:
    """All that a newcomer is told: about its data, what was decided, its class mix, the accuracy."""
    lines = [in_words(diary.likeness, samples), f"Decision: {diary.decision}."]
    if diary.mix:
        order = sorted((c for c in range(len(classes)) if diary.mix[c] >= 0.005), key=lambda c: -diary.mix[c])
        mix = ", ".join(f"{classes[c]} {diary.mix[c]:.0%}" for c in order[:SHOWN])
        lines.append(f"Class mix: {mix}{', ...' if len(order) > SHOWN else ''}; {about_mix(diary)}.")
    return "\n".join([*lines, f"Estimated accuracy: {about_accuracy(diary)}."])
