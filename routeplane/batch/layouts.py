"""What other stacks' batches mean: their layouts, read and written; and filler ids for gates that cannot run live rows.

Owns each stack's filler, layer axis, final row and padding, read from the version that its ``StackLayout`` names, and
the ids of ``fill="balanced"``. Array code alone, without torch; tensors on the CPU are read as arrays. Knows records
and their geometry; knows no plan, no stream and no file.

Axes: B sequences, S tokens of a sequence, T tokens in all, R rows of a sequence, P padding rows, D layers as a stack
counts them, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from routeplane.batch.columns import check_whole, generated_tokens, layer_slots
from routeplane.batch.slots import running_sum
from routeplane.errors import DataError, ErrorKind, Problem, UsageError, refused
from routeplane.record.rows import absent_tokens, copy_slots
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import all_legal, find_problems

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = [
    "LAYOUTS",
    "Fill",
    "LayoutBatch",
    "NativeBatch",
    "NativeSequence",
    "StackLayout",
    "balanced_rows",
    "captured_rows",
    "check_fill",
    "copy_rows",
    "filler_rows",
    "from_layout",
    "layer_axis",
    "layout_of",
    "read_sequences",
    "to_layout",
    "told_by_value",
]

Fill = Literal["missing", "balanced"]


def check_fill(fill: object, spec: RouteSpec, *, expert_parallel: int) -> None:
    """Raise UsageError (ARGUMENT) unless this filler can be made for this geometry."""
    if fill not in ("missing", "balanced"):
        raise refused("fill of ('missing', 'balanced')", repr(fill))
    if isinstance(expert_parallel, bool) or not isinstance(expert_parallel, int) or expert_parallel < 1:
        raise refused("expert_parallel as a positive whole number", repr(expert_parallel))
    for layer, width in zip(spec.layer_ids, spec.experts_per_layer, strict=True):
        if width % expert_parallel:
            raise refused(f"experts that expert_parallel={expert_parallel} divides", f"{width} @ layer {layer}")


def balanced_rows(count: int, spec: RouteSpec, *, expert_parallel: int = 1) -> NDArray[np.int16]:
    """Ids for ``count`` padding rows, spread over experts and expert-parallel ranks: fresh int16 ``[P, L, K]``.

    Number the K slots of the rows one after another, layer after layer from another start, and deal the numbers to
    ranks in turn, then to the experts of each rank in turn (rank ``r`` owns experts ``[r*E/R, (r+1)*E/R)``). So the
    ids of a row are distinct, as K is at most E; no two ranks of a layer differ by more than one assignment, and no two
    experts of a layer either, however few rows there are. Raises UsageError (ARGUMENT) as ``check_fill``.
    """
    check_fill("balanced", spec, expert_parallel=expert_parallel)
    rows_PLK = np.empty((count, *spec.row_shape), dtype=np.int16)
    number_PK = np.arange(count * spec.top_k).reshape(count, spec.top_k)
    for slot, (layer, width) in enumerate(zip(spec.layer_ids, spec.experts_per_layer, strict=True)):
        # a start by layer id, so that a pipeline stage fills its layers as the whole model would; a multiple of the
        # ranks, so that the first row falls on the same ranks in every layer
        dealt_PK = number_PK + layer * expert_parallel
        own = width // expert_parallel
        rows_PLK[:, slot] = dealt_PK % expert_parallel * own + dealt_PK // expert_parallel % own
    return rows_PLK


# ----------------------------------------------------------------------------------------------------------------------
# Layouts of other stacks
# ----------------------------------------------------------------------------------------------------------------------

Filler = Literal["zeros", "arange", "missing"]
LayerAxis = Literal["decoder", "captured"]
OnLost = Literal["raise", "drop_sample", "mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackLayout:
    """How a stack lays out the routes of a batch; ``replace`` it where your fork names a field otherwise.

    ``read_from``: the version whose code this was read from. ``container``: ``"padded"`` is a mapping of ``[B, S]``
    arrays, ``"jagged"`` one of one array a sequence, ``"packed"`` one of ``[T]`` arrays, ``"samples"`` a list of
    mappings. ``routes``, ``tokens``, ``names``: fields. ``real``: the field of what is a token: a mask ``[B, S]``,
    lengths ``[B]``, or those of a pack. ``generated``: the field of what was sampled, a ``mask`` of all tokens or of
    the response's. ``axis``: whether D counts all decoder layers or those captured. ``filler``: what stands where no
    route was captured, in dense layers too; ``at_padding``: what stands at padding. ``last_row``: whether a sequence
    has a row for its last token. ``padding_side``: ``"both"`` pads prompts left and responses right. ``dtype``: of the
    ids; ``"narrow"`` is uint8 where all ids fit, else ``wide``; ``"base64"`` is int32 bytes as text.
    """

    name: str
    read_from: str
    container: Literal["padded", "jagged", "packed", "samples"]
    filler: Filler
    at_padding: Filler
    axis: LayerAxis = "decoder"
    last_row: bool = True
    padding_side: Literal["left", "right", "both"] = "right"
    dtype: str = "int16"
    wide: str = "int16"
    routes: str = "routed_experts"
    tokens: str = "input_ids"
    real: str | None = None
    generated: str = "loss_mask"
    mask: Literal["all", "response"] = "all"
    names: str | None = None


def _layouts(*layouts: StackLayout) -> Mapping[str, StackLayout]:
    return MappingProxyType({layout.name: layout for layout in layouts})


_SLIME = StackLayout(
    name="slime",
    read_from="slime 0.3, 2026-07",
    container="samples",
    filler="zeros",
    at_padding="zeros",
    last_row=False,
    dtype="base64",
    routes="rollout_routed_experts",
    tokens="tokens",
    names="index",
)
_NEMO_RL = StackLayout(
    name="nemo_rl",
    read_from="NeMo RL 7ea279a, 2026-08-22: batched_message_log_to_flat_message",
    container="padded",
    filler="arange",
    at_padding="zeros",
    axis="captured",
    real="input_lengths",
    generated="token_mask",
    names="sample_ids",
)
#: The layouts that ``from_layout``, ``to_layout`` and the audit know, by name.
LAYOUTS: Mapping[str, StackLayout] = _layouts(
    _NEMO_RL,
    replace(_NEMO_RL, name="nemo_rl_tq", container="jagged", read_from="NeMo RL 7ea279a: TransferQueue payload"),
    replace(_NEMO_RL, name="nemo_rl_repaired", at_padding="arange", read_from="NeMo RL 7ea279a: Megatron microbatch"),
    StackLayout(
        name="verl",
        read_from="verl 0.9.1 with #7407",
        container="padded",
        filler="zeros",
        at_padding="zeros",
        padding_side="both",
        mask="response",
        real="attention_mask",
        generated="response_mask",
        names="uid",
    ),
    _SLIME,
    replace(_SLIME, name="miles", read_from="miles, 2026-09"),
    replace(_SLIME, name="sglang", read_from="SGLang with #24851", routes="routed_experts"),
    replace(_SLIME, name="vllm", read_from="vLLM 0.32", routes="routed_experts", dtype="narrow", wide="uint16"),
    StackLayout(
        name="prime_rl",
        read_from="prime-rl 0.5 with #3051",
        container="packed",
        filler="zeros",
        at_padding="zeros",
        dtype="narrow",
        wide="uint16",
        real="sequence_lengths",
    ),
    StackLayout(
        name="skyrl",
        read_from="SkyRL with #1910",
        container="padded",
        filler="arange",
        at_padding="arange",
        padding_side="left",
        mask="response",
        dtype="narrow",
        routes="rollout_expert_indices",
        tokens="sequences",
        real="attention_mask",
    ),
    StackLayout(
        name="tunix",
        read_from="tunix #2046 with maxtext #4826",
        container="padded",
        filler="missing",
        at_padding="missing",
        axis="captured",
        padding_side="both",
        dtype="int32",
        routes="forced_routed_experts",
        mask="response",
        real="input_mask",
        generated="completion_mask",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutBatch:
    """What a stack's batch means: the tokens of all sequences one after another, and the rows captured for them.

    ``token_ids`` int32 ``[T]``, ``generated`` bool ``[T]``, ``routes`` int16 ``[T, L, K]`` with MISSING where nothing
    was captured; sequence b is ``[offsets[b], offsets[b+1])``, its first ``captured[b]`` rows were captured. ``fed[b]``
    rows had to be: those before the last sampled token. Owns its arrays. ``RouteBatch.from_tensors`` takes them with
    ``cu_seqlens=offsets``.
    """

    spec: RouteSpec
    names: tuple[str, ...]
    token_ids: NDArray[np.int32]
    generated: NDArray[np.bool_]
    routes: NDArray[np.int16]
    offsets: NDArray[np.int64]
    captured: NDArray[np.int64]

    @property
    def fed(self) -> NDArray[np.int64]:
        """Rows of each sequence that the engine had to compute, int64 ``[B]``."""
        return np.asarray([_fed(self.generated[a:b]) for a, b in pairwise(self.offsets.tolist())], dtype=np.int64)

    @classmethod
    def from_records(cls, records: Sequence[RouteRecord], spec: RouteSpec) -> LayoutBatch:
        """Lay out records one after another, for ``to_layout``; copies their rows.

        Rows behind the last one that is there count as not captured. Raises as ``collate``.
        """
        offsets = running_sum(np.asarray([record.num_tokens for record in records], dtype=np.int64))
        slots = layer_slots(records, spec)
        for record in records:
            check_whole(record)
        routes = np.empty((int(offsets[-1]), *spec.row_shape), dtype=np.int16)
        captured = np.zeros(len(records), dtype=np.int64)
        for at, (record, (start, stop)) in enumerate(zip(records, pairwise(offsets.tolist()), strict=True)):
            routes[start:stop] = record.routes if slots is None else record.routes[:, slots]
            there = np.flatnonzero((routes[start:stop, :, 0] != MISSING).any(axis=1))
            captured[at] = there[-1] + 1 if len(there) else 0
        return cls(
            spec=spec,
            names=tuple(record.sample_id for record in records),
            token_ids=np.concatenate([record.token_ids for record in records]).astype(np.int32),
            generated=np.concatenate([generated_tokens(record) for record in records]),
            routes=routes,
            offsets=offsets,
            captured=captured,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSequence:
    """One sequence of a stack's batch, as views: ids ``[S]``, what was sampled ``[S]``, rows ``[R, D, K]``."""

    name: str
    token_ids: NDArray[Any]
    generated: NDArray[np.bool_]
    rows: NDArray[Any]

    @property
    def fed(self) -> int:
        """Rows that the engine had to compute."""
        return _fed(self.generated)


