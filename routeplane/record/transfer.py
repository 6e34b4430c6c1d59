"""The base of all writers and readers: checks at the edge, selection, counting, ``with``.

A subclass adds how records travel: ``RecordWriter._put`` and ``RecordReader._arrive``. Knows no bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from routeplane.errors import DataError, ErrorKind, SpecError, UsageError, check_type, naming_stream
from routeplane.record.alarms import find_alarms
from routeplane.record.counts import html_table
from routeplane.record.interfaces import Admission, admit
from routeplane.record.policy import Quarantine, ReadPolicy, RecordCounts, StreamReport
from routeplane.record.record import RecordKey, RouteRecord, cut_record

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["RecordReader", "RecordWriter", "check_max_bytes"]


def check_max_bytes(max_bytes: int) -> None:
    """Raise UsageError for a byte bound under which nothing could ever be written."""
    if max_bytes < 1:
        raise UsageError(f"expected max_bytes of at least 1, got {max_bytes}", kind=ErrorKind.ARGUMENT)


class RecordWriter(ABC):
    """Base of RouteSinks. Not safe for several threads.

    Args:
        max_bytes: payload bytes held before they are written.
        max_keys: how many keys are remembered to refuse a record that comes twice; None: all.
    """

    def __init__(self, spec: RouteSpec, *, max_bytes: int, max_keys: int | None = None) -> None:
        check_max_bytes(max_bytes)
        self._spec = spec
        self._max_bytes, self._max_keys = max_bytes, max_keys
        self._keys: dict[RecordKey, None] = {}  # in order, so that the oldest is forgotten first
        self._open = True

    @property
    def spec(self) -> RouteSpec:
        """The geometry every record must have."""
        return self._spec

    def write(self, record: RouteRecord) -> None:
        """Verify and hand over one record.

        Raises DataError, SpecError or UsageError before anything of it is written, and then the stream goes on. Where
        the transport itself fails (a full disk, a reader that left), the stream takes no more: half of a batch may be
        out. What was acknowledged before stays acknowledged.
        """
        if not self._open:
            raise UsageError("expected an open stream, got one that was closed or aborted", kind=ErrorKind.CLOSED)
        check_type(record, RouteRecord, expected="a RouteRecord")
        self._spec.require_same_geometry(record.spec, where=f"sample {record.key}")
        if record.spec != self._spec:
            raise SpecError(
                f"expected routes of model {self._spec.model!r}, got {record.spec.model!r} @ sample {record.key}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
        if record.key in self._keys:
            raise DataError(f"expected each record once, got {record.key} twice", kind=ErrorKind.DUPLICATE_KEY)
        self._check(record.verify())
        try:
            self._put(record)
        except BaseException:
            self._open = False
            self._fail()
            raise
        self._keys[record.key] = None
        if self._max_keys is not None and len(self._keys) > self._max_keys:
            del self._keys[next(iter(self._keys))]

    def close(self) -> None:
        """Write what is held and the trailer, and publish. Does nothing on a stream that is closed or aborted.

        Where that fails, nothing is published.
        """
        if not self._open:
            return
        self._open = False
        try:
            self._finish()
        except BaseException:
            self._fail()
            raise

    def abort(self) -> None:
        """Publish nothing. Does nothing on a stream that is closed or aborted."""
        if self._open:
            self._open = False
            self._discard()

    @abstractmethod
    def _check(self, record: RouteRecord) -> None:
        """What this transport asks of a record beyond the rest; raises before anything of it is written."""

    @abstractmethod
    def _put(self, record: RouteRecord) -> None:
        """Take one checked record; blocks at the byte bound."""

    @abstractmethod
    def _finish(self) -> None:
        """End the stream as whole."""

    @abstractmethod
    def _discard(self) -> None:
        """End the stream so that no reader takes it for whole."""

    def _fail(self) -> None:
        """The same, after the transport failed; what a reader was promised must not be taken back."""
        self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class RecordReader(ABC):
    """Base of RouteSources. Iterate once; ``close`` (or ``with``) closes the source.

    ``quarantine`` holds what was quarantined, and gives the bytes of a record again. ``name``: what errors call the
    source that is read.
    """

    def __init__(
        self, spec: RouteSpec, policy: ReadPolicy, *, quarantine: Quarantine | None = None, name: str | None = None
    ) -> None:
        self._whole_spec = self._spec = spec
        self._policy, self._name = policy, name
        self.quarantine = quarantine or Quarantine(policy.quarantine)
        self._counts = RecordCounts()
        self._report = StreamReport()  # all but what is counted
        self._started = self._closed = False
        self._layer_ids: tuple[int, ...] | None = None
        self._tokens: tuple[int, int] | None = None

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records this reader yields (after ``select``)."""
        return self._spec

    @property
    def digest(self) -> str | None:
        """The trailer's digest as 16 hex digits, where it is known before reading; None where it is not."""
        return None

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> Self:
        """Restrict what is yielded to layers and to positions ``[a, b)`` of every record; returns this reader.

        Whole records are verified before they are cut; with ``verify=False``, rows of other layers may not be looked at
        at all, and the report is about the selected ones. Records with no token in the range are counted, not yielded.
        """
        if self._started:
            raise UsageError("expected select before iteration, got it after", kind=ErrorKind.ARGUMENT)
        if layer_ids is not None:
            self._spec = self._whole_spec.select(layer_ids)  # one for all records, which are compared with it
            self._layer_ids = self._spec.layer_ids
        if tokens is not None:
            if not 0 <= tokens[0] < tokens[1]:
                raise UsageError(f"expected tokens [a, b) with 0 <= a < b, got {tokens}", kind=ErrorKind.ARGUMENT)
            self._tokens = tokens
        return self

    def ahead(self, *, threads: int) -> Self:
        """Let threads check records ahead of the one that is asked for, as ``ReadPolicy.threads`` does.

        Compiled loops and hashes run without the interpreter's lock, so that a second core helps where records are
        long; a reader that checks nothing itself has no use for it. Memory: some 4 MiB of rows a thread are looked at
        at once, which are views.

        Args:
            threads: how many; they end with each batch, and with the iteration.

        Returns:
            This reader, which yields the same as with one thread.

        Raises:
            UsageError: fewer than 1 (ARGUMENT), or after iteration began.

        >>> import io
        >>> from routeplane import new_stream, open_stream
        >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
        >>> spec, file = watermarked_spec(), io.BytesIO()
        >>> with new_stream(file, spec) as sink:
        ...     sink.write(watermarked_record(0, num_tokens=3, spec=spec))
        >>> with open_stream(file.getvalue()).ahead(threads=2) as reader:
        ...     [record.num_tokens for record in reader]
        [3]
        """
        if self._started:
            raise UsageError("expected ahead before iteration, got it after", kind=ErrorKind.ARGUMENT)
        self._policy = replace(self._policy, threads=threads)
        return self

    def __repr__(self) -> str:
        layers, top_k = self._spec.row_shape
        state = "closed" if self._closed else "being read" if self._started else "not read yet"
        return f"{type(self).__name__}({self._spec.model!r}, {layers} layers x {top_k}, {state})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.report().scalars(prefix=""))

    def __iter__(self) -> Iterator[RouteRecord]:
        if self._started or self._closed:
            raise UsageError(
                "expected one iteration of an open stream, got another, or one after close: open it again",
                kind=ErrorKind.CLOSED,
            )
        self._started = True
        return self._selected()

    def _selected(self) -> Iterator[RouteRecord]:
        with naming_stream(self._name):
            for record in self._arrive():
                self._counts.add(record)
                self._watch(record)
                cut = self._cut(record)
                if cut is not None:
                    yield cut

    def _watch(self, record: RouteRecord) -> None:
        """Look for statistics that a healthy capture does not show; count them, or raise by choice."""
        if self._policy.on_alarm == "ignore" or record.seen_quiet:
            return
        found = find_alarms(
            record.stored_routes,
            record.spec,
            absent=record.absent_tokens,
            token_ids=record.row_token_ids,
            first_token=record.routes_start,
            sample=record.sample_id,
        )
        if found and self._policy.on_alarm == "raise":
            raise DataError.from_problems(found, what="alarms")
        self._report = self._report.with_alarms(found)

    def _count(self, **more: int) -> None:
        """Add to counts of the report, by name."""
        self._report = replace(self._report, **{name: getattr(self._report, name) + n for name, n in more.items()})

    @abstractmethod
    def _arrive(self) -> Iterator[RouteRecord]:
        """Whole, checked records in the producer's order; raises where the stream ends otherwise than it should."""

    def _cut(self, record: RouteRecord) -> RouteRecord | None:
        if self._tokens is not None:
            start, stop = self._tokens[0], min(self._tokens[1], record.num_tokens)
            if start >= stop:
                self._count(outside=1)
                return None
            record = cut_record(record, tokens=(start, stop))
        return record if self._layer_ids is None else cut_record(record, spec=self._spec)

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under this reader's ``max_missing``."""
        return admit(records, self.spec, max_missing=self._policy.max_missing)

    def report(self) -> StreamReport:
        """What was read so far."""
        return self._report.with_counts(self._counts).with_quarantine(self.quarantine)

    def close(self) -> None:
        """Close the source. Records already yielded stay valid."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
