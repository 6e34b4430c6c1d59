"""Joining with batches that trainers made, in the layouts that trainers make.

Axes: B sequences, S positions, T packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, collate
from routeplane.batch.matching import join
from routeplane.batch.slots import Shard
from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import Capture, CaptureState
from routeplane.record.spec import MISSING
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SPEC = watermarked_spec(layers=(1, 4), top_k=3)
#: a real token id too: what is padding is never told by the id
PAD = 3


def make(sample: int, num_tokens: int, **options: Any) -> RouteRecord:
    """A watermarked record."""
    return watermarked_record(sample, num_tokens=num_tokens, spec=SPEC, last_token_fed=True, **options)


@dataclass(frozen=True, kw_only=True)
class TrainerBatch:
    """What a trainer holds: ids, and which rows are padding."""

    ids: NDArray[np.int64]
    pads: NDArray[np.bool_]


def place(records: list[RouteRecord], leads: list[int], width: int) -> TrainerBatch:
    """Rows of ``width`` positions, record b from position ``leads[b]`` on."""
    ids = np.full((len(records), width), PAD)
    pads = np.ones(ids.shape, dtype=bool)
    for row, (record, lead) in enumerate(zip(records, leads, strict=True)):
        ids[row, lead : lead + record.num_tokens] = record.token_ids
        pads[row, lead : lead + record.num_tokens] = False
    return TrainerBatch(ids=ids, pads=pads)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=5),
    data=st.data(),
)
def test_routes_go_where_the_trainer_has_the_tokens(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Any order of samples and any padding before and after: every real row has its token's ids, padding has none."""
    records = [make(sample, length) for sample, (length, _) in enumerate(shapes)]
    order = data.draw(st.permutations(range(len(records))))
    chosen = [records[index] for index in order]
    batch = place(chosen, [shapes[index][1] for index in order], 10)

    joined = join(batch.ids, records, sample_ids=[record.sample_id for record in chosen], pad_mask=batch.pads)
    found = collate(joined.records, SPEC, plan=joined.plan, options=BatchOptions(pad_token_id=PAD))

    assert batch.ids.tolist() == found.token_ids.tolist()
    assert batch.pads.tolist() == found.pad_mask.tolist()
    for row, index in enumerate(order):
        length, lead = shapes[index]
        for position in range(10):
            inside = lead <= position < lead + length
            for slot, layer in enumerate(SPEC.layer_ids):
                expected = watermark(index, position - lead, layer=layer, k=np.arange(3)) if inside else [MISSING] * 3
                assert list(expected) == found.routes[row, position, slot].tolist()


def test_prompts_right_aligned_and_responses_left_aligned() -> None:
    """The verl layout: an attention mask around the seam joins as ``prompt_response`` would have laid it out."""
    records = [make(0, 5, prompt_tokens=2), make(1, 4, prompt_tokens=3)]
    batch = place(records, [4 - 2, 4 - 3], 4 + 5)
    attention_mask = torch.from_numpy((~batch.pads).astype(np.int64))

    joined = join(
        torch.from_numpy(batch.ids),
        records,
        sample_ids=["sample-0", "sample-1"],
        pad_mask=~attention_mask.bool(),
    )

    assert [[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6, 7]] == joined.plan.positions().tolist()
    assert [2, 3, 4, 5, 6] == np.flatnonzero(joined.plan.record_N[:9] == 0).tolist()


