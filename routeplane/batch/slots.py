"""Where each sequence stands among the rows of a batch, and which rows, records and layers one rank takes.

Owns the arithmetic "row n is token t of record r, at position p", answered for the rows it is asked about, and the
order of the cuts (align, context parallel, sequence parallel, layers) with the padding that they need. Knows lengths;
knows no record, no plan, no torch and no process group. A rank is a pair ``(rank, world)`` that the trainer gave.

Axes: B sequences, S positions of a padded row, T packed rows, N rows of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import ErrorKind, UsageError, refused

__all__ = [
    "MAX_ROWS",
    "PADDING",
    "ContextLayout",
    "Layout",
    "RankOf",
    "Run",
    "Shard",
    "Slots",
    "check_lengths",
    "check_offsets",
    "records_of_rank",
    "require_positive",
    "running_sum",
    "seam_slots",
    "stage_layers",
]

Layout = Literal["padded", "packed"]

#: The record and the token of a row that is not a token.
PADDING = -1
#: ``(record, first token, first row, rows)``; record PADDING where the rows are padding.
Run = tuple[int, int, int, int]
#: cu_seqlens are int32, as attention kernels want them.
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Every sequence's rows: int64 ``[B]`` each, except ``edges``, int64 ``[B+1]``.

    ``sources``: tokens of the sequence; ``first``, ``lengths``: its tokens ``[first, first + length)`` are kept;
    ``lead``: padding rows before its first kept token; rows ``[edges[b], edges[b+1])`` are its slot.
    Raises UsageError (TOO_LONG) for more rows than int32 offsets can name.
    """

    layout: Layout
    sources: NDArray[np.int64]
    first: NDArray[np.int64]
    lengths: NDArray[np.int64]
    lead: NDArray[np.int64]
    edges: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        sources: NDArray[np.int64],
        *,
        layout: Layout,
        first: NDArray[np.int64],
        lengths: NDArray[np.int64],
        lead: NDArray[np.int64],
        widths: NDArray[np.int64],
    ) -> Slots:
        """Slots from their widths in rows."""
        if widths.sum(dtype=np.float64) > MAX_ROWS:
            shape = [len(widths), int(widths[0])] if layout == "padded" else [int(widths.sum())]
            raise UsageError(
                f"expected at most {MAX_ROWS} rows in all, got a plan of shape {shape}", kind=ErrorKind.TOO_LONG
            )
        return cls(layout=layout, sources=sources, first=first, lengths=lengths, lead=lead, edges=running_sum(widths))

    @property
    def num_rows(self) -> int:
        """Of all slots."""
        return int(self.edges[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, S)`` or ``(T,)``."""
        return (len(self.lengths), int(self.edges[1])) if self.layout == "padded" else (self.num_rows,)

    def locate(self, row_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Record, token and position of the asked rows, int64 ``[N]`` each; record and token PADDING at padding.

        Positions count from 0 at each first kept token. Padding after a sequence continues them: attention that finds
        sequences by restarting positions takes it for the sequence's tail, where causality hides it from every real
        token; a position that restarted would open a sequence of its own. Padding before a sequence is 0 throughout:
        no run, hence no neighbour of it.
        """
        record_N = np.searchsorted(self.edges, row_N, side="right") - 1
        offset_N = row_N - self.edges[record_N] - self.lead[record_N]
        padding_N = (offset_N < 0) | (offset_N >= self.lengths[record_N])
        token_N = np.where(padding_N, PADDING, offset_N + self.first[record_N])
        return np.where(padding_N, PADDING, record_N), token_N, np.maximum(offset_N, 0)

    def runs(self) -> list[Run]:
        """All rows as runs of one record's tokens, or of padding; no two runs of padding are neighbours."""
        runs: list[Run] = []
        table = (self.first, self.lengths, self.lead, self.edges[:-1], self.edges[1:])
        for record, (first, length, lead, start, stop) in enumerate(
            zip(*(each.tolist() for each in table), strict=True)
        ):
            _add_padding(runs, start, lead)
            if length:
                runs.append((record, first, start + lead, length))
            _add_padding(runs, start + lead + length, stop - start - lead - length)
        return runs

    def locate_all(self, runs: list[Run]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """``locate`` of all rows, whose ``runs`` these are: written a run at a time, where it looks up each row."""
        record_N, token_N = (np.full(self.num_rows, PADDING, dtype=np.int64) for _ in range(2))
        position_N = np.zeros(self.num_rows, dtype=np.int64)
        for record, token, row, rows in runs:
            if record != PADDING:
                record_N[row : row + rows] = record
                token_N[row : row + rows] = np.arange(token, token + rows)
        for start, stop in zip((self.edges[:-1] + self.lead).tolist(), self.edges[1:].tolist(), strict=True):
            position_N[start:stop] = np.arange(stop - start)
        return record_N, token_N, position_N


def _add_padding(runs: list[Run], row: int, rows: int) -> None:
    if rows and runs and runs[-1][0] == PADDING:
        runs[-1] = (PADDING, PADDING, runs[-1][2], runs[-1][3] + rows)
    elif rows:
        runs.append((PADDING, PADDING, row, rows))


def seam_slots(
    prompt_lengths: Any,
    response_lengths: Any,
    *,
    prompt_len: int | None,
    response_len: int | None,
    truncate: str,
) -> Slots:
    """Slots whose prompts end, and whose responses begin, at ``prompt_len``; as ``TokenPlan.prompt_response`` says."""
    prompts, responses = check_lengths(prompt_lengths, least=0), check_lengths(response_lengths, least=0)
    if len(prompts) != len(responses):
        raise refused(f"a response to each of {len(prompts)} prompts", f"{len(responses)}")
    if truncate not in ("raise", "outer"):
        raise refused("truncate of ('raise', 'outer')", repr(truncate))
    sources = check_lengths(prompts + responses)
    widths, kept = [], []
    for name, lengths, width in (("prompt", prompts, prompt_len), ("response", responses, response_len)):
        width = int(lengths.max()) if width is None else require_positive(width, f"{name}_len")
        if truncate == "raise" and lengths.max() > width:
            longest = int(lengths.argmax())
            raise UsageError(
                f"expected {name}s of at most {width} tokens, got {lengths[longest]} @ sequence {longest}",
                kind=ErrorKind.TOO_LONG,
            )
        widths.append(width)
        kept.append(np.minimum(lengths, width))
    return Slots.of(
        sources,
        layout="padded",
        first=prompts - kept[0],
        lengths=kept[0] + kept[1],
        lead=widths[0] - kept[0],
        widths=np.full(len(sources), sum(widths), dtype=np.int64),
    )


def check_lengths(lengths: Any, *, least: int = 1) -> NDArray[np.int64]:
    """``lengths`` as int64 ``[B]``. Raises UsageError for none, for other than whole numbers, for one out of bounds."""
    given = np.asarray(lengths)
    if given.size == 0:
        raise UsageError("expected at least one sequence, got an empty batch", kind=ErrorKind.ARGUMENT)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise refused("lengths as whole numbers [B]", f"{given.dtype} {list(given.shape)}")
    shortest, longest = int(given.argmin()), int(given.argmax())
    if given[shortest] < least:
        amount = "at least one token" if least == 1 else f"at least {least} tokens"
        raise refused(f"sequences of {amount}", f"{given[shortest]} @ sequence {shortest}")
    if given[longest] > MAX_ROWS:
        raise UsageError(
            f"expected sequences of at most {MAX_ROWS} tokens, got {given[longest]} @ sequence {longest}",
            kind=ErrorKind.TOO_LONG,
        )
    return given.astype(np.int64)


def check_offsets(offsets: Any, name: str) -> NDArray[np.int64]:
    """Offsets ``[B+1]`` that begin at 0 and never fall, as int64. Raises UsageError (ARGUMENT)."""
    given = np.asarray(offsets)
    if given.ndim != 1 or given.size < 2 or given.dtype.kind not in "iu":
        raise refused(f"{name} as whole numbers [B+1]", f"{given.dtype} {list(given.shape)}")
    edges = given.astype(np.int64)
    if edges[0] != 0 or np.any(np.diff(edges) < 0) or edges[-1] > MAX_ROWS:
        raise refused(f"{name} from 0 on, none below the one before", f"{edges[:8].tolist()}")
    return edges


def require_positive(value: object, name: str) -> int:
    """``value`` as an int of at least 1. Raises UsageError (ARGUMENT)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise refused(f"{name} as a positive whole number", repr(value))
    return int(value)


def running_sum(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, and the sum of the first n counts for each n: int64 ``[B+1]``."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


ContextLayout = Literal["zigzag", "contiguous", "pack_contiguous"]
#: ``(rank, world)``: this rank's number within its group, and the size of the group.
RankOf = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank takes. Checked when made; raises UsageError (ARGUMENT).

    ``data_parallel``: of the records, each ``world``-th (``records_of_rank``). ``context_parallel``: of the rows, by
    ``context_layout``. ``"zigzag"``: of every sequence with its padding, chunks ``rank`` and ``2*world - 1 - rank`` of
    ``2*world`` (causal attention then costs each rank the same). ``"contiguous"``: of every sequence, chunk ``rank``
    of ``world``. ``"pack_contiguous"``: of the whole pack, chunk ``rank`` of ``world``, wherever sequences begin (as
    prime-rl cuts, and slime and miles under ``allgather_cp``); packed batches only.
    ``sequence_parallel``: of the rows that context parallelism left, a contiguous part: of axis T (packed), or of axis
    S (padded). ``layers``: decoder layer ids, None for all. The cuts apply in this order.

    A world must divide what it cuts. ``uneven`` relaxes this for sequence parallelism alone, as ``torch.chunk`` cuts:
    each part rounded up, the last ones shorter or without any row.

    >>> Shard(context_parallel=(0, 2), layers=(4, 5)).cuts_rows
    True
    """

    data_parallel: RankOf = (0, 1)
    context_parallel: RankOf = (0, 1)
    sequence_parallel: RankOf = (0, 1)
    layers: tuple[int, ...] | None = None
    context_layout: ContextLayout = "zigzag"
    uneven: bool = False

    def __post_init__(self) -> None:
        for name in ("data_parallel", "context_parallel", "sequence_parallel"):
            object.__setattr__(self, name, _check_rank(getattr(self, name), name))
        if self.context_layout not in get_args(ContextLayout):
            raise refused(f"context_layout of {get_args(ContextLayout)}", repr(self.context_layout))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
            if not self.layers:
                raise refused("at least one layer (a stage without routed layers needs no batch)", "none")

    @property
    def cuts_rows(self) -> bool:
        """Whether the rank holds fewer rows than the batch."""
        return self.context_parallel[1] > 1 or self.sequence_parallel[1] > 1

    @property
    def context_chunks(self) -> int:
        """Equal parts that each sequence's rows come in."""
        world = self.context_parallel[1]
        if self.context_layout == "pack_contiguous":
            return 1
        return 2 * world if world > 1 and self.context_layout == "zigzag" else world

    @property
    def multiple(self) -> int:
        """What each sequence's rows, with their padding, have to be a multiple of for every cut to come out even."""
        if self.context_layout == "pack_contiguous":
            return 1
        return self.context_chunks * (1 if self.uneven else self.sequence_parallel[1])

    @property
    def total_multiple(self) -> int:
        """What the rows of the whole pack have to be a multiple of; above 1 where the pack itself is cut."""
        if self.context_layout != "pack_contiguous":
            return 1
        return self.context_parallel[1] * (1 if self.uneven else self.sequence_parallel[1])

    def rows(self, edges: NDArray[np.integer[Any]], *, layout: Layout) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """The rank's rows of a batch, by number and in order, int64 ``[N]``; and the shape that they make.

        ``edges``: ``[B+1]``, rows ``[edges[b], edges[b+1])`` are sequence b with its padding; of a padded batch they
        are all equally wide. Raises UsageError (ARGUMENT) where a world does not divide what it cuts.
        """
        whole = np.asarray(edges, dtype=np.int64)
        if self.context_layout == "pack_contiguous" and self.context_parallel[1] > 1:
            return self._pack_part(int(whole[-1]), layout=layout)
        widths, chunks = np.diff(whole), self.context_chunks
        odd = np.flatnonzero(widths % chunks)
        if len(odd):
            raise refused(
                f"sequences whose rows context_parallel={self.context_parallel} cuts into {chunks} equal chunks "
                f"(pad_to_multiple_of={self.multiple})",
                f"{widths[odd[0]]} rows @ sequence {odd[0]}",
            )
        local = whole // self.context_parallel[1]
        if layout == "padded":
            count, width = len(widths), int(local[1])
            start, stop = self._sequence_part(width)
            local_N = (np.arange(count)[:, None] * width + np.arange(start, stop)[None, :]).reshape(-1)
            return self._undo_context(local_N, local=local, whole=whole), (count, stop - start)
        start, stop = self._sequence_part(int(local[-1]))
        return self._undo_context(np.arange(start, stop), local=local, whole=whole), (stop - start,)

    def _pack_part(self, total: int, *, layout: Layout) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        rank, world = self.context_parallel
        if layout != "packed":
            raise refused("layout 'packed' for context_layout 'pack_contiguous'", repr(layout))
        if total % world:
            raise refused(
                f"a pack that context_parallel={self.context_parallel} cuts into {world} equal chunks "
                f"(pad_total_to_multiple_of={self.total_multiple})",
                f"{total} rows",
            )
        start, stop = self._sequence_part(total // world)
        first = rank * (total // world)
        return np.arange(first + start, first + stop, dtype=np.int64), (stop - start,)

    def _sequence_part(self, rows: int) -> tuple[int, int]:
        rank, world = self.sequence_parallel
        if rows % world and not self.uneven:
            raise refused(
                f"rows that sequence_parallel={self.sequence_parallel} divides (pad_to_multiple_of={self.multiple}, "
                "or uneven=True)",
                f"{rows}",
            )
        part = -(-rows // world)
        return min(rank * part, rows), min((rank + 1) * part, rows)

    def _undo_context(
        self, local_N: NDArray[np.int64], *, local: NDArray[np.int64], whole: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of the batch from rows of the context-parallel rank."""
        rank, world = self.context_parallel
        record_N = np.searchsorted(local, local_N, side="right") - 1
        offset_N = local_N - local[record_N]
        width_N = local[record_N + 1] - local[record_N]
        skipped_N = rank * width_N
        if self.context_layout == "zigzag" and world > 1:
            chunk_N = width_N // 2
            # the second chunk begins at (2*world - 1 - rank) * chunk, and this rank counts its rows from chunk on
            skipped_N = np.where(offset_N < chunk_N, rank * chunk_N, (2 * world - 2 - rank) * chunk_N)
        row_N: NDArray[np.int64] = whole[record_N] + skipped_N + offset_N
        return row_N


def records_of_rank(count: int, *, rank: RankOf) -> range:
    """Which of ``count`` records a data-parallel rank takes: each ``world``-th. Raises UsageError where uneven."""
    number, world = _check_rank(rank, "rank")
    if count % world:
        raise refused(f"records that data_parallel={(number, world)} divides", f"{count}")
    return range(number, count, world)


def stage_layers(
    layer_ids: Iterable[int],
    *,
    num_layers: int,
    pipeline_parallel: RankOf,
    virtual: int = 1,
    counts: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Which of ``layer_ids`` a pipeline rank holds, ascending; none where it holds dense layers alone.

    ``layer_ids``: those with routes (``spec.layer_ids``); ``num_layers``: decoder layers of the model, dense ones too.
    The layers pass through ``world * virtual`` stages in order, stage ``i`` on rank ``i % world`` (interleaved where
    ``virtual`` is above 1). ``counts``: decoder layers of each stage, 0 allowed; default equal ones. Raises UsageError
    (ARGUMENT) for stages that do not hold ``num_layers`` layers together, and for equal ones that do not come out even.

    >>> stage_layers(range(1, 8), num_layers=8, pipeline_parallel=(0, 2))
    (1, 2, 3)
    """
    rank, world = _check_rank(pipeline_parallel, "pipeline_parallel")
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
        raise refused("virtual as a positive whole number", repr(virtual))
    stages = world * virtual
    if counts is None:
        if num_layers % stages:
            raise refused(f"layers that {stages} equal stages divide (or counts=)", f"{num_layers}")
        counts = [num_layers // stages] * stages
    if len(counts) != stages or min(counts) < 0 or sum(counts) != num_layers:
        raise refused(f"counts of {stages} stages with {num_layers} layers in all", f"{list(counts)}")
    ids = sorted(set(layer_ids))
    if ids and not 0 <= ids[0] <= ids[-1] < num_layers:
        raise refused(f"layer_ids in [0, {num_layers})", f"{ids}")
    stops = np.cumsum(counts)
    return tuple(layer for layer in ids if int(np.searchsorted(stops, layer, side="right")) % world == rank)


def _check_rank(value: object, name: str) -> RankOf:
    """``(rank, world)`` as two ints with 0 <= rank < world."""
    if isinstance(value, tuple | list) and len(value) == 2:
        rank, world = value
        if all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in value):
            if 0 <= rank < world:
                return int(rank), int(world)
    raise refused(f"{name} as (rank, world) with 0 <= rank < world", repr(value))
