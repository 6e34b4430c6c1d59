"""From records to the tensors of one forward pass: collation and microbatches, whole or one rank's part of them.

Every tensor of a RouteBatch is cut by one TokenPlan and lives in memory made for it; what other ranks hold is not made.
Trusts a RouteRecord (no rule is checked again, no checksum compared). Knows no gate, no model and no stream; a source
is anything that yields records.

Axes: B sequences, S positions of a padded row, T packed rows, N = B*S or T rows in gate order, L layers, K top-k
slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.batch import columns as collation
from routeplane.batch.batch import RouteBatch, count_first_tokens, filler, owned_tensor, token_logprobs
from routeplane.batch.budget import RankCounts, budget_groups
from routeplane.batch.layouts import Fill, balanced_rows, check_fill
from routeplane.batch.plan import Layout, PaddingSide, PlanOptions, TokenPlan, Truncate
from routeplane.batch.shard import RankOf, Shard, records_of_rank
from routeplane.batch.slots import require_positive
from routeplane.errors import ErrorKind, UsageError, refused
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from routeplane.batch.pool import BatchBuffers
    from routeplane.record.interfaces import Admission, RouteSource
    from routeplane.record.record import RouteRecord

__all__ = ["RouteBatch", "collate", "microbatches", "token_logprobs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What a batch is to be, checked: everything but the records."""

    spec: RouteSpec
    options: PlanOptions
    pad_token_id: int
    shard: Shard
    fill: Fill
    expert_parallel: int
    buffers: BatchBuffers | None

    @classmethod
    def of(cls, spec: RouteSpec, shard: Shard | None, **more: Any) -> _Wanted:
        """``more``: the other fields of this class and of PlanOptions, by name."""
        collation.check_pad_token(more["pad_token_id"])
        cut = Shard() if shard is None else shard
        own = _own_layers(spec, cut)
        check_fill(more["fill"], own, expert_parallel=more["expert_parallel"])
        plain = {name: more.pop(name) for name in ("pad_token_id", "fill", "expert_parallel", "buffers")}
        return cls(spec=own, options=PlanOptions(**more).for_shard(cut), shard=cut, **plain)


def collate(
    records: Iterable[RouteRecord],
    spec: RouteSpec,
    *,
    layout: Layout = "padded",
    seq_len: int | None = None,
    pad_to_multiple_of: int = 1,
    padding_side: PaddingSide = "right",
    max_length: int | None = None,
    truncate: Truncate = "raise",
    pad_token_id: int = 0,
    plan: TokenPlan | None = None,
    shard: Shard | None = None,
    fill: Fill = "missing",
    expert_parallel: int = 1,
    buffers: BatchBuffers | None = None,
) -> RouteBatch:
    """One batch of whole records, in their order, in fresh memory, or in that of ``buffers`` until released there.

    ``spec``: the geometry wanted: the records', or a subset of their layers, in which case the others are not copied.
    ``seq_len``: S of a padded batch (default: the longest record); ``pad_to_multiple_of``: what S (padded) or each
    record's rows (packed) are rounded up to. ``max_length``, ``truncate``: as in ``PlanOptions``. ``plan``: where each
    token goes, instead of all these (``TokenPlan.prompt_response``, ``join``).
    ``shard``: what this rank takes; rows and layers of other ranks are not made, and the multiple becomes one that
    every cut divides. ``fill="balanced"``: ids at padding as ``RouteBatch.fill_padding``, default MISSING.

    Raises, before anything is allocated: UsageError for options that cannot be served, no records, a record longer
    than ``seq_len`` (TOO_LONG), a world that does not divide what it cuts; SpecError for another geometry; DataError
    for a record whose first rows stand in another one (PREFIX) and for token columns that differ (TOKEN_COLUMN).
    """
    wanted = _Wanted.of(
        spec,
        shard,
        layout=layout,
        seq_len=seq_len,
        pad_to_multiple_of=pad_to_multiple_of,
        padding_side=padding_side,
        max_length=max_length,
        truncate=truncate,
        pad_token_id=pad_token_id,
        fill=fill,
        expert_parallel=expert_parallel,
        buffers=buffers,
    )
    given = tuple(records)
    if not given:
        raise UsageError("expected at least one record, got none", kind=ErrorKind.ARGUMENT)
    given = tuple(given[index] for index in records_of_rank(len(given), rank=wanted.shard.data_parallel))
    if plan is None:
        return _collate(given, wanted, None)
    if wanted.options != PlanOptions().for_shard(wanted.shard):
        raise UsageError("expected a plan or options to make one, got both", kind=ErrorKind.ARGUMENT)
    lengths = [record.num_tokens for record in given]
    if plan.sources.tolist() != lengths:
        raise UsageError(
            f"expected a plan for records of {lengths} tokens, got one for {plan.sources}", kind=ErrorKind.ARGUMENT
        )
    return _collate(given, wanted, plan.cut(wanted.shard))


