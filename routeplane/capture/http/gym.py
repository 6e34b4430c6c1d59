"""Results of NeMo Gym turned into calls and records.

Owns where Gym puts what training needs: on the output items of a rollout's response, each with the prompt and generated
ids of one model call, their log-probabilities and routes (nested lists in release 0.4, an envelope in newer ones, or
tickets). Joins nothing itself: ``assemble`` does, by token identity, so a previous turn's last row comes from the next
prompt. Needs no Gym. Message logs are ``messages``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from routeplane.capture import choices
from routeplane.capture.choices import DEFAULTS, CaptureOptions, Choice
from routeplane.capture.http.openai import as_document, as_list, as_mapping
from routeplane.errors import DataError, ErrorKind, RouteplaneError
from routeplane.record.assembly import AssemblyReport, assemble
from routeplane.record.spans import RecordKey

if TYPE_CHECKING:
    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["GymRollout", "calls", "records"]

_WHY_ABSENT = (
    "the item has tokens and no routed_experts: is capture on in the engine, and does each agent between keep them? "
    "absent='not_captured' declares the rows as not captured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GymRollout:
    """One rollout as records, one per unbroken context.

    Attributes:
        records: In order of their segments.
        report: What assembling decided.
        skipped: Output items that hold no model call (tool results, text without token ids) or generated no token.

    >>> GymRollout(records=(), report=AssemblyReport(), skipped=2).skipped
    2
    """

    records: tuple[RouteRecord, ...]
    report: AssemblyReport
    skipped: int


def records(
    result: object,
    spec: RouteSpec,
    *,
    sample_id: str,
    weights_version: int | None,
    attempt: int = 0,
    group: str | None = None,
    on_break: Literal["raise", "split"] = "raise",
    options: CaptureOptions = DEFAULTS,
) -> GymRollout:
    """Read one rollout as records, with the roles user and assistant at their spans.

    Args:
        result: As ``calls``.
        spec: The geometry of the records.
        sample_id: The records' name.
        weights_version: Of the policy that sampled; None where unknown.
        attempt: Which attempt at the sample this is.
        group: Ties the samples of one prompt.
        on_break: What happens at a prompt that does not extend the tokens before it (a chat template that renders
            history again, reasoning that was stripped, truncation): "raise" DataError (CONTEXT_BREAK), or "split" into
            a new segment.
        options: As ``calls``.

    Returns:
        The records, which own their arrays, and the counts. Raises as ``calls`` and ``assemble``.

    >>> from routeplane import RouteSpec
    >>> rows = [[[3, 1]], [[0, 5]], [[0, 1]]]
    >>> item = {"prompt_token_ids": [5, 6], "generation_token_ids": [7], "routed_experts": rows}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> [record] = records([item], spec, sample_id="s", weights_version=4).records
    >>> [span.role for span in record.spans]
    ['user', 'assistant']
    """
    found = calls(result, spec, call_id=sample_id, weights_version=weights_version, options=options)
    attributes = {} if options.logprobs_mode is None else {"logprobs_mode": options.logprobs_mode}
    key = RecordKey(sample_id, attempt, 0)
    assembly = assemble(found, spec, sample_id=key, group=group, on_break=on_break, attributes=attributes)
    skipped = len(_items(result)) - len(found)
    return GymRollout(records=tuple(map(_with_roles, assembly.records)), report=assembly.report, skipped=skipped)


def calls(
    result: object,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    call_id: str = "rollout",
    options: CaptureOptions = DEFAULTS,
) -> tuple[ModelCall, ...]:
    """Read one rollout, one call per output item that generated tokens.

    Args:
        result: A rollout's result or its response (object, mapping or JSON text), or the list of its output items.
        spec: The geometry of the rows.
        weights_version: Of the policy that sampled; None where unknown.
        call_id: Calls are ``{call_id}/output-{index}``.
        options: What the caller knows of the server. NeMo RL sends one row per token, the last of them made up, so
            ``final_row`` is "filler" unless said otherwise: it is left out by its place.

    Returns:
        The calls. Every error names the output item. Raises as ``openai.calls``; DataError (ROUTES_MISSING) for a
        result in which no item generated a token.

    >>> from routeplane import RouteSpec
    >>> rows = [[[3, 1]], [[0, 5]], [[0, 1]]]
    >>> item = {"prompt_token_ids": [5, 6], "generation_token_ids": [7], "routed_experts": rows}
    >>> [call] = calls([item], RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), weights_version=4)
    >>> call.call_id, call.routes.tolist()
    ('rollout/output-0', [[[3, 1]], [[0, 5]]])
    """
    found = tuple(_calls(_items(result), spec, call_id=call_id, weights_version=weights_version, options=options))
    if not found:
        raise DataError(
            "expected an output item with generation_token_ids, got none: the first prompt was too long, or the model "
            "server does not return token ids (return_token_id_information)",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return found


def _items(result: object) -> Sequence[Any]:
    if isinstance(result, list):
        return result
    document = as_document(result)
    if document.get("response") is not None:
        document = as_document(document["response"])
    return as_list(document.get("output"), "the output of a response")


def _calls(
    items: Sequence[Any], spec: RouteSpec, *, call_id: str, weights_version: int | None, options: CaptureOptions
) -> Iterator[ModelCall]:
    for index, raw in enumerate(items):
        try:
            item = as_document(raw) if hasattr(raw, "model_dump") else as_mapping(raw, "an output item")
            ids = item.get("generation_token_ids")
            if ids is not None and as_list(ids, "generation_token_ids"):
                yield choices.call_of_choice(
                    _choice(item, f"{call_id}/output-{index}"),
                    spec,
                    weights_version=weights_version,
                    options=options,
                    final_row="filler",
                )
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
