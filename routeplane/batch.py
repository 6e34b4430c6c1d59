"""From records to the tensors of one forward pass: collation, microbatches, and what a trainer reads from them.

Owns the torch side of alignment: every tensor of a RouteBatch is cut by one TokenPlan and lives in memory made for it.
Trusts a RouteRecord (no rule is checked again, no checksum compared). Knows no gate, no model and no stream; a source
is anything that yields records.

Axes: B sequences, S positions of a padded row, T packed rows, N = B*S or T rows in gate order, L layers, K top-k
slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.align import Layout, PaddingSide, PlanOptions, TokenPlan, require_positive
from routeplane.coverage import Coverage, settle_partial
from routeplane.errors import DataError, ErrorKind, MissingExtraError, UsageError
from routeplane.spec import MISSING, RouteSpec

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError(
        "routeplane.batch needs torch: pip install 'routeplane[torch]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.admission import Admission
    from routeplane.buffers import BatchBuffers
    from routeplane.ports import RouteSource
    from routeplane.record import RecordKey, RouteRecord

__all__ = ["RouteBatch", "collate", "microbatches", "token_logprobs"]

# Rows whose logits are widened to float32 at a time: bounds what `token_logprobs` allocates without gradients.
_LOGIT_ROWS = 2_048


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteBatch:
    """Records as the tensors of one forward pass, all cut by ``plan``. The batch owns its tensors; records may go.

    Shapes are padded ``[B, S]`` or packed ``[T]``, here ``[...]``:

    * ``routes``: int16 ``[..., L, K]`` for the layers of ``spec``; MISSING where not captured and at padding
    * ``token_ids``: int64 ``[...]``, the pad token id at padding
    * ``position_ids``: int64 ``[...]``, 0 at each first token; padding as in ``TokenPlan.positions``
    * ``pad_mask``: bool ``[...]``, True at padding
    * ``generation_mask``: bool ``[...]``, True for tokens that the policy sampled (spans of kind generation)
    * ``logprobs``: float32 ``[...]``, of each token given those before it, NaN where there is none; None if no record
      has any
    * ``lengths`` int64 ``[B]``, ``cu_seqlens`` and ``cu_seqlens_padded`` int32 ``[B+1]``: as in ``TokenPlan``
    * ``columns``: the records' token columns ``[...]``, in their types; 0, False or NaN at padding
    * ``keys``: the record behind each sequence; ``counts``: rows by capture state, padding not counted
    """

    spec: RouteSpec
    plan: TokenPlan
    routes: torch.Tensor
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    pad_mask: torch.Tensor
    generation_mask: torch.Tensor
    logprobs: torch.Tensor | None
    lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    keys: tuple[RecordKey, ...]
    counts: Coverage

    @property
    def layout(self) -> Layout:
        """``"padded"`` or ``"packed"``."""
        return self.plan.layout

    @property
    def num_rows(self) -> int:
        """N, padding included: the rows that each gate sees in one forward."""
        return self.plan.num_rows

    @property
    def unexplained_missing(self) -> int:
        """Tokens that an engine was fed and whose rows are yet absent in some layer; final tokens are explained."""
        return self.counts.missing

    def coverage(self) -> Coverage:
        """Rows by capture state, for the layers of ``spec``."""
        return self.counts

    def layer(self, layer_id: int) -> torch.Tensor:
        """Rows of one decoder layer in gate order (``b*S + s`` or ``t``): int16 ``[N, K]``, a view of ``routes``.

        Raises SpecError for a layer that ``spec`` does not have.
        """
        slot = self.spec.slot(layer_id)
        return self.routes.view(self.num_rows, *self.spec.row_shape)[:, slot]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RouteBatch:
        """The batch with every tensor on ``device``; tensors already there are shared.

        ``non_blocking`` copies are asynchronous from pinned memory only: keep the pinned batch until they are done.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RouteBatch:
        """The batch in page-locked memory; itself where torch sees no accelerator to pin it for."""
        return self._map(torch.Tensor.pin_memory) if torch.accelerator.is_available() else self

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RouteBatch:
        changed: dict[str, Any] = {
            item.name: change(value)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), torch.Tensor)
        }
        columns = MappingProxyType({name: change(value) for name, value in self.columns.items()})
        return replace(self, columns=columns, **changed)

    def model_inputs(self) -> dict[str, torch.Tensor | bool]:
        """Keyword arguments for a Transformers causal model; tensors are shared with the batch, or views of it.

        Padded: ``input_ids``, ``attention_mask`` (int64, 0 at padding), ``position_ids``, each ``[B, S]``. Packed:
        ``input_ids`` and ``position_ids`` ``[1, T]``: with no mask and no cache, Transformers attends within each run
        of rising positions. A cache would switch that off without a word, so ``use_cache=False`` comes along. Packed
        rows need attention in every layer: a recurrent layer carries its state across sequences.
        """
        if self.layout == "padded":
            return {
                "input_ids": self.token_ids,
                "attention_mask": (~self.pad_mask).long(),
                "position_ids": self.position_ids,
                "use_cache": False,
            }
        return {"input_ids": self.token_ids[None], "position_ids": self.position_ids[None], "use_cache": False}

    def __reduce__(self) -> tuple[object, ...]:
        # a mappingproxy does not pickle, and loader workers send batches to their trainer
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        return _rebuild_batch, ({**content, "columns": dict(self.columns)},)


