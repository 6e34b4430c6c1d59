"""Records of calls: of one call, of the calls of one sample, and records that an engine goes on with.

A recorder keeps the calls of a sample and says which rows the next one must bring. ``assemble`` joins them; this module
adds which weights sampled what, where they changed under way.

An engine that follows routes takes a record's tokens as the beginning of a request, and its rows for the gates
(``FollowedRows``); ``extend`` makes the record longer by what comes back. Knows no engine.

Axes: S token positions, R rows that came or that travel, L captured layers, K top-k slots, G sampled tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.wire import decode, encode
from routeplane.errors import DataError, ErrorKind, check_type, refused
from routeplane.record.aligned import AlignedColumn, concatenate_columns
from routeplane.record.assembly import Assembly, assemble, beside_rows
from routeplane.record.calls import ModelCall
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, CaptureState, RecordKey, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes, missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FollowedRows",
    "RouteRecorder",
    "WeightsChange",
    "extend",
    "record_of_call",
    "require_resumable",
    "split_versions",
]


# ----------------------------------------------------------------------------------------------------------------------
# One call
# ----------------------------------------------------------------------------------------------------------------------


def record_of_call(
    call: ModelCall,
    spec: RouteSpec,
    *,
    sample_id: str,
    attempt: int = 0,
    group: str | None = None,
    attributes: Mapping[str, str] | None = None,
) -> RouteRecord:
    """Make the record of one call, as ``assemble([call], spec, ...).records[0]`` and several times as fast.

    Args:
        call: A call that was made a moment ago: its checksum is not verified again.
        spec: The geometry of the record.
        sample_id: The record's name.
        attempt: Which attempt at the sample this is.
        group: Ties the samples of one prompt.
        attributes: Text by name, kept in the record.

    Returns:
        A record that owns its arrays. Raises as ``assemble``.

    >>> from routeplane import ModelCall, RouteSpec
    >>> call = ModelCall(
    ...     prompt_ids=np.asarray([5, 6]), generation_ids=np.asarray([7]), routes=np.asarray([[[3, 1]], [[0, 5]]]),
    ...     weights_version=4, call_id="c",
    ... )
    >>> record_of_call(call, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), sample_id="s").routes.tolist()
    [[[3, 1]], [[0, 5]], [[-1, -1]]]
    """
    check_type(call, ModelCall, expected="a ModelCall")
    routes_RLK = call.routes
    whole = routes_RLK is not None and call.layer_ids in (None, spec.layer_ids) and routes_RLK.size > 0
    # rows of another shape are assemble's to refuse: one layer would be broadcast to all of them
    if routes_RLK is None or not whole or routes_RLK.shape[1:] != spec.row_shape or routes_RLK.min() < 0:
        key = RecordKey(sample_id, attempt, 0)
        return assemble([call], spec, sample_id=key, group=group, attributes=attributes).records[0]
    routes_SLK = spec.missing_rows(call.num_tokens)
    routes_SLK[call.first_row : call.rows_stop] = routes_RLK
    return RouteRecord(
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        token_ids=call.token_ids,
        routes=routes_SLK,
        captures=_captures_of_call(call),
        spec=spec,
        columns={name: values.copy() for name, values in call.columns.items()},
        **beside_rows([call], None, attributes=attributes),
    )


def _captures_of_call(call: ModelCall) -> tuple[Capture, ...]:
    absent: CaptureState = call.loss or "not_captured"
    cached = min(max(call.cached, call.first_row), call.rows_stop)
    edges: tuple[tuple[int, CaptureState, int | None], ...] = (
        (call.first_row, absent, None),
        (cached, "cached", None),
        *((min(stop, call.rows_stop), "captured", version) for _, stop, version in call.row_versions()),
        (call.num_fed, absent, None),
        (call.num_tokens, "not_fed", None),
    )
    captures, at = [], 0
    for stop, state, version in edges:
        if stop > at:
            captures.append(Capture(start=at, stop=stop, call=call.call_id, weights_version=version, state=state))
            at = stop
    return tuple(captures)


# ----------------------------------------------------------------------------------------------------------------------
# The calls of one sample
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsChange:
    """Tokens from position ``token`` on were sampled by ``weights_version`` (None: not known which).

    >>> WeightsChange(token=12, weights_version=8).token
    12
    """

    token: int
    weights_version: int | None


class RouteRecorder:
    """The calls of one sample, one after the other, until ``assembly`` makes records of them.

    ``overlap``, ``on_break``, ``on_missing`` and ``attributes`` are those of ``assemble``. Not safe for several
    threads. Holds the calls.

    >>> from routeplane import ModelCall, RouteSpec
    >>> recorder = RouteRecorder(RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), sample_id="s")
    >>> rows = np.asarray([[[3, 1]], [[0, 5]]])
    >>> recorder.add_call(
    ...     ModelCall(prompt_ids=[5, 6], generation_ids=[7], routes=rows, weights_version=4, call_id="c")
    ... )
    >>> recorder.next_row([5, 6, 7, 8]), recorder.assembly().records[0].num_tokens
    (2, 3)
    """

    def __init__(
        self,
        spec: RouteSpec,
        *,
        sample_id: str,
        attempt: int = 0,
        group: str | None = None,
        overlap: Literal["keep_first", "keep_last"] = "keep_first",
        on_break: Literal["raise", "split"] = "raise",
        on_missing: Literal["mark", "raise"] = "mark",
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self._spec = spec
        self._options: dict[str, Any] = {
            "sample_id": RecordKey(sample_id, attempt, 0),
            "group": group,
            "overlap": overlap,
            "on_break": on_break,
            "on_missing": on_missing,
            "attributes": attributes,
        }
        self._calls: list[ModelCall] = []
        self._changes: dict[str, tuple[WeightsChange, ...]] = {}
        self._held = 0  # rows [0, held) of the present context are here

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The calls so far."""
        return tuple(self._calls)

    def next_row(self, prompt_ids: Sequence[int] | NDArray[Any], *, media: Sequence[str] = ()) -> int:
        """The first row that a call with this prompt and these media must bring: what to ask the engine to begin with.

        After whole calls that is the last token so far, which was sampled and not fed; 0 for a prompt that does not
        extend the tokens so far, or whose media do not begin with those so far.
        """
        return self._held if self._extends(prompt_ids, media) else 0

    def _extends(self, prompt_ids: Sequence[int] | NDArray[Any], media: Sequence[str]) -> bool:
        # what does not extend the context here breaks it in ``assemble``, and a segment of its own needs its own rows
        last_S = self._calls[-1].token_ids if self._calls else np.empty(0, dtype=np.int32)
        last_media = self._calls[-1].media if self._calls else ()
        prompt_P = np.asarray(prompt_ids)
        same_media = tuple(media)[: len(last_media)] == last_media
        return same_media and len(prompt_P) >= len(last_S) and np.array_equal(prompt_P[: len(last_S)], last_S)

    def add_call(self, call: ModelCall, *, changes: Iterable[WeightsChange] = ()) -> None:
        """Take the next call. ``changes``: where its weights changed under way, in order."""
        check_type(call, ModelCall, expected="a ModelCall")
        held = self._held if self._extends(call.prompt_ids, call.media) else 0
        self._held = held + self._whole_rows(call, start=held)
        self._calls.append(call)
        found = tuple(changes)
        if found:
            self._changes[call.call_id] = found

    def _whole_rows(self, call: ModelCall, *, start: int) -> int:
        """How many of the call's rows from token ``start`` on are there in all layers before the first that is not."""
        layers = self._spec.layer_ids if call.layer_ids is None else call.layer_ids
        if call.routes is None or call.first_row > start or sorted(layers) != list(self._spec.layer_ids):
            return 0
        absent_R = np.asarray(missing_rows(call.routes[start - call.first_row :]).any(axis=1))
        return int(absent_R.argmax()) if absent_R.any() else len(absent_R)

    def assembly(self, *, attributes: Mapping[str, str] | None = None) -> Assembly:
        """Records of all calls, one per unbroken context, and the counts. ``attributes``: besides the constructor's.
        Errors as in ``assemble``."""
        named = {**(self._options["attributes"] or {}), **(attributes or {})}
        found = assemble(self._calls, self._spec, **{**self._options, "attributes": named})
        if not self._changes:
            return found
        prompts = {call.call_id: len(call.prompt_ids) for call in self._calls}
        records = tuple(split_versions(record, self._changes, prompts=prompts) for record in found.records)
        return replace(found, records=records)


