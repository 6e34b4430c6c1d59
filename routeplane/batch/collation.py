"""From records to the tensors of one forward pass: collation and microbatches, whole or one rank's part of them.

Every tensor of a RouteBatch is cut by one TokenPlan and lives in memory made for it, or in ``BatchBuffers``: blocks
that an earlier, released batch wrote into. Fresh pages cost more than filling them, so a batch in touched memory is
laid out several times faster; nothing is ever taken back from a batch that was not released. What other ranks hold is
not made. Trusts a RouteRecord (no rule is checked again, no checksum compared). Knows no gate, no model and no stream;
a source is anything that yields records.

Axes: B sequences, S positions of a padded row, T packed rows, N = B*S or T rows in gate order, L layers, K top-k
slots, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from routeplane.batch.batch import ColumnParts, RouteBatch, count_first_tokens, owned_tensor, pinned_bytes
from routeplane.batch.columns import (
    NO_LABEL,
    NO_STATE,
    batch_columns,
    check_fits,
    check_pad_token,
    check_whole,
    column_fill,
    count_states,
    generated_tokens,
    label_columns,
    label_types,
    layer_slots,
    scores,
    settle_states,
    states_of,
    stored_rows,
    weights_meaning_of,
)
from routeplane.batch.layouts import Fill, balanced_rows, check_fill
from routeplane.batch.plan import PADDING, Layout, PlanOptions, RankCounts, TokenPlan, budget_groups
from routeplane.batch.slots import RankOf, Shard, records_of_rank, require_positive
from routeplane.errors import ErrorKind, UsageError, check_type, refused
from routeplane.record.aligned import AlignedColumn, ColumnType
from routeplane.record.record import checked_records
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

    from routeplane.batch.batch import RouteBatch
    from routeplane.batch.plan import TokenPlan
    from routeplane.record.interfaces import Admission, RouteSource
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["BatchBuffers", "BatchOptions", "Lease", "collate", "microbatches"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions(PlanOptions):
    """What a batch holds besides the records' own rows: the options of PlanOptions, and those of its content.

    ``seq_len``, ``pad_to_multiple_of``, ``pad_total_to_multiple_of``, ``padding_side``, ``max_length``, ``truncate``:
    as in PlanOptions.
    ``pad_token_id``: the token id at padding. ``fill``: what ``routes`` hold at padding: MISSING, or ``"balanced"``
    ids, spread over ``expert_parallel`` ranks, for gates or engines that cannot run live rows: real MISSING rows stay
    MISSING, ``pad_mask`` still says what is padding, and such a batch is not cut again. ``buffers``: the pool whose
    memory the batch is written into until it is released there; default fresh memory.

    ``labels``: whether ``columns`` hold what each row's logits are scored on, moved to that row before any cut:
    ``labels`` (int64, the next token; -100 where there is none), ``label_mask`` (bool, whether a policy sampled it),
    ``label_logprobs``, ``label_temperature`` (float32), ``label_use`` (uint8, how it can be scored) and, where records
    have sampling masks, the lists ``label_sampling_mask`` in ``column_parts``. ``label_logprobs(...)`` scores them.

    Checked when made, except for what depends on the layout and the spec; raises UsageError (ARGUMENT).

    >>> from routeplane.batch import BatchOptions
    >>> BatchOptions(seq_len=4_096, padding_side="left", pad_token_id=2).limit
    4096
    """

    pad_token_id: int = 0
    fill: Fill = "missing"
    expert_parallel: int = 1
    buffers: BatchBuffers | None = None
    labels: bool = False

    def __post_init__(self) -> None:
        PlanOptions.__post_init__(self)
        check_pad_token(self.pad_token_id)
        if self.expert_parallel != 1 and self.fill != "balanced":
            raise refused("expert_parallel with fill='balanced'", f"{self.expert_parallel} with {self.fill!r}")


#: Every default of ``collate`` and ``microbatches``.
_DEFAULTS = BatchOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """What a batch is to be, checked: everything but the records."""

    spec: RouteSpec
    layout: Layout
    options: BatchOptions
    shard: Shard

    @classmethod
    def of(cls, spec: RouteSpec, layout: Layout, options: BatchOptions, shard: Shard | None) -> _Target:
        check_type(options, BatchOptions, expected="options as BatchOptions")
        options.check_layout(layout)
        cut = Shard() if shard is None else shard
        own = spec if cut.layers is None else spec.select(cut.layers)
        check_fill(options.fill, own, expert_parallel=options.expert_parallel)
        return cls(spec=own, layout=layout, options=options.for_shard(cut), shard=cut)

    @property
    def cut(self) -> Shard | None:
        """The shard, where it cuts rows."""
        return self.shard if self.shard.cuts_rows else None

    def rows_after(self, length: int, *, rows: int = 0, count: int = 0) -> int:
        """Rows of a batch once a record of ``length`` tokens joins it."""
        return self.options.rows_after(length, layout=self.layout, rows=rows, count=count)


def collate(
    records: Iterable[RouteRecord],
    spec: RouteSpec,
    *,
    layout: Layout = "padded",
    options: BatchOptions = _DEFAULTS,
    plan: TokenPlan | None = None,
    shard: Shard | None = None,
) -> RouteBatch:
    """Make one batch of whole records, in their order.

    ``spec``: the geometry wanted: the records', or a subset of their layers, in which case the others are not copied.
    ``layout``: ``"padded"`` tensors ``[B, S]`` or ``"packed"`` ones ``[T]``. ``options``: padding, truncation, filler
    and memory. ``plan``: where each token goes, instead of what ``layout`` and ``options`` say about it
    (``TokenPlan.prompt_response``, ``join``). ``shard``: what this rank takes; rows and layers of other ranks are not
    made, and ``pad_to_multiple_of`` becomes a multiple that every cut divides.

    Returns a batch that owns its tensors, in fresh memory or in that of ``options.buffers``. Raises, before anything
    is allocated: UsageError for options that cannot be served, no records, a record longer than ``seq_len``
    (TOO_LONG), a world that does not divide what it cuts; SpecError for another geometry; DataError for a record whose
    first rows stand in another one (PREFIX) and for token columns that differ (TOKEN_COLUMN).

    >>> from routeplane.batch import BatchOptions, collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> batch = collate([record], spec, options=BatchOptions(seq_len=4, pad_token_id=9))
    >>> batch.routes.shape[:2], batch.pad_mask.tolist()
    (torch.Size([1, 4]), [[False, False, False, True]])
    """
    target = _Target.of(spec, layout, options, shard)
    given = tuple(checked_records(records))
    if not given:
        raise refused("at least one record", "none")
    given = tuple(given[index] for index in records_of_rank(len(given), rank=target.shard.data_parallel))
    if plan is None:
        return _collate(given, target, None)
    asked = [item.name for item in fields(PlanOptions) if getattr(options, item.name) != getattr(_DEFAULTS, item.name)]
    asked += ["layout"] if layout == "packed" and plan.layout != layout else []  # the other one is the default
    if asked:
        raise refused("a plan or options to make one", f"both ({', '.join(asked)})")
    lengths = [record.num_tokens for record in given]
    if plan.sources[plan.sources > 0].tolist() != lengths:
        raise refused(f"a plan for records of {lengths} tokens", f"one for {plan.sources}")
    return _collate(given, target, plan.cut(target.shard))


def microbatches(
    source: RouteSource | Iterable[RouteRecord],
    *,
    tokens: int,
    spec: RouteSpec | None = None,
    layout: Layout = "packed",
    shard: Shard | None = None,
    batches: int | Literal["even"] | None = None,
    sort_within: int = 1,
    options: BatchOptions = _DEFAULTS,
) -> Iterator[RouteBatch]:
    """Make batches of at most ``tokens`` rows, padding included, filled greedily in the source's order.

    ``source``: anything that yields records; iterated once, as batches are asked for, and not closed. A source without
    records yields no batch. ``spec``, ``layout``, ``options``: as in ``collate``; ``spec`` defaults to the source's
    own (a plain list of records has none). ``shard``: as in ``collate``; ``tokens`` counts rows before the rank's cut,
    so ranks that cut the same records form the same groups, and each data-parallel rank groups its own records. A
    source that deals records to ranks itself (``RecordDataset(world_size=)``) refuses a shard that does so too.
    ``sort_within``: how many records are held at a time and grouped by length (``budget_groups(sort=True)``); 1 keeps
    the source's order.

    ``batches``: how many batches to yield; batches of padding alone make up the number (``keys`` empty, one sequence
    of length 0). ``"even"``: as many as the data-parallel rank that has most; each rank counts all records as they
    pass, and their number need not divide. Default: as many as the records fill.

    Checks arguments at the call and records as they come. Raises, besides the errors of ``collate``: UsageError
    (TOO_LONG) for a record that no batch can hold, with its sample; DataError for a batch that the source does not
    admit (``open_stream(max_missing=)``); UsageError once the source ends, on every rank, for records that data
    parallelism does not divide or that fill more than ``batches``.

    >>> from routeplane.batch import microbatches
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> records = [watermarked_record(sample, num_tokens=3, spec=spec) for sample in range(3)]
    >>> [len(batch.keys) for batch in microbatches(records, tokens=8, spec=spec)]
    [2, 1]
    """
    rows, held = require_positive(tokens, "tokens"), require_positive(sort_within, "sort_within")
    given = getattr(source, "spec", None) if spec is None else spec
    if not isinstance(given, RouteSpec):
        raise refused("a source with a spec, or spec=", "neither")
    target = _Target.of(given, layout, options, shard)
    budget = target.options.usable(rows)
    dealt = _RankRecords(source, target, budget=budget, held=held, batches=batches)
    groups = _greedy(dealt, budget, target) if held == 1 else _sorted(dealt, budget, target, held)
    return dealt.rounds(groups, getattr(source, "admit", None))


class _RankRecords:
    """The rank's own records of a source, and the number of batches that they are to make. Iterate once."""

    def __init__(self, source: Any, target: _Target, *, budget: int, held: int, batches: object) -> None:
        self._source, self._target, self._budget = source, target, budget
        self._batches = batches if batches in (None, "even") else require_positive(batches, "batches")
        self._counts: RankCounts | None = None
        self._rank = target.shard.data_parallel
        self._by_source = False  # whether the source deals its records to ranks, and shows those of all
        _check_dealt_once(source, self._rank)
        if batches == "even":
            self._rank, self._by_source = _dealing_of(source, self._rank)
            self._counts = RankCounts(
                self._rank[1], tokens=budget, layout=target.layout, options=target.options, held=held
            )

    def __iter__(self) -> Iterator[RouteRecord]:
        count = 0
        for owner, record in self._by_rank():
            count += 1
            if self._counts is not None:
                _check_budget(record, self._budget, self._target)  # on all ranks where on one
                self._counts.add(owner, record.num_tokens)
            if owner == self._rank[0]:
                yield record
        if self._counts is None:
            records_of_rank(count, rank=self._rank)  # raises on every rank where some got one record more

    def _by_rank(self) -> Iterator[tuple[int, RouteRecord]]:
        if self._by_source:
            yield from self._source.by_rank()
            return
        for count, record in enumerate(self._source):
            yield count % self._rank[1], record

    def rounds(
        self, groups: Iterator[tuple[RouteRecord, ...]], admit: Callable[..., Admission] | None
    ) -> Iterator[RouteBatch]:
        """A batch of each group, and then batches of padding."""
        made, like = 0, None
        for group in groups:
            if isinstance(self._batches, int) and made == self._batches:
                raise refused(f"records that fill at most batches={made}", "more")
            batch = _collate(_admitted(group, admit), self._target, None)
            made, like = made + 1, _TensorTypes.of(batch)
            yield batch
        total = self._counts.most() if self._counts is not None else self._batches
        for _ in range(made, total if isinstance(total, int) else made):
            yield _padding_batch(self._target, like)


