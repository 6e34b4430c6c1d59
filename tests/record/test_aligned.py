"""Aligned columns: every operation gives what plain Python lists give, in both encodings; rules of standard names."""

from __future__ import annotations

import io
import itertools
import pickle
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, RouteplaneError
from routeplane.record.aligned import AlignedColumn, ColumnType, aligned_columns, concatenate_columns
from routeplane.record.assembly import UnfedTokens, assemble
from routeplane.record.calls import ModelCall, merge_layers
from routeplane.record.prefixes import as_delta, resolve
from routeplane.record.record import RouteRecord
from routeplane.record.validate import Scaling, Score, WeightsMeaning, as_float32, illegal_weights
from routeplane.stream import new_stream, open_stream
from routeplane.testing.builders import watermark, watermarked_record
from tests.plain_columns import KINDS, NARROW, WIDE, column, column_record, columns, entry, lists_of, plain

sizes = st.integers(2, 9)
seeds = st.integers(0, 6)


@given(seeds, sizes, st.data())
def test_cuts_and_selections_are_those_of_lists(seed: int, size: int, data: st.DataObject) -> None:
    """Slice and select, alone and together, also after a pickle."""
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    record = pickle.loads(pickle.dumps(column_record(seed, size)))
    part = record.slice(start, stop)
    chosen = part.select([4])

    assert plain(seed, range(size)) == lists_of(record)
    assert plain(seed, range(start, stop)) == lists_of(part)
    expected = plain(seed, range(start, stop))
    expected["layers"] = [one[1:] for one in expected["layers"]]
    assert expected == lists_of(chosen)
    part.verify()
    chosen.verify()
    assert all(not found.values.flags.writeable for found in record.columns.values())


@given(
    st.lists(st.tuples(seeds, sizes), min_size=1, max_size=4), st.sampled_from(["plain", "narrow"]), st.integers(1, 9)
)
def test_a_stream_gives_them_back(made: list[tuple[int, int]], encoding: str, max_bytes: int) -> None:
    """Any batching, both encodings: the same entries and checksums; cut and selected by the reader too."""
    given_ = [
        replace(column_record(seed, size, spec=NARROW), segment=place, checksum=None)
        for place, (seed, size) in enumerate(made)
    ]
    sink = io.BytesIO()
    with new_stream(sink, NARROW, encoding=encoding, max_bytes=max_bytes * 400) as writer:  # type: ignore[arg-type]
        for record in given_:
            writer.write(record)
    found = list(open_stream(sink.getvalue()))
    cut = list(open_stream(sink.getvalue()).select(layer_ids=[1], tokens=(1, 4)))

    assert [(one.checksum, lists_of(one)) for one in given_] == [
        (one.verify().checksum, lists_of(one)) for one in found
    ]
    assert [lists_of(one.slice(1, min(4, one.num_tokens)).select([1])) for one in given_] == [
        lists_of(one) for one in cut
    ]


@given(seeds, sizes, sizes)
def test_parts_join_to_the_whole(seed: int, first: int, second: int) -> None:
    """Concatenation of cuts, and any order of tokens, are those of lists."""
    for kind in KINDS:
        whole = column(seed, kind, range(first + second))
        joined = concatenate_columns([whole[:first], whole[first:]], name=kind, where="x")
        order = np.arange(first + second)[::-1].copy()

        assert whole.equals(joined)
        assert whole.take(order).tolist() == whole.tolist()[::-1]
        assert whole.copy().equals(whole)


@given(seeds, st.integers(3, 9), st.integers(1, 5))
def test_a_lean_delta_resolves_to_the_record(seed: int, size: int, more: int) -> None:
    """A longer record as a delta repeats no token, no entry and no row; resolved it is the record, in a chain too."""
    records = [
        replace(column_record(seed, size + step * more), segment=step, logprobs=None, checksum=None)
        for step in range(3)
    ]
    records = [replace(one, token_ids=np.arange(one.num_tokens), checksum=None) for one in records]
    stored = [records[0]]
    for base, record in itertools.pairwise(records):
        stored.append(as_delta(record, base, stored=stored[-1]))
    sink = io.BytesIO()
    with new_stream(sink, WIDE) as writer:
        for delta in stored:
            writer.write(delta)
    found = resolve(open_stream(sink.getvalue()))

    assert [one.checksum for one in records] == [one.checksum for one in found]
    assert [lists_of(one) for one in records] == [lists_of(one) for one in found]
    assert [size - 1 + step * more for step in range(2)] == [delta.tokens_start for delta in stored[1:]]
    assert all(len(delta.token_ids) == len(delta.routes) == more + 1 for delta in stored[1:])


