"""What other stacks' batches mean: their layouts, and their rows read, checked while they are copied.

Owns each stack's filler, layer axis, final row and padding, read from the version that its ``StackLayout`` names; the
one pass that copies and checks rows of other arrays; and the ids of ``fill="balanced"``. ``layout_writing`` writes
layouts. Array code alone, without torch; tensors on the CPU are read as arrays. Knows records and their geometry; knows
no plan, no stream and no file.

Axes: B sequences, S tokens of a sequence, T tokens in all, R rows of a sequence, P padding rows, D layers as a stack
counts them, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from routeplane.batch.columns import check_whole, generated_tokens, layer_slots
from routeplane.batch.slots import running_sum
from routeplane.errors import DataError, ErrorKind, refused
from routeplane.record.rows import copy_slots, move_checked, survey
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import find_problems

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = [
    "LAYOUTS",
    "OWN_LAYOUT",
    "Fill",
    "Filler",
    "LayoutBatch",
    "NativeSequence",
    "StackLayout",
    "balanced_rows",
    "captured_rows",
    "check_fill",
    "check_legal",
    "copy_rows",
    "fill_rows",
    "filler_row",
    "filler_rows",
    "from_layout",
    "layer_axis",
    "layout_of",
    "put_rows",
    "read_layout",
    "read_sequences",
    "take_rows",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StackLayout:
    """How a stack lays out the routes of a batch; ``replace`` it where your fork names a field otherwise.

    ``read_from``: the version whose code this was read from. ``container``: ``"padded"`` is a mapping of ``[B, S]``
    arrays, ``"jagged"`` one of one array a sequence, ``"packed"`` one of ``[T]`` arrays, ``"samples"`` a list of
    mappings. ``routes``, ``tokens``, ``names``: fields. ``real``: the field of what is a token: a mask ``[B, S]``,
    lengths ``[B]``, or those of a pack. ``generated``: the field of what was sampled, a ``mask`` of all tokens or
    of the response's; ``unsampled`` stands in it for any other token (-100: the field holds labels). ``axis``:
    whether D counts all decoder layers or those captured. ``filler``: what stands where no route was captured, in
    dense layers too; ``at_padding``: what stands at padding. ``last_row``: whether a sequence has a row for its
    last token. ``padding_side``: ``"both"`` pads prompts left and responses right. ``dtype``: of the ids;
    ``"narrow"`` is uint8 where all ids fit, else ``wide``; ``"base64"`` is int32 bytes as text. ``pack``:
    ``"flat"`` is ``[T]`` and counts padding to the last sequence, ``"batched"`` is ``[1, T]``, counts it to none,
    and has ``position_ids``. ``spells_missing``: whether the stack's gates read a row of -1 as MISSING, whatever
    its filler.

    >>> from routeplane.batch import LAYOUTS
    >>> LAYOUTS["verl"].container
    'padded'
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
    unsampled: int = 0
    names: str | None = None
    pack: Literal["flat", "batched"] = "flat"
    spells_missing: bool = False


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
    spells_missing=True,
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
        name="ms_swift",
        read_from="ms-swift 3602360, 2026-08-22: Megatron GRPO, padding_free",
        container="packed",
        filler="zeros",
        at_padding="zeros",
        dtype="int64",
        real="seq_lens",
        generated="labels",
        unsampled=-100,
        pack="batched",
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
        spells_missing=True,
        axis="captured",
        padding_side="both",
        dtype="int32",
        routes="forced_routed_experts",
        mask="response",
        real="input_mask",
        generated="completion_mask",
    ),
)


