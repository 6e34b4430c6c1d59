"""Plans and cuts of the stacks, each against its own arithmetic as its code has it, row by row.

Read from: NeMo RL 7ea279a (packing, zigzag per sequence), slime 0.3 and miles (zigzag per sequence, padding after the
cut; chunks of the pack under allgather_cp), prime-rl 0.5 (padding at the end, chunks of the pack), verl 0.9.1 (padding
to twice the context-parallel world per sequence), ms-swift 3602360 (padding-free: the same, then sequence parallel),
SkyRL 1fe8c87 (packed as Megatron wants it, or padded to the right again; then sequence parallel), tunix #2046 with
maxtext #4826 (prompts left, completions right, one array over a mesh that cuts its batch axis).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane import ErrorKind
from routeplane.batch import BatchOptions, PlanOptions, Shard, TokenPlan, collate
from routeplane.errors import UsageError
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Callable

Row = tuple[int, int]
PAD: Row = (-1, -1)

lengths = st.lists(st.integers(1, 13), min_size=1, max_size=6)
worlds = st.integers(1, 4)


def rows_of(plan: TokenPlan) -> list[Row]:
    """``(sequence, token)`` of each row."""
    return list(zip(plan.record_N.tolist(), plan.token_N.tolist(), strict=True))


def tokens(lengths: list[int]) -> list[list[Row]]:
    """The tokens of each sequence."""
    return [[(sequence, token) for token in range(length)] for sequence, length in enumerate(lengths)]


def zigzag(rows: list[Row], rank: int, world: int) -> list[Row]:
    """Chunks ``rank`` and ``2*world - 1 - rank`` of ``2*world``, as Megatron's context parallelism wants them."""
    size = len(rows) // (2 * world)
    low, high = rank * size, (2 * world - 1 - rank) * size
    return rows[low : low + size] + rows[high : high + size]


@given(lengths=lengths, world=worlds, data=st.data(), multiple=st.sampled_from((1, 4, 16)))
def test_slime_pads_each_rank_after_the_cut(lengths: list[int], world: int, data: st.DataObject, multiple: int) -> None:
    """slime, miles: every sequence to twice the world, the rank's two chunks, then the rank's rows to a multiple."""
    rank = data.draw(st.integers(0, world - 1))
    theirs: list[Row] = []
    for sequence in tokens(lengths):
        padded = sequence + [PAD] * (-len(sequence) % (2 * world if world > 1 else 1))
        theirs += zigzag(padded, rank, world) if world > 1 else padded
    theirs += [PAD] * (-len(theirs) % (2 * multiple))

    shard = Shard(context_parallel=(rank, world))
    options = PlanOptions(pad_total_to_multiple_of=2 * multiple * world).for_shard(shard)
    ours = options.plan(lengths, layout="packed", shard=shard)

    assert theirs == rows_of(ours)
    assert rows_of(ours) == rows_of(options.plan(lengths, layout="packed").cut(shard))


@given(lengths=lengths, world=worlds, data=st.data(), multiple=st.sampled_from((1, 8)))
def test_prime_rl_cuts_chunks_of_the_pack(lengths: list[int], world: int, data: st.DataObject, multiple: int) -> None:
    """prime-rl, slime and miles under allgather_cp: the pack padded at its end, and one equal chunk a rank."""
    rank = data.draw(st.integers(0, world - 1))
    pack = [row for sequence in tokens(lengths) for row in sequence]
    pack += [PAD] * (-len(pack) % np.lcm(multiple, world))
    size = len(pack) // world

    shard = Shard(context_parallel=(rank, world), context_layout="pack_contiguous")
    options = PlanOptions(pad_total_to_multiple_of=multiple).for_shard(shard)

    assert pack[rank * size : (rank + 1) * size] == rows_of(options.plan(lengths, layout="packed", shard=shard))


@given(lengths=lengths, world=worlds, data=st.data())
def test_verl_and_nemo_rl_cut_every_sequence(lengths: list[int], world: int, data: st.DataObject) -> None:
    """NeMo RL, verl: slots that a trainer computed, tokens first, and zigzag chunks of each."""
    rank = data.draw(st.integers(0, world - 1))
    widths = [length + -length % (2 * world) + 2 * world * data.draw(st.integers(0, 1)) for length in lengths]
    theirs: list[Row] = []
    for sequence, width in zip(tokens(lengths), widths, strict=True):
        theirs += zigzag(sequence + [PAD] * (width - len(sequence)), rank, world)

    whole = TokenPlan.from_cu_seqlens(np.cumsum([0, *lengths]), cu_seqlens_padded=np.cumsum([0, *widths]))
    ours = whole.cut(Shard(context_parallel=(rank, world))) if world > 1 else whole

    if world > 1:
        assert theirs == rows_of(ours)
    assert lengths == ours.lengths.tolist()


