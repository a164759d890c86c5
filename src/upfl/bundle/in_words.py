"""What a newcomer is told, in words: on the terminal, on its page, in its node's log."""

from upfl.contract import Diary, Likeness

WHAT = {
    "inputs distance": "The samples are far from every class that it knows",
    "inputs drift": "The samples are all off in one direction",
    "features distance": "What its model makes of the samples is far from every class that it knows",
    "features drift": "What its model makes of the samples is off in one direction",
}


def in_words(found: Likeness | None) -> str:
    """What was found about a newcomer's data, and what to do about it."""
    if found is None:
        return "Whether your data are like the federation's is not known: this bundle has nothing to compare them with."
    if found.verdict == "alike":
        return f"Your data look like the federation's (p = {found.p:.2g})."
    if found.verdict == "too few" or not found.scores:
        return "Too few samples or training clients to tell whether your data are like the federation's."
    worst = max(found.scores, key=lambda name: found.scores[name])
    return (
        f"YOUR DATA ARE UNLIKE THE FEDERATION'S: do not rely on the predictions. {WHAT.get(worst, worst)} "
        f"({worst}: {found.scores[worst]:.0f} standard deviations of clients, p = {found.p:.1g}). Typical causes: "
        "images that are inverted, scaled, turned or shifted; classes that it does not know; another domain."
    )


def why_no_estimate(diary: Diary) -> str:
    """Why a diary has no accuracy."""
    if diary.likeness is not None and diary.likeness.unlike:
        return "withheld, because the data are unlike the federation's"
    return "none: this personalizer makes none, or too few training clients taught it"