def call(seed: int, *, prompt: int, generated: int, first: int, **changes: Any) -> ModelCall:
    """A call whose columns are those of ``seed``."""
    total = prompt + generated
    rows = watermark(0, np.arange(first, total - 1)[:, None, None], layer=np.asarray([[1], [4]]), k=np.arange(2))
    content: dict[str, Any] = {
        "prompt_ids": np.arange(prompt),
        "generation_ids": np.arange(prompt, total),
        "routes": rows,
        "first_row": first,
        "weights_version": 1,
        "call_id": f"c{seed}",
        "columns": columns(seed, range(total)),
    }
    return ModelCall(**{**content, **changes})


def test_assembly_gives_each_token_its_call() -> None:
    """A fed entry is of the call whose row stands, a sampled one of the call that brought the token; tails join."""
    calls = [call(0, prompt=3, generated=2, first=0), call(1, prompt=7, generated=2, first=4)]
    tail = UnfedTokens(token_ids=np.asarray([90, 91]), role="tool", call_id="seen", columns=columns(2, range(9, 11)))
    made = assemble([*calls, tail], WIDE, sample_id="s", on_missing="raise")
    (record,) = made.records
    sampled = [0] * 5 + [1] * 4 + [2] * 2
    fed = [0] * 4 + [1] * 5 + [2] * 2
    found = lists_of(record)

    for kind in KINDS:
        source = fed if kind in ("maybe", "layers") else sampled
        assert [entry(seed, kind, token) for token, seed in enumerate(source)] == found[kind], kind
    assert (8, 3, 0.0) == (record.coverage().fed, record.coverage().count("not_fed"), record.coverage().missing_share)
    assert 0 == made.report.drift_values
    again = assemble([calls[0], call(1, prompt=7, generated=2, first=2)], WIDE, sample_id="s")
    assert 4 == again.report.drift_values  # two rows twice, two fed columns


def test_a_trimmed_call_shows_what_it_lost() -> None:
    """A later call that begins one row too late left out the row of the last sampled token."""
    calls = [call(0, prompt=3, generated=2, first=0), call(1, prompt=7, generated=2, first=5)]
    (record,) = assemble(calls, WIDE, sample_id="s").records

    assert ("lost", 4, 5) == next(
        (capture.state, capture.start, capture.stop) for capture in record.captures if capture.state == "lost"
    )
    with pytest.raises(DataError, match="lost"):
        assemble(calls, WIDE, sample_id="s", on_missing="raise")


def test_layers_of_one_call_are_merged_with_their_entries() -> None:
    """Pipeline stages bring their layers' entries; other columns come once, or equal."""
    whole = call(0, prompt=3, generated=2, first=0)
    parts = [
        replace(
            whole,
            routes=whole.routes[:, [slot]],  # type: ignore[index]
            layer_ids=(layer,),
            columns={**whole.columns, "layers": whole.columns["layers"].pick_layers([slot])},
            checksum=None,
        )
        for slot, layer in ((1, 4), (0, 1))
    ]
    merged = merge_layers(parts)

    assert all(whole.columns[name].equals(merged.columns[name]) for name in KINDS)


def test_versions_inside_a_call_follow_the_forward() -> None:
    """The row of token t has the version that sampled t + 1."""
    made = call(0, prompt=3, generated=4, first=0, weights_version=None, versions=((3, 5, 7), (5, 7, 8)))
    (record,) = assemble([made], WIDE, sample_id="s").records

    assert [(3, None), (5, 7), (7, 8)] == [(span.stop, span.weights_version) for span in record.spans]
    assert [(4, 7), (6, 8), (7, None)] == [(one.stop, one.weights_version) for one in record.captures]
    for wrong in (((3, 5, 7),), ((2, 7, 1),), ((3, 3, 1), (3, 7, 1))):
        with pytest.raises(DataError, match="versions"):
            call(0, prompt=3, generated=4, first=0, weights_version=None, versions=wrong)