def test_packed_batches_join_by_their_offsets() -> None:
    """Sequences one after another, one of them padded at its end, by lengths."""
    records = [make(0, 3), make(1, 2)]
    ids = np.concatenate([records[1].token_ids, [PAD, PAD], records[0].token_ids])

    joined = join(ids, records, sample_ids=["sample-1", "sample-0"], cu_seqlens=[0, 4, 7], lengths=[2, 3])

    assert [0, 0, -1, -1, 1, 1, 1] == joined.plan.record_N.tolist()
    assert ["sample-1", "sample-0"] == [record.sample_id for record in joined.records]
    assert [0, 1, 2, 3, 0, 1, 2] == joined.plan.positions().tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_packed_batch_is_cut_as_the_trainer_cuts_it(rank: int) -> None:
    """The NeMo layout: sequences padded to 2*CP*TP, joined whole, then cut by chunks like the trainer's own ids."""
    records = [make(0, 5), make(1, 7), make(2, 12)]
    edges = [0, 8, 16, 32]
    ids = np.full(32, PAD)
    for record, start in zip(records, edges, strict=False):
        ids[start : start + record.num_tokens] = record.token_ids
    own: list[int] = []
    for start, stop in pairwise(edges):
        parts = np.split(ids[start:stop], 4)
        own += [*parts[rank], *parts[3 - rank]]

    found = join(ids, records, sample_ids=["sample-0", "sample-1", "sample-2"], cu_seqlens=edges, lengths=[5, 7, 12])
    batch = collate(
        found.records,
        SPEC,
        plan=found.plan,
        shard=Shard(context_parallel=(rank, 2)),
        options=BatchOptions(pad_token_id=PAD),
    )

    assert own == batch.token_ids.tolist()
    assert edges == batch.cu_seqlens_padded.tolist()
    for row, token_id in enumerate(own):
        sample, token = divmod(token_id - 1, 1_000)
        real = not batch.pad_mask[row]
        assert real == bool(batch.states[row] >= 0)
        if real:
            assert watermark(sample, token, layer=4, k=np.arange(3)).tolist() == batch.layer(4)[row].tolist()


def test_a_key_tells_attempts_apart() -> None:
    """Where an id has several records, the whole key finds one."""
    again = replace(make(0, 3), attempt=1, token_ids=np.asarray([7, 8, 9]), checksum=None)

    joined = join([[7, 8, 9]], [make(0, 3), again], sample_ids=[RecordKey("sample-0", 1, 0)])

    assert [again.key] == [record.key for record in joined.records]


def test_padding_may_stand_between_tokens() -> None:
    """Prompt and response with padding after each: tokens keep their own positions, and their routes."""
    pads = [[False, False, True, True, False, True]]
    records = [make(0, 3)]

    found = join([[1, 2, PAD, PAD, 3, PAD]], records, sample_ids=["sample-0"], pad_mask=pads)
    batch = collate(found.records, SPEC, plan=found.plan, options=BatchOptions(pad_token_id=PAD))

    assert [0, 1, -1, -1, 2, -1] == found.plan.token_N.tolist()
    assert [0, 1, 2] == batch.position_ids[~batch.pad_mask].tolist()
    assert watermark(0, 2, layer=1, k=np.arange(3)).tolist() == batch.routes[0, 4, 0].tolist()


def test_padding_ids_are_never_compared() -> None:
    """Whatever stands at padding, -100 and huge ids included, does not matter."""
    ids = np.asarray([[1, 2, -100], [1001, 2**40, 5]])

    joined = join(ids, [make(0, 2), make(1, 1)], sample_ids=["sample-0", "sample-1"], lengths=[2, 1])

    assert [2, 1] == joined.plan.lengths.tolist()


def test_every_finding_is_named() -> None:
    """One error lists every sequence that does not match, with its sample and its token."""
    records = [make(0, 3), make(1, 3), make(2, 3)]
    with pytest.raises(DataError) as caught:
        join([[1, 9, 3], [1001, 1002, 1003], [2001, 2002, 7]], records, sample_ids=["sample-0", "sample-1", "sample-2"])

    assert [("sample-0", 1), ("sample-2", 2)] == [(each.sample, each.token) for each in caught.value.problems]
    assert {ErrorKind.TOKEN_MISMATCH} == {each.kind for each in caught.value.problems}


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    limit=st.integers(1, 6),
    side=st.sampled_from(("left", "right")),
    extra=st.integers(0, 2),
)
def test_truncated_rows_get_the_routes_of_their_tokens(lengths: list[int], limit: int, side: Any, extra: int) -> None:
    """A trainer cuts either end, appends an end of sequence and adds a dummy row: tokens keep their own routes."""
    records = [make(sample, length) for sample, length in enumerate(lengths)]
    kept = [record.token_ids[:limit] if side == "right" else record.token_ids[-limit:] for record in records]
    whole = [record.num_tokens <= limit for record in records]
    rows = [[*ids, *[PAD] * (extra if all_there else 0)] for ids, all_there in zip(kept, whole, strict=True)]
    packed = [np.asarray(row) for row in [*rows, [7, 7]]]

    names = [*(record.sample_id for record in records), None]
    unsampled = [np.zeros(len(row), dtype=np.int64) for row in packed]
    found = join(packed, records, sample_ids=names, truncated=side, sampled=unsampled)
    batch = collate(found.records, SPEC, plan=found.plan)
    routes, pads = batch.routes.view(-1, *SPEC.row_shape), batch.pad_mask.view(-1)

    start = 0
    for record, ids, row in zip(records, kept, rows, strict=True):
        first = 0 if side == "right" else record.num_tokens - len(ids)
        expected = record.routes[first : first + len(ids)]
        assert expected.tolist() == routes[start : start + len(ids)].tolist()
        assert pads[start + len(ids) : start + len(row)].all()
        start += len(row)
    assert [*map(len, kept), 0] == found.plan.lengths.tolist()
    assert len(records) == found.report.sequences
    assert 1 == found.report.dummies
    assert sum(record.num_tokens for record in records) - sum(map(len, kept)) == found.report.truncated_tokens
    assert extra * sum(whole) == found.report.suffix_tokens
    assert found.report.scalars()["routeplane/join_truncated"] == len(whole) - sum(whole)


