"""The trailer that makes the end of a stream an end: counts and a digest that both sides compute.

Pure values; no IO.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import xxhash

from routeplane.errors import ErrorKind, FormatError
from routeplane.record.parse import check_count
from routeplane.record.schema import FORMAT_VERSION, Encoding
from routeplane.record.spec import RouteSpec

__all__ = ["TRAILER_KEY", "Trailer", "TrailerCounter"]

#: Metadata key of the zero-row batch that ends a stream.
TRAILER_KEY = "routeplane.trailer"

_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trailer:
    """What a complete stream held. An Arrow stream cut at a batch boundary reads as complete; one of ours does not."""

    batches: int
    records: int
    tokens: int
    digest: int

    def to_json(self) -> str:
        """Canonical JSON; the digest as 16 hex digits."""
        document = {
            "batches": self.batches,
            "digest": f"{self.digest:016x}",
            "records": self.records,
            "tokens": self.tokens,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trailer:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        try:
            document: Any = json.loads(text)
            counts = {name: check_count(document[name], name, below=2**63) for name in ("batches", "records", "tokens")}
            digits = document["digest"]
            if set(document) != {*counts, "digest"} or not _DIGEST.fullmatch(digits):
                raise ValueError("other keys, or a digest that is not 16 hex digits")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"expected a trailer as JSON, got {text[:120]!r} ({error})", kind=ErrorKind.TRAILER
            ) from None
        return cls(**counts, digest=int(digits, 16))


class TrailerCounter:
    """Counts and digests what passes; both ends run one and must agree.

    Digest: xxh3-64 over format, spec and encoding (each as u64 length and bytes), then the record checksums as u64 in
    order.
    """

    def __init__(self, spec: RouteSpec, encoding: Encoding, *, version: str = FORMAT_VERSION) -> None:
        self._hash = xxhash.xxh3_64()
        for text in (version, spec.to_json(), encoding):
            data = text.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)
        self._batches = self._records = self._tokens = 0

    def add_batch(self) -> None:
        """Count one batch."""
        self._batches += 1

    def add_record(self, checksum: int, tokens: int) -> None:
        """Count one record; ``checksum`` as it stands in the stream."""
        self._hash.update(checksum.to_bytes(8, "little"))
        self._records += 1
        self._tokens += tokens

    def trailer(self) -> Trailer:
        """The trailer for what passed so far."""
        return Trailer(batches=self._batches, records=self._records, tokens=self._tokens, digest=self._hash.intdigest())

    def check(self, declared: Trailer) -> None:
        """Raise FormatError unless exactly what ``declared`` counts has passed."""
        found = self.trailer()
        if found != declared:
            raise FormatError(f"expected what the trailer counts, {declared}, got {found}", kind=ErrorKind.TRAILER)
