"""One choice of an engine's answer, turned into a call: ids, rows, log-probabilities, and why rows are absent.

Owns the judgement that every reader shares: rows must be those of the tokens, absent rows need a reason that the engine
gave, filler is known by its position. Knows no response and no stream; ``sglang`` and ``http`` read those.

Axes: R rows, P prompt tokens, G generated tokens, D layers as the sender counts them, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from routeplane.capture.layers import LayerAxis, rows_from_axis
from routeplane.capture.recorder import record_of_call
from routeplane.capture.wire import WireForm, decode
from routeplane.errors import CaptureError, DataError, ErrorKind, SpecError, refused
from routeplane.record.aligned import mask_columns
from routeplane.record.calls import ModelCall, RowLoss, VersionSpan
from routeplane.record.interfaces import RouteTicket
from routeplane.record.parse import as_integers, as_logprobs, check_count
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spans import Sampling
    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULTS",
    "WHY_ABSENT",
    "CaptureOptions",
    "Choice",
    "FinalRow",
    "Redeem",
    "cached_rows",
    "call_of_choice",
    "check_requests",
    "loss_of_rows",
    "read_rows",
    "records_of_calls",
    "require_presence",
    "sample_names",
    "versions_of",
]

#: What a row for the call's last token is: absent (no engine made it, so it may only be MISSING), the engine's own, or
#: written by a harness that wants one row per token.
FinalRow = Literal["absent", "captured", "filler"]
#: Gives the call behind a ticket, once: ``http.TicketStore.redeem``.
Redeem = Callable[[RouteTicket], ModelCall]

#: What is wrong where a response that should have routes has none.
WHY_ABSENT = (
    "start the server with --enable-return-routed-experts; a proxy or an agent between may have dropped the field"
)
# What a server's finish reasons say of rows that are not there.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})
_TICKET = '{"call":'


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What a caller knows of a server and its answers do not say; one object serves every answer of a run.

    A reader refuses an option that means nothing for what it reads.

    Attributes:
        cached: Prompt rows that may come from a prefix cache, hence from weights of an unknown version. None takes the
            number that the answer reports; where it reports none, all prompt rows but the last. 0 is right where the
            cache is off or emptied at each update.
        axis: What the sender's layer axis counts. None takes the reader's own: "captured" for message logs, else
            "decoder".
        decoder_layers: D, the depth of the model: arrays must have exactly this many layers. SGLang's form, which has
            no header, needs it where layers behind the last captured one are dense.
        fused_shared: Slots that SGLang appends to a row for fused shared experts; they are checked and dropped.
        form: The form of the payload. None tells it by its type or first characters.
        final_row: What a row for a call's last token is. None takes the reader's own: "filler" for NeMo Gym, else
            "absent".
        media: One digest per media item of the prompt.
        absent: What it means where tokens came without routes, or with rows that are all MISSING. None refuses.
        max_missing_share: Largest share of a call's rows that may be MISSING, in any layer. None takes any but all. A
            call whose absent rows are declared is not judged.
        redeem: Gives the call of a ticket; needed where answers carry tickets.
        version_numbers: The number of each weights version that the server names by text. Decimal text is its own
            number; a name without a number is a version that is not known.
        logprobs_mode: Whether log-probabilities are those before temperature and truncation ("raw") or after
            ("processed"); becomes the attribute of records that have some. None takes what ``sampling`` says.
        sampling: The request's sampling parameters; they become those of the generated span. Needed where an answer has
            sampling masks, and then with processed log-probabilities and a temperature above 0.
        vocab_size: Ids of the model's logits: sampling masks are held to it, and one of all ids is stored as ``full``.

    >>> CaptureOptions(cached=0, axis="captured").cached
    0
    """

    cached: int | None = None
    axis: LayerAxis | None = None
    decoder_layers: int | None = None
    fused_shared: int = 0
    form: WireForm | None = None
    final_row: FinalRow | None = None
    media: tuple[str, ...] = ()
    absent: RowLoss | None = None
    max_missing_share: float | None = None
    redeem: Redeem | None = None
    version_numbers: Mapping[str, int] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    sampling: Sampling | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.media, str):  # one text is for ModelCall to refuse
            object.__setattr__(self, "media", tuple(self.media))
        choices = {"axis": LayerAxis, "form": WireForm, "final_row": FinalRow, "absent": RowLoss}
        for name, known in {**choices, "logprobs_mode": Literal["raw", "processed"]}.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(known):
                raise refused(f"{name} of {get_args(known)}, or None", repr(value))
        share = self.max_missing_share
        if share is not None and not 0.0 <= share <= 1.0:
            raise refused("max_missing_share in [0, 1], or None", repr(share))
        said = None if self.sampling is None else self.sampling.logprobs_mode
        if said is not None and self.logprobs_mode not in (None, said):
            raise refused(f"logprobs_mode as in sampling, {said!r}", repr(self.logprobs_mode))
        for name in ("decoder_layers", "fused_shared", "vocab_size"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, below=2**31)

    def only(self, names: Sequence[str], *, reader: str) -> None:
        """Raise UsageError where an option is set that is not among those of a reader.

        >>> CaptureOptions(cached=0).only(["cached", "media"], reader="sglang")
        """
        for item in fields(self):
            if item.name not in names and getattr(self, item.name) != item.default:
                raise refused(f"no {item.name} for {reader}, which has no use for it", repr(getattr(self, item.name)))

    def attributes(self, call: ModelCall) -> dict[str, str]:
        """What a record of the call says of its log-probabilities."""
        mode = self.logprobs_mode or (None if self.sampling is None else self.sampling.logprobs_mode)
        return {} if mode is None or call.logprobs is None else {"logprobs_mode": mode}


