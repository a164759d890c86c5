"""The loops of `models/winners.py`, and the sum's, compiled by Numba. What is compiled is not kept in files: Numba's
are pickles.

Images are samples x pixels x channels. A sample's inputs are copied into a frame of zeros two pixels wide, in blocks of
16 channels, so that a row of a patch is 80 numbers one after another and a block of the frame fits the first cache.
Three small pieces, written in LLVM's instructions because a loop in Python does not keep its sums in registers, do the
work:

    add_rows    a row of 80 numbers <- itself + sum_i g_i * (the row at place i)
    add_dots    eight numbers       <- themselves + <five rows of weights, the patch at place k>
    add_patches five rows of 16     <- themselves + sum_i g_i * (the patch at place i)

The last is for inputs of up to three channels, such as an image's: they are framed as they lie, and a row of a patch
fits a vector, of which the numbers behind the row do not count.

Rows are added in vectors of 16, which LLVM splits where the processor's are shorter. Each number is summed in
the same order on every processor; where fused multiply-add is missing, it is rounded twice. Places are offsets in
bytes, of 32 bits; addresses are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from upfl.models.compiled import BLOCK, LANES

ROW = 5 * BLOCK
WIDE = 2 * LANES  # numbers in the widest vector, AVX-512's
FRAME = 2
AT_ONCE = 8  # patches of `add_dots`

F = TypeVar("F", bound=Callable[..., Any])
address = numba.uintp


def compiled(function: F) -> F:
    return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


def inline(function: F) -> Callable[..., Any]:
    return cast(Callable[..., Any], intrinsic(function))


FLOAT, _I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FUSED = ("contract",)


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def pick(*places: int) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(places)), list(places))


def paired(build: Any, vectors: list[Any], some: Any, others: Any) -> list[Any]:
    """Sums of neighbours, of two vectors in one."""
    return [
        build.fadd(build.shuffle_vector(a, b, some), build.shuffle_vector(a, b, others))
        for a, b in zip(vectors[::2], vectors[1::2], strict=True)
    ]


def in_halves(build: Any, sums: list[Any]) -> list[Any]:
    """What is in vectors of eight, summed: of each four of them one vector, its halves two parts of the four sums."""
    sums = paired(build, sums, pick(0, 8, 2, 10, 4, 12, 6, 14), pick(1, 9, 3, 11, 5, 13, 7, 15))
    return paired(build, sums, pick(0, 1, 8, 9, 4, 5, 12, 13), pick(2, 3, 10, 11, 6, 7, 14, 15))


def pieces(length: int) -> list[tuple[int, int]]:
    """A row of so many numbers as vectors: where they begin, and their lanes; as wide as they come."""
    whole = length - length % WIDE
    return [(at, WIDE) for at in range(0, whole, WIDE)] + [(at, LANES) for at in range(whole, length, LANES)]


def vector(build: Any, start: Any, at: int, lanes: int = LANES) -> Any:
    """The pointer to a vector that begins at a number of a row."""
    return build.inttoptr(build.add(start, number(4 * at)), ir.VectorType(FLOAT, lanes).as_pointer())


def load(build: Any, start: Any, at: int = 0, lanes: int = LANES) -> Any:
    return build.load(vector(build, start, at, lanes), align=4)


def element(build: Any, start: Any, kind: Any, i: Any) -> Any:
    return build.load(build.gep(build.inttoptr(start, kind.as_pointer()), [i]))


def _place(build: Any, start: Any, places: Any, i: Any) -> Any:
    return build.add(start, build.zext(element(build, places, _I32, i), I64))


def fused(build: Any, a: Any, b: Any, c: Any) -> Any:
    return build.fadd(build.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def zeros(lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)


def spread(build: Any, one: Any) -> dict[int, Any]:
    """A number in all places of a vector, by the vector's lanes."""
    made = {}
    for lanes in (LANES, WIDE):
        empty = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        alone = build.insert_element(empty, one, ir.Constant(_I32, 0))
        made[lanes] = build.shuffle_vector(alone, empty, pick(*[0] * lanes))
    return made


