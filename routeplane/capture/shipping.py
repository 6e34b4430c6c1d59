"""A response's routes put into the form that its request asked for; the request changed so that they can be.

Owns the forms that a server of ours answers in, and where each stands: on the choice (``ticket``, ``inline``, ``npy``)
or on the message, with ids and log-probabilities beside it, as NeMo Gym reads it (``nemo``: the ``nrlre1`` envelope,
``nemo-lists``: nested lists for release 0.4). Pure functions of JSON documents; ``middleware`` moves the bytes.

Axes: S token positions, R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from routeplane.capture.choices import WHY_ABSENT
from routeplane.capture.envelopes import encode_lists, encode_nrlre1
from routeplane.capture.inline import encode_inline
from routeplane.capture.openai import as_list, as_mapping, calls_from_response
from routeplane.errors import CaptureError, ErrorKind, refused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routeplane.capture.wire import LayerAxis
    from routeplane.record.calls import ModelCall
    from routeplane.record.spec import RouteSpec

__all__ = ["Asked", "ShippingForm", "parse_form", "prepare_request", "require_routes", "ship_routes", "strip_routes"]

#: How a response carries routes: a ticket for them, our inline text, what vLLM wrote, NeMo's envelope or lists; none.
ShippingForm = Literal["ticket", "inline", "npy", "nemo", "nemo-lists", "none"]

_MESSAGE_FORMS = ("nemo", "nemo-lists")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request wants of its routes, and what of the answer is there for us alone."""

    form: ShippingForm
    first_row: int | None = None
    prompt_ids: Sequence[int] | None = None
    keep_ids: bool = True
    keep_logprobs: bool = True


def parse_form(text: str) -> ShippingForm:
    """A form by its name. Raises UsageError for any other."""
    for form in get_args(ShippingForm):
        if text == form:
            known: ShippingForm = form
            return known
    raise refused(f"a form of routes of {get_args(ShippingForm)}", repr(text[:40]))


def prepare_request(body: Mapping[str, Any], form: ShippingForm, *, chat: bool) -> tuple[dict[str, Any], Asked]:
    """The request that the engine gets, and what was asked for.

    Ids are asked for where routes are shipped, log-probabilities where the message must have them. Routes that a
    harness sends back inside its messages are dropped: the engine has no use for them, and they are most of the bytes.
    """
    changed = dict(body)
    messages = body.get("messages")
    if isinstance(messages, list):
        changed["messages"] = [
            {name: value for name, value in one.items() if name != "routed_experts"}
            if isinstance(one, Mapping)
            else one
            for one in messages
        ]
    tokens = body.get("token_ids")
    # token in / token out has all that it samples by one level below
    place = body if tokens is None else body.get("sampling_params")
    start = place.get("routed_experts_prompt_start") if isinstance(place, Mapping) else None
    asked = Asked(
        form=form,
        first_row=start if isinstance(start, int) else None,
        prompt_ids=tokens if isinstance(tokens, list) else None,
        # whoever sends token ids is answered in token ids, unasked
        keep_ids=form in ("inline", "npy", "none") or tokens is not None or bool(body.get("return_token_ids")),
        keep_logprobs=form not in _MESSAGE_FORMS or bool(body.get("logprobs")),
    )
    if form not in ("none", "npy") and tokens is None:
        changed["return_token_ids"] = True
    if form in _MESSAGE_FORMS and chat and not body.get("logprobs"):
        changed["logprobs"] = True
    return changed, asked


def strip_routes(document: dict[str, Any]) -> int:
    """Take the routes out of a response that nobody asked to have them in; from how many choices.

    Whatever else a server answered is not ours to refuse.
    """
    count = 0
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        found = [choice.get("routed_experts"), _take_off_message(choice)]
        if found[0] is not None:
            choice["routed_experts"] = None
        count += any(routes is not None for routes in found)
    return count


def _take_off_message(choice: Mapping[str, Any]) -> Any:
    """The routes that some servers (NeMo RL's) put on the message, which has them no longer."""
    message = choice.get("message")
    return message.pop("routed_experts", None) if isinstance(message, dict) else None


