"""Requests to an engine as they happened (ModelCall), before they become a record.

A call fed P prompt tokens and all its G generated ones but the last, so n = P + G tokens bring n - 1 rows; n where
nothing was generated, or where the reader declares that the last was fed too. Nothing else is accepted, unless the
capture declares why rows are absent. Knows no engine; ``assemble`` turns calls into records.

Axes: S token positions of the call (n), R rows that came, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from routeplane.errors import DataError, ErrorKind, check_type
from routeplane.record.aligned import AlignedColumn, aligned_columns, hash_columns, join_layers
from routeplane.record.checksum import CanonicalHash, hash_sampling, require_equal
from routeplane.record.parse import as_integers, as_logprobs, check_count, check_optional_int64, check_text, settle
from routeplane.record.spans import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FedRows", "ModelCall", "RowLoss", "VersionSpan", "merge_layers"]

#: Why rows that were fed did not come: the states that a capture may declare.
RowLoss = Literal["aborted", "lost", "not_captured"]
#: Which tokens a call fed, hence which rows it brings: all but the last one sampled, or that one too.
FedRows = Literal["but_last", "all"]

#: Tokens ``[start, stop)`` of a call and the version of the weights that sampled them, None where it is unknown.
VersionSpan = tuple[int, int, int | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """One request to the engine.

    ``prompt_ids`` int32 ``[P]`` and ``generation_ids`` int32 ``[G]``: the tokens fed and sampled. ``routes`` int16
    ``[R, L, K]`` or None: rows of tokens ``[first_row, first_row + R)``; ``layer_ids`` names the layers of axis L
    (None: those of the spec it is assembled under). ``weights_version``: of the policy, None where unknown.
    ``versions``: where the weights changed inside the call, ``(start, stop, version)`` of generated tokens, which they
    cover; ``weights_version`` is then None. The row of token t was produced by the forward that sampled t + 1.
    ``sampling``: the parameters. ``logprobs`` float32 ``[G]``, NaN where there is none; -inf is refused where the token
    must have been sampled, so unless ``rows="all"``. ``media``: one digest per media item, in prompt order. Negative
    token ids are refused, but for placeholders in a prompt with ``media``.
    ``cached``: rows ``[first_row, cached)`` came from a prefix cache, so by weights of an unknown version. ``loss``:
    declares that rows are absent, and why (those before ``first_row`` included, unless another call brings them);
    without it ``first_row + R`` must be the number of tokens that were fed. ``rows``: which those are: ``"but_last"``,
    n - 1 (n where nothing was generated), or ``"all"``, n: the engine fed the last token too, as for a continuation
    that it scored. ``columns``: aligned columns of P + G entries. ``checksum``: None computes it.

    Raises DataError for anything else. Arrays are kept as read-only views where their type fits.

    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=1, call_id="c"
    ... )
    >>> call.num_tokens, call.rows_stop
    (3, 2)
    """

    prompt_ids: NDArray[Any]
    generation_ids: NDArray[Any]
    routes: NDArray[Any] | None
    first_row: int = 0
    layer_ids: tuple[int, ...] | None = None
    weights_version: int | None
    call_id: str
    logprobs: NDArray[Any] | None = None
    media: tuple[str, ...] = ()
    cached: int = 0
    loss: RowLoss | None = None
    rows: FedRows = "but_last"
    columns: Mapping[str, Any] = field(default_factory=dict)  # takes arrays too; AlignedColumn by name ever after
    versions: tuple[VersionSpan, ...] = ()
    sampling: Sampling | None = None
    checksum: Any = None  # None asks for it to be computed; an int ever after

    def __post_init__(self) -> None:
        settle(
            self,
            prompt_ids=as_integers(self.prompt_ids, np.int32, what="prompt_ids", ndim=1),
            generation_ids=as_integers(self.generation_ids, np.int32, what="generation_ids", ndim=1),
        )
        check_text(self.call_id, "call_id")
        check_optional_int64(self.weights_version, "weights_version")
        for name in ("first_row", "cached"):
            check_count(getattr(self, name), name, below=2**31)
        if self.num_tokens == 0:
            raise DataError(f"expected at least one token, got none @ call {self.call_id}", kind=ErrorKind.SHAPE)
        if self.logprobs is not None:
            settle(self, logprobs=as_logprobs(self.logprobs, len(self.generation_ids), what="logprobs of a call"))
        settle(self, columns=aligned_columns(self.columns, self.num_tokens), media=_media(self.media, self.call_id))
        self._check_values()
        self._check_versions()
        if self.loss is not None and self.loss not in get_args(RowLoss):
            raise DataError(f"expected loss of {get_args(RowLoss)}, got {self.loss!r}", kind=ErrorKind.COVERAGE)
        if self.rows not in get_args(FedRows):
            raise DataError(f"expected rows of {get_args(FedRows)}, got {self.rows!r}", kind=ErrorKind.ROW_COUNT)
        self._check_rows()
        if self.checksum is None:
            settle(self, checksum=self.compute_checksum())
        check_count(self.checksum, "checksum", below=2**64)

    def _check_values(self) -> None:
        """No token id is negative, but of media that have digests; no sampled token is impossible."""
        size = len(self.prompt_ids)
        for name, ids, first in (("prompt_ids", self.prompt_ids, 0), ("generation_ids", self.generation_ids, size)):
            if len(ids) and ids.min() < 0 and (name == "generation_ids" or not self.media):
                self._refuse_value(f"{name} of at least 0", ids, at=int((ids < 0).argmax()), first=first)
        scores = self.logprobs
        if scores is not None and self.rows == "but_last" and len(scores) and np.isneginf(scores).any():
            at = int(np.isneginf(scores).argmax())
            self._refuse_value(
                "a finite log-probability of a sampled token, or NaN for none", scores, at=at, first=size
            )

    def _refuse_value(self, expected: str, values: NDArray[Any], *, at: int, first: int) -> None:
        raise DataError(
            f"expected {expected}, got {values[at]} @ call {self.call_id}, token {first + at}",
            kind=ErrorKind.VALUE_RANGE,
        )

    def _check_versions(self) -> None:
        """Versions cover the generated tokens, and are not given twice."""
        spans = tuple((start, stop, version) for start, stop, version in self.versions)
        settle(self, versions=spans)
        at = len(self.prompt_ids)
        for start, stop, version in spans:
            check_optional_int64(version, "a version of versions")
            if type(start) is not int or type(stop) is not int or start != at or not start < stop:
                raise DataError(
                    f"expected versions contiguous from token {at}, got [{start}, {stop}) @ call {self.call_id}",
                    kind=ErrorKind.SPANS,
                )
            at = stop
        if spans and (at != self.num_tokens or self.weights_version is not None):
            raise DataError(
                f"expected versions that cover the generated tokens up to {self.num_tokens}, and weights_version None, "
                f"got {at} and {self.weights_version} @ call {self.call_id}",
                kind=ErrorKind.SPANS,
            )
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise DataError(
                f"expected sampling as a Sampling, got {self.sampling!r} @ call {self.call_id}", kind=ErrorKind.SPANS
            )

    def _check_rows(self) -> None:
        where = f"@ call {self.call_id}"
        if self.layer_ids is not None:
            layer_ids = tuple(check_count(layer, "a layer id", below=2**31) for layer in self.layer_ids)
            settle(self, layer_ids=layer_ids)
        if self.first_row > self.num_tokens:
            raise DataError(
                f"expected first_row in [0, {self.num_tokens}], got {self.first_row} {where}", kind=ErrorKind.ROW_COUNT
            )
        if self.routes is None:
            if self.cached:
                raise DataError(
                    f"expected cached 0 without routes, got {self.cached} {where}", kind=ErrorKind.ROW_COUNT
                )
            return
        routes_RLK = as_integers(self.routes, np.int16, what=f"routes of call {self.call_id}", ndim=3)
        settle(self, routes=routes_RLK)
        if self.layer_ids is not None and routes_RLK.shape[1] != len(self.layer_ids):
            raise DataError(
                f"expected {len(self.layer_ids)} layers {list(self.layer_ids)}, got {routes_RLK.shape[1]} {where}",
                kind=ErrorKind.LAYERS,
            )
        rows, end, fed = len(routes_RLK), self.first_row + len(routes_RLK), self.num_fed
        if end > fed or (end < fed and self.loss is None):
            which = "all" if fed == self.num_tokens else 'all but the last (rows="all" where that was fed too)'
            raise DataError(
                f"expected rows up to token {fed} ({len(self.prompt_ids)} prompt + {len(self.generation_ids)} "
                f"generated tokens, of which the engine fed {which}), got {rows} from {self.first_row} {where}",
                kind=ErrorKind.ROW_COUNT,
            )
        if self.cached > end:
            raise DataError(f"expected cached in [0, {end}], got {self.cached} {where}", kind=ErrorKind.ROW_COUNT)

    @property
    def num_tokens(self) -> int:
        """n = P + G."""
        return len(self.prompt_ids) + len(self.generation_ids)

    @property
    def num_fed(self) -> int:
        """How many tokens the engine fed: n, or n - 1 where the last one was only sampled."""
        return self.num_tokens - int(self.rows == "but_last" and len(self.generation_ids) > 0)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled the generated tokens: one span where nothing changed, none where none was generated."""
        if self.versions or len(self.generation_ids) == 0:
            return self.versions
        return ((len(self.prompt_ids), self.num_tokens, self.weights_version),)

    def row_versions(self) -> tuple[VersionSpan, ...]:
        """Which weights produced the rows of tokens ``[0, n)``: those that sampled the token behind each.

        The prompt's rows come from the forward that sampled the first generated token; the last token's row, where it
        was fed, from weights that no sampled token names.
        """
        spans = self.version_spans()
        if not self.versions:
            return ((0, self.num_tokens, self.weights_version),)
        shifted = [(start - 1 if place else 0, stop - 1, version) for place, (start, stop, version) in enumerate(spans)]
        last = (self.num_tokens - 1, self.num_tokens, None)
        return tuple((start, stop, version) for start, stop, version in (*shifted, last) if start < stop)

    @property
    def rows_stop(self) -> int:
        """One past the last token that has a row; ``first_row`` where none came."""
        return self.first_row + (0 if self.routes is None else len(self.routes))

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 ``[P + G]``, a fresh array."""
        return np.concatenate([self.prompt_ids, self.generation_ids])

    def compute_checksum(self) -> int:
        """xxh3-64 of the canonical bytes; a call knows no spec, so the digest in front is 0."""
        out = CanonicalHash(0)
        out.text("call_id", self.call_id)
        out.array("prompt_ids", self.prompt_ids)
        out.array("generation_ids", self.generation_ids)
        out.array("routes", self.routes)
        out.int64("first_row", self.first_row)
        out.array("layer_ids", None if self.layer_ids is None else np.asarray(self.layer_ids, dtype=np.int64))
        out.int64("weights_version", self.weights_version)
        out.array("logprobs", self.logprobs)
        out.begin_list("media", len(self.media))
        for digest in self.media:
            out.text("digest", digest)
        out.int64("cached", self.cached)
        out.text("loss", self.loss)
        if self.rows != "but_last":
            out.text("rows", self.rows)
        if self.versions:
            out.begin_list("versions", len(self.versions))
            for start, stop, version in self.versions:
                out.int64("start", start)
                out.int64("stop", stop)
                out.int64("weights_version", version)
        if self.sampling is not None:
            hash_sampling(out, self.sampling)
        hash_columns(out, self.columns)
        return out.value()

    def verify(self) -> Self:
        """Raise ChecksumError unless the content is what the checksum was made over; return the call itself."""
        require_equal(self.checksum, self.compute_checksum(), where=f"call {self.call_id}", sample=self.call_id)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; going through the constructor also validates what another process sent.
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        content["columns"] = dict(self.columns)
        return _rebuild, (content,)


def _rebuild(content: dict[str, Any]) -> ModelCall:
    return ModelCall(**content)


def _media(media: Sequence[str], call_id: str) -> tuple[str, ...]:
    """Media without digests have no identity: equal placeholder tokens would pass for equal prompts."""
    if isinstance(media, str):
        raise DataError(
            f"expected a sequence of digests, got one string {media!r} @ call {call_id}", kind=ErrorKind.MEDIA
        )
    for digest in media:
        if not isinstance(digest, str) or not digest:
            raise DataError(
                f"expected a digest for every media item, got {digest!r} @ call {call_id}", kind=ErrorKind.MEDIA
            )
        check_text(digest, "a media digest")
    return tuple(media)


def merge_layers(calls: Iterable[ModelCall]) -> ModelCall:
    """The same call captured layer by layer, as pipeline stages do, joined into one with all layers in order.

    Every input is verified and must name its ``layer_ids``, disjoint from the others', and agree in everything else;
    log-probabilities and token columns may come with any one of them. Raises DataError naming what differs.

    >>> stages = [
    ...     ModelCall(
    ...         prompt_ids=[5, 6],
    ...         generation_ids=[7],
    ...         routes=[[[3, 1]], [[0, 5]]],
    ...         layer_ids=(layer,),
    ...         weights_version=1,
    ...         call_id="c",
    ...     )
    ...     for layer in (4, 1)
    ... ]
    >>> merge_layers(stages).layer_ids
    (1, 4)
    """
    parts = []
    for call in calls:
        check_type(call, ModelCall, expected="a ModelCall")
        parts.append(call.verify())
    if not parts:
        raise DataError("expected at least one call to merge, got none", kind=ErrorKind.LAYERS)
    first = parts[0]
    for part in parts:
        _check_same_call(first, part)
    slots: dict[int, NDArray[np.int16]] = {}
    for part in parts:
        if part.layer_ids is None or part.routes is None:
            raise DataError(f"expected routes and layer_ids in every part @ call {part.call_id}", kind=ErrorKind.LAYERS)
        for slot, layer in enumerate(part.layer_ids):
            if layer in slots:
                raise DataError(
                    f"expected layer {layer} once, got it twice @ call {part.call_id}", kind=ErrorKind.LAYERS
                )
            slots[layer] = part.routes[:, slot]
    layers = sorted(slots)
    logprobs, columns = _merge_columns(parts)
    routes_RLK = np.stack([slots[layer] for layer in layers], axis=1)
    return replace(first, routes=routes_RLK, layer_ids=tuple(layers), logprobs=logprobs, columns=columns, checksum=None)


def _check_same_call(first: ModelCall, part: ModelCall) -> None:
    for name in (
        "call_id",
        "first_row",
        "rows_stop",
        "weights_version",
        "media",
        "cached",
        "loss",
        "rows",
        "versions",
        "sampling",
    ):
        if getattr(first, name) != getattr(part, name):
            raise DataError(
                f"expected parts of one call to agree in {name}, got {getattr(first, name)!r} and "
                f"{getattr(part, name)!r} @ call {first.call_id}",
                kind=ErrorKind.LAYERS,
            )
    if first.routes is not None and part.routes is not None and first.routes.shape[2] != part.routes.shape[2]:
        raise DataError(
            f"expected parts of one call to agree in top-k, got {first.routes.shape[2]} and {part.routes.shape[2]} "
            f"@ call {first.call_id}",
            kind=ErrorKind.SHAPE,
        )
    for name in ("prompt_ids", "generation_ids"):
        if not np.array_equal(getattr(first, name), getattr(part, name)):
            raise DataError(
                f"expected parts of one call to agree in {name} @ call {first.call_id}", kind=ErrorKind.TOKEN_MISMATCH
            )


def _merge_columns(parts: Sequence[ModelCall]) -> tuple[NDArray[np.float32] | None, dict[str, AlignedColumn]]:
    """Log-probabilities and columns of all parts; any that come twice must be equal, unless layers tell them apart."""
    merged: dict[str, AlignedColumn] = {}
    logprobs = None
    for part in parts:
        if part.logprobs is not None and logprobs is not None:
            if not np.array_equal(logprobs, part.logprobs, equal_nan=True):
                raise _unequal("logprobs", part)
        logprobs = part.logprobs if logprobs is None else logprobs
        for name, column in part.columns.items():
            if "layers" in column.type.axes:
                continue
            if not merged.setdefault(name, column).equals(column):
                raise _unequal(name, part)
    names = {name for part in parts for name, column in part.columns.items() if "layers" in column.type.axes}
    return logprobs, {**merged, **{name: _join_layers(parts, name) for name in sorted(names)}}


def _unequal(name: str, part: ModelCall) -> DataError:
    return DataError(
        f"expected equal {name} in the parts of one call, got two @ call {part.call_id}", kind=ErrorKind.TOKEN_COLUMN
    )


def _join_layers(parts: Sequence[ModelCall], name: str) -> AlignedColumn:
    """A column with an axis of layers, put together from every part's, in the order of the layers."""
    given: list[tuple[int, AlignedColumn]] = []
    for part in parts:
        column = part.columns.get(name)
        layers = part.layer_ids or ()
        if column is None or column.type.shape[column.type.axes.index("layers")] != len(layers):
            raise DataError(
                f"expected {name} over the {len(layers)} layers of every part @ call {part.call_id}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
        given += [(layer, column.pick_layers([slot])) for slot, layer in enumerate(layers)]
    ordered = [column for _, column in sorted(given, key=lambda item: item[0])]
    return join_layers(ordered, name=name)