def until_zero(
    build: Any,
    first: Any,
    less: Callable[[Any], Any],
    start: Sequence[Any],
    once: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Vectors after `once(left, vectors)` for left = first, less(first), ..., at least once."""
    before, body, after = build.block, build.append_basic_block(), build.append_basic_block()
    build.branch(body)
    build.position_at_end(body)
    left, now = build.phi(I64), [build.phi(one.type) for one in start]
    result = once(left, now)
    following = less(left)
    for phi, one, then in zip([left, *now], [first, *start], [following, *result], strict=True):
        phi.add_incoming(one, before)
        phi.add_incoming(then, body)
    build.cbranch(build.icmp_unsigned("!=", following, number(0)), body, after)
    build.position_at_end(after)
    return result


def repeat(build: Any, times: Any, start: Sequence[Any], once: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Vectors after `once(i, vectors)` for i = 0, 1, ..., at least once."""
    less = lambda left: build.sub(left, number(1))  # noqa: E731
    return until_zero(build, times, less, start, lambda left, now: once(build.sub(times, left), now))


@inline
def add_rows(context: Any, to: Any, rows: Any, places: Any, factors: Any, count: Any) -> Any:
    """to <- to + sum_i factors[i] * (the row at rows + places[i]), for a count of one at least."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, rows, places, factors, count = arguments

        def once(i: Any, sums: list[Any]) -> list[Any]:
            row, factor = _place(build, rows, places, i), spread(build, element(build, factors, FLOAT, i))
            return [
                fused(build, factor[lanes], load(build, row, at, lanes), one)
                for (at, lanes), one in zip(pieces(ROW), sums, strict=True)
            ]

        sums = repeat(build, count, [load(build, to, *piece) for piece in pieces(ROW)], once)
        for piece, one in zip(pieces(ROW), sums, strict=True):
            build.store(one, vector(build, to, *piece), align=4)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 5), code


@inline
def add_dots(context: Any, to: Any, weights: Any, frame: Any, down: Any, places: Any) -> Any:
    """to[k] <- to[k] + <weights, the patch at frame + places[k], whose rows are `down` bytes apart>, for eight k."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, weights, frame, down, places = arguments
        patches = [_place(build, frame, places, number(k)) for k in range(AT_ONCE)]

        def once(r: Any, sums: list[Any]) -> list[Any]:
            row, offset = build.add(weights, build.mul(r, number(4 * ROW))), build.mul(r, down)
            rows = [build.add(patch, offset) for patch in patches]
            for at in range(0, ROW, LANES):
                weight = load(build, row, at)
                sums = [fused(build, weight, load(build, one, at), held) for one, held in zip(rows, sums, strict=True)]
            return sums

        sums = repeat(build, number(5), [zeros()] * AT_ONCE, once)
        (eight,) = paired(
            build, in_halves(build, sums), pick(0, 1, 2, 3, 8, 9, 10, 11), pick(4, 5, 6, 7, 12, 13, 14, 15)
        )
        build.store(build.fadd(load(build, to), eight), vector(build, to, 0), align=4)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 5), code


@inline
def add_patches(context: Any, to: Any, frame: Any, down: Any, places: Any, factors: Any, count: Any) -> Any:
    """to <- to + sum_i factors[i] * (the patch at frame + places[i]), five rows that are `down` bytes apart there."""

    def code(target: Any, build: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        to, frame, down, places, factors, count = arguments
        offsets = [build.mul(down, number(r)) for r in range(5)]

        def once(i: Any, sums: list[Any]) -> list[Any]:
            patch, factor = _place(build, frame, places, i), spread(build, element(build, factors, FLOAT, i))[WIDE]
            rows = [load(build, build.add(patch, offset), 0, WIDE) for offset in offsets]
            return [fused(build, factor, row, one) for row, one in zip(rows, sums, strict=True)]

        sums = repeat(build, count, [load(build, to, WIDE * r, WIDE) for r in range(5)], once)
        for r, one in enumerate(sums):
            build.store(one, vector(build, to, WIDE * r, WIDE), align=4)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 6), code


