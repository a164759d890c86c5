"""The loop of `models/products.py`, compiled by Numba into an operation of PyTorch's.

    total[r] <- beta * total[r] + alpha * sum_k a[r, k] * b[k]       over the k where a[r, k] is not zero

Where beta is 0, what total held does not count. Up to 64 rows of b are gone through together, in pieces of up to 112
columns, which fit the first cache and are copied together, so that they lie in few pages and begin where cache lines
do. Which of these k are open is a bit for each in a word. A piece of a row of total is summed in registers
(`add_open`), whatever the processor in the same order, and added in the end; where fused multiply-add is missing, it is
rounded twice. Addresses are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types

from upfl.models.compiled import LANES, SLIMMEST, WIDEST
from upfl.models.loops import (
    FLOAT,
    I64,
    WIDE,
    address,
    compiled,
    element,
    fused,
    inline,
    load,
    number,
    pieces,
    repeat,
    spread,
    until_zero,
    vector,
    zeros,
)
from upfl.models.operations import STACK, interface, made_once, operation

DEEP = 64
PANEL = WIDEST * LANES  # numbers of a row of b that are gone through together
_carray, _pointer = cast(Any, numba).carray, cast(Any, types).CPointer  # without types of their own


@inline
def add_open(
    context: Any, to: Any, rows: Any, down: Any, factors: Any, on: Any, bits: Any, count: Any, beta: Any, alpha: Any
) -> Any:
    """to <- beta * to + alpha * sum_i (the factor i) * (the row i), over the bits i that are set, one at least.

    Rows are `down` bytes apart, factors `on` bytes; `count` is how many vectors of LANES a row has here.
    """

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, rows, down, factors, on, bits, count, beta, alpha = arguments
        fresh = build.fcmp_ordered("==", beta, ir.Constant(FLOAT, 0.0))
        beta, alpha = spread(build, beta), spread(build, alpha)

        def less(left: Any) -> Any:
            return build.and_(left, build.sub(left, number(1)))

        def case(parts: Sequence[tuple[int, int]]) -> None:
            def once(left: Any, sums: list[Any]) -> list[Any]:
                i = build.cttz(left, ir.Constant(ir.IntType(1), 1))
                row, place = build.add(rows, build.mul(i, down)), build.add(factors, build.mul(i, on))
                factor = spread(build, element(build, place, FLOAT, number(0)))
                return [
                    fused(build, factor[lanes], load(build, row, at, lanes), one)
                    for (at, lanes), one in zip(parts, sums, strict=True)
                ]

            sums = until_zero(build, bits, less, [zeros(lanes) for _, lanes in parts], once)
            for (at, lanes), one in zip(parts, sums, strict=True):
                held = build.fmul(beta[lanes], load(build, to, at, lanes))
                before = build.select(fresh, zeros(lanes), held)
                build.store(fused(build, alpha[lanes], one, before), vector(build, to, at, lanes), align=4)

        end = build.append_basic_block()
        choice = build.switch(count, end)
        for vectors in range(SLIMMEST, WIDEST + 1):  # the number of registers is the program's, not a variable
            build.position_at_end(block := build.append_basic_block())
            choice.add_case(number(vectors), block)
            case(pieces(vectors * LANES))
            build.branch(end)
        build.position_at_end(end)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 7, types.float32, types.float32), code


@inline
def _floats(context: Any, at: Any) -> Any:
    """A pointer to the numbers at an address."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return build.inttoptr(arguments[0], FLOAT.as_pointer())

    return _pointer(types.float32)(types.uintp), code


@inline
def _double(context: Any, at: Any) -> Any:
    """The number in double precision at an address."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return build.load(build.inttoptr(arguments[0], ir.DoubleType().as_pointer()))

    return types.float64(types.uintp), code


@inline
def _open_places(context: Any, to: Any, values: Any, down: Any, count: Any) -> Any:
    """to[c] <- a bit i for each row i in which column c is not zero, for as many columns as a vector has.

    Rows are `down` bytes apart, and at most as many as a word has bits.
    """

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, values, down, count = arguments
        words = ir.VectorType(I64, LANES)
        none, one = (ir.Constant(words, [value] * LANES) for value in (0, 1))

        def once(i: Any, now: list[Any]) -> list[Any]:
            sums, bit = now
            row = load(build, build.add(values, build.mul(i, down)))
            some = build.select(build.fcmp_unordered("!=", row, zeros()), bit, none)
            return [build.or_(sums, some), build.shl(bit, one)]

        sums, _ = repeat(build, count, [none, one], once)
        build.store(sums, build.inttoptr(to, words.as_pointer()), align=8)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 4), code


@inline
def _mask(context: Any, values: Any) -> Any:
    """A bit for each of the 16 numbers at an address that is not zero."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        row = load(build, arguments[0], 0, WIDE)
        bits = build.bitcast(build.fcmp_unordered("!=", row, zeros(WIDE)), ir.IntType(WIDE))
        return build.zext(bits, I64)

    return types.uint64(types.uintp), code