def _fed(generated: NDArray[np.bool_]) -> int:
    """Tokens before the last sampled one: they were fed. All but the last where none was sampled."""
    sampled = np.flatnonzero(generated)
    return int(sampled[-1]) if len(sampled) else len(generated) - 1


def layout_of(layout: str | StackLayout) -> StackLayout:
    """The layout of this name. Raises UsageError (ARGUMENT) for one that is not known."""
    if isinstance(layout, StackLayout):
        return layout
    if layout not in LAYOUTS:
        raise refused(f"a layout of {sorted(LAYOUTS)}", repr(layout))
    return LAYOUTS[layout]


def from_layout(
    batch: Any,
    spec: RouteSpec,
    *,
    layout: str | StackLayout,
    decoder_layers: int | None = None,
    captured: Any = None,
) -> LayoutBatch:
    """Read a stack's batch: what it means, without its filler.

    ``batch``: the stack's own container (``StackLayout.container``), of arrays or CPU tensors. ``decoder_layers``: the
    depth of the model; with it, an axis of another length is refused. ``captured``: rows of each sequence that the
    engine returned, integers ``[B]``; default: those before the last sampled token, and rows behind it that are not
    filler. Where the filler is a legal route (``arange``, or zeros of a top-1 model) only ``captured`` can tell it.

    Returns arrays of its own. Raises UsageError for another container; DataError with every finding (sample, token,
    layer) for a row that is not legal, filler in a place where a route has to stand included.

    >>> import numpy as np
    >>> from routeplane import RouteSpec
    >>> from routeplane.batch import from_layout
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> sample = {"tokens": [5, 6, 7], "loss_mask": [1, 1], "routed_experts": np.array([[[0, 0], [3, 5]]] * 2)}
    >>> from_layout([sample], spec, layout="vllm", decoder_layers=2).routes.tolist()
    [[[3, 5]], [[3, 5]], [[-1, -1]]]
    """
    kind = layout_of(layout)
    sequences = read_sequences(batch, kind)
    slots = layer_axis(sequences, spec, kind=kind, decoder_layers=decoder_layers)
    counts = captured_rows(sequences, kind, slots=slots, captured=captured)
    offsets = running_sum(np.asarray([len(each.token_ids) for each in sequences], dtype=np.int64))
    routes = np.empty((int(offsets[-1]), *spec.row_shape), dtype=np.int16)
    for each, start, count in zip(sequences, offsets.tolist(), counts.tolist(), strict=False):
        copy_rows(each.rows[:count], slots, out=routes[start : start + count])
        routes[start + count : start + len(each.token_ids)] = MISSING
    found = LayoutBatch(
        spec=spec,
        names=tuple(each.name for each in sequences),
        token_ids=np.concatenate([each.token_ids for each in sequences]).astype(np.int32),
        generated=np.concatenate([each.generated for each in sequences]),
        routes=routes,
        offsets=offsets,
        captured=counts,
    )
    if not all_legal(routes, spec):
        problems = [
            problem
            for each, (start, stop) in zip(sequences, pairwise(offsets.tolist()), strict=True)
            for problem in find_problems(routes[start:stop], spec, sample=each.name)
        ]
        raise DataError.from_problems(problems, what=f"illegal routes in a batch of {kind.name}")
    return found


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
    lost = _lost(batch)
    if len(lost) and kind.filler != "missing" and kind.name not in _SPELLS_MISSING:
        _check_lost(batch, lost, kind, on_lost)
    else:
        lost, on_lost = lost[:0], "raise"
    kept = [at for at in range(len(batch.names)) if not (on_lost == "drop_sample" and at in lost)]
    parts = [_Part.of(batch, at, masked=on_lost == "mask" and at in lost) for at in kept]
    if not parts:
        raise DataError("expected a sample without lost rows, got none", kind=ErrorKind.ROUTES_MISSING)
    writer = _Writer(kind, batch.spec, depth, batch.routes)
    content: Any
    if kind.container == "padded":
        content = writer.padded(parts, prompt_len=prompt_len, response_len=response_len, multiple=pad_to_multiple_of)
    elif kind.container == "packed":
        content = writer.packed(parts, multiple=pad_to_multiple_of)
    else:
        if prompt_len is not None or response_len is not None or pad_to_multiple_of != 1:
            raise refused(f"no widths for the {kind.container} container of {kind.name}", "some")
        content = writer.samples(parts) if kind.container == "samples" else writer.jagged(parts)
    names = [batch.names[at] for at in lost.tolist()]
    return NativeBatch(
        content=content,
        dropped=tuple(names) if on_lost == "drop_sample" else (),
        masked=tuple(names) if on_lost == "mask" else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeBatch:
    """A stack's container, and the samples that ``to_layout`` left out of it or kept with nothing to train on."""

    content: Any
    dropped: tuple[str, ...]
    masked: tuple[str, ...]


#: Layouts whose gates read a row of -1 as MISSING although their filler is another one.
_SPELLS_MISSING = ("nemo_rl", "nemo_rl_tq", "nemo_rl_repaired")

# ---- reading ---------------------------------------------------------------------------------------------------------


def read_sequences(batch: Any, kind: StackLayout) -> list[NativeSequence]:
    """The sequences of a stack's container, as views; nothing about their rows is checked."""
    try:
        if kind.container == "samples":
            found = [_sample(each, kind, at) for at, each in enumerate(batch)]
        elif kind.container == "packed":
            found = _packed(batch, kind)
        else:
            found = _jagged(batch, kind) if kind.container == "jagged" else _padded(batch, kind)
    except (KeyError, TypeError, IndexError) as error:
        raise refused(f"a batch of {kind.name} ({kind.container})", f"{type(error).__name__}: {error}") from error
    if not found:
        raise refused("at least one sequence", "none")
    for each in found:
        rows = len(each.token_ids) - (not kind.last_row)
        if each.rows.ndim != 3 or each.rows.dtype.kind not in "iu":
            raise refused(f"integer routes [tokens, layers, top-k] @ sample {each.name}", f"{each.rows.shape}")
        if len(each.rows) not in (rows, rows + (not kind.last_row)):
            raise DataError(
                f"expected {rows} rows for {len(each.token_ids)} tokens, got {len(each.rows)} @ sample {each.name}",
                kind=ErrorKind.ROW_COUNT,
            )
        if len(each.generated) != len(each.token_ids):
            raise refused(f"a mask of {len(each.token_ids)} tokens @ sample {each.name}", f"{len(each.generated)}")
    return found


def _parts(values: Any) -> list[NDArray[Any]]:
    """One array a sequence, of a nested tensor or a list."""
    return [np.asarray(each) for each in (values.unbind() if hasattr(values, "unbind") else values)]


def _names(batch: Any, kind: StackLayout, count: int) -> list[str]:
    # a TensorDict has ``keys`` and no iteration over them
    given = batch[kind.names] if kind.names is not None and kind.names in batch.keys() else None  # noqa: SIM118
    return [f"row-{at}" for at in range(count)] if given is None else [str(each) for each in given]


def _padded(batch: Any, kind: StackLayout) -> list[NativeSequence]:
    ids, routes = np.asarray(batch[kind.tokens]), np.asarray(batch[kind.routes])
    mask, generated = np.asarray(batch[kind.real]), np.asarray(batch[kind.generated]) != 0
    if ids.ndim != 2 or routes.shape[:2] != ids.shape or generated.shape[1] > ids.shape[1]:
        raise refused(f"routes and masks of ids {list(ids.shape)}", f"{list(routes.shape)}, {list(generated.shape)}")
    names, width, found = _names(batch, kind, len(ids)), ids.shape[1], []
    for at, name in enumerate(names):
        if mask.ndim == 1:
            start, stop = 0, int(mask[at])
        else:
            real = np.flatnonzero(mask[at])
            start, stop = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
            if stop - start != len(real):
                raise refused(f"the tokens of a sequence side by side @ sample {name}", "padding between them")
        if stop == start:
            continue  # a row that fills up the batch
        sampled = np.zeros(width, dtype=np.bool_)
        sampled[width - generated.shape[1] :] = generated[at]
        rows = slice(start, stop)
        found.append(NativeSequence(name=name, token_ids=ids[at, rows], generated=sampled[rows], rows=routes[at, rows]))
    return found


def _jagged(batch: Any, kind: StackLayout) -> list[NativeSequence]:
    columns = [_parts(batch[name]) for name in (kind.tokens, kind.generated, kind.routes)]
    names = _names(batch, kind, len(columns[0]))
    return [
        NativeSequence(name=name, token_ids=ids, generated=mask != 0, rows=rows)
        for name, ids, mask, rows in zip(names, *columns, strict=True)
    ]


def _packed(batch: Any, kind: StackLayout) -> list[NativeSequence]:
    given = batch[kind.routes]
    if isinstance(given, Mapping):
        given = np.frombuffer(given["data"], given["dtype"]).reshape(given["shape"])
    ids, routes, generated = np.asarray(batch[kind.tokens]), np.asarray(given), np.asarray(batch[kind.generated]) != 0
    edges = running_sum(np.asarray(batch[kind.real], dtype=np.int64))
    if edges[-1] != len(ids) or len(routes) != len(ids) or len(generated) != len(ids):
        raise refused(f"{edges[-1]} tokens, rows and mask entries", f"{len(ids)}, {len(routes)}, {len(generated)}")
    return [
        NativeSequence(name=name, token_ids=ids[a:b], generated=generated[a:b], rows=routes[a:b])
        for name, (a, b) in zip(_names(batch, kind, len(edges) - 1), pairwise(edges.tolist()), strict=True)
    ]


def _sample(sample: Any, kind: StackLayout, at: int) -> NativeSequence:
    ids, mask = np.asarray(sample[kind.tokens]), np.asarray(sample[kind.generated])
    sampled = np.zeros(len(ids), dtype=np.bool_)
    if len(mask) > len(ids):
        raise refused(f"a mask of at most {len(ids)} tokens @ sample {at}", f"{len(mask)}")
    sampled[len(ids) - len(mask) :] = mask != 0
    given = sample[kind.routes]
    if isinstance(given, str | bytes):
        slots = int(sample["top_k"]) if "top_k" in sample else None
        flat = np.frombuffer(b64decode(given, validate=True), np.dtype("<i4"))
        rows = len(ids) - 1
        if slots is None or rows == 0 or len(flat) % (rows * slots):
            raise refused(f"base64 of {rows} rows with the sample's top_k @ sample {at}", f"{len(flat)} ids, {slots}")
        given = flat.reshape(rows, -1, slots)
    name = sample.get(kind.names, f"row-{at}") if kind.names is not None else f"row-{at}"
    return NativeSequence(name=str(name), token_ids=ids, generated=sampled, rows=np.asarray(given))


def layer_axis(
    sequences: Sequence[NativeSequence], spec: RouteSpec, *, kind: StackLayout, decoder_layers: int | None
) -> slice | list[int]:
    """Where on axis D the spec's layers stand. Raises DataError (SHAPE, LAYERS) for an axis that cannot be theirs."""
    depths = {each.rows.shape[1:] for each in sequences}
    if len(depths) != 1:
        raise DataError(f"expected one layer axis and top-k, got {sorted(depths)}", kind=ErrorKind.SHAPE)
    depth, top_k = depths.pop()
    if top_k != spec.top_k:
        raise DataError(f"expected top-k {spec.top_k}, got {top_k}", kind=ErrorKind.SHAPE)
    captured = kind.axis == "captured" and depth == spec.num_layers
    if captured:
        return slice(0, depth)
    if depth <= spec.layer_ids[-1] or decoder_layers not in (None, depth):
        wanted = f"{decoder_layers or f'at least {spec.layer_ids[-1] + 1}'} decoder layers"
        more = f" or the {spec.num_layers} captured ones" if kind.axis == "captured" else ""
        raise DataError(f"expected an axis of {wanted}{more}, got {depth} slots", kind=ErrorKind.LAYERS)
    first, last = spec.layer_ids[0], spec.layer_ids[-1]
    return slice(first, last + 1) if last + 1 - first == spec.num_layers else list(spec.layer_ids)


def captured_rows(
    sequences: Sequence[NativeSequence], kind: StackLayout, *, slots: slice | list[int], captured: Any
) -> NDArray[np.int64]:
    """Rows of each sequence that were captured, int64 ``[B]``: as given, or as the layout shows."""
    if captured is not None:
        given = np.asarray(captured)
        most = np.asarray([len(each.rows) for each in sequences])
        if given.shape != most.shape or given.dtype.kind not in "iu" or np.any((given < 0) | (given > most)):
            raise refused(f"captured as counts within {most.tolist()}", f"{given.tolist()}")
        return given.astype(np.int64)
    counts = []
    for each in sequences:
        fed = min(each.fed, len(each.rows))
        # rows behind the last sampled token are there where the stack cut a longer answer
        there = np.flatnonzero(~filler_rows(each.rows[fed:, slots], kind.filler))
        counts.append(fed + (int(there[-1]) + 1 if len(there) else 0))
    return np.asarray(counts, dtype=np.int64)


def told_by_value(spec: RouteSpec, kind: StackLayout) -> bool:
    """Whether the layout's filler cannot be a legal route."""
    return kind.filler == "missing" or (kind.filler == "zeros" and spec.top_k > 1)


def filler_rows(rows: NDArray[Any], filler: Filler) -> NDArray[np.bool_]:
    """Which rows ``[R, L, K]`` hold the filler in every layer: bool ``[R]``."""
    pattern = np.arange(rows.shape[2]) if filler == "arange" else {"zeros": 0, "missing": MISSING}[filler]
    # most rows differ in their first id
    found_R: NDArray[np.bool_] = rows[:, 0, -1] == np.asarray(pattern).reshape(-1)[-1]
    suspects = np.flatnonzero(found_R)
    found_R[suspects] = (rows[suspects] == pattern).all(axis=(1, 2))
    return found_R


def copy_rows(rows: NDArray[Any], slots: slice | list[int], *, out: NDArray[np.int16]) -> None:
    """The captured layers of rows ``[R, D, K]`` of any integer type, as int16. Raises DataError (VALUE_RANGE)."""
    if rows.dtype.itemsize > 2 or rows.dtype == np.uint16:
        wanted = rows[:, slots]
        if wanted.size and (int(wanted.min()) < -(2**15) or int(wanted.max()) >= 2**15):
            raise DataError(f"expected ids that int16 holds, got {int(wanted.max())}", kind=ErrorKind.VALUE_RANGE)
    if isinstance(slots, list) and rows.dtype == np.int16:
        copy_slots(np.ascontiguousarray(rows), np.asarray(slots, dtype=np.int64), out=out)
    else:
        out[...] = rows[:, slots]


# ---- writing ---------------------------------------------------------------------------------------------------------


def _depth(spec: RouteSpec, kind: StackLayout, decoder_layers: int | None) -> int:
    if kind.axis == "captured":
        return spec.num_layers
    if decoder_layers is None or decoder_layers <= spec.layer_ids[-1]:
        raise refused(f"decoder_layers above {spec.layer_ids[-1]} for {kind.name}", f"{decoder_layers}")
    return decoder_layers


def _lost(batch: LayoutBatch) -> NDArray[np.int64]:
    """The sequences in which a row that was fed is not there in some layer."""
    absent = absent_tokens(batch.routes)
    at = np.searchsorted(batch.offsets, absent, side="right") - 1
    needed = np.minimum(np.maximum(batch.fed, batch.captured), np.diff(batch.offsets))
    found: NDArray[np.int64] = np.unique(at[absent - batch.offsets[at] < needed[at]])
    return found


def _check_lost(batch: LayoutBatch, lost: NDArray[np.int64], kind: StackLayout, on_lost: str) -> None:
    if on_lost not in ("raise", "drop_sample", "mask"):
        raise refused("on_lost of ('raise', 'drop_sample', 'mask')", repr(on_lost))
    if on_lost != "raise":
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
    """One sequence to write: its place in the batch, and what is trained on."""

    name: str
    token_ids: NDArray[np.int32]
    generated: NDArray[np.bool_]
    prompt: int
    rows: slice
    captured: int
    masked: bool

    @classmethod
    def of(cls, batch: LayoutBatch, at: int, *, masked: bool) -> _Part:
        start, stop = int(batch.offsets[at]), int(batch.offsets[at + 1])
        generated = batch.generated[start:stop]
        return cls(
            name=batch.names[at],
            token_ids=batch.token_ids[start:stop],
            generated=np.zeros_like(generated) if masked else generated,
            prompt=int(np.argmax(generated)) if generated.any() else stop - start,
            rows=slice(start, stop),
            captured=int(batch.captured[at]),
            masked=masked,
        )

    def __len__(self) -> int:
        return len(self.token_ids)


class _Writer:
    """Writes the parts of one batch; ``depth`` slots on axis D."""

    def __init__(self, kind: StackLayout, spec: RouteSpec, depth: int, routes: NDArray[np.int16]) -> None:
        self._kind, self._spec, self._depth, self._routes = kind, spec, depth, routes
        own = range(depth) if kind.axis == "captured" else spec.layer_ids
        first, last = own[0], own[-1]
        self._slots = slice(first, last + 1) if last + 1 - first == len(own) else list(own)
        self._dtype = np.dtype(np.int32 if kind.dtype == "base64" else kind.dtype if kind.dtype != "narrow" else "i2")
        if kind.dtype == "narrow":
            fits = kind.wide != "uint16" or max(spec.experts_per_layer) <= 256
            largest = int(routes.max(initial=0)) if kind.wide == "int16" else 0
            self._dtype = np.dtype(np.uint8 if fits and largest < 256 else kind.wide)

    def _fresh(self, shape: tuple[int, ...], filler: Filler) -> NDArray[Any]:
        full = (*shape, self._depth, self._spec.top_k)
        if filler == "zeros":
            return np.zeros(full, dtype=self._dtype)
        out = np.empty(full, dtype=self._dtype)
        out[...] = MISSING if filler == "missing" else np.arange(self._spec.top_k, dtype=self._dtype)
        return out

    def _write(self, part: _Part, out: NDArray[Any], *, own: bool) -> None:
        """The part's rows into ``out`` ``[R, D, K]``, which holds the filler of padding unless ``own``."""
        kind = self._kind
        count = min(part.captured, len(out))
        if not own and kind.filler != kind.at_padding:
            out[count:] = self._fresh((), kind.filler)
            if kind.axis == "decoder":
                out[:count] = self._fresh((), kind.filler)
        rows = self._routes[part.rows][:count]
        out[:count, self._slots] = rows
        if not part.masked or kind.filler == "missing" or kind.name in _SPELLS_MISSING:
            return
        absent = np.argwhere(rows[:, :, 0] == MISSING)
        for token, slot in absent.tolist():
            place = self._slots.start + slot if isinstance(self._slots, slice) else self._slots[slot]
            out[token, place] = self._fresh((), kind.filler)[0]

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
        routes = self._fresh((count, width), kind.at_padding)
        for at, part in enumerate(parts):
            start = {"left": width - len(part), "right": 0, "both": widths[0] - part.prompt}[kind.padding_side]
            rows = slice(start, start + len(part))
            ids[at, rows], real[at, rows], sampled[at, rows] = part.token_ids, 1, part.generated
            self._write(part, routes[at, rows], own=False)
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
        rest = -sum(lengths) % multiple
        lengths[-1] += rest  # as prime-rl counts the padding of a pack
        routes, at = self._fresh((sum(lengths),), kind.at_padding), 0
        for part in parts:
            self._write(part, routes[at : at + len(part)], own=False)
            at += len(part)
        pads = np.zeros(rest, dtype=np.int64)
        return {
            kind.tokens: np.concatenate([*(part.token_ids for part in parts), pads]).astype(np.int64),
            kind.generated: np.concatenate([*(part.generated for part in parts), pads]) != 0,
            str(kind.real): lengths,
            kind.routes: {"data": routes.tobytes(), "shape": list(routes.shape), "dtype": routes.dtype.name},
        }

    def _own(self, part: _Part) -> NDArray[Any]:
        out = self._fresh((len(part) - (not self._kind.last_row),), self._kind.filler)
        self._write(part, out, own=True)
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