@compiled
def _framed(x: Any, n: int, frame: Any, breadth: int) -> None:
    """Copy a sample between the zeros: frame is blocks x pixels x 16."""
    for p in range(x.shape[1]):
        to = (p // breadth + FRAME) * (breadth + 2 * FRAME) + p % breadth + FRAME
        for block in range(frame.shape[0]):
            for c in range(BLOCK):
                frame[block, to, c] = x[n, p, block * BLOCK + c]


@compiled
def _empty_frame(x: Any, breadth: int) -> Any:
    return np.zeros(
        (x.shape[2] // BLOCK, (x.shape[1] // breadth + 2 * FRAME) * (breadth + 2 * FRAME), BLOCK), np.float32
    )


@compiled
def _open(value: Any, winners: Any, n: int, positive: bool, breadth: int, channels: int, lists: Any) -> None:
    """For each output channel of a sample its open winners: how many, where in the frame, which pixel, the value.

    The frame has so many channels, one number after another.
    """
    counts, places, pixels, values = lists
    half, wide = breadth // 2, breadth + 2 * FRAME
    counts[:] = 0
    for p in range(value.shape[1]):
        top, left = 2 * (p // half), 2 * (p % half)
        for o in range(value.shape[2]):
            offset = winners[n, p, o] - (top * breadth + left)  # 0 or 1, or a line further down
            offset = offset if offset < 2 else offset - breadth + wide
            one, i = value[n, p, o], counts[o]
            places[o, i] = (top * wide + left + offset) * channels * 4
            pixels[o, i], values[o, i] = p, one
            counts[o] = i + (one > 0 if positive else one != 0)  # no branch: it could not be foreseen


@compiled
def _lists(outer: int, inner: int) -> Any:
    room = inner + AT_ONCE
    return (
        np.zeros(outer, np.int64),
        np.zeros((outer, room), np.uint32),
        np.zeros((outer, room), np.uint32),
        np.zeros((outer, room), np.float32),
    )


@compiled
def _at(array: Any) -> Any:
    return address(array.ctypes.data)


@compiled
def weights(gy: Any, winners: Any, x: Any, dw: Any, breadth: int) -> None:
    """dw, blocks x outputs x 5 x 80, of gy and winners, samples x pixels x outputs, and of x."""
    samples, pixels, outputs = gy.shape
    frame, lists = _empty_frame(x, breadth), _lists(outputs, pixels)
    counts, places, _, values = lists
    down = 4 * (breadth + 2 * FRAME) * BLOCK
    dw[:] = 0
    for n in range(samples):
        _framed(x, n, frame, breadth)
        _open(gy, winners, n, False, breadth, BLOCK, lists)
        for block in range(dw.shape[0]):
            for o in range(outputs):
                if counts[o]:
                    for r in range(5):
                        source = _at(frame[block]) + address(r * down)
                        add_rows(_at(dw[block, o, r]), source, _at(places[o]), _at(values[o]), address(counts[o]))


@compiled
def slim_weights(gy: Any, winners: Any, x: Any, dw: Any, breadth: int) -> None:
    """dw, outputs x 5 x 16, likewise, of inputs with so few channels that a row of a patch is not longer than that."""
    samples, pixels, outputs = gy.shape
    height, channels = x.shape[1] // breadth, x.shape[2]
    wide, line = (breadth + 2 * FRAME) * channels, breadth * channels
    frame, lists = np.zeros((height + 2 * FRAME) * wide + WIDE, np.float32), _lists(outputs, pixels)
    rows = x.reshape(samples, height, line)
    counts, places, _, values = lists
    dw[:] = 0
    for n in range(samples):
        for r in range(height):
            start = (r + FRAME) * wide + FRAME * channels
            for i in range(line):
                frame[start + i] = rows[n, r, i]
        _open(gy, winners, n, False, breadth, channels, lists)
        for o in range(outputs):
            if counts[o]:
                add_patches(
                    _at(dw[o]), _at(frame), address(4 * wide), _at(places[o]), _at(values[o]), address(counts[o])
                )


@compiled
def inputs(gy: Any, winners: Any, w: Any, dx: Any, breadth: int) -> None:
    """dx, samples x pixels x channels, of gy and winners, and of w, blocks x 5 x outputs x 80."""
    samples, pixels, outputs = gy.shape
    half, wide = breadth // 2, breadth + 2 * FRAME
    frame = _empty_frame(dx, breadth)
    # Channels whose winners share a place of the square share a patch: a list for each of the four places.
    counts, rows, _, values = _lists(4 * pixels, outputs)
    for n in range(samples):
        frame[:] = 0
        counts[:] = 0
        for p in range(pixels):
            first = 2 * (p // half) * breadth + 2 * (p % half)
            for o in range(outputs):
                offset = winners[n, p, o] - first
                k = 4 * p + (offset if offset < 2 else offset - breadth + 2)
                one, i = gy[n, p, o], counts[k]
                rows[k, i], values[k, i] = o * ROW * 4, one
                counts[k] = i + (one != 0)
        for block in range(w.shape[0]):
            for r in range(5):
                for p in range(pixels):
                    first = (2 * (p // half) + r) * wide + 2 * (p % half)
                    for square in range(4):
                        k = 4 * p + square
                        if counts[k]:
                            to = _at(frame[block]) + address((first + square // 2 * wide + square % 2) * BLOCK * 4)
                            add_rows(to, _at(w[block, r]), _at(rows[k]), _at(values[k]), address(counts[k]))
        for p in range(dx.shape[1]):
            start = (p // breadth + FRAME) * wide + p % breadth + FRAME
            for block in range(w.shape[0]):
                for c in range(BLOCK):
                    dx[n, p, block * BLOCK + c] = frame[block, start, c]


@compiled
def change(y: Any, winners: Any, x: Any, w: Any, dy: Any, breadth: int) -> None:
    """dy, samples x pixels x outputs, of x and of w, blocks x outputs x 5 x 80, where y is positive; else zero."""
    samples, pixels, outputs = y.shape
    frame, lists = _empty_frame(x, breadth), _lists(outputs, pixels)
    counts, places, whose, sums = lists
    down = address(4 * (breadth + 2 * FRAME) * BLOCK)
    for n in range(samples):
        _framed(x, n, frame, breadth)
        _open(y, winners, n, True, breadth, BLOCK, lists)
        sums[:] = 0
        for block in range(w.shape[0]):
            for o in range(outputs):
                for e in range(0, counts[o], AT_ONCE):
                    at = address(4 * e)
                    add_dots(_at(sums[o]) + at, _at(w[block, o]), _at(frame[block]), down, _at(places[o]) + at)
        dy[n] = 0
        for o in range(outputs):
            for e in range(counts[o]):
                dy[n, whose[o, e], o] = sums[o, e]


@compiled
def add_rounded(total: Any, values: Any, factor: float) -> None:
    """total <- total + values * factor, rounded to whole numbers, halves to even ones: `engine/fold.py` in one pass."""
    for i in range(len(values)):
        total[i] += np.int64(np.rint(np.float64(values[i]) * factor))
