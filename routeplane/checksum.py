"""Canonical bytes and the xxh3-64 over them: what "the same record" means, whatever encoding carried it.

Grammar (``docs/spec/v1.md``, section "Checksum"): the spec's digest as u64, then for every column its name, a null
flag, a u64 length and its values, all little endian. Knows no record class; callers name their columns in schema order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from routeplane.errors import ChecksumError, ErrorKind, Problem

__all__ = ["CanonicalHash", "require_equal"]

_U64 = struct.Struct("<Q")
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")

# the one NaN per float width (format v1)
_CANONICAL_NAN = {
    2: np.uint16(0x7E00),
    4: np.uint32(0x7FC00000),
    8: np.uint64(0x7FF8000000000000),
}


class CanonicalHash:
    """xxh3-64 over canonical bytes. One instance per checksum; ``value()`` may be read at any time."""

    def __init__(self, spec_digest: int) -> None:
        self._hash = xxhash.xxh3_64()
        self._hash.update(_U64.pack(spec_digest))

    def value(self) -> int:
        """The checksum so far, as an unsigned 64-bit integer."""
        return self._hash.intdigest()

    def null(self, name: str) -> None:
        """A null column: name and flag, nothing more."""
        self._hash.update(_name(name) + b"\x01")

    def text(self, name: str, value: str | None) -> None:
        """A utf8 column; length in bytes."""
        if value is None:
            return self.null(name)
        data = value.encode()
        self._hash.update(_name(name) + b"\x00" + _U64.pack(len(data)) + data)
        return None

    def int32(self, name: str, value: int) -> None:
        """An int32 column."""
        self._hash.update(_name(name) + b"\x00" + _U64.pack(4) + _I32.pack(value))

    def int64(self, name: str, value: int | None) -> None:
        """An int64 column."""
        if value is None:
            return self.null(name)
        self._hash.update(_name(name) + b"\x00" + _U64.pack(8) + _I64.pack(value))
        return None

    def uint64(self, name: str, value: int) -> None:
        """A uint64 column."""
        self._hash.update(_name(name) + b"\x00" + _U64.pack(8) + _U64.pack(value))

    def begin_list(self, name: str, count: int) -> None:
        """A list or struct column: the number of entries; the caller then gives each entry's fields."""
        self._hash.update(_name(name) + b"\x00" + _U64.pack(count))

    def array(self, name: str, values: NDArray[Any] | None) -> None:
        """A fixed-width column; length in bytes, values little endian, NaN in its canonical spelling, bool as one
        byte."""
        if values is None:
            return self.null(name)
        canonical = _canonical_array(values)
        self._hash.update(_name(name) + b"\x00" + _U64.pack(canonical.nbytes))
        self._hash.update(canonical.reshape(-1).view(np.uint8).data)
        return None

    def token_column(self, name: str, values: NDArray[Any]) -> None:
        """A token column: its type by name first, so that equal bytes of another type are another content."""
        self.text("type", values.dtype.name)
        self.array(name, values)

    def text_map(self, name: str, entries: Mapping[str, str]) -> None:
        """A map column: entries in ascending order of the key's bytes."""
        self.begin_list(name, len(entries))
        encoded: Iterable[tuple[bytes, bytes]] = ((key.encode(), value.encode()) for key, value in entries.items())
        for key, value in sorted(encoded):
            self._hash.update(_U64.pack(len(key)) + key + _U64.pack(len(value)) + value)


def require_equal(declared: int, computed: int, *, where: str, sample: str) -> None:
    """Raise ChecksumError where content is not what its checksum was made over.

    ``where`` names the record or call in the message; ``sample`` is the problem's.
    """
    if declared != computed:
        message = f"expected checksum {declared:016x}, got {computed:016x}"
        problem = Problem(kind=ErrorKind.CHECKSUM, message=message, sample=sample)
        raise ChecksumError(f"{message} @ {where}", kind=ErrorKind.CHECKSUM, problems=[problem])


def _name(name: str) -> bytes:
    data = name.encode()
    return _U64.pack(len(data)) + data


def _canonical_array(values: NDArray[Any]) -> NDArray[Any]:
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    if little.dtype.kind != "f":
        return little
    nan = np.isnan(little)
    if not nan.any():
        return little
    bits = little.view(f"<u{little.dtype.itemsize}").copy()
    bits[nan] = _CANONICAL_NAN[little.dtype.itemsize]
    return bits
