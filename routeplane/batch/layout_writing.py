"""Batches in the layouts of other stacks, written: filler, layer axis, padding and type as each of them has it.

Owns what a layout cannot say: rows that an engine lost are an error, a dropped sample, or a masked one. What a layout
means, and how it is read, is ``layouts``. Array code alone, without torch.

Axes: B sequences, S tokens of a sequence, T tokens in all, R rows of a sequence, D layers as a stack counts them, L
captured layers, K top-k slots.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.batch.layouts import LayoutBatch, StackLayout, check_legal, fill_rows, filler_row, layout_of, put_rows
from routeplane.errors import DataError, ErrorKind, Problem, UsageError, refused
from routeplane.record.rows import absent_tokens, survey
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NativeBatch", "OnLost", "to_layout"]

OnLost = Literal["raise", "drop_sample", "mask"]


def to_layout(
    batch: LayoutBatch,
    *,
    layout: str | StackLayout,
    decoder_layers: int | None = None,
    on_lost: OnLost = "raise",
    prompt_len: int | None = None,
    response_len: int | None = None,
    pad_to_multiple_of: int = 1,
) -> NativeBatch:
    """Write a stack's batch.

    ``decoder_layers``: the depth of the model, for a layout whose axis counts all decoder layers. ``on_lost``: what
    becomes of a sample whose engine lost a row where the layout has no spelling for MISSING: an error (``"raise"``),
    left out of the batch (``"drop_sample"``), or kept with filler and nothing to train on (``"mask"``: its mask of
    sampled tokens is all 0). ``prompt_len``, ``response_len``: widths of a batch padded on both sides; together the
    width of one padded on one side; default: the longest. ``pad_to_multiple_of``: of the width, or of a pack.

    Returns the container in fresh arrays, and which samples were dropped or masked. Raises UsageError for options that
    do not fit, DataError (ROUTES_MISSING) for lost rows.

    >>> from routeplane.batch import LayoutBatch, to_layout
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=3, spec=watermarked_spec())
    >>> native = to_layout(LayoutBatch.from_records([record], record.spec), layout="tunix").content
    >>> native["forced_routed_experts"].shape, native["forced_routed_experts"].dtype
    ((1, 3, 3, 4), dtype('int32'))
    """
    kind = layout_of(layout)
    depth = _depth(batch.spec, kind, decoder_layers)
    if on_lost not in ("raise", "drop_sample", "mask"):
        raise refused("on_lost of ('raise', 'drop_sample', 'mask')", repr(on_lost))
    widths = (prompt_len, response_len, pad_to_multiple_of)
    if kind.container in ("samples", "jagged") and widths != (None, None, 1):
        raise refused(f"no widths for the {kind.container} container of {kind.name}", "some")
    writer = _Writer(kind, batch.spec, depth, batch.routes)
    fed = batch.fed.tolist() if kind.spells_missing else [0] * len(batch.names)
    parts = [_Part.of(batch, at, fed=count) for at, count in enumerate(fed)]
    content = writer.write(parts, *widths)
    # most batches lost nothing: rows are checked while they are written, and written again where they may not stand
    lost = _lost(batch, kind, writer.absent(parts))
    dropped, masked = (), ()
    if len(lost) and not kind.spells_missing:
        _check_lost(batch, lost, kind, on_lost)
        names = tuple(batch.names[at] for at in lost.tolist())
        dropped, masked = (names, ()) if on_lost == "drop_sample" else ((), names)
        parts = [part.masking() if at in lost else part for at, part in enumerate(parts)]
        content = writer.write([part for part in parts if not (dropped and part.masked)], *widths)
    return NativeBatch(content=content, dropped=dropped, masked=masked)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeBatch:
    """A stack's container, and the samples that ``to_layout`` left out of it or kept with nothing to train on."""

    content: Any
    dropped: tuple[str, ...]
    masked: tuple[str, ...]


def _depth(spec: RouteSpec, kind: StackLayout, decoder_layers: int | None) -> int:
    if kind.axis == "captured":
        return spec.num_layers
    if decoder_layers is None or decoder_layers <= spec.layer_ids[-1]:
        raise refused(f"decoder_layers above {spec.layer_ids[-1]} for {kind.name}", f"{decoder_layers}")
    return decoder_layers


