"""Message logs, as NeMo RL's rollouts keep a conversation: a list of messages, each with its tokens and their rows.

Owns both directions. Out: every message has all arrays, integer ones as integers, also where it has no token. In: rows
lie at their tokens' places, and the rows of tokens that no call fed are filler by their place. Arrays are numpy's; a
tensor on the CPU is read as it is. Knows no torch.

Axes: S token positions, M tokens of a message, D layers as the sender counts them, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.capture.choices import DEFAULTS, CaptureOptions, require_presence
from routeplane.capture.layers import LayerAxis, rows_without_filler
from routeplane.capture.wire import decode
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError, refused
from routeplane.record.assembly import UnfedTokens, assemble
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.parse import as_array, as_integers, as_logprobs
from routeplane.record.spans import RecordKey, Span
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["calls", "message_log", "records"]

_KNOWN = frozenset({"content", "generation_logprobs", "role", "routed_experts", "token_ids"})
_ASSISTANT = "assistant"


# ---- out ----------------------------------------------------------------------------------------------------------


def message_log(record: RouteRecord) -> list[dict[str, Any]]:
    """Write a record as a message log, one message per span.

    Args:
        record: A whole record; it is verified first.

    Returns:
        Messages with ``role`` (the span's, else user or assistant by its kind), ``token_ids`` int64 ``[M]``,
        ``routed_experts`` int16 ``[M, L, K]`` (MISSING where nothing was captured) and every token column; generated
        ones also ``generation_logprobs`` float32 ``[M]`` where the record has log-probabilities. Two generations in a
        row have a message without tokens between them, as readers that take messages in pairs expect. The arrays are
        fresh and the caller's. Raises UsageError: PREFIX for a record whose first rows stand in another one, ARGUMENT
        for a generated span of another role than assistant, or a prompt's span of that role: the log would say that
        the policy sampled it.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=4, spec=watermarked_spec())
    >>> [(message["role"], message["token_ids"].tolist()) for message in message_log(record)]
    [('user', [1, 2]), ('assistant', [3, 4])]
    """
    record.verify()
    if record.routes_start:
        raise UsageError(
            f"expected a resolved record, got rows only from {record.routes_start} @ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    log: list[dict[str, Any]] = []
    for span in record.spans:
        if span.kind == "generation" and (not log or log[-1]["role"] == _ASSISTANT):
            log.append(_message(record, "user", start=span.start, stop=span.start))
        message = _message(record, _role(span), start=span.start, stop=span.stop)
        if span.kind == "generation" and record.logprobs is not None:
            message["generation_logprobs"] = record.logprobs[span.start : span.stop].copy()
        log.append(message)
    return log


def _role(span: Span) -> str:
    """A span's role. The reader of a log takes messages of the assistant, and no others, for sampled tokens."""
    generated = span.kind == "generation"
    role = span.role or (_ASSISTANT if generated else "user")
    if generated != (role == _ASSISTANT):
        raise refused(
            f"the role {_ASSISTANT!r} at generated tokens and at no others",
            f"{role!r} at {span.kind} tokens [{span.start}, {span.stop})",
        )
    return role


def _message(record: RouteRecord, role: str, *, start: int, stop: int) -> dict[str, Any]:
    return {
        "role": role,
        "token_ids": record.token_ids[start:stop].astype(np.int64),
        "routed_experts": record.routes[start:stop].copy(),
        **{name: values[start:stop].array().copy() for name, values in record.columns.items()},
    }


# ---- in -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One message that has tokens, and where they stand."""

    role: str
    start: int
    token_M: NDArray[np.int32]
    routes_MDK: NDArray[Any] | None
    logprobs_M: NDArray[np.float32] | None
    columns: Mapping[str, NDArray[Any]]

    @property
    def stop(self) -> int:
        return self.start + len(self.token_M)

    @property
    def has_rows(self) -> bool:
        return self.routes_MDK is not None and bool((self.routes_MDK != MISSING).any())


def records(
    log: Sequence[Mapping[str, Any]],
    spec: RouteSpec,
    *,
    sample_id: str,
    weights_version: int | None,
    attempt: int = 0,
    group: str | None = None,
    ignore: Iterable[str] = (),
    options: CaptureOptions = DEFAULTS,
) -> tuple[RouteRecord, ...]:
    """Read a message log as one record, whose spans have the messages' roles.

    Args:
        log: As ``calls``.
        spec: The geometry of the record.
        sample_id: The record's name.
        weights_version: Of the policy that sampled; None where unknown.
        attempt: Which attempt at the sample this is.
        group: Ties the samples of one prompt.
        ignore: As ``calls``.
        options: As ``calls``.

    Returns:
        A tuple of one record, which owns its arrays. Raises as ``calls``.

    >>> from routeplane import RouteSpec
    >>> log = [
    ...     {"role": "user", "token_ids": [5, 6], "routed_experts": [[[3, 1]], [[0, 5]]]},
    ...     {"role": "assistant", "token_ids": [7], "routed_experts": [[[0, 1]]]},
    ... ]
    >>> [record] = records(log, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), sample_id="s", weights_version=4)
    >>> record.routes.tolist()
    [[[3, 1]], [[0, 5]], [[-1, -1]]]
    """
    messages = _messages(log, ignore)
    found = _calls(messages, spec, weights_version=weights_version, options=options)
    mode = options.logprobs_mode
    attributes = {} if mode is None else {"logprobs_mode": mode}
    key = RecordKey(sample_id, attempt, 0)
    assembly = assemble(found, spec, sample_id=key, group=group, attributes=attributes)
    return tuple(
        replace(record, spans=tuple(_spans(messages, weights_version)), checksum=None) for record in assembly.records
    )


