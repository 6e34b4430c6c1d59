"""Rows in vector registers: the row rule, at about the rate at which memory is read, and laying rows out.

Owns the one use of numba (extra ``numba``). Compilers do not vectorise the rule, so an ``@intrinsic`` says it as LLVM
vectors and LLVM picks the instructions (AVX-512, AVX2, NEON). Locates nothing, and knows no spec: ``validate`` loads
this file where numba is installed, and finds the rows in numpy where the verdict is no.

How a vector decides: it holds as many whole rows as fit. Rotating all of its rows by 1..K/2 slots puts every pair of
slots onto one lane once, so a lane whose smallest XOR is 0 holds a duplicate. One unsigned comparison with E-1 is the
range check, since every negative id is large as unsigned. A lane that fails is excused where it and its neighbour are
MISSING: if that holds all around a row, the whole row is MISSING. Nearly all rows are not, so that readers ask first
how far rows go that need no excuse: the cheaper question, and it tells where rows are MISSING.

Intrinsics and their jitted callers stand in this one file, and callers at module level: numba's cache looks at the file
of the caller alone, and never finds a function that another function made.

Axes: S tokens, L layers, K top-k slots, P rows of the table of limits, R runs of layers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from routeplane.compiling import compiled
from routeplane.first_look import shows_enough

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["MAX_TOP_K", "count_present", "lay_rows", "rows_are_legal", "shows_enough"]

#: Largest top-k that a vector of int16 holds.
MAX_TOP_K = 32
_VECTOR_BYTES = 64
# Vectors per step: one branch and one move out of the mask registers for all of them.
_VECTORS = 4
# How far ahead memory is asked for. The processor's own prefetching stops at the end of each page: without this the
# check of an array outside the caches takes 1.1 (K=22) to 1.6 times (K=10) as long; 4 to 16 KiB ahead do the same.
_AHEAD_BYTES = 4096

if numba.config.DISABLE_JIT:
    raise ImportError("expected numba with its compiler, got NUMBA_DISABLE_JIT: intrinsics have no Python body")


def rows_are_legal(rows: NDArray[Any], widths: tuple[int, ...]) -> bool:
    """Whether every row of ``rows`` ``[S, L, K]`` is all MISSING, or in range and pairwise distinct.

    ``rows``: C-contiguous, int16 in native order (MISSING is -1) or uint8 as the ``narrow`` encoding stores it (MISSING
    is a whole row of 0xFF), at any address, K of at most MAX_TOP_K; only read. ``widths``: E of each of the L layers,
    at most 256 for uint8. Exactly ``validate.all_legal`` of the (widened) rows. The caller has checked all that. The
    first call for a type and K compiles, or loads what an earlier process compiled.
    """
    count, top_k = rows.size // rows.shape[2], rows.shape[2]
    how = _plan(widths, top_k, rows.dtype.char)
    steps = max(0, (count - how.spare) // how.step)
    if steps and not _steps_are_legal(rows.ctypes.data, steps, how.address, how.period, 0, how.row):
        return False
    done = steps * how.step
    steps = -(-(count - done) // how.step)
    tail = np.empty((steps * how.step + how.spare, top_k), dtype=rows.dtype)
    tail.view(f"i{rows.itemsize}").fill(-1)
    tail[: count - done] = rows.reshape(-1, top_k)[done:]
    return bool(_steps_are_legal(tail.ctypes.data, steps, how.address, how.period, done % how.period, how.row))


def count_present(rows: NDArray[Any], widths: tuple[int, ...], *, first: int, most: int) -> tuple[int, bool]:
    """How many rows from row ``first`` on are legal and not MISSING; and whether a row that is not ended the count.

    Rows are counted over tokens and layers, from 0, and looked at in steps of some 100 rows: at most ``most`` rows are,
    and where nothing ended the count, less than two steps of these are left out. ``rows``, ``widths``: as in
    ``rows_are_legal``.
    """
    count, top_k = rows.size // rows.shape[2], rows.shape[2]
    how = _plan(widths, top_k, rows.dtype.char)
    steps = min(most, count - first - how.spare) // how.step
    if steps <= 0:
        return 0, False
    address = rows.ctypes.data + first * top_k * rows.itemsize
    done = int(_present_steps(address, steps, how.address, how.period, first % how.period, how.row))
    return done * how.step, done < steps


def lay_rows(rows: NDArray[Any], slots: tuple[int, ...], *, out: NDArray[np.int16]) -> None:
    """``out[t, i] = rows[t, slots[i]]`` for legal rows, widened to int16.

    ``rows``: ``[S, L, K]`` as in ``rows_are_legal``; legal, which tells a MISSING narrow row by two of its bytes (by
    one where K = 1, which has no expert 255). ``out``: int16 ``[S, len(slots), K]``, C-contiguous, of other memory.
    The caller has checked all that, and that the slots exist.
    """
    tokens, layers, top_k = rows.shape
    # one run over all tokens where nothing is left out
    whole = slots == tuple(range(layers))
    runs_R2 = np.asarray([[0, tokens * layers]]) if whole else _runs_of(slots)
    row, stride = (rows.dtype.type(0),) * top_k, layers * top_k * rows.itemsize
    times, runs = 1 if whole else tokens, len(runs_R2)
    _lay(rows.ctypes.data, out.ctypes.data, times, stride, runs_R2.ctypes.data, runs, row)


@lru_cache(maxsize=64)
def _runs_of(slots: tuple[int, ...]) -> NDArray[np.int64]:
    """Neighbouring slots as ``[first, rows]``, in order."""
    starts = [at for at, slot in enumerate(slots) if at == 0 or slot != slots[at - 1] + 1]
    runs = [[slots[a], b - a] for a, b in zip(starts, [*starts[1:], len(slots)], strict=True)]
    runs_R2 = np.asarray(runs, dtype=np.int64)
    runs_R2.flags.writeable = False
    return runs_R2


class _Plan(NamedTuple):
    """How rows of one type and K are looked at: what a call would otherwise work out each time."""

    step: int  # rows of a step
    spare: int  # rows that must follow a step: its last vector reads past its rows, up to its own width
    limits: NDArray[Any]  # the largest legal id of each lane, for a step that begins at any of ``period`` rows
    address: int  # of the limits
    period: int  # whole tokens and at least one step, so that one subtraction keeps the phase in range
    row: tuple[Any, ...]


@lru_cache(maxsize=64)
def _plan(widths: tuple[int, ...], top_k: int, kind: str) -> _Plan:
    dtype = np.dtype(kind)
    lanes = _VECTOR_BYTES // dtype.itemsize
    step = lanes // top_k * _VECTORS
    period = len(widths) * -(-step // len(widths))
    rows_P = np.arange(period + step + _VECTOR_BYTES) % len(widths)
    limits_PK = np.repeat(np.asarray(widths)[rows_P, None] - 1, top_k, axis=1).astype(kind)
    limits_PK.flags.writeable = False
    row = (dtype.type(0),) * top_k
    return _Plan(step, -(-lanes // top_k), limits_PK, limits_PK.ctypes.data, period, row)


@compiled
def _steps_are_legal(
    address: int, steps: int, limits_address: int, period: int, phase: int, row: tuple[Any, ...]
) -> bool:
    """Check ``steps`` steps from ``address`` on. ``row``: its type alone counts, K lanes of one integer type."""
    step, row_bytes = _step_rows(row), _row_bytes(row)
    for _ in range(steps):
        if _any_illegal(address, limits_address + phase * row_bytes, row):
            return False
        address += step * row_bytes
        phase += step
        if phase >= period:
            phase -= period
    return True


@compiled
def _present_steps(address: int, steps: int, limits_address: int, period: int, phase: int, row: tuple[Any, ...]) -> int:
    """How many of ``steps`` steps, from the first on, hold legal rows alone, none of them MISSING."""
    step, row_bytes = _step_rows(row), _row_bytes(row)
    for done in range(steps):
        if _any_absent(address, limits_address + phase * row_bytes, row):
            return done
        address += step * row_bytes
        phase += step
        if phase >= period:
            phase -= period
    return steps


@compiled
def _lay(
    source: int, target: int, tokens: int, stride: int, runs_address: int, runs: int, row: tuple[Any, ...]
) -> None:
    """Copy the same ``runs`` of layers from each of ``tokens`` tokens, ``stride`` bytes apart; widen to int16."""
    row_bytes, out_bytes, rows = _row_bytes(row), _out_bytes(row), _vector_rows(row)
    for _ in range(tokens):
        for run in range(runs):
            at = source + _int64_at(runs_address + run * 16) * row_bytes
            left = _int64_at(runs_address + run * 16 + 8)
            while left >= rows:
                _lay_vector(at, target, row)
                at += rows * row_bytes
                target += rows * out_bytes
                left -= rows
            while left > 0:
                _lay_one(at, target, row)
                at += row_bytes
                target += out_bytes
                left -= 1
        source += stride


# ----------------------------------------------------------------------------------------------------------------------
# What only the type of a row decides
# ----------------------------------------------------------------------------------------------------------------------


def _shape_of(row: Any) -> tuple[int, int, int]:
    """K, bits of a lane, whole rows of a vector; from numba's type of a row."""
    bits = row.dtype.bitwidth
    return row.count, bits, _VECTOR_BYTES * 8 // bits // row.count


