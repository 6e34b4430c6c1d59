"""Batches in pooled memory against batches in fresh memory: equal content, and memory that is really passed on.

Axes: B sequences.
"""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, RouteBatch, collate, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.batch.laid_out import laid_out

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

SPEC = watermarked_spec(layers=(1, 2, 5, 9), top_k=3)

OPTIONS: list[dict[str, Any]] = [
    {"layout": "padded"},
    {"layout": "padded", "padding_side": "left", "pad_to_multiple_of": 4},
    {"layout": "packed"},
    {"layout": "packed", "pad_to_multiple_of": 4, "pad_token_id": 7},
]


def make(*lengths: int, scored: bool = True, turn: str | None = None) -> list[RouteRecord]:
    """Watermarked records of these lengths; ``turn``: the type of a token column."""
    records = [watermarked_record(sample, num_tokens=length, spec=SPEC) for sample, length in enumerate(lengths)]
    return [
        replace(
            record,
            logprobs=record.logprobs if scored else None,
            columns={} if turn is None else {"turn": (np.arange(record.num_tokens) % 2).astype(turn)},
            checksum=None,
        )
        for record in records
    ]


def tensors(batch: RouteBatch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch, by name."""
    found = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value for name, value in {**found, **batch.columns}.items() if isinstance(value, torch.Tensor)}


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def assert_equal(expected: RouteBatch, got: RouteBatch) -> None:
    """All tensors are equal in name, type, shape and content; NaN equals NaN."""
    ours, theirs = tensors(expected), tensors(got)
    assert {name: (value.dtype, value.shape) for name, value in ours.items()} == {
        name: (value.dtype, value.shape) for name, value in theirs.items()
    }
    for name, value in ours.items():
        np.testing.assert_array_equal(value.numpy(), theirs[name].numpy(), err_msg=name)
    assert expected.coverage() == got.coverage()


# ----------------------------------------------------------------------------------------------------------------------
# Content
# ----------------------------------------------------------------------------------------------------------------------

batches = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(OPTIONS),
    st.booleans(),
    st.sampled_from([None, "i4", ">f8", "?"]),
    st.sets(st.sampled_from(SPEC.layer_ids), min_size=1),
)


@given(plans=st.lists(batches, min_size=2, max_size=6), kept=st.integers(0, 2))
def test_pooled_batches_equal_fresh_ones_whatever_was_there_before(plans: list[Any], kept: int) -> None:
    """Batches of changing shapes, layouts and columns hold what fresh ones hold, as long as each is live."""
    pool = BatchBuffers()
    live: list[tuple[RouteBatch, RouteBatch]] = []
    for lengths, options, scored, turn, layers in plans:
        records, spec = make(*lengths, scored=scored, turn=turn), SPEC.select(layers)
        live.append(
            (collate(records, spec, **laid_out(options)), collate(records, spec, **laid_out(options, buffers=pool)))
        )
        while len(live) > kept + 1:
            pool.release(live.pop(0)[1])
        for fresh, pooled in live:
            assert_equal(fresh, pooled)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=10), options=st.sampled_from(OPTIONS))
def test_pooled_microbatches_equal_fresh_ones(lengths: list[int], options: dict[str, Any]) -> None:
    """A loop over batches that take turns in one pool sees what it would see without."""
    pool, records = BatchBuffers(), make(*lengths)
    fresh = list(microbatches(records, tokens=16, spec=SPEC, **laid_out(options)))
    pooled = pool.releasing(microbatches(records, tokens=16, spec=SPEC, **laid_out(options, buffers=pool)))

    seen = 0
    for expected, got in zip(fresh, pooled, strict=True):
        assert_equal(expected, got)
        seen += 1
    assert len(fresh) == seen


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------

POOLED = ("routes", "token_ids", "generation_mask", "logprobs", "turn")


def test_a_released_batch_passes_its_memory_on() -> None:
    """The next batch, if it is not larger, stands at the same addresses, and the pool does not grow."""
    pool = BatchBuffers()
    first = collate(make(9, 5, turn="i4"), SPEC, options=BatchOptions(buffers=pool))
    addresses, held = {name: tensors(first)[name].data_ptr() for name in POOLED}, pool.nbytes
    assert held == sum(tensors(first)[name].nbytes for name in POOLED)
    pool.release(first)
    second = collate(make(8, 7, turn="i4"), SPEC, options=BatchOptions(buffers=pool))

    assert addresses == {name: tensors(second)[name].data_ptr() for name in POOLED}
    assert held == pool.nbytes


def test_a_larger_batch_grows_the_pool_and_keeps_nothing_of_the_smaller() -> None:
    """The pool holds the largest batch, not the sum of all."""
    pool = BatchBuffers()
    for lengths in ([3], [9, 9], [5]):
        pool.release(collate(make(*lengths), SPEC, options=BatchOptions(buffers=pool)))
    largest = collate(make(9, 9), SPEC)

    assert sum(tensors(largest)[name].nbytes for name in POOLED if name != "turn") == pool.nbytes


@given(steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12))
def test_live_batches_never_share_memory(steps: list[tuple[int, int]]) -> None:
    """Whatever the order of making and releasing, no byte belongs to two live batches, or to two tensors of one."""
    pool = BatchBuffers()
    live: list[RouteBatch] = []
    for length, release in steps:
        live.append(collate(make(length, 3), SPEC, options=BatchOptions(buffers=pool)))
        if release < len(live):
            pool.release(live.pop(release))
        spans = sorted(span(tensor) for batch in live for tensor in tensors(batch).values())
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def test_a_dropped_batch_takes_its_memory_along() -> None:
    """A batch that is never released is not kept alive by its pool, and no other batch gets its memory."""
    pool = BatchBuffers()
    batch = collate(make(9), SPEC, options=BatchOptions(buffers=pool))
    routes, content = batch.routes, batch.routes.clone()
    del batch
    gc.collect()
    assert 0 == pool.nbytes
    collate(make(9), SPEC, options=BatchOptions(buffers=pool)).routes.zero_()

    assert torch.equal(content, routes)


# ----------------------------------------------------------------------------------------------------------------------
# Release
# ----------------------------------------------------------------------------------------------------------------------


def test_a_released_batch_is_empty() -> None:
    """Every tensor's memory is freed, also for those who share it, so that a late use cannot read another batch."""
    pool = BatchBuffers()
    batch = collate(make(4, turn="i4"), SPEC, options=BatchOptions(buffers=pool))
    shared = batch.to("cpu")
    pool.release(batch)

    assert {0} == {value.numel() for held in (batch, shared) for value in tensors(held).values()}
    assert 4 == batch.coverage().total


def test_a_release_before_the_backward_pass_is_seen() -> None:
    """What autograd saved of a batch is not silently exchanged for another batch's."""
    pool, table = BatchBuffers(), torch.nn.Embedding(10, 2)
    batch = collate(make(4), SPEC, options=BatchOptions(buffers=pool))
    loss = table(batch.token_ids).sum()
    pool.release(batch)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_batch_of_inference_mode_can_be_released_outside_of_it() -> None:
    """Where a batch was made does not matter to where it is released."""
    pool = BatchBuffers()
    with torch.inference_mode():
        batch = collate(make(4), SPEC, options=BatchOptions(buffers=pool))
    pool.release(batch)

    assert 0 == batch.routes.numel()


@pytest.mark.parametrize("case", ["twice", "fresh", "moved", "another_pool"])
def test_what_a_pool_did_not_lend_is_not_released(case: str) -> None:
    """A second release, a batch of fresh memory, a copy and another pool's batch are refused."""
    pool, other = BatchBuffers(), BatchBuffers()
    batch = collate(make(4), SPEC, options=BatchOptions(buffers=pool))
    wrong = {
        "twice": batch,
        "fresh": collate(make(4), SPEC),
        "moved": batch.to("cpu"),
        "another_pool": collate(make(4), SPEC, options=BatchOptions(buffers=other)),
    }[case]
    if case == "twice":
        pool.release(batch)

    with pytest.raises(UsageError, match="memory of this pool") as caught:
        pool.release(wrong)
    assert ErrorKind.CLOSED is caught.value.kind


def test_releasing_lets_go_on_break_and_on_error() -> None:
    """A loop that ends early has released the batch that it had."""
    pool = BatchBuffers()
    for ending in ("break", "error"):
        batches = pool.releasing(microbatches(make(4, 4), tokens=4, spec=SPEC, options=BatchOptions(buffers=pool)))
        batch = next(batches)
        if ending == "break":
            batches.close()
        else:
            with pytest.raises(KeyError):
                batches.throw(KeyError("step"))
        assert 0 == batch.routes.numel()


def test_a_refused_batch_costs_the_pool_nothing() -> None:
    """Records that cannot be batched are refused before memory is taken."""
    pool = BatchBuffers()
    pool.release(collate(make(9), SPEC, options=BatchOptions(buffers=pool)))
    held = pool.nbytes
    with pytest.raises(DataError):
        collate([*make(9, turn="i4"), *make(9)], SPEC, options=BatchOptions(buffers=pool))

    assert held == pool.nbytes


# ----------------------------------------------------------------------------------------------------------------------
# Pinned memory
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="refused where there is no accelerator alone")
def test_pinning_without_an_accelerator_is_refused() -> None:
    """When the pool is made, and not when the first batch needs memory."""
    with pytest.raises(UsageError, match="accelerator") as failure:
        BatchBuffers(pin=True)

    assert failure.value.kind is ErrorKind.ARGUMENT


def test_pinned_pools_make_their_memory_where_torch_pins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pooled tensor comes from memory that was asked for pinned, and the batch is the same."""
    asked: list[np.ndarray[Any, Any]] = []

    def pinned(size: int) -> np.ndarray[Any, Any]:
        asked.append(np.empty(size, dtype=np.uint8))
        return asked[-1]

    monkeypatch.setattr("routeplane.batch.collation.pinned_bytes", pinned)
    pool = BatchBuffers(pin=True)
    records = make(5, 9, turn="int32")
    batch, plain = collate(records, SPEC, options=BatchOptions(buffers=pool)), collate(records, SPEC)
    held = [(block.ctypes.data, block.ctypes.data + block.nbytes) for block in asked]

    assert all(
        torch.equal(value, tensors(plain)[name]) or value.is_floating_point() for name, value in tensors(batch).items()
    )
    for name in ("routes", "token_ids", "generation_mask", "logprobs", "turn"):
        first, last = span(tensors(batch)[name])
        assert any(low <= first and last <= high for low, high in held), name