def calls(
    log: Sequence[Mapping[str, Any]],
    spec: RouteSpec,
    *,
    weights_version: int | None,
    ignore: Iterable[str] = (),
    options: CaptureOptions = DEFAULTS,
) -> tuple[ModelCall | UnfedTokens, ...]:
    """Read a message log, one call per generation, each with the rows that no call before it has.

    The row of the last generated token, and of every token behind it, belongs to tokens that were never fed: it is
    filler by its place and becomes MISSING, whatever it holds (NeMo RL writes ``arange(K)``). So does the row of an
    earlier generation's last token where the message behind it has no row at all: the call that would have fed it
    brought none. All other rows are taken as captured; -1 throughout is MISSING.

    Args:
        log: The messages; each of role ``assistant`` is one call's generation. Arrays other than ``token_ids``,
            ``routed_experts`` and ``generation_logprobs`` are token columns and must be in every message.
        spec: The geometry of the rows.
        weights_version: Of the policy that sampled; None where unknown.
        ignore: Names of arrays that are not token columns.
        options: ``absent`` says what a message with tokens and without rows means, or a call whose rows are all
            MISSING, and ``axis`` what the layer axis counts: the captured layers, as ``message_log`` writes it, unless
            said otherwise.

    Returns:
        The calls. Raises DataError naming message and field, CaptureError (CAPTURE_OFF) for absent rows.

    >>> from routeplane import RouteSpec
    >>> log = [
    ...     {"role": "user", "token_ids": [5, 6], "routed_experts": [[[3, 1]], [[0, 5]]]},
    ...     {"role": "assistant", "token_ids": [7], "routed_experts": [[[0, 1]]]},
    ... ]
    >>> [call] = calls(log, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), weights_version=4)
    >>> call.call_id, call.rows_stop
    ('turn-0', 2)
    """
    return tuple(_calls(_messages(log, ignore), spec, weights_version=weights_version, options=options))


def _messages(log: Sequence[Mapping[str, Any]], ignore: Iterable[str]) -> list[_Message]:
    messages = list(_read(log, frozenset(ignore)))
    if not messages:
        raise DataError("expected messages with tokens, got none", kind=ErrorKind.SHAPE)
    _require_same_columns(messages)
    return messages


def _read(log: Sequence[Mapping[str, Any]], ignore: frozenset[str]) -> Iterable[_Message]:
    start = 0
    for at, message in enumerate(log):
        where = f"message {at}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"expected an object with a role as {where}", kind=ErrorKind.DTYPE)
        given = message.get("token_ids")
        if given is None:
            raise DataError(
                f"expected token_ids in {where} ({message['role']}), got none", kind=ErrorKind.TOKEN_MISMATCH
            )
        # a message without tokens may have them as floats: torch makes an empty list of another type than a full one
        token_M = as_integers([] if _is_empty(given) else given, np.int32, what=f"token_ids of {where}", ndim=1)
        if len(token_M) == 0:
            continue
        logprobs = message.get("generation_logprobs") if message["role"] == _ASSISTANT else None
        yield _Message(
            role=message["role"],
            start=start,
            token_M=token_M,
            routes_MDK=_routes(message.get("routed_experts"), len(token_M), where),
            logprobs_M=None if logprobs is None else as_logprobs(logprobs, len(token_M), what=f"logprobs of {where}"),
            columns=_columns(message, len(token_M), ignore=ignore, where=where),
        )
        start += len(token_M)


def _is_empty(given: Any) -> bool:
    shape = getattr(given, "shape", None)
    return tuple(shape) == (0,) if shape is not None else isinstance(given, Sized) and len(given) == 0


def _routes(given: Any, count: int, where: str) -> NDArray[Any] | None:
    if given is None:
        return None
    routes_MDK = (
        decode(given, form="lists").routes
        if isinstance(given, list)
        else as_array(given, what=f"routed_experts of {where}")
    )
    if routes_MDK.dtype.kind not in "iu":
        raise DataError(
            f"expected routed_experts of {where} of an integer type, got {routes_MDK.dtype}", kind=ErrorKind.DTYPE
        )
    if routes_MDK.ndim != 3 or len(routes_MDK) != count:
        raise DataError(
            f"expected routed_experts of {where} [{count} tokens, layers, top_k], got {list(routes_MDK.shape)}",
            kind=ErrorKind.ROW_COUNT if routes_MDK.ndim == 3 else ErrorKind.SHAPE,
        )
    return routes_MDK