def ending(*states: tuple[int, CaptureState]) -> RouteRecord:
    """A record of six tokens, two of them prompt, whose captures stop at these tokens; absent rows are MISSING."""
    record = make(0, 6, prompt_tokens=2)
    routes, start, captures = record.routes.copy(), 0, []
    for stop, state in states:
        captures.append(Capture(start=start, stop=stop, call="call-0", weights_version=None, state=state))
        routes[start:stop] = routes[start:stop] if state == "captured" else -1
        start = stop
    return replace(record, routes=routes, captures=tuple(captures), checksum=None)


@pytest.mark.parametrize("state", ["lost", "aborted", "not_captured"])
def test_a_suffix_does_not_hide_rows_that_were_lost(state: CaptureState) -> None:
    """A record that ends in rows the engine lost is not whole: what follows may be the tokens that are lost too."""
    cut = ending((4, "captured"), (6, state))
    with pytest.raises(DataError, match=f"whose last token is {state} can have no suffix"):
        join([[1, 2, 3, 4, 5, 6, 7]], [cut], sample_ids=["sample-0"], sampled=[[0] * 7])


def test_a_token_that_was_sampled_behind_the_record_shows_lost_rows() -> None:
    """Behind a last token that was captured one sampled token may follow, at once, which was never fed; behind one that
    was not fed none may: what came before a sampled token was fed."""
    captured, unfed = ending((6, "captured")), ending((5, "captured"), (6, "not_fed"))
    ids = [[1, 2, 3, 4, 5, 6, 7, 8]]
    inside = [0, 0, 1, 1, 1, 1]

    for record, allowed in ((captured, ([0, 0], [1, 0])), (unfed, ([0, 0],))):
        for behind in ([0, 0], [1, 0], [0, 1], [1, 1]):
            if behind in allowed:
                report = join(ids, [record], sample_ids=["sample-0"], sampled=[inside + behind]).report
                assert (2, sum(behind)) == (report.suffix_tokens, report.suffix_sampled)
            else:
                with pytest.raises(DataError, match="rows before it were fed and lost") as caught:
                    join(ids, [record], sample_ids=["sample-0"], sampled=[inside + behind])
                token = 6 + max(at for at, one in enumerate(behind) if one)
                assert [(ErrorKind.ROUTES_MISSING, token)] == [(e.kind, e.token) for e in caught.value.problems]


def test_what_was_never_fed_may_have_a_suffix_and_interior_loss_stays_counted() -> None:
    """The last sampled token was never fed: tokens may follow; a row that was lost before it counts as before."""
    record = ending((3, "captured"), (4, "lost"), (5, "captured"), (6, "not_fed"))
    found = join([[1, 2, 3, 4, 5, 6, 7, 8]], [record], sample_ids=["sample-0"], sampled=[[0] * 8])
    batch = collate(found.records, SPEC, plan=found.plan)

    assert 2 == found.report.suffix_tokens
    assert [False] * 6 + [True] * 2 == batch.pad_mask[0].tolist()
    assert record.coverage().rows == batch.coverage().rows
    assert (1, 1) == (batch.coverage().count("lost"), batch.coverage().missing)