@intrinsic
def _step_rows(context: Any, row: Any) -> Any:
    """Rows of a step."""
    return _constant(_shape_of(row)[2] * _VECTORS, row)


@intrinsic
def _row_bytes(context: Any, row: Any) -> Any:
    """Bytes of a row."""
    top_k, bits, _ = _shape_of(row)
    return _constant(top_k * bits // 8, row)


@intrinsic
def _out_bytes(context: Any, row: Any) -> Any:
    """Bytes of a row of int16."""
    return _constant(_shape_of(row)[0] * 2, row)


@intrinsic
def _vector_rows(context: Any, row: Any) -> Any:
    """Whole rows of a vector."""
    return _constant(_shape_of(row)[2], row)


def _constant(value: int, row: Any) -> Any:
    return types.intp(row), lambda context, builder, signature, arguments: ir.Constant(ir.IntType(64), value)


# ----------------------------------------------------------------------------------------------------------------------
# One step
# ----------------------------------------------------------------------------------------------------------------------


@intrinsic
def _any_illegal(context: Any, address: Any, limits_address: Any, row: Any) -> Any:
    """Whether a step that begins at ``address`` holds an illegal row; its limits begin at ``limits_address``."""
    top_k, bits, rows = _shape_of(row)
    vector_bytes = rows * top_k * bits // 8

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = _VECTOR_BYTES * 8 // bits
        bad = None
        for index in range(_VECTORS):
            _prefetch(builder, arguments[0], index * vector_bytes + _AHEAD_BYTES)
            ids, limits = (_load(builder, start, index * vector_bytes, bits) for start in arguments[:2])
            found = _illegal_lanes(builder, ids, limits, top_k)
            bad = found if bad is None else builder.or_(bad, found)
        # lanes beyond the last whole row hold a part of one, which the next vector looks at
        used = ir.Constant(ir.IntType(lanes), (1 << (rows * top_k)) - 1)
        mask = builder.and_(builder.bitcast(bad, ir.IntType(lanes)), used)
        return builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(lanes), 0))

    return types.boolean(address, limits_address, row), generate


