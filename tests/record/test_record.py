"""RouteRecord: what is refused, what is kept, and cuts that keep every column with its token."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ChecksumError, DataError, ErrorKind, SpecError, UsageError
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.strategies import records, specs

if TYPE_CHECKING:
    from numpy.typing import NDArray

MASKED: Any = np.ma  # untyped in numpy

SPEC = watermarked_spec()
LEGAL = watermarked_record(3, num_tokens=6, prompt_tokens=4, spec=SPEC)

# ----------------------------------------------------------------------------------------------------------------------
# Properties of records: token by token
# ----------------------------------------------------------------------------------------------------------------------


def tokens_of(record: RouteRecord) -> list[dict[str, Any]]:
    """Everything a record says of each token, as plain values that compare (NaN as None)."""
    spans = [span for span in record.spans for _ in range(span.start, span.stop)]
    captures = [capture for capture in record.captures for _ in range(capture.start, capture.stop)]
    absent = [None] * record.routes_start
    return [
        {
            "token": int(record.token_ids[token]),
            "rows": [*absent, *record.routes.tolist()][token],
            "span": (spans[token].kind, spans[token].role, spans[token].call, spans[token].weights_version),
            "capture": (captures[token].state, captures[token].call, captures[token].weights_version),
            "logprob": None if record.logprobs is None else repr(record.logprobs[token]),
            "columns": {name: (values.dtype.str, repr(values[token])) for name, values in record.columns.items()},
        }
        for token in range(record.num_tokens)
    ]


@given(records(), st.data())
def test_a_slice_keeps_each_token_whole(record: RouteRecord, data: st.DataObject) -> None:
    """All that is known of a token stays with it; key, group, spec and other attributes stay; the checksum is new."""
    start = data.draw(st.sampled_from([0, *range(record.routes_start, record.num_tokens)]))
    stop = data.draw(st.integers(start + 1, record.num_tokens))
    part = record.slice(start, stop)

    assert tokens_of(record)[start:stop] == tokens_of(part)
    assert (record.key, record.group, record.spec) == (part.key, part.group, part.spec)
    assert {**record.attributes, "slice": f"{start}:{stop}"} == part.attributes
    assert part.verify() is part
    if part.prefix is not None and record.prefix is not None:
        assert replace(record.prefix, stop=part.routes_start) == part.prefix


@given(records(prefixes=False), st.data())
def test_slices_compose(record: RouteRecord, data: st.DataObject) -> None:
    """A slice of a slice is the slice of the original, in its positions."""
    start = data.draw(st.integers(0, record.num_tokens - 1))
    stop = data.draw(st.integers(start + 1, record.num_tokens))
    first = data.draw(st.integers(0, stop - start - 1))
    last = data.draw(st.integers(first + 1, stop - start))
    twice, once = record.slice(start, stop).slice(first, last), record.slice(start + first, start + last)

    assert twice.equals(once)
    assert f"{start + first}:{start + last}" == twice.attributes["slice"]


@given(st.data())
def test_a_selection_keeps_its_layers(data: st.DataObject) -> None:
    """Chosen layers keep their rows, by layer id; tokens and spans stay; columns follow; captures say what is left."""
    spec = data.draw(specs())
    record = data.draw(records(spec=spec))
    chosen = data.draw(st.lists(st.sampled_from(spec.layer_ids), min_size=1))
    part = record.select(chosen)
    kept = ("token", "span", "logprob")

    assert spec.select(chosen) == part.spec
    for layer in set(chosen):
        np.testing.assert_array_equal(record.routes[:, spec.slot(layer)], part.routes[:, part.spec.slot(layer)])
    assert [[each[key] for key in kept] for each in tokens_of(record)] == [
        [each[key] for key in kept] for each in tokens_of(part)
    ]
    slots = [spec.slot(layer) for layer in part.spec.layer_ids]
    assert record.columns.keys() == part.columns.keys()
    assert all(column.pick_layers(slots).equals(part.columns[name]) for name, column in record.columns.items())
    assert (record.key, record.prefix, record.attributes) == (part.key, part.prefix, part.attributes)
    assert part.verify() is part
    assert record.equals(record.select(spec.layer_ids)) or any(c.state == "partial" for c in record.captures)


@given(records())
def test_attached_columns_are_cut_with_the_tokens(record: RouteRecord) -> None:
    """A trainer's column travels as any other, under a checksum of its own; a name that is taken is refused."""
    own = np.arange(len(record.token_ids), dtype=np.float32)
    attached = record.attach_columns({"advantages": own})

    assert attached.verify().checksum != record.checksum
    assert record.columns.keys() | {"advantages"} == attached.columns.keys()
    start = record.routes_start if record.routes_start < record.num_tokens else 0
    part = attached.slice(start, record.num_tokens)
    assert own[max(start - record.tokens_start, 0) :].tolist() == part.columns["advantages"].values.tolist()
    with pytest.raises(UsageError, match=r"does not have, got \['advantages'\]"):
        attached.attach_columns({"advantages": own})
    with pytest.raises(DataError):
        record.attach_columns({"advantages": own[1:]})
    with pytest.raises(ChecksumError):
        replace(record, checksum=record.checksum ^ 1).attach_columns({"advantages": own})


