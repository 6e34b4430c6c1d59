"""Which token stands in which row: plans for padding and packing, groups within a budget, and the copying of rows.

Owns the one answer to "row n is token t of record r, or padding". A plan is built once, from lengths alone, and applied
to routes, token ids, log-probabilities, masks and positions alike, so that all of them are cut the same way. A row is a
row of the whole batch, padding included, so that all ranks that cut it form the same groups. Knows numpy arrays and
lengths; knows no record, no torch, no file.

Axes: B sequences, S positions of a padded row, T packed rows, N rows of the plan in the order in which gates see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from routeplane.batch.slots import (
    PADDING,
    Layout,
    Run,
    Shard,
    Slots,
    check_lengths,
    check_offsets,
    require_positive,
    running_sum,
    seam_slots,
)
from routeplane.errors import ErrorKind, UsageError, refused
from routeplane.record.parse import frozen_view
from routeplane.record.rows import copy_slots, lay_out
from routeplane.record.spec import MISSING, RouteSpec

__all__ = [
    "PADDING",
    "Layout",
    "PaddingSide",
    "PlanOptions",
    "RankCounts",
    "TokenPlan",
    "Truncate",
    "budget_groups",
]

PaddingSide = Literal["right", "left"]
Truncate = Literal["raise", "left", "right"]

_ARRAYS = ("record_N", "token_N", "position_N", "sources", "lengths", "cu_seqlens", "cu_seqlens_padded")


def _narrowed(rows_N: NDArray[np.int64]) -> NDArray[Any]:
    return rows_N.astype(np.int32) if not len(rows_N) or int(rows_N.max()) < 2**31 else rows_N


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPlan:
    """For every output row the record and the token it holds, or padding. Immutable; its arrays are read-only.

    ``layout``: ``"padded"`` (``shape`` is ``(B, S)``) or ``"packed"`` (``(T,)``). ``record_N``, ``token_N``: int64
    ``[N]``, PADDING (-1) in both where the row is padding; row ``b*S + s`` of a padded plan, row ``t`` of a packed one.
    ``position_N``: int64 ``[N]``, as ``positions`` says. ``sources``: int64 ``[B]``, tokens of each sequence;
    ``lengths``: int64 ``[B]``, how many of them the plan keeps. ``cu_seqlens``: int32 ``[B+1]``, running sum of
    ``lengths`` (offsets as they were without any padding). ``cu_seqlens_padded``: int32 ``[B+1]``, sequence ``b`` with
    its padding occupies rows ``[cu_seqlens_padded[b], cu_seqlens_padded[b+1])``; equal to ``cu_seqlens`` where nothing
    is padded.

    A shard of a plan is a plan: its rows (``shape``, arrays ``_N``) are the rank's own, what stands by sequence
    (``sources``, ``lengths``, both offsets) is the whole batch's, as attention kernels want it.

    Make one with ``padded``, ``packed`` or ``prompt_response``. Raises UsageError (ARGUMENT, TOO_LONG), before anything
    is allocated.
    """

    layout: Layout
    shape: tuple[int, ...]
    record_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    cu_seqlens_padded: NDArray[np.int32]

    def __getstate__(self) -> dict[str, object]:
        # on its way to another process a batch carries 12 bytes a row for its plan, not 24
        return {name: _narrowed(value) if name.endswith("_N") else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            wide = np.asarray(value, dtype=np.int64) if name.endswith("_N") else value
            object.__setattr__(self, name, frozen_view(wide) if isinstance(wide, np.ndarray) else wide)

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            object.__setattr__(self, name, frozen_view(getattr(self, name)))
        count, rows = len(self.lengths), len(self.record_N)
        if not rows == len(self.token_N) == len(self.position_N) == int(np.prod(self.shape)):
            raise refused(f"a record, a token and a position for each row of shape {list(self.shape)}", f"{rows}")
        if not len(self.cu_seqlens) == len(self.cu_seqlens_padded) == len(self.sources) + 1 == count + 1:
            raise refused(f"{count + 1} offsets for {count} sequences", f"{len(self.cu_seqlens)}")
        padding_N = self.record_N == PADDING
        tokens = self.token_N[~padding_N]
        if not np.all((tokens >= 0) & (tokens < self.sources[self.record_N[~padding_N]])):
            raise refused("tokens that their sequences have", "others")
        if not np.all(self.token_N[padding_N] == PADDING):
            raise refused("padding rows without a token", "others")

    @classmethod
    def padded(
        cls, lengths: Sequence[int] | NDArray[np.integer[Any]], *, options: PlanOptions | None = None
    ) -> TokenPlan:
        """Lay out one row of S positions per sequence: ``seq_len``, or the longest length rounded up to the multiple.

        >>> from routeplane.batch import PlanOptions, TokenPlan
        >>> TokenPlan.padded([3, 1], options=PlanOptions(pad_to_multiple_of=4)).padding().tolist()
        [[False, False, False, True], [False, True, True, True]]
        """
        return (options or PlanOptions()).plan(lengths, layout="padded")

    @classmethod
    def packed(
        cls, lengths: Sequence[int] | NDArray[np.integer[Any]], *, options: PlanOptions | None = None
    ) -> TokenPlan:
        """Lay out all sequences one after another, each followed by the padding that its multiple needs.

        >>> from routeplane.batch import PlanOptions, TokenPlan
        >>> TokenPlan.packed([3, 1], options=PlanOptions(pad_to_multiple_of=2)).cu_seqlens_padded.tolist()
        [0, 4, 6]
        """
        return (options or PlanOptions()).plan(lengths, layout="packed")

    @classmethod
    def prompt_response(
        cls,
        prompt_lengths: Sequence[int] | NDArray[np.integer[Any]],
        response_lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        prompt_len: int | None = None,
        response_len: int | None = None,
        truncate: Literal["raise", "outer"] = "raise",
    ) -> TokenPlan:
        """Rows in which prompts end, and responses begin, at position ``prompt_len``; padding on both sides.

        A sequence is its prompt (0 tokens allowed) and then its response. Defaults: the longest of each. A longer part
        is refused, or loses the tokens furthest from the seam (``truncate="outer"``).
        """
        slots = seam_slots(
            prompt_lengths, response_lengths, prompt_len=prompt_len, response_len=response_len, truncate=truncate
        )
        return cls._of(slots, shard=None)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, *, cu_seqlens_padded: Any = None) -> TokenPlan:
        """Take over the packing of a trainer from the offsets that its attention kernels get.

        ``cu_seqlens``: ``[B+1]``, running sum of the sequences' tokens. ``cu_seqlens_padded``: ``[B+1]``, the row at
        which each sequence's slot begins, its padding behind its tokens; default: no padding. A sequence may be empty
        (padding of the whole pack). Raises UsageError (ARGUMENT).

        >>> from routeplane.batch import TokenPlan
        >>> TokenPlan.from_cu_seqlens([0, 3, 4], cu_seqlens_padded=[0, 4, 8]).token_N.tolist()
        [0, 1, 2, -1, 0, -1, -1, -1]
        """
        edges = check_offsets(cu_seqlens, "cu_seqlens")
        slots = edges if cu_seqlens_padded is None else check_offsets(cu_seqlens_padded, "cu_seqlens_padded")
        lengths, widths = np.diff(edges), np.diff(slots)
        if len(lengths) != len(widths) or np.any(lengths > widths):
            raise refused(f"a slot for each of the lengths {lengths.tolist()}", f"slots of {widths.tolist()} rows")
        none = np.zeros_like(lengths)
        return cls._of(
            Slots.of(lengths, layout="packed", first=none, lengths=lengths, lead=none, widths=widths), shard=None
        )

    @classmethod
    def from_mask(cls, tokens: NDArray[np.bool_], *, edges: NDArray[np.int64] | None = None) -> TokenPlan:
        """Take over the layout of a trainer's batch from the mask of its tokens.

        ``tokens``: bool ``[B, S]``, or ``[T]`` with ``edges`` int64 ``[B+1]``: True where a row is a token. The tokens
        of a sequence are numbered in order, whatever padding stands between them; a sequence may have none.
        """
        if edges is None:
            edges = np.arange(len(tokens) + 1, dtype=np.int64) * tokens.shape[1]
        real_N = tokens.reshape(-1)
        before_N = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(real_N)])
        counts = np.diff(before_N[edges])
        record_N = np.repeat(np.arange(len(counts)), np.diff(edges))
        token_N = before_N[:-1] - before_N[edges[:-1]][record_N]
        # padding behind a first token goes on counting, padding before it is 0
        rows_N = np.arange(len(real_N))
        first_B = np.asarray([start + int(np.argmax(real_N[start:stop])) for start, stop in pairwise(edges.tolist())])
        position_N = np.where(real_N, token_N, np.maximum(rows_N - first_B[record_N], 0))
        return cls(
            layout="padded" if tokens.ndim == 2 else "packed",
            shape=tokens.shape,
            record_N=np.where(real_N, record_N, PADDING),
            token_N=np.where(real_N, token_N, PADDING),
            position_N=position_N,
            sources=counts,
            lengths=counts,
            cu_seqlens=running_sum(counts).astype(np.int32),
            cu_seqlens_padded=edges.astype(np.int32),
        )

    @classmethod
    def _of(cls, slots: Slots, *, shard: Shard | None) -> TokenPlan:
        """All rows of the slots, or those of one rank: the others are not computed."""
        known: dict[str, Any] = {}
        if shard is None:
            shape = slots.shape
            runs = known["_runs"] = slots.runs()
            located = slots.locate_all(runs)
        else:
            row_N, shape = shard.rows(slots.edges, layout=slots.layout)
            located = slots.locate(row_N)
        content: dict[str, NDArray[Any]] = {
            **dict(zip(("record_N", "token_N", "position_N"), located, strict=True)),
            "sources": slots.sources,
            "lengths": slots.lengths,
            "cu_seqlens": running_sum(slots.lengths).astype(np.int32),
            "cu_seqlens_padded": slots.edges.astype(np.int32),
        }
        made = object.__new__(cls)  # what __post_init__ asks for holds of all slots
        frozen = {name: frozen_view(values) for name, values in content.items()}
        vars(made).update(frozen, **known, layout=slots.layout, shape=shape)
        return made

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

    @property
    def is_shard(self) -> bool:
        """Whether rows of the batch stand on other ranks."""
        return self.num_rows < int(self.cu_seqlens_padded[-1])

    @property
    def dropped(self) -> NDArray[np.int64]:
        """Tokens of each sequence that truncation left out: a fresh int64 array ``[B]``."""
        return self.sources - self.lengths

    def shard_rows(self, shard: Shard) -> NDArray[np.int64]:
        """Numbers of the rows that a rank takes, in its order: a fresh int64 array. Raises UsageError as ``cut``."""
        return self._rows_of(shard)[0]

    def cut(self, shard: Shard) -> TokenPlan:
        """The rows of one rank as a plan. Layers and records of the shard are not a plan's business.

        Raises UsageError (ARGUMENT) where a world does not divide the rows, and for a plan that is a shard already.
        """
        if not shard.cuts_rows:
            return self
        row_N, shape = self._rows_of(shard)
        rows = {name: getattr(self, name)[row_N] for name in ("record_N", "token_N", "position_N")}
        return replace(self, shape=shape, **rows)

    def _rows_of(self, shard: Shard) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        if self.is_shard and shard.cuts_rows:
            raise refused("a whole plan to cut (one Shard names all cuts, in their order)", f"{self.num_rows} rows")
        if not shard.cuts_rows:
            return np.arange(self.num_rows, dtype=np.int64), self.shape
        return shard.rows(self.cu_seqlens_padded, layout=self.layout)

    def positions(self) -> NDArray[np.int64]:
        """Position of every row within its sequence, 0 at each first kept token: a fresh int64 array of ``shape``.

        Padding after a sequence continues its positions, padding before it is 0 (``Slots.locate`` says why). Rows of a
        shard have the positions that they have in the whole batch.
        """
        return self.position_N.reshape(self.shape).copy()

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

        ``columns``: one array per sequence that has tokens, of the plan's ``sources``; only read. They are equal in
        dtype and further axes.
        ``dtype``: of the output (default: theirs, in native byte order); must hold every value of theirs.
        ``slots``: of axis 1, keep these positions alone, in this order; nothing else of the axis is read.
        ``out``: C-contiguous array to fill and return, every row of it; else a fresh one, owned by the caller.
        Raises UsageError (ARGUMENT) for arrays that disagree with the plan or each other, before any allocation.
        """
        columns = self._check_columns(columns)
        return _gather_runs(self._runs, columns, shape=self.shape, fill=fill, dtype=dtype, slots=slots, out=out)

    def gather_routes(
        self,
        columns: Sequence[NDArray[Any]],
        *,
        spec: RouteSpec,
        slots: Sequence[int] | None = None,
        out: NDArray[np.int16] | None = None,
    ) -> NDArray[np.int16]:
        """Legal rows as records hold them (``RouteRecord.stored_routes``) laid out as int16, MISSING at padding.

        ``spec``: of the columns, which are all int16 or all narrow; narrow rows are widened on their way. Otherwise as
        ``gather``.
        """
        columns = self._check_columns(columns)
        return _gather_routes(self._runs, columns, spec=spec, shape=self.shape, slots=slots, out=out)

    def gather_lists(
        self,
        values: Sequence[NDArray[Any]],
        offsets: Sequence[NDArray[np.int64]],
        *,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Lists of any length, one per token, laid out by the plan: no list is longer for it, and padding has none.

        ``values``: per sequence ``[its values]``, all of one dtype; ``offsets``: int64 ``[length + 1]`` into them, the
        lists' ends. ``allocate``: makes arrays of a shape and dtype. Returns the values one after the other in the
        order of the rows, and int64 ``[num_rows + 1]``: the list of row n is ``values[offsets[n]:offsets[n + 1]]``.
        Raises UsageError (ARGUMENT) for lists that disagree with the plan.

        >>> import numpy as np
        >>> from routeplane.batch import PlanOptions, TokenPlan
        >>> plan = TokenPlan.padded([2], options=PlanOptions(seq_len=3, padding_side="left"))
        >>> [each.tolist() for each in plan.gather_lists([np.array([7, 8, 9])], [np.array([0, 1, 3])])]
        [[7, 8, 9], [0, 0, 1, 3]]
        """
        counts_N = self.gather([np.diff(each) for each in offsets], fill=0).reshape(-1)
        edges: NDArray[np.int64] = allocate((self.num_rows + 1,), np.dtype(np.int64))
        edges[0] = 0
        np.cumsum(counts_N, out=edges[1:])
        out = allocate((int(edges[-1]),), values[0].dtype)
        every = len(values) == self.num_sequences
        given = list(range(self.num_sequences)) if every else np.flatnonzero(self.sources > 0).tolist()
        place = {record: index for index, record in enumerate(given)}
        for record, token, row, count in self._runs:
            if record != PADDING:
                lists, ends = values[place[record]], offsets[place[record]]
                out[edges[row] : edges[row + count]] = lists[ends[token] : ends[token + count]]
        return out, edges

    def _continues(self) -> NDArray[np.bool_]:
        """Whether a row goes on where the row before it stopped: same record and next token, or both padding."""
        going_N = np.zeros(self.num_rows, dtype=np.bool_)
        step = np.where(self.record_N[1:] == PADDING, 0, 1)
        going_N[1:] = (np.diff(self.record_N) == 0) & (np.diff(self.token_N) == step)
        return going_N

    @cached_property
    def _runs(self) -> list[Run]:
        """``(record, first token, first row, rows)`` of every run; they tile the rows, so that none stays unwritten."""
        starts = np.flatnonzero(~self._continues())
        counts = np.diff(np.append(starts, self.num_rows))
        table = np.stack([self.record_N[starts], self.token_N[starts], starts, counts], axis=1)
        return [(record, token, row, count) for record, token, row, count in table.tolist()]

    def _check_columns(self, columns: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """One array per sequence: those given, and an empty one where a sequence has no tokens."""
        filled = self.sources > 0
        if 0 < len(columns) == int(filled.sum()):
            given = iter(columns)
            columns = [next(given) if has else columns[0][:0] for has in filled.tolist()]
        if len(columns) != self.num_sequences:
            raise refused(f"one array per sequence, {self.num_sequences} in all", f"{len(columns)}")
        first = columns[0]
        for index, (array, length) in enumerate(zip(columns, self.sources.tolist(), strict=True)):
            if array.ndim == 0 or array.dtype != first.dtype or array.shape != (length, *first.shape[1:]):
                expected = f"{first.dtype} {[length, *first.shape[1:]]}"
                raise refused(expected, f"{array.dtype} {list(array.shape)} @ sequence {index}")
        return columns


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How sequences become rows, before any length is known. Checked when made; raises UsageError (ARGUMENT).

    ``seq_len``: S of a padded plan, None for the longest sequence; a packed plan refuses it.
    ``pad_to_multiple_of``: what S (padded) or each sequence's rows (packed) are a multiple of.
    ``padding_side``: ``"right"`` or ``"left"``; a packed plan pads right.
    ``max_length``: tokens that a sequence may have (a padded plan: ``seq_len`` too).
    ``truncate``: what a longer sequence loses: nothing, since it is refused (``"raise"``), its first tokens
    (``"left"``) or its last ones (``"right"``).
    ``pad_total_to_multiple_of``: what the rows of a whole pack are a multiple of; the padding is a sequence of its own
    at the end, of length 0. A stack that pads each rank's rows to a multiple of M after a context-parallel cut over C
    ranks (slime) has ``pad_total_to_multiple_of=M * C``. A padded plan refuses it.

    >>> from routeplane.batch import PlanOptions
    >>> PlanOptions(seq_len=8, padding_side="left").plan([3], layout="padded").token_N.tolist()
    [-1, -1, -1, -1, -1, 0, 1, 2]
    """

    seq_len: int | None = None
    pad_to_multiple_of: int = 1
    padding_side: PaddingSide = "right"
    max_length: int | None = None
    truncate: Truncate = "raise"
    pad_total_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, legal in (("padding_side", PaddingSide), ("truncate", Truncate)):
            if getattr(self, name) not in get_args(legal):
                raise refused(f"{name} of {get_args(legal)}", repr(getattr(self, name)))
        require_positive(self.pad_to_multiple_of, "pad_to_multiple_of")
        require_positive(self.pad_total_to_multiple_of, "pad_total_to_multiple_of")
        for name in ("max_length", "seq_len"):
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name)
        if self.seq_len is not None and self.seq_len % self.pad_to_multiple_of:
            raise refused(f"seq_len as a multiple of {self.pad_to_multiple_of}", f"{self.seq_len}")
        if self.truncate != "raise" and self.limit is None:
            raise refused(f"max_length or seq_len with truncate={self.truncate!r}", "neither")

    def check_layout(self, layout: object) -> None:
        """Raise UsageError (ARGUMENT) for a layout that does not exist, or for an option that it does not have."""
        if layout not in get_args(Layout):
            raise refused(f"layout of {get_args(Layout)}", repr(layout))
        if layout == "packed" and self.seq_len is not None:
            raise refused("no seq_len for layout 'packed'", repr(self.seq_len))
        if layout == "packed" and self.padding_side != "right":
            raise refused("padding_side 'right' for layout 'packed'", repr(self.padding_side))
        if layout == "padded" and self.pad_total_to_multiple_of != 1:
            raise refused("no pad_total_to_multiple_of for layout 'padded'", f"{self.pad_total_to_multiple_of}")

    @property
    def limit(self) -> int | None:
        """Tokens that a sequence may have; None where nothing limits it."""
        limits = [limit for limit in (self.seq_len, self.max_length) if limit is not None]
        return min(limits) if limits else None

    def for_shard(self, shard: Shard) -> Self:
        """The same options with the padding that a shard's cuts need.

        Raises UsageError for a ``seq_len`` that the cuts do not divide.
        """
        return replace(
            self,
            pad_to_multiple_of=math.lcm(self.pad_to_multiple_of, shard.multiple),
            pad_total_to_multiple_of=math.lcm(self.pad_total_to_multiple_of, shard.total_multiple),
        )

    def usable(self, tokens: int) -> int:
        """How many of ``tokens`` rows sequences may fill, so that the padding of the whole pack fits too."""
        return tokens - tokens % self.pad_total_to_multiple_of

    def slot_rows(self, length: int) -> int:
        """Rows that a sequence of ``length`` tokens asks for, truncated, with its own padding."""
        if self.seq_len is not None:
            return self.seq_len
        kept = length if self.limit is None or self.truncate == "raise" else min(length, self.limit)
        return -(-kept // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def rows_after(self, length: int, *, layout: Layout, rows: int, count: int) -> int:
        """Rows of a plan of ``count`` sequences and ``rows`` rows once a sequence of ``length`` tokens joins it."""
        if layout == "packed":
            return rows + self.slot_rows(length)
        widest = rows // count if count else 0
        return (count + 1) * max(widest, self.slot_rows(length))

    def plan(
        self,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        layout: Layout,
        shard: Shard | None = None,
    ) -> TokenPlan:
        """The plan for sequences of these lengths, in this order; or one rank's rows of it, the others not computed.

        Raises UsageError (ARGUMENT, TOO_LONG).
        """
        self.check_layout(layout)
        sources = check_lengths(lengths)
        kept = sources if self.limit is None else np.minimum(sources, self.limit)
        if self.truncate == "raise" and len(over := np.flatnonzero(kept < sources)):
            raise _too_long(f"sequences of at most {self.limit} tokens", f"{sources[over[0]]} @ sequence {over[0]}")
        multiple = self.pad_to_multiple_of
        widths = -(-kept // multiple) * multiple
        if layout == "padded":
            widths = np.full_like(widths, int(widths.max()) if self.seq_len is None else self.seq_len)
        none = np.zeros_like(widths)
        columns = {
            "sources": sources,
            "first": sources - kept if self.truncate == "left" else none,
            "lengths": kept,
            "lead": widths - kept if self.padding_side == "left" else none,
            "widths": widths,
        }
        if rest := -int(widths.sum()) % self.pad_total_to_multiple_of:
            end = {name: rest if name == "widths" else 0 for name in columns}
            columns = {name: np.append(values, end[name]) for name, values in columns.items()}
        slots = Slots.of(columns.pop("sources"), layout=layout, **columns)
        return TokenPlan._of(slots, shard=shard)

    def padding_plan(self, *, layout: Layout, shard: Shard | None = None) -> TokenPlan:
        """A plan of padding alone: one sequence that has no token, in as few rows as the options allow."""
        self.check_layout(layout)
        none = np.zeros(1, dtype=np.int64)
        rows = math.lcm(self.pad_to_multiple_of, self.pad_total_to_multiple_of)
        widths = np.full(1, rows if self.seq_len is None else self.seq_len, dtype=np.int64)
        lead = widths if self.padding_side == "left" else none
        slots = Slots.of(none, layout=layout, first=none, lengths=none, lead=lead, widths=widths)
        return TokenPlan._of(slots, shard=shard)


def _too_long(expected: str, got: str) -> UsageError:
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.TOO_LONG)


# ---------------------------------------------------------------------------------------------------------------------
# Groups within a budget of rows, from lengths alone
# ---------------------------------------------------------------------------------------------------------------------


def budget_groups(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    *,
    tokens: int,
    layout: Layout = "packed",
    options: PlanOptions | None = None,
    sort: bool = False,
) -> list[tuple[int, ...]]:
    """Group sequences so that a plan of one group has at most ``tokens`` rows.

    ``lengths``: tokens of each sequence. ``layout``, ``options``: how a group becomes rows. ``sort=False``: groups of
    neighbours, in order, each as full as the next sequence allows. ``sort=True``: from the longest sequence on, each
    joins the first group with enough free rows (first-fit decreasing), so that padded rows are of like lengths and
    packed ones leave few gaps; equal input gives equal groups on every rank.

    Returns the indices of the sequences of each group, ascending within a group. Raises UsageError: ARGUMENT, or
    TOO_LONG for a sequence that no group can hold.

    >>> from routeplane.batch import budget_groups
    >>> budget_groups([5, 2, 4, 3], tokens=8)
    [(0, 1), (2, 3)]
    >>> budget_groups([5, 2, 4, 3], tokens=8, sort=True)
    [(0, 3), (1, 2)]
    """
    rule = PlanOptions() if options is None else options
    budget = rule.usable(require_positive(tokens, "tokens"))
    rule.check_layout(layout)
    lengths_B = check_lengths(lengths)
    order = np.argsort(-lengths_B, kind="stable") if sort else np.arange(len(lengths_B))
    groups: list[list[int]] = []
    rows: list[int] = []
    for index in order.tolist():
        length = int(lengths_B[index])
        alone = rule.rows_after(length, layout=layout, rows=0, count=0)
        if alone > budget:
            raise UsageError(
                f"expected sequences of at most {budget} rows, got {alone} @ sequence {index}", kind=ErrorKind.TOO_LONG
            )
        for at in range(0 if sort else max(len(groups) - 1, 0), len(groups)):
            joined = rule.rows_after(length, layout=layout, rows=rows[at], count=len(groups[at]))
            if joined <= budget:
                groups[at].append(index)
                rows[at] = joined
                break
        else:
            groups.append([index])
            rows.append(alone)
    return [tuple(sorted(group)) for group in groups]


class RankCounts:
    """How many groups each of several ranks comes to, from the lengths that it is dealt; for equal rounds on all.

    Each rank groups its own sequences, in order: neighbours, or, with ``held`` above 1, windows of so many at a time as
    ``budget_groups(sort=True)``. Raises UsageError as ``budget_groups``.
    """

    def __init__(self, ranks: int, *, tokens: int, layout: Layout, options: PlanOptions, held: int = 1) -> None:
        self._tokens, self._layout, self._options, self._held = options.usable(tokens), layout, options, held
        self._ranks = [_Rank(window=[]) for _ in range(ranks)]

    def add(self, rank: int, length: int) -> None:
        """Deal a sequence of ``length`` tokens to a rank."""
        state = self._ranks[rank]
        if self._held > 1:
            state.window.append(length)
            if len(state.window) == self._held:
                state.groups += self._windowed(state)
                state.window = []
            return
        joined = self._rows_after(length, rows=state.rows, count=state.count)
        if state.count == 0 or joined > self._tokens:
            joined = self._rows_after(length, rows=0, count=0)
            state.groups, state.count = state.groups + 1, 0
        state.rows, state.count = joined, state.count + 1

    def _rows_after(self, length: int, *, rows: int, count: int) -> int:
        return self._options.rows_after(length, layout=self._layout, rows=rows, count=count)

    def most(self) -> int:
        """Groups of the rank that has most, were there no more sequences."""
        return max(state.groups + self._windowed(state) for state in self._ranks)

    def _windowed(self, state: _Rank) -> int:
        if not state.window:
            return 0
        window, layout, options = state.window, self._layout, self._options
        return len(budget_groups(window, tokens=self._tokens, layout=layout, options=options, sort=True))


@dataclass(kw_only=True)
class _Rank:
    """What one rank came to: whole groups, and the group (or the window) that still takes sequences."""

    window: list[int]
    groups: int = 0
    rows: int = 0
    count: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# Copying rows of per-record arrays, run by run
# ---------------------------------------------------------------------------------------------------------------------


def _gather_runs(
    runs: Iterable[Run],
    columns: Sequence[NDArray[Any]],
    *,
    shape: tuple[int, ...],
    fill: bool | int | float,
    dtype: DTypeLike | None = None,
    slots: Sequence[int] | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Arrays of one dtype and equal further axes, laid out by runs that tile the rows of ``shape``.

    Arguments as in ``TokenPlan.gather``, which has checked the columns. Raises UsageError (ARGUMENT) before any
    allocation.
    """
    source = columns[0]
    target = np.dtype(source.dtype if dtype is None else dtype).newbyteorder("=")
    if not np.can_cast(source.dtype, target, "safe"):
        raise refused(f"a dtype that holds every {source.dtype}", f"{target}")
    picked = None if slots is None else _check_slots(slots, source.shape)
    trailing = source.shape[1:] if slots is None else (len(slots), *source.shape[2:])
    cell = _fill_value(fill, target)
    if out is None:
        out = np.empty((*shape, *trailing), dtype=target)
    elif out.shape != (*shape, *trailing) or out.dtype != target or not out.flags.c_contiguous:
        raise refused(f"out as C-contiguous {target} {[*shape, *trailing]}", f"{out.dtype} {list(out.shape)}")
    out_N = out.reshape(int(np.prod(shape)), *trailing)
    for record, token, row, count in runs:
        rows = slice(row, row + count)
        if record == PADDING:
            out_N[rows] = cell
        elif picked is None:
            out_N[rows] = columns[record][token : token + count]
        else:
            _copy_slots(columns[record][token : token + count], picked, out_N[rows])
    return out


def _gather_routes(
    runs: Iterable[Run],
    columns: Sequence[NDArray[Any]],
    *,
    spec: RouteSpec,
    shape: tuple[int, ...],
    slots: Sequence[int] | None,
    out: NDArray[np.int16] | None = None,
) -> NDArray[np.int16]:
    """``_gather_runs`` of legal rows as records hold them, int16 or narrow, MISSING at padding: int16.

    Narrow rows are widened on their way, once, and only those that are laid out. ``spec``: of the columns.
    """
    picked = tuple(range(spec.num_layers)) if slots is None else tuple(_check_slots(slots, columns[0].shape).tolist())
    full = (*shape, len(picked), spec.top_k)
    if out is None:
        out = np.empty(full, dtype=np.int16)
    elif out.shape != full or out.dtype != np.int16 or not out.flags.c_contiguous:
        raise refused(f"out as C-contiguous int16 {list(full)}", f"{out.dtype} {list(out.shape)}")
    out_NLK = out.reshape(int(np.prod(shape)), *full[len(shape) :])
    for record, token, row, count in runs:
        if record == PADDING:
            out_NLK[row : row + count] = MISSING
        else:
            lay_out(columns[record], spec, tokens=(token, token + count), slots=picked, out=out_NLK[row : row + count])
    return out


def _check_slots(slots: Sequence[int], shape: tuple[int, ...]) -> NDArray[np.int64]:
    if len(shape) < 2 or len(slots) == 0 or min(slots) < 0 or max(slots) >= shape[1]:
        raise refused(f"slots of axis 1 of an array of shape {list(shape)}", f"{list(slots)}")
    return np.asarray(slots, dtype=np.int64)


def _copy_slots(part: NDArray[Any], slots: NDArray[np.int64], out: NDArray[Any]) -> None:
    """``out[...] = part[:, slots]`` for arrays ``[rows, slot, ...]``; the slots exist."""
    if part.dtype != out.dtype or not part.flags.c_contiguous:
        out[...] = part[:, slots]
        return
    copy_slots(part, slots, out=out)


def _fill_value(fill: bool | int | float, dtype: np.dtype[Any]) -> NDArray[Any]:
    whole = dtype.kind in "iub"
    try:
        cell = np.full((), int(fill) if whole else fill, dtype=dtype)
    except (OverflowError, ValueError):
        raise refused(f"a fill that {dtype} holds", repr(fill)) from None
    if whole and cell.item() != fill:  # int() drops a fraction, bool keeps one bit
        raise refused(f"a fill that {dtype} holds", repr(fill))
    return cell
