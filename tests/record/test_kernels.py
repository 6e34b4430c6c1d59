"""The kernel against the numpy rule: equal verdicts on every K, type, place in memory and kind of illegal row.

The numpy rule is itself held to a plain loop, in ``test_validate``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind
from routeplane.record import validate
from routeplane.record.codec import widen
from routeplane.record.kernels import MAX_TOP_K, count_present, move_rows, rows_are_legal
from routeplane.record.spec import MISSING, NARROW_MISSING, RouteSpec
from routeplane.record.validate import all_legal, check_routes, find_problems
from routeplane.testing.strategies import CORRUPTIONS, corruptions, routes, specs

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP_KS = range(1, MAX_TOP_K + 1)


def numpy_verdict(rows_SLK: NDArray[Any], spec: RouteSpec) -> bool:
    """The reference, at any size: arrays with gaps in memory never reach the kernel."""
    gapped_SLK = np.repeat(rows_SLK, 2, axis=0)[::2]
    return all_legal(widen(gapped_SLK, spec) if rows_SLK.dtype == np.uint8 else gapped_SLK, spec)


def placed(values: NDArray[Any], offset: int, *, around: int) -> NDArray[Any]:
    """A copy that begins ``offset`` bytes into memory whose other bytes are all ``around``."""
    memory = np.full(offset + values.nbytes + 200, around, dtype=np.uint8)
    memory[offset : offset + values.nbytes] = values.reshape(-1).view(np.uint8)
    found = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
    found.flags.writeable = False
    return found


def random_rows(seed: int, *, top_k: int, tokens: int, widths: tuple[int, ...]) -> NDArray[np.int16]:
    """Legal rows, a fifth of them MISSING."""
    rng = np.random.default_rng(seed)
    layers = [rng.random((tokens, width)).argsort(axis=1)[:, :top_k] for width in widths]
    rows_SLK = np.stack(layers, axis=1).astype(np.int16)
    rows_SLK[rng.random(rows_SLK.shape[:2]) < 0.2] = MISSING
    return rows_SLK


def mutations(row_K: NDArray[np.int16], width: int, at: int) -> list[NDArray[np.int16]]:
    """The row with one change each: most are illegal, and the reference says which."""
    top_k = len(row_K)
    full_K = np.where(row_K == MISSING, np.arange(top_k), row_K)
    ramp_K = np.arange(top_k)
    changed = [np.where(ramp_K == at, value, full_K) for value in (-1, -2, -(2**15), width, 255, 256, 2**15 - 1)]
    # every distance between two equal slots, and between two MISSING ones
    for by in range(1, top_k):
        other_K = ramp_K == (at + by) % top_k
        changed += [np.where(other_K, full_K[at], full_K), np.where(other_K | (ramp_K == at), MISSING, full_K)]
    # runs of the two values that mean MISSING, of every length
    changed += [
        np.where((ramp_K - at) % top_k < run, value, full_K) for run in range(1, top_k + 1) for value in (-1, 255)
    ]
    return [each.astype(np.int16) for each in changed]


# ----------------------------------------------------------------------------------------------------------------------
# Equal verdicts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int16", "uint8"])
@pytest.mark.parametrize("top_k", TOP_KS)
def test_every_mutation_of_every_slot_gets_the_numpy_verdict(top_k: int, kind: str) -> None:
    """One changed row among legal ones, at every slot, near both ends of a step, in one width and in one per layer."""
    for widths in ((256, 256, 256), (top_k + 1, 255, 256), (top_k, 128, 129)):
        spec = RouteSpec(num_experts=widths, top_k=top_k, layer_ids=(0, 1, 2))
        tokens = 1 + 3 * (64 // top_k * 4) // 3  # one row of each layer beyond three steps of the narrow kernel
        rows_SLK = random_rows(top_k, top_k=top_k, tokens=tokens, widths=widths).astype(kind)

        assert rows_are_legal(rows_SLK, spec.experts_per_layer)
        for at in range(top_k):
            token, layer = (0, tokens - 1, 7 * at % tokens)[at % 3], at % 2
            kept_K = rows_SLK[token, layer].copy()
            for row_K in mutations(kept_K.astype(kind).view(f"i{kept_K.itemsize}"), widths[layer], at):
                rows_SLK[token, layer] = row_K.astype(kind)
                expected = numpy_verdict(rows_SLK[token : token + 1], spec)

                assert expected == rows_are_legal(rows_SLK, spec.experts_per_layer), (widths, rows_SLK[token, layer])
            rows_SLK[token, layer] = kept_K


@pytest.mark.parametrize("kind", ["int16", "uint8"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8, 10, 22, 32])
def test_every_length_and_address_is_looked_at_to_its_end(top_k: int, kind: str) -> None:
    """No row is skipped and none beyond the array is read as one, whatever the length, the address and the memory
    around it."""
    spec = RouteSpec(num_experts=64, top_k=top_k, layer_ids=(0,))
    longest = 64 // top_k * 4 * 2 + 2
    rows_SLK = random_rows(1, top_k=top_k, tokens=longest, widths=(64,)).astype(kind)
    for tokens in range(longest + 1):
        here_SLK = placed(rows_SLK[:tokens], tokens % 71, around=0x40 + tokens % 2 * 0x3F)

        assert rows_are_legal(here_SLK, spec.experts_per_layer)
        for token in {0, tokens // 2, tokens - 2, tokens - 1} & set(range(tokens)):
            bad_SLK = here_SLK.copy()
            bad_SLK[token, 0, -1] = 64

            assert not rows_are_legal(placed(bad_SLK, 70 - tokens % 71, around=0), spec.experts_per_layer)


_GUARDED = """
import ctypes, mmap
import numpy as np
from routeplane.record.kernels import count_present, lay_rows, move_rows, rows_are_legal
page, memory = mmap.PAGESIZE, mmap.mmap(-1, 2 * mmap.PAGESIZE)
whole = np.frombuffer(memory, dtype=np.uint8)
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + page), page, 0) == 0
for kind in ("int16", "uint8"):
    for top_k in (1, 2, 7, 8, 17, 22, 32):
        for tokens in range(page // 2 // np.dtype(kind).itemsize // top_k):
            size = tokens * top_k * np.dtype(kind).itemsize
            rows = whole[page - size : page].view(kind).reshape(-1, 1, top_k)
            rows[:] = np.arange(top_k)
            assert rows_are_legal(rows, (64,))
            assert tokens - count_present(rows, (64,), first=0, most=tokens)[0] < 600
            out = np.empty(rows.shape, dtype=np.int16)
            for past_caches in (False, True):
                out.fill(-2)
                lay_rows(rows, (0,), out=out, past_caches=past_caches)
                assert (out == rows).all()
            # whole and last vectors end where readable memory does, on both sides
            if tokens and kind == "int16" and top_k in (1, 8, 22):
                assert not move_rows(rows, out, widths=(64,), slots=(0,), into=(0,)).any()
                assert not move_rows(out, rows, widths=(64,), slots=(0,), into=(0,)).any()
                assert (out == rows).all()
print("read nothing beyond")
"""


def test_nothing_beyond_the_array_is_read() -> None:
    """Arrays of every length that end where readable memory ends: one byte further, and the process would die."""
    done = subprocess.run([sys.executable, "-c", _GUARDED], capture_output=True, text=True, check=False)

    assert (0, "read nothing beyond\n", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("kind", ["int16", "uint8"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8, 10, 22, 32])
def test_rows_are_counted_up_to_the_first_of_another_kind(top_k: int, kind: str) -> None:
    """Wherever a MISSING or an illegal row stands, the count ends before it, less than two steps short, and says that
    it met one; without any it ends less than two steps short of what was asked for."""
    widths = (255, 64, 128)
    step = 64 // np.dtype(kind).itemsize // top_k * 4
    tokens = 3 * step
    rows_SLK = random_rows(4, top_k=top_k, tokens=tokens, widths=widths)
    rows_SLK[(rows_SLK == MISSING).any(axis=2)] = np.arange(top_k)
    rows_SLK = placed(rows_SLK.astype(kind), top_k, around=0xFF)
    for first, most in ((0, 3 * tokens), (0, 2 * step + 1), (step, 4 * step), (7, step), (0, 0), (3 * tokens - 3, 3)):
        counted, met = count_present(rows_SLK, widths, first=first, most=most)

        assert not met
        assert most - 2 * step < counted <= most
    for at in range(0, 3 * tokens, 17):
        for row_K in ([-1] * top_k, [*range(top_k - 1), 64 if at % 3 == 1 else 255]):
            bad_SLK = rows_SLK.copy()
            bad_SLK.reshape(-1, top_k)[at] = np.asarray(row_K).astype(kind)
            for first in {0, max(0, at - step), at}:
                counted, met = count_present(bad_SLK, widths, first=first, most=3 * tokens - first)

                assert first + counted <= at
                assert first + counted > min(at, 3 * tokens) - 2 * step
                assert met == (
                    at - first < (3 * tokens - first - -(-64 // np.dtype(kind).itemsize // top_k)) // step * step
                )


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
#: One side has int16 wherever rows are moved; each pair and each K is compiled once.
PAIRS = sorted({*((kind, "int16") for kind in INTEGERS), *(("int16", kind) for kind in INTEGERS)})


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("kind", ["uint8", "int16", "int64"])
def test_rows_are_moved_and_marked(kind: str, top_k: int) -> None:
    """Rows of some layers, out of and into arrays of other depths: equal to numpy's, nothing else is written, and a
    token is marked where a row that was asked for is MISSING, illegal, or wider than int16."""
    widths = (128, 100, 64, 127, 90)
    wide_SLK = random_rows(5, top_k=top_k, tokens=23, widths=(*widths, 128, 128)).astype("int64")
    wide_SLK[wide_SLK == MISSING] = 126 if kind == "uint8" else MISSING
    wide_SLK[3, 1, 0], wide_SLK[7, 5, 0], wide_SLK[11, 0, -1] = (
        127,
        127,
        2**40 + 1,
    )  # of these, layer 5 is not asked for
    rows = wide_SLK.astype(kind)
    slots, into = (4, 0, 1, 2, 6), (0, 3, 4, 5, 1)
    given_SLK = wide_SLK[:, slots].astype(kind)
    spec = RouteSpec(num_experts=widths, top_k=top_k, layer_ids=tuple(range(5)))
    expected = [
        not all_legal(given_SLK[[token]], spec) or bool((given_SLK[token] == MISSING).any()) for token in range(23)
    ]
    for target in ("int16", "uint8", "int32") if kind == "int16" else ("int16",):
        out = np.full((23, 6, top_k), 77, dtype=target)
        marks = move_rows(rows, out, widths=widths, slots=slots, into=into)

        assert expected == marks.tolist()
        ordinary = ~marks
        assert (out[ordinary][:, into] == given_SLK[ordinary]).all()
        assert (out[:, 2] == 77).all()
        filled = np.full((23, 8, top_k), 77, dtype=target)
        move_rows(rows, filled, widths=widths, slots=slots, into=into, filler=np.arange(top_k, dtype=np.int16))
        assert (filled[:, (2, 6, 7)] == np.arange(top_k)).all()
        assert (filled[:, into] == out[:, into]).all()
        if kind == "int16":
            assert out[:, into].tobytes() == given_SLK.astype(target).tobytes()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_integer_becomes_every_other(source: str, target: str) -> None:
    """Ids keep their values; those that a type of more than 16 bits holds beyond int16 are marked."""
    rows = random_rows(6, top_k=8, tokens=9, widths=(120, 120))
    rows = np.where(rows == MISSING, np.arange(8) + 119, rows).astype(source)
    out = np.zeros((9, 2, 8), dtype=target)

    assert not move_rows(rows, out, widths=(128, 128), slots=(0, 1), into=(0, 1)).any()
    assert (out == rows).all()
    if rows.itemsize > 2:
        rows[2, 1, 0] += 2**16
        assert [2] == np.flatnonzero(move_rows(rows, out, widths=(128, 128), slots=(0, 1), into=(0, 1))).tolist()


@pytest.mark.parametrize("top_k", [2, 3, 4, 7])
def test_byte_255_is_an_expert_or_missing(top_k: int) -> None:
    """With 256 experts every pattern of 255 in a narrow row gets the numpy verdict: alone it is an id, all around it is
    MISSING, and anything between is a duplicate."""
    spec = RouteSpec(num_experts=256, top_k=top_k, layer_ids=(0,))
    for pattern in range(2**top_k):
        filler_K = np.asarray([pattern >> slot & 1 for slot in range(top_k)], dtype=np.bool_)
        row = np.where(filler_K, NARROW_MISSING, np.arange(top_k)).astype(np.uint8)[None, None]

        assert numpy_verdict(row, spec) == rows_are_legal(row, (256,))
        assert (pattern.bit_count() in (0, 1, top_k)) == rows_are_legal(row, (256,))


@given(st.data())
def test_legal_rows_are_legal(data: st.DataObject) -> None:
    """Whatever the strategies call legal the kernel does, at any address."""
    spec = data.draw(specs(max_layers=4, max_top_k=12))
    rows_SLK = data.draw(routes(spec, tokens=st.integers(0, 40)))

    offset = data.draw(st.integers(0, 65))

    assert rows_are_legal(placed(rows_SLK, offset, around=0xFF), spec.experts_per_layer)
    if max(spec.experts_per_layer) <= 256:
        assert rows_are_legal(placed(rows_SLK.astype(np.uint8), offset, around=0xFF), spec.experts_per_layer)


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_no_corruption_passes(name: str, data: st.DataObject) -> None:
    """Every named corruption is seen through the public verbs in an array that is large enough for the kernel, with the
    finding that numpy gives; the kernel sees each that still is an array of rows."""
    bad = data.draw(corruptions(which=(name,)))
    size = max(1, bad.routes.nbytes)
    large_SLK = np.repeat(bad.routes, validate._KERNEL_BYTES // size + 1, axis=0)

    assert not all_legal(large_SLK, bad.spec)
    assert [bad.kind] == [problem.kind for problem in find_problems(large_SLK, bad.spec, limit=1)]
    if bad.token is not None:
        assert not rows_are_legal(large_SLK, bad.spec.experts_per_layer)


# ----------------------------------------------------------------------------------------------------------------------
# Who asks the kernel
# ----------------------------------------------------------------------------------------------------------------------


def test_a_large_array_has_its_bad_row_located() -> None:
    """Above the size from which the kernel is asked, one bad row anywhere is found at its place."""
    spec = RouteSpec(num_experts=(9, 64, 8), top_k=8, layer_ids=(3, 4, 9))
    legal_SLK = random_rows(2, top_k=8, tokens=30_000, widths=(9, 64, 8))
    check_routes(legal_SLK, spec)

    assert legal_SLK.nbytes > validate._KERNEL_BYTES
    for token in (0, 14_000, 29_998, 29_999):
        routes_SLK = legal_SLK.copy()
        routes_SLK[token, 2] = [0, 1, 2, 3, 4, 5, 6, 8]
        found = find_problems(routes_SLK, spec)

        assert [(ErrorKind.ID_OUT_OF_RANGE, token, 9)] == [(each.kind, each.token, each.layer) for each in found]
        with pytest.raises(DataError):
            check_routes(routes_SLK, spec)


@pytest.mark.parametrize("top_k", [MAX_TOP_K, MAX_TOP_K + 1])
def test_a_wider_row_than_a_vector_holds_is_numpys(top_k: int) -> None:
    """At the widest row of the kernel and one slot beyond, large arrays get the right verdict."""
    spec = RouteSpec(num_experts=top_k + 1, top_k=top_k, layer_ids=(0, 1))
    routes_SLK = random_rows(3, top_k=top_k, tokens=4_000, widths=(top_k + 1, top_k + 1))

    assert MAX_TOP_K == validate._KERNEL_TOP_K
    assert all_legal(routes_SLK, spec)
    routes_SLK[-1, -1] = np.arange(top_k) // 2
    assert not all_legal(routes_SLK, spec)


_PROGRAM = """
import sys
{first}
import numpy as np
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import all_legal
spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
rows = np.tile(np.asarray([1, 0], dtype=np.int16), ({tokens}, 1, 1))
verdicts = [all_legal(rows, spec)]
rows[-1] = 3
print(*verdicts, all_legal(rows, spec), sys.modules.get("numba") is not None)
"""


@pytest.mark.parametrize(
    ("first", "tokens", "loaded"),
    [
        pytest.param("", 1_000, False, id="small_arrays_do_not_load_it"),
        pytest.param("", 300_000, True, id="large_arrays_do"),
        pytest.param("sys.modules['numba'] = None", 300_000, False, id="numpy_decides_where_it_is_not_installed"),
        pytest.param(
            "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'", 300_000, True, id="numpy_decides_where_it_is_disabled"
        ),
    ],
)
def test_the_kernel_is_loaded_by_large_arrays_alone(first: str, tokens: int, loaded: bool) -> None:
    """The verdicts are the same in a process that has it, one that has no use for it, and one that cannot have it."""
    program = _PROGRAM.format(first=first, tokens=tokens)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (f"True False {loaded}\n", "") == (done.stdout, done.stderr)
