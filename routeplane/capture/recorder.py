"""Records of calls: of one call at once, of a sample whose calls go on, and records that an engine goes on with.

Rows are kept by absolute position. An engine sends rows when it likes: the prompt's at once, then one per token, or all
with the last token; a trimmed request leaves out what is held already. Here each row has a place from the moment it
comes: a gap is refused, rows that come twice within a call must be the same, and two calls that bring the same token
follow ``overlap`` and are counted. ``assemble`` joins the calls; this module adds which weights sampled what, where
they changed under way.

An engine that follows routes takes a record's tokens as the beginning of a request, and its rows for the gates
(``FollowedRows``); ``extend`` makes the record longer by what comes back. Knows no engine.

Axes: S token positions, R rows that came or that travel, L captured layers, K top-k slots, G sampled tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.wire import decode, encode
from routeplane.errors import DataError, ErrorKind, UsageError, refused
from routeplane.record.aligned import AlignedColumn, concatenate_columns
from routeplane.record.assembly import Assembly, assemble
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.parse import as_integers, check_optional_int64
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
        spans=_spans_of_call(call),
        captures=_captures_of_call(call),
        spec=spec,
        logprobs=_logprobs_of_call(call),
        attributes={**(attributes or {}), **({"media": json.dumps(list(call.media))} if call.media else {})},
        columns={name: values.copy() for name, values in call.columns.items()},
    )


def _spans_of_call(call: ModelCall) -> tuple[Span, ...]:
    prompt = len(call.prompt_ids)
    spans = []
    if prompt:
        spans.append(Span(start=0, stop=prompt, kind="prompt", call=call.call_id, weights_version=None))
    spans += [
        Span(
            start=start,
            stop=stop,
            kind="generation",
            call=call.call_id,
            weights_version=version,
            sampling=call.sampling,
        )
        for start, stop, version in call.version_spans()
    ]
    return tuple(spans)


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


def _logprobs_of_call(call: ModelCall) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    if call.logprobs is None:
        return None
    logprobs_S = np.full(call.num_tokens, np.nan, dtype=np.float32)
    logprobs_S[len(call.prompt_ids) :] = call.logprobs
    return logprobs_S


# ----------------------------------------------------------------------------------------------------------------------
# Calls that go on
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsChange:
    """Tokens from position ``token`` on were sampled by ``weights_version`` (None: not known which).

    >>> WeightsChange(token=12, weights_version=8).token
    12
    """

    token: int
    weights_version: int | None


class _Rows:
    """The rows ``[first, stop)`` of one call, in an array that grows by doubling: a row is copied twice at most."""

    def __init__(self, spec: RouteSpec) -> None:
        self._buffer_RLK: NDArray[np.int16] = np.empty((0, *spec.row_shape), dtype=np.int16)
        self.first: int | None = None
        self.repeated = 0
        self._count = 0

    @property
    def stop(self) -> int:
        return (self.first or 0) + self._count

    def add(self, rows_RLK: NDArray[np.int16], *, at: int, call: str) -> None:
        if self.first is None:
            self.first = at
        if not self.first <= at <= self.stop:
            raise DataError(
                f"expected rows from token {self.stop} on, or some of [{self.first}, {self.stop}) again, got "
                f"[{at}, {at + len(rows_RLK)}) @ call {call}",
                kind=ErrorKind.ROW_COUNT,
            )
        known = min(self.stop - at, len(rows_RLK))
        self._compare(rows_RLK[:known], at=at, call=call)
        self._append(rows_RLK[known:])

    def _compare(self, rows_RLK: NDArray[np.int16], *, at: int, call: str) -> None:
        start = at - (self.first or 0)
        held_RLK = self._buffer_RLK[start : start + len(rows_RLK)]
        # the order within a row is the engine's and carries no meaning
        differs_R = (np.sort(held_RLK, axis=2) != np.sort(rows_RLK, axis=2)).any(axis=(1, 2))
        if differs_R.any():
            row = int(differs_R.argmax())
            raise DataError(
                f"expected the row {held_RLK[row].tolist()} that this call brought before, got "
                f"{rows_RLK[row].tolist()} @ call {call}, token {at + row}",
                kind=ErrorKind.ROW_CONFLICT,
            )
        self.repeated += len(rows_RLK)

    def _append(self, rows_RLK: NDArray[np.int16]) -> None:
        needed = self._count + len(rows_RLK)
        if needed > len(self._buffer_RLK):
            grown = np.empty((max(needed, 2 * len(self._buffer_RLK)), *self._buffer_RLK.shape[1:]), dtype=np.int16)
            grown[: self._count] = self._buffer_RLK[: self._count]
            self._buffer_RLK = grown
        self._buffer_RLK[self._count : needed] = rows_RLK
        self._count = needed

    def take(self) -> NDArray[np.int16] | None:
        return None if self.first is None else self._buffer_RLK[: self._count]


class _OpenCall:
    """A call that goes on."""

    def __init__(self, spec: RouteSpec, prompt_P: NDArray[np.int32], *, call_id: str, media: tuple[str, ...]) -> None:
        self.prompt_P, self.call_id, self.media = prompt_P, call_id, media
        self.rows = _Rows(spec)
        self.generated: list[int] = []
        self.logprobs: list[float] | None = None
        self.changes: list[WeightsChange] = []

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_P) + len(self.generated)


class RouteRecorder:
    """The calls of one sample, one after the other, until ``assembly`` makes records of them.

    ``overlap``, ``on_break``, ``on_missing`` and ``attributes`` are those of ``assemble``. Not safe for several
    threads. Rows are copied as they come; memory is that of all rows, each once.

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> recorder = RouteRecorder(spec, sample_id="s")
    >>> recorder.begin([5, 6], call_id="c", weights_version=4)
    >>> recorder.add_tokens([7])
    >>> recorder.add_rows(np.asarray([[[3, 1]], [[0, 5]]]), first_row=0)
    >>> recorder.end().rows_stop
    2
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
        self._open: _OpenCall | None = None
        self._repeated = 0
        self._held = 0  # rows [0, held) of the present context are here

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The calls that have ended."""
        return tuple(self._calls)

    @property
    def repeated_rows(self) -> int:
        """Rows that came again within their call, and were the same."""
        return self._repeated + (0 if self._open is None else self._open.rows.repeated)

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

    def begin(
        self,
        prompt_ids: Sequence[int] | NDArray[Any],
        *,
        call_id: str,
        weights_version: int | None,
        media: Sequence[str] = (),
    ) -> None:
        """A call starts. Raises UsageError while another one goes on, DataError for bad token ids."""
        if self._open is not None:
            raise UsageError(
                f"expected call {self._open.call_id} to end before {call_id} begins", kind=ErrorKind.ARGUMENT
            )
        prompt_P = as_integers(np.asarray(prompt_ids, dtype=np.int64), np.int32, what="prompt_ids", ndim=1)
        self._open = _OpenCall(self._spec, prompt_P, call_id=call_id, media=tuple(media))
        self.change_weights(weights_version)

    def add_tokens(self, token_ids: Sequence[int], *, logprobs: Sequence[float] | None = None) -> None:
        """Sampled tokens, in order. ``logprobs``: one each; a call has them for all of its tokens or for none."""
        call = self._going_on()
        if call.generated and (call.logprobs is None) != (logprobs is None):
            raise DataError(
                f"expected log-probabilities for all tokens or none @ call {call.call_id}", kind=ErrorKind.SHAPE
            )
        if logprobs is not None:
            if len(logprobs) != len(token_ids):
                raise DataError(
                    f"expected {len(token_ids)} log-probabilities, got {len(logprobs)} @ call {call.call_id}",
                    kind=ErrorKind.SHAPE,
                )
            if call.logprobs is None:
                call.logprobs = []
            call.logprobs.extend(map(float, logprobs))
        call.generated.extend(map(int, token_ids))

    def add_rows(self, rows: NDArray[Any], *, first_row: int) -> None:
        """Rows ``[R, L, K]`` of tokens ``[first_row, first_row + R)``, on the spec's layers, any integer type; copied.

        Raises DataError: ROW_COUNT where they do not follow what the call brought (a gap), ROW_CONFLICT where a row
        that came before comes as another set of experts, SHAPE or VALUE_RANGE for rows that do not fit this spec.
        """
        call = self._going_on()
        rows_RLK = as_integers(rows, np.int16, what=f"routes of call {call.call_id}", ndim=3)
        if rows_RLK.shape[1:] != self._spec.row_shape:
            raise DataError(
                f"expected rows {list(self._spec.row_shape)}, got {list(rows_RLK.shape[1:])} @ call {call.call_id}",
                kind=ErrorKind.SHAPE,
            )
        call.rows.add(rows_RLK, at=first_row, call=call.call_id)

    def change_weights(self, weights_version: int | None, *, token: int | None = None) -> None:
        """Tokens from ``token`` on (None: from the next one on) are sampled by these weights; None: by unknown ones."""
        call = self._going_on()
        at = call.num_tokens if token is None else token
        check_optional_int64(weights_version, "weights_version")
        if call.changes and at < call.changes[-1].token:
            raise refused(
                f"weights to change at token {call.changes[-1].token} or later", f"{at} @ call {call.call_id}"
            )
        call.changes.append(WeightsChange(token=at, weights_version=weights_version))

    def end(self, *, cached: int = 0, loss: RowLoss | None = None) -> ModelCall:
        """The call is over. ``cached`` and ``loss`` are ``ModelCall``'s. Raises DataError where rows are missing and no
        loss is declared; the call goes on then, so that it can be ended with one."""
        call = self._going_on()
        rows_RLK = call.rows.take()
        if rows_RLK is None and loss is None:
            raise DataError(
                f"expected rows, or the reason why none came, got neither @ call {call.call_id}",
                kind=ErrorKind.ROUTES_MISSING,
            )
        ended = ModelCall(
            prompt_ids=call.prompt_P,
            generation_ids=np.asarray(call.generated, dtype=np.int64),
            routes=rows_RLK,
            first_row=call.rows.first or 0,
            layer_ids=self._spec.layer_ids,
            weights_version=call.changes[0].weights_version,
            call_id=call.call_id,
            logprobs=None if call.logprobs is None else np.asarray(call.logprobs, dtype=np.float32),
            media=call.media,
            cached=0 if rows_RLK is None else min(cached, call.rows.stop),
            loss=loss,
        )
        self.add_call(ended, changes=call.changes[1:])
        self._repeated += call.rows.repeated
        self._open = None
        return ended

    def add_call(self, call: ModelCall, *, changes: Iterable[WeightsChange] = ()) -> None:
        """A whole call at once. ``changes``: where its weights changed under way, in order."""
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
        Errors as in ``assemble``; UsageError while a call goes on."""
        if self._open is not None:
            raise UsageError(f"expected call {self._open.call_id} to end first", kind=ErrorKind.ARGUMENT)
        named = {**(self._options["attributes"] or {}), **(attributes or {})}
        found = assemble(self._calls, self._spec, **{**self._options, "attributes": named})
        if not self._changes:
            return found
        prompts = {call.call_id: len(call.prompt_ids) for call in self._calls}
        records = tuple(split_versions(record, self._changes, prompts=prompts) for record in found.records)
        return replace(found, records=records)

    def _going_on(self) -> _OpenCall:
        if self._open is None:
            raise UsageError("expected a call that goes on, got none: begin one", kind=ErrorKind.ARGUMENT)
        return self._open


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