VERSIONS: dict[str, tuple[tuple[int | None, ...], int | None]] = {
    "one": ((5,), 5),
    "several": ((7, 5, 6), 5),
    "one unknown": ((7, None), None),
    "nothing sampled": ((), None),
}


@pytest.mark.parametrize(("versions", "oldest"), VERSIONS.values(), ids=VERSIONS)
def test_the_oldest_version_is_of_sampled_tokens(versions: tuple[int | None, ...], oldest: int | None) -> None:
    """Prompts have no version, and an unknown one hides the others."""
    edges = [(0, 6 - len(versions)), *((at, at + 1) for at in range(6 - len(versions), 6))]
    found = [None, *versions]
    spans = tuple(
        Span(start=a, stop=b, kind="generation" if at else "prompt", call="c", weights_version=found[at])
        for at, (a, b) in enumerate(edges)
    )
    captures: tuple[Capture, ...] = (
        Capture(start=0, stop=5, call="c", weights_version=1, state="captured"),
        Capture(start=5, stop=6, call="c", weights_version=None, state="not_fed"),
    )
    if not versions:  # all was fed
        captures = (Capture(start=0, stop=6, call="c", weights_version=1, state="captured"),)
    record = watermarked_record(3, num_tokens=6, spec=SPEC, last_token_fed=not versions)

    assert oldest == replace(record, spans=spans, captures=captures, logprobs=None, checksum=None).oldest_version


@given(records())
def test_without_routes_nothing_but_rows_is_lost(record: RouteRecord) -> None:
    """Rows become MISSING and their state lost; every other column stays."""
    bare = record.without_routes()
    kept = ("token", "span", "logprob", "columns")

    assert record.routes.shape == bare.routes.shape
    assert (bare.routes == MISSING).all()
    assert [[each[key] for key in kept] for each in tokens_of(record)] == [
        [each[key] for key in kept] for each in tokens_of(bare)
    ]
    before, after = ([each["capture"] for each in tokens_of(which)] for which in (record, bare))
    assert before[: record.routes_start] == after[: record.routes_start]
    assert {state for state, _, _ in after[record.routes_start :]} <= {"lost", "not_fed"}
    assert bare.verify() is bare


@given(records(), st.integers(0, 2**64 - 1))
def test_a_record_pickles_with_its_checksum(record: RouteRecord, checksum: int) -> None:
    """Content and the checksum that came with it cross a process boundary, right or wrong."""
    for original in (record, replace(record, checksum=checksum)):
        for again in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
            assert again.equals(original)
            assert original.checksum == again.checksum
            assert tokens_of(original) == tokens_of(again)
            assert not again.routes.flags.writeable


def test_unpickling_validates() -> None:
    """What another process sends goes through the constructor: illegal rows do not arrive as a record."""
    reduced: Any = LEGAL.__reduce__()
    rebuild, (content,) = reduced
    with pytest.raises(DataError, match="illegal routes"):
        rebuild({**content, "routes": np.zeros_like(LEGAL.routes)})


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def _row(*ids: int) -> NDArray[np.int64]:
    """The legal rows with those of the first token, first layer replaced."""
    routes_SLK = LEGAL.routes.astype(np.int64)
    routes_SLK[0, 0] = ids
    return routes_SLK