def _rebuild_batch(content: dict[str, Any]) -> RouteBatch:
    return RouteBatch(**{**content, "columns": MappingProxyType(content["columns"])})


def collate(
    records: Iterable[RouteRecord],
    spec: RouteSpec,
    *,
    layout: Layout = "padded",
    seq_len: int | None = None,
    pad_to_multiple_of: int = 1,
    padding_side: PaddingSide = "right",
    pad_token_id: int = 0,
    buffers: BatchBuffers | None = None,
) -> RouteBatch:
    """One batch of whole records, in their order, in fresh memory, or in that of ``buffers`` until released there.

    ``spec``: the geometry wanted: the records', or a subset of their layers, in which case the others are not copied.
    ``seq_len``: S of a padded batch (default: the longest record); ``pad_to_multiple_of``: what S (padded) or each
    record's rows (packed) are rounded up to. Padding rows are MISSING.

    Raises, before anything is allocated: UsageError for options that cannot be served, no records, a record longer
    than ``seq_len`` (TOO_LONG); SpecError for another geometry; DataError for a record whose first rows stand in
    another one (PREFIX) and for token columns that differ (TOKEN_COLUMN).
    """
    options = PlanOptions(
        layout=layout, seq_len=seq_len, pad_to_multiple_of=pad_to_multiple_of, padding_side=padding_side
    )
    _check_pad_token(pad_token_id)
    given = tuple(records)
    if not given:
        raise UsageError("expected at least one record, got none", kind=ErrorKind.ARGUMENT)
    return _collate(given, spec, options, pad_token_id, buffers)


def microbatches(
    source: RouteSource | Iterable[RouteRecord],
    *,
    tokens: int,
    spec: RouteSpec | None = None,
    layout: Layout = "packed",
    seq_len: int | None = None,
    pad_to_multiple_of: int = 1,
    padding_side: PaddingSide = "right",
    pad_token_id: int = 0,
    buffers: BatchBuffers | None = None,
) -> Iterator[RouteBatch]:
    """Batches of at most ``tokens`` rows, padding included, filled greedily in the source's order.

    ``source`` is iterated once, as batches are asked for, and not closed; one that has no records yields no batch.
    ``spec``: as in ``collate``; default the source's own (a plain list of records has none). Other arguments as in
    ``collate``. Arguments are checked at the call, records as they come: besides the errors of ``collate``, a record
    that no batch can hold is a UsageError (TOO_LONG) that names its sample, and a batch that the source does not admit
    (``open_stream(max_missing=)``) is a DataError.
    """
    budget = require_positive(tokens, "tokens")
    options = PlanOptions(
        layout=layout, seq_len=seq_len, pad_to_multiple_of=pad_to_multiple_of, padding_side=padding_side
    )
    _check_pad_token(pad_token_id)
    wanted = getattr(source, "spec", None) if spec is None else spec
    if not isinstance(wanted, RouteSpec):
        raise UsageError("expected a source with a spec, or spec=, got neither", kind=ErrorKind.ARGUMENT)
    admit = getattr(source, "admit", None)
    return (
        _collate(_admitted(group, admit), wanted, options, pad_token_id, buffers)
        for group in _greedy(source, budget, options)
    )