@given(lengths=lengths, worlds=st.tuples(worlds, worlds), data=st.data())
def test_ms_swift_cuts_every_sequence_then_the_rank(
    lengths: list[int], worlds: tuple[int, int], data: st.DataObject
) -> None:
    """ms-swift: sequences rounded to twice the world, the pack to its padding, zigzag of each, then sequence parallel.

    Its padding behind the last sequence stands in sequences of twice the world of their own.
    """
    context, sequence = worlds
    rank, own = data.draw(st.integers(0, context - 1)), data.draw(st.integers(0, sequence - 1))
    unit = 2 * context if context > 1 else 1
    slots = [rows + [PAD] * (-len(rows) % unit) for rows in tokens(lengths)]
    rest = -sum(map(len, slots)) % (unit * sequence)
    slots += [[PAD] * unit] * (rest // unit)
    theirs = [row for rows in slots for row in (zigzag(rows, rank, context) if context > 1 else rows)]
    size = len(theirs) // sequence

    shard = Shard(context_parallel=(rank, context), sequence_parallel=(own, sequence))
    counts, widths = [*lengths, *[0] * (rest // unit)], [len(rows) for rows in slots]
    whole = TokenPlan.from_cu_seqlens(np.cumsum([0, *counts]), cu_seqlens_padded=np.cumsum([0, *widths]))

    assert theirs[own * size : (own + 1) * size] == rows_of(whole.cut(shard))


@given(lengths=lengths, worlds=st.tuples(worlds, worlds), data=st.data())
def test_skyrl_cuts_the_pack_by_context_then_sequence(
    lengths: list[int], worlds: tuple[int, int], data: st.DataObject
) -> None:
    """SkyRL with padding removed: sequences to a multiple of the tensor world (of both, twice, where context is cut),
    zigzag of each, and then one equal part of the rank's rows."""
    context, tensor = worlds
    rank, own = data.draw(st.integers(0, context - 1)), data.draw(st.integers(0, tensor - 1))
    unit = tensor * (2 * context if context > 1 else 1)
    theirs: list[Row] = []
    for sequence in tokens(lengths):
        padded = sequence + [PAD] * (-len(sequence) % unit)
        half = len(padded) // context // 2
        front, back = half * rank, len(padded) - half * (rank + 1)
        theirs += padded[front : front + half] + padded[back : back + half] if context > 1 else padded
    size = len(theirs) // tensor

    shard = Shard(context_parallel=(rank, context), sequence_parallel=(own, tensor))
    ours = PlanOptions(pad_to_multiple_of=unit).plan(lengths, layout="packed", shard=shard)

    assert theirs[own * size : (own + 1) * size] == rows_of(ours)


@given(lengths=lengths, tensor=worlds, data=st.data(), width=st.integers(13, 20))
def test_skyrl_moves_left_padding_to_the_right(
    lengths: list[int], tensor: int, data: st.DataObject, width: int
) -> None:
    """SkyRL without packing: its left-padded batch, tokens first, to the longest one's multiple; each row is cut."""
    own = data.draw(st.integers(0, tensor - 1))
    mask = np.asarray([[0] * (width - length) + [1] * length for length in lengths]) != 0
    left = TokenPlan.from_mask(mask)
    aligned = max(lengths) + -max(lengths) % tensor
    size = aligned // tensor
    theirs: list[Row] = []
    for sequence in range(len(lengths)):
        row = [pair for pair in rows_of(left) if pair[0] == sequence]
        row += [PAD] * (aligned - len(row))
        theirs += row[own * size : (own + 1) * size]

    ours = PlanOptions(pad_to_multiple_of=tensor).plan(lengths, layout="padded")

    assert theirs == rows_of(ours.cut(Shard(sequence_parallel=(own, tensor))) if tensor > 1 else ours)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7)), min_size=1, max_size=6),
    more=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_tunix_pads_both_sides_and_cuts_the_batch(
    shapes: list[tuple[int, int]], more: tuple[int, int], data: st.DataObject
) -> None:
    """tunix: prompts end and completions begin at one column; each device has equal parts of the batch axis."""
    left, right = max(prompt for prompt, _ in shapes) + more[0], max(answer for _, answer in shapes) + more[1]
    theirs: list[list[Row]] = []
    for at, (prompt, answer) in enumerate(shapes):
        row = [PAD] * (left - prompt) + [(at, token) for token in range(prompt + answer)]
        theirs.append(row + [PAD] * (right - answer))
    world = data.draw(st.sampled_from([count for count in (1, 2, 3) if len(shapes) % count == 0]))
    size, rank = len(shapes) // world, data.draw(st.integers(0, world - 1))
    part = slice(rank * size, (rank + 1) * size)

    prompts, answers = zip(*shapes, strict=True)
    whole = TokenPlan.prompt_response(prompts, answers, prompt_len=left, response_len=right)
    own = TokenPlan.prompt_response(prompts[part], answers[part], prompt_len=left, response_len=right)
    input_mask = np.asarray([[pair != PAD for pair in row] for row in theirs])

    assert [pair for row in theirs for pair in row] == rows_of(whole) == rows_of(TokenPlan.from_mask(input_mask))
    first = rank * size
    moved = [(pair[0] + first if pair != PAD else -1, pair[1]) for pair in rows_of(own)]
    assert [pair for row in theirs[part] for pair in row] == moved