def test_nested_tensors_are_packed() -> None:
    """A jagged tensor brings its own offsets; integer masks are masks."""
    records = [make(0, 3), make(1, 2)]
    nested = torch.nested.nested_tensor([torch.tensor(list(each.token_ids)) for each in records], layout=torch.jagged)
    names = ["sample-0", "sample-1"]

    assert [0, 3, 5] == join(nested, records, sample_ids=names).plan.cu_seqlens.tolist()
    padded, mask = torch.tensor([[1, 2, 3], [1001, 1002, 0]]), torch.tensor([[0, 0, 0], [0, 0, 1]])
    assert [3, 2] == join(padded, records, sample_ids=names, pad_mask=mask).plan.lengths.tolist()


IDS = [[1, 2, 3]]
Kind = tuple[type[RouteplaneError], ErrorKind]
ARGUMENT: Kind = (UsageError, ErrorKind.ARGUMENT)
MISMATCH: Kind = (DataError, ErrorKind.TOKEN_MISMATCH)


def joined(ids: Any = IDS, *, sample_ids: Any = ("sample-0",), **more: Any) -> object:
    """A join with one record of the ids 1, 2, 3."""
    return join(ids, [make(0, 3)], sample_ids=sample_ids, **more)


REFUSED: dict[str, tuple[Callable[[], object], Kind, str]] = {
    "token": (lambda: joined([[1, 9, 3]]), MISMATCH, "id 2 as in record sample-0/0/0, got id 9"),
    "shorter": (lambda: joined(lengths=[2]), MISMATCH, "expected id 3 .* got an end after 2 tokens"),
    "longer": (lambda: joined([[1, 2, 3, 4]]), MISMATCH, "an end after 3 tokens .* got id 4"),
    "nothing": (lambda: joined(lengths=[0]), MISMATCH, "an end after 0 tokens"),
    "unknown": (
        lambda: joined(sample_ids=["sample-5"]),
        (DataError, ErrorKind.ROUTES_MISSING),
        "a record of sample-5, got none",
    ),
    "ambiguous": (
        lambda: join(IDS, [make(0, 3), replace(make(0, 3), attempt=1, checksum=None)], sample_ids=["sample-0"]),
        (DataError, ErrorKind.DUPLICATE_KEY),
        "sample-0/0/0, sample-0/1/0",
    ),
    "count": (lambda: joined(sample_ids=["sample-0"] * 2), ARGUMENT, "each of 1 sequences, got 2"),
    "float_ids": (lambda: joined([[1.0]]), ARGUMENT, "integers"),
    "no_offsets": (lambda: joined([1, 2, 3]), ARGUMENT, "cu_seqlens with packed ids"),
    "offsets": (lambda: joined([1, 2, 3], cu_seqlens=[0, 2]), ARGUMENT, "rising from 0 to 3"),
    "mask": (lambda: joined(pad_mask=[[0, 0, 2]]), ARGUMENT, "pad_mask as bool"),
    "cut_elsewhere": (lambda: joined([[2, 3]], truncated="right"), MISMATCH, "id 1 .* got id 2"),
    "suffix": (lambda: joined([[1, 2, 9, 4]], sampled=[[0] * 4]), MISMATCH, "id 3 .* got id 9"),
    "appended": (lambda: joined([[1, 2, 3, 4]]), MISMATCH, "an end after 3 tokens"),
    "sampled": (lambda: joined(sampled=[[0, 0]]), ARGUMENT, "sampled as bool"),
    "policy": (lambda: joined(truncated="outer"), ARGUMENT, "outer"),
    "nested_offsets": (lambda: joined([[1, 2, 3], [4]], cu_seqlens=[0, 3, 4]), ARGUMENT, "its own"),
    "both": (lambda: joined(pad_mask=[[False] * 3], lengths=[3]), ARGUMENT, "got both"),
    "lengths": (lambda: joined(lengths=[4]), ARGUMENT, "within their"),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_match_is_refused(call: Callable[[], object], kind: Kind, message: str) -> None:
    """Each refusal has its type and kind and says what was found where."""
    with pytest.raises(kind[0], match=message) as caught:
        call()

    assert kind[1] == caught.value.kind