#: Records of a stream of ours, as ``inspect.load_batch`` reads them.
OWN_LAYOUT = StackLayout(
    name="routeplane",
    read_from="format 1",
    container="samples",
    filler="missing",
    at_padding="missing",
    axis="captured",
    tokens="tokens",
    names="sample_id",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutBatch:
    """What a stack's batch means: the tokens of all sequences one after another, and the rows captured for them.

    ``token_ids`` int32 ``[T]``, ``generated`` bool ``[T]``, ``routes`` int16 ``[T, L, K]`` with MISSING where nothing
    was captured; sequence b is ``[offsets[b], offsets[b+1])``, its first ``captured[b]`` rows were captured. ``fed[b]``
    rows had to be: those before the last sampled token. Owns its arrays. ``RouteBatch.from_layout`` makes a batch for
    ``replaying`` of the same container.

    >>> from routeplane.batch import from_layout
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> sample = {"tokens": [5, 6, 7], "loss_mask": [1, 1], "routed_experts": np.array([[[0, 0], [3, 5]]] * 2)}
    >>> from_layout([sample], spec, layout="vllm", decoder_layers=2).captured.tolist()
    [2]
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
    return read_layout(batch, spec, layout=layout, decoder_layers=decoder_layers, captured=captured)[0]


def read_layout(
    batch: Any, spec: RouteSpec, *, layout: str | StackLayout, decoder_layers: int | None, captured: Any
) -> tuple[LayoutBatch, NDArray[np.int64]]:
    """As ``from_layout``; and the tokens that lack a row in some layer, int64, ascending."""
    kind = layout_of(layout)
    sequences = read_sequences(batch, kind)
    slots = layer_axis(sequences, spec, kind=kind, decoder_layers=decoder_layers)
    counts = captured_rows(sequences, kind, slots=slots, captured=captured)
    offsets = running_sum(np.asarray([len(each.token_ids) for each in sequences], dtype=np.int64))
    routes = np.empty((int(offsets[-1]), *spec.row_shape), dtype=np.int16)
    absent: list[NDArray[np.int64]] = []
    legal = True
    for each, (start, stop), count in zip(sequences, pairwise(offsets.tolist()), counts.tolist(), strict=True):
        taken = take_rows(each.rows[:count], spec, slots=slots, out=routes[start : start + count])
        legal = legal and taken is not None
        routes[start + count : stop] = MISSING
        absent += [] if taken is None else [taken + start, np.arange(start + count, stop)]
    found = LayoutBatch(
        spec=spec,
        names=tuple(each.name for each in sequences),
        token_ids=np.concatenate([each.token_ids for each in sequences]).astype(np.int32),
        generated=np.concatenate([each.generated for each in sequences]),
        routes=routes,
        offsets=offsets,
        captured=counts,
    )
    if not legal:
        check_legal(found, what=f"illegal routes in a batch of {kind.name}")
    return found, np.concatenate(absent)


def check_legal(batch: LayoutBatch, *, what: str) -> None:
    """Raise DataError with every finding (sample, token, layer) for rows that are not legal."""
    problems = [
        problem
        for name, (start, stop) in zip(batch.names, pairwise(batch.offsets.tolist()), strict=True)
        for problem in find_problems(batch.routes[start:stop], batch.spec, sample=name)
    ]
    if problems:
        raise DataError.from_problems(problems, what=what)


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
    mask, generated = np.asarray(batch[kind.real]), np.asarray(batch[kind.generated]) != kind.unsampled
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
        NativeSequence(name=name, token_ids=ids, generated=mask != kind.unsampled, rows=rows)
        for name, ids, mask, rows in zip(names, *columns, strict=True)
    ]


def _packed(batch: Any, kind: StackLayout) -> list[NativeSequence]:
    given = batch[kind.routes]
    if isinstance(given, Mapping):
        given = np.frombuffer(given["data"], given["dtype"]).reshape(given["shape"])
    columns = [np.asarray(batch[kind.tokens]), np.asarray(given), np.asarray(batch[kind.generated])]
    counts = np.asarray(batch[kind.real], dtype=np.int64)
    edges = running_sum(counts)
    if kind.pack == "batched":
        columns = [each[0] for each in columns if len(each) == 1]
        starts = np.flatnonzero(np.asarray(batch["position_ids"])[0] == 0)[: len(counts)]
        found = np.append(starts, len(columns[0])) if columns else starts
    else:
        starts, found = edges[:-1], edges
    lengths = [len(each) for each in columns]
    if len(found) != len(edges) or np.any(np.diff(found) < counts) or lengths != [found[-1]] * 3:
        raise refused(f"{edges[-1]} tokens, rows and mask entries of {len(counts)} sequences", f"{lengths}")
    ids, routes, mask = columns
    return [
        NativeSequence(
            name=name, token_ids=ids[a : a + n], generated=mask[a : a + n] != kind.unsampled, rows=routes[a : a + n]
        )
        for name, a, n in zip(_names(batch, kind, len(counts)), starts.tolist(), counts.tolist(), strict=True)
    ]


def _sample(sample: Any, kind: StackLayout, at: int) -> NativeSequence:
    ids, mask = np.asarray(sample[kind.tokens]), np.asarray(sample[kind.generated])
    sampled = np.zeros(len(ids), dtype=np.bool_)
    if len(mask) > len(ids):
        raise refused(f"a mask of at most {len(ids)} tokens @ sample {at}", f"{len(mask)}")
    sampled[len(ids) - len(mask) :] = mask != kind.unsampled
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
    pattern = filler_row(filler, rows.shape[2])
    # most rows differ in their last id
    found_R: NDArray[np.bool_] = rows[:, 0, -1] == pattern[-1]
    suspects = np.flatnonzero(found_R)
    found_R[suspects] = (rows[suspects] == pattern).all(axis=(1, 2))
    return found_R


# ---- rows of other arrays --------------------------------------------------------------------------------------------

# Rows between two that are taken are checked along with them up to so many bytes: shorter stretches would be checked
# one by one, and the compiled check is asked about larger ones alone.
_GAP_BYTES = 2**18
# Bytes of rows that numpy copies before it checks them: they are still in the caches.
_BLOCK_BYTES = 2**20


def take_rows(
    rows: NDArray[Any],
    spec: RouteSpec,
    *,
    out: NDArray[np.int16],
    slots: slice | list[int] | None = None,
    kept: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64] | None:
    """Copy rows of another array as int16 and check them, block by block: memory is read once.

    ``rows``: integers ``[R, D, K]`` of any width; ``slots``: where on axis D the spec's layers stand, default: D is L.
    ``out``: int16 ``[R, L, K]``, C-contiguous. ``kept``: bool ``[R]``, the rows that are taken; the others become
    MISSING, whatever they hold. Default: all.

    Returns the rows of ``out`` that lack a layer, int64, ascending; None where one of them is not legal: then all are
    copied nevertheless, for ``find_problems``. Raises DataError (VALUE_RANGE) for an id that int16 does not hold.
    """
    absent: list[NDArray[np.int64]] = []
    slots, done = slice(None) if slots is None else slots, 0
    legal = True
    for start, stop in _stretches(len(rows), kept, spec):
        out[done:start] = MISSING
        given, target = rows[start:stop], out[start:stop]
        gaps = None if kept is None else np.flatnonzero(~kept[start:stop])
        found = _take_stretch(given, spec, slots, target, None if gaps is None or not len(gaps) else gaps)
        legal = legal and found is not None
        absent += [np.arange(done, start)] + ([] if found is None else [found + start])
        done = stop
    absent.append(np.arange(done, len(rows)))
    out[done:] = MISSING
    return np.concatenate(absent) if legal else None


def _take_stretch(
    rows: NDArray[Any],
    spec: RouteSpec,
    slots: slice | list[int],
    out: NDArray[np.int16],
    gaps: NDArray[np.int64] | None,
) -> NDArray[np.int64] | None:
    at = range(rows.shape[1])[slots] if isinstance(slots, slice) else slots
    moved = move_checked(rows, out, spec=spec, slots=at, into=range(spec.num_layers), gaps=gaps)
    if moved is not None:
        if gaps is None:
            return moved
        out[gaps] = MISSING
        return np.union1d(moved, gaps)
    step = max(1, _BLOCK_BYTES // (spec.num_layers * spec.top_k * 2))
    absent: list[NDArray[np.int64] | None] = []
    for start in range(0, len(rows), step):
        inside = None if gaps is None else gaps[slice(*np.searchsorted(gaps, (start, start + step)))] - start
        part = out[start : start + step]
        copy_rows(rows[start : start + step], slots, out=part, gaps=inside)
        found = survey(part, spec)
        absent.append(None if found is None else found + start)
    found_S = [each for each in absent if each is not None]
    return np.concatenate(found_S) if len(found_S) == len(absent) else None


def _stretches(count: int, kept: NDArray[np.bool_] | None, spec: RouteSpec) -> list[tuple[int, int]]:
    """Runs of rows that are taken, with the short gaps between them."""
    if kept is None:
        return [(0, count)] if count else []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8))).reshape(-1, 2)
    if len(edges) == 0:
        return []
    wide = np.flatnonzero((edges[1:, 0] - edges[:-1, 1]) * spec.num_layers * spec.top_k * 2 > _GAP_BYTES)
    starts, stops = edges[np.append(0, wide + 1), 0], edges[np.append(wide, len(edges) - 1), 1]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def copy_rows(
    rows: NDArray[Any],
    slots: slice | list[int],
    *,
    out: NDArray[np.int16],
    gaps: NDArray[np.int64] | None = None,
) -> None:
    """The rows ``[R, D, K]`` of some layers as int16, MISSING at ``gaps``. Raises DataError (VALUE_RANGE)."""
    if rows.dtype.itemsize > 2 or rows.dtype == np.uint16:
        wanted = rows[:, slots]
        if not _fits(wanted) and (gaps is None or not _fits(np.delete(wanted, gaps, axis=0))):
            got = f"{int(wanted.min())} to {int(wanted.max())}"
            raise DataError(f"expected ids that int16 holds, got {got}", kind=ErrorKind.VALUE_RANGE)
        out[...] = wanted
    elif rows.dtype == np.int16 and rows.flags.c_contiguous and rows.size:
        _copy_int16(rows, slots, out)
    else:
        out[...] = rows[:, slots]
    if gaps is not None:
        out[gaps] = MISSING


def _fits(rows: NDArray[Any]) -> bool:
    return rows.size == 0 or (int(rows.min()) >= -(2**15) and int(rows.max()) < 2**15)


def put_rows(
    rows: NDArray[np.int16], spec: RouteSpec, *, slots: slice | list[int], out: NDArray[Any], filler: Filler
) -> NDArray[np.int64] | None:
    """Write rows ``[R, L, K]`` to some layers of ``out`` ``[R, D, K]``, and the filler to all others.

    ``out``: C-contiguous; its type holds the ids. Returns the rows that lack a layer, int64, ascending; None where
    nothing was told about them.
    """
    at = list(range(out.shape[1])[slots]) if isinstance(slots, slice) else slots
    moved = move_checked(
        rows, out, spec=spec, slots=range(spec.num_layers), into=at, filler=filler_row(filler, spec.top_k)
    )
    if moved is not None:
        return moved
    if len(at) < out.shape[1]:
        fill_rows(out, filler)
    if rows.dtype != out.dtype or isinstance(slots, list) or not rows.flags.c_contiguous or rows.size == 0:
        out[:, slots] = rows
    else:
        _tokens(out, slots, rows.shape[1])[...] = _tokens(rows, slice(None), rows.shape[1])
    return None


def filler_row(filler: Filler, top_k: int) -> NDArray[np.int16]:
    """One row of a filler, int16 ``[K]``."""
    found = np.full(top_k, MISSING if filler == "missing" else 0, dtype=np.int16)
    return np.arange(top_k, dtype=np.int16) if filler == "arange" else found


def fill_rows(rows: NDArray[Any], filler: Filler) -> None:
    """Write a filler to all rows ``[R, D, K]``, C-contiguous."""
    if rows.size:
        _, depth, top_k = rows.shape
        token = np.empty((1, depth, top_k), dtype=rows.dtype)
        token[...] = filler_row(filler, top_k)
        _tokens(rows, slice(None), depth)[...] = _tokens(token, slice(None), depth)


def _copy_int16(rows: NDArray[np.int16], slots: slice | list[int], out: NDArray[np.int16]) -> None:
    if isinstance(slots, list):
        copy_slots(rows, np.asarray(slots, dtype=np.int64), out=out)
    elif rows.shape == out.shape:
        out[...] = rows
    else:
        _tokens(out, slice(None), out.shape[1])[...] = _tokens(rows, slots, out.shape[1])


def _tokens(rows: NDArray[Any], slots: slice, layers: int) -> NDArray[np.void]:
    """Neighbouring layers of each token as one opaque element ``[R, 1]``: integers take half as long again to copy."""
    token = np.dtype((np.void, layers * rows.shape[2] * rows.itemsize))
    start = slots.indices(rows.shape[1])[0] * rows.shape[2] * rows.itemsize
    found: NDArray[np.void] = rows.reshape(len(rows), -1).view(np.uint8)[:, start : start + token.itemsize].view(token)
    return found
