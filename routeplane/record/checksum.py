"""Canonical bytes and the xxh3-64 over them: what "the same record" means, whatever encoding carried it.

Grammar (``docs/spec/v1.md``, section "Checksum"): the spec's digest as u64, then for every column its name, a null
flag, a u64 length and its values, all little endian. Knows no record class; callers name their columns in schema order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from routeplane.errors import ChecksumError, ErrorKind, Problem

if TYPE_CHECKING:
    from routeplane.record.spans import Capture, Prefix, Sampling, Span

__all__ = [
    "CanonicalHash",
    "array_heads",
    "canonical_bytes",
    "capture_end",
    "digest_of",
    "hash_captures",
    "hash_prefix",
    "hash_sampling",
    "hash_spans",
    "item_head",
    "number_items",
    "require_equal",
    "span_end",
]


_U64 = struct.Struct("<Q")
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_LENGTH_4, _LENGTH_8 = _U64.pack(4), _U64.pack(8)

# the one NaN per float width (format v1)
_CANONICAL_NAN = {
    2: np.uint16(0x7E00),
    4: np.uint32(0x7FC00000),
    8: np.uint64(0x7FF8000000000000),
}


def digest_of(data: bytes) -> int:
    """xxh3-64 of bytes, for digests that stand in no format."""
    return xxhash.xxh3_64_intdigest(data)


class CanonicalHash:
    """xxh3-64 over canonical bytes. One instance per checksum; ``value()`` may be read at any time."""

    def __init__(self, spec_digest: int) -> None:
        self._hash = xxhash.xxh3_64()
        # small values are collected: a record has some 60, and a call of the hash for each takes longer than hashing
        self._small: list[bytes] = [_U64.pack(spec_digest)]

    @classmethod
    def behind(cls, parts: Iterable[bytes | memoryview]) -> Self:
        """The checksum behind canonical bytes that were made before, the spec's digest among them."""
        found = cls.__new__(cls)
        found._hash, found._small = xxhash.xxh3_64(), []
        for part in parts:
            found._hash.update(part)
        return found

    def value(self) -> int:
        """The checksum so far, as an unsigned 64-bit integer."""
        if self._small:
            self._flush()
        return self._hash.intdigest()

    def _flush(self) -> None:
        self._hash.update(b"".join(self._small))
        self._small = []

    def raw(self, piece: bytes) -> None:
        """Canonical bytes that were made before: whole items."""
        self._small.append(piece)

    def small_bytes(self) -> bytes:
        """What was given since the last array, the spec's digest included where there was none."""
        return b"".join(self._small)

    def null(self, name: str) -> None:
        """A null column: name and flag, nothing more."""
        self._small.append(_head(name, b"\x01"))

    def text(self, name: str, value: str | None) -> None:
        """A utf8 column; length in bytes."""
        if value is None:
            return self.null(name)
        data = value.encode()
        self._small += (item_head(name), _U64.pack(len(data)), data)
        return None

    def int32(self, name: str, value: int) -> None:
        """An int32 column."""
        self._small += (item_head(name), _LENGTH_4, _I32.pack(value))

    def int64(self, name: str, value: int | None) -> None:
        """An int64 column."""
        if value is None:
            return self.null(name)
        self._small += (item_head(name), _LENGTH_8, _I64.pack(value))
        return None

    def interval(self, start: int, stop: int) -> None:
        """The int64 columns ``start`` and ``stop``, in one step: a record has several of each."""
        self._small += (_START, _I64.pack(start), _STOP, _I64.pack(stop))

    def float64(self, name: str, value: float | None) -> None:
        """A float64 column."""
        if value is None:
            return self.null(name)
        self._small += (item_head(name), _LENGTH_8, _F64.pack(value))
        return None

    def uint64(self, name: str, value: int) -> None:
        """A uint64 column."""
        self._small += (item_head(name), _LENGTH_8, _U64.pack(value))

    def begin_list(self, name: str, count: int) -> None:
        """A list or struct column: the number of entries; the caller then gives each entry's fields."""
        self._small += (item_head(name), _U64.pack(count))

    def begin_array(self, name: str, nbytes: int) -> None:
        """A fixed-width column whose values come by ``part``, ``nbytes`` of them in all."""
        self._small += (item_head(name), _U64.pack(nbytes))

    def part(self, values: NDArray[Any]) -> None:
        """Some values of a fixed-width column: little endian, NaN in its canonical spelling, bool as one byte."""
        self._flush()
        self._hash.update(_canonical_array(values).data)

    def array(self, name: str, values: NDArray[Any] | None) -> None:
        """A fixed-width column; length in bytes, values as by ``part``."""
        if values is None:
            return self.null(name)
        self.begin_array(name, values.nbytes)
        self.part(values)
        return None

    def token_column(self, name: str, values: NDArray[Any], *, dtype: str) -> None:
        """A token column: its type by name first, so that equal bytes of another type are another content."""
        self.text("type", dtype)
        self.array(name, values)

    def text_map(self, name: str, entries: Mapping[str, str]) -> None:
        """A map column: entries in ascending order of the key's bytes."""
        self.begin_list(name, len(entries))
        encoded: Iterable[tuple[bytes, bytes]] = ((key.encode(), value.encode()) for key, value in entries.items())
        for key, value in sorted(encoded):
            self._small += (_U64.pack(len(key)), key, _U64.pack(len(value)), value)


