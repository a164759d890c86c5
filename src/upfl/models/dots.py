"""Outputs of a linear layer, y = x w^T + bias, by a loop that Numba compiles into an operation of PyTorch's.

Rows of x and of w lie as a product wants them: an output is the sum over the numbers of one row times those of another.
So nothing is packed first, as kernels for products of any kind do, and all of a processor's registers hold sums: four
rows of x with three of w, twelve sums in vectors of eight numbers (`add_dots`), which leave AVX2 one register for the
row of x that comes next. Each output is summed in the same order, whatever the processor and whichever outputs are its
neighbours; where fused multiply-add is missing, it is rounded twice. Addresses are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from upfl.models.compiled import LANES
from upfl.models.loops import (
    FLOAT,
    address,
    compiled,
    fused,
    in_halves,
    inline,
    load,
    number,
    pick,
    repeat,
    zeros,
)
from upfl.models.operations import STACK, interface, made_once, operation

_I0 = ir.Constant(ir.IntType(32), 0)
ROWS, COLUMNS = 4, 3  # of outputs that are summed at once


@inline
def add_dots(context: Any, to: Any, down: Any, bias: Any, x: Any, w: Any, across: Any, vectors: Any) -> Any:
    """to[r, c] <- bias[c] + <row r of x, row c of w> for four rows r and three c.

    Rows of outputs are `down` bytes apart, those of x and w `across` bytes, which are so many vectors.
    """

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, down, bias, x, w, across, vectors = arguments
        samples = [build.add(x, build.mul(across, number(r))) for r in range(ROWS)]
        weights = [build.add(w, build.mul(across, number(c))) for c in range(COLUMNS)]

        def once(i: Any, sums: list[Any]) -> list[Any]:
            on = build.mul(i, number(4 * LANES))
            three = [load(build, build.add(row, on)) for row in weights]
            result = []
            for r, row in enumerate(samples):  # one at a time: there is no register for a second one
                one = load(build, build.add(row, on))
                result += [fused(build, one, three[c], sums[COLUMNS * r + c]) for c in range(COLUMNS)]
            return result

        sums = repeat(build, vectors, [zeros()] * ROWS * COLUMNS, once)
        for c in range(COLUMNS):
            (eight,) = in_halves(build, sums[c::COLUMNS])
            lower, upper = (build.shuffle_vector(eight, eight, pick(*half)) for half in ((0, 1, 2, 3), (4, 5, 6, 7)))
            start = build.insert_element(lower.type(ir.Undefined), build.load(_number(build, bias, number(4 * c))), _I0)
            four = build.fadd(build.fadd(lower, upper), build.shuffle_vector(start, start, pick(0, 0, 0, 0)))
            for r in range(ROWS):
                one = build.extract_element(four, ir.Constant(ir.IntType(32), r))
                build.store(one, _number(build, to, build.add(build.mul(down, number(r)), number(4 * c))))
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 7), code


def _number(build: Any, start: Any, on: Any) -> Any:
    return build.inttoptr(build.add(start, on), FLOAT.as_pointer())


@compiled
def outputs(y: int, x: int, w: int, bias: int, samples: int, inputs: int, features: int) -> None:
    """y <- x w^T + bias, of addresses. The last rows and columns are computed twice where they are not enough."""
    down, across, vectors = address(4 * features), address(4 * inputs), address(inputs // LANES)
    for column in range(0, features, COLUMNS):
        c = min(column, features - COLUMNS)
        for row in range(0, samples, ROWS):
            r = min(row, samples - ROWS)
            to, start = y + address(4 * (r * features + c)), bias + address(4 * c)
            add_dots(to, down, start, x + address(r) * across, w + address(c) * across, across, vectors)


@made_once
def register() -> Any:
    """Compile the loop, and make it what `upfl::outputs_` does."""
    data, size, _, done = interface()

    @numba.cfunc(STACK)
    def outputs_(stack: Any, given: int, returned: int) -> None:
        """The stack holds y, x, w and the bias, which are ours; y is what is returned."""
        at, told = np.empty(4, np.uint64), np.empty(3, np.int64)
        for i in range(4):
            data(stack[i], at[i:].ctypes.data)
        size(stack[1], 0, told[0:].ctypes.data)
        size(stack[1], 1, told[1:].ctypes.data)
        size(stack[2], 0, told[2:].ctypes.data)
        outputs(at[0], at[1], at[2], at[3], told[0], told[1], told[2])
        for i in range(1, 4):
            done(stack[i])

    return operation("outputs_", outputs_)