def test_flipped_bits_are_found() -> None:
    """Bits of a stream with every kind of column: refused, or what is read is the same."""
    sink = io.BytesIO()
    with new_stream(sink, NARROW, encoding="narrow") as writer:
        for seed in (1, 2):
            writer.write(column_record(seed, 5 + seed, spec=NARROW))
    data, rng = sink.getvalue(), np.random.default_rng(7)
    expected = [record.checksum for record in open_stream(data)]
    silent = 0
    for _ in range(300):
        changed = bytearray(data)
        place = int(rng.integers(len(data)))
        changed[place] ^= 1 << int(rng.integers(8))
        try:
            found = [record.verify().checksum for record in open_stream(bytes(changed))]
        except RouteplaneError:
            continue
        silent += found != expected

    assert 0 == silent


HALVES = WeightsMeaning(score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="float32")
WEIGHTS = np.full((5, 2, 2), 0.5, dtype=np.float32)
WEIGHTS[-1] = np.nan

BAD_WEIGHTS = {
    "nan_where_there_is_a_row": (np.where(np.arange(5)[:, None, None] == 1, np.nan, WEIGHTS), ("layers", "topk")),
    "a_number_where_there_is_none": (np.nan_to_num(WEIGHTS, nan=0.5), ("layers", "topk")),
    "infinite": (np.where(np.arange(5)[:, None, None] == 1, np.inf, WEIGHTS), ("layers", "topk")),
    "negative": (np.where(np.arange(5)[:, None, None] == 1, [-0.5, 1.5], WEIGHTS), ("layers", "topk")),
    "of_another_sum": (np.where(np.arange(5)[:, None, None] == 1, 0.4, WEIGHTS), ("layers", "topk")),
    "one_layer": (WEIGHTS[:, :1], ("layers", "topk")),
    "other_axes": (WEIGHTS, ("topk", "layers")),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_contradict_the_rows(name: str) -> None:
    """Routing weights are NaN exactly where the row is MISSING, and of the record's layers."""
    values, axes = BAD_WEIGHTS[name]
    record = watermarked_record(0, num_tokens=5, spec=WIDE)
    meaning = {"weights_meaning": HALVES.to_text()}
    good = AlignedColumn.of(WEIGHTS, aligned="fed", axes=("layers", "topk"))
    replace(record, columns={"route_weights": good}, attributes=meaning, checksum=None).without_routes().verify()
    bad = AlignedColumn.of(np.asarray(values, dtype=np.float32), aligned="fed", axes=axes)
    for weights, attributes in ((bad, meaning), (good, {}), (good, {"weights_meaning": "softmax"})):
        with pytest.raises(DataError) as caught:
            replace(record, columns={"route_weights": weights}, attributes=attributes, checksum=None)
        assert caught.value.kind is ErrorKind.TOKEN_COLUMN


SCALED = WeightsMeaning(
    score="sigmoid", renormalised=True, scaling="in", factor=2.5, multiplied="after", dtype="float32"
)
CANONICAL = '{"dtype":"float32","factor":2.5,"multiplied":"after","renormalised":true,"scaling":"in","score":"sigmoid"}'


def test_meaning_as_text() -> None:
    """The text is canonical: one meaning, one text."""
    assert CANONICAL == SCALED.to_text()
    assert SCALED == WeightsMeaning.from_text(CANONICAL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "softmax",
        "[]",
        CANONICAL.replace('"score":"sigmoid"', '"score":"relu"'),
        CANONICAL.replace('"scaling":"in"', '"scaling":true'),
        CANONICAL.replace('"scaling":"in"', '"scaling":"none"'),
        CANONICAL.replace("true", "1"),
        CANONICAL.replace("2.5", "2"),
        CANONICAL.replace("2.5", "2.50"),
        CANONICAL.replace("2.5", "0.0"),
        CANONICAL.replace("2.5", "-2.5"),
        CANONICAL.replace("2.5", "1000000.0"),
        CANONICAL.replace("2.5", "NaN"),
        CANONICAL.replace("2.5", "Infinity"),
        CANONICAL.replace("float32", "float64"),
        CANONICAL.replace('"after"', '"behind"'),
        CANONICAL.replace('"after"', '["after"]'),
        CANONICAL.replace('"dtype":"float32",', ""),
        CANONICAL.replace("{", '{"bias":"in",'),
        CANONICAL.replace("{", '{"dtype":"float32",'),
        CANONICAL.replace(",", ", "),
    ],
)
def test_meaning_of_another_form(text: str) -> None:
    """Keys that are absent, unknown or twice, values that do not exist, and another spelling are refused."""
    with pytest.raises(DataError, match="expected weights_meaning with") as caught:
        WeightsMeaning.from_text(text)
    assert ErrorKind.TOKEN_COLUMN is caught.value.kind


