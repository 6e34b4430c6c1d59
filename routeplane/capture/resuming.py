"""Records that an engine goes on with: what it may be given, how rows travel with a request, what comes back.

An engine that follows routes takes a record's tokens as the beginning of a request, and its rows for the gates. Knows
no engine: ``transformers`` and ``vllm`` do the following.

Axes: S token positions of a record, R rows that travel, L captured layers, K top-k slots, G sampled tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.wire import decode, encode
from routeplane.errors import DataError, ErrorKind, refused
from routeplane.record.aligned import AlignedColumn, concatenate_columns
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes, missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall

__all__ = ["FollowedRows", "extend", "require_resumable"]

_MASKS = ("sampling_mask", "sampling_mask_state")
_KEYS = {"rows", "layer_ids", "num_experts", "top_k", "salt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedRows:
    """Rows that travel with a request: those of its first tokens, for the engine's gates to follow.

    ``routes``: int16 ``[R, L, K]``, MISSING rows live. ``salt``: the request's ``cache_salt``: a digest of the rows,
    their geometry and the version of the weights, so that KV blocks of followed rows and of live ones never mix.
    Raises DataError.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> rows = FollowedRows.of(watermarked_record(0, num_tokens=3, spec=watermarked_spec()), weights_version=7)
    >>> FollowedRows.from_json(rows.to_json()).salt == rows.salt
    True
    """

    routes: NDArray[Any]
    layer_ids: tuple[int, ...]
    num_experts: int | tuple[int, ...]
    top_k: int
    salt: str

    @classmethod
    def of(cls, record: RouteRecord, *, weights_version: int | None) -> FollowedRows:
        """Take the rows of a whole record. One that was made on followed rows hands down its ``cache_salt``."""
        spec, rows_SLK = record.spec, record.routes
        present_N = np.flatnonzero(~missing_rows(rows_SLK).all(axis=1))
        routes_RLK = np.ascontiguousarray(rows_SLK[: present_N[-1] + 1 if present_N.size else 0])
        inherited = record.attributes.get("cache_salt")
        version = f"v{weights_version}."
        if inherited is not None and inherited.startswith(version):
            salt = inherited
        else:
            digest = hashlib.sha256(spec.to_json().encode())
            digest.update(record.token_ids.tobytes())
            digest.update(routes_RLK.tobytes())
            salt = version + digest.hexdigest()[:32]
        return cls(
            routes=routes_RLK, layer_ids=spec.layer_ids, num_experts=spec.num_experts, top_k=spec.top_k, salt=salt
        )

    def to_json(self) -> dict[str, Any]:
        """An object of JSON's types; one byte an id where ids allow it, MISSING as the byte 255."""
        routes_RLK, widest = self.routes, int(np.max(self.num_experts))
        if widest <= 255:
            routes_RLK = np.where(routes_RLK == MISSING, 255, routes_RLK).astype(np.uint8)
        return {
            "rows": encode(routes_RLK, form="npy"),
            "layer_ids": list(self.layer_ids),
            "num_experts": list(self.num_experts) if isinstance(self.num_experts, tuple) else self.num_experts,
            "top_k": self.top_k,
            "salt": self.salt,
        }

    @classmethod
    def from_json(cls, document: object) -> FollowedRows:
        """Read what ``to_json`` wrote. Raises DataError for anything else, and for rows that are not legal."""
        if not isinstance(document, Mapping) or set(document) != _KEYS or not isinstance(document["salt"], str):
            raise DataError(f"expected an object of {sorted(_KEYS)}", kind=ErrorKind.ENCODING)
        stored_RLK = decode(document["rows"], form="npy").routes
        routes_RLK = stored_RLK.astype(np.int16)
        if stored_RLK.dtype == np.uint8:
            routes_RLK[stored_RLK == 255] = MISSING
        experts = document["num_experts"]
        spec = RouteSpec(
            num_experts=tuple(experts) if isinstance(experts, list) else experts,
            top_k=document["top_k"],
            layer_ids=tuple(document["layer_ids"]),
        )
        check_routes(routes_RLK, spec)
        return cls(
            routes=routes_RLK,
            layer_ids=spec.layer_ids,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            salt=document["salt"],
        )


def require_resumable(
    record: RouteRecord,
    spec: RouteSpec,
    *,
    logprobs_mode: str,
    weights_version: int | None,
    stops: Sequence[int] = (),
) -> int:
    """Verify a record that an engine is to go on with, and say where its last generation begins.

    Args:
        record: What is to become longer.
        spec: The geometry of the engine's model.
        logprobs_mode: ``raw`` or ``processed``, as the engine's log-probabilities are.
        weights_version: Of the engine's weights; None where unknown.
        stops: Tokens that end a sequence.

    Returns:
        The token from which on only sampled ones stand; the number of tokens where the record ends otherwise.

    Raises:
        UsageError: A record that cannot be gone on with: one that ended, a delta, a slice that begins later, columns
            that have no value for new tokens, other log-probabilities, rows of later weights.
        SpecError: One of another geometry.
        ChecksumError: One that is damaged.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=3, spec=watermarked_spec())
    >>> require_resumable(record, record.spec, logprobs_mode="raw", weights_version=99) <= 3
    True
    """
    where = f"@ sample {record.sample_id}"
    spec.require_same_geometry(record.verify().spec, where=f"sample {record.sample_id}")
    if record.routes_start or not record.attributes.get("slice", "0:").startswith("0:"):
        raise refused("a record of all tokens from the first on", f"a delta or a slice {where}")
    alien = sorted(set(record.columns) - set(_MASKS))
    if alien:
        raise refused("a record without columns that new tokens have no value for", f"{alien} {where}")
    said = record.attributes.get("logprobs_mode", logprobs_mode)
    if said != logprobs_mode:
        raise refused(f"a record of logprobs_mode {logprobs_mode!r}", f"{said!r} {where}")
    latest = max((each.weights_version or 0 for each in record.captures), default=0)
    if weights_version is not None and latest > weights_version:
        raise refused(f"rows of weights up to {weights_version}, which run here", f"{latest} {where}")
    tail = list(takewhile(lambda span: span.kind == "generation", reversed(record.spans)))
    start = tail[-1].start if tail else record.num_tokens
    if start == 0:
        raise refused("a record with a prompt", f"one that begins with a generated token {where}")
    if ended := sorted(set(record.token_ids[start:].tolist()) & set(stops)):
        raise refused("a record that has not ended", f"end tokens {ended} {where}")
    return start