@given(lengths=lengths, multiple=st.sampled_from((1, 2, 8)))
def test_offsets_are_the_plan(lengths: list[int], multiple: int) -> None:
    """The offsets of a plan, handed to attention kernels and taken back, are the plan."""
    plan = TokenPlan.packed(lengths, options=PlanOptions(pad_to_multiple_of=multiple, pad_total_to_multiple_of=16))
    again = TokenPlan.from_cu_seqlens(plan.cu_seqlens, cu_seqlens_padded=plan.cu_seqlens_padded)

    assert rows_of(plan) == rows_of(again)
    assert plan.position_N.tolist() == again.position_N.tolist()


@given(lengths=lengths, side=st.sampled_from(("left", "right")))
def test_a_mask_is_the_plan(lengths: list[int], side: str) -> None:
    """The mask of a padded plan, taken back, is the plan."""
    plan = TokenPlan.padded(lengths, options=PlanOptions(padding_side=side))  # type: ignore[arg-type]
    again = TokenPlan.from_mask(~plan.padding())

    assert rows_of(plan) == rows_of(again)
    assert plan.position_N.tolist() == again.position_N.tolist()


def test_padding_of_the_pack_is_counted_as_padding() -> None:
    """Sixteen rows of which five are tokens: eleven MISSING rows that no coverage counts, in a sequence of length 0."""
    spec = watermarked_spec(layers=(1, 2), top_k=2)
    records = [watermarked_record(sample, num_tokens=length, spec=spec) for sample, length in enumerate([2, 3])]
    batch = collate(records, spec, layout="packed", options=BatchOptions(pad_total_to_multiple_of=16))

    assert [2, 3, 0] == batch.lengths.tolist()
    assert [0, 2, 5, 16] == batch.cu_seqlens_padded.tolist()
    assert 11 == int(batch.pad_mask.sum())
    assert 5 == batch.coverage().total
    assert 2 == len(batch.keys) == batch.coverage().records
    assert bool((batch.routes[5:] == -1).all())


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "padded": (lambda: TokenPlan.padded([3], options=PlanOptions(pad_total_to_multiple_of=2)), "layout 'padded'"),
    "padded_cut": (
        lambda: TokenPlan.padded([4]).cut(Shard(context_parallel=(0, 2), context_layout="pack_contiguous")),
        "layout 'packed'",
    ),
    "odd_pack": (
        lambda: TokenPlan.packed([5]).cut(Shard(context_parallel=(0, 2), context_layout="pack_contiguous")),
        "2 equal chunks .pad_total_to_multiple_of=2.*got 5 rows",
    ),
    "falling": (lambda: TokenPlan.from_cu_seqlens([0, 3, 2]), "none below"),
    "no_start": (lambda: TokenPlan.from_cu_seqlens([1, 3]), "from 0 on"),
    "narrow_slot": (lambda: TokenPlan.from_cu_seqlens([0, 3], cu_seqlens_padded=[0, 2]), "slots of .2. rows"),
    "floats": (lambda: TokenPlan.from_cu_seqlens([0.0, 3.0]), "whole numbers"),
    "beyond_int32": (lambda: TokenPlan.from_cu_seqlens([0, 3, 2**31]), "2147483648"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    """Each refusal says what would do."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert ErrorKind.ARGUMENT == caught.value.kind
