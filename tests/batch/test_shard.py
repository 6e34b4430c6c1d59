"""Shards of plans against cutting the dense rows, and layers of stages against walking the stages.

Axes: B sequences, N output rows.
"""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch.plan import Layout, PlanOptions, TokenPlan
from routeplane.batch.slots import MAX_ROWS, ContextLayout, Shard, Slots, records_of_rank, stage_layers
from routeplane.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Row = tuple[int, int, int]

# ----------------------------------------------------------------------------------------------------------------------
# The reference: lists of rows, cut as the words say
# ----------------------------------------------------------------------------------------------------------------------


def rows_of(plan: TokenPlan) -> list[Row]:
    """``(record, token, position)`` of each row."""
    return list(zip(plan.record_N.tolist(), plan.token_N.tolist(), plan.position_N.tolist(), strict=True))


def by_sequence(plan: TokenPlan) -> list[list[Row]]:
    """Rows of each sequence with its padding."""
    rows, edges = rows_of(plan), plan.cu_seqlens_padded.tolist()
    return [rows[a:b] for a, b in pairwise(edges)]


def chunks(rows: list[Row], count: int) -> list[list[Row]]:
    """Equal parts."""
    width = len(rows) // count
    return [rows[at * width : (at + 1) * width] for at in range(count)]


def after_context(rows: list[Row], rank: int, world: int, kind: ContextLayout) -> list[Row]:
    """What a context-parallel rank has of one sequence."""
    if kind == "contiguous" or world == 1:
        return chunks(rows, world)[rank]
    parts = chunks(rows, 2 * world)
    return parts[rank] + parts[2 * world - 1 - rank]


