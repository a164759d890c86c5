"""What a newcomer is told, in words."""

from dataclasses import replace

from upfl.bundle.in_words import in_words, summary, why_no_estimate
from upfl.contract import Diary, Estimate, Likeness

TOLD = Diary(
    decision="its own mix",
    mix=[0.1, 0.7, 0.2],
    mix_error=0.034,
    accuracy=[Estimate(0.5, 0.4, 0.6), Estimate(0.9, 0.8, 1.0)],
    likeness=Likeness("alike", 0.4, {"inputs drift": 1.0}),
)


def test_a_summary_has_likeness_decision_mix_and_accuracy() -> None:
    lines = summary(TOLD, 30, ["a", "b", "c"]).splitlines()
    assert lines == [
        "Your data look like the federation's (p = 0.4).",
        "Decision: its own mix.",
        "Class mix: b 70%, c 20%, a 10%; off by about 3 points, as training clients' was.",
        "Estimated accuracy: 50% (40-60) before, 90% (80-100) after (95% intervals).",
    ]


def test_too_few_says_of_what() -> None:
    few = Likeness("too few", 0.4, {"inputs drift": 1.0})
    assert "Too few: 3 samples, of 20 at least" in in_words(few, 3)
    assert "Too few training clients" in in_words(few, 30)


def test_a_missing_estimate_says_which_reason_it_has() -> None:
    none = replace(TOLD, accuracy=[])
    reasons = [
        why_no_estimate(none),
        why_no_estimate(replace(none, no_accuracy="too few clients")),
        why_no_estimate(replace(none, likeness=Likeness("unlike", 0.0, {}))),
    ]
    assert ["makes none" in reasons[0], "too few" in reasons[1], "withheld" in reasons[2]] == [True] * 3
    assert len({*reasons}) == 3
    assert summary(none, 30, ["a", "b", "c"]).endswith(f"{reasons[0]}.")
