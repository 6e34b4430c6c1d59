"""Loops over rows: the row rule, at about the rate at which memory is read, laying rows out, the first look for alarms.

Compilers do not vectorise the rule, so an ``@intrinsic`` says it as LLVM vectors and LLVM picks the instructions
(AVX-512, AVX2, NEON). Takes addresses, and believes its caller, which is ``kernels`` alone.

How a vector decides: it holds as many whole rows as fit. Rotating all of its rows by 1..K/2 slots puts every pair of
slots onto one lane once, so a lane whose smallest XOR is 0 holds a duplicate. One unsigned comparison with E-1 is the
range check, since every negative id is large as unsigned. A lane that fails is excused where it and its neighbour are
MISSING: if that holds all around a row, the whole row is MISSING. Nearly all rows are not, so that readers ask first
how far rows go that need no excuse: the cheaper question, and it tells where rows are MISSING.

Intrinsics and their jitted callers stand in this one file, and callers at module level: numba's cache looks at the file
of the caller alone, and never finds a function that another function made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ASIDE_ALIGN",
    "MAX_TOP_K",
    "VECTORS",
    "VECTOR_BYTES",
    "compiled",
    "lay",
    "move",
    "present_rows",
    "present_steps",
    "quiet_records",
    "shows_enough",
    "steps_are_legal",
]

#: Largest top-k that a vector of int16 holds.
MAX_TOP_K = 32
#: Of a vector: the widest registers there are; LLVM makes several narrower ones of it.
VECTOR_BYTES = 64
#: Vectors per step: one branch and one move out of the mask registers for all of them.
VECTORS = 4
#: What a write past the caches needs: x86 has one of 16 bytes, and LLVM makes several of a vector.
ASIDE_ALIGN = 16
# How far ahead memory is asked for. The processor's own prefetching stops at the end of each page: without this the
# check of an array outside the caches takes 1.1 (K=22) to 1.6 times (K=10) as long; 4 to 16 KiB ahead do the same.
_AHEAD_BYTES = 4096

if numba.config.DISABLE_JIT:
    raise ImportError("expected numba with its compiler, got NUMBA_DISABLE_JIT: intrinsics have no Python body")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop for the types of its first call, or load what an earlier process compiled.

    Args:
        function: A function at module level, as numba takes it; numba's cache looks at its file alone.

    Returns:
        The compiled function. It runs without the interpreter's lock, and is kept on disk where a cache can be written.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the function's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)


@compiled
def steps_are_legal(work: tuple[int, int, int, int, int], row: tuple[Any, ...]) -> bool:
    """Whether the rows of some steps are legal. ``row``: its type alone counts, K lanes of one integer type.

    ``work``: the address of the first row, the number of steps, the address of the limits, their period in rows, and
    the row of them that the first one has.
    """
    address, steps, limits_address, period, phase = work
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
def present_steps(work: tuple[int, int, int, int, int], row: tuple[Any, ...]) -> int:
    """How many steps, from the first on, hold legal rows alone, none of them MISSING. Arguments: as above."""
    address, steps, limits_address, period, phase = work
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
def present_rows(work: tuple[Any, ...], row: tuple[Any, ...]) -> None:
    """Which parts of some rows are legal and there, but for some at their ends that are MISSING. ``row``: as above.

    ``work``: all ids, flat, and the largest legal id of each lane, flat; the addresses of both, the period of the
    limits in rows, how many rows a vector reads beyond its own, and the id of MISSING; of each part the first row, how
    many are there, and how many are MISSING behind, int64; and where each verdict is written, bool.
    """
    flat, limits, address, limits_address, period, spare, missing, first_N, count_N, absent_N, right = work
    step, row_bytes, top_k = _step_rows(row), _row_bytes(row), len(row)
    for part in range(len(first_N)):
        at, end = first_N[part], first_N[part] + count_N[part]
        steps = max(0, (end - at - spare) // step)
        good = present_steps((address + at * row_bytes, steps, limits_address, period, at % period), row) == steps
        at += steps * step
        if good and steps and at < end - spare:
            at = end - spare - step  # looks at some rows once more, rather than at the last ones one by one
            good = present_steps((address + at * row_bytes, 1, limits_address, period, at % period), row) == 1
            at += step
        while good and at < end:
            good = _is_present(flat, at * top_k, limits, at % period * top_k, top_k)
            at += 1
        for place in range(end * top_k, (end + absent_N[part]) * top_k):
            good &= flat[place] == missing
        right[part] = good


@compiled
def _is_present(flat: Any, at: int, limits: Any, limits_at: int, top_k: int) -> bool:
    """Whether the ids at ``at`` are in range and pairwise distinct."""
    good = True
    for slot in range(top_k):
        expert = flat[at + slot]
        good &= 0 <= expert <= limits[limits_at + slot]
        for other in range(slot):
            good &= flat[at + other] != expert
    return good


@compiled
def quiet_records(work: tuple[Any, ...], how: tuple[int, int, int, int, int]) -> None:
    """Whether nothing is suspect in the first look at each of some records. ``how``: as in ``shows_enough``.

    ``work``: all ids, flat, how many layers and slots, and all token ids; of each record its first token in both, and
    how many tokens have rows, int64; no token, int64; and where each verdict is written, bool.
    """
    flat, layers, top_k, token_ids, first_N, ids_N, count_N, none, quiet = work
    for part in range(len(first_N)):
        first, stop = first_N[part], first_N[part] + count_N[part]
        rows = flat[first * layers * top_k : stop * layers * top_k].reshape(stop - first, layers, top_k)
        own = token_ids[ids_N[part] : ids_N[part] + count_N[part]]
        quiet[part] = shows_enough((rows, none, own), how)


@compiled
def shows_enough(record: tuple[Any, Any, Any], how: tuple[int, int, int, int, int]) -> bool:
    """Whether nothing is suspect in a first look for alarms.

    ``record``: rows, absent and token_ids, ``how``: layer, width, step, least_rows and looks, as in
    ``kernels.shows_enough``.
    """
    rows, absent, token_ids = record
    layer, width, step, least_rows, looks = how
    tokens, layers, top_k = rows.shape
    kept = np.empty(tokens, dtype=np.int64)
    count = next_absent = 0
    for token in range(tokens):
        if next_absent < len(absent) and absent[next_absent] == token:
            next_absent += 1
        elif token == 0 or len(token_ids) == 0 or token_ids[token] != token_ids[token - 1]:
            kept[count] = token
            count += 1
    for at in range(step, count, step):
        here, before, differs = kept[at], kept[at - step], False
        for slot in range(top_k):
            differs |= rows[here, layer, slot] != rows[before, layer, slot]
        if not differs:
            return False
    if count < least_rows:
        return True
    looks = min(looks, count)
    draws = looks * top_k
    # so many rows of a layer that chooses evenly among ``width`` experts are enough to tell, with a tenth to spare
    highest, few = 0, top_k + top_k // 2 + 1
    probe = 1
    while probe < looks and 10 * draws * draws < few * (
        11 * probe * top_k * (width + probe * top_k) // width + 10 * top_k * (looks * looks - probe * probe)
    ):
        probe += 1
    spaced = np.empty(looks, dtype=np.int64)  # divisions are slow, and each layer looks at the same rows
    for look in range(looks):
        spaced[look] = kept[look * (count - 1) // max(1, looks - 1)]
    load_E = np.zeros(width, dtype=np.int32)
    for place in range(layers):
        load_E[:] = 0
        seen, stop = 0, probe
        while True:
            while seen < stop:
                chosen_K = rows[spaced[seen], place]
                for slot in range(top_k):
                    expert = chosen_K[slot]
                    if expert < 0 or expert >= width:
                        return False
                    load_E[expert] += 1
                    highest = max(highest, expert)
                seen += 1
            agreeing = 0
            for expert in range(width):
                agreeing += load_E[expert] * load_E[expert]
            # no later row can add more than one that repeats all before it
            if draws * draws >= few * (agreeing + top_k * (looks * looks - seen * seen)):
                break
            if seen == looks:
                return False
            stop = min(looks, seen + 3)
    return highest >= (width + 1) // 2


@compiled
def lay(work: tuple[int, int, int, int, int, int, bool], row: tuple[Any, ...]) -> None:
    """Copy the same runs of layers from each of some tokens; widen to int16. ``row``: as above.

    ``work``: the address of the first token, that of its rows when laid out, the number of tokens, how many bytes they
    are apart, the address of the runs (two int64 each, first row and rows), their number, and whether vectors are
    written past the caches: then each begins at a multiple of ASIDE_ALIGN.
    """
    source, target, tokens, stride, runs_address, runs, aside = work
    row_bytes, out_bytes, rows = _row_bytes(row), _out_bytes(row), _vector_rows(row)
    ahead = _ahead(stride)
    for _ in range(tokens):
        for run in range(runs):
            at = source + _int64_at(runs_address + run * 16) * row_bytes
            left = _int64_at(runs_address + run * 16 + 8)
            while left >= rows:
                _ask_for(at + ahead)
                if aside:
                    _lay_aside(at, target, row)
                else:
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
    if aside:
        _settle(row)


@compiled
def move(work: tuple[int, ...], kinds: tuple[Any, Any, Any]) -> None:
    """Copy the same runs of rows of each of some tokens, from one integer type to another, and mark tokens on the way.

    A token is marked by 1 where a row of it is MISSING or illegal, or holds an id that int16 does not; else by 0.
    ``kinds``: K lanes of int16, and of both types a value each, whose type alone counts.

    ``work``: the addresses of the first token's rows, of what they become, of the limits (K int16 for each row that is
    copied, in order) and of the marks (one byte a token); the number of tokens, how many bytes they and what they
    become are apart, the address of the runs (three int64 each: first row, first row of what they become, rows), and
    their number; then the address of one row of int16, that of the runs of each token that become it (two int64 each:
    first row, rows), and their number.
    """
    at, to, limits_address, marks_address, tokens, stride, out_stride, runs_address, runs = work[:9]
    filler, fills_address, fills = work[9:]
    row, source, target = kinds
    rows, limit_bytes = _vector_rows(row), _row_bytes(row)
    in_bytes, out_bytes = _bytes_of(source) * limit_bytes // 2, _bytes_of(target) * limit_bytes // 2
    ahead = _ahead(stride)
    for token in range(tokens):
        odd, limits = False, limits_address
        for fill in range(fills):
            there = to + _int64_at(fills_address + fill * 16) * out_bytes
            for _ in range(_int64_at(fills_address + fill * 16 + 8)):
                _move_one(filler, there, limits_address, row, row[0], target)
                there += out_bytes
        for run in range(runs):
            here = at + _int64_at(runs_address + run * 24) * in_bytes
            there = to + _int64_at(runs_address + run * 24 + 8) * out_bytes
            count = _int64_at(runs_address + run * 24 + 16)
            whole = count // rows
            for _ in range(whole):
                _ask_for(here + ahead)
                odd |= _move_vector(here, there, limits, row, source, target)
                here, there, limits = here + rows * in_bytes, there + rows * out_bytes, limits + rows * limit_bytes
            left = count - whole * rows
            if left > 0 and whole > 0:
                # a whole vector that ends with the run: some of its rows were copied already
                back = rows - left
                odd |= _move_vector(
                    here - back * in_bytes, there - back * out_bytes, limits - back * limit_bytes, row, source, target
                )
                limits += left * limit_bytes
            else:
                for _ in range(left):
                    odd |= _move_one(here, there, limits, row, source, target)
                    here, there, limits = here + in_bytes, there + out_bytes, limits + limit_bytes
        _mark(marks_address + token, odd)
        at += stride
        to += out_stride


@compiled
def _ahead(stride: int) -> int:
    """How far ahead memory is asked for where tokens are so many bytes apart: the same rows of a later token.

    Of 12 of 48 layers, a processor's own prefetching brings all: this halves the time of a gather from outside the
    caches.
    """
    return stride * max(1, _AHEAD_BYTES // max(1, stride))  # of no layers, tokens are 0 bytes apart


# ----------------------------------------------------------------------------------------------------------------------
# What only the type of a row decides
# ----------------------------------------------------------------------------------------------------------------------


def _shape_of(row: Any) -> tuple[int, int, int]:
    """K, bits of a lane, whole rows of a vector; from numba's type of a row."""
    bits = row.dtype.bitwidth
    return row.count, bits, VECTOR_BYTES * 8 // bits // row.count