def _capture(start: int, stop: int, state: Any) -> Capture:
    return Capture(start=start, stop=stop, call="c", weights_version=None, state=state)


def _spans(*bounds: int) -> tuple[Span, ...]:
    return tuple(
        Span(start=start, stop=stop, kind="prompt", call="c", weights_version=None)
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True)
    )


PREFIX = Prefix(sample_id="p", stop=2, checksum=5)

REFUSED: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "sample_id_empty": ({"sample_id": ""}, ErrorKind.DTYPE),
    "sample_id_number": ({"sample_id": 5}, ErrorKind.DTYPE),
    "sample_id_not_utf8": ({"sample_id": "\ud800"}, ErrorKind.DTYPE),
    "group_empty": ({"group": ""}, ErrorKind.DTYPE),
    "attempt_negative": ({"attempt": -1}, ErrorKind.DTYPE),
    "attempt_fraction": ({"attempt": 1.0}, ErrorKind.DTYPE),
    "attempt_bool": ({"attempt": True}, ErrorKind.DTYPE),
    "attempt_null": ({"attempt": None}, ErrorKind.DTYPE),
    "attempt_beyond_int32": ({"attempt": 2**31}, ErrorKind.DTYPE),
    "segment_beyond_int32": ({"segment": 2**31}, ErrorKind.DTYPE),
    # tokens
    "no_tokens": ({"token_ids": []}, ErrorKind.SHAPE),
    "tokens_nested": ({"token_ids": [[1, 2, 3, 4, 5, 6]]}, ErrorKind.SHAPE),
    "tokens_floating": ({"token_ids": [1.0] * 6}, ErrorKind.DTYPE),
    "tokens_text": ({"token_ids": ["1"] * 6}, ErrorKind.DTYPE),
    "token_beyond_int32": ({"token_ids": [2**31] * 6}, ErrorKind.VALUE_RANGE),
    "token_below_int32": ({"token_ids": [-(2**31) - 1] * 6}, ErrorKind.VALUE_RANGE),
    "tokens_too_few": ({"token_ids": [1] * 5}, ErrorKind.SPANS),
    # rows
    "rows_floating": ({"routes": LEGAL.routes.astype(np.float32)}, ErrorKind.DTYPE),
    "rows_bool": ({"routes": LEGAL.routes > 0}, ErrorKind.DTYPE),
    "rows_flat": ({"routes": LEGAL.routes.reshape(6, -1)}, ErrorKind.SHAPE),
    "rows_ragged": ({"routes": [[[1, 2], [1]]]}, ErrorKind.SHAPE),
    "rows_one_short": ({"routes": LEGAL.routes[:-1]}, ErrorKind.ROW_COUNT),
    "rows_one_too_many": ({"routes": np.concatenate([LEGAL.routes, LEGAL.routes[:1]])}, ErrorKind.ROW_COUNT),
    "rows_none": ({"routes": LEGAL.routes[:0]}, ErrorKind.ROW_COUNT),
    "rows_of_fewer_layers": ({"routes": LEGAL.routes[:, 1:]}, ErrorKind.SHAPE),
    "rows_of_more_slots": ({"routes": np.repeat(LEGAL.routes, 2, axis=2)}, ErrorKind.SHAPE),
    "row_beyond_int16": ({"routes": _row(0, 1, 2, 70_000)}, ErrorKind.VALUE_RANGE),
    "row_below_int16": ({"routes": _row(0, 1, 2, -40_000)}, ErrorKind.VALUE_RANGE),
    "row_out_of_range": ({"routes": _row(0, 1, 2, 32_749)}, ErrorKind.ID_OUT_OF_RANGE),
    "row_duplicate": ({"routes": _row(0, 1, 2, 0)}, ErrorKind.DUPLICATE_ID),
    "row_partial": ({"routes": _row(0, 1, 2, -1)}, ErrorKind.PARTIAL_ROW),
    # prefix
    "start_without_prefix": ({"routes": LEGAL.routes[2:], "routes_start": 2}, ErrorKind.PREFIX),
    "prefix_without_start": ({"prefix": PREFIX}, ErrorKind.PREFIX),
    "prefix_of_another_length": (
        {"prefix": PREFIX, "routes": LEGAL.routes[3:], "routes_start": 3},
        ErrorKind.PREFIX,
    ),
    "start_negative": ({"routes_start": -1}, ErrorKind.DTYPE),
    "start_beyond_the_tokens": (
        {"prefix": replace(PREFIX, stop=7), "routes": LEGAL.routes[:0], "routes_start": 7},
        ErrorKind.ROW_COUNT,
    ),
    # spans and captures
    "no_spans": ({"spans": ()}, ErrorKind.SPANS),
    "spans_with_a_gap": ({"spans": _spans(0, 2, 3, 6)}, ErrorKind.SPANS),
    "spans_too_long": ({"spans": _spans(0, 7)}, ErrorKind.SPANS),
    "captures_too_short": ({"captures": (_capture(0, 5, "captured"),)}, ErrorKind.SPANS),
    "captures_overlap": ({"captures": (_capture(0, 5, "captured"), _capture(4, 6, "not_fed"))}, ErrorKind.SPANS),
    "declared_but_absent": ({"captures": (_capture(0, 6, "captured"),)}, ErrorKind.COVERAGE),
    "present_but_denied": ({"captures": (_capture(0, 5, "lost"), _capture(5, 6, "not_fed"))}, ErrorKind.COVERAGE),
    "whole_but_called_partial": (
        {"captures": (_capture(0, 5, "partial"), _capture(5, 6, "not_fed"))},
        ErrorKind.COVERAGE,
    ),
    "never_fed_at_all": (
        {"routes": SPEC.missing_rows(6), "captures": (_capture(0, 6, "not_fed"),)},
        ErrorKind.COVERAGE,
    ),
    # log-probabilities
    "logprobs_whole_numbers": ({"logprobs": [-1] * 6}, ErrorKind.DTYPE),
    "logprobs_too_few": ({"logprobs": [-1.0] * 5}, ErrorKind.SHAPE),
    "logprobs_nested": ({"logprobs": [[-1.0] * 6]}, ErrorKind.SHAPE),
    "logprobs_positive": ({"logprobs": [-1.0] * 5 + [0.5]}, ErrorKind.VALUE_RANGE),
    "logprobs_infinite": ({"logprobs": [np.nan] * 5 + [np.inf]}, ErrorKind.VALUE_RANGE),
    "logprobs_masked": ({"logprobs": MASKED.MaskedArray([-1.0] * 6, mask=[False] * 5 + [True])}, ErrorKind.DTYPE),
    "logprobs_beyond_float32": ({"logprobs": [-1.0] * 5 + [-1e39]}, ErrorKind.VALUE_RANGE),
    # attributes and columns
    "attribute_without_name": ({"attributes": {"": "x"}}, ErrorKind.DTYPE),
    "attribute_number": ({"attributes": {"a": 5}}, ErrorKind.DTYPE),
    "attribute_slice_misused": ({"attributes": {"slice": "later"}}, ErrorKind.DTYPE),
    "column_without_name": ({"columns": {"": np.zeros(6)}}, ErrorKind.DTYPE),
    "column_named_by_number": ({"columns": {5: np.zeros(6)}}, ErrorKind.DTYPE),
    "column_not_utf8": ({"columns": {"\ud800": np.zeros(6)}}, ErrorKind.DTYPE),
    "column_reserved": ({"columns": {"route_weights": np.zeros(6)}}, ErrorKind.TOKEN_COLUMN),
    "column_named_as_ours": ({"columns": {"token_ids": np.zeros(6)}}, ErrorKind.TOKEN_COLUMN),
    "column_of_another_length": ({"columns": {"x": np.zeros(5)}}, ErrorKind.TOKEN_COLUMN),
    "column_nested": ({"columns": {"x": np.zeros((6, 2))}}, ErrorKind.TOKEN_COLUMN),
    "column_of_text": ({"columns": {"x": ["a"] * 6}}, ErrorKind.TOKEN_COLUMN),
    "column_of_objects": ({"columns": {"x": [None] * 6}}, ErrorKind.TOKEN_COLUMN),
    "column_complex": ({"columns": {"x": np.zeros(6, dtype=np.complex64)}}, ErrorKind.TOKEN_COLUMN),
    "column_of_times": ({"columns": {"x": np.zeros(6, dtype="M8[s]")}}, ErrorKind.TOKEN_COLUMN),
    # checksum
    "checksum_negative": ({"checksum": -1}, ErrorKind.DTYPE),
    "checksum_beyond_64_bits": ({"checksum": 2**64}, ErrorKind.DTYPE),
    "checksum_text": ({"checksum": "00"}, ErrorKind.DTYPE),
}