def require_routes(document: Mapping[str, Any]) -> int:
    """How many choices have routes, in whatever form; for who asked for those that the server writes.

    Raises CaptureError (CAPTURE_OFF) for a choice without them, unless it was aborted, or a writer inside the engine
    says in its place what became of them; DataError for choices of another kind.
    """
    said = as_mapping(document.get("kv_transfer_params"), "kv_transfer_params")
    count = 0
    for one in as_list(document.get("choices"), "choices"):
        choice = as_mapping(one, "a choice")
        message = as_mapping(choice.get("message"), "a message")
        if any(place.get("routed_experts") is not None for place in (choice, message)):
            count += 1
        elif choice.get("finish_reason") not in ("abort", "error") and "routeplane" not in said:
            raise CaptureError(
                f"expected routes in choice {choice.get('index', 0)}, got none: {WHY_ABSENT} @ call "
                f"{document.get('id')}",
                kind=ErrorKind.CAPTURE_OFF,
            )
    return count


def ship_routes(
    document: dict[str, Any],
    asked: Asked,
    *,
    spec: RouteSpec,
    issue: Callable[[Sequence[ModelCall]], Sequence[str]],
    axis: LayerAxis = "decoder",
    weights_version: int | None = None,
    cached: int | None = None,
) -> int:
    """Replace the routes of a response by the form asked for, in place; in how many choices.

    ``issue``: takes calls into a stream, all or none, and gives the text of their tickets. Every choice is read, and so
    checked, before the first is changed. An aborted choice without routes has no ticket; then the response's ids stay,
    which are all that there is to read of it. Raises as ``calls_from_response``, UsageError for a form on the message
    where there is none, and CaptureError (CAPTURE_OFF) for one without log-probabilities.
    """
    calls = calls_from_response(
        document,
        spec,
        weights_version=weights_version,
        prompt_ids=asked.prompt_ids,
        first_row=asked.first_row,
        cached=cached,
        axis=axis,
    )
    choices = sorted(document["choices"], key=lambda one: int(one.get("index", 0)))
    shipped = [call for call in calls if call.routes is not None]
    tickets = iter(issue(shipped) if asked.form == "ticket" else ())
    for choice, call in zip(choices, calls, strict=True):
        if asked.form in _MESSAGE_FORMS:
            _put_on_message(choice, call, spec, lists=asked.form == "nemo-lists")
            continue
        _take_off_message(choice)
        if call.routes is None:
            choice["routed_experts"] = None
        elif asked.form == "ticket":
            choice["routed_experts"] = next(tickets)
        else:
            choice["routed_experts"] = encode_inline(
                call.routes, spec, token_ids=call.token_ids, first_row=call.first_row
            )
    _tidy(document, asked, keep_ids=asked.keep_ids or (asked.form == "ticket" and len(shipped) < len(calls)))
    return len(shipped)


def _put_on_message(choice: dict[str, Any], call: ModelCall, spec: RouteSpec, *, lists: bool) -> None:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise refused("a chat completion for routes on the message", "a choice without a message")
    if call.logprobs is None and len(call.generation_ids):
        raise CaptureError(
            f"expected log-probabilities of the {len(call.generation_ids)} generated tokens, which a message has for "
            f"NeMo Gym, got none @ call {call.call_id}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    rows_SLK = _one_row_per_token(call, spec)
    choice["routed_experts"] = None
    message["prompt_token_ids"] = call.prompt_ids.tolist()
    message["generation_token_ids"] = call.generation_ids.tolist()
    message["generation_log_probs"] = [] if call.logprobs is None else call.logprobs.tolist()
    message["routed_experts"] = encode_lists(rows_SLK) if lists else encode_nrlre1(rows_SLK)


def _one_row_per_token(call: ModelCall, spec: RouteSpec) -> NDArray[np.int16]:
    """A row for each of the call's tokens: NeMo's readers want P + G. What was not captured is -1, which they leave to
    the live router; never ids that nobody chose."""
    rows_SLK = spec.missing_rows(call.num_tokens)
    if call.routes is not None:
        rows_SLK[call.first_row : call.rows_stop] = call.routes
    return rows_SLK


def _tidy(document: dict[str, Any], asked: Asked, *, keep_ids: bool) -> None:
    """Take out of the answer what only we asked for."""
    if not keep_ids:
        document.pop("prompt_token_ids", None)
    for choice in document["choices"]:
        if not keep_ids:
            choice.pop("prompt_token_ids", None)
            choice.pop("token_ids", None)
        if not asked.keep_logprobs:
            choice["logprobs"] = None