def _dealt_by(source: object) -> RankOf:
    """Which rank's records a source yields; all of them where it deals none."""
    dealt: RankOf = getattr(source, "dealt", (0, 1))
    return dealt


def _check_dealt_once(source: object, data_parallel: RankOf) -> None:
    # the same rank given to both, as happens, would leave most records to no rank, without a word
    if _dealt_by(source)[1] > 1 and data_parallel[1] > 1:
        raise refused("records dealt to ranks once", f"data_parallel={data_parallel} of a source that deals them")


def _dealing_of(source: object, data_parallel: RankOf) -> tuple[RankOf, bool]:
    """Who deals the records to ranks, and this rank among them: the source, where it does, else the shard."""
    dealt = _dealt_by(source)
    if dealt[1] == 1:
        return data_parallel, False
    if not hasattr(source, "by_rank"):
        raise refused("a source that shows the records of all ranks, for batches='even' (or their number)", "another")
    return dealt, True


@dataclass(frozen=True, kw_only=True)
class _TensorTypes:
    """What a batch of padding has in common with one before it: the same tensors are there, in the same types."""

    columns: Mapping[str, ColumnType]
    logprobs: bool
    weights_meaning: str | None = None

    @classmethod
    def of(cls, batch: RouteBatch) -> _TensorTypes:
        return cls(
            columns=batch.column_types,
            logprobs=batch.logprobs is not None,
            weights_meaning=batch.weights_meaning,
        )