@pytest.mark.parametrize(("change", "kind"), REFUSED.values(), ids=REFUSED)
def test_an_illegal_record_is_refused(change: dict[str, Any], kind: ErrorKind) -> None:
    """No partially valid record exists: each illegal value is a DataError of its kind, naming expected and got."""
    with pytest.raises(DataError, match=r"expected .*, got ") as caught:
        replace(LEGAL, **{"checksum": None, **change})

    assert kind == caught.value.kind


@pytest.mark.parametrize("name", ["sample_id", "attempt", "segment", "stop", "checksum"])
@pytest.mark.parametrize("value", [None, -1, 2**64, 1.5, True], ids=str)
def test_an_illegal_prefix_is_refused(name: str, value: Any) -> None:
    """A prefix is checked as the record is."""
    with pytest.raises(DataError, match=f"expected prefix.{name} ") as caught:
        replace(PREFIX, **{name: value})

    assert ErrorKind.DTYPE == caught.value.kind


def test_every_finding_is_attached() -> None:
    """Illegal rows and contradicted captures come with token, layer and sample of each finding."""
    routes_SLK = LEGAL.routes.copy()
    routes_SLK[[1, 4], 2] = 0
    with pytest.raises(DataError) as caught:
        replace(LEGAL, routes=routes_SLK, checksum=None)
    captures = (_capture(0, 2, "lost"), _capture(2, 4, "partial"), _capture(4, 5, "cached"), _capture(5, 6, "lost"))
    with pytest.raises(DataError) as contradicted:
        replace(LEGAL, captures=captures, checksum=None)

    assert [("sample-3", 1, 5), ("sample-3", 4, 5)] == [
        (problem.sample, problem.token, problem.layer) for problem in caught.value.problems
    ]
    assert [("sample-3", 0), ("sample-3", 2)] == [
        (problem.sample, problem.token) for problem in contradicted.value.problems
    ]