def microbatches(
    source: RouteSource | Iterable[RouteRecord],
    *,
    tokens: int,
    spec: RouteSpec | None = None,
    layout: Layout = "packed",
    seq_len: int | None = None,
    pad_to_multiple_of: int = 1,
    padding_side: PaddingSide = "right",
    max_length: int | None = None,
    truncate: Truncate = "raise",
    pad_token_id: int = 0,
    sort_within: int = 1,
    batches: int | Literal["even"] | None = None,
    shard: Shard | None = None,
    fill: Fill = "missing",
    expert_parallel: int = 1,
    buffers: BatchBuffers | None = None,
) -> Iterator[RouteBatch]:
    """Batches of at most ``tokens`` rows, padding included, filled greedily in the source's order.

    ``source`` is iterated once, as batches are asked for, and not closed; one that has no records yields no batch.
    ``spec``: as in ``collate``; default the source's own (a plain list of records has none). Other arguments as in
    ``collate``. ``sort_within``: records that are held at a time and grouped by length (``budget_groups(sort=True)``),
    1 for the source's order. ``shard``: ``tokens`` counts rows before the rank's cut, so ranks that cut the same
    records form the same groups; each data-parallel rank groups its own records. A source that deals records to ranks
    itself (``RecordDataset(world_size=)``) and a shard that does are refused together.

    ``batches``: how many to come to, by batches of padding alone at the end (``keys`` empty, one sequence of length 0);
    ``"even"``: as many as the data-parallel rank that has most, which each rank counts as all records go by it, and
    then their number need not divide. Default: what the records fill.

    Arguments are checked at the call, records as they come: besides the errors of ``collate``, a record that no batch
    can hold is a UsageError (TOO_LONG) that names its sample, a batch that the source does not admit
    (``open_stream(max_missing=)``) is a DataError, records that data parallelism does not divide are a UsageError on
    every rank once the source ends, and so are ones that fill more than ``batches``.
    """
    budget, held = require_positive(tokens, "tokens"), require_positive(sort_within, "sort_within")
    given = getattr(source, "spec", None) if spec is None else spec
    if not isinstance(given, RouteSpec):
        raise UsageError("expected a source with a spec, or spec=, got neither", kind=ErrorKind.ARGUMENT)
    wanted = _Wanted.of(
        given,
        shard,
        layout=layout,
        seq_len=seq_len,
        pad_to_multiple_of=pad_to_multiple_of,
        padding_side=padding_side,
        max_length=max_length,
        truncate=truncate,
        pad_token_id=pad_token_id,
        fill=fill,
        expert_parallel=expert_parallel,
        buffers=buffers,
    )
    dealt = _Dealt(source, wanted, budget=budget, held=held, batches=batches)
    groups = _greedy(dealt, budget, wanted.options) if held == 1 else _sorted(dealt, budget, wanted.options, held)
    return dealt.rounds(groups, getattr(source, "admit", None))


def _own_layers(spec: RouteSpec, shard: Shard) -> RouteSpec:
    return spec if shard.layers is None else spec.select(shard.layers)