def _lost(batch: LayoutBatch, kind: StackLayout, absent: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The sequences in which a row that was fed is not there in some layer; raises DataError for an illegal row.

    ``absent``: the tokens that lack a row in some layer; None where that is not known.
    """
    if absent is None:
        absent = survey(batch.routes, batch.spec)
    if absent is None:
        check_legal(batch, what=f"illegal routes for a batch of {kind.name}")
        absent = absent_tokens(batch.routes)
    at = np.searchsorted(batch.offsets, absent, side="right") - 1
    needed = np.minimum(np.maximum(batch.fed, batch.captured), np.diff(batch.offsets))
    found: NDArray[np.int64] = np.unique(at[absent - batch.offsets[at] < needed[at]])
    return found


def _check_lost(batch: LayoutBatch, lost: NDArray[np.int64], kind: StackLayout, on_lost: str) -> None:
    if on_lost != "raise":
        if on_lost == "drop_sample" and len(lost) == len(batch.names):
            raise DataError("expected a sample without lost rows, got none", kind=ErrorKind.ROUTES_MISSING)
        return
    problems = []
    for at in lost.tolist():
        rows_SL = batch.routes[int(batch.offsets[at]) : int(batch.offsets[at + 1]), :, 0]
        token, slot = np.argwhere(rows_SL == MISSING)[0]
        message = f"expected a row, which {kind.name} cannot leave out (on_lost=), got MISSING"
        layer = batch.spec.layer_ids[int(slot)]
        problems.append(
            Problem(
                kind=ErrorKind.ROUTES_MISSING, message=message, sample=batch.names[at], token=int(token), layer=layer
            )
        )
    raise DataError.from_problems(problems, what=f"rows that a batch of {kind.name} needs")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One sequence to write: its place in the batch, what is trained on, and how many of its rows come from the batch.

    Rows behind ``written`` get the filler. Where a stack reads -1 as MISSING, rows that were fed and lost are written
    too, as -1: its filler is a legal route, and would be replayed as one that somebody measured.
    """

    name: str
    token_ids: NDArray[np.int32]
    generated: NDArray[np.bool_]
    prompt: int
    rows: slice
    written: int
    masked: bool

    @classmethod
    def of(cls, batch: LayoutBatch, at: int, *, fed: int) -> _Part:
        start, stop = int(batch.offsets[at]), int(batch.offsets[at + 1])
        generated = batch.generated[start:stop]
        return cls(
            name=batch.names[at],
            token_ids=batch.token_ids[start:stop],
            generated=generated,
            prompt=int(np.argmax(generated)) if generated.any() else stop - start,
            rows=slice(start, stop),
            written=max(int(batch.captured[at]), fed),
            masked=False,
        )

    def masking(self) -> _Part:
        """The part with filler where a row was lost, and nothing to train on."""
        return replace(self, generated=np.zeros_like(self.generated), masked=True)

    def __len__(self) -> int:
        return len(self.token_ids)


class _Writer:
    """Writes the parts of one batch; ``depth`` slots on axis D."""

    def __init__(self, kind: StackLayout, spec: RouteSpec, depth: int, routes: NDArray[np.int16]) -> None:
        self._kind, self._spec, self._depth, self._routes = kind, spec, depth, routes
        self._absent: list[NDArray[np.int64] | None] = []
        own = range(depth) if kind.axis == "captured" else spec.layer_ids
        first, last = own[0], own[-1]
        self._slots = slice(first, last + 1) if last + 1 - first == len(own) else list(own)
        self._dtype = np.dtype(np.int32 if kind.dtype == "base64" else kind.dtype if kind.dtype != "narrow" else "i2")
        if kind.dtype == "narrow":
            fits = kind.wide != "uint16" or max(spec.experts_per_layer) <= 256
            # no legal id of 256 experts needs more than a byte, so that only wider models are looked at
            chosen = kind.wide == "int16" and max(spec.experts_per_layer) > 256
            largest = int(routes.max(initial=0)) if chosen else 0
            self._dtype = np.dtype(np.uint8 if fits and largest < 256 else kind.wide)

    def write(
        self, parts: Sequence[_Part], prompt_len: int | None, response_len: int | None, multiple: int
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The container of these parts, in fresh arrays."""
        self._absent = []
        if self._kind.container == "padded":
            return self.padded(parts, prompt_len=prompt_len, response_len=response_len, multiple=multiple)
        if self._kind.container == "packed":
            return self.packed(parts, multiple=multiple)
        return self.samples(parts) if self._kind.container == "samples" else self.jagged(parts)

    def absent(self, parts: Sequence[_Part]) -> NDArray[np.int64] | None:
        """The tokens that lack a row in some layer, of parts that were written; None where that is not known."""
        found = list(self._absent)
        for part in parts:  # the others are not written
            behind = part.rows.start + min(part.written, len(part) - (not self._kind.last_row))
            rest = survey(self._routes[behind : part.rows.stop], self._spec)
            found.append(None if rest is None else rest + behind)
        told = [each for each in found if each is not None]
        return np.sort(np.concatenate(told)) if len(told) == len(found) else None

    def _empty(self, *shape: int) -> NDArray[Any]:
        # every row is written below: np.zeros would not ask the system for large pages
        return np.empty((*shape, self._depth, self._spec.top_k), dtype=self._dtype)

    def _write(self, part: _Part, out: NDArray[Any]) -> None:
        """The part's rows into ``out`` ``[R, D, K]``, and the filler where it has none."""
        kind = self._kind
        count = min(part.written, len(out))
        rows = self._routes[part.rows][:count]
        fill_rows(out[count:], kind.filler)
        absent = put_rows(rows, self._spec, slots=self._slots, out=out[:count], filler=kind.filler)
        self._absent.append(None if absent is None else absent + part.rows.start)
        if not part.masked or kind.spells_missing:
            return
        token_N, slot_N = np.nonzero(rows[:, :, 0] == MISSING)
        first = self._slots.start if isinstance(self._slots, slice) else None
        place_N = slot_N + first if first is not None else np.asarray(self._slots)[slot_N]
        out[token_N, place_N] = filler_row(kind.filler, self._spec.top_k)

    def padded(
        self, parts: Sequence[_Part], *, prompt_len: int | None, response_len: int | None, multiple: int
    ) -> dict[str, Any]:
        kind = self._kind
        longest = [max(part.prompt for part in parts), max(len(part) - part.prompt for part in parts)]
        if kind.padding_side == "both":
            widths = [longest[0] if prompt_len is None else prompt_len]
            widths.append(longest[1] if response_len is None else response_len)
            fits = widths[0] >= longest[0] and widths[1] >= longest[1]
        else:
            given = None if prompt_len is None and response_len is None else (prompt_len or 0) + (response_len or 0)
            widths = [0, max(map(len, parts)) if given is None else given]
            fits = widths[1] >= max(map(len, parts))
        if not fits:
            raise UsageError(f"expected widths of at least {longest}, got {widths}", kind=ErrorKind.TOO_LONG)
        width = sum(widths)
        width += -width % multiple
        count = len(parts)
        ids, real = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.int64)
        sampled = np.zeros((count, width), dtype=np.int64)
        routes = self._empty(count, width)
        for at, part in enumerate(parts):
            start = {"left": width - len(part), "right": 0, "both": widths[0] - part.prompt}[kind.padding_side]
            rows = slice(start, start + len(part))
            ids[at, rows], real[at, rows], sampled[at, rows] = part.token_ids, 1, part.generated
            fill_rows(routes[at, : rows.start], kind.at_padding)
            self._write(part, routes[at, rows])
            fill_rows(routes[at, rows.stop :], kind.at_padding)
        if kind.mask == "response" and kind.padding_side == "left":
            widths[0] = width - (longest[1] if response_len is None else response_len)
        return self._named(parts, ids, real, sampled[:, widths[0] :], routes)

    def _named(
        self,
        parts: Sequence[_Part],
        ids: NDArray[Any],
        real: NDArray[Any],
        sampled: NDArray[Any],
        routes: NDArray[Any],
    ) -> dict[str, Any]:
        kind = self._kind
        lengths = kind.real == "input_lengths"
        found = {
            kind.tokens: ids,
            str(kind.real): real.sum(axis=1) if lengths else real,
            kind.generated: sampled,
            kind.routes: routes,
        }
        if kind.name == "skyrl":
            found["router_padding_mask"] = real == 0
        if kind.names is not None:
            found[kind.names] = [part.name for part in parts]
        return found

    def packed(self, parts: Sequence[_Part], *, multiple: int) -> dict[str, Any]:
        kind = self._kind
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        routes, at = self._empty(total + -total % multiple), 0
        for part in parts:
            self._write(part, routes[at : at + len(part)])
            at += len(part)
        fill_rows(routes[total:], kind.at_padding)
        ids, sampled = np.zeros((2, len(routes)), dtype=np.int64)
        ids[:total] = np.concatenate([part.token_ids for part in parts])
        sampled[:total] = np.concatenate([part.generated for part in parts])
        if kind.pack == "batched":
            positions = np.zeros_like(ids)
            positions[:total] = np.concatenate([np.arange(length) for length in lengths])
            return {
                kind.tokens: ids[None],
                kind.generated: np.where(sampled == 0, kind.unsampled, ids)[None],
                "position_ids": positions[None],
                str(kind.real): lengths,
                kind.routes: routes[None],
            }
        lengths[-1] += len(routes) - total
        return {
            kind.tokens: ids,
            kind.generated: sampled != 0,
            str(kind.real): lengths,
            kind.routes: {"data": routes.tobytes(), "shape": list(routes.shape), "dtype": routes.dtype.name},
        }

    def _own(self, part: _Part) -> NDArray[Any]:
        out = self._empty(len(part) - (not self._kind.last_row))
        self._write(part, out)
        return out

    def jagged(self, parts: Sequence[_Part]) -> dict[str, Any]:
        kind = self._kind
        found: dict[str, Any] = {
            kind.tokens: [part.token_ids.astype(np.int64) for part in parts],
            kind.generated: [part.generated.astype(np.int64) for part in parts],
            kind.routes: [self._own(part) for part in parts],
            str(kind.real): np.asarray([len(part) for part in parts]),
        }
        return found if kind.names is None else {**found, kind.names: [part.name for part in parts]}

    def samples(self, parts: Sequence[_Part]) -> list[dict[str, Any]]:
        kind, found = self._kind, []
        for part in parts:
            routes: Any = self._own(part)
            sample: dict[str, Any] = {
                kind.tokens: part.token_ids.tolist(),
                "response_length": len(part) - part.prompt,
                kind.generated: part.generated[part.prompt :].astype(np.int64).tolist(),
                kind.routes: routes,
            }
            if kind.dtype == "base64":
                sample |= {kind.routes: b64encode(routes.tobytes()).decode(), "top_k": self._spec.top_k}
            found.append(sample if kind.names is None else {**sample, kind.names: part.name})
        return found
