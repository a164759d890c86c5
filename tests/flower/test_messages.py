"""States as Flower's records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from upfl.errors import BadClientError
from upfl.flower.messages import from_record, to_record


def test_a_state_comes_back_from_a_record_as_it_was() -> None:
    state = {
        "psi.conv1.weight": torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "signs": torch.tensor([[1, -1]], dtype=torch.int8),
        "none": torch.zeros(0, 4),
        "a.b": torch.arange(3),
    }
    back = from_record(to_record(state))
    assert list(back) == list(state)
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items())


def test_values_out_of_order_are_refused() -> None:
    column_major = Array(np.asfortranarray(np.zeros((2, 3))))
    with pytest.raises(BadClientError, match="'a' cannot be read"):
        from_record(ArrayRecord({"a": column_major}))


def test_a_state_is_one_array_for_flower() -> None:
    record = to_record({"a": torch.zeros(2), "b": torch.ones(3)})
    assert len(record) == 1
    assert from_record(to_record({})) == {}


@pytest.mark.parametrize("cut", [1, 11, 12, 20, -1])
def test_arrays_that_cannot_be_told_apart_are_refused(cut: int) -> None:
    (name, array), *_ = to_record({"a": torch.zeros(2), "b": torch.ones(3)}).items()
    short = from_record(ArrayRecord({"content": array}))["content"][:cut].numpy()
    with pytest.raises(BadClientError, match=r"cannot be told apart|cannot be read"):
        from_record(ArrayRecord({name: Array(short)}))
