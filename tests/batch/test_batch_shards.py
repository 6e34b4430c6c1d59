"""Shards of batches: what ranks hold, put together again, is the batch; and no rank makes more than it holds.

Axes: B sequences, S positions, T packed rows, N rows of a rank, L layers, K top-k slots.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, RouteBatch, collate, microbatches
from routeplane.batch.columns import prompt_tokens
from routeplane.batch.plan import TokenPlan
from routeplane.batch.slots import Shard, stage_layers
from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Coverage
from routeplane.record.spec import MISSING
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec
from tests.batch.laid_out import laid_out

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = watermarked_spec(layers=(1, 2, 3, 5, 6, 7), top_k=3)
BY_ROW = ("token_ids", "position_ids", "pad_mask", "generation_mask", "states", "logprobs")
WHOLE = ("lengths", "cu_seqlens", "cu_seqlens_padded")


def make(sample: int, num_tokens: int, **options: Any) -> RouteRecord:
    """A watermarked record with a token column."""
    record = watermarked_record(sample, num_tokens=num_tokens, **{"spec": SPEC, **options})
    return replace(record, columns={"turn": np.arange(num_tokens)}, checksum=None)


RECORDS = [make(0, 13, missing=[2, (4, 5), (5, 1), (5, 2)]), make(1, 5), make(2, 9, missing=[(0, 7)])]
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed"},
    "padded": {"layout": "padded"},
    "left": {"layout": "padded", "padding_side": "left"},
    "truncated": {"layout": "packed", "max_length": 7, "truncate": "left"},
}


def tensors(batch: RouteBatch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch, NaN made comparable."""
    found = {name: getattr(batch, name) for name in ("routes", *BY_ROW, *WHOLE)}
    return {name: value.nan_to_num(nan=9.0) for name, value in {**found, **batch.columns}.items()}


def require_equal(expected: RouteBatch, actual: RouteBatch) -> None:
    """All tensors, the plan, the geometry and the counts."""
    assert (expected.spec, expected.plan.shape, expected.keys) == (actual.spec, actual.plan.shape, actual.keys)
    assert expected.coverage() == actual.coverage()
    for name, value in tensors(expected).items():
        assert torch.equal(value, tensors(actual)[name]), name


# ----------------------------------------------------------------------------------------------------------------------
# Three kinds of parallelism at once
# ----------------------------------------------------------------------------------------------------------------------


