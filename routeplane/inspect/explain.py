"""Every hop of one token's rows: its call, who sampled it, who captured it, and what its neighbours chose.

Pure functions of a record; knows no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING

__all__ = ["Explanation", "LayerRows", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """One layer's rows around a token; ids as stored, None for a row that is MISSING or stands in another record.

    ``kept_from_before``: ids that the row before holds too; None where either is None.
    """

    layer: int
    before: tuple[int, ...] | None
    row: tuple[int, ...] | None
    after: tuple[int, ...] | None
    kept_from_before: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What is known about one token of a record.

    ``checksum``: the record's, and whether its content agrees (``intact``). ``logprob``: of this token, governed by the
    rows of the token before. ``columns``: this token's values of further token columns.
    """

    key: RecordKey
    group: str | None
    token: int
    tokens: int
    token_id: int
    span: Span
    capture: Capture
    where: str
    checksum: int
    intact: bool
    logprob: float | None
    columns: dict[str, Any]
    attributes: dict[str, str]
    layers: tuple[LayerRows, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "key": list(self.key),
            "group": self.group,
            "token": self.token,
            "tokens": self.tokens,
            "token_id": self.token_id,
            "sampled": {
                "kind": self.span.kind,
                "role": self.span.role,
                "call": self.span.call,
                "weights_version": self.span.weights_version,
                "span": [self.span.start, self.span.stop],
            },
            "captured": {
                "state": self.capture.state,
                "call": self.capture.call,
                "weights_version": self.capture.weights_version,
                "capture": [self.capture.start, self.capture.stop],
            },
            "where": self.where,
            "checksum": f"{self.checksum:016x}",
            "intact": self.intact,
            "logprob": self.logprob,
            "columns": self.columns,
            "attributes": self.attributes,
            "layers": [
                {
                    "layer": rows.layer,
                    "before": rows.before,
                    "row": rows.row,
                    "after": rows.after,
                    "kept_from_before": rows.kept_from_before,
                }
                for rows in self.layers
            ],
        }


def explain(record: RouteRecord, token: int, *, layer_ids: tuple[int, ...] | None = None) -> Explanation:
    """Explain ``token``, an absolute position of ``record``, in all layers or those of ``layer_ids``.

    Raises UsageError (ARGUMENT) for a position outside the record, SpecError for a layer that it does not have.
    """
    if not 0 <= token < record.num_tokens:
        raise UsageError(
            f"expected a token in [0, {record.num_tokens}), got {token} @ sample {record.sample_id}",
            kind=ErrorKind.ARGUMENT,
        )
    own = token - record.tokens_start
    if own < 0:
        raise UsageError(
            f"expected a token from {record.tokens_start} on (those before stand in another record), got {token} "
            f"@ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    chosen = record.spec.layer_ids if layer_ids is None else layer_ids
    logprob = None if record.logprobs is None else float(record.logprobs[own])
    return Explanation(
        key=record.key,
        group=record.group,
        token=token,
        tokens=record.num_tokens,
        token_id=int(record.token_ids[own]),
        span=next(span for span in record.spans if span.start <= token < span.stop),
        capture=next(capture for capture in record.captures if capture.start <= token < capture.stop),
        where=_where(record, token),
        checksum=int(record.checksum),
        intact=record.compute_checksum() == record.checksum,
        logprob=None if logprob is None or logprob != logprob else logprob,
        columns={name: values[own : own + 1].tolist()[0] for name, values in record.columns.items()},
        attributes=dict(record.attributes),
        layers=tuple(_layer_rows(record, token, layer_id) for layer_id in chosen),
    )


def _where(record: RouteRecord, token: int) -> str:
    if token >= record.routes_start:
        return f"row {token - record.routes_start} of this record"
    prefix = record.prefix
    return "no record" if prefix is None else f"record {tuple(prefix.key)}, which holds the rows before {prefix.stop}"


def _layer_rows(record: RouteRecord, token: int, layer_id: int) -> LayerRows:
    slot = record.spec.slot(layer_id)
    before, row, after = (_row(record, position, slot) for position in (token - 1, token, token + 1))
    kept = None if before is None or row is None else len(set(before) & set(row))
    return LayerRows(layer=layer_id, before=before, row=row, after=after, kept_from_before=kept)


def _row(record: RouteRecord, token: int, slot: int) -> tuple[int, ...] | None:
    if not record.routes_start <= token < record.num_tokens:
        return None
    ids = record.routes[token - record.routes_start, slot].tolist()
    return None if ids[0] == MISSING else tuple(ids)