class _Dealt:
    """The rank's own records of a source, and the number of batches that they are to make. Iterate once."""

    def __init__(self, source: Any, wanted: _Wanted, *, budget: int, held: int, batches: object) -> None:
        self._source, self._wanted, self._budget = source, wanted, budget
        self._wanted_batches = batches if batches in (None, "even") else require_positive(batches, "batches")
        self._counts: RankCounts | None = None
        self._rank = wanted.shard.data_parallel
        self._by_source = False  # whether the source deals its records to ranks, and shows those of all
        _check_dealt_once(source, self._rank)
        if batches == "even":
            self._rank, self._by_source = _dealing_of(source, self._rank)
            self._counts = RankCounts(self._rank[1], tokens=budget, options=wanted.options, held=held)

    def __iter__(self) -> Iterator[RouteRecord]:
        count = 0
        for owner, record in self._by_rank():
            count += 1
            if self._counts is not None:
                _check_budget(record, self._budget, self._wanted.options)  # on all ranks where on one
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
            if isinstance(self._wanted_batches, int) and made == self._wanted_batches:
                raise refused(f"records that fill at most batches={made}", "more")
            batch = _collate(_admitted(group, admit), self._wanted, None)
            made, like = made + 1, _Kept.of(batch)
            yield batch
        total = self._counts.most() if self._counts is not None else self._wanted_batches
        for _ in range(made, total if isinstance(total, int) else made):
            yield _padding_batch(self._wanted, like)


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
class _Kept:
    """What a batch of padding has in common with one before it: the same tensors are there, in the same types."""

    columns: dict[str, torch.dtype]
    logprobs: bool

    @classmethod
    def of(cls, batch: RouteBatch) -> _Kept:
        types = {name: values.dtype for name, values in batch.columns.items()}
        return cls(columns=types, logprobs=batch.logprobs is not None)


def _admitted(group: tuple[RouteRecord, ...], admit: Callable[..., Admission] | None) -> tuple[RouteRecord, ...]:
    """The group, once its source has let it pass; before anything is allocated for it."""
    if admit is not None:
        admit(group).require()
    return group


def _check_record(record: RouteRecord, options: PlanOptions) -> None:
    if options.truncate == "raise":
        collation.check_fits(record, limit=options.seq_len, what="seq_len")
        collation.check_fits(record, limit=options.max_length, what="max_length")


def _check_budget(record: RouteRecord, budget: int, options: PlanOptions) -> int:
    """Rows of a batch of this record alone."""
    _check_record(record, options)
    alone = options.rows_after(record.num_tokens, rows=0, count=0)
    if alone > budget:
        raise UsageError(
            f"expected records of at most {budget} rows, got {alone} @ sample {record.key}", kind=ErrorKind.TOO_LONG
        )
    return alone


def _greedy(source: Iterable[RouteRecord], budget: int, options: PlanOptions) -> Iterator[tuple[RouteRecord, ...]]:
    pending: list[RouteRecord] = []
    rows = 0
    for record in source:
        alone = _check_budget(record, budget, options)
        joined = options.rows_after(record.num_tokens, rows=rows, count=len(pending))
        if joined > budget:
            yield tuple(pending)
            pending, joined = [], alone
        pending.append(record)
        rows = joined
    if pending:
        yield tuple(pending)


def _sorted(
    source: Iterable[RouteRecord], budget: int, options: PlanOptions, held: int
) -> Iterator[tuple[RouteRecord, ...]]:
    records = iter(source)
    while window := tuple(islice(records, held)):
        for record in window:
            _check_budget(record, budget, options)
        lengths = [record.num_tokens for record in window]
        for group in budget_groups(lengths, tokens=budget, options=options, sort=True):
            yield tuple(window[index] for index in group)


