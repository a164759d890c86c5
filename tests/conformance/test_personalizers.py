"""What the contract asks of a personalizer, over every training that it fits.

One test a pair: what was fitted for the pair, and what a client came to, are made once and looked at by every check.
"""

from dataclasses import replace
from typing import Any

import torch

from tests.conformance.common import Parts, of_every_pair
from tests.shifted import ShiftedInputs, shifted_given, shifted_state
from upfl.contract import Personalizer
from upfl.testing.personalizers import PERSONALIZER_CHECKS, Case, evaluated


@of_every_pair
def test_a_personalizer_keeps_to_its_contract(name: str, personalizer: str, parts: Parts) -> None:
    case = Case.of(parts, personalizer)
    for check in PERSONALIZER_CHECKS:
        check(case)
    places_in_memory_do_not_count(parts, case.method)


def places_in_memory_do_not_count(parts: Parts, method: Personalizer[Any]) -> None:
    """With everything four bytes further on, the same bits: the state, what was fitted, members, memories, inputs."""
    moved = replace(parts, inputs=ShiftedInputs(parts.federation.source), given=shifted_given(parts.given))
    scores, heard = evaluated(parts, method, parts.memory)
    moved_scores, moved_heard = evaluated(moved, method, lambda id: shifted_state(parts.memory(id)))
    assert len(heard) == len(moved_heard)
    for ours, other in zip(heard, moved_heard, strict=True):
        assert torch.equal(other, ours)
    assert torch.equal(moved_scores.new, scores.new)
