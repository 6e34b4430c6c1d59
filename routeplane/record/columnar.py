"""Records of one Arrow batch, checked column by column by compiled loops; their parts are made when asked for.

Says of a record that all rules of ``record`` hold, or says nothing: ``codec`` then builds it part by part, which finds
what is wrong and where. Every verdict here is one that the constructor of ``RouteRecord`` would give. Needs numba, and
a batch that is worth its loops.

Axes: B records of the batch, M spans or captures of all of them, S tokens of one record, L layers, K top-k slots.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.alarms import first_look
from routeplane.record.aligned import AlignedColumn, ColumnType, hash_columns, read_column
from routeplane.record.checksum import (
    CanonicalHash,
    array_heads,
    canonical_bytes,
    capture_end,
    hash_sampling,
    item_head,
    number_items,
    span_end,
)
from routeplane.record.parse import frozen_view
from routeplane.record.record import RouteRecord, text_map, view_record
from routeplane.record.rows import StoredRows, canonical_blocks, widen
from routeplane.record.spans import PRESENT_STATES, Capture, Sampling, Span
from routeplane.record.validate import kernels_for

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future
    from types import ModuleType

    from numpy.typing import NDArray

    from routeplane.record.record import RecordSource
    from routeplane.record.schema import StreamHeader
    from routeplane.record.spec import RouteSpec

__all__ = ["Aligned", "CheckedBatch", "Checks", "Ragged", "RaggedRoutes", "Stored"]


class _IllegalRowsError(Exception):
    """Rows of a record are not what its captures say."""


# Bytes of rows that are checked before they are hashed: well below the size of a second-level cache.
_BLOCK_BYTES = 2**20
# The same where layers are selected, which nothing hashes, or threads look: a call costs some 0.1 ms, and behind it a
# thread waits for the interpreter's lock.
_CALL_BYTES = 2**22


# ----------------------------------------------------------------------------------------------------------------------
# Columns as they are stored
# ----------------------------------------------------------------------------------------------------------------------


class Ragged:
    """A large_list column as one flat numpy array and offsets; item i is a view."""

    def __init__(self, column: pa.LargeListArray) -> None:
        # .values of a sliced list array is the parent's whole buffer; flatten() honours the slice.
        self.valid: list[bool] = column.is_valid().to_pylist() if column.null_count else [True] * len(column)
        lengths = _filled(column.value_lengths(), 0).to_numpy(zero_copy_only=False)
        self.offsets_B1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.at: list[int] = self.offsets_B1.tolist()
        flat = _without_nulls(column.flatten())
        if isinstance(flat, pa.ExtensionArray):
            # flattening drops null rows, so they are looked for before and after
            flat = _without_nulls(_without_nulls(flat.storage).flatten())
        values = flat.to_numpy(zero_copy_only=False)
        # no values at all are Arrow's own, from a memory pool that may be the caller's
        self.flat: NDArray[Any] = frozen_view(values if len(values) else values.copy())

    def __getitem__(self, index: int) -> Any:
        """A view ``[rows]``, or None where the entry is null."""
        if not self.valid[index]:
            return None
        return self.flat[self.at[index] : self.at[index + 1]]


class RaggedRoutes(Ragged):
    """The routes column; item i is int16 ``[rows, L, K]``: a view of plain routes, a fresh array of narrow ones."""

    def __init__(self, column: pa.LargeListArray, header: StreamHeader) -> None:
        super().__init__(column)
        self._header = header
        #: All rows as they are stored, ``[rows, L, K]``.
        self.rows: NDArray[Any] = self.flat.reshape(-1, *header.spec.row_shape)

    def stored(self, index: int, *, tokens: tuple[int, int] | None = None) -> NDArray[Any]:
        """The rows of item i as they are stored, those of ``tokens`` or all, a view."""
        first, end = self.at[index], self.at[index + 1]
        if tokens is not None:
            first, end = first + tokens[0], first + tokens[1]
        return self.rows[first:end]

    def __getitem__(self, index: int) -> NDArray[np.int16]:
        stored_SLK = self.stored(index)
        return stored_SLK if self._header.encoding == "plain" else widen(stored_SLK, self._header.spec)


class Aligned:
    """One aligned column of a batch; item i is the column of record i, a view where no entry is null."""

    def __init__(self, column: pa.LargeListArray, kind: ColumnType, *, name: str) -> None:
        self._kind, self._name = kind, name
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        self._tokens_B1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        entries = column.flatten()
        storage = entries.storage if isinstance(entries, pa.ExtensionArray) else entries
        if storage.null_count and not kind.nullable:
            raise FormatError(
                f"expected no nulls inside column {name}, got {storage.null_count}", kind=ErrorKind.TOKEN_COLUMN
            )
        self._valid = storage.is_valid().to_numpy(zero_copy_only=False) if kind.nullable else None
        self._offsets = None
        if kind.ragged:
            sizes = _filled(storage.value_lengths(), 0).to_numpy(zero_copy_only=False)
            self._offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
            self._values = _plain_values(_without_nulls(storage.flatten()))
        elif kind.shape:
            width = int(np.prod(kind.shape))
            inner = storage.values.slice(storage.offset * width, len(storage) * width)
            # of the entries that are there: Parquet's readers mark null ones inside too
            _without_nulls(storage.flatten())
            self._values = _plain_values(inner).reshape(-1, *kind.shape)
        else:
            self._values = _plain_values(storage)

    def __getitem__(self, index: int) -> AlignedColumn:
        start, stop = self._tokens_B1[index], self._tokens_B1[index + 1]
        valid = None if self._valid is None else self._valid[start:stop]
        if self._offsets is None:
            return read_column(self._kind, self._values[start:stop], offsets=None, valid=valid, name=self._name)
        first, last = self._offsets[start], self._offsets[stop]
        offsets = self._offsets[start : stop + 1] - first
        return read_column(self._kind, self._values[first:last], offsets=offsets, valid=valid, name=self._name)


def _plain_values(array: pa.Array) -> NDArray[Any]:
    """The values of a flat array, those of null entries as they lie there."""
    if array.null_count:
        array = pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], offset=array.offset)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _filled(array: pa.Array, value: int) -> pa.Array:
    """The array with a value in place of nulls; itself without any, which Arrow takes some 10 us to find."""
    return array.fill_null(value) if array.null_count else array


def _without_nulls(array: pa.Array) -> pa.Array:
    if array.null_count:
        raise FormatError(f"expected no nulls inside lists, got {array.null_count}", kind=ErrorKind.SCHEMA)
    return array


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The columns of a batch that hold arrays."""

    tokens: Ragged
    logprobs: Ragged
    routes: RaggedRoutes