def require_equal(declared: int, computed: int, *, where: str, sample: str) -> None:
    """Raise ChecksumError where content is not what its checksum was made over.

    ``where`` names the record or call in the message; ``sample`` is the problem's.
    """
    if declared != computed:
        message = f"expected checksum {declared:016x}, got {computed:016x}"
        problem = Problem(kind=ErrorKind.CHECKSUM, message=message, sample=sample)
        raise ChecksumError(f"{message} @ {where}", kind=ErrorKind.CHECKSUM, problems=[problem])


@lru_cache(maxsize=256)
def _head(name: str, flag: bytes) -> bytes:
    data = name.encode()
    return _U64.pack(len(data)) + data + flag


def item_head(name: str) -> bytes:
    """How an item that is not null begins: its name and its flag."""
    return _head(name, b"\x00")


_START, _STOP = (item_head(name) + _LENGTH_8 for name in ("start", "stop"))


def number_items(**columns: NDArray[Any]) -> list[bytes]:
    """The items of columns of numbers, int32 or int64, one after the other: bytes for each entry.

    What ``CanonicalHash.int32`` and ``int64`` give of one.
    """
    parts = [(item_head(name) + _U64.pack(values.itemsize), values) for name, values in columns.items()]
    return _rows_of_bytes(parts)


def canonical_bytes(values: NDArray[Any]) -> memoryview:
    """The bytes of a fixed-width column as ``CanonicalHash.part`` takes them: a view where they are canonical."""
    return _canonical_array(values).data.cast("B") if values.size else memoryview(b"")


def array_heads(name: str, nbytes: NDArray[np.int64], *, behind: bytes = b"") -> list[bytes]:
    """How a fixed-width column of each entry begins: what ``CanonicalHash.begin_array`` gives of one.

    ``behind``: an item that is the same for all, before it.
    """
    return _rows_of_bytes([(behind + item_head(name), nbytes)])


def _rows_of_bytes(parts: list[tuple[bytes, NDArray[Any]]]) -> list[bytes]:
    kinds = [kind for head, values in parts for kind in (f"V{len(head)}", values.dtype.newbyteorder("<"))]
    block = np.empty(len(parts[0][1]), dtype=[(str(place), kind) for place, kind in enumerate(kinds)])
    for place, (head, values) in enumerate(parts):
        block[str(2 * place)], block[str(2 * place + 1)] = np.void(head), values
    data, width = block.tobytes(), block.itemsize
    return [data[at : at + width] for at in range(0, len(data), width)]


def _canonical_array(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.str[0] in "<|" and values.flags.c_contiguous:
        little = values
    else:
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    if little.dtype.kind != "f":
        return little
    nan, canonical = np.isnan(little), _CANONICAL_NAN[little.dtype.itemsize]
    bits = little.view(f"<u{little.dtype.itemsize}")
    if (bits[nan] == canonical).all():
        return little
    bits = bits.copy()
    bits[nan] = canonical
    return bits


def hash_prefix(out: CanonicalHash, prefix: Prefix | None) -> None:
    """Where the rows before ``routes_start`` stand, or nothing."""
    if prefix is None:
        return out.null("prefix")
    out.begin_list("prefix", 1)
    out.text("sample_id", prefix.sample_id)
    out.int32("attempt", prefix.attempt)
    out.int32("segment", prefix.segment)
    out.int64("stop", prefix.stop)
    out.uint64("checksum", prefix.checksum)
    return None


def hash_spans(out: CanonicalHash, spans: tuple[Span, ...]) -> None:
    """Who sampled which tokens."""
    out.begin_list("spans", len(spans))
    for span in spans:
        out.interval(span.start, span.stop)
        out.raw(span_end((span.kind, span.role, span.call, span.weights_version)))
        if span.sampling is not None:
            hash_sampling(out, span.sampling)


@lru_cache(maxsize=1024)
def span_end(members: tuple[str, str | None, str, int | None]) -> bytes:
    """The items of a span between its interval and its sampling: those of a call repeat from record to record.

    ``members``: kind, role, call, weights_version.
    """
    kind, role, call, weights_version = members
    out = CanonicalHash(0)
    out.text("kind", kind)
    out.text("role", role)
    out.text("call", call)
    out.int64("weights_version", weights_version)
    return out.small_bytes()[8:]


def hash_sampling(out: CanonicalHash, sampling: Sampling) -> None:
    """With which parameters tokens were sampled; a span without them has no such item."""
    out.begin_list("sampling", 1)
    for name in ("temperature", "top_p"):
        out.float64(name, getattr(sampling, name))
    out.int64("top_k", sampling.top_k)
    for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        out.float64(name, getattr(sampling, name))
    out.text("logit_bias", sampling.logit_bias)
    if sampling.processors is None:
        out.null("processors")
    else:
        out.begin_list("processors", len(sampling.processors))
        for processor in sampling.processors:
            out.text("name", processor)
    out.text("logprobs_mode", sampling.logprobs_mode)


def hash_captures(out: CanonicalHash, captures: tuple[Capture, ...]) -> None:
    """Who captured which rows."""
    out.begin_list("captures", len(captures))
    for capture in captures:
        out.interval(capture.start, capture.stop)
        out.raw(capture_end((capture.state, capture.call, capture.weights_version)))


@lru_cache(maxsize=1024)
def capture_end(members: tuple[str, str, int | None]) -> bytes:
    """The items of a capture behind its interval; ``members``: state, call, weights_version."""
    state, call, weights_version = members
    out = CanonicalHash(0)
    out.text("state", state)
    out.text("call", call)
    out.int64("weights_version", weights_version)
    return out.small_bytes()[8:]