def _collate(records: tuple[RouteRecord, ...], wanted: _Wanted, plan: TokenPlan | None) -> RouteBatch:
    for record in records:
        collation.check_whole(record)
        if plan is None:
            _check_record(record, wanted.options)
    slots = collation.layer_slots(records, wanted.spec)
    fills = collation.check_token_columns(records)
    if plan is None:
        cut = wanted.shard if wanted.shard.cuts_rows else None
        plan = wanted.options.plan([record.num_tokens for record in records], shard=cut)

    lease = None if wanted.buffers is None else wanted.buffers.lease()
    gather = plan.gather if lease is None else partial(lease.gather, plan)

    def lay_out(columns: Sequence[NDArray[Any]], fill: float, **more: Any) -> torch.Tensor:
        return owned_tensor(gather(columns, fill=fill, **more))

    laid = plan.gather_routes if lease is None else partial(lease.gather_routes, plan)
    routes = laid(collation.stored_rows(records), spec=records[0].spec, slots=slots)
    states = plan.gather([collation.states_of(record) for record in records], fill=collation.NO_STATE)
    routes_NLK = routes.reshape(plan.num_rows, *wanted.spec.row_shape)
    settled_N = collation.settle_states(states.reshape(-1), lambda rows: routes_NLK[rows])
    if wanted.fill == "balanced":
        pads = plan.padding()
        routes[pads] = balanced_rows(int(pads.sum()), wanted.spec, expert_parallel=wanted.expert_parallel)
    batch = RouteBatch(
        spec=wanted.spec,
        plan=plan,
        routes=owned_tensor(routes),
        token_ids=lay_out([record.token_ids for record in records], wanted.pad_token_id, dtype=np.int64),
        position_ids=owned_tensor(plan.positions()),
        pad_mask=owned_tensor(plan.padding()),
        generation_mask=lay_out([collation.generated_tokens(record) for record in records], False),
        logprobs=None if (scores := collation.scores(records)) is None else lay_out(scores, np.nan),
        lengths=owned_tensor(plan.lengths.copy()),
        cu_seqlens=owned_tensor(plan.cu_seqlens.copy()),
        cu_seqlens_padded=owned_tensor(plan.cu_seqlens_padded.copy()),
        columns=MappingProxyType(
            {name: lay_out(collation.column_arrays(records, name), fill) for name, fill in fills.items()}
        ),
        states=owned_tensor(settled_N.reshape(plan.shape)),
        keys=tuple(record.key for record in records),
        counts=collation.count_states(settled_N, records=count_first_tokens(plan)),
        fill=wanted.fill,
    )
    return batch if wanted.buffers is None or lease is None else wanted.buffers.lend(lease, batch)


def _padding_batch(wanted: _Wanted, like: _Kept | None) -> RouteBatch:
    """A batch without any token, of the fewest rows; for a rank that has no records left for a round."""
    plan = wanted.options.padding_plan(shard=wanted.shard if wanted.shard.cuts_rows else None)
    kept = _Kept(columns={}, logprobs=False) if like is None else like
    routes = wanted.spec.missing_rows(plan.num_rows)
    if wanted.fill == "balanced":
        routes = balanced_rows(plan.num_rows, wanted.spec, expert_parallel=wanted.expert_parallel)
    states = np.full(plan.shape, collation.NO_STATE, dtype=np.int8)
    batch = RouteBatch(
        spec=wanted.spec,
        plan=plan,
        routes=owned_tensor(routes.reshape(*plan.shape, *wanted.spec.row_shape)),
        token_ids=owned_tensor(np.full(plan.shape, wanted.pad_token_id, dtype=np.int64)),
        position_ids=owned_tensor(plan.positions()),
        pad_mask=owned_tensor(plan.padding()),
        generation_mask=owned_tensor(np.zeros(plan.shape, dtype=np.bool_)),
        logprobs=owned_tensor(np.full(plan.shape, np.nan, dtype=np.float32)) if kept.logprobs else None,
        lengths=owned_tensor(plan.lengths.copy()),
        cu_seqlens=owned_tensor(plan.cu_seqlens.copy()),
        cu_seqlens_padded=owned_tensor(plan.cu_seqlens_padded.copy()),
        columns=MappingProxyType({name: filler(plan.shape, kind) for name, kind in kept.columns.items()}),
        states=owned_tensor(states),
        keys=(),
        counts=collation.count_states(states.reshape(-1), records=0),
        fill=wanted.fill,
    )
    return batch if wanted.buffers is None else wanted.buffers.lend(wanted.buffers.lease(), batch)