def dense_cut(plan: TokenPlan, shard: Shard) -> list[Row]:
    """The rank's rows, by cutting lists: context first, then the sequence axis."""
    rank, world = shard.context_parallel
    left = [after_context(rows, rank, world, shard.context_layout) for rows in by_sequence(plan)]
    rank, world = shard.sequence_parallel
    axes = left if plan.layout == "padded" else [[row for rows in left for row in rows]]
    cut = []
    for rows in axes:
        part = -(-len(rows) // world)
        cut.append(rows[rank * part : (rank + 1) * part])
    return [row for rows in cut for row in rows]


Rule = tuple[Layout, PlanOptions]
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
ranks = st.integers(1, 4).flatmap(lambda world: st.tuples(st.integers(0, world - 1), st.just(world)))
shards = st.builds(
    Shard,
    context_parallel=ranks,
    sequence_parallel=ranks,
    context_layout=st.sampled_from(("zigzag", "contiguous")),
    uneven=st.booleans(),
)
layouts = st.sampled_from(
    (
        ("packed", PlanOptions()),
        ("packed", PlanOptions(pad_to_multiple_of=3, max_length=5, truncate="left")),
        ("padded", PlanOptions()),
        ("padded", PlanOptions(padding_side="left", pad_to_multiple_of=2)),
        ("padded", PlanOptions(max_length=4, truncate="right")),
    )
)

# ----------------------------------------------------------------------------------------------------------------------
# Rows
# ----------------------------------------------------------------------------------------------------------------------


@given(lengths=lengths, rule=layouts, shard=shards)
def test_a_shard_is_the_dense_cut(lengths: list[int], rule: Rule, shard: Shard) -> None:
    """Made for the rank alone, or cut out of the whole plan: both are what cutting lists of rows gives."""
    layout, padded = rule[0], rule[1].for_shard(shard)
    whole = padded.plan(lengths, layout=layout)
    alone = padded.plan(lengths, layout=layout, shard=shard)
    cut = whole.cut(shard)

    assert dense_cut(whole, shard) == rows_of(alone)
    assert rows_of(alone) == rows_of(cut)
    assert alone.shape == cut.shape
    assert np.arange(whole.num_rows)[whole.shard_rows(shard)].tolist() == whole.shard_rows(shard).tolist()
    for name in ("sources", "lengths", "cu_seqlens", "cu_seqlens_padded"):
        assert getattr(whole, name).tolist() == getattr(alone, name).tolist()


@given(lengths=lengths, rule=layouts, shard=shards)
def test_ranks_share_all_rows_and_none_twice(lengths: list[int], rule: Rule, shard: Shard) -> None:
    """The rows of all ranks of both groups are those of the whole plan."""
    whole = rule[1].for_shard(shard).plan(lengths, layout=rule[0])
    taken = [
        row
        for context in range(shard.context_parallel[1])
        for part in range(shard.sequence_parallel[1])
        for row in whole.shard_rows(
            Shard(
                context_parallel=(context, shard.context_parallel[1]),
                sequence_parallel=(part, shard.sequence_parallel[1]),
                context_layout=shard.context_layout,
                uneven=shard.uneven,
            )
        ).tolist()
    ]

    assert list(range(whole.num_rows)) == sorted(taken)


@given(lengths=lengths, rule=layouts, shard=shards)
def test_the_padding_for_a_shard_is_the_least_that_is_needed(lengths: list[int], rule: Rule, shard: Shard) -> None:
    """Every slot is a multiple of what the cuts and the caller asked for, and less than one multiple too long."""
    layout, options = rule
    padded = options.for_shard(shard)
    widths = np.diff(padded.plan(lengths, layout=layout).cu_seqlens_padded)
    kept = options.plan(lengths, layout=layout).lengths

    assert 0 == padded.pad_to_multiple_of % shard.multiple == padded.pad_to_multiple_of % options.pad_to_multiple_of
    assert np.all(widths % padded.pad_to_multiple_of == 0)
    longest = kept if layout == "packed" else kept.max()
    assert np.all(widths - longest < padded.pad_to_multiple_of)


@given(
    lengths=lengths,
    multiple=st.integers(1, 3),
    shard=st.builds(
        Shard,
        context_parallel=ranks,
        sequence_parallel=ranks,
        context_layout=st.just("pack_contiguous"),
        uneven=st.booleans(),
    ),
)
def test_a_part_of_the_pack_is_cut_wherever_sequences_begin(lengths: list[int], multiple: int, shard: Shard) -> None:
    """The pack is padded at its end, by less than its ranks, and cut as one list; sequences keep their own padding."""
    options = PlanOptions(pad_to_multiple_of=multiple)
    padded = options.for_shard(shard)
    whole, bare = padded.plan(lengths, layout="packed"), options.plan(lengths, layout="packed")
    (rank, world), (part, parts) = shard.context_parallel, shard.sequence_parallel
    ours = chunks(rows_of(whole), world)[rank]
    width = -(-len(ours) // parts)
    needed = world * (1 if shard.uneven else parts)

    assert rows_of(bare) == rows_of(whole)[: bare.num_rows]
    assert bare.num_rows + -bare.num_rows % needed == whole.num_rows
    assert ours[part * width : (part + 1) * width] == rows_of(whole.cut(shard))
    assert rows_of(whole.cut(shard)) == rows_of(padded.plan(lengths, layout="packed", shard=shard))


def test_a_pack_of_one_rank_is_not_cut() -> None:
    """With one context-parallel rank the way to cut does not matter: padded batches are cut by sequence parallelism."""
    plan = TokenPlan.padded([4, 2])
    alone = Shard(context_layout="pack_contiguous", sequence_parallel=(1, 2))

    assert rows_of(plan.cut(Shard(sequence_parallel=(1, 2)))) == rows_of(plan.cut(alone))


def test_zigzag_by_hand() -> None:
    """Rank 1 of 2 takes chunks 1 and 2 of 4, of every sequence."""
    plan = TokenPlan.packed([8, 3], options=PlanOptions(pad_to_multiple_of=4))

    assert [2, 3, 4, 5, 9, 10] == plan.shard_rows(Shard(context_parallel=(1, 2))).tolist()
    assert [0, 1, 6, 7, 8, 11] == plan.shard_rows(Shard(context_parallel=(0, 2))).tolist()
    assert [4, 5, 6, 7, 10, 11] == plan.shard_rows(Shard(context_parallel=(1, 2), context_layout="contiguous")).tolist()


def test_a_rank_beyond_the_rows_has_none() -> None:
    """Three rows over four ranks, as torch.chunk cuts: one each and a shard without rows, which gathers to nothing."""
    plan = TokenPlan.packed([3])
    cuts = [plan.cut(Shard(sequence_parallel=(rank, 4), uneven=True)) for rank in range(4)]
    empty = cuts[3].gather([np.zeros((3, 2), np.int16)], fill=-1)

    assert [(1,), (1,), (1,), (0,)] == [cut.shape for cut in cuts]
    assert (0, 2) == empty.shape
    assert [] == cuts[3].predecessors().tolist() == cuts[3].positions().tolist()


def test_a_rank_allocates_its_own_rows_alone() -> None:
    """The plan of one rank of 64 peaks below a quarter of what the whole plan's arrays hold."""
    lengths = [65_536] * 8
    options = PlanOptions()
    whole = options.plan(lengths, layout="packed")
    size = whole.record_N.nbytes + whole.token_N.nbytes + whole.position_N.nbytes
    tracemalloc.start()
    options.plan(lengths, layout="packed", shard=Shard(context_parallel=(3, 32), sequence_parallel=(1, 2)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < size / 4


# ----------------------------------------------------------------------------------------------------------------------
# Records and layers
# ----------------------------------------------------------------------------------------------------------------------


@given(world=st.integers(1, 5), each=st.integers(0, 4))
def test_data_parallel_ranks_share_the_records(world: int, each: int) -> None:
    """Every record has one rank, and all ranks have as many."""
    found = [records_of_rank(world * each, rank=(rank, world)) for rank in range(world)]

    assert list(range(world * each)) == sorted(index for part in found for index in part)
    assert {each} == {len(part) for part in found}


@given(data=st.data(), world=st.integers(1, 4), virtual=st.integers(1, 3))
def test_stages_are_walked_in_order(data: st.DataObject, world: int, virtual: int) -> None:
    """Layers go stage after stage, stage i on rank i % world, however many each holds; dense layers fall out."""
    counts = data.draw(st.lists(st.integers(0, 4), min_size=world * virtual, max_size=world * virtual))
    total = sum(counts)
    routed = sorted(data.draw(st.sets(st.integers(0, total - 1)))) if total else []
    expected: dict[int, list[int]] = {rank: [] for rank in range(world)}
    layer = 0
    for stage, count in enumerate(counts):
        expected[stage % world] += [each for each in range(layer, layer + count) if each in routed]
        layer += count

    found = {
        rank: list(
            stage_layers(routed, num_layers=total, pipeline_parallel=(rank, world), virtual=virtual, counts=counts)
        )
        for rank in range(world)
    }

    assert expected == found


def test_equal_stages_need_no_counts() -> None:
    """Eight layers on two ranks in two rounds: rank 0 has the first and the third pair."""
    assert (1, 4, 5) == stage_layers([1, 2, 3, 4, 5, 6, 7], num_layers=8, pipeline_parallel=(0, 2), virtual=2)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

PLAN = TokenPlan.packed([6, 4])
CUT = TokenPlan.packed([4]).cut(Shard(sequence_parallel=(0, 2)))

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "context": (lambda: PLAN.cut(Shard(context_parallel=(0, 2))), "4 equal chunks .pad_to_multiple_of=4.*6 rows @ seq"),
    "contiguous": (
        lambda: PLAN.cut(Shard(context_parallel=(0, 4), context_layout="contiguous")),
        "4 equal chunks.*6 rows @ sequence 0",
    ),
    "sequence": (lambda: PLAN.cut(Shard(sequence_parallel=(0, 3))), r"sequence_parallel=\(0, 3\) divides.*got 10"),
    "fewer_rows": (lambda: PLAN.cut(Shard(sequence_parallel=(0, 16))), "uneven=True"),
    "padded_sequence": (lambda: TokenPlan.padded([3, 3]).cut(Shard(sequence_parallel=(0, 2))), "got 3"),
    "records": (lambda: records_of_rank(5, rank=(0, 2)), r"data_parallel=\(0, 2\) divides, got 5"),
    "seq_len": (
        lambda: PlanOptions(seq_len=6).for_shard(Shard(context_parallel=(0, 2))),
        "seq_len as a multiple of 4, got 6",
    ),
    "shard_of_a_shard": (lambda: CUT.cut(Shard(context_parallel=(0, 1), sequence_parallel=(0, 2))), "whole plan"),
    "rank": (lambda: Shard(context_parallel=(2, 2)), "context_parallel as"),
    "negative": (lambda: Shard(sequence_parallel=(-1, 2)), "sequence_parallel as"),
    "bool": (lambda: Shard(data_parallel=(False, True)), "data_parallel as"),
    "single": (lambda: Shard(data_parallel=3), "got 3"),  # type: ignore[arg-type]
    "kind": (lambda: Shard(context_layout="spiral"), "got 'spiral'"),  # type: ignore[arg-type]
    "no_layers": (lambda: Shard(layers=()), "at least one layer"),
    "stages": (lambda: stage_layers([0], num_layers=7, pipeline_parallel=(0, 2)), "2 equal stages.*got 7"),
    "counts": (lambda: stage_layers([0], num_layers=7, pipeline_parallel=(0, 2), counts=[3, 3]), "7 layers in all"),
    "layer": (lambda: stage_layers([7], num_layers=6, pipeline_parallel=(0, 2)), r"layer_ids in \[0, 6\)"),
    "virtual": (lambda: stage_layers([0], num_layers=6, pipeline_parallel=(0, 2), virtual=0), "virtual"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_cut_that_does_not_come_out_even_is_refused(call: Callable[[], Any], message: str) -> None:
    """A world that does not divide, and a rank that is none, are usage errors that say what would do."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert ErrorKind.ARGUMENT == caught.value.kind


def test_a_refused_world_allocates_nothing() -> None:
    """The answer comes from the offsets, before the rows of a batch of a hundred million are numbered."""
    tracemalloc.start()
    with pytest.raises(UsageError, match="equal chunks"):
        PlanOptions().plan([100_000_001], layout="packed", shard=Shard(context_parallel=(0, 2)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1_000_000


def test_the_largest_plan_has_as_many_rows_as_int32_counts() -> None:
    """A plan of 2**31 - 1 rows is described, without a row of it; one more is refused with its shape."""
    one = {"sources": [0], "first": [0], "lengths": [5], "lead": [0]}
    parts = {name: np.asarray(value, dtype=np.int64) for name, value in one.items()}

    assert MAX_ROWS == Slots.of(layout="padded", widths=np.asarray([MAX_ROWS]), **parts).num_rows
    with pytest.raises(UsageError, match=r"shape \[1, 2147483648\]"):
        Slots.of(layout="padded", widths=np.asarray([MAX_ROWS + 1]), **parts)