def _admitted(group: tuple[RouteRecord, ...], admit: Callable[..., Admission] | None) -> tuple[RouteRecord, ...]:
    """The group, once its source has let it pass; before anything is allocated for it."""
    if admit is not None:
        admit(group).require()
    return group


def _check_record(record: RouteRecord, options: PlanOptions) -> None:
    if options.truncate == "raise":
        check_fits(record, limit=options.seq_len, what="seq_len")
        check_fits(record, limit=options.max_length, what="max_length")


def _check_budget(record: RouteRecord, budget: int, target: _Target) -> int:
    """Rows of a batch of this record alone."""
    _check_record(record, target.options)
    alone = target.rows_after(record.num_tokens)
    if alone > budget:
        raise UsageError(
            f"expected records of at most {budget} rows, got {alone} @ sample {record.key}", kind=ErrorKind.TOO_LONG
        )
    return alone


def _greedy(source: Iterable[RouteRecord], budget: int, target: _Target) -> Iterator[tuple[RouteRecord, ...]]:
    pending: list[RouteRecord] = []
    rows = 0
    for record in source:
        alone = _check_budget(record, budget, target)
        joined = target.rows_after(record.num_tokens, rows=rows, count=len(pending))
        if joined > budget:
            yield tuple(pending)
            pending, joined = [], alone
        pending.append(record)
        rows = joined
    if pending:
        yield tuple(pending)


