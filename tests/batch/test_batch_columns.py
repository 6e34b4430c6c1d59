"""Aligned columns in batches: every row holds the entry of its own token, whatever lays it out and cuts it.

The oracle is ``tests.plain_columns.entry``: a row's token id names record and token, so that no plan is asked.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchBuffers, BatchOptions, RouteBatch, collate, join, microbatches
from routeplane.batch.batch import ColumnParts
from routeplane.batch.slots import Shard
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING
from routeplane.record.validate import WeightsMeaning
from routeplane.testing import strategies
from tests.plain_columns import KINDS, WIDE, column_record, entry

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("packed", {}),
    "padded": ("padded", {}),
    "left": ("padded", {"padding_side": "left"}),
    "truncated": ("packed", {"max_length": 5, "truncate": "left"}),
}
NONE: dict[str, Any] = {"number": None, "maybe": None, "layers": None, "lists": [], "maybe_lists": None}

shards = st.builds(
    Shard,
    context_parallel=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    sequence_parallel=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    layers=st.sampled_from([None, (4,), (1,), (1, 4)]),
    context_layout=st.sampled_from(["zigzag", "contiguous"]),
)


def rows_of(batch: RouteBatch, name: str) -> list[Any]:
    """The entries of a column in gate order as plain values; a number or an array that is all NaN counts as none."""
    if name in batch.column_parts:
        found = [batch.column_parts[name].row(number) for number in range(batch.num_rows)]
        return [None if one is None else one.tolist() for one in found]
    values = batch.columns[name]
    flat = values.reshape(batch.num_rows, *values.shape[len(batch.plan.shape) :])
    return [None if bool(one.isnan().all()) else one.tolist() for one in flat]


def expected_rows(batch: RouteBatch, kind: str) -> list[Any]:
    """What the plain entries say of each row: token id ``1000 * seed + token + 1``, 0 at padding."""
    found = []
    for token_id in batch.token_ids.reshape(-1).tolist():
        seed, token = divmod(token_id - 1, 1_000)
        one = NONE[kind] if token_id == 0 else entry(seed, kind, token)
        if kind == "layers" and one is not None:
            one = [one[WIDE.slot(layer)] for layer in batch.spec.layer_ids]
        found.append(one)
    return found


def require_entries(batch: RouteBatch) -> None:
    """Every column of every row."""
    for kind in KINDS:
        assert expected_rows(batch, kind) == rows_of(batch, kind), kind
    assert set(KINDS) == set(batch.column_types)
    assert (len(batch.spec.layer_ids), 2, 3) == batch.column_types["layers"].shape


def tensors(batch: RouteBatch) -> dict[str, torch.Tensor]:
    """The columns' tensors by name, NaN made comparable."""
    parts = {
        f"{name}.{place}": tensor
        for name, column in batch.column_parts.items()
        for place, tensor in enumerate(column.tensors())
    }
    return {
        name: tensor.nan_to_num(nan=9.0) if tensor.is_floating_point() else tensor
        for name, tensor in {**batch.columns, **parts}.items()
    }


def require_same(one: RouteBatch, other: RouteBatch) -> None:
    """The columns of two batches, tensor by tensor."""
    assert dict(one.column_types) == dict(other.column_types)
    assert tensors(one).keys() == tensors(other).keys()
    for name, tensor in tensors(one).items():
        assert tensor.dtype == tensors(other)[name].dtype
        assert torch.equal(tensor, tensors(other)[name]), name


# ----------------------------------------------------------------------------------------------------------------------
# Every layout, every cut
# ----------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.sampled_from(sorted(LAYOUTS)), shards)
def test_every_row_has_the_entry_of_its_token(sizes: list[int], name: str, shard: Shard) -> None:
    """Whole, one rank's of records, one rank's of the whole batch, through a pool and a pickle: the same entries."""
    layout, options = LAYOUTS[name]
    records = [column_record(seed, size) for seed, size in enumerate(sizes)]
    padded = BatchOptions(pad_to_multiple_of=shard.multiple, **options)
    whole = collate(records, WIDE, layout=layout, options=padded)  # type: ignore[arg-type]
    of_records = collate(records, WIDE, layout=layout, options=BatchOptions(**options), shard=shard)  # type: ignore[arg-type]
    of_batch = whole.shard(
        context_parallel=shard.context_parallel,
        sequence_parallel=shard.sequence_parallel,
        layers=shard.layers,
        context_layout=shard.context_layout,
    )

    for batch in (whole, of_records, of_batch):
        require_entries(batch)
    require_same(of_records, of_batch)
    require_same(of_records, pickle.loads(pickle.dumps(of_records)))
    pooled = BatchBuffers()
    for _ in range(2):
        batch = collate(records, WIDE, layout=layout, options=replace(padded, buffers=pooled))  # type: ignore[arg-type]
        require_same(whole, batch)
        pooled.release(batch)
        assert 0 == sum(tensor.numel() for tensor in batch.tensors())