MEANINGS = [
    WeightsMeaning(
        score=score,
        renormalised=renormalised,
        scaling=scaling,
        factor=1.0 if scaling == "none" else 2.5,
        multiplied="after",
        dtype=dtype,
    )
    for score in get_args(Score)
    for renormalised in (False, True)
    for scaling in get_args(Scaling)
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_weights_of_every_meaning(meaning: WeightsMeaning) -> None:
    """Weights computed as the meaning says are legal, and the same ones are not where their factor is doubled."""
    logits_SLE = np.random.default_rng(0).normal(size=(50, 2, 8)).astype(np.float32)
    scores_SLE = 1 / (1 + np.exp(-logits_SLE))
    if meaning.score == "softmax":
        scores_SLE = np.exp(logits_SLE) / np.exp(logits_SLE).sum(axis=2, keepdims=True)
    weights_SLK = np.sort(scores_SLE, axis=2)[..., -3:]
    if meaning.renormalised:
        weights_SLK = weights_SLK / weights_SLK.sum(axis=2, keepdims=True)
    if meaning.scaling == "in":
        weights_SLK = weights_SLK * np.float32(2.5)
    stored = weights_SLK.astype(np.float32)
    if meaning.dtype == "bfloat16":
        stored = ((stored.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    there = np.zeros((50, 2), dtype=np.bool_)
    assert not illegal_weights(stored, there, meaning=meaning).any()
    assert illegal_weights(as_float32(stored) * np.float32(3), there, meaning=meaning).any()
    assert illegal_weights(stored, ~there, meaning=meaning).all()


_SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.97, 1.0, 1.03, -0.03, np.nan])


@given(
    meaning=st.sampled_from(MEANINGS),
    shares=st.lists(st.tuples(_SHARES, _SHARES, st.booleans()), min_size=1, max_size=4),
    halved=st.booleans(),
)
def test_weights_are_judged_row_by_row(
    meaning: WeightsMeaning, shares: list[tuple[float, float, bool]], halved: bool
) -> None:
    """NaN throughout where the row is MISSING, else numbers in [0, ceiling] whose sum is what the meaning says."""
    most = meaning.factor if meaning.scaling == "in" else 1.0
    values = np.asarray([[[a * most, b * most]] for a, b, _ in shares], dtype=np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if halved else values
    off = most * (2e-2 if halved or meaning.dtype == "bfloat16" else 1e-4)
    missing_SL = np.asarray([[missing] for _, _, missing in shares])
    expected = []
    for row, (_, _, missing) in zip(as_float32(stored)[:, 0].tolist(), shares, strict=True):
        if missing:
            expected.append(not all(weight != weight for weight in row))
            continue
        legal = all(0 <= weight <= most + off for weight in row)
        if meaning.renormalised or meaning.score == "softmax":
            legal = legal and sum(row) <= most + off
        expected.append(not legal or (meaning.renormalised and sum(row) < most - off))

    assert expected == illegal_weights(stored, missing_SL, meaning=meaning)[:, 0].tolist()
    if halved:
        assert ((values - as_float32(stored))[~np.isnan(values)] <= np.abs(values[~np.isnan(values)]) / 128).all()


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_the_largest_weight_is_the_ceiling(meaning: WeightsMeaning) -> None:
    """One expert may have all the weight there is, and not a tenth more."""
    row_SLK = np.asarray([[[meaning.ceiling, 0.0]]], dtype=np.float32)
    there_SL = np.zeros((1, 1), dtype=np.bool_)

    assert not illegal_weights(row_SLK, there_SL, meaning=meaning).any()
    assert illegal_weights(row_SLK * np.float32(1.1), there_SL, meaning=meaning).all()


def test_conversion_of_weights() -> None:
    """What arithmetic can reach is converted; the rest is refused with what differs."""
    plain = replace(SCALED, renormalised=False, scaling="out")
    assert (False, 1.0) == SCALED.steps_to(SCALED)
    assert (True, 2.5) == plain.steps_to(SCALED)
    assert (False, 0.4) == SCALED.steps_to(replace(SCALED, scaling="out"))
    assert (True, 1.0) == replace(SCALED, renormalised=False).steps_to(replace(SCALED, scaling="out"))
    others: dict[str, Any] = {"score": "softmax", "multiplied": "before", "factor": 2.0, "renormalised": False}
    for name, value in others.items():
        with pytest.raises(DataError, match=name):
            SCALED.steps_to(replace(SCALED, **{name: value}))


MASKS = {
    "the_sampled_id_absent": ([[], [], [1, 2], [3, 5]], [0, 0, 1, 1]),
    "not_ascending": ([[], [], [3, 2], [4, 5]], [0, 0, 1, 1]),
    "twice": ([[], [], [3, 3], [4]], [0, 0, 1, 1]),
    "negative": ([[], [], [-1, 3], [4]], [0, 0, 1, 1]),
    "listed_and_empty": ([[], [], [], [4]], [0, 0, 1, 1]),
    "full_and_listed": ([[], [], [3], [4]], [0, 0, 2, 1]),
    "at_a_prompt": ([[], [2], [3], [4]], [0, 1, 1, 1]),
    "an_unknown_state": ([[], [], [3], [4]], [0, 0, 4, 1]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_contradict_the_tokens(name: str) -> None:
    """The ids that sampling kept stand at sampled tokens, ascend, and hold the sampled id."""

    def masked(lists: list[list[int]], states: list[int]) -> RouteRecord:
        mask = AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled")
        state = AlignedColumn.of(np.asarray(states, dtype=np.uint8), aligned="sampled")
        base = watermarked_record(0, num_tokens=4, prompt_tokens=2, spec=WIDE)
        return replace(base, columns={"sampling_mask": mask, "sampling_mask_state": state}, checksum=None)

    masked([[], [], [3, 9], []], [0, 0, 3, 2]).verify()
    with pytest.raises(DataError) as caught:
        masked(*MASKS[name])
    assert caught.value.kind is ErrorKind.TOKEN_COLUMN


def test_a_loss_on_what_was_never_fed_is_refused() -> None:
    """Tokens behind the last call carry no loss; the last sampled one may."""
    base = call(0, prompt=2, generated=2, first=0, columns={"loss_mask": np.asarray([0, 0, 1, 1])})
    for mask, refused in (([0, 0], False), ([0, 1], True)):
        tail = UnfedTokens(token_ids=np.asarray([8, 9]), call_id="seen", columns={"loss_mask": np.asarray(mask)})
        if not refused:
            assemble([base, tail], WIDE, sample_id="s")
            continue
        with pytest.raises(DataError, match="loss_mask"):
            assemble([base, tail], WIDE, sample_id="s")


def _frozen(values: Any) -> Any:
    array = np.asarray(values)
    array.flags.writeable = False
    return array


BUILT_BY_HAND = {
    "another dtype": {"values": _frozen([0.5, 1.5])},
    "another shape": {"values": _frozen([[1], [2]])},
    "writable memory": {"values": np.asarray([1, 2])},
    "offsets of a number": {"values": _frozen([1, 2]), "offsets": _frozen([0, 1, 2])},
    "validity of what is never null": {"values": _frozen([1, 2]), "valid": _frozen([True, False])},
}


@pytest.mark.parametrize("arrays", BUILT_BY_HAND.values(), ids=BUILT_BY_HAND)
def test_a_column_that_is_not_what_its_type_says_is_refused(arrays: dict[str, Any]) -> None:
    """Built without `of`: a checksum over other bytes than the type declares would be made in silence."""
    column = AlignedColumn(type=ColumnType(dtype="int64"), **arrays)
    with pytest.raises(DataError) as caught:
        aligned_columns({"mine": column}, 2)
    assert ErrorKind.TOKEN_COLUMN == caught.value.kind