def _sorted(
    source: Iterable[RouteRecord], budget: int, target: _Target, held: int
) -> Iterator[tuple[RouteRecord, ...]]:
    records = iter(source)
    while window := tuple(islice(records, held)):
        for record in window:
            _check_budget(record, budget, target)
        lengths = [record.num_tokens for record in window]
        for group in budget_groups(lengths, tokens=budget, layout=target.layout, options=target.options, sort=True):
            yield tuple(window[index] for index in group)


def _collate(records: tuple[RouteRecord, ...], target: _Target, plan: TokenPlan | None) -> RouteBatch:
    for record in records:
        check_whole(record)
        if plan is None:
            _check_record(record, target.options)
    slots = layer_slots(records, target.spec)
    columns = batch_columns(records, slots=slots)
    if plan is None:
        lengths = [record.num_tokens for record in records]
        plan = target.options.plan(lengths, layout=target.layout, shard=target.cut)
    if target.options.labels:
        columns |= label_columns(records)

    buffers = target.options.buffers
    lease = None if buffers is None else buffers.lease()
    gather = plan.gather if lease is None else partial(lease.gather, plan)

    def lay_out(arrays: Sequence[NDArray[Any]], fill: float, **more: Any) -> torch.Tensor:
        return owned_tensor(gather(arrays, fill=fill, **more))

    def lists(parts: Sequence[AlignedColumn]) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = [part.offsets for part in parts if part.offsets is not None]
        allocate = np.empty if lease is None else lease.array
        values, ends = plan.gather_lists([part.values for part in parts], offsets, allocate=allocate)
        return owned_tensor(values), owned_tensor(ends)

    laid = plan.gather_routes if lease is None else partial(lease.gather_routes, plan)
    routes = laid(stored_rows(records), spec=records[0].spec, slots=slots)
    states = plan.gather([states_of(record) for record in records], fill=NO_STATE)
    routes_NLK = routes.reshape(plan.num_rows, *target.spec.row_shape)
    settled_N = settle_states(states.reshape(-1), lambda rows: routes_NLK[rows])
    if target.options.fill == "balanced":
        pads = plan.padding()
        routes[pads] = balanced_rows(int(pads.sum()), target.spec, expert_parallel=target.options.expert_parallel)
    batch = RouteBatch(
        spec=target.spec,
        plan=plan,
        routes=owned_tensor(routes),
        token_ids=lay_out([record.token_ids for record in records], target.options.pad_token_id, dtype=np.int64),
        position_ids=owned_tensor(plan.positions()),
        pad_mask=owned_tensor(plan.padding()),
        generation_mask=lay_out([generated_tokens(record) for record in records], False),
        logprobs=None if (logprobs := scores(records)) is None else lay_out(logprobs, np.nan),
        lengths=owned_tensor(plan.lengths.copy()),
        cu_seqlens=owned_tensor(plan.cu_seqlens.copy()),
        cu_seqlens_padded=owned_tensor(plan.cu_seqlens_padded.copy()),
        **_lay_columns(columns, lay_out, lists),
        states=owned_tensor(settled_N.reshape(plan.shape)),
        keys=tuple(record.key for record in records),
        counts=count_states(settled_N, records=count_first_tokens(plan)),
        fill=target.options.fill,
        weights_meaning=weights_meaning_of(records),
    )
    if target.options.labels:
        _blank_last_labels(batch.columns, plan)
    return batch if buffers is None or lease is None else buffers.lend(lease, batch)