@intrinsic
def _any_absent(context: Any, address: Any, limits_address: Any, row: Any) -> Any:
    """Whether a step that begins at ``address`` holds a row that is illegal or MISSING."""
    top_k, bits, rows = _shape_of(row)
    vector_bytes = rows * top_k * bits // 8

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = _VECTOR_BYTES * 8 // bits
        zeros = ir.Constant(ir.VectorType(ir.IntType(bits), lanes), [0] * lanes)
        smallest, beyond = [], []
        for index in range(_VECTORS):
            _prefetch(builder, arguments[0], index * vector_bytes + _AHEAD_BYTES)
            ids, limits = (_load(builder, start, index * vector_bytes, bits) for start in arguments[:2])
            # LLVM makes one saturated subtraction of it; unlike comparisons, these join over a whole step
            over = builder.icmp_unsigned(">", ids, limits)
            beyond.append(builder.select(over, builder.sub(ids, limits), zeros))
            smallest += [builder.xor(ids, _rotated(builder, ids, top_k, by)) for by in range(1, top_k // 2 + 1)]
        bad = builder.icmp_unsigned("!=", _reduced(builder, beyond, _either), zeros)
        if smallest:
            bad = builder.or_(bad, builder.icmp_unsigned("==", _reduced(builder, smallest, _smaller), zeros))
        used = ir.Constant(ir.IntType(lanes), (1 << (rows * top_k)) - 1)
        mask = builder.and_(builder.bitcast(bad, ir.IntType(lanes)), used)
        return builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(lanes), 0))

    return types.boolean(address, limits_address, row), generate