def zigzag(dense: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Chunks ``rank`` and ``2*world - 1 - rank`` of axis 0."""
    parts = dense.chunk(2 * world)
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]])


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_cp4_sp2_pp3_by_slicing(options: dict[str, Any]) -> None:
    """Each of 24 ranks has what slicing the dense tensor gives it, and together they have all of it, once."""
    whole = collate(RECORDS, SPEC, **laid_out(options, pad_to_multiple_of=16))
    edges = whole.cu_seqlens_padded.tolist()
    dense_NLK = whole.routes.reshape(whole.num_rows, *SPEC.row_shape)
    rebuilt_NLK = torch.full_like(dense_NLK, -2)
    numbers_N = torch.arange(whole.num_rows)
    merged = []
    for stage in range(3):
        layers = stage_layers(SPEC.layer_ids, num_layers=8, pipeline_parallel=(stage, 3), counts=[2, 3, 3])
        slots = [SPEC.slot(layer) for layer in layers]
        for context in range(4):
            local = [zigzag(numbers_N[a:b], context, 4) for a, b in pairwise(edges)]
            for part in range(2):
                halves = [rows.chunk(2)[part] for rows in local] if whole.layout == "padded" else []
                rows = torch.cat(halves) if halves else torch.cat(local).chunk(2)[part]
                shard = Shard(context_parallel=(context, 4), sequence_parallel=(part, 2), layers=layers)
                found = collate(RECORDS, SPEC, **laid_out(options, pad_to_multiple_of=16), shard=shard)

                assert torch.equal(dense_NLK[rows][:, slots], found.routes.reshape(-1, len(slots), 3))
                for name in BY_ROW:
                    expected, actual = getattr(whole, name).reshape(-1)[rows], getattr(found, name).reshape(-1)
                    if name != "states":  # what is partial over six layers may be whole over two
                        assert torch.equal(expected.nan_to_num(nan=9.0), actual.nan_to_num(nan=9.0)), name
                for slot, layer in zip(slots, layers, strict=True):
                    assert torch.equal(dense_NLK[rows, slot], found.layer(layer))
                    rebuilt_NLK[rows, slot] = found.layer(layer)
                if stage == 0:
                    merged.append(found.coverage())

    assert torch.equal(dense_NLK, rebuilt_NLK)
    first = collate(RECORDS, SPEC.select([1]), **laid_out(options))
    assert first.coverage() == reduce(Coverage.merge, merged)


@given(
    context=st.integers(1, 3).flatmap(lambda world: st.tuples(st.integers(0, world - 1), st.just(world))),
    sequence=st.integers(1, 3).flatmap(lambda world: st.tuples(st.integers(0, world - 1), st.just(world))),
    layers=st.none() | st.sets(st.sampled_from(SPEC.layer_ids), min_size=1),
    kind=st.sampled_from(("zigzag", "contiguous")),
    uneven=st.booleans(),
    options=st.sampled_from(list(LAYOUTS.values())),
)
def test_a_shard_made_alone_is_the_shard_cut_out(
    context: tuple[int, int],
    sequence: tuple[int, int],
    layers: set[int] | None,
    kind: Any,
    uneven: bool,
    options: dict[str, Any],
) -> None:
    """Collating for a rank, and cutting the batch that all ranks make up, give equal tensors, counts and plans."""
    cuts: dict[str, Any] = {
        "context_parallel": context,
        "sequence_parallel": sequence,
        "context_layout": kind,
        "uneven": uneven,
        "layers": None if layers is None else tuple(sorted(layers)),
    }
    shard = Shard(**cuts)
    alone = collate(RECORDS, SPEC, **laid_out(options), shard=shard)
    whole = collate(RECORDS, SPEC, **laid_out(options, pad_to_multiple_of=shard.multiple))

    require_equal(whole.shard(**cuts), alone)


def test_a_rank_without_rows_holds_nothing_and_says_so() -> None:
    """More ranks than rows: the last has tensors without rows, a layer of none, and no coverage."""
    batch = collate([make(0, 3)], SPEC, layout="packed").shard(sequence_parallel=(3, 4), uneven=True)

    assert (0, 3) == batch.layer(5).shape
    assert (0, 0) == (batch.num_rows, batch.coverage().total)


def test_a_rank_makes_its_own_rows_and_layers_alone() -> None:
    """One rank of 4 x 3 peaks far below the whole batch, and no array of its batch is a view of a larger one."""
    records = [watermarked_record(sample, num_tokens=2_048, spec=SPEC) for sample in range(4)]
    options: dict[str, Any] = {"layout": "packed", "pad_to_multiple_of": 8}
    whole = collate(records, SPEC, **laid_out(options))
    size = sum(value.nbytes for value in tensors(whole).values())
    tracemalloc.start()
    batch = collate(records, SPEC, **laid_out(options), shard=Shard(context_parallel=(1, 4), layers=(3, 5)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    own = sum(value.nbytes for value in tensors(batch).values())

    assert whole.routes.nbytes == 12 * batch.routes.nbytes == 12 * batch.routes.untyped_storage().nbytes()
    assert peak < 0.4 * size
    assert own < size / 6


# ----------------------------------------------------------------------------------------------------------------------
# Records, microbatches, layouts
# ----------------------------------------------------------------------------------------------------------------------


def test_data_parallel_ranks_batch_their_own_records() -> None:
    """Collated or streamed, a rank has each world-th record, whatever else it cuts."""
    records = [make(sample, 4) for sample in range(6)]
    for rank in range(3):
        shard = Shard(data_parallel=(rank, 3), context_parallel=(1, 2))
        expected = collate(
            [records[rank], records[rank + 3]], SPEC, layout="packed", shard=Shard(context_parallel=(1, 2))
        )

        require_equal(expected, collate(records, SPEC, layout="packed", shard=shard))
        (streamed,) = microbatches(records, tokens=64, spec=SPEC, shard=shard)
        require_equal(expected, streamed)


def test_ranks_of_one_batch_form_the_same_microbatches() -> None:
    """The budget counts rows before the cut, so context-parallel ranks hold the same records at every step."""
    records = [make(sample, 1 + sample * 5 % 9) for sample in range(12)]
    found = [
        list(microbatches(records, tokens=32, spec=SPEC, sort_within=6, shard=Shard(context_parallel=(rank, 2))))
        for rank in range(2)
    ]

    assert [batch.keys for batch in found[0]] == [batch.keys for batch in found[1]]
    assert all(batch.num_rows <= 16 for batch in found[0])
    assert [record.key for record in records] == sorted(
        (key for batch in found[0] for key in batch.keys), key=lambda key: int(key.sample_id.split("-")[1])
    )


def test_sorting_groups_like_lengths() -> None:
    """Held and sorted, padded microbatches carry less padding than in the source's order."""
    records = [make(sample, 8 if sample % 2 else 1) for sample in range(8)]

    def padding(**options: Any) -> int:
        return sum(
            int(batch.pad_mask.sum())
            for batch in microbatches(records, tokens=16, spec=SPEC, layout="padded", **laid_out(options))
        )

    assert (28, 0) == (padding(), padding(sort_within=8))


def test_truncation_cuts_every_tensor_alike() -> None:
    """The last tokens stay, with their own ids, routes and states; the batch says what was dropped."""
    batch = collate([make(0, 6)], SPEC, layout="packed", options=BatchOptions(max_length=4, truncate="left"))

    assert [3, 4, 5, 6] == batch.token_ids.tolist()
    assert [2] == batch.plan.dropped.tolist()
    assert [4] == batch.lengths.tolist()
    assert watermark(0, 2, layer=5, k=np.arange(3)).tolist() == batch.layer(5)[0].tolist()
    assert (4, 1) == (batch.coverage().total, batch.coverage().count("not_fed"))


def test_prompts_and_responses_meet_at_one_position() -> None:
    """verl's rows: prompts end, responses begin at the same column; the routes stand where the tokens stand."""
    records = [make(0, 6, prompt_tokens=2), make(1, 5, prompt_tokens=4)]
    prompts = [prompt_tokens(record) for record in records]
    plan = TokenPlan.prompt_response(prompts, [4, 1], prompt_len=5, response_len=5)
    batch = collate(records, SPEC, plan=plan, options=BatchOptions(pad_token_id=7))

    assert [[7, 7, 7, 1, 2, 3, 4, 5, 6, 7], [7, 1001, 1002, 1003, 1004, 1005, 7, 7, 7, 7]] == batch.token_ids.tolist()
    assert [[False] * 5 + [True] * 4 + [False], [False] * 5 + [True] + [False] * 4] == batch.generation_mask.tolist()
    assert watermark(0, 1, layer=2, k=np.arange(3)).tolist() == batch.routes[0, 4, 1].tolist()
    alone = collate(
        records, SPEC, plan=plan, shard=Shard(sequence_parallel=(1, 2)), options=BatchOptions(pad_token_id=7)
    )
    require_equal(batch.shard(sequence_parallel=(1, 2)), alone)
    with pytest.raises(UsageError, match="layout"):  # the plan pads: a packed batch would not come
        collate(records, SPEC, layout="packed", plan=plan)


# ----------------------------------------------------------------------------------------------------------------------
# Filler
# ----------------------------------------------------------------------------------------------------------------------


def test_filler_is_numbered_after_the_cut_and_touches_padding_alone() -> None:
    """Padding of the rank is even over ranks of experts; lost rows stay MISSING; the records stay what they were."""
    spec = replace(SPEC, num_experts=32_752)  # what 8 ranks divide
    records = [
        replace(watermarked_record(sample, num_tokens=5, spec=SPEC, missing=[1]), spec=spec, checksum=None)
        for sample in range(2)
    ]
    shard = Shard(context_parallel=(0, 2))
    bare = collate(records, spec, layout="packed", shard=shard, options=BatchOptions(pad_to_multiple_of=16))
    filled = collate(
        records,
        spec,
        layout="packed",
        shard=shard,
        options=BatchOptions(pad_to_multiple_of=16, fill="balanced", expert_parallel=8),
    )
    pads = bare.pad_mask

    assert torch.equal(bare.routes[~pads], filled.routes[~pads])
    assert torch.equal(bare.pad_mask, filled.pad_mask)
    assert bool((bare.routes[pads] == MISSING).all())
    assert bool((filled.routes[~pads] == MISSING).any())
    for layer in spec.layer_ids:
        by_rank = torch.bincount(filled.layer(layer)[pads].flatten() // (32_752 // 8), minlength=8)
        assert int(by_rank.max() - by_rank.min()) <= 1
    assert bare.coverage() == filled.coverage()
    for record in records:
        record.verify()


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

BATCH = collate([make(0, 8)], SPEC, layout="packed")
FILLED = collate([make(0, 8)], SPEC, layout="packed", options=BatchOptions(fill="balanced"))

REFUSED: dict[str, tuple[Callable[[], object], ErrorKind, str]] = {
    "world": (lambda: BATCH.shard(context_parallel=(0, 3)), ErrorKind.ARGUMENT, "6 equal chunks"),
    "twice": (
        lambda: BATCH.shard(context_parallel=(0, 2)).shard(sequence_parallel=(0, 2)),
        ErrorKind.ARGUMENT,
        "whole plan",
    ),
    "filled": (lambda: FILLED.shard(context_parallel=(0, 2)), ErrorKind.ARGUMENT, "after the last cut"),
    "layer": (lambda: BATCH.shard(layers=[4]), ErrorKind.LAYERS, "captured layers"),
    "records": (lambda: collate([make(0, 2)], SPEC, shard=Shard(data_parallel=(0, 2))), ErrorKind.ARGUMENT, "got 1"),
    "streamed_records": (
        lambda: list(microbatches([make(0, 2)], tokens=8, spec=SPEC, shard=Shard(data_parallel=(1, 2)))),
        ErrorKind.ARGUMENT,
        "divides, got 1",
    ),
    "seq_len": (
        lambda: collate([make(0, 2)], SPEC, shard=Shard(context_parallel=(0, 2)), options=BatchOptions(seq_len=6)),
        ErrorKind.ARGUMENT,
        "multiple of 4, got 6",
    ),
    "plan_and_options": (
        lambda: collate([make(0, 2)], SPEC, plan=TokenPlan.padded([2]), options=BatchOptions(seq_len=2)),
        ErrorKind.ARGUMENT,
        "got both",
    ),
    "another_plan": (
        lambda: collate([make(0, 2)], SPEC, plan=TokenPlan.padded([3])),
        ErrorKind.ARGUMENT,
        r"records of \[2\] tokens",
    ),
    "fill": (lambda: collate([make(0, 2)], SPEC, options=BatchOptions(fill="zero")), ErrorKind.ARGUMENT, "'zero'"),  # type: ignore[arg-type]
    "ranks_of_experts": (
        lambda: collate([make(0, 2)], SPEC, options=BatchOptions(fill="balanced", expert_parallel=8)),
        ErrorKind.ARGUMENT,
        "expert_parallel=8 divides",
    ),
    "max_length": (
        lambda: collate([make(0, 5)], SPEC, options=BatchOptions(max_length=4)),
        ErrorKind.TOO_LONG,
        "max_length=4.*sample-0",
    ),
    "held": (lambda: microbatches([], tokens=8, spec=SPEC, sort_within=0), ErrorKind.ARGUMENT, "sort_within"),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_a_shard_that_cannot_be_is_refused(call: Callable[[], object], kind: ErrorKind, message: str) -> None:
    """Each refusal has its kind and says what would do."""
    with pytest.raises((UsageError, SpecError), match=message) as caught:
        call()

    assert kind == caught.value.kind