def _blank_last_labels(columns: Mapping[str, torch.Tensor], plan: TokenPlan) -> None:
    """Take the labels off the last kept token of each sequence: truncation dropped the token behind it."""
    kept_N = np.append(plan.lengths, 0)[plan.record_N]  # PADDING is -1, the entry behind all sequences
    rows = np.flatnonzero((plan.record_N != PADDING) & (plan.position_N == kept_N - 1))
    for name, value in (("labels", NO_LABEL), ("label_mask", False), ("label_logprobs", np.nan), ("label_use", 0)):
        columns[name].view(-1)[rows] = value


def _lay_columns(
    columns: Mapping[str, Sequence[AlignedColumn]],
    lay_out: Callable[[Sequence[NDArray[Any]], float], torch.Tensor],
    lists: Callable[[Sequence[AlignedColumn]], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """The fields of a batch that hold columns: one tensor where that says all of a column, else its parts."""
    whole: dict[str, torch.Tensor] = {}
    parted: dict[str, ColumnParts] = {}
    for name, parts in columns.items():
        kind = parts[0].type
        valid = lay_out([_known(part) for part in parts], False) if kind.nullable else None
        if kind.ragged:
            values, offsets = lists(parts)
            parted[name] = ColumnParts(values=values, offsets=offsets, valid=valid)
        else:
            values = lay_out([part.values for part in parts], column_fill(name, kind))
            if valid is None:
                whole[name] = values
            else:
                parted[name] = ColumnParts(values=values, valid=valid)
    return {
        "columns": MappingProxyType(whole),
        "column_parts": MappingProxyType(parted),
        "column_types": MappingProxyType({name: parts[0].type for name, parts in columns.items()}),
    }


def _known(column: AlignedColumn) -> NDArray[np.bool_]:
    return np.ones(len(column), dtype=np.bool_) if column.valid is None else column.valid


def _padding_batch(target: _Target, like: _TensorTypes | None) -> RouteBatch:
    """A batch without any token, of the fewest rows; for a rank that has no records left for a round."""
    options, buffers = target.options, target.options.buffers
    plan = options.padding_plan(layout=target.layout, shard=target.cut)
    kept = _TensorTypes(columns={}, logprobs=False) if like is None else like
    routes = target.spec.missing_rows(plan.num_rows)
    if target.options.fill == "balanced":
        routes = balanced_rows(plan.num_rows, target.spec, expert_parallel=target.options.expert_parallel)
    states = np.full(plan.shape, NO_STATE, dtype=np.int8)
    batch = RouteBatch(
        spec=target.spec,
        plan=plan,
        routes=owned_tensor(routes.reshape(*plan.shape, *target.spec.row_shape)),
        token_ids=owned_tensor(np.full(plan.shape, target.options.pad_token_id, dtype=np.int64)),
        position_ids=owned_tensor(plan.positions()),
        pad_mask=owned_tensor(plan.padding()),
        generation_mask=owned_tensor(np.zeros(plan.shape, dtype=np.bool_)),
        logprobs=owned_tensor(np.full(plan.shape, np.nan, dtype=np.float32)) if kept.logprobs else None,
        lengths=owned_tensor(plan.lengths.copy()),
        cu_seqlens=owned_tensor(plan.cu_seqlens.copy()),
        cu_seqlens_padded=owned_tensor(plan.cu_seqlens_padded.copy()),
        **_padding_columns(plan, {**(label_types({}) if options.labels else {}), **kept.columns}),
        states=owned_tensor(states),
        keys=(),
        counts=count_states(states.reshape(-1), records=0),
        fill=target.options.fill,
        weights_meaning=kept.weights_meaning,
    )
    return batch if buffers is None else buffers.lend(buffers.lease(), batch)


def _padding_columns(plan: TokenPlan, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Columns of these types without a token."""
    none = {
        name: AlignedColumn(
            type=kind,
            values=np.empty((0, *kind.shape), dtype=kind.dtype),
            offsets=np.zeros(1, dtype=np.int64) if kind.ragged else None,
            valid=np.empty(0, dtype=np.bool_) if kind.nullable else None,
        )
        for name, kind in types.items()
    }

    def lay_out(arrays: Sequence[NDArray[Any]], fill: float) -> torch.Tensor:
        return owned_tensor(np.full((*plan.shape, *arrays[0].shape[1:]), fill, dtype=arrays[0].dtype))

    def lists(parts: Sequence[AlignedColumn]) -> tuple[torch.Tensor, torch.Tensor]:
        return owned_tensor(parts[0].values.copy()), owned_tensor(np.zeros(plan.num_rows + 1, dtype=np.int64))

    return _lay_columns({name: [column] for name, column in none.items()}, lay_out, lists)


class BatchBuffers:
    """A pool for ``collate(buffers=)`` and ``microbatches(buffers=)``. Safe for several threads; of one process.

    What the records' own arrays are laid out into is pooled: ``routes``, ``token_ids``, ``generation_mask``,
    ``logprobs``, ``columns`` and ``column_parts``. The rest (positions, pad mask, offsets: some hundredth of the
    routes) is fresh.

    A batch made with a pool is valid until ``release(batch)``, and no other live batch shares its memory. Releasing
    empties every tensor of the batch: a late use, a backward pass included, is an error of torch, and never another
    batch's data. Views made before (``layer(id)``) cannot be emptied; they must not outlive the batch. Nor must copies
    under way: wait for a ``to(device, non_blocking=True)`` before releasing what it reads. A batch that is dropped
    instead takes its memory along.

    The pool holds as much as was live at once, and grows to the largest batch.

    ``pin``: the pooled tensors are in page-locked memory, which ``to(device, non_blocking=True)`` copies from while the
    step runs; the fresh ones are not. Raises UsageError (ARGUMENT) where torch sees no accelerator.

    >>> from routeplane.batch import BatchOptions, collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> buffers = BatchBuffers()
    >>> batch = collate([record], spec, options=BatchOptions(buffers=buffers))
    >>> buffers.nbytes > 0
    True
    >>> buffers.release(batch)
    """

    def __init__(self, *, pin: bool = False) -> None:
        if pin:
            pinned_bytes(1)  # refused now, not at the first batch
        self._allocate = pinned_bytes if pin else _plain_bytes
        self._lock = threading.Lock()
        self._free: list[Lease] = []
        # weak: a batch that is never released must not live for ever
        self._lent: WeakKeyDictionary[RouteBatch, Lease] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes that the pool and its unreleased batches hold."""
        with self._lock:
            return sum(lease.nbytes for lease in (*self._free, *self._lent.values()))

    def lease(self) -> Lease:
        """Blocks for one batch alone: those of the batch released last, else an empty lease."""
        with self._lock:
            return self._free.pop() if self._free else Lease(self._allocate)

    def lend(self, lease: Lease, batch: RouteBatch) -> RouteBatch:
        """The batch, from here on the holder of what it was written into."""
        with self._lock:
            self._lent[batch] = lease
        return batch

    def release(self, batch: RouteBatch) -> None:
        """Empty the batch's tensors and take back its memory.

        Raises UsageError (CLOSED) for a batch that holds none of this pool: released already, or another one (what
        ``to`` and ``pin_memory`` return are batches of their own).
        """
        with self._lock:
            lease = self._lent.pop(batch, None)
        if lease is None:
            raise UsageError("expected a batch that holds memory of this pool, got another", kind=ErrorKind.CLOSED)
        for tensor in batch.tensors():
            _empty(tensor)
        lease.rewind()
        with self._lock:
            self._free.append(lease)

    def releasing(self, batches: Iterable[RouteBatch]) -> Generator[RouteBatch]:
        """The same batches, each released when the next one is asked for, and the last one at the end or on ``break``.

        For a loop that keeps no batch, prefetched or not.
        """
        for batch in batches:
            try:
                yield batch
            finally:
                self.release(batch)


class Lease:
    """The blocks of one batch, handed out in the order of asking; made by ``allocate``, which is given a size."""

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        self._allocate = allocate
        self._blocks: list[NDArray[np.uint8]] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def rewind(self) -> None:
        """Begin again with the first block."""
        self._used = 0

    def gather(
        self,
        plan: TokenPlan,
        columns: Sequence[NDArray[Any]],
        *,
        fill: bool | int | float,
        dtype: DTypeLike | None = None,
        slots: Sequence[int] | None = None,
    ) -> NDArray[Any]:
        """``plan.gather`` into the next block: C-contiguous, every row written. Raises as it does."""
        first = columns[0]
        target = np.dtype(first.dtype if dtype is None else dtype).newbyteorder("=")
        trailing = first.shape[1:] if slots is None else (len(slots), *first.shape[2:])
        out = self.array((*plan.shape, *trailing), target)
        return plan.gather(columns, fill=fill, dtype=dtype, slots=slots, out=out)

    def gather_routes(
        self, plan: TokenPlan, columns: Sequence[NDArray[Any]], *, spec: RouteSpec, slots: Sequence[int] | None
    ) -> NDArray[np.int16]:
        """``plan.gather_routes`` into the next block. Raises as it does."""
        layers = spec.num_layers if slots is None else len(slots)
        out = self.array((*plan.shape, layers, spec.top_k), np.dtype(np.int16))
        return plan.gather_routes(columns, spec=spec, slots=slots, out=out)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array over the next block, not yet written."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._used == len(self._blocks):
            self._blocks.append(self._allocate(size))
        elif self._blocks[self._used].nbytes < size:
            self._blocks[self._used] = self._allocate(size)
        block = self._blocks[self._used]
        self._used += 1
        return block[:size].view(dtype).reshape(shape)


def _plain_bytes(size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


def _empty(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; every remaining reference to the tensor sees it empty."""
    if tensor.is_inference():
        tensor.data = tensor.new_empty(0)  # set_ is refused outside of inference mode; no backward can follow
    else:
        tensor.set_()  # type: ignore[call-overload]  # counts as a write, so that autograd refuses what it saved