def _columns(
    message: Mapping[str, Any], count: int, *, ignore: frozenset[str], where: str
) -> Mapping[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {}
    for name, value in message.items():
        # a value that is not an array belongs to the text of the conversation
        if name in _KNOWN or name in ignore or not hasattr(value, "shape"):
            continue
        column_M = as_array(value, what=f"{name!r} of {where}")
        if column_M.shape != (count,):
            raise DataError(
                f"expected {name!r} of {where} as a token column [{count}], got {list(column_M.shape)}: cut it "
                "alike or name it in ignore",
                kind=ErrorKind.TOKEN_COLUMN,
            )
        columns[name] = column_M
    return columns


def _require_same_columns(messages: Sequence[_Message]) -> None:
    """Names and types: joined, integers and floats would all become floats."""
    types = {name: values.dtype.name for name, values in messages[0].columns.items()}
    for message in messages:
        found = {name: values.dtype.name for name, values in message.columns.items()}
        if found != types:
            raise DataError(
                f"expected the token columns {types} in every message, got {found} "
                f"@ token {message.start} ({message.role})",
                kind=ErrorKind.TOKEN_COLUMN,
            )


def _rows(
    messages: Sequence[_Message], spec: RouteSpec, *, fed: int, absent: RowLoss | None, axis: LayerAxis
) -> NDArray[np.int16]:
    rows_SLK = spec.missing_rows(messages[-1].stop)
    for message, behind in itertools.zip_longest(messages, messages[1:]):
        where = f"tokens [{message.start}, {message.stop}) ({message.role})"
        if message.routes_MDK is None:
            if absent is None and message.start < fed:
                raise CaptureError(
                    f"expected routed_experts for {where}, got none: the engine or the rollout dropped them "
                    "(absent='not_captured' declares the rows as not captured)",
                    kind=ErrorKind.CAPTURE_OFF,
                )
            continue
        stop = min(max(fed - message.start, 0), len(message.token_M))
        if message.role == _ASSISTANT and (behind is None or not behind.has_rows):
            stop = min(stop, len(message.token_M) - 1)  # what would have fed the last token brought nothing
        captured = [(0, stop)]
        rows_SLK[message.start : message.stop] = rows_without_filler(
            message.routes_MDK, spec, captured=captured, axis=axis, first_token=message.start, call=where
        )
    return rows_SLK


def _calls(
    messages: Sequence[_Message], spec: RouteSpec, *, weights_version: int | None, options: CaptureOptions
) -> Iterable[ModelCall | UnfedTokens]:
    """One call per generation, each with the rows that no call before it has; tokens behind the last were not fed."""
    options.only(("absent", "axis", "logprobs_mode", "max_missing_share", "media"), reader="message logs")
    fed = max((one.stop - 1 for one in messages if one.role == _ASSISTANT), default=messages[-1].stop)
    rows_SLK = _rows(messages, spec, fed=fed, absent=options.absent, axis=options.axis or "captured")
    token_S = np.concatenate([one.token_M for one in messages])
    columns = {name: np.concatenate([one.columns[name] for one in messages]) for name in messages[0].columns}
    ends = [one.stop for one in messages if one.role == _ASSISTANT]
    if not ends or ends[-1] < len(token_S):
        ends.append(len(token_S))
    generations = {one.stop: one for one in messages if one.role == _ASSISTANT}
    for turn, (before, stop) in enumerate(itertools.pairwise([0, *ends])):
        generation = generations.get(stop)
        if generation is None and generations:  # an observation behind the last call
            unfed = {name: values[before:] for name, values in columns.items()}
            yield UnfedTokens(token_ids=token_S[before:], call_id=f"turn-{turn}", columns=unfed)
            continue
        prompt = stop if generation is None else generation.start
        last = stop if generation is None else min(stop, max(fed, before))
        loss = require_presence(rows_SLK[before:last], options, call=f"turn-{turn}")
        yield ModelCall(
            prompt_ids=token_S[:prompt],
            generation_ids=token_S[prompt:stop],
            routes=rows_SLK[before:last],
            first_row=before,
            weights_version=weights_version,
            call_id=f"turn-{turn}",
            logprobs=None if generation is None else generation.logprobs_M,
            loss=(options.absent or "not_captured") if last < stop - 1 else loss,
            # a later call fed the last token of an earlier one, and the log has its row
            rows="all" if generation is not None and last == stop else "but_last",
            media=options.media,
            columns={name: values[:stop] for name, values in columns.items()},
        )


def _spans(messages: Sequence[_Message], weights_version: int | None) -> Iterable[Span]:
    turn = 0
    for message in messages:
        generated = message.role == _ASSISTANT
        yield Span(
            start=message.start,
            stop=message.stop,
            kind="generation" if generated else "prompt",
            role=message.role,
            call=f"turn-{turn}",
            weights_version=weights_version if generated else None,
        )
        turn += generated