def split_versions(
    record: RouteRecord, changes: Mapping[str, Sequence[WeightsChange]], *, prompts: Mapping[str, int]
) -> RouteRecord:
    """The record with the spans and captures of calls cut where their weights changed under way; new checksum.

    ``changes``: by call id, in order. ``prompts``: P by call id. Row t was routed by the forward that sampled token
    t + 1. A prompt during whose prefill weights changed was routed by both: its version is unknown.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=6, spec=watermarked_spec(), prompt_tokens=2)
    >>> changes = {"call-0": [WeightsChange(token=4, weights_version=2)]}
    >>> [(one.start, one.weights_version) for one in split_versions(record, changes, prompts={"call-0": 2}).spans]
    [(0, None), (2, 1), (4, 2)]
    """
    spans = [part for span in record.spans for part in _split_span(span, changes.get(span.call, ()))]
    captures = [
        part
        for capture in record.captures
        for part in _split_capture(capture, changes.get(capture.call, ()), prompt=prompts.get(capture.call, 0))
    ]
    return replace(record, spans=tuple(spans), captures=tuple(captures), checksum=None)


def _split_span(span: Span, changes: Sequence[WeightsChange]) -> list[Span]:
    return list(_cut(span, changes)) if span.kind == "generation" else [span]


def _split_capture(capture: Capture, changes: Sequence[WeightsChange], *, prompt: int) -> list[Capture]:
    if capture.weights_version is None:  # unknown before, unknown after
        return [capture]
    shifted = [replace(change, token=change.token - 1) for change in changes]
    during_prefill = any(change.token <= prompt for change in changes)
    if during_prefill and capture.start < prompt:
        edge = min(prompt, capture.stop)
        rest = [] if edge == capture.stop else list(_cut(replace(capture, start=edge), shifted))
        return [replace(capture, stop=edge, weights_version=None), *rest]
    return list(_cut(capture, shifted))


def _cut(item: Any, changes: Sequence[WeightsChange]) -> Iterable[Any]:
    """The interval in parts of one version each; neighbours of one version stay together."""
    version, parts = item.weights_version, []
    at = item.start
    for change in changes:
        if change.token <= at:
            version = change.weights_version
        elif change.token < item.stop and change.weights_version != version:
            parts.append((at, version))
            at, version = change.token, change.weights_version
    parts.append((at, version))
    stops = [start for start, _ in parts[1:]] + [item.stop]
    for (start, known), stop in zip(parts, stops, strict=True):
        yield replace(item, start=start, stop=stop, weights_version=known)


# ----------------------------------------------------------------------------------------------------------------------
# A record that an engine goes on with
# ----------------------------------------------------------------------------------------------------------------------

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