def _prefetch(builder: ir.IRBuilder, start: Any, offset: int) -> None:
    """Ask for memory to be read later. Beyond the end of the array too: a prefetch of no memory does nothing."""
    pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    )
    place = builder.inttoptr(builder.add(start, ir.Constant(ir.IntType(64), offset)), pointer)
    # to read, into all caches, data
    builder.call(prefetch, [place, *(ir.Constant(flag, value) for value in (0, 3, 1))])


def _load(builder: ir.IRBuilder, start: Any, offset: int, bits: int) -> Any:
    vector = ir.VectorType(ir.IntType(bits), _VECTOR_BYTES * 8 // bits)
    place = builder.add(start, ir.Constant(ir.IntType(64), offset))
    return builder.load(builder.inttoptr(place, vector.as_pointer()), align=1)


def _illegal_lanes(builder: ir.IRBuilder, ids: Any, limits: Any, top_k: int) -> Any:
    """A vector of i1: lanes that break the rule."""
    all_ones = ir.Constant(ids.type, [-1] * ids.type.count)
    zeros = ir.Constant(ids.type, [0] * ids.type.count)
    bad = builder.icmp_unsigned(">", ids, limits)
    both = ids
    differences = [builder.xor(ids, _rotated(builder, ids, top_k, by)) for by in _rotations(top_k, ids.type)]
    if differences:
        bad = builder.or_(bad, builder.icmp_unsigned("==", _reduced(builder, differences, _smaller), zeros))
        # Of int16, -1 is never in range, so each MISSING lane speaks for itself and looks at one neighbour. The byte
        # 0xFF may be expert 255, so there every lane that it is compared with must be equal to it.
        any_differs = differences[0] if ids.type.element.width == 16 else _reduced(builder, differences, _either)
        both = builder.and_(ids, builder.not_(any_differs))
    return builder.and_(bad, builder.icmp_unsigned("!=", both, all_ones))


def _rotations(top_k: int, vector: Any) -> range:
    # Bytes: of a run of 0xFF in a row, the last lane but one must see both the last and what follows it, which takes
    # two rotations; half of 3 gives one.
    furthest = 2 if (top_k, vector.element.width) == (3, 8) else top_k // 2
    return range(1, furthest + 1)


def _rotated(builder: ir.IRBuilder, ids: Any, top_k: int, by: int) -> Any:
    count = ids.type.count
    whole = count // top_k * top_k
    # lanes of no whole row are ignored: they stay where they are
    source = [lane // top_k * top_k + (lane % top_k + by) % top_k if lane < whole else lane for lane in range(count)]
    return builder.shuffle_vector(ids, ids, ir.Constant(ir.VectorType(ir.IntType(32), count), source))


def _reduced(builder: ir.IRBuilder, values: list[Any], join: Callable[[ir.IRBuilder, Any, Any], Any]) -> Any:
    joined = values[0]
    for value in values[1:]:
        joined = join(builder, joined, value)
    return joined


def _smaller(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", left, right), left, right)  # LLVM makes one umin of it


def _either(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.or_(left, right)


# ----------------------------------------------------------------------------------------------------------------------
# Rows laid out
# ----------------------------------------------------------------------------------------------------------------------


@intrinsic
def _lay_vector(context: Any, source: Any, target: Any, row: Any) -> Any:
    """Write the rows of one vector as int16."""
    return _lay_some(source, target, row, _shape_of(row)[2])


@intrinsic
def _lay_one(context: Any, source: Any, target: Any, row: Any) -> Any:
    """Write one row as int16."""
    return _lay_some(source, target, row, 1)


def _lay_some(source: Any, target: Any, row: Any, rows: int) -> Any:
    top_k, bits, _ = _shape_of(row)
    count = rows * top_k

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        narrow, wide = (ir.VectorType(ir.IntType(width), count) for width in (bits, 16))
        ids = builder.load(builder.inttoptr(arguments[0], narrow.as_pointer()), align=1)
        if bits == 8:
            filler = ir.Constant(narrow, [-1] * count)
            # where two bytes of a legal row are 0xFF, all are
            both = builder.and_(ids, _rotated(builder, ids, top_k, 1))
            missing = builder.sext(builder.icmp_unsigned("==", both, filler), wide)
            ids = builder.or_(builder.zext(ids, wide), missing)
        builder.store(ids, builder.inttoptr(arguments[1], wide.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(source, target, row), generate


@intrinsic
def _int64_at(context: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(address), generate
