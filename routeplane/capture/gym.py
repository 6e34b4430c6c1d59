"""Results of NeMo Gym turned into calls and records.

Owns where Gym puts what training needs: on the output items of a rollout's response, each with the prompt and generated
ids of one model call, their log-probabilities and routes (nested lists in release 0.4, an envelope in newer ones, or
our own forms). Joins nothing itself: ``assemble`` does, by token identity, so a previous turn's last row comes from
the next prompt. Needs no Gym. Message logs are ``messages``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from routeplane.capture.choices import Choice, FinalRow, Reading, Redeem, call_of_choice
from routeplane.capture.forms import WireForm
from routeplane.capture.openai import as_document, as_list, as_mapping
from routeplane.capture.wire import LayerAxis
from routeplane.errors import DataError, ErrorKind, RouteplaneError
from routeplane.record.assembly import AssemblyReport, assemble

if TYPE_CHECKING:
    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["GymRollout", "calls_from_gym", "records_from_gym"]

_WHY_ABSENT = (
    "the item has tokens and no routed_experts: is capture on in the engine, and does each agent between keep them? "
    "require_routes=False declares the rows as not captured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GymRollout:
    """One rollout as records, one per unbroken context; ``skipped``: output items of no model call (tool results, text
    without token ids) or of one that generated nothing."""

    records: tuple[RouteRecord, ...]
    report: AssemblyReport
    skipped: int


def records_from_gym(
    result: object,
    spec: RouteSpec,
    *,
    sample_id: str,
    weights_version: int | None,
    attempt: int = 0,
    group: str | None = None,
    require_routes: bool = True,
    on_break: Literal["raise", "split"] = "raise",
    overlap: Literal["keep_first", "keep_last"] = "keep_first",
    logprobs_mode: Literal["raw", "processed"] | None = None,
    cached: int | None = None,
    axis: LayerAxis = "decoder",
    form: WireForm | None = None,
    final_row: FinalRow = "filler",
    redeem: Redeem | None = None,
) -> GymRollout:
    """The records of one rollout, spans with the roles user and assistant, checked as every record is.

    ``result``, ``require_routes``, ``axis``, ``form``, ``final_row``, ``cached`` and ``redeem`` as ``calls_from_gym``.
    ``on_break``: what a prompt does that is no extension of the tokens before it (a chat template that renders history
    anew, reasoning that was stripped, truncation): a new segment, or DataError (CONTEXT_BREAK). ``overlap``: whose row
    stays where two turns bring one. ``logprobs_mode``: becomes the record's attribute. Raises as ``calls_from_gym``.
    """
    calls = calls_from_gym(
        result,
        spec,
        call_id=sample_id,
        weights_version=weights_version,
        require_routes=require_routes,
        cached=cached,
        axis=axis,
        form=form,
        final_row=final_row,
        redeem=redeem,
    )
    assembly = assemble(
        calls,
        spec,
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        on_break=on_break,
        overlap=overlap,
        attributes={} if logprobs_mode is None else {"logprobs_mode": logprobs_mode},
    )
    skipped = len(_items(result)) - len(calls)
    return GymRollout(records=tuple(map(_with_roles, assembly.records)), report=assembly.report, skipped=skipped)


def calls_from_gym(
    result: object,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    call_id: str = "rollout",
    require_routes: bool = True,
    cached: int | None = None,
    axis: LayerAxis = "decoder",
    form: WireForm | None = None,
    final_row: FinalRow = "filler",
    redeem: Redeem | None = None,
) -> tuple[ModelCall, ...]:
    """One call per output item that generated tokens, ``{call_id}/output-{index}``.

    ``result``: a rollout's result or its response (object, mapping or JSON text), or the list of its output items.
    ``require_routes``: whether an item without routes is an error (CAPTURE_OFF); else its rows are declared as not
    captured. ``final_row``: NeMo RL sends one row per token, the last of them made up, so ``"filler"`` leaves a row for
    the last token out by its place; ``"absent"`` and ``"captured"`` as ``choices.FinalRow``. Rows beyond the item's
    tokens, or fewer than it fed, are refused. The rest as ``openai.calls_from_response``.

    Every error names the output item. Raises DataError (ROUTES_MISSING) for a result in which no item generated
    anything.
    """
    reading = Reading(
        spec=spec,
        weights_version=weights_version,
        cached=cached,
        axis=axis,
        form=form,
        final_row=final_row,
        required=require_routes,
        redeem=redeem,
    )
    calls = tuple(_calls(_items(result), reading, call_id))
    if not calls:
        raise DataError(
            "expected an output item with generation_token_ids, got none: the first prompt was too long, or the model "
            "server does not return token ids (return_token_id_information)",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return calls


def _items(result: object) -> Sequence[Any]:
    if isinstance(result, list):
        return result
    document = as_document(result)
    if document.get("response") is not None:
        document = as_document(document["response"])
    return as_list(document.get("output"), "the output of a response")


def _calls(items: Sequence[Any], reading: Reading, call_id: str) -> Iterator[ModelCall]:
    for index, raw in enumerate(items):
        try:
            item = as_document(raw) if hasattr(raw, "model_dump") else as_mapping(raw, "an output item")
            ids = item.get("generation_token_ids")
            if ids is not None and as_list(ids, "generation_token_ids"):
                yield call_of_choice(_choice(item, f"{call_id}/output-{index}"), reading)
        except RouteplaneError as error:
            raise type(error)(
                f"output item {index}: {error.message}", kind=error.kind, problems=error.problems
            ) from error


def _choice(item: Mapping[str, Any], name: str) -> Choice:
    return Choice(
        call_id=name,
        prompt_ids=as_list(item.get("prompt_token_ids"), "prompt_token_ids"),
        generation_ids=item["generation_token_ids"],
        # a response in Gym has no finish reasons; an item that is there was finished
        finish_reason="stop",
        routes=item.get("routed_experts"),
        logprobs=item.get("generation_log_probs"),
        why_absent=_WHY_ABSENT,
    )


def _with_roles(record: RouteRecord) -> RouteRecord:
    spans = tuple(replace(span, role="assistant" if span.kind == "generation" else "user") for span in record.spans)
    return replace(record, spans=spans, checksum=None)