def _admitted(group: tuple[RouteRecord, ...], admit: Callable[..., Admission] | None) -> tuple[RouteRecord, ...]:
    """The group, once its source has let it pass; before anything is allocated for it."""
    if admit is not None:
        admit(group).require()
    return group


def token_logprobs(logits: torch.Tensor, batch: RouteBatch) -> torch.Tensor:
    """Log-probability of every token given those before it: float32, shaped like ``batch.token_ids``.

    ``logits``: ``[..., V]`` with the batch's N rows in gate order, as a model answers ``batch.model_inputs()``. NaN at
    first tokens and at padding, as in ``batch.logprobs``: pick with a mask, never multiply by one (0 * NaN is NaN).
    Differentiable. Raises UsageError (ARGUMENT) for logits of another shape or a vocabulary that lacks a token.
    """
    if logits.ndim < 2 or logits[..., 0].numel() != batch.num_rows:
        raise UsageError(
            f"expected logits of {batch.num_rows} rows, got shape {list(logits.shape)}", kind=ErrorKind.ARGUMENT
        )
    before_N = batch.plan.predecessors()
    rows = np.flatnonzero(before_N >= 0)
    found_N = torch.full((batch.num_rows,), torch.nan, dtype=torch.float32, device=logits.device)
    if len(rows) == 0:
        return found_N.view(batch.token_ids.shape)
    after = torch.from_numpy(rows).to(logits.device)
    before = torch.from_numpy(before_N[rows]).to(logits.device)
    targets = batch.token_ids.view(-1).to(logits.device)[after]
    if int(targets.max()) >= logits.shape[-1]:
        raise UsageError(
            f"expected logits over more than {int(targets.max())} tokens, got {logits.shape[-1]}",
            kind=ErrorKind.ARGUMENT,
        )
    flat_NV = logits.reshape(batch.num_rows, -1)
    steps = [slice(start, start + _LOGIT_ROWS) for start in range(0, len(rows), _LOGIT_ROWS)]
    found_N[after] = torch.cat([_pick_logprobs(flat_NV[before[step]], targets[step]) for step in steps])
    return found_N.view(batch.token_ids.shape)


def _pick_logprobs(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    wide_NV = logits_NV.float()
    return wide_NV.gather(1, tokens_N[:, None])[:, 0] - wide_NV.logsumexp(dim=1)


def _greedy(source: Iterable[RouteRecord], budget: int, options: PlanOptions) -> Iterator[tuple[RouteRecord, ...]]:
    pending: list[RouteRecord] = []
    rows = 0
    for record in source:
        _check_fits(record, options)
        alone = options.rows_after(record.num_tokens, rows=0, count=0)
        if alone > budget:
            raise UsageError(
                f"expected records of at most {budget} rows, got {alone} @ sample {record.key}", kind=ErrorKind.TOO_LONG
            )
        joined = options.rows_after(record.num_tokens, rows=rows, count=len(pending))
        if joined > budget:
            yield tuple(pending)
            pending, joined = [], alone
        pending.append(record)
        rows = joined
    if pending:
        yield tuple(pending)


def _collate(
    records: tuple[RouteRecord, ...],
    spec: RouteSpec,
    options: PlanOptions,
    pad_token_id: int,
    buffers: BatchBuffers | None,
) -> RouteBatch:
    for record in records:
        _check_fits(record, options)
        _check_whole(record)
    slots = _slots(records, spec)
    fills = _check_columns(records)
    plan = options.plan([record.num_tokens for record in records])
    lease = None if buffers is None else buffers.lease()
    gather = plan.gather if lease is None else partial(lease.gather, plan)

    def lay_out(columns: Sequence[NDArray[Any]], fill: float, **more: Any) -> torch.Tensor:
        # never a record's own array: it is read-only and may be mapped, where a write through torch kills the process
        return torch.from_numpy(gather(columns, fill=fill, **more))

    batch = RouteBatch(
        spec=spec,
        plan=plan,
        routes=lay_out([record.routes for record in records], MISSING, slots=slots),
        token_ids=lay_out([record.token_ids for record in records], pad_token_id, dtype=np.int64),
        position_ids=torch.from_numpy(plan.positions()),
        pad_mask=torch.from_numpy(plan.padding()),
        generation_mask=lay_out([_generated(record) for record in records], False),
        logprobs=None if (scores := _logprobs(records)) is None else lay_out(scores, np.nan),
        lengths=torch.from_numpy(plan.lengths.copy()),
        cu_seqlens=torch.from_numpy(plan.cu_seqlens.copy()),
        cu_seqlens_padded=torch.from_numpy(plan.cu_seqlens_padded.copy()),
        columns=MappingProxyType(
            {name: lay_out([record.columns[name] for record in records], fill) for name, fill in fills.items()}
        ),
        keys=tuple(record.key for record in records),
        counts=reduce(Coverage.merge, (_coverage(record, slots) for record in records)),
    )
    return batch if buffers is None or lease is None else buffers.lend(lease, batch)


def _check_pad_token(pad_token_id: object) -> None:
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int) or not 0 <= pad_token_id < 2**31:
        raise UsageError(
            f"expected pad_token_id as a token id, got {pad_token_id!r} (labels are the trainer's)",
            kind=ErrorKind.ARGUMENT,
        )


