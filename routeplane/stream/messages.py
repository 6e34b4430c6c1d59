"""The values of delivery as JSON, for transports whose services are asked by name: sessions, blocks, progress, errors.

What comes from the other side is parsed into the library's own types or refused. Payloads travel otherwise.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from routeplane import errors
from routeplane.errors import ErrorKind, FormatError, Problem, RouteplaneError, TransportError
from routeplane.record.record import RecordKey
from routeplane.stream.delivery import Block, Membership, Progress, Session, Totals

__all__ = [
    "block_of",
    "document_of",
    "dump",
    "dump_block",
    "dump_error",
    "error_of",
    "membership_of",
    "progress_of",
    "session_of",
    "totals_of",
]

_BLOCK_FIELDS = tuple(item.name for item in fields(Block) if item.name not in ("keys", "payload"))


def dump(**entries: Any) -> bytes:
    """A JSON object; dataclasses become objects. NaN is refused."""
    return json.dumps(entries, default=_shallow, separators=(",", ":"), allow_nan=False).encode()


def _shallow(value: Any) -> dict[str, Any]:
    # json asks again for what is inside; asdict would copy all of it first
    return {item.name: getattr(value, item.name) for item in fields(value)}


def document_of(data: Any, *, names: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object that has at least these names. Raises FormatError."""
    try:
        document = json.loads(bytes(data))
        missing = [name for name in names if name not in document]
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"expected a JSON object, got {bytes(data)[:80]!r} ({error})", kind=ErrorKind.NOT_ROUTEPLANE
        ) from None
    if not isinstance(document, dict) or missing:
        raise FormatError(
            f"expected a JSON object with {list(names)}, got {bytes(data)[:80]!r}", kind=ErrorKind.NOT_ROUTEPLANE
        )
    return document


def _made(cls: Any, document: Any) -> Any:
    try:
        return cls(**document)
    except TypeError as error:
        raise FormatError(
            f"expected a {cls.__name__}, got {str(document)[:80]} ({error})", kind=ErrorKind.NOT_ROUTEPLANE
        ) from None


def session_of(document: Mapping[str, Any]) -> Session:
    """A Session. Raises FormatError."""
    made: Session = _made(Session, {**document, "totals": totals_of(document.get("totals") or {})})
    return made


def membership_of(document: Mapping[str, Any]) -> Membership:
    """A Membership. Raises FormatError."""
    made: Membership = _made(Membership, document)
    return made


def progress_of(document: Mapping[str, Any]) -> Progress:
    """A Progress. Raises FormatError."""
    made: Progress = _made(
        Progress, {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    )
    return made


def totals_of(document: Mapping[str, Any]) -> Totals:
    """Totals. Raises FormatError."""
    made: Totals = _made(Totals, document)
    return made


def dump_block(block: Block) -> dict[str, Any]:
    """A block without its payload."""
    return {"keys": [list(key) for key in block.keys], **{name: getattr(block, name) for name in _BLOCK_FIELDS}}


def block_of(document: Mapping[str, Any], *, payload: Any = None) -> Block:
    """A block, with the payload that came beside it. Raises FormatError, DataError."""
    try:
        keys = tuple(RecordKey(*key) for key in document["keys"])
    except (KeyError, TypeError) as error:
        raise FormatError(
            f"expected a block with keys, got {str(document)[:80]} ({error})", kind=ErrorKind.NOT_ROUTEPLANE
        ) from None
    rest = {name: value for name, value in document.items() if name != "keys"}
    made: Block = _made(Block, {**rest, "keys": keys, "payload": payload})
    return made


def dump_error(error: RouteplaneError) -> bytes:
    """An error of ours, to be raised on the other side as the same class and kind."""
    return dump(
        error=type(error).__name__,
        kind=error.kind,
        message=error.message,
        problems=[asdict(problem) for problem in error.problems],
    )


def error_of(data: bytes) -> RouteplaneError:
    """What ``dump_error`` made. A name or kind that this release does not know comes as a TransportError."""
    document = document_of(data, names=["error", "kind", "message"])
    message = str(document["message"])
    found: Any = getattr(errors, str(document["error"]), None)
    known = inspect.isclass(found) and issubclass(found, RouteplaneError)
    if not known or document["kind"] not in set(ErrorKind):
        return TransportError(f"the other side said: {message}", kind=ErrorKind.CONNECTION)
    problems = [
        Problem(**{**problem, "kind": ErrorKind(problem["kind"])})
        for problem in document.get("problems", ())
        if problem.get("kind") in set(ErrorKind)
    ]
    made: RouteplaneError = found(message, kind=ErrorKind(document["kind"]), problems=problems)
    return made