@given(strategies.records(prefixes=False), st.sampled_from(["packed", "padded"]), shards)
def test_any_drawn_column_is_cut_by_the_row(record: RouteRecord, layout: str, shard: Shard) -> None:
    """Every value type and form that the strategies draw: entry by entry what the record holds."""
    cut = replace(shard, layers=None)
    again = replace(record, segment=record.segment // 2 + 1, sample_id=f"{record.sample_id}+", checksum=None)
    batch = collate([record, again], record.spec, layout=layout, shard=cut)  # type: ignore[arg-type]

    for name, column in record.columns.items():
        for number, token in enumerate(batch.plan.token_N.tolist()):
            parts = batch.column_parts.get(name)
            if parts is not None:
                found = parts.row(number)
            else:
                values = batch.columns[name]
                found = values.reshape(batch.num_rows, *column.type.shape)[number]
            if token < 0:
                assert column.type.nullable <= (found is None)
                assert not column.type.ragged or found is None or found.numel() == 0
                continue
            held = column.entry(token)
            assert (held is None) == (found is None)
            if held is not None and found is not None:
                assert np.array_equal(held, found.numpy(), equal_nan=column.dtype.kind == "f"), name
                assert found.numpy().dtype == column.dtype


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.sampled_from(["packed", "padded"]))
def test_microbatches_carry_them(sizes: list[int], layout: str) -> None:
    """Every batch of a budget has all columns, a batch of padding alone too."""
    records = [column_record(seed, size) for seed, size in enumerate(sizes)]
    made = list(microbatches(records, tokens=12, spec=WIDE, layout=layout, batches=len(sizes) + 1))  # type: ignore[arg-type]

    for batch in made:
        require_entries(batch)
    assert ((), set(made[0].column_parts)) == (made[-1].keys, set(made[-1].column_parts))
    assert sum(sizes) == sum(int((~batch.pad_mask).sum()) for batch in made)


def test_a_trainers_own_batch_is_joined_with_its_columns() -> None:
    """Right-truncated rows and a dummy sequence: the entries stand where the trainer has the tokens."""
    records = [column_record(0, 4), column_record(1, 6)]
    ids = np.zeros((3, 5), dtype=np.int64)
    ids[0, 1:] = records[0].token_ids
    ids[2] = records[1].token_ids[:5]
    joined = join(ids, records, sample_ids=["sample-0", None, "sample-1"], pad_mask=ids == 0, truncated="right")
    require_entries(collate(joined.records, WIDE, plan=joined.plan))


# ----------------------------------------------------------------------------------------------------------------------
# Padding, and what is refused
# ----------------------------------------------------------------------------------------------------------------------


HALVES = WeightsMeaning(score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="bfloat16")


def test_padding_of_bfloat16_weights_is_nan() -> None:
    """Routing weights as bfloat16 bits are NaN wherever there is no row, so at padding too."""
    record = column_record(0, 3)
    bits = np.full((3, 2, 2), 0x3F00, dtype=np.uint16)
    bits[record.routes[:, 0, 0] == MISSING] = 0x7FC0
    kind = type(record.columns["layers"]).of(bits, aligned="fed", axes=("layers", "topk"))
    weighted = replace(
        record, columns={"route_weights": kind}, attributes={"weights_meaning": HALVES.to_text()}, checksum=None
    )
    batch = collate([weighted], WIDE, options=BatchOptions(seq_len=8))
    assert batch.columns["route_weights"].view(torch.bfloat16).isnan()[0, 3:].all()
    assert HALVES.to_text() == batch.weights_meaning == pickle.loads(pickle.dumps(batch)).weights_meaning
    cut = batch.shard(context_parallel=(0, 2), layers=[WIDE.layer_ids[1]])
    assert HALVES.to_text() == cut.weights_meaning
    assert (*cut.routes.shape,) == (*cut.columns["route_weights"].shape,)
    missing = cut.routes == MISSING
    assert torch.equal(missing, cut.columns["route_weights"].view(torch.bfloat16).isnan())
    swapped = batch.with_routes(batch.routes.reshape(-1, *WIDE.row_shape).clone())
    assert swapped.weights_meaning is None
    assert "route_weights" not in {**swapped.columns, **swapped.column_types}
    other = replace(weighted, attributes={"weights_meaning": replace(HALVES, dtype="float32").to_text()}, checksum=None)
    with pytest.raises(DataError, match="one meaning"):
        collate([weighted, other], WIDE)
    whole = batch.columns["route_weights"].view(torch.bfloat16)[0, :2]
    assert {0.5} == set(whole.reshape(-1).tolist())


def test_columns_that_differ_in_what_they_declare_are_refused() -> None:
    """One column of a batch is of one type: the same dtype as a list is another one."""
    one, other = column_record(0, 3), column_record(1, 3)
    mixed = {**other.columns, "maybe": replace(other, columns={"maybe": np.arange(3)}, checksum=None).columns["maybe"]}
    with pytest.raises(DataError, match="maybe int64 fed nullable") as caught:
        collate([one, replace(other, columns=mixed, checksum=None)], WIDE)
    assert ErrorKind.TOKEN_COLUMN is caught.value.kind


def test_parts_without_lists_have_no_counts() -> None:
    """Asking a column of numbers for the lengths of its lists is an error of the caller."""
    with pytest.raises(UsageError, match="lists"):
        ColumnParts(values=torch.zeros(2), valid=torch.ones(2, dtype=torch.bool)).counts()
