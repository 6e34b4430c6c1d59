"""One choice of a response, whoever sent it, turned into a call: ids, rows, and why rows are absent.

Owns the judgement that every HTTP path shares: rows must be those of the tokens, absent rows need a reason that the
server gave, filler is known by its position. Knows no response and no stream; ``openai``, ``chunks`` and ``gym`` read
those.

Axes: R rows, P prompt tokens, G generated tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from routeplane.capture.forms import WireForm, read_routes
from routeplane.capture.requests import cached_rows
from routeplane.capture.wire import LayerAxis
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError, refused
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.interfaces import RouteTicket
from routeplane.record.parse import as_integers, as_logprobs
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["WHY_ABSENT", "Choice", "FinalRow", "Reading", "Redeem", "call_of_choice"]

#: What a row for the call's last token is: none that an engine made (so it may only be MISSING), the engine's, or what
#: a harness wrote since it wants one row per token.
FinalRow = Literal["absent", "captured", "filler"]
#: Gives the call behind a ticket, once; ``tickets.TicketDesk.redeem`` is one.
Redeem = Callable[[RouteTicket], ModelCall]

#: What is wrong where a response that should have routes has none.
WHY_ABSENT = (
    "start the server with --enable-return-routed-experts; a proxy or an agent between may have dropped the field"
)
# What a server's finish reasons say of rows that are not there.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})
_TICKET = '{"call":'


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the routes of a response are to be read; the same for all its choices.

    ``weights_version``: of the policy that sampled. ``first_row``: the request's ``routed_experts_prompt_start``; None
    takes what the form says, else 0. ``cached``: prompt rows that may come from a prefix cache; None: all but the last,
    unless the response says. ``axis``, ``form``: as ``forms.read_routes``. ``final_row``: what a row for the last token
    is. ``media``: one digest per media item of the prompt. ``required``: whether absent routes are an error where
    tokens were generated. ``redeem``: needed where responses carry tickets.
    """

    spec: RouteSpec
    weights_version: int | None
    first_row: int | None = None
    cached: int | None = None
    axis: LayerAxis = "decoder"
    form: WireForm | None = None
    final_row: FinalRow = "absent"
    media: tuple[str, ...] = ()
    required: bool = True
    redeem: Redeem | None = None

    def __post_init__(self) -> None:
        if self.final_row not in get_args(FinalRow):
            raise refused(f"final_row of {get_args(FinalRow)}", repr(self.final_row))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a server said of one choice.

    ``routes``: a value in a wire form, or None. ``rows``: the rows and the token of the first one, where they were read
    already.
    """

    call_id: str
    prompt_ids: Sequence[int]
    generation_ids: Sequence[int]
    finish_reason: str | None
    routes: Any = None
    rows: tuple[NDArray[np.int16], int] | None = None
    logprobs: list[float] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))
    why_absent: str = WHY_ABSENT


def call_of_choice(choice: Choice, reading: Reading) -> ModelCall:
    """The call behind a choice; its rows are read-only and may share the memory of what was decoded.

    Raises UsageError for a choice that goes on, CaptureError (CAPTURE_OFF) for routes that are required and absent, and
    what ``forms.read_routes`` and ``ModelCall`` raise.
    """
    if choice.finish_reason is None:
        raise UsageError(
            f"expected a finished choice, got one that goes on @ call {choice.call_id}", kind=ErrorKind.ARGUMENT
        )
    prompt_P = as_integers(list(choice.prompt_ids), np.int32, what="prompt ids", ndim=1)
    generation_G = as_integers(list(choice.generation_ids), np.int32, what="generation ids", ndim=1)
    if _is_ticket(choice.routes):
        return _redeemed(choice, reading, np.concatenate([prompt_P, generation_G]))
    rows_RLK, first_row = _rows(choice, reading, np.concatenate([prompt_P, generation_G]))
    loss = _loss(choice, reading, rows_RLK, first_row=first_row)
    # what was generated comes from no prefix cache, whatever a server's count says
    bound = max(len(prompt_P) - 1, 0) if reading.cached is None else min(reading.cached, len(prompt_P))
    return ModelCall(
        prompt_ids=prompt_P,
        generation_ids=generation_G,
        routes=rows_RLK,
        first_row=first_row,
        layer_ids=reading.spec.layer_ids,
        weights_version=reading.weights_version,
        call_id=choice.call_id,
        logprobs=_logprobs(choice),
        media=reading.media,
        # below first_row there is no row that could have come from a cache
        cached=cached_rows(bound, rows_RLK, first_row=first_row),
        loss=loss,
        columns=choice.columns,
    )


def _is_ticket(routes: Any) -> bool:
    return isinstance(routes, str) and routes.startswith(_TICKET)


def _redeemed(choice: Choice, reading: Reading, token_S: NDArray[np.int32]) -> ModelCall:
    if reading.redeem is None:
        raise refused("a way to redeem tickets (redeem=)", f"none, and a ticket @ call {choice.call_id}")
    call = reading.redeem(RouteTicket.from_json(choice.routes))
    if len(token_S) and not np.array_equal(token_S, call.token_ids):
        raise DataError(
            f"expected the ticket's call to have the {len(token_S)} tokens of the response, got {call.num_tokens} "
            f"others @ call {choice.call_id}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    if reading.media and call.media and reading.media != call.media:
        raise DataError(
            f"expected the ticket's call to have the media {list(reading.media)}, got {list(call.media)} "
            f"@ call {choice.call_id}",
            kind=ErrorKind.MEDIA,
        )
    # what the writer of the ticket could not know is the caller's, or the response's, to say
    said: dict[str, Any] = {
        "weights_version": reading.weights_version if call.weights_version is None else call.weights_version,
        "call_id": choice.call_id,
        "media": call.media or reading.media,
    }
    changes = {name: value for name, value in said.items() if value != getattr(call, name)}
    if call.logprobs is None and choice.logprobs is not None:
        changes["logprobs"] = _logprobs(choice)
    return replace(call, **changes, checksum=None) if changes else call


def _rows(choice: Choice, reading: Reading, token_S: NDArray[np.int32]) -> tuple[NDArray[np.int16] | None, int]:
    if choice.rows is not None:
        rows_RLK, first_row = choice.rows
    elif choice.routes is None:
        return None, 0
    else:
        rows_RLK, first_row = read_routes(
            choice.routes,
            reading.spec,
            token_ids=token_S,
            form=reading.form,
            axis=reading.axis,
            first_row=reading.first_row,
            filler=len(token_S) - 1 if reading.final_row == "filler" else None,
            call=choice.call_id,
        )
    if reading.final_row == "absent" and len(choice.generation_ids) and first_row + len(rows_RLK) == len(token_S):
        # a row that nobody captured says nothing; any other means that rows are not where they are thought to be
        if len(rows_RLK) and bool((rows_RLK[-1] == MISSING).all()):
            rows_RLK = rows_RLK[:-1]
    return rows_RLK, first_row


def _loss(choice: Choice, reading: Reading, rows_RLK: NDArray[np.int16] | None, *, first_row: int) -> RowLoss | None:
    """Why rows are absent, or None where all are there. Rows that nothing explains are refused."""
    prompt, generated = len(choice.prompt_ids), len(choice.generation_ids)
    declared = _LOSS_OF.get(choice.finish_reason or "")
    if rows_RLK is None:
        # what ended before its first token was sampled has no rows to give
        if generated == 0 and declared is not None:
            return declared
        if not reading.required or (generated == 0 and prompt == 0):
            return "not_captured"
        raise CaptureError(
            f"expected routes for {prompt} prompt + {generated} generated tokens, got none: {choice.why_absent} "
            f"@ call {choice.call_id}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    least, got = prompt + max(generated - 1, 0) - first_row, len(rows_RLK)
    if got == least or (reading.final_row == "captured" and got == least + 1):
        return None
    if declared is not None and got < least:
        return declared
    raise DataError(
        f"expected {least} rows from row {first_row} ({prompt} prompt + {generated} generated tokens, all but the last "
        f"fed), got {got}: is first_row the request's routed_experts_prompt_start? @ call {choice.call_id}",
        kind=ErrorKind.ROW_COUNT,
    )


def _logprobs(choice: Choice) -> NDArray[np.float32] | None:
    if choice.logprobs is None:
        return None
    what = f"log-probabilities of call {choice.call_id}"
    if not isinstance(choice.logprobs, list):
        raise DataError(f"expected {what} as a list, got {type(choice.logprobs).__name__}", kind=ErrorKind.DTYPE)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in choice.logprobs):
        raise DataError(f"expected a number for every log-probability @ call {choice.call_id}", kind=ErrorKind.DTYPE)
    try:
        logprobs_G = np.asarray(choice.logprobs, dtype=np.float64)
    except OverflowError:  # JSON has whole numbers of any length
        raise DataError(f"expected {what} that a float holds, got a larger one", kind=ErrorKind.VALUE_RANGE) from None
    return as_logprobs(logprobs_G, len(choice.generation_ids), what=what)