def _check_fits(record: RouteRecord, options: PlanOptions) -> None:
    if options.seq_len is not None and record.num_tokens > options.seq_len:
        raise UsageError(
            f"expected records of at most seq_len={options.seq_len} tokens, got {record.num_tokens} "
            f"@ sample {record.key}",
            kind=ErrorKind.TOO_LONG,
        )


def _check_whole(record: RouteRecord) -> None:
    if record.prefix is not None:
        raise DataError(
            f"expected whole records (resolve(records) joins them), got rows from {record.routes_start} on with those "
            f"before in {record.prefix.key} @ sample {record.key}",
            kind=ErrorKind.PREFIX,
        )


def _slots(records: Sequence[RouteRecord], spec: RouteSpec) -> list[int] | None:
    """Positions on axis L of the wanted layers, None where these are all; raises SpecError for another geometry."""
    theirs = records[0].spec
    for record in records:
        theirs.require_same_geometry(record.spec, where=f"batch, sample {record.key}")
    subset = set(spec.layer_ids) < set(theirs.layer_ids)
    offered = theirs.select(spec.layer_ids) if subset else theirs
    spec.require_same_geometry(offered, where=f"batch, sample {records[0].key}")
    return [theirs.slot(layer) for layer in spec.layer_ids] if subset else None


def _check_columns(records: Sequence[RouteRecord]) -> dict[str, float]:
    """The fill of every token column; raises DataError unless all records have the same columns in the same types."""
    types = {name: values.dtype for name, values in records[0].columns.items()}
    for record in records:
        found = {name: values.dtype for name, values in record.columns.items()}
        if found != types:
            expected, got = (", ".join(f"{name} {kind}" for name, kind in each.items()) for each in (types, found))
            raise DataError(
                f"expected the token columns of the batch's first record ({expected or 'none'}), got ({got or 'none'}) "
                f"@ sample {record.key}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
    return {name: np.nan if kind.kind == "f" else 0 for name, kind in types.items()}


def _generated(record: RouteRecord) -> NDArray[np.bool_]:
    mask_S = np.zeros(record.num_tokens, dtype=np.bool_)
    for span in record.spans:
        mask_S[span.start : span.stop] = span.kind == "generation"
    return mask_S


def _logprobs(records: Sequence[RouteRecord]) -> list[NDArray[np.float32]] | None:
    if all(record.logprobs is None for record in records):
        return None
    none = np.float32(np.nan)
    return [
        np.broadcast_to(none, record.num_tokens) if record.logprobs is None else record.logprobs for record in records
    ]


def _coverage(record: RouteRecord, slots: list[int] | None) -> Coverage:
    # a row that is partial over all layers may be whole, or absent, over the chosen ones
    if slots is None or record.coverage().count("partial") == 0:
        return record.coverage()
    return Coverage.of(settle_partial(record.captures, record.routes[:, slots], routes_start=record.routes_start))
