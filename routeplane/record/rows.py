"""Rows as a stream stores them: checked, hashed and widened while they pass through the caches once.

Owns the two stored forms of rows, int16 and the bytes of the ``narrow`` encoding, and the one walk over a record's rows
that a reader pays for: each block is checked, searched for MISSING rows, and handed on (to a checksum) before the next
is read from memory. Gives the verdicts of ``validate``, and locates nothing. Knows no record, no Arrow, no file.

Axes: S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.record.parse import frozen_view
from routeplane.record.spec import MISSING, NARROW_MISSING
from routeplane.record.validate import all_legal, kernels_for, kernels_for_bytes, missing_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = [
    "StoredRows",
    "absent_tokens",
    "canonical_blocks",
    "copy_slots",
    "lay_out",
    "move_checked",
    "pick_layers",
    "survey",
    "widen",
    "widen_legal",
]

# Bytes of int16 rows that are processed per block: well below the size of a second-level cache. A call costs some 5 us,
# so smaller blocks are measurably slower.
_BLOCK_BYTES = 2**20
# Tokens that are looked at closely where a row is not there; four times as many each time that the next is not either.
_FEW_TOKENS = 16
# Marked tokens that are judged together: most often there are few, and their rows are copied.
_MARKED_TOKENS = 4_096
# Of narrow rows, as int16. These are written first, into memory that malloc hands out again and again up to this size.
_WIDE_BYTES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredRows:
    """Legal rows as they are held: the proof, for whatever is made of them, that they were checked under ``spec``.

    ``stored``: read-only int16, or the bytes of a ``narrow`` stream, ``[R, L, K]``. ``absent``: the rows that are
    MISSING in some layer, int64, ascending, read-only. Made by ``StoredRows.check``; ``cut`` and ``pick`` of legal rows
    are legal.
    """

    stored: NDArray[Any]
    spec: RouteSpec
    absent: NDArray[np.int64]

    @classmethod
    def check(
        cls, stored: NDArray[Any], spec: RouteSpec, *, feed: Callable[[NDArray[np.int16]], object] | None = None
    ) -> StoredRows | None:
        """Check rows in one pass; None where one is not legal, or the array has another shape.

        ``feed``: as in ``survey``.
        """
        absent = survey(stored, spec, feed=feed)
        return None if absent is None else cls(stored=frozen_view(stored), spec=spec, absent=frozen_view(absent))

    def __len__(self) -> int:
        return len(self.stored)

    def cut(self, start: int, stop: int) -> StoredRows:
        """Rows ``[start, stop)``; shares memory."""
        first, last = np.searchsorted(self.absent, (start, stop))
        return StoredRows(
            stored=self.stored[start:stop], spec=self.spec, absent=frozen_view(self.absent[first:last] - start)
        )

    def pick(self, spec: RouteSpec) -> StoredRows:
        """The rows of a subset of layers, copied; their own where ``spec`` has them all."""
        picked = pick_layers(self.stored, [self.spec.slot(layer) for layer in spec.layer_ids])
        return StoredRows(stored=frozen_view(picked), spec=spec, absent=frozen_view(absent_tokens(picked)))

    def widened(self) -> NDArray[np.int16]:
        """The rows as read-only int16: themselves, or fresh memory for narrow ones."""
        if self.stored.dtype != np.uint8:
            return self.stored
        return frozen_view(widen_legal(self.stored, self.spec))


def survey(
    stored_SLK: NDArray[Any],
    spec: RouteSpec,
    *,
    feed: Callable[[NDArray[np.int16]], object] | None = None,
) -> NDArray[np.int64] | None:
    """The tokens that lack a row in some layer, where every row is legal; None where one is not, or none can be told.

    ``stored_SLK``: int16 or narrow bytes; C-contiguous and of the spec's shape, or nothing can be told. Indices are
    int64, ascending, fresh. ``feed`` is given the rows as int16, in C-contiguous parts of whole tokens, in order: all
    of them, unless the answer is None.

    >>> from routeplane import RouteSpec
    >>> rows = np.asarray([[[3, 5]], [[-1, -1]]], dtype=np.int16)
    >>> survey(rows, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))).tolist()
    [1]
    """
    if stored_SLK.dtype not in (np.int16, np.uint8) or stored_SLK.shape[1:] != spec.row_shape:
        return None
    if not stored_SLK.flags.c_contiguous:
        return None
    kernels, layers = kernels_for(stored_SLK, spec), spec.num_layers
    wide = feed is not None and stored_SLK.dtype == np.uint8
    absent: list[NDArray[np.int64]] = []
    known = 0  # the rows before this one were looked at
    for start, stop in _blocks(stored_SLK, spec, nbytes=_WIDE_BYTES if wide else _BLOCK_BYTES):
        met, few = True, _FEW_TOKENS
        while met and known < stop * layers:
            if kernels is not None:
                most = stop * layers - known
                rows, met = kernels.count_present(stored_SLK, spec.experts_per_layer, first=known, most=most)
                known += rows
            # what the kernel did not get to waits for the next block, where there is one
            if not met and stop < len(stored_SLK):
                break
            # few at first: most often one row is MISSING, between two sequences
            first = known // layers
            last = stop if kernels is None or not met else min(stop, first + few)
            few *= 4
            found = _absent_if_legal(stored_SLK[first:last], spec, kernels)
            if found is None:
                return None
            absent.append(found + first)
            known = last * layers
        if feed is not None:
            part_SLK = stored_SLK[start:stop]
            feed(_widened(part_SLK, spec, kernels) if wide else part_SLK)
    return np.concatenate(absent) if absent else np.empty(0, dtype=np.int64)


def _blocks(stored_SLK: NDArray[Any], spec: RouteSpec, *, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, nbytes // (spec.num_layers * spec.top_k * 2))
    for start in range(0, len(stored_SLK), step):
        yield start, min(start + step, len(stored_SLK))


def _absent_if_legal(part_SLK: NDArray[Any], spec: RouteSpec, kernels: ModuleType | None) -> NDArray[np.int64] | None:
    if kernels is not None:
        legal = kernels.rows_are_legal(part_SLK, spec.experts_per_layer)
    else:
        legal = all_legal(widen(part_SLK, spec) if part_SLK.dtype == np.uint8 else part_SLK, spec)
    return absent_tokens(part_SLK) if legal else None


def absent_tokens(legal_SLK: NDArray[Any]) -> NDArray[np.int64]:
    """The tokens of legal rows, int16 or narrow, that lack one in some layer: fresh int64, ascending."""
    return np.flatnonzero(missing_rows(legal_SLK).any(axis=1))


def pick_layers(stored_SLK: NDArray[Any], slots: Sequence[int]) -> NDArray[Any]:
    """``stored_SLK[:, slots]``, C-contiguous: a copy, of neighbouring layers in one piece each, unless it is all."""
    tokens, _, top_k = stored_SLK.shape
    first, count, row_bytes = slots[0], len(slots), top_k * stored_SLK.itemsize
    if tokens and list(slots) == list(range(first, first + count)):
        # one opaque element for all layers of a token: copying integers takes half as long again
        bytes_SB = stored_SLK.reshape(tokens, -1).view(np.uint8)[:, first * row_bytes : (first + count) * row_bytes]
        picked_S = np.ascontiguousarray(bytes_SB.view(np.dtype((np.void, count * row_bytes))))
        return picked_S.view(stored_SLK.dtype).reshape(tokens, count, top_k)
    out_SLK = np.empty((tokens, count, top_k), dtype=stored_SLK.dtype)
    copy_slots(stored_SLK, slots, out=out_SLK)
    return out_SLK


def canonical_blocks(
    legal_SLK: NDArray[Any], spec: RouteSpec, *, kernels: ModuleType | None = None
) -> Iterator[NDArray[np.int16]]:
    """Legal rows as int16, in C-contiguous parts of whole tokens, in order; narrow ones widened a part at a time.

    ``kernels``: for a caller whose rows are a part of more; by default those that these rows are worth.
    """
    if legal_SLK.dtype != np.uint8:
        yield legal_SLK
        return
    kernels = kernels_for(legal_SLK, spec) if kernels is None else kernels
    for start, stop in _blocks(legal_SLK, spec, nbytes=_WIDE_BYTES):
        yield _widened(legal_SLK[start:stop], spec, kernels)


def lay_out(
    legal_SLK: NDArray[Any],
    spec: RouteSpec,
    *,
    tokens: tuple[int, int],
    slots: tuple[int, ...],
    out: NDArray[np.int16],
    past_caches: bool = False,
) -> None:
    """``out[...] = legal_SLK[a:b, slots]`` as int16, for the tokens ``[a, b)`` of legal rows, int16 or narrow.

    ``out``: C-contiguous, memory of its own. ``past_caches``: it belongs to more than the caches hold, so that it is
    not fetched before it is written, where that can be helped. Slots exist. Copies each row once; of an illegal row, an
    illegal one comes out.
    """
    part_SLK = legal_SLK[tokens[0] : tokens[1]]
    whole = slots == tuple(range(spec.num_layers))
    copied = whole and legal_SLK.dtype != np.uint8
    kernels = None if copied and not past_caches else kernels_for(legal_SLK, spec)
    if kernels is not None:
        kernels.lay_rows(part_SLK, slots, out=out, past_caches=past_caches)
    elif copied:
        out[...] = part_SLK
    elif legal_SLK.dtype != np.uint8:
        copy_slots(part_SLK, slots, out=out)
    else:
        for start, stop in _blocks(part_SLK, spec, nbytes=_BLOCK_BYTES):
            some_SLK = part_SLK[start:stop]
            _widen_into(out[start:stop], some_SLK if whole else pick_layers(some_SLK, slots), spec=spec)


def move_checked(
    rows: NDArray[Any],
    out: NDArray[Any],
    *,
    spec: RouteSpec,
    slots: Sequence[int],
    into: Sequence[int],
    gaps: NDArray[np.int64] | None = None,
    filler: NDArray[np.int16] | None = None,
) -> NDArray[np.int64] | None:
    """``out[:, into] = rows[:, slots]``, checked while each row is in registers: the tokens that lack a row.

    ``rows``, ``out``: integers of any width, ``[S, D, K]`` with a D of its own each; slots exist. ``gaps``: tokens,
    int64, ascending, whose rows may be anything; they are not among those returned. ``filler``: ``[K]``, what all other
    layers of ``out`` become; default: they stay as they are.

    Returns int64, ascending; None where nothing can be told, since a row is not legal, or the compiled loop is not
    there, or not for such arrays: then ``out`` may hold anything, and numpy has the last word.

    >>> rows = np.ones((2, 1, 1), dtype=np.int64)
    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=1, layer_ids=(0,))
    >>> move_checked(rows, rows.astype(np.int16), spec=spec, slots=(0,), into=(0,)) is None  # too few to load it for
    True
    """
    kernels = kernels_for_bytes(len(rows) * spec.num_layers * spec.top_k * 2, spec)
    if kernels is None or not (_is_side_by_side(rows) and _is_side_by_side(out)):
        return None
    marks_S = kernels.move_rows(
        rows, out, widths=spec.experts_per_layer, slots=tuple(slots), into=tuple(into), filler=filler
    )
    if gaps is not None:
        marks_S[gaps] = False
    marked, absent = np.flatnonzero(marks_S), []
    for start in range(0, len(marked), _MARKED_TOKENS):
        some = marked[start : start + _MARKED_TOKENS]
        some_SLK = rows[some[:, None], np.asarray(slots)]
        if not all_legal(some_SLK, spec):
            return None
        absent.append(some[(some_SLK[:, :, 0] == MISSING).any(axis=1)])
    return np.concatenate(absent) if absent else marked


def _is_side_by_side(rows: NDArray[Any]) -> bool:
    """Whether the rows of each token follow one another in memory, as integers in native order."""
    return rows.dtype.kind in "iu" and rows.dtype.isnative and rows[:1].flags.c_contiguous


def copy_slots(part_SLK: NDArray[Any], slots: Sequence[int] | NDArray[np.int64], *, out: NDArray[Any]) -> None:
    """``out[...] = part_SLK[:, slots]`` for C-contiguous arrays of one type ``[rows, slot, ...]``; the slots exist."""
    if part_SLK.size == 0:
        return
    # One opaque element per slot: copying K small integers at a time is 2 to 8 times slower, and an index array over
    # three axes copies everything once more.
    slot = np.dtype((np.void, part_SLK[0, 0].nbytes))
    flat, target = (array.reshape(len(array), -1).view(slot) for array in (part_SLK, out))
    np.take(flat, slots, axis=1, out=target, mode="clip")  # "raise" would buffer the output; slots exist


def widen_legal(legal_SLK: NDArray[np.uint8], spec: RouteSpec) -> NDArray[np.int16]:
    """``widen`` of rows that are known to be legal."""
    return _widened(legal_SLK, spec, kernels_for(legal_SLK, spec))


def _widened(legal_SLK: NDArray[np.uint8], spec: RouteSpec, kernels: ModuleType | None) -> NDArray[np.int16]:
    if kernels is None:
        return widen(legal_SLK, spec)
    out_SLK = np.empty(legal_SLK.shape, dtype=np.int16)
    kernels.lay_rows(legal_SLK, tuple(range(spec.num_layers)), out=out_SLK)
    return out_SLK


def widen(stored_SLK: NDArray[np.uint8], spec: RouteSpec) -> NDArray[np.int16]:
    """Narrow rows ``[S, L, K]`` as int16, in memory of their own; a row of 0xFF alone is MISSING.

    Where E <= 255 the byte 0xFF is not an id, so it becomes -1 wherever it stands and a partly missing row shows as the
    corruption it is. With E = 256 the byte is also expert 255, and only a whole row of it is MISSING.
    """
    routes_SLK = np.empty(stored_SLK.shape, dtype=np.int16)
    _widen_into(routes_SLK, stored_SLK, spec=spec)
    return routes_SLK


def _widen_into(out_SLK: NDArray[np.int16], stored_SLK: NDArray[np.uint8], *, spec: RouteSpec) -> None:
    if max(spec.experts_per_layer) <= NARROW_MISSING:
        # 0xFF + 1 wraps to 0, which one less makes -1; no other byte wraps. Some three times as fast as a mask.
        np.subtract(stored_SLK + np.uint8(1), 1, out=out_SLK, dtype=np.int16)
        return
    np.copyto(out_SLK, stored_SLK)
    begins_SL = _begins_missing(stored_SLK)
    if begins_SL.any():
        # only rows that begin so are looked at in full
        token_N, slot_N = np.nonzero(begins_SL)
        filler_N = (stored_SLK[token_N, slot_N] == NARROW_MISSING).all(axis=1)
        out_SLK[token_N[filler_N], slot_N[filler_N]] = MISSING


def _begins_missing(stored_SLK: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Rows whose first bytes are 0xFF, bool ``[S, L]``: as many bytes at once as the row's length lets numpy compare.

    Of bytes that are compared one by one, one in 256 rows begins so by chance, and each costs more than all others.
    """
    if stored_SLK.flags.c_contiguous:
        for together in (np.dtype(np.uint64), np.dtype(np.uint32), np.dtype(np.uint16)):
            if stored_SLK.shape[2] % together.itemsize == 0:
                return np.asarray(stored_SLK.view(together)[:, :, 0] == np.iinfo(together).max)
    return missing_rows(stored_SLK)