# ----------------------------------------------------------------------------------------------------------------------
# Spans and captures of all records
# ----------------------------------------------------------------------------------------------------------------------


class _Intervals:
    """The spans, or the captures, of all records: of each its interval, and the text that says what it is."""

    def __init__(self, column: pa.ListArray, kind: str) -> None:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        self.offsets_B1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.at = self.offsets_B1.tolist()
        entries = column.flatten()
        names = [entries.type.field(place).name for place in range(entries.type.num_fields)]
        members = dict(zip(names, entries.flatten(), strict=True))
        #: Whether nothing is null that must not be.
        self.whole = not any(members[name].null_count for name in ("start", "stop", "call", kind))
        # copies: nothing of Arrow's is kept, whose memory pool may be the caller's
        self.starts_M, self.stops_M = (
            np.array(_filled(members[name], 0).to_numpy(zero_copy_only=False)) for name in ("start", "stop")
        )
        self.kinds = _texts(members[kind])
        self.calls = _texts(members["call"])
        self.roles: list[str | None] = _texts(members["role"]) if "role" in members else []
        #: How each span was sampled; None where an entry has parameters that no engine has. Format 1.0 has none.
        self.samplings = _samplings(members["sampling"]) if "sampling" in members else [None] * len(entries)
        versions = members["weights_version"]
        valid = versions.is_valid().to_pylist() if versions.null_count else [True] * len(versions)
        plain = _filled(versions, 0).to_numpy(zero_copy_only=False).tolist()
        self.versions = [version if known else None for version, known in zip(plain, valid, strict=True)]
        self.owner_M = np.repeat(np.arange(len(lengths)), lengths)
        self._intervals_M = list(zip(self.starts_M.tolist(), self.stops_M.tolist(), self.kinds, strict=True))

    def records_of(self, wrong_M: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The records that have such an entry: bool ``[B]``."""
        return np.bincount(self.owner_M[wrong_M], minlength=len(self.offsets_B1) - 1) > 0

    def cover(self, lengths_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each record's intervals are not empty, in order, contiguous, and cover its tokens."""
        firsts, counts = self.offsets_B1[:-1], np.diff(self.offsets_B1)
        expected_M = np.concatenate([[0], self.stops_M[:-1]])
        has = counts > 0
        expected_M[firsts[has]] = 0
        good_B = has & ~self.records_of((self.starts_M != expected_M) | (self.starts_M >= self.stops_M))
        good_B[has] &= self.stops_M[self.offsets_B1[1:][has] - 1] == lengths_B[has]
        return good_B

    def intervals(self, index: int) -> list[tuple[int, int, Any]]:
        """Start, stop and kind of a record's entries."""
        return self._intervals_M[self.at[index] : self.at[index + 1]]

    def items(self, name: str, ends: Iterable[bytes]) -> list[bytes]:
        """The canonical bytes of each record's entries; ``ends``: of each what stands behind its interval."""
        entries = number_items(start=self.starts_M, stop=self.stops_M)
        parts = [b""] * (2 * len(entries))
        parts[::2], parts[1::2] = entries, ends
        counts = array_heads(name, np.diff(self.offsets_B1))  # a list begins by its entries as an array by its bytes
        return [
            b"".join((count, *parts[2 * start : 2 * stop]))
            for count, start, stop in zip(counts, self.at, self.at[1:], strict=False)
        ]


def _texts(array: pa.Array) -> list[Any]:
    """The values as strings, None where there is none: each distinct one is made once."""
    encoded = array.dictionary_encode()
    distinct = [*encoded.dictionary.to_pylist(), None]
    return [distinct[code] for code in _filled(encoded.indices, -1).to_numpy(zero_copy_only=False).tolist()]


def _samplings(array: pa.StructArray) -> list[Sampling | None] | None:
    made: list[Sampling | None] = [None] * len(array)
    known: dict[str, Sampling] = {}
    for place in np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)).tolist():
        found = array[place].as_py()
        text = repr(found)  # tells a negative zero from a positive one
        if text not in known:
            names = found["processors"]
            try:
                known[text] = Sampling(**{**found, "processors": None if names is None else tuple(names)})
            except DataError:
                return None
        made[place] = known[text]
    return made