def extend(
    record: RouteRecord,
    call: ModelCall,
    *,
    known: NDArray[np.float32] | None = None,
    attributes: Mapping[str, str] | None = None,
) -> RouteRecord:
    """Make a record longer by a call that went on with it.

    Tokens, spans and log-probabilities stay, and so do rows in all layers with those who captured them. Other rows
    that the call brings are its own.

    Args:
        record: What the call began with.
        call: Its prompt is the record's tokens.
        known: Log-probabilities of the record's tokens from this pass, float32 ``[S]``, for where the record has none.
        attributes: Further ones.

    Returns:
        A record under the same key, with memory and a checksum of its own. Raises DataError (TOKEN_MISMATCH) for a call
        that began with other tokens.

    Example:
        ``resumed = extend(aborted, call, attributes={"forced_rows": "204"})``
    """
    size, total = record.num_tokens, call.num_tokens
    if call.prompt_ids.tolist() != record.token_ids.tolist() or call.routes is None or call.first_row:
        raise DataError(
            f"expected a call of all rows that begins with the {size} tokens of the record @ sample {record.sample_id}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    fresh = total > size
    logprobs_S = _logprobs(record, call, known)
    spans = [*record.spans]
    if fresh:
        new = Span(start=size, stop=total, kind="generation", call=call.call_id, weights_version=call.weights_version)
        spans.append(replace(new, sampling=call.sampling))
    routes_SLK = record.spec.missing_rows(total)
    routes_SLK[: len(call.routes)] = call.routes
    kept = {name: text for name, text in record.attributes.items() if name != "slice"}
    return replace(
        record,
        token_ids=call.token_ids,
        routes=routes_SLK,
        spans=tuple(spans),
        captures=_captures(record, call),
        logprobs=None if np.isnan(logprobs_S).all() else logprobs_S,
        attributes={**kept, **(attributes or {})},
        columns=_longer_masks(record, call),
        checksum=None,
    )


def _logprobs(record: RouteRecord, call: ModelCall, known: NDArray[np.float32] | None) -> NDArray[np.float32]:
    size = record.num_tokens
    logprobs_S = np.full(call.num_tokens, np.nan, dtype=np.float32)
    if known is not None:
        logprobs_S[:size] = known
    if record.logprobs is not None:
        known_S = ~np.isnan(record.logprobs)
        logprobs_S[:size][known_S] = record.logprobs[known_S]
    if call.logprobs is not None:
        logprobs_S[size:] = call.logprobs
    return logprobs_S


def _captures(record: RouteRecord, call: ModelCall) -> tuple[Capture, ...]:
    """Followed rows stay those of who captured them; all others that were fed are of this call."""
    size, total = record.num_tokens, call.num_tokens
    followed_SL = ~missing_rows(record.routes)
    # 2: the record's own; 1: some layers live, so of two versions; 0: all live; -1: from a cache; -2: not fed
    kinds_S = np.zeros(total, dtype=np.int8)
    kinds_S[:size] = followed_SL.any(axis=1).astype(np.int8) + followed_SL.all(axis=1)
    kinds_S[: call.cached][kinds_S[: call.cached] == 0] = -1
    kinds_S[-1] = -2 if total > size else 2
    found: list[Capture] = []
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(kinds_S)) + 1).tolist(), total]):
        kind = int(kinds_S[start])
        if kind == 2:
            inside = [each for each in record.captures if each.start < stop and each.stop > start]
            found += [replace(each, start=max(each.start, start), stop=min(each.stop, stop)) for each in inside]
            continue
        states: dict[int, Literal["captured", "cached", "not_fed"]] = {-1: "cached", -2: "not_fed"}
        version = call.weights_version if kind == 0 else None
        state = states.get(kind, "captured")
        found.append(Capture(start=start, stop=stop, call=call.call_id, weights_version=version, state=state))
    return tuple(found)


def _longer_masks(record: RouteRecord, call: ModelCall) -> dict[str, AlignedColumn]:
    """The record's sampling masks and those of the new tokens; unknown where either has none."""
    if not set(_MASKS) <= set(call.columns):
        return {}
    fresh = {name: call.columns[name] for name in _MASKS}
    if not record.columns:
        return fresh
    size, where = record.num_tokens, f"sample {record.sample_id}"
    return {
        name: concatenate_columns([record.columns[name], column[size:]], name=name, where=where)
        for name, column in fresh.items()
    }
