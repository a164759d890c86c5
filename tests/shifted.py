"""Values four bytes beyond the boundary that tensors begin at, where some matrix products have other bits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from upfl.contract import CrossFitted, Published
from upfl.data.inputs import Inputs
from upfl.state import ALIGNMENT, State


def shifted(value: Tensor) -> Tensor:
    """The same values in the same layout, elsewhere; integers stay, whose sums are exact."""
    if not value.is_floating_point() or not value.numel():
        return value
    size = value.element_size()
    room = torch.empty(value.untyped_storage().nbytes() // size + ALIGNMENT, dtype=value.dtype)
    moved = torch.as_strided(room, value.shape, value.stride(), 1).copy_(value)
    assert moved.data_ptr() % ALIGNMENT == size
    return moved


@overload
def shifted_state(state: Mapping[str, Tensor]) -> State: ...
@overload
def shifted_state(state: None) -> None: ...
def shifted_state(state: Mapping[str, Tensor] | None) -> State | None:
    return None if state is None else {name: shifted(value) for name, value in state.items()}


def shifted_published(published: Published) -> Published:
    members = [shifted_state(member) for member in published.members]
    return replace(
        published, state=shifted_state(published.state), fitted=shifted_state(published.fitted), members=members
    )


def shifted_given(given: CrossFitted) -> CrossFitted:
    return CrossFitted(shifted_published(given.published), tuple(map(shifted_state, given.folds)))


class ShiftedInputs(Inputs):
    """A source's images, each batch of them shifted."""

    def x(self, *which: Any) -> Tensor:
        return shifted(super().x(*which))