SLICES: dict[str, tuple[int, int, ErrorKind]] = {
    "empty": (2, 2, ErrorKind.ARGUMENT),
    "reversed": (3, 2, ErrorKind.ARGUMENT),
    "negative": (-2, 6, ErrorKind.ARGUMENT),
    "too_long": (0, 7, ErrorKind.ARGUMENT),
    "inside_the_prefix": (1, 6, ErrorKind.PREFIX),
}


@pytest.mark.parametrize(("start", "stop", "kind"), SLICES.values(), ids=SLICES)
def test_an_impossible_slice_is_refused(start: int, stop: int, kind: ErrorKind) -> None:
    """Python's forgiving slices are not ours; rows that stand elsewhere cannot be cut."""
    delta = replace(LEGAL, routes=LEGAL.routes[2:], routes_start=2, prefix=PREFIX, checksum=None)
    with pytest.raises(UsageError) as caught:
        delta.slice(start, stop)

    assert kind == caught.value.kind


def test_slices_take_numpy_integers() -> None:
    """Bounds often come from cu_seqlens: any whole number does, and no fraction."""
    assert LEGAL.slice(1, 3).equals(LEGAL.slice(np.int64(1), np.int32(3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        LEGAL.slice(1.0, 3)  # type: ignore[arg-type]


def test_an_unknown_layer_is_refused() -> None:
    """Selecting what was not captured is an error, not an empty axis."""
    with pytest.raises(SpecError, match=r"expected one of the captured layers \[1, 2, 5\], got 3"):
        LEGAL.select([1, 3])