def _sampling_bytes(sampling: Sampling | None) -> bytes:
    return b"" if sampling is None else _small(lambda out: hash_sampling(out, sampling))


def _small(give: Callable[[CanonicalHash], object]) -> bytes:
    """The canonical bytes of small items; ``give`` adds them."""
    out = CanonicalHash(0)
    give(out)
    return out.small_bytes()[8:]


def _hash_group(group: str | None, out: CanonicalHash) -> None:
    out.text("group", group)


def _hash_attributes(entries: Mapping[str, str] | None, out: CanonicalHash) -> None:
    if entries is not None:  # a record that has none that may be there is built part by part
        out.text_map("attributes", entries)


# ----------------------------------------------------------------------------------------------------------------------
# The batch
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Items:
    """Canonical bytes of all records, but what their arrays and columns hold: lists ``[B]``, in this order."""

    names: list[bytes]  # from the spec's digest to the head of the token ids
    rows: list[bytes]  # behind the token ids, to the head of the routes
    spans: list[bytes]
    captures: list[bytes]
    scores: list[bytes]  # the head of the log-probabilities
    attributes: list[bytes]  # behind the log-probabilities
    token_ids: memoryview
    logprobs: memoryview
    routes: memoryview | None  # of plain rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """What is looked at in a batch, and by whom.

    Attributes:
        verify: whether checksums are compared.
        alarms: whether rows are looked at for alarms.
        select: the layers that records have, without ``verify``: these are copied, and no others are looked at.
        pool: the threads that look ahead of the record that is asked for; None: the caller's.
        threads: how many these are.
    """

    verify: bool = False
    alarms: bool = False
    select: RouteSpec | None = None
    pool: Executor | None = None
    threads: int = 1


class CheckedBatch:
    """A validated batch whose records are checked together, and made one by one."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        header: StreamHeader,
        *,
        stored: Stored,
        kernels: ModuleType,
        how: Checks,
    ) -> None:
        self._spec, self._stored, self._kernels = header.spec, stored, kernels
        self._how, select = how, how.select
        #: The places in the batch of the layers that records have; None where these are all.
        self._slots = None if select is None else tuple(header.spec.slot(layer) for layer in select.layer_ids)
        self._spans = _Intervals(batch.column("spans"), "kind")
        self._captures = _Intervals(batch.column("captures"), "state")
        self._names = {name: batch.column(name).to_pylist() for name in ("sample_id", "group", "attempt", "segment")}
        self._checksums: list[int] = batch.column("checksum").to_numpy(zero_copy_only=False).tolist()
        self._attributes = _attributes(batch.column("attributes"))
        self._lengths_B = np.diff(stored.tokens.offsets_B1)
        self._row_bytes = header.spec.num_layers * header.spec.top_k * stored.routes.flat.itemsize
        kept = self._row_bytes if select is None else self._row_bytes * select.num_layers // header.spec.num_layers
        together = _BLOCK_BYTES if select is None and how.pool is None else _CALL_BYTES
        self._block = max(1, together // kept)  # tokens looked at together
        self._unfed_B = np.zeros(batch.num_rows, dtype=np.int64)
        self._right_B = self._check(batch)
        self._lengths: list[int] = self._lengths_B.tolist()
        self._unfed: list[int] = self._unfed_B.tolist()
        self._right: list[bool] = self._right_B.tolist()
        # of each record that may be right: its tokens with rows; and its first row, rows and MISSING rows, over layers
        layers = header.spec.num_layers
        self._fed_tokens_B = np.where(self._right_B, self._lengths_B - self._unfed_B, 0)
        self._first_B, self._fed_B = stored.routes.offsets_B1[:-1] * layers, self._fed_tokens_B * layers
        self._absent_B = np.where(self._right_B, self._unfed_B, 0) * layers
        self._present: list[bool] = [False] * batch.num_rows
        self._quiet: list[bool] = [False] * batch.num_rows
        #: Of a record that was looked at and not yet made: its rows, where layers are selected; its checksum so far.
        self._kept: list[NDArray[Any] | None] = [None] * batch.num_rows
        self._hashes: list[CanonicalHash | None] = [None] * batch.num_rows
        self._looked_at = self._asked = 0  # the records before these were looked at, or some thread is to do so
        self._ahead: deque[tuple[int, Future[None]]] = deque()

    @classmethod
    def of(cls, batch: pa.RecordBatch, header: StreamHeader, *, stored: Stored, how: Checks) -> CheckedBatch | None:
        """The batch, where it can be checked here."""
        flat, layers = stored.routes.flat, header.spec.num_layers
        kernels = kernels_for(flat.reshape(-1, layers, header.spec.top_k), header.spec)
        if kernels is None or sys.byteorder != "little" or not flat.flags.aligned:
            return None
        made = cls(batch, header, stored=stored, kernels=kernels, how=how)
        return made if made._spans.whole and made._captures.whole else None

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _check(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Of each record whether all but its rows, columns and checksum is right, as far as that is told here."""
        lengths_B, stored = self._lengths_B, self._stored
        zeros = [batch.column(name).to_numpy(zero_copy_only=False) for name in ("attempt", "segment")]
        right_B: NDArray[np.bool_] = (lengths_B > 0) & (zeros[0] >= 0) & (zeros[1] >= 0)
        right_B &= batch.column("routes_start").to_numpy(zero_copy_only=False) == 0
        right_B &= batch.column("prefix").is_null().to_numpy(zero_copy_only=False)
        right_B &= np.diff(stored.routes.offsets_B1) == lengths_B
        right_B &= np.asarray([bool(name) for name in self._names["sample_id"]], dtype=np.bool_)
        right_B &= np.asarray([name != "" for name in self._names["group"]], dtype=np.bool_)
        right_B &= np.asarray([each is not None for each in self._attributes], dtype=np.bool_)
        scores = stored.logprobs
        right_B &= ~np.asarray(scores.valid, dtype=np.bool_) | (np.diff(scores.offsets_B1) == lengths_B)
        high = np.flatnonzero(scores.flat > 1e-3)
        right_B[np.searchsorted(scores.offsets_B1, high, side="right") - 1] = False
        right_B &= self._check_spans()
        right_B &= self._check_captures()
        return right_B

    def _check_spans(self) -> NDArray[np.bool_]:
        spans = self._spans
        right_B = spans.cover(self._lengths_B)
        generated_M = np.asarray([kind == "generation" for kind in spans.kinds], dtype=np.bool_)
        prompt_M = np.asarray([kind == "prompt" for kind in spans.kinds], dtype=np.bool_)
        if spans.samplings is None:
            return np.zeros_like(right_B)
        sampled_M = np.asarray([each is not None for each in spans.samplings], dtype=np.bool_)
        right_B &= ~spans.records_of(~(generated_M | prompt_M) | (sampled_M & ~generated_M))
        #: Where the last generated token of each record ends; 0 without any.
        self._generated_B = np.zeros(len(right_B), dtype=np.int64)
        self._generated_B[spans.owner_M[generated_M]] = spans.stops_M[generated_M]
        return right_B

    def _check_captures(self) -> NDArray[np.bool_]:
        """Rows that are there, and behind them a suffix that was not fed; anything else is not told here."""
        captures, lengths_B = self._captures, self._lengths_B
        right_B = captures.cover(lengths_B)
        present_M = np.asarray([state in PRESENT_STATES for state in captures.kinds], dtype=np.bool_)
        unfed_M = np.asarray([state == "not_fed" for state in captures.kinds], dtype=np.bool_)
        last_M = captures.stops_M == lengths_B[captures.owner_M]
        right_B &= ~captures.records_of(~present_M & ~(unfed_M & last_M))
        sizes_M = captures.stops_M - captures.starts_M
        self._unfed_B[captures.owner_M[unfed_M]] = sizes_M[unfed_M]
        ended_B = self._generated_B <= lengths_B - self._unfed_B + 1
        right_B &= (self._unfed_B <= 1) | (ended_B & (self._generated_B > 0))
        self._unfed_B[~right_B] = 0
        return right_B

    def _reach(self, index: int) -> None:
        """Have the records up to this one looked at, in blocks that the caches hold; by threads, if there are any."""
        if self._how.pool is None:
            self._looked_at = self._block_end(index)
            return self._look(index, self._looked_at)
        if self._how.verify and not self._asked:
            _ = self._items  # made once, before threads ask
        self._asked = max(self._asked, index)
        while self._looked_at <= index:
            while self._asked < len(self._right) and len(self._ahead) <= 2 * self._how.threads:
                start, self._asked = self._asked, self._block_end(self._asked)
                self._ahead.append((self._asked, self._how.pool.submit(self._look, start, self._asked)))
            self._looked_at, task = self._ahead.popleft()
            task.result()
        return None

    def _block_end(self, index: int) -> int:
        at = self._stored.routes.at
        return max(index + 1, bisect_right(at, at[index] + self._block) - 1)

    def _look(self, start: int, stop: int) -> None:
        """Look at the rows of records ``[start, stop)``, and hash them; threads do so at records of their own."""
        own = slice(start, stop)
        if self._how.select is not None and self._slots is not None:
            self._keep(own, self._how.select, self._slots)
            return
        if stop > start + 1 or self._lengths[start] <= self._block:
            held_N = self._hold(self._first_B[own], self._fed_B[own], self._absent_B[own])
            self._present[own] = (held_N & self._right_B[own]).tolist()
        else:
            self._present[own] = self._right[own]
        if self._how.alarms:
            self._look_for_alarms(own, self._stored.routes.rows, 0)
        for index in range(start, stop):
            if not self._present[index]:
                continue
            if self._how.verify:
                self._hash(index)
            else:
                self._present[index] = all(piece is not None for piece in self._pieces(index))

    def _hash(self, index: int) -> None:
        try:
            self._hashes[index] = CanonicalHash.behind(self._canonical_parts(index))
        except _IllegalRowsError:
            self._present[index] = False

    def _keep(self, own: slice, spec: RouteSpec, slots: tuple[int, ...]) -> None:
        """Copy the selected layers of some records in the pass that checks them."""
        routes = self._stored.routes
        start, stop = routes.at[own.start], routes.at[own.stop]
        kept_SLK = np.empty((stop - start, *spec.row_shape), dtype=routes.flat.dtype)
        odd_S = self._kernels.move_rows(
            routes.rows[start:stop], kept_SLK, widths=spec.experts_per_layer, slots=slots, into=tuple(range(len(slots)))
        )
        kept_SLK = frozen_view(kept_SLK)
        odd_S1 = np.concatenate([[0], np.cumsum(odd_S)])  # rows before each token that are illegal or not there
        first_N = routes.offsets_B1[own] - start
        unfed_N = first_N + self._fed_tokens_B[own]
        held_N = self._kernels.present_parts(
            kept_SLK.reshape(-1),
            spec.experts_per_layer,
            top_k=spec.top_k,
            first=unfed_N * spec.num_layers,
            rows=np.zeros_like(unfed_N),
            absent=np.where(self._right_B[own], self._unfed_B[own], 0) * spec.num_layers,
        )
        self._present[own] = (held_N & (odd_S1[unfed_N] == odd_S1[first_N]) & self._right_B[own]).tolist()
        if self._how.alarms:
            self._look_for_alarms(own, kept_SLK, start)
        for index in range(own.start, own.stop):
            if self._present[index]:
                self._kept[index] = kept_SLK[routes.at[index] - start : routes.at[index + 1] - start]

    def _hold(
        self, first_N: NDArray[np.int64], fed_N: NDArray[np.int64], absent_N: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether so many rows of layers from one on are there, and those behind them MISSING."""
        found: NDArray[np.bool_] = self._kernels.present_parts(
            self._stored.routes.flat,
            self._spec.experts_per_layer,
            top_k=self._spec.top_k,
            first=first_N,
            rows=fed_N,
            absent=absent_N,
        )
        return found

    def _look_for_alarms(self, own: slice, rows_SLK: NDArray[Any], start: int) -> None:
        """Take the first look at some records' rows; the first of ``rows_SLK`` is that of token ``start``."""
        spec = self._spec if self._how.select is None else self._how.select
        how = first_look(spec)
        if how is None:
            self._quiet[own] = [True] * (own.stop - own.start)
            return
        quiet_N = self._kernels.quiet_records(
            rows_SLK.reshape(-1),
            self._stored.tokens.flat,
            shape=spec.row_shape,
            first=self._stored.routes.offsets_B1[own] - start,
            ids=self._stored.tokens.offsets_B1[own],
            tokens=self._fed_tokens_B[own],
            how=how,
        )
        self._quiet[own] = quiet_N.tolist()

    def _pieces(self, index: int) -> Iterator[tuple[int, int] | None]:
        """Which tokens of a record lie in each part of it that is looked at; None for a part that is not legal."""
        block, tokens, fed = self._block, self._lengths[index], self._lengths[index] - self._unfed[index]
        if tokens <= block:
            yield 0, tokens
            return
        layers, first = self._spec.num_layers, self._stored.routes.at[index]
        work_31 = np.empty((3, 1), dtype=np.int64)
        for start in range(0, tokens, block):
            stop = min(start + block, tokens)
            present = max(0, min(fed, stop) - start)
            work_31[:, 0] = (first + start) * layers, present * layers, (stop - start - present) * layers
            yield (start, stop) if self._hold(*work_31)[0] else None

    # -- records -------------------------------------------------------------------------------------------------------

    def record(self, index: int, columns: Mapping[str, AlignedColumn]) -> RouteRecord | None:
        """Record ``index``, where all rules hold and, if asked, its checksum too; None where that is not told.

        Asked in ascending order.
        """
        attributes = self._attributes[index]
        if not self._right[index] or attributes is None:
            return None
        if index >= self._looked_at:
            self._reach(index)
        if not self._present[index]:
            return None
        source: RecordSource = self
        own: dict[str, Any] = {"spec": self._spec, "checksum": self._checksums[index]}
        kept_SLK, self._kept[index] = self._kept[index], None
        if kept_SLK is not None and self._how.select is not None:
            source, own = _KeptRows(self, kept_SLK, self._how.select), {"spec": self._how.select}
        try:
            made = view_record(
                source,
                index,
                columns=columns,
                slots=self._slots,
                sample_id=self._names["sample_id"][index],
                attempt=self._names["attempt"][index],
                segment=self._names["segment"][index],
                group=self._names["group"][index],
                token_ids=self._stored.tokens[index],
                logprobs=self._stored.logprobs[index],
                attributes=attributes,
                **own,
            )
        except DataError:
            return None
        out, self._hashes[index] = self._hashes[index], None
        if out is None:
            return made
        if made.columns:
            hash_columns(out, made.columns)
        return made if out.value() == self._checksums[index] else None

    def _canonical_parts(self, index: int) -> Iterator[bytes | memoryview]:
        """What a record's checksum is made over, but its columns; small parts that are neighbours are joined."""
        items, tokens, scores = self._items, self._stored.tokens.at, self._stored.logprobs.at
        ids = items.token_ids[4 * tokens[index] : 4 * tokens[index + 1]]
        yield b"".join((items.names[index], ids, items.rows[index]))
        yield from self._canonical_rows(index)
        values = items.logprobs[4 * scores[index] : 4 * scores[index + 1]]
        own = (_NO_PREFIX, items.spans[index], items.captures[index], items.scores[index], values)
        yield b"".join((*own, items.attributes[index]))

    def _canonical_rows(self, index: int) -> Iterator[bytes | memoryview]:
        routes, first, width = self._items.routes, self._stored.routes.at[index], self._row_bytes
        for piece in self._pieces(index):
            if piece is None:
                raise _IllegalRowsError
            if routes is not None:
                yield routes[width * (first + piece[0]) : width * (first + piece[1])]
                continue
            stored_SLK = self._stored.routes.stored(index, tokens=piece)
            for part in canonical_blocks(stored_SLK, self._spec, kernels=self._kernels):
                yield part.data

    @cached_property
    def _items(self) -> _Items:
        routes_B = self._lengths_B * (self._spec.num_layers * self._spec.top_k * 2)
        flat = self._stored.routes.flat
        distinct = {id(entries): entries for entries in self._attributes}
        texts = {place: _small(partial(_hash_attributes, entries)) for place, entries in distinct.items()}
        no_start = _small(lambda out: out.int64("routes_start", 0))
        spans, captures = self._interval_items()
        return _Items(
            names=self._name_items(),
            rows=array_heads("routes", routes_B, behind=no_start),
            spans=spans,
            captures=captures,
            scores=self._score_heads(),
            attributes=[texts[id(entries)] for entries in self._attributes],
            token_ids=canonical_bytes(self._stored.tokens.flat),
            logprobs=canonical_bytes(self._stored.logprobs.flat),
            routes=canonical_bytes(flat) if flat.dtype == np.int16 else None,
        )

    def _name_items(self) -> list[bytes]:
        """Of each record from the spec's digest to the head of its token ids."""
        numbers = number_items(**{name: np.asarray(self._names[name], np.int32) for name in ("attempt", "segment")})
        heads = array_heads("token_ids", self._lengths_B * 4)
        first = self._spec.digest.to_bytes(8, "little") + item_head("sample_id")
        groups = self._names["group"]
        own = {group: _small(partial(_hash_group, group)) for group in set(groups)}
        return [
            b"".join((first, len(name).to_bytes(8, "little"), name, number, own[group], head))
            for name, number, group, head in zip(
                map(str.encode, self._names["sample_id"]), numbers, groups, heads, strict=True
            )
        ]

    def _interval_items(self) -> tuple[list[bytes], list[bytes]]:
        """Spans and captures of each record."""
        spans, captures = self._spans, self._captures
        ends = map(span_end, zip(spans.kinds, spans.roles, spans.calls, spans.versions, strict=True))
        samplings = spans.samplings or []
        sampled = {id(how): _sampling_bytes(how) for how in {id(each): each for each in samplings}.values()}
        span_ends = (end + sampled[id(how)] for end, how in zip(ends, samplings, strict=True))
        capture_ends = map(capture_end, zip(captures.kinds, captures.calls, captures.versions, strict=True))
        return spans.items("spans", span_ends), captures.items("captures", capture_ends)

    def _score_heads(self) -> list[bytes]:
        """How the log-probabilities of each record begin, or that there are none."""
        scores, none = self._stored.logprobs, _small(lambda out: out.null("logprobs"))
        heads = array_heads("logprobs", np.diff(scores.offsets_B1) * 4)
        return [head if valid else none for head, valid in zip(heads, scores.valid, strict=True)]

    def hash_intervals(self, out: CanonicalHash, index: int) -> None:
        """Add the items of a record's spans and captures."""
        out.raw(self._items.spans[index] + self._items.captures[index])

    def length(self, index: int) -> int:
        """Tokens of a record."""
        return self._lengths[index]

    def quiet(self, index: int) -> bool:
        """Whether the first look for alarms showed nothing suspect."""
        return self._quiet[index]

    def span_intervals(self, index: int) -> Iterable[tuple[int, int, Any]]:
        """Start, stop and kind of a record's spans."""
        return self._spans.intervals(index)

    def capture_intervals(self, index: int) -> Iterable[tuple[int, int, Any]]:
        """Start, stop and state of a record's captures."""
        return self._captures.intervals(index)

    def part(self, name: str, index: int) -> Any:
        """A part of a record that it was not made with: ``spans``, ``captures``, or its rows."""
        if name == "stored":
            return self._stored.routes.stored(index)
        if name == "routes":
            # what is widened is the caller's own; a view of plain rows is read-only as all of them are
            rows_SLK = self._stored.routes[index]
            return frozen_view(rows_SLK) if rows_SLK.flags.writeable else rows_SLK
        if name == "spans":
            spans = self._spans
            return tuple(
                Span(start=start, stop=stop, kind=kind, role=role, call=call, weights_version=version, sampling=how)
                for (start, stop, kind), (role, call, version, how) in zip(
                    spans.intervals(index),
                    self._rest(spans, index, spans.roles, spans.calls, spans.versions, spans.samplings or []),
                    strict=True,
                )
            )
        if name == "captures":
            captures = self._captures
            return tuple(
                Capture(start=start, stop=stop, state=state, call=call, weights_version=version)
                for (start, stop, state), (call, version) in zip(
                    captures.intervals(index),
                    self._rest(captures, index, captures.calls, captures.versions),
                    strict=True,
                )
            )
        return StoredRows(stored=self._stored.routes.stored(index), spec=self._spec, absent=self.absent(index))

    def absent(self, index: int) -> NDArray[np.int64]:
        """The tokens of a record that lack a row, read-only."""
        tokens = self._lengths[index]
        return frozen_view(np.arange(tokens - self._unfed[index], tokens))

    @staticmethod
    def _rest(of: _Intervals, index: int, *members: list[Any]) -> Iterator[tuple[Any, ...]]:
        own = slice(of.at[index], of.at[index + 1])
        return zip(*(each[own] for each in members), strict=True)


class _KeptRows:
    """A record of some layers of a batch: their rows are its own, all else is the batch's."""

    def __init__(self, batch: CheckedBatch, stored_SLK: NDArray[Any], spec: RouteSpec) -> None:
        self._stored, self._spec = stored_SLK, spec
        self.length, self.quiet = batch.length, batch.quiet
        self.span_intervals, self.capture_intervals = batch.span_intervals, batch.capture_intervals
        self.hash_intervals, self._part, self._absent = batch.hash_intervals, batch.part, batch.absent

    def part(self, name: str, index: int) -> Any:
        """As of the batch."""
        if name == "stored":
            return self._stored
        if name not in ("routes", "_rows"):
            return self._part(name, index)
        rows = StoredRows(stored=self._stored, spec=self._spec, absent=self._absent(index))
        return rows if name == "_rows" else rows.widened()


def _attributes(column: pa.MapArray) -> list[Mapping[str, str] | None]:
    """The attributes of each record; None where they are none that a record can have."""
    if column.offsets[0].as_py() == column.offsets[len(column)].as_py():
        return [_NO_ATTRIBUTES] * len(column)
    return [_attribute_map(tuple(pairs)) for pairs in column.to_pylist()]


_NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})
_NO_PREFIX = _small(lambda out: out.null("prefix"))


@lru_cache(maxsize=256)
def _attribute_map(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str] | None:
    entries = dict(pairs)
    try:
        return text_map(entries) if len(entries) == len(pairs) else None
    except DataError:
        return None
