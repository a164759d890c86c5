"""Sums of features as the state that nodes send, from which all standardize alike: digits, added up as integers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from upfl.data.standardize import SQUARES, VALUES, Sums
from upfl.engine.fold import FixedPointSum
from upfl.state import State


def to_state(sums: Sums) -> State:
    digits = {"values": torch.from_numpy(sums.values), "squares": torch.from_numpy(sums.squares)}
    return {"count": torch.tensor([sums.count])} | digits


def from_state(state: Mapping[str, Tensor]) -> Sums:
    return Sums(int(state["count"]), state["values"].numpy(), state["squares"].numpy())


def empty_sum(width: int, clients: int) -> FixedPointSum:
    """For so many features of so many clients."""
    nothing = (np.zeros((len(exponents), width), np.int64) for exponents in (VALUES, SQUARES))
    return FixedPointSum(to_state(Sums(0, *nothing)), clients)