#: The options of a caller who has none to set.
DEFAULTS = CaptureOptions()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a server said of one choice.

    ``routes``: a value in a wire form, or None. ``prompt_routes``: the prompt's rows, where a server sends them apart.
    ``form``: the form of both, where the place alone tells it. ``rows``: the rows and the token of the first one, where
    they were read already. ``cached``: prompt tokens that the server says came from its prefix cache.
    ``short_prefill``: whether the server drops the row of the last token where nothing was sampled.
    ``weight_version``: what the server calls the weights. ``weight_versions``: the same by spans of generated tokens.
    ``retractions``: how often the server gave the request's memory to others and computed it again. ``kept``: the ids
    that sampling kept, a list for each generated token.

    >>> Choice(call_id="c", prompt_ids=[5], generation_ids=[7], finish_reason="stop").retractions
    0
    """

    call_id: str
    prompt_ids: Sequence[int]
    generation_ids: Sequence[int]
    finish_reason: str | None
    routes: Any = None
    prompt_routes: Any = None
    form: WireForm | None = None
    rows: tuple[NDArray[np.int16], int] | None = None
    logprobs: Any = None
    cached: int | None = None
    short_prefill: bool = False
    weight_version: Any = None
    weight_versions: Any = None
    retractions: int = 0
    kept: Any = None
    columns: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    why_absent: str = WHY_ABSENT


# ----------------------------------------------------------------------------------------------------------------------
# Rows
# ----------------------------------------------------------------------------------------------------------------------


def read_rows(
    value: object,
    spec: RouteSpec,
    *,
    options: CaptureOptions,
    first_row: int | None = None,
    filler: int | None = None,
    call: str | None = None,
) -> tuple[NDArray[np.int16], int]:
    """Decode a payload and place its layers.

    Args:
        value: A payload in a wire form.
        spec: The geometry of the rows.
        options: ``form``, ``axis``, ``decoder_layers`` and ``fused_shared`` are looked at.
        first_row: The token of row 0. None takes what the form says, 0 where it says nothing.
        filler: The token whose row, the last that came, a harness made up: it is left out by its place.
        call: Named in errors.

    Returns:
        Read-only int16 ``[R, L, K]``, which may share the decoded memory, and the token of the first row. Raises
        DataError (ROW_COUNT) where the form names another first row, and as ``wire.decode`` and
        ``layers.rows_from_axis``.

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> rows, first_row = read_rows([[[3, 1]], [[0, 5]]], spec, options=CaptureOptions())
    >>> rows.tolist(), first_row
    ([[[3, 1]], [[0, 5]]], 0)
    """
    axis = options.axis or "decoder"
    depth = spec.num_layers if axis == "captured" else options.decoder_layers or spec.layer_ids[-1] + 1
    array = decode(value, form=options.form, layers=depth, slots=spec.top_k + options.fused_shared)
    routes_RDK = array.routes
    begin = array.start or first_row or 0
    if filler is not None and len(routes_RDK) and begin + len(routes_RDK) == filler:
        # a harness that makes the last row up makes it always: one less is a row that was lost on the way
        raise DataError(
            f"expected {filler + 1} rows, the last of them filler (final_row='filler'), got {filler}: say "
            f"final_row='absent' where no row is made up @ call {call}",
            kind=ErrorKind.ROW_COUNT,
        )
    if filler is not None and len(routes_RDK) and begin + len(routes_RDK) == filler + 1:
        routes_RDK = routes_RDK[:-1]
    if options.decoder_layers is not None and axis == "decoder" and routes_RDK.shape[1] != depth:
        raise SpecError(
            f"expected {depth} decoder layers, got {routes_RDK.shape[1]} @ call {call}", kind=ErrorKind.LAYERS
        )
    if options.fused_shared:
        slots = range(spec.num_layers) if axis == "captured" else spec.layer_ids
        routes_RDK = _without_shared(routes_RDK, spec, slots=slots, count=options.fused_shared, call=call)
    rows_RLK = rows_from_axis(routes_RDK, spec, axis=axis, first_row=begin, call=call)
    if array.start is not None and first_row is not None and array.start != first_row:
        raise DataError(
            f"expected rows from token {first_row} on, got rows from {array.start}"
            + (f" @ call {call}" if call else ""),
            kind=ErrorKind.ROW_COUNT,
        )
    return rows_RLK, begin


def _without_shared(
    routes_RDK: NDArray[Any], spec: RouteSpec, *, slots: Sequence[int], count: int, call: str | None
) -> NDArray[Any]:
    """The routed slots alone. A shared expert among them, or a routed one among the shared, is refused."""
    if routes_RDK.shape[1] <= max(slots) or routes_RDK.shape[2] != spec.top_k + count:
        raise SpecError(
            f"expected rows of {spec.top_k} routed and {count} shared slots over {max(slots) + 1} layers, got "
            f"{list(routes_RDK.shape[1:])} @ call {call}",
            kind=ErrorKind.SHAPE,
        )
    widths = np.asarray(spec.experts_per_layer)
    shared_RLX = routes_RDK[:, list(slots), spec.top_k :]
    wrong_RL = (shared_RLX < widths[None, :, None]).any(axis=2)
    if wrong_RL.any():
        row, slot = np.argwhere(wrong_RL)[0]
        raise DataError(
            f"expected ids of shared experts, {int(widths[slot])} and above, in the last {count} slots, got "
            f"{shared_RLX[row, slot].tolist()} @ call {call}, row {row}, layer {spec.layer_ids[slot]}",
            kind=ErrorKind.ID_OUT_OF_RANGE,
        )
    return routes_RDK[:, :, : spec.top_k]


# ----------------------------------------------------------------------------------------------------------------------
# Calls
# ----------------------------------------------------------------------------------------------------------------------


def call_of_choice(
    choice: Choice,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    options: CaptureOptions,
    first_row: int | None = None,
    final_row: FinalRow = "absent",
) -> ModelCall:
    """Turn a choice into a call.

    Args:
        choice: What the server said.
        spec: The geometry of the rows.
        weights_version: Of the policy that sampled; None where unknown.
        options: What the caller knows of the server.
        first_row: The token of row 0, as the request asked. None takes what the form says, else 0.
        final_row: What a row for the last token is, where ``options`` do not say.

    Returns:
        A call whose rows are read-only and may share the memory of what was decoded. Raises UsageError for a choice
        that goes on, CaptureError (CAPTURE_OFF) for routes that are required and absent, DataError (ROW_COUNT) for rows
        that are not those of the tokens, and what ``read_rows`` and ``ModelCall`` raise.

    >>> from routeplane import RouteSpec
    >>> said = Choice(
    ...     call_id="c", prompt_ids=[5, 6], generation_ids=[7], finish_reason="stop", routes=[[[3, 1]], [[0, 5]]]
    ... )
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call_of_choice(said, spec, weights_version=4, options=CaptureOptions(cached=0)).rows_stop
    2
    """
    if choice.finish_reason is None:
        raise refused("a finished choice", f"one that goes on @ call {choice.call_id}")
    prompt_P = as_integers(list(choice.prompt_ids), np.int32, what="prompt ids", ndim=1)
    generation_G = as_integers(list(choice.generation_ids), np.int32, what="generation ids", ndim=1)
    token_S = np.concatenate([prompt_P, generation_G])
    if _is_ticket(choice.routes):
        return _redeemed(choice, options, token_S, weights_version=weights_version)
    last = options.final_row or final_row
    rows_RLK, begin = _rows(choice, spec, options=options, first_row=first_row, last=last)
    loss = _loss(choice, rows_RLK, absent=options.absent, first_row=begin, last=last)
    if rows_RLK is not None and loss is None:
        loss = require_presence(rows_RLK, options, call=choice.call_id)
    version, versions = versions_of(choice, weights_version=weights_version, numbers=options.version_numbers)
    bound = _cached_bound(choice.cached if options.cached is None else options.cached, prompt=len(prompt_P))
    if choice.retractions and rows_RLK is not None and _may_have_changed(choice, versions):
        # what was computed again replaced the rows of the first time, by weights that nothing names
        bound = begin + len(rows_RLK)
    whole = last == "captured" and rows_RLK is not None and begin + len(rows_RLK) == len(token_S)
    return ModelCall(
        prompt_ids=prompt_P,
        generation_ids=generation_G,
        routes=rows_RLK,
        first_row=begin,
        layer_ids=spec.layer_ids,
        weights_version=version,
        versions=versions,
        call_id=choice.call_id,
        logprobs=_logprobs(choice),
        media=options.media,
        # below first_row there is no row that could have come from a cache
        cached=cached_rows(bound, rows_RLK, first_row=begin),
        loss=loss,
        rows="all" if whole else "but_last",
        columns={**choice.columns, **_masks(choice, options, generation_G, prompt=len(prompt_P))},
        sampling=options.sampling,
    )


def _masks(
    choice: Choice, options: CaptureOptions, generation_G: NDArray[np.int32], *, prompt: int
) -> Mapping[str, Any]:
    """The columns of the sampling masks, where some came."""
    if choice.kept is None:
        return {}
    if not isinstance(choice.kept, list):
        raise DataError(
            f"expected sampling masks as a list, got {type(choice.kept).__name__} @ call {choice.call_id}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return mask_columns(
        choice.kept,
        generation_G,
        prompt=prompt,
        sampling=options.sampling,
        call=choice.call_id,
        vocab_size=options.vocab_size,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Versions
# ----------------------------------------------------------------------------------------------------------------------


def versions_of(
    choice: Choice, *, weights_version: int | None, numbers: Mapping[str, int] | None
) -> tuple[int | None, tuple[VersionSpan, ...]]:
    """Tell which weights sampled the tokens of a choice, by what the caller and the answer say.

    Args:
        choice: What the server said: ``weight_version``, or ``weight_versions`` by spans of generated tokens.
        weights_version: Of the policy, as the caller says; None where unknown.
        numbers: The number of each version that the server names by text.

    Returns:
        The version of the call, or its versions by spans. Raises DataError (SPANS) for spans that do not cover the
        tokens, or an answer of other weights than the caller says.

    >>> said = Choice(
    ...     call_id="c", prompt_ids=[5], generation_ids=[7, 8], finish_reason="stop",
    ...     weight_versions=[{"version": "7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}],
    ... )
    >>> versions_of(said, weights_version=None, numbers={"v8": 8})
    (None, ((1, 2, 7), (2, 3, 8)))
    """
    spans, prompt = _spans_of(choice), len(choice.prompt_ids)
    if not spans:
        return weights_version, ()
    named = {name: _number(name, numbers) for _, _, name in spans}
    known = set(named.values())
    if len(known) == 1 and (len(named) == 1 or None not in known):
        [number] = known
        number = weights_version if number is None else number
    elif weights_version is None:
        return None, tuple((prompt + start, prompt + stop, named[name]) for start, stop, name in spans)
    else:
        number = None
    if weights_version is not None and number != weights_version:
        raise DataError(
            f"expected tokens that weights {weights_version} sampled, got an answer that names "
            f"{[(name, start, stop) for start, stop, name in spans][:4]} (version, start, stop) "
            f"@ call {choice.call_id}",
            kind=ErrorKind.SPANS,
        )
    return number, ()


def _spans_of(choice: Choice) -> list[tuple[int, int, int | str]]:
    """Which weights sampled the generated tokens, as the answer says: ``[start, stop)`` of them, and the name."""
    generated, where = len(choice.generation_ids), f"@ call {choice.call_id}"
    if generated == 0 or (choice.weight_versions is None and choice.weight_version is None):
        return []
    if choice.weight_versions is None:
        return [(0, generated, _name(choice.weight_version, where))]
    found: list[tuple[int, int, int | str]] = []
    for span in choice.weight_versions if isinstance(choice.weight_versions, list) else ():
        said = span if isinstance(span, Mapping) else {}
        name = _name(said.get("version", said.get("weight_version")), where)
        found.append((said.get("start", -1), said.get("end", said.get("stop", -1)), name))
    edges = [0, *(stop for _, stop, _ in found)]
    whole = all(type(edge) is int for start, stop, _ in found for edge in (start, stop))
    covers = whole and [start for start, _, _ in found] == edges[:-1] and edges[-1] == generated
    if not found or not covers or any(a >= b for a, b in itertools.pairwise(edges)):
        raise DataError(
            f"expected weight_versions that cover the {generated} generated tokens, got "
            f"{str(choice.weight_versions)[:120]} {where}",
            kind=ErrorKind.SPANS,
        )
    return found


def _name(version: object, where: str) -> int | str:
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise DataError(f"expected a weights version as text or an int, got {version!r} {where}", kind=ErrorKind.DTYPE)
    return version


def _number(name: int | str, numbers: Mapping[str, int] | None) -> int | None:
    if isinstance(name, int):
        return name
    return (numbers or {}).get(name, int(name) if name.isdecimal() and name.isascii() else None)


def _may_have_changed(choice: Choice, versions: Sequence[VersionSpan]) -> bool:
    """Whether what was computed again may be of other weights than the tokens: unless spans say one version for all."""
    return bool(versions) or choice.weight_versions is None


def _cached_bound(cached: int | None, *, prompt: int) -> int:
    """Up to which token rows may come from a prefix cache: never what was generated, whatever a server's count says."""
    return max(prompt - 1, 0) if cached is None else min(cached, prompt)


def _is_ticket(routes: Any) -> bool:
    return isinstance(routes, str) and routes.startswith(_TICKET)


def _redeemed(
    choice: Choice, options: CaptureOptions, token_S: NDArray[np.int32], *, weights_version: int | None
) -> ModelCall:
    if options.redeem is None:
        raise refused("a function that redeems tickets (redeem=)", f"none, and a ticket @ call {choice.call_id}")
    call = options.redeem(RouteTicket.from_json(choice.routes))
    if len(token_S) and not np.array_equal(token_S, call.token_ids):
        raise DataError(
            f"expected the ticket's call to have the {len(token_S)} tokens of the response, got {call.num_tokens} "
            f"others @ call {choice.call_id}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    if options.media and call.media and options.media != call.media:
        raise DataError(
            f"expected the ticket's call to have the media {list(options.media)}, got {list(call.media)} "
            f"@ call {choice.call_id}",
            kind=ErrorKind.MEDIA,
        )
    # what the writer of the ticket could not know is for the caller, or the response, to say
    unknown = call.weights_version is None and not call.versions
    said: dict[str, Any] = {
        "weights_version": weights_version if unknown else call.weights_version,
        "call_id": choice.call_id,
        "media": call.media or options.media,
    }
    changes = {name: value for name, value in said.items() if value != getattr(call, name)}
    if call.logprobs is None and choice.logprobs is not None:
        changes["logprobs"] = _logprobs(choice)
    if call.sampling is None and options.sampling is not None:
        changes["sampling"] = options.sampling
    if choice.kept is not None and "sampling_mask" not in call.columns:
        masks = _masks(choice, options, call.generation_ids, prompt=len(call.prompt_ids))
        changes["columns"] = {**call.columns, **masks}
    return replace(call, **changes, checksum=None) if changes else call


def _rows(
    choice: Choice, spec: RouteSpec, *, options: CaptureOptions, first_row: int | None, last: FinalRow
) -> tuple[NDArray[np.int16] | None, int]:
    tokens = len(choice.prompt_ids) + len(choice.generation_ids)
    if choice.rows is not None:
        rows_RLK, begin = choice.rows
    elif choice.routes is None and choice.prompt_routes is None:
        return None, 0
    else:
        how = options if options.form is not None else replace(options, form=choice.form)
        filler = tokens - 1 if last == "filler" else None
        rows_RLK, begin = _read(choice, spec, options=how, first_row=first_row, filler=filler)
    if last == "absent" and len(choice.generation_ids) and begin + len(rows_RLK) == tokens:
        # a row that no engine captured says nothing; any other means that rows are not where they are thought to be
        if len(rows_RLK) and bool((rows_RLK[-1] == MISSING).all()):
            rows_RLK = rows_RLK[:-1]
    elif last == "absent" and begin and len(rows_RLK) > 1 and _ends_in_padding(rows_RLK):
        raise DataError(
            f"expected the row of the last token that was fed, got -1 behind {len(rows_RLK) - 1} rows from row {begin} "
            f"on: a row was added, so all of them are of other tokens @ call {choice.call_id}",
            kind=ErrorKind.ROW_COUNT,
        )
    return rows_RLK, begin


def _ends_in_padding(rows_RLK: NDArray[np.int16]) -> bool:
    """Whether the last row alone is MISSING: an engine that captures has the row of the last token that it fed."""
    return bool((rows_RLK[-1] == MISSING).all()) and not (rows_RLK[-2] == MISSING).all()


def _read(
    choice: Choice, spec: RouteSpec, *, options: CaptureOptions, first_row: int | None, filler: int | None
) -> tuple[NDArray[np.int16], int]:
    """The rows of a choice; of the prompt and of what was generated where a server sends them apart (vLLM 0.21)."""
    if choice.prompt_routes is None:
        return read_rows(choice.routes, spec, options=options, first_row=first_row, filler=filler, call=choice.call_id)
    prompt = len(choice.prompt_ids)
    prompt_RLK, begin = read_rows(choice.prompt_routes, spec, options=options, first_row=first_row, call=choice.call_id)
    if begin + len(prompt_RLK) != prompt:
        raise DataError(
            f"expected prompt_routed_experts up to token {prompt}, got {len(prompt_RLK)} rows from {begin} "
            f"@ call {choice.call_id}",
            kind=ErrorKind.ROW_COUNT,
        )
    if choice.routes is None:
        return prompt_RLK, begin
    more_RLK, _ = read_rows(choice.routes, spec, options=options, first_row=prompt, filler=filler, call=choice.call_id)
    return np.concatenate([prompt_RLK, more_RLK]), begin


def _loss(
    choice: Choice, rows_RLK: NDArray[np.int16] | None, *, absent: RowLoss | None, first_row: int, last: FinalRow
) -> RowLoss | None:
    """Why rows are absent, or None where all are there. Rows that nothing explains are refused."""
    prompt, generated = len(choice.prompt_ids), len(choice.generation_ids)
    declared = _LOSS_OF.get(choice.finish_reason or "")
    if rows_RLK is None:
        # what ended before its first token was sampled has no rows to give
        if generated == 0 and declared is not None:
            return declared
        if absent is not None or (generated == 0 and prompt == 0):
            return absent or "not_captured"
        why = choice.why_absent
        if declared is not None:
            why = (
                f"the answer ended as {choice.finish_reason!r} after {generated} tokens, and servers may drop the rows "
                f"of such an answer (absent={declared!r} declares them)"
            )
        raise CaptureError(
            f"expected routes for {prompt} prompt + {generated} generated tokens, got none: {why} "
            f"@ call {choice.call_id}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    least, got = prompt + max(generated - 1, 0) - first_row, len(rows_RLK)
    if last == "captured" and got == least + 1:
        return None
    if choice.short_prefill and declared is None and generated == 0 and got == least - 1:
        return "not_captured"
    return loss_of_rows(
        got, prompt=prompt, generated=generated, first_row=first_row, declared=declared, call=choice.call_id
    )


def require_presence(rows_RLK: NDArray[np.int16], options: CaptureOptions, *, call: str) -> RowLoss | None:
    """Judge whether the rows of a call hold ids: a payload that is MISSING throughout has the field and no content.

    Args:
        rows_RLK: The rows of tokens that were fed.
        options: ``absent`` and ``max_missing_share`` are looked at.
        call: Named in errors.

    Returns:
        What ``absent`` declares of a call without ids; None for any other. Raises CaptureError (CAPTURE_OFF) for a call
        without ids where nothing is declared, DataError (ROUTES_MISSING) for more MISSING rows than may be.

    >>> require_presence(np.full((3, 1, 2), -1, np.int16), CaptureOptions(absent="lost"), call="c")
    'lost'
    """
    absent_R = (rows_RLK[:, :, 0] == MISSING).any(axis=1)
    absent, rows = int(absent_R.sum()), len(rows_RLK)
    if absent == rows > 0 and bool((rows_RLK == MISSING).all()):
        if options.absent is not None:
            return options.absent
        raise CaptureError(
            f"expected rows with ids, got {rows} rows that are all {MISSING}: the field came without content, so the "
            f"engine captured nothing or a hop between filled it in (absent='not_captured' declares it) @ call {call}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    if options.max_missing_share is not None and absent > options.max_missing_share * rows:
        raise DataError(
            f"expected at most {options.max_missing_share:.4f} of the rows missing, got {absent} of {rows} "
            f"@ call {call}",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return None


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


def records_of_calls(
    calls: Sequence[ModelCall],
    spec: RouteSpec,
    *,
    sample_id: str,
    attempt: int,
    group: str | None,
    options: CaptureOptions,
) -> tuple[RouteRecord, ...]:
    """Make one-call records of the choices of one answer, ``{sample_id}/0``, ... where there are several.

    >>> records_of_calls([], None, sample_id="s", attempt=0, group=None, options=CaptureOptions())
    ()
    """
    several = len(calls) > 1
    return tuple(
        record_of_call(
            call,
            spec,
            sample_id=f"{sample_id}/{index}" if several else sample_id,
            attempt=attempt,
            group=sample_id if group is None and several else group,
            attributes=options.attributes(call),
        )
        for index, call in enumerate(calls)
    )


# ----------------------------------------------------------------------------------------------------------------------
# What every engine asks of a request, and says of its cache
# ----------------------------------------------------------------------------------------------------------------------


def sample_names(given: Sequence[str] | None, count: int, *, stem: str = "sample") -> list[str]:
    """The caller's names, else ``sample-0``, ``sample-1``, ...

    >>> sample_names(None, 2)
    ['sample-0', 'sample-1']
    """
    return list(given) if given is not None else [f"{stem}-{index}" for index in range(count)]


def check_requests(
    prompts: Sequence[Sequence[int]], names: Sequence[str], *, max_tokens: int, temperature: float, seed: int
) -> None:
    """Raise UsageError for prompts, names or settings that no engine can serve as they stand.

    >>> check_requests([[5, 6]], ["a"], max_tokens=4, temperature=1.0, seed=0)
    >>> check_requests([[]], ["a"], max_tokens=4, temperature=1.0, seed=0)
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected prompts of at least one token each, got an empty one
    """
    if len(prompts) == 0 or any(len(prompt) == 0 for prompt in prompts):
        raise refused("prompts of at least one token each", "an empty one")
    for prompt in prompts:
        if not all(isinstance(token, int | np.integer) and token >= 0 for token in prompt):
            raise refused("prompts of non-negative token ids", repr(list(prompt)[:8]))
    if len(names) != len(prompts) or len(set(names)) != len(names):
        raise refused(f"{len(prompts)} different names", f"{len(names)}, {len(set(names))} of them different")
    if max_tokens < 1:
        raise refused("max_tokens of at least 1", repr(max_tokens))
    if not 0 <= temperature < float("inf"):
        raise refused("a finite temperature of at least 0", repr(temperature))
    if seed < 0:
        raise refused("a seed of at least 0", repr(seed))


def loss_of_rows(
    got: int, *, prompt: int, generated: int, first_row: int, declared: RowLoss | None, call: str
) -> RowLoss | None:
    """Say why rows of a call are absent, by the number that came.

    An engine feeds the prompt and all generated tokens but the last. One row too many or too few means that rows are
    not where they are thought to be: a request that was trimmed, or answered from a prefix cache, would have the rows
    of other tokens.

    Args:
        got: Rows that came, of tokens ``[first_row, first_row + got)``.
        prompt: Prompt tokens.
        generated: Generated tokens.
        first_row: The token of row 0, as the request asked.
        declared: What the engine said of rows that are not there.
        call: The call's name, for the message.

    Returns:
        None where all rows came, else ``declared``. Raises DataError (ROW_COUNT) for fewer rows that nothing explains,
        and for more.

    >>> loss_of_rows(3, prompt=4, generated=2, first_row=2, declared=None, call="c")
    >>> loss_of_rows(1, prompt=4, generated=2, first_row=2, declared="aborted", call="c")
    'aborted'
    """
    expected = prompt + max(generated - 1, 0) - first_row
    if got == expected:
        return None
    if declared is not None and got < expected:
        return declared
    said = (
        "is first_row what the request asked for (routed_experts_prompt_start, or SGLang's routed_experts_start_len), "
        "and is this the whole answer, not a DELTA?"
        if got
        else "the field is there and holds no row, so the engine captured nothing or a hop between emptied it"
    )
    raise DataError(
        f"expected {expected} rows from row {first_row} ({prompt} prompt + {generated} generated tokens, all but the "
        f"last fed), got {got}: {said} @ call {call}",
        kind=ErrorKind.ROW_COUNT,
    )


def cached_rows(bound: int, rows_RLK: NDArray[Any] | None, *, first_row: int) -> int:
    """``ModelCall.cached`` where rows before ``bound`` may come from a prefix cache, and ``[first_row, ...)`` came.

    0 where none of the rows that came does, so that one call has one form (and checksum) in every reader.

    >>> cached_rows(5, np.zeros((2, 1, 1)), first_row=4), cached_rows(3, np.zeros((2, 1, 1)), first_row=4)
    (5, 0)
    """
    if rows_RLK is None or len(rows_RLK) == 0 or bound <= first_row:
        return 0
    return min(bound, first_row + len(rows_RLK))