@intrinsic
def _row_bytes(context: Any, row: Any) -> Any:
    """Bytes of a row."""
    top_k, bits, _ = _shape_of(row)
    return _constant(top_k * bits // 8, row)


@intrinsic
def _step_rows(context: Any, row: Any) -> Any:
    """Rows of a step."""
    return _constant(_shape_of(row)[2] * VECTORS, row)


@intrinsic
def _out_bytes(context: Any, row: Any) -> Any:
    """Bytes of a row of int16."""
    return _constant(_shape_of(row)[0] * 2, row)


@intrinsic
def _vector_rows(context: Any, row: Any) -> Any:
    """Whole rows of a vector."""
    return _constant(_shape_of(row)[2], row)


@intrinsic
def _bytes_of(context: Any, value: Any) -> Any:
    """Bytes of one integer of this type."""
    return _constant(value.bitwidth // 8, value)


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
        lanes = VECTOR_BYTES * 8 // bits
        bad = None
        for index in range(VECTORS):
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
        lanes = VECTOR_BYTES * 8 // bits
        zeros = ir.Constant(ir.VectorType(ir.IntType(bits), lanes), [0] * lanes)
        smallest, beyond = [], []
        for index in range(VECTORS):
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


@intrinsic
def _ask_for(context: Any, address: Any) -> Any:
    """Ask for the memory at an address, which need not exist, to be read later."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0], 0)
        return context.get_dummy_value()

    return types.none(address), generate


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
    vector = ir.VectorType(ir.IntType(bits), VECTOR_BYTES * 8 // bits)
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


def _reduced(builder: ir.IRBuilder, values: list[Any], join: Callable[[ir.IRBuilder, Any, Any], Any]) -> Any:
    joined = values[0]
    for value in values[1:]:
        joined = join(builder, joined, value)
    return joined


def _smaller(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", left, right), left, right)  # LLVM makes one umin of it


def _either(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.or_(left, right)


def _rotated(builder: ir.IRBuilder, ids: Any, top_k: int, by: int) -> Any:
    count = ids.type.count
    whole = count // top_k * top_k
    # lanes of no whole row are ignored: they stay where they are
    source = [lane // top_k * top_k + (lane % top_k + by) % top_k if lane < whole else lane for lane in range(count)]
    return builder.shuffle_vector(ids, ids, ir.Constant(ir.VectorType(ir.IntType(32), count), source))


# ----------------------------------------------------------------------------------------------------------------------
# Rows laid out
# ----------------------------------------------------------------------------------------------------------------------


@intrinsic
def _lay_vector(context: Any, source: Any, target: Any, row: Any) -> Any:
    """Write the rows of one vector as int16."""
    return _lay_some(source, target, row, _shape_of(row)[2])


@intrinsic
def _lay_aside(context: Any, source: Any, target: Any, row: Any) -> Any:
    """The same, past the caches."""
    return _lay_some(source, target, row, _shape_of(row)[2], aside=True)


@intrinsic
def _settle(context: Any, row: Any) -> Any:
    """Writes past the caches are seen by others before any later write is."""
    return types.none(row), lambda context, builder, signature, arguments: (
        builder.fence("seq_cst"),
        context.get_dummy_value(),
    )[1]


@intrinsic
def _lay_one(context: Any, source: Any, target: Any, row: Any) -> Any:
    """Write one row as int16."""
    return _lay_some(source, target, row, 1)


def _lay_some(source: Any, target: Any, row: Any, rows: int, *, aside: bool = False) -> Any:
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
        place = builder.inttoptr(arguments[1], wide.as_pointer())
        store = builder.store(ids, place, align=ASIDE_ALIGN if aside else 1)
        if aside:
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.none(source, target, row), generate


@intrinsic
def _int64_at(context: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(address), generate


# ----------------------------------------------------------------------------------------------------------------------
# Rows moved from one type to another
# ----------------------------------------------------------------------------------------------------------------------


@intrinsic
def _move_vector(context: Any, here: Any, there: Any, limits_address: Any, row: Any, source: Any, target: Any) -> Any:
    """Copy the rows of one vector; whether one of them is MISSING, illegal or wider than int16."""
    return _move_some((here, there, limits_address, row, source, target), _shape_of(row)[2])


@intrinsic
def _move_one(context: Any, here: Any, there: Any, limits_address: Any, row: Any, source: Any, target: Any) -> Any:
    """The same of one row."""
    return _move_some((here, there, limits_address, row, source, target), 1)


def _move_some(signature: tuple[Any, ...], rows: int) -> Any:
    _, _, _, row, source, target = signature
    top_k, count = _shape_of(row)[0], rows * _shape_of(row)[0]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        given, narrow, wide = (
            ir.VectorType(ir.IntType(bits), count) for bits in (source.bitwidth, 16, target.bitwidth)
        )
        loaded = builder.load(builder.inttoptr(arguments[0], given.as_pointer()), align=1)
        limits = builder.load(builder.inttoptr(arguments[2], narrow.as_pointer()), align=1)
        ids = _resized(builder, loaded, narrow, signed=source.signed)
        builder.store(
            _resized(builder, ids, wide, signed=True), builder.inttoptr(arguments[1], wide.as_pointer()), align=1
        )
        bad = builder.icmp_unsigned(">", ids, limits)
        if source.bitwidth > 16:
            bad = builder.or_(bad, builder.icmp_unsigned("!=", _resized(builder, ids, given, signed=True), loaded))
        differences = [builder.xor(ids, _rotated(builder, ids, top_k, by)) for by in range(1, top_k // 2 + 1)]
        if differences:
            zeros = ir.Constant(narrow, [0] * count)
            equal = builder.icmp_unsigned("==", _reduced(builder, differences, _smaller), zeros)
            bad = builder.or_(bad, equal)
        lanes = ir.IntType(count)
        return builder.icmp_unsigned("!=", builder.bitcast(bad, lanes), ir.Constant(lanes, 0))

    return types.boolean(*signature), generate


def _resized(builder: ir.IRBuilder, ids: Any, wanted: Any, *, signed: bool) -> Any:
    """The lanes in another width."""
    bits, now = wanted.element.width, ids.type.element.width
    if bits == now:
        return ids
    if bits < now:
        return builder.trunc(ids, wanted)
    return builder.sext(ids, wanted) if signed else builder.zext(ids, wanted)


@intrinsic
def _mark(context: Any, address: Any, odd: Any) -> Any:
    """Write one byte, 0 or 1."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        value = builder.zext(arguments[1], byte) if arguments[1].type.width < 8 else arguments[1]
        builder.store(value, builder.inttoptr(arguments[0], byte.as_pointer()))
        return context.get_dummy_value()

    return types.none(address, odd), generate
