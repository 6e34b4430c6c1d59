"""RouteBatch: the tensors of one forward pass, moved, cut and filled.

Every tensor of a batch is cut by one TokenPlan. Knows plans, shards and torch; how a batch is made of records is
``batch``'s business.

Axes: B sequences, S positions of a padded row, T packed rows, N = B*S or T rows in gate order, L layers, K top-k
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.batch.columns import CHANGED_LOGITS, NO_STATE, USES, MaskCounts, count_states, settle_states
from routeplane.batch.layouts import Fill, StackLayout, read_layout, take_rows
from routeplane.batch.matching import plan_of_rows
from routeplane.batch.plan import PADDING, Layout, TokenPlan
from routeplane.batch.slots import ContextLayout, RankOf, Shard
from routeplane.errors import DataError, ErrorKind, MissingExtraError, check_type, refused
from routeplane.record.aligned import ColumnType
from routeplane.record.counts import html_table
from routeplane.record.spans import STATES, Coverage
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import all_legal, find_problems

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError(
        "routeplane.batch needs torch: install the extra routeplane[torch]", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RecordKey

__all__ = [
    "ColumnParts",
    "RouteBatch",
    "check_rows",
    "count_first_tokens",
    "owned_tensor",
    "pinned_bytes",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnParts:
    """The tensors of a column whose entries are lists, or may be unknown. The batch owns them.

    ``values``: ``[..., *shape]``; of lists ``[V]``, one after the other in gate order. ``offsets``: int64 ``[N + 1]``,
    for lists alone: the list of row n is ``values[offsets[n]:offsets[n + 1]]``, empty at padding. ``valid``: bool
    ``[...]``, for a nullable column alone: False where the entry is unknown, and at padding; ``values`` hold 0 there,
    or the list is empty.

    >>> import torch
    >>> parts = ColumnParts(values=torch.tensor([7, 8, 9]), offsets=torch.tensor([0, 1, 1, 3]))
    >>> parts.row(2).tolist(), parts.counts().tolist()
    ([8, 9], [1, 0, 2])
    """

    values: torch.Tensor
    offsets: torch.Tensor | None = None
    valid: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [each for each in (self.values, self.offsets, self.valid) if each is not None]

    def counts(self) -> torch.Tensor:
        """Values of each row's list: int64 ``[N]``. Raises UsageError (ARGUMENT) for a column of no lists."""
        if self.offsets is None:
            raise refused("a column whose entries are lists", "one of numbers or arrays")
        return self.offsets.diff()

    def row(self, number: int) -> torch.Tensor | None:
        """The entry of a row in gate order, a view; None where it is unknown, and at padding of a nullable column."""
        if self.valid is not None and not bool(self.valid.reshape(-1)[number]):
            return None
        if self.offsets is not None:
            return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]
        axes = 1 if self.valid is None else self.valid.ndim
        return self.values.reshape(-1, *self.values.shape[axes:])[number]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ColumnParts:
        """The column with each of its tensors changed."""
        return ColumnParts(
            values=change(self.values),
            offsets=None if self.offsets is None else change(self.offsets),
            valid=None if self.valid is None else change(self.valid),
        )

    def take(self, rows: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> ColumnParts:
        """The entries of the rows with these numbers, in memory of their own; ``cut`` takes them of a ``[...]``."""
        valid = None if self.valid is None else cut(self.valid)
        if self.offsets is None:
            return ColumnParts(values=cut(self.values), valid=valid)
        counts = self.offsets.diff()[rows]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        shift = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        values = self.values[shift + torch.arange(len(shift), device=shift.device)]
        return ColumnParts(values=values, offsets=offsets, valid=valid)


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
    * ``columns``: the records' aligned columns by name, ``[..., *shape]`` in their types; 0, False or NaN at padding
    * ``column_parts``: those whose entries are lists or may be unknown, as ``ColumnParts``; ``column_types``: what each
      column declares, of both
    * ``weights_meaning``: the text of the records' attribute, where they have a column ``route_weights``; else None
    * ``states``: int8 ``[...]``, capture state of each row over the layers of ``spec``, as its place in
      ``spans.STATES``; -1 at padding
    * ``keys``: the record behind each sequence; ``counts``: rows by capture state, padding not counted
    * ``fill``: what ``routes`` holds at padding: MISSING, or ids that ``layout.balanced_rows`` spread

    A shard (``shard``, ``collate(shard=)``) holds the rows and layers of one rank: tensors ``[...]`` are the rank's
    own, while ``lengths`` and both offsets stay the whole batch's. ``counts`` are the rank's rows, and the record is
    counted where its first token stands, so that counts merged over ranks are those of the whole.
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
    states: torch.Tensor
    keys: tuple[RecordKey, ...]
    counts: Coverage
    fill: Fill = "missing"
    column_parts: Mapping[str, ColumnParts] = field(default_factory=lambda: MappingProxyType({}))
    column_types: Mapping[str, ColumnType] = field(default_factory=lambda: MappingProxyType({}))
    weights_meaning: str | None = None

    def __repr__(self) -> str:
        routes = f"routes {'x'.join(map(str, self.routes.shape))} on {self.routes.device}"
        columns = "".join(f", {name}" for name in (*self.columns, *self.column_parts))
        return f"RouteBatch({len(self.keys)} records, {self.counts.total} tokens, {routes}{columns})"

    def _repr_html_(self) -> str:
        shapes = {
            name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            for name, value in [*vars(self).items(), *self.columns.items()]
            if isinstance(value, torch.Tensor)
        }
        states = {f"rows {state}": count for state, count in self.counts.rows.items() if count}
        return html_table(repr(self), {**shapes, **states})

    @classmethod
    def from_tensors(
        cls,
        routes: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        spec: RouteSpec,
        lengths: Any = None,
        cu_seqlens: Any = None,
        pad_mask: Any = None,
        captured: Any = None,
        generation_mask: torch.Tensor | None = None,
    ) -> RouteBatch:
        """Check a trainer's own tensors and make a batch of them, for ``replaying``.

        ``routes``: integers of any width, ``[B, S, L, K]``, ``[T, L, K]`` with ``cu_seqlens``, or a nested (jagged)
        tensor of the sequences; on any device. ``token_ids``: integers of the same leading axes. ``lengths``: ``[B]``,
        tokens of each sequence from its first row on; ``pad_mask``: bool ``[B, S]``, True at padding (the opposite of
        an attention mask); by neither, all rows are tokens. ``captured``: which rows an engine captured, as bool of the
        ids' shape or as counts ``[B]`` of each sequence's first tokens: what other rows hold is filler and becomes
        MISSING. Without it, rows of -1 alone are MISSING. ``generation_mask``: bool, tokens that the policy sampled;
        default none.

        Returns a batch with int16 routes of its own, MISSING at padding; token ids are shared where they are int64.
        MISSING rows at the end of a sequence count as not_fed from its last sampled token on (without any, its last
        token alone), other MISSING rows as lost, or as not_captured where ``captured`` excludes them. Raises UsageError
        for arguments that disagree, and DataError with every finding (sequence, token, layer) for rows that are not
        legal.

        >>> import torch
        >>> from routeplane import RouteSpec
        >>> from routeplane.batch import RouteBatch
        >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
        >>> rows = torch.tensor([[[[3, 5]], [[0, 1]], [[0, 0]]]])
        >>> batch = RouteBatch.from_tensors(rows, torch.tensor([[7, 8, 0]]), spec=spec, lengths=[2], captured=[1])
        >>> batch.layer(1).tolist(), batch.unexplained_missing
        ([[3, 5], [-1, -1], [-1, -1]], 0)
        """
        for name, given in (("routes", routes), ("token_ids", token_ids)):
            check_type(given, torch.Tensor, expected=f"{name} as a tensor")
        if routes.is_nested and token_ids.is_nested:
            nested: Any = token_ids
            cu_seqlens, routes, token_ids = nested.offsets(), routes.values(), nested.values()
        plan = plan_of_rows(token_ids, lengths=lengths, cu_seqlens=cu_seqlens, pad_mask=pad_mask)
        rows, absent = _own_rows(routes, spec, plan, captured)
        return cls._of_rows(rows, absent, token_ids, generation_mask, spec, plan, excluded=captured is not None)

    @classmethod
    def from_layout(
        cls,
        batch: Any,
        spec: RouteSpec,
        *,
        layout: str | StackLayout,
        decoder_layers: int | None = None,
        captured: Any = None,
    ) -> RouteBatch:
        """Check a batch in the layout of another stack and make a packed batch of it, for ``replaying``.

        Arguments and errors as in the function ``from_layout``; each row is copied and checked once. Sequences follow
        one another in the container's order, without its padding. Returns a batch on the CPU that owns its tensors.

        >>> import numpy as np
        >>> from routeplane import RouteSpec
        >>> from routeplane.batch import RouteBatch
        >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
        >>> sample = {"tokens": [5, 6, 7], "loss_mask": [1, 1], "routed_experts": np.array([[[0, 0], [3, 5]]] * 2)}
        >>> batch = RouteBatch.from_layout([sample], spec, layout="vllm", decoder_layers=2)
        >>> batch.layer(1).tolist(), batch.coverage().rows["not_fed"]
        ([[3, 5], [3, 5], [-1, -1]], 1)
        """
        laid, absent = read_layout(batch, spec, layout=layout, decoder_layers=decoder_layers, captured=captured)
        plan = TokenPlan.from_cu_seqlens(laid.offsets)
        ids, generated = owned_tensor(laid.token_ids), owned_tensor(laid.generated)
        return cls._of_rows(owned_tensor(laid.routes), absent, ids, generated, spec, plan, excluded=True)

    @classmethod
    def _of_rows(
        cls,
        rows: torch.Tensor,
        absent: NDArray[np.int64],
        token_ids: torch.Tensor,
        generation_mask: torch.Tensor | None,
        spec: RouteSpec,
        plan: TokenPlan,
        *,
        excluded: bool,
    ) -> RouteBatch:
        """The batch of rows that were checked; ``absent``: those that lack a layer."""
        real = torch.from_numpy(~plan.padding()).to(rows.device)
        generated = torch.zeros_like(real) if generation_mask is None else generation_mask.bool() & real
        ends = _sampled_ends(generated.reshape(-1).cpu().numpy(), plan)
        states = _own_states(rows, absent, spec, plan, fed=ends, excluded=excluded)
        return cls(
            spec=spec,
            plan=plan,
            routes=rows,
            token_ids=token_ids.long(),
            position_ids=owned_tensor(plan.positions()).to(rows.device),
            pad_mask=~real,
            generation_mask=generated,
            logprobs=None,
            lengths=owned_tensor(plan.lengths.copy()),
            cu_seqlens=owned_tensor(plan.cu_seqlens.copy()),
            cu_seqlens_padded=owned_tensor(plan.cu_seqlens_padded.copy()),
            columns=MappingProxyType({}),
            states=owned_tensor(states.reshape(plan.shape)).to(rows.device),
            keys=(),
            counts=count_states(states, records=count_first_tokens(plan)),
        )

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

    def mask_counts(self) -> MaskCounts:
        """Sampled tokens by how they can be scored, of a batch with labels. Raises UsageError (ARGUMENT) without."""
        if "label_use" not in self.columns:
            raise refused("a batch with labels (BatchOptions(labels=True))", "one without")
        return self._mask_counts

    @cached_property
    def _mask_counts(self) -> MaskCounts:
        # scoring asks in every forward, and a copy from a device waits for all work queued on it
        found = np.bincount(self.columns["label_use"].reshape(-1).cpu().numpy(), minlength=2 * CHANGED_LOGITS)
        by_use = found.reshape(2, CHANGED_LOGITS).sum(axis=0)
        counts = {use: int(by_use[code]) for code, use in enumerate(USES) if use != "none"}
        return MaskCounts(**counts, changed=int(found[CHANGED_LOGITS:].sum()))

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

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch, those of its columns too."""
        own = [value for item in fields(self) if isinstance(value := getattr(self, item.name), torch.Tensor)]
        parts = [tensor for column in self.column_parts.values() for tensor in column.tensors()]
        return [*own, *self.columns.values(), *parts]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RouteBatch:
        changed: dict[str, Any] = {
            item.name: change(value)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), torch.Tensor)
        }
        columns = MappingProxyType({name: change(value) for name, value in self.columns.items()})
        parts = MappingProxyType({name: column.map(change) for name, column in self.column_parts.items()})
        moved = replace(self, columns=columns, column_parts=parts, **changed)
        if "label_use" in self.columns:
            moved.__dict__["_mask_counts"] = self._mask_counts  # counted where the batch was made, before it moves
        return moved

    def shard(
        self,
        *,
        context_parallel: RankOf = (0, 1),
        sequence_parallel: RankOf = (0, 1),
        layers: Iterable[int] | None = None,
        context_layout: ContextLayout = "zigzag",
        uneven: bool = False,
    ) -> RouteBatch:
        """What one rank of parallel groups takes of this batch, as ``shards.Shard`` says; copies where it cuts.

        ``collate(shard=)`` makes the same without the whole batch before it, and pads as the cuts need. Raises
        UsageError (ARGUMENT) where a world does not divide the rows, for a batch that is a shard of rows already, and
        for balanced filler, which is spread after all cuts; SpecError for a layer that ``spec`` does not have.
        """
        shard = Shard(
            context_parallel=context_parallel,
            sequence_parallel=sequence_parallel,
            layers=None if layers is None else tuple(layers),
            context_layout=context_layout,
            uneven=uneven,
        )
        if shard.cuts_rows and self.fill != "missing":
            raise refused("padding to be filled after the last cut", "a filled batch to cut")
        spec = self.spec if shard.layers is None else self.spec.select(shard.layers)
        plan = self.plan.cut(shard)
        rows = torch.from_numpy(self.plan.shard_rows(shard)).to(self.routes.device)

        def cut(values: torch.Tensor) -> torch.Tensor:
            further = values.shape[len(self.plan.shape) :]
            if not shard.cuts_rows:
                return values
            return _signed(values).reshape(-1, *further)[rows].view(*plan.shape, *further).view(values.dtype)

        slots = torch.tensor([self.spec.slot(layer) for layer in spec.layer_ids], device=self.routes.device)
        flat_NLK = self.routes.view(self.num_rows, *self.spec.row_shape)
        routes_NLK = flat_NLK[rows[:, None], slots]
        states = cut(self.states)
        settled_N = settle_states(
            states.reshape(-1).cpu().numpy(),
            lambda partial: routes_NLK[torch.from_numpy(partial).to(routes_NLK.device)].cpu().numpy(),
        )
        return replace(
            self,
            spec=spec,
            plan=plan,
            routes=routes_NLK.view(*plan.shape, *spec.row_shape),
            states=torch.from_numpy(settled_N.reshape(plan.shape)).to(states.device),
            counts=count_states(settled_N, records=count_first_tokens(plan)),
            token_ids=cut(self.token_ids),
            position_ids=cut(self.position_ids),
            pad_mask=cut(self.pad_mask),
            generation_mask=cut(self.generation_mask),
            logprobs=None if self.logprobs is None else cut(self.logprobs),
            **self._cut_columns(rows, cut, None if shard.layers is None else slots),
        )

    def _cut_columns(
        self, rows: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor], slots: torch.Tensor | None
    ) -> dict[str, Any]:
        """The fields that hold columns, for some rows and some layers."""
        types = dict(self.column_types)

        def pick(name: str, values: torch.Tensor) -> torch.Tensor:
            kind = types[name]
            if slots is None or "layers" not in kind.axes:
                return values
            axis = len(self.plan.shape) + kind.axes.index("layers")
            return _signed(values)[(slice(None),) * axis + (slots,)].view(values.dtype)

        columns = {name: pick(name, cut(values)) for name, values in self.columns.items()}
        parts = {}
        for name, column in self.column_parts.items():
            taken = column.take(rows, cut)
            parts[name] = taken if taken.offsets is not None else replace(taken, values=pick(name, taken.values))
        for name, values in (*columns.items(), *((name, column.values) for name, column in parts.items())):
            if not types[name].ragged:
                types[name] = replace(types[name], shape=tuple(values.shape[len(self.plan.shape) :]))
        return {
            "columns": MappingProxyType(columns),
            "column_parts": MappingProxyType(parts),
            "column_types": MappingProxyType(types),
        }

    def with_routes(self, routes_NLK: torch.Tensor, /) -> RouteBatch:
        """The batch with other routes, such as the trainer's own: int16 ``[N, L, K]`` in gate order, on any device.

        Every token counts as captured, and padding stays MISSING. A column ``route_weights`` is left out, since its
        weights are those of other experts. The rows are copied to the batch's device. Raises
        UsageError (ARGUMENT) for another shape or type, and DataError for a row of a token that is not legal.
        """
        expected = (self.num_rows, *self.spec.row_shape)
        if tuple(routes_NLK.shape) != expected or routes_NLK.dtype != torch.int16:
            raise refused(f"int16 routes {list(expected)}", f"{routes_NLK.dtype} {list(routes_NLK.shape)}")
        routes = routes_NLK.to(self.routes.device, copy=True).view(self.routes.shape)
        routes[self.pad_mask] = MISSING
        check_rows(routes.view(routes_NLK.shape), self.spec, plan=self.plan)
        states = torch.where(self.pad_mask, NO_STATE, STATES.index("captured")).to(self.states)
        counts = count_states(states.reshape(-1).cpu().numpy(), records=self.counts.records)
        columns, types = (
            MappingProxyType({name: value for name, value in mapping.items() if name != "route_weights"})
            for mapping in (self.columns, self.column_types)
        )
        kept: dict[str, Any] = {"columns": columns, "column_types": types, "weights_meaning": None}
        return replace(self, routes=routes, states=states, counts=counts, fill="missing", **kept)

    def model_inputs(self) -> dict[str, torch.Tensor | bool]:
        """Keyword arguments for a Transformers causal model; tensors are shared with the batch, or views of it.

        Padded: ``input_ids``, ``attention_mask`` (int64, 0 at padding), ``position_ids``, each ``[B, S]``. Packed:
        ``input_ids`` and ``position_ids`` ``[1, T]``: with no mask and no cache, Transformers attends within each run
        of rising positions. A cache would switch that off without a word, so ``use_cache=False`` comes along. Packed
        rows need attention in every layer: a recurrent layer carries its state across sequences. Of a shard of rows
        they are the rank's own, and the model's attention has to reach the other ranks.
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
        content |= {name: dict(content[name]) for name in _MAPPINGS}
        content["columns"] = {name: _signed(value) for name, value in self.columns.items()}
        content["column_parts"] = {
            name: replace(column, values=_signed(column.values)) for name, column in self.column_parts.items()
        }
        return _rebuild_batch, (content,)


_MAPPINGS = ("columns", "column_parts", "column_types")


# tensors of these types do not come out of a pickle (torch 2.13), and not every device takes rows of them
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _signed(values: torch.Tensor) -> torch.Tensor:
    return values.view(_SIGNED[values.dtype]) if values.dtype in _SIGNED else values


def _rebuild_batch(content: dict[str, Any]) -> RouteBatch:
    types = {name: getattr(torch, kind.dtype) for name, kind in content["column_types"].items()}
    content["columns"] = {name: values.view(types[name]) for name, values in content["columns"].items()}
    content["column_parts"] = {
        name: replace(column, values=column.values.view(types[name]))
        for name, column in content["column_parts"].items()
    }
    return RouteBatch(**{**content, **{name: MappingProxyType(content[name]) for name in _MAPPINGS}})


def owned_tensor(values: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array that was made for it; shares its memory.

    Never a record's own array: it is read-only and may be mapped, where a write through torch kills the process.
    """
    return torch.from_numpy(values)


def check_rows(routes_NLK: torch.Tensor, spec: RouteSpec, *, plan: TokenPlan | None = None) -> None:
    """Raise DataError unless every row is legal: int16 ``[N, L, K]`` on any device, where the verdict is made.

    Findings name the sequence of ``plan`` and the token in it; without a plan, the row.
    """
    if routes_NLK.device.type != "cpu":
        low, high = routes_NLK.amin(-1), routes_NLK.amax(-1)
        width_L = torch.tensor(spec.experts_per_layer, device=routes_NLK.device)
        ordered = routes_NLK.sort(dim=-1).values
        distinct = (ordered[..., 1:] > ordered[..., :-1]).all(-1)
        if bool((((low >= 0) & (high < width_L) & distinct) | (low == MISSING) & (high == MISSING)).all()):
            return
    rows_NLK = routes_NLK.detach().cpu().numpy()
    if all_legal(rows_NLK, spec):
        return
    problems = find_problems(rows_NLK, spec)
    if plan is not None:
        problems = [
            replace(problem, sample=f"sequence {plan.record_N[problem.token]}", token=int(plan.token_N[problem.token]))
            for problem in problems
            if problem.token is not None
        ]
    raise DataError.from_problems(problems, what="illegal routes")


def _own_rows(
    routes: torch.Tensor, spec: RouteSpec, plan: TokenPlan, captured: Any
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """A copy as int16 ``[*shape, L, K]``, MISSING at padding and outside of ``captured``; the rows that lack a layer.

    Raises DataError unless every row is legal.
    """
    expected = (*plan.shape, *spec.row_shape)
    if tuple(routes.shape) != expected or routes.is_floating_point() or routes.dtype == torch.bool:
        depth = f" (axis {len(plan.shape)} is the layers {list(spec.layer_ids)})"
        raise refused(f"integer routes {list(expected)}{depth}", f"{routes.dtype} {list(routes.shape)}")
    kept = ~plan.padding()
    if not kept.any() and bool((routes != routes.flatten(0, -3)[0]).any()):
        raise refused(
            "filler in a batch of padding alone", "rows that differ: pad_mask is True at padding, not at tokens"
        )
    if captured is not None:
        kept &= _captured_rows(captured, plan)
    if routes.device.type != "cpu":
        return _rows_on_device(routes, spec, plan, kept)
    out = np.empty((plan.num_rows, *spec.row_shape), dtype=np.int16)
    given_NLK = routes.detach().numpy().reshape(out.shape)
    absent = take_rows(given_NLK, spec, out=out, kept=kept.reshape(-1))
    if absent is None:
        check_rows(torch.from_numpy(out), spec, plan=plan)
        absent = np.flatnonzero((out[..., 0] == MISSING).any(axis=1))
    return torch.from_numpy(out).view(expected), absent


def _rows_on_device(
    routes: torch.Tensor, spec: RouteSpec, plan: TokenPlan, kept: NDArray[np.bool_]
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    if routes.dtype not in (torch.int16, torch.uint8, torch.int8):
        real = routes[torch.from_numpy(kept).to(routes.device)]
        low, high = (int(real.min()), int(real.max())) if real.numel() else (0, 0)
        if low < np.iinfo(np.int16).min or high > np.iinfo(np.int16).max:
            raise DataError(f"expected ids that int16 holds, got {low} to {high}", kind=ErrorKind.VALUE_RANGE)
    rows = routes.to(torch.int16, copy=True, memory_format=torch.contiguous_format)
    others = torch.from_numpy(np.flatnonzero(~kept.reshape(-1))).to(routes.device)
    rows_NLK = rows.view(plan.num_rows, *spec.row_shape)
    rows_NLK.index_fill_(0, others, MISSING)
    check_rows(rows_NLK, spec, plan=plan)
    return rows, np.flatnonzero((rows_NLK[..., 0] == MISSING).any(dim=1).cpu().numpy())


def _captured_rows(captured: Any, plan: TokenPlan) -> NDArray[np.bool_]:
    given = np.asarray(captured.cpu() if isinstance(captured, torch.Tensor) else captured)
    if given.dtype == np.bool_ and given.shape == plan.shape:
        return given
    if (
        given.shape != plan.lengths.shape
        or given.dtype.kind not in "iu"
        or np.any((given < 0) | (given > plan.lengths))
    ):
        raise refused(
            f"captured as bool {list(plan.shape)}, or as counts within {plan.lengths.tolist()}",
            f"{given.tolist()}" if given.ndim == 1 else f"{given.dtype} {list(given.shape)}",
        )
    rows_N: NDArray[np.bool_] = plan.token_N < given[plan.record_N]
    return rows_N.reshape(plan.shape)


def _sampled_ends(generated_N: NDArray[np.bool_], plan: TokenPlan) -> NDArray[np.int64]:
    """The last sampled token of each sequence, its last token where none was sampled: int64 ``[B]``."""
    ends_B = np.full(plan.num_sequences, -1, dtype=np.int64)
    rows = np.flatnonzero(generated_N)
    np.maximum.at(ends_B, plan.record_N[rows], plan.token_N[rows])
    return np.where(ends_B < 0, plan.sources - 1, ends_B)


def _own_states(
    rows: torch.Tensor,
    absent: NDArray[np.int64],
    spec: RouteSpec,
    plan: TokenPlan,
    *,
    fed: NDArray[np.int64],
    excluded: bool,
) -> NDArray[np.int8]:
    """The capture state of each row, int8 ``[N]``, from what is there and where it stands.

    ``fed``: tokens of each sequence that the engine had to be fed.
    """
    some_NL = rows.view(plan.num_rows, *spec.row_shape)[torch.from_numpy(absent).to(rows.device), :, 0]
    partial = (some_NL != MISSING).any(dim=1).cpu().numpy()
    states_N = np.full(plan.num_rows, STATES.index("captured"), dtype=np.int8)
    states_N[absent] = STATES.index("not_captured" if excluded else "lost")
    states_N[absent[partial]] = STATES.index("partial")
    gone = absent[~partial]
    gone = gone[plan.record_N[gone] != PADDING]
    # a row that is there was fed, and so was every token before it
    there_N = plan.record_N != PADDING
    there_N[gone] = False
    ends_B = fed.copy()
    np.maximum.at(ends_B, plan.record_N[there_N], plan.token_N[there_N] + 1)
    states_N[gone[plan.token_N[gone] >= ends_B[plan.record_N[gone]]]] = STATES.index("not_fed")
    states_N[plan.record_N == PADDING] = NO_STATE
    return states_N


def pinned_bytes(size: int) -> NDArray[np.uint8]:
    """Page-locked memory as a fresh uint8 array, which keeps it.

    Raises UsageError (ARGUMENT) where torch sees no accelerator to lock it for.
    """
    if not torch.accelerator.is_available():
        raise refused("an accelerator that pinned memory is for", "none in this process")
    pinned: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


def count_first_tokens(plan: TokenPlan) -> int:
    """Records whose first kept token stands among the plan's rows."""
    return int(((plan.position_N == 0) & (plan.record_N >= 0)).sum())
