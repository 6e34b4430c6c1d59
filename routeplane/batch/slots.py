"""Where each sequence stands among the rows of a batch: slots, and what stands in any row, without listing all rows.

Owns the arithmetic "row n is token t of record r, at position p". Answers for the rows it is asked about, so that a
rank that owns a quarter of a batch never computes the other three. Knows lengths; knows no record, no plan, no rank.

Axes: B sequences, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import ErrorKind, UsageError, refused

__all__ = [
    "MAX_ROWS",
    "PADDING",
    "Layout",
    "Run",
    "Slots",
    "check_lengths",
    "check_offsets",
    "require_positive",
    "running_sum",
    "seam_slots",
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
        raise UsageError(
            f"expected lengths as whole numbers [B], got {given.dtype} {list(given.shape)}", kind=ErrorKind.ARGUMENT
        )
    shortest, longest = int(given.argmin()), int(given.argmax())
    if given[shortest] < least:
        amount = "at least one token" if least == 1 else f"at least {least} tokens"
        raise UsageError(
            f"expected sequences of {amount}, got {given[shortest]} @ sequence {shortest}", kind=ErrorKind.ARGUMENT
        )
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