@inline
def _copy(context: Any, to: Any, row: Any, count: Any) -> Any:
    """So many vectors of a row, to another place."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, row, count = arguments

        def once(i: Any, sums: list[Any]) -> list[Any]:
            on = build.mul(i, number(4 * LANES))
            build.store(load(build, build.add(row, on)), vector(build, build.add(to, on), 0), align=4)
            return []

        repeat(build, count, [], once)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 3), code


@compiled
def _opened(a: int, down: int, across: int, first: int, last: int, bits: Any) -> None:
    """Which of the columns from `first` on of each row of a, an address, are not zero, a bit for each."""
    values, columns = _carray(_floats(a), (len(bits) * down + last * across,)), last - first
    rows = 0 if across == 1 else len(bits) - len(bits) % LANES  # whose columns are gone through side by side
    for r in range(0, rows, LANES):
        at = a + address(4 * (r + first * across))
        _open_places(address(bits.ctypes.data) + address(8 * r), at, address(4 * across), address(columns))
    for r in range(rows, len(bits)):
        word, start = np.uint64(0), r * down + first * across
        whole = columns - columns % WIDE if across == 1 else 0
        for i in range(0, whole, WIDE):
            word |= _mask(a + address(4 * (start + i))) << np.uint64(i)
        for i in range(whole, columns):
            word |= np.uint64(values[start + i * across] != 0) << np.uint64(i)
        bits[r] = word


@compiled
def product(total: int, a: int, down: int, across: int, b: int, shape: Any, beta: float, alpha: float) -> None:
    """total <- beta * total + alpha * a b, of addresses; a has strides, of which one is 1."""
    rows, depth, breadth = shape
    vectors, line = breadth // LANES, address(4 * breadth)
    parts, layers = -(-vectors // WIDEST), -(-depth // DEEP)
    bits, shrink, factor = np.empty(rows, np.uint64), np.float32(beta), np.float32(alpha)
    totals, room = _carray(_floats(total), (rows, breadth)), np.empty(DEEP * PANEL + 16, np.float32)
    panel = (address(room.ctypes.data) + address(63)) & ~address(63)
    for layer in range(layers):
        top, bottom = depth * layer // layers, depth * (layer + 1) // layers
        _opened(a, down, across, top, bottom, bits)
        for part in range(parts):
            left, right = vectors * part // parts, vectors * (part + 1) // parts
            count, offset = address(right - left), address(4 * LANES * left)
            for i in range(bottom - top):
                _copy(panel + address(4 * PANEL * i), b + address(top + i) * line + offset, count)
            to = total + offset
            for r in range(rows):
                if bits[r]:
                    factors, on = a + address(4 * (r * down + top * across)), address(4 * across)
                    add_open(to, panel, address(4 * PANEL), factors, on, bits[r], count, shrink, factor)
                elif shrink == 0:
                    totals[r, LANES * left : LANES * right] = 0
                else:
                    for c in range(LANES * left, LANES * right):
                        totals[r, c] *= shrink
                to += line
        shrink = np.float32(1)
    room[0] = 0  # an array lives as long as it is spoken of, and its address does not count


@made_once
def register() -> Any:
    """Compile the loop, and make it what `upfl::add_open_` does."""
    data, size, stride, done = interface()

    @numba.cfunc(STACK)
    def add_open_(stack: Any, given: int, returned: int) -> None:
        """The stack holds total, a, b, beta and alpha, which are ours; total is what is returned."""
        at, told = np.empty(5, np.uint64), np.empty(5, np.int64)
        for i in range(5):
            data(stack[i], at[i:].ctypes.data)
        for d in range(2):
            size(stack[1], d, told[d:].ctypes.data)
            stride(stack[1], d, told[2 + d :].ctypes.data)
        size(stack[2], 1, told[4:].ctypes.data)
        shape = told[0], told[1], told[4]
        product(at[0], at[1], told[2], told[3], at[2], shape, _double(at[3]), _double(at[4]))
        for i in range(1, 5):
            done(stack[i])

    return operation("add_open_", add_open_)
