"""Which token stands in which row: plans for padding and packing, as pure index arithmetic.

Owns the one answer to "row n is token t of record r, or padding". A plan is built once, from lengths alone, and applied
to routes, token ids, log-probabilities, masks and positions alike, so that all of them are cut the same way. Knows
numpy arrays and lengths; knows no record, no torch, no file.

Axes: B sequences, S positions of a padded row, T packed rows, N = B*S or T rows in the order in which gates see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from routeplane.arrays import frozen_view
from routeplane.errors import ErrorKind, UsageError

__all__ = ["PADDING", "Layout", "PaddingSide", "PlanOptions", "TokenPlan"]

Layout = Literal["padded", "packed"]
PaddingSide = Literal["right", "left"]

#: The record and the token of a row that is no token.
PADDING = -1
# cu_seqlens are int32, as attention kernels want them.
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPlan:
    """For every output row the record and the token it holds, or padding. Immutable; its arrays are read-only.

    ``layout``: ``"padded"`` (``shape`` is ``(B, S)``) or ``"packed"`` (``(T,)``). ``record_N``, ``token_N``: int64
    ``[N]``, PADDING (-1) in both where the row is padding; row ``b*S + s`` of a padded plan, row ``t`` of a packed one.
    ``lengths``: int64 ``[B]``, tokens of each sequence. ``cu_seqlens``: int32 ``[B+1]``, running sum of ``lengths``
    (offsets as they were without any padding). ``cu_seqlens_padded``: int32 ``[B+1]``, sequence ``b`` with its padding
    occupies rows ``[cu_seqlens_padded[b], cu_seqlens_padded[b+1])``; equal to ``cu_seqlens`` where nothing is padded.

    Make one with ``padded`` or ``packed``. Raises UsageError (ARGUMENT, TOO_LONG), before anything is allocated.
    """

    layout: Layout
    shape: tuple[int, ...]
    record_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    cu_seqlens_padded: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("record_N", "token_N", "lengths", "cu_seqlens", "cu_seqlens_padded"):
            object.__setattr__(self, name, frozen_view(getattr(self, name)))
        count = len(self.lengths)
        if not len(self.record_N) == len(self.token_N) == int(np.prod(self.shape)) == int(self.cu_seqlens_padded[-1]):
            raise _refused(f"a record and a token for each row of shape {list(self.shape)}", f"{len(self.record_N)}")
        if not len(self.cu_seqlens) == len(self.cu_seqlens_padded) == count + 1:
            raise _refused(f"{count + 1} offsets for {count} sequences", f"{len(self.cu_seqlens)}")
        padding_N = self.record_N == PADDING
        tokens = self.token_N[~padding_N]
        if not np.all((tokens >= 0) & (tokens < self.lengths[self.record_N[~padding_N]])):
            raise _refused("tokens that their sequences have", "others")
        if not np.all(self.token_N[padding_N] == PADDING):
            raise _refused("padding rows without a token", "others")

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        seq_len: int | None = None,
        pad_to_multiple_of: int = 1,
        padding_side: PaddingSide = "right",
    ) -> TokenPlan:
        """One row of S positions per sequence: ``seq_len``, or the longest length rounded up to the multiple.

        A ``seq_len`` that is no multiple of ``pad_to_multiple_of`` is refused, and so is a longer sequence.
        """
        options = PlanOptions(
            layout="padded", seq_len=seq_len, pad_to_multiple_of=pad_to_multiple_of, padding_side=padding_side
        )
        return options.plan(lengths)

    @classmethod
    def packed(cls, lengths: Sequence[int] | NDArray[np.integer[Any]], *, pad_to_multiple_of: int = 1) -> TokenPlan:
        """All sequences one after another, each followed by the padding that its multiple needs."""
        return PlanOptions(layout="packed", pad_to_multiple_of=pad_to_multiple_of).plan(lengths)

    @classmethod
    def _from_slots(
        cls,
        lengths_B: NDArray[np.int64],
        *,
        layout: Layout,
        shape: tuple[int, ...],
        slots_B: NDArray[np.int64],
        lead_B: NDArray[np.int64],
    ) -> TokenPlan:
        """A plan from each sequence's slot: its width in rows, and the padding rows before its first token."""
        edges = _running_sum(slots_B)
        record_N = np.repeat(np.arange(len(lengths_B), dtype=np.int64), slots_B)
        token_N = np.arange(edges[-1], dtype=np.int64) - np.repeat(edges[:-1] + lead_B, slots_B)
        padding_N = (token_N < 0) | (token_N >= np.repeat(lengths_B, slots_B))
        record_N[padding_N] = PADDING
        token_N[padding_N] = PADDING
        return cls(
            layout=layout,
            shape=shape,
            record_N=record_N,
            token_N=token_N,
            lengths=lengths_B,
            cu_seqlens=_running_sum(lengths_B).astype(np.int32),
            cu_seqlens_padded=edges.astype(np.int32),
        )

    @property
    def num_rows(self) -> int:
        """N, padding included: the rows that a gate sees."""
        return len(self.record_N)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.lengths)

    def padding(self) -> NDArray[np.bool_]:
        """Which rows are padding: a fresh bool array of ``shape``."""
        padding_N: NDArray[np.bool_] = self.record_N == PADDING
        return padding_N.reshape(self.shape)

    def positions(self) -> NDArray[np.int64]:
        """Position of every row within its sequence, 0 at each first token: a fresh int64 array of ``shape``.

        Padding after a sequence continues its positions. So attention that finds sequences by restarting positions
        takes it for the sequence's tail, where causality hides it from every real token; a position that restarted
        would open a sequence of its own. Padding before a sequence is 0 throughout: no run, hence no neighbour of it.
        """
        row_N = np.arange(self.num_rows, dtype=np.int64)
        real_N = self.record_N != PADDING
        last_real_N = np.maximum.accumulate(np.where(real_N, row_N, PADDING))
        slot_start_N = np.repeat(self.cu_seqlens_padded[:-1], np.diff(self.cu_seqlens_padded))
        follows_N = ~real_N & (last_real_N >= slot_start_N)
        positions_N = np.where(real_N, self.token_N, 0)
        last_N = last_real_N[follows_N]
        positions_N[follows_N] = self.token_N[last_N] + row_N[follows_N] - last_N
        return positions_N.reshape(self.shape)

    def predecessors(self) -> NDArray[np.int64]:
        """Row of the token before each row's token, -1 where there is none: a fresh int64 array ``[N]``.

        First tokens, padding, and tokens whose predecessor the plan does not hold next to them have none.
        """
        found_N = np.full(self.num_rows, PADDING, dtype=np.int64)
        rows = np.flatnonzero(self._continues()[1:] & (self.record_N[1:] != PADDING))
        found_N[rows + 1] = rows
        return found_N

    def gather(
        self,
        columns: Sequence[NDArray[Any]],
        *,
        fill: bool | int | float,
        dtype: DTypeLike | None = None,
        slots: Sequence[int] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Per-record arrays ``[length, ...]`` laid out by the plan: ``[*shape, ...]``, ``fill`` at padding.

        ``columns``: one array per sequence, of the plan's lengths, equal in dtype and further axes; only read.
        ``dtype``: of the output (default: theirs, in native byte order); must hold every value of theirs.
        ``slots``: of axis 1, keep these positions alone, in this order; nothing else of the axis is read.
        ``out``: C-contiguous array to fill and return, every row of it; else a fresh one, owned by the caller.
        Raises UsageError (ARGUMENT) for arrays that disagree with the plan or each other, before any allocation.
        """
        source = self._check_columns(columns)
        target = np.dtype(source.dtype if dtype is None else dtype).newbyteorder("=")
        if not np.can_cast(source.dtype, target, "safe"):
            raise _refused(f"a dtype that holds every {source.dtype}", f"{target}")
        picked = None if slots is None else _check_slots(slots, source.shape)
        trailing = source.shape[1:] if slots is None else (len(slots), *source.shape[2:])
        cell = _fill_value(fill, target)
        if out is None:
            out = np.empty((*self.shape, *trailing), dtype=target)
        elif out.shape != (*self.shape, *trailing) or out.dtype != target or not out.flags.c_contiguous:
            expected = f"out as C-contiguous {target} {[*self.shape, *trailing]}"
            raise _refused(expected, f"{out.dtype} {list(out.shape)}")
        self._copy_runs(columns, out.reshape(self.num_rows, *trailing), cell, picked)
        return out

    def _copy_runs(
        self,
        columns: Sequence[NDArray[Any]],
        out_N: NDArray[Any],
        cell: NDArray[Any],
        picked: NDArray[np.int64] | None,
    ) -> None:
        for record, token, row, count in self._runs:
            rows = slice(row, row + count)
            if record == PADDING:
                out_N[rows] = cell
            elif picked is None:
                out_N[rows] = columns[record][token : token + count]
            else:
                _copy_slots(columns[record][token : token + count], picked, out_N[rows])

    def _continues(self) -> NDArray[np.bool_]:
        """Whether a row goes on where the row before it stopped: same record and next token, or both padding."""
        going_N = np.zeros(self.num_rows, dtype=np.bool_)
        step = np.where(self.record_N[1:] == PADDING, 0, 1)
        going_N[1:] = (np.diff(self.record_N) == 0) & (np.diff(self.token_N) == step)
        return going_N

    @cached_property
    def _runs(self) -> list[tuple[int, int, int, int]]:
        """``(record, first token, first row, rows)`` of every run; they tile the rows, so that none stays unwritten."""
        starts = np.flatnonzero(~self._continues())
        counts = np.diff(np.append(starts, self.num_rows))
        table = np.stack([self.record_N[starts], self.token_N[starts], starts, counts], axis=1)
        return [(record, token, row, count) for record, token, row, count in table.tolist()]

    def _check_columns(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(columns) != self.num_sequences:
            raise _refused(f"one array per sequence, {self.num_sequences} in all", f"{len(columns)}")
        first = columns[0]
        for index, (array, length) in enumerate(zip(columns, self.lengths.tolist(), strict=True)):
            if array.ndim == 0 or array.dtype != first.dtype or array.shape != (length, *first.shape[1:]):
                expected = f"{first.dtype} {[length, *first.shape[1:]]}"
                raise _refused(expected, f"{array.dtype} {list(array.shape)} @ sequence {index}")
        return first


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How sequences become rows, before any length is known. Checked when made; raises UsageError (ARGUMENT).

    ``seq_len``: S of a padded plan, None for the longest sequence; refused for a packed one. ``pad_to_multiple_of``:
    what S (padded) or each sequence's rows (packed) are a multiple of. ``padding_side``: a packed plan pads right.
    """

    layout: Layout = "padded"
    seq_len: int | None = None
    pad_to_multiple_of: int = 1
    padding_side: PaddingSide = "right"

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise _refused(f"layout of {get_args(Layout)}", repr(self.layout))
        if self.padding_side not in get_args(PaddingSide):
            raise _refused(f"padding_side of {get_args(PaddingSide)}", repr(self.padding_side))
        require_positive(self.pad_to_multiple_of, "pad_to_multiple_of")
        if self.layout == "packed":
            if self.seq_len is not None:
                raise _refused("no seq_len for layout 'packed'", repr(self.seq_len))
            if self.padding_side != "right":
                raise _refused("padding_side 'right' for layout 'packed'", repr(self.padding_side))
        elif self.seq_len is not None:
            require_positive(self.seq_len, "seq_len")
            if self.seq_len % self.pad_to_multiple_of:
                raise _refused(f"seq_len as a multiple of {self.pad_to_multiple_of}", f"{self.seq_len}")

    def slot_rows(self, length: int) -> int:
        """Rows that a sequence of ``length`` tokens asks for, with its own padding."""
        if self.seq_len is not None:
            return self.seq_len
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def rows_after(self, length: int, *, rows: int, count: int) -> int:
        """Rows of a plan of ``count`` sequences and ``rows`` rows once a sequence of ``length`` tokens joins it."""
        if self.layout == "packed":
            return rows + self.slot_rows(length)
        widest = rows // count if count else 0
        return (count + 1) * max(widest, self.slot_rows(length))

    def plan(self, lengths: Sequence[int] | NDArray[np.integer[Any]]) -> TokenPlan:
        """The plan for sequences of these lengths, in this order. Raises UsageError (ARGUMENT, TOO_LONG)."""
        lengths_B = self._check_lengths(lengths)
        multiple = self.pad_to_multiple_of
        slots_B = -(-lengths_B // multiple) * multiple
        if self.layout == "padded":
            slots_B = np.full_like(slots_B, int(slots_B.max()) if self.seq_len is None else self.seq_len)
        lead_B = slots_B - lengths_B if self.padding_side == "left" else np.zeros_like(slots_B)
        shape = (len(slots_B), int(slots_B[0])) if self.layout == "padded" else (int(slots_B.sum()),)
        if np.prod(shape, dtype=np.float64) > _MAX_ROWS:
            raise _too_long(f"at most {_MAX_ROWS} rows in all", f"a plan of shape {list(shape)}")
        return TokenPlan._from_slots(lengths_B, layout=self.layout, shape=shape, slots_B=slots_B, lead_B=lead_B)

    def _check_lengths(self, lengths: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        given = np.asarray(lengths)
        if given.size == 0:
            raise _refused("at least one sequence", "an empty batch")
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise _refused("lengths as whole numbers [B]", f"{given.dtype} {list(given.shape)}")
        shortest, longest = int(given.argmin()), int(given.argmax())
        if given[shortest] < 1:
            raise _refused("sequences of at least one token", f"{given[shortest]} @ sequence {shortest}")
        limit = _MAX_ROWS if self.seq_len is None else self.seq_len
        if given[longest] > limit:
            raise _too_long(f"sequences of at most {limit} tokens", f"{given[longest]} @ sequence {longest}")
        return given.astype(np.int64)


def require_positive(value: object, name: str) -> int:
    """``value`` as an int of at least 1. Raises UsageError (ARGUMENT)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise _refused(f"{name} as a positive whole number", repr(value))
    return int(value)


def _running_sum(counts_B: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_B)])


def _check_slots(slots: Sequence[int], shape: tuple[int, ...]) -> NDArray[np.int64]:
    if len(shape) < 2 or len(slots) == 0 or min(slots) < 0 or max(slots) >= shape[1]:
        raise _refused(f"slots of axis 1 of an array of shape {list(shape)}", f"{list(slots)}")
    return np.asarray(slots, dtype=np.int64)


def _copy_slots(part: NDArray[Any], slots: NDArray[np.int64], out: NDArray[Any]) -> None:
    """``out[...] = part[:, slots]`` for arrays ``[rows, slot, ...]``; the slots exist."""
    if part.dtype != out.dtype or not part.flags.c_contiguous:
        out[...] = part[:, slots]
        return
    # One opaque element per slot: copying K small integers at a time is 2 to 8 times slower, and an index array over
    # three axes copies everything once more.
    slot = np.dtype((np.void, part[0, 0].nbytes))
    flat, target = (array.reshape(len(array), -1).view(slot) for array in (part, out))
    np.take(flat, slots, axis=1, out=target, mode="clip")  # "raise" would buffer the output; slots were checked


def _fill_value(fill: bool | int | float, dtype: np.dtype[Any]) -> NDArray[Any]:
    whole = dtype.kind in "iub"
    try:
        cell = np.full((), int(fill) if whole else fill, dtype=dtype)
    except (OverflowError, ValueError):
        raise _refused(f"a fill that {dtype} holds", repr(fill)) from None
    if whole and cell.item() != fill:  # int() drops a fraction, bool keeps one bit
        raise _refused(f"a fill that {dtype} holds", repr(fill))
    return cell


def _refused(expected: str, got: str) -> UsageError:
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.ARGUMENT)


def _too_long(expected: str, got: str) -> UsageError:
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.TOO_LONG)
