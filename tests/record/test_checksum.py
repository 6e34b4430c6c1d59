"""The checksum against an independent restatement of the byte grammar, and what it must and must not see.

The restatement follows ``docs/spec/v1.md``, section 8, with ``struct`` and plain lists; it shares no code with the
library.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from routeplane.record.calls import ModelCall
from routeplane.record.checksum import CanonicalHash, array_heads, number_items
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Sampling, Span
from routeplane.record.spec import RouteSpec
from routeplane.testing.strategies import records

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# ----------------------------------------------------------------------------------------------------------------------
# The grammar, restated
# ----------------------------------------------------------------------------------------------------------------------


def u64(value: int) -> bytes:
    """Eight bytes, little endian."""
    return struct.pack("<Q", value)


def string(value: str) -> bytes:
    """Length and UTF-8."""
    return u64(len(value.encode())) + value.encode()


def item(name: str, payload: bytes | None, *, count: int | None = None) -> bytes:
    """Name, null flag, length in bytes (or ``count`` entries), payload."""
    if payload is None:
        return string(name) + b"\x01"
    return string(name) + b"\x00" + u64(len(payload) if count is None else count) + payload


def utf8(name: str, value: str | None) -> bytes:
    """A text or null."""
    return item(name, None if value is None else value.encode())


def int64(name: str, value: int | None) -> bytes:
    """An int64 or null."""
    return item(name, None if value is None else struct.pack("<q", value))


def float64(name: str, value: float | None) -> bytes:
    """A float64 or null."""
    return item(name, None if value is None else struct.pack("<d", value))


_NAN = {"e": b"\x00\x7e", "f": b"\x00\x00\xc0\x7f", "d": b"\x00\x00\x00\x00\x00\x00\xf8\x7f"}
_CODES = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "float16": "e", "float32": "f", "float64": "d", "bool": "?",
}  # fmt: skip


def numbers(name: str, values: NDArray[Any] | None) -> bytes:
    """A list of numbers, packed one by one."""
    if values is None:
        return item(name, None)
    code = _CODES[values.dtype.name]
    packed = [
        _NAN[code] if code in _NAN and value != value else struct.pack(f"<{code}", value)
        for value in values.reshape(-1).tolist()
    ]
    return item(name, b"".join(packed))


def plain_checksum(record: RouteRecord) -> int:
    """Section 8, item by item."""
    prefix, attributes = record.prefix, sorted(record.attributes.items(), key=lambda entry: entry[0].encode())
    parts = [
        u64(xxhash.xxh3_64_intdigest(record.spec.to_json().encode())),
        utf8("sample_id", record.sample_id),
        item("attempt", struct.pack("<i", record.attempt)),
        item("segment", struct.pack("<i", record.segment)),
        utf8("group", record.group),
        numbers("token_ids", record.token_ids),
        int64("routes_start", record.routes_start),
        numbers("routes", record.routes),
        item("prefix", None) if prefix is None else item("prefix", _prefix(prefix), count=1),
        item("spans", b"".join(_span(span) for span in record.spans), count=len(record.spans)),
        item("captures", b"".join(_capture(each) for each in record.captures), count=len(record.captures)),
        numbers("logprobs", record.logprobs),
        item("attributes", b"".join(string(key) + string(value) for key, value in attributes), count=len(attributes)),
    ]
    for name in sorted(record.columns):
        parts += [utf8("type", record.columns[name].dtype.name), numbers(name, record.columns[name].array())]
    return xxhash.xxh3_64_intdigest(b"".join(parts))


def _prefix(prefix: Prefix) -> bytes:
    return (
        utf8("sample_id", prefix.sample_id)
        + item("attempt", struct.pack("<i", prefix.attempt))
        + item("segment", struct.pack("<i", prefix.segment))
        + int64("stop", prefix.stop)
        + item("checksum", u64(prefix.checksum))
    )


def _span(span: Span) -> bytes:
    return (
        int64("start", span.start)
        + int64("stop", span.stop)
        + utf8("kind", span.kind)
        + utf8("role", span.role)
        + utf8("call", span.call)
        + int64("weights_version", span.weights_version)
        + (b"" if span.sampling is None else item("sampling", _sampling(span.sampling), count=1))
    )


def _sampling(sampling: Sampling) -> bytes:
    """The members in the order of 6.2."""
    given = sampling.processors
    names = None if given is None else b"".join(utf8("name", name) for name in given)
    return (
        float64("temperature", sampling.temperature)
        + float64("top_p", sampling.top_p)
        + int64("top_k", sampling.top_k)
        + float64("min_p", sampling.min_p)
        + float64("presence_penalty", sampling.presence_penalty)
        + float64("frequency_penalty", sampling.frequency_penalty)
        + float64("repetition_penalty", sampling.repetition_penalty)
        + utf8("logit_bias", sampling.logit_bias)
        + item("processors", names, count=len(given or ()))
        + utf8("logprobs_mode", sampling.logprobs_mode)
    )


def _capture(capture: Capture) -> bytes:
    return (
        int64("start", capture.start)
        + int64("stop", capture.stop)
        + utf8("state", capture.state)
        + utf8("call", capture.call)
        + int64("weights_version", capture.weights_version)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The value
# ----------------------------------------------------------------------------------------------------------------------

GOLDEN = RouteRecord(
    sample_id="sample-é",
    attempt=1,
    segment=2,
    group="g",
    token_ids=np.asarray([5, 6, 7, 8], dtype=np.int32),
    routes=np.asarray([[[0, 1], [3, 2]], [[2, 0], [-1, -1]], [[-1, -1], [-1, -1]]], dtype=np.int16),
    routes_start=1,
    prefix=Prefix(sample_id="p", attempt=0, segment=1, stop=1, checksum=2**64 - 1),
    spans=(
        Span(start=0, stop=2, kind="prompt", role="user", call="a", weights_version=None),
        Span(start=2, stop=4, kind="generation", role=None, call="a", weights_version=-3),
    ),
    captures=(
        Capture(start=0, stop=2, call="a", weights_version=7, state="captured"),
        Capture(start=2, stop=3, call="a", weights_version=None, state="partial"),
        Capture(start=3, stop=4, call="a", weights_version=None, state="not_fed"),
    ),
    spec=RouteSpec(num_experts=(4, 5), top_k=2, layer_ids=(1, 3), model="tiny"),
    logprobs=np.asarray([np.nan, -0.5, -np.inf, -0.0], dtype=np.float32),
    attributes={"b": "", "a": "x"},
    columns={"y": np.asarray([0, 1, 0, 1], dtype=np.bool_), "x": np.asarray([1, 2, 3, 4], dtype=np.int64)},
)


def test_the_golden_checksum() -> None:
    """One hand-written record has the value that the grammar gives, now and in every later version."""
    assert 0x31075215E033488D == plain_checksum(GOLDEN)
    assert plain_checksum(GOLDEN) == GOLDEN.checksum


@given(records(format="1.0"))
def test_the_checksum_is_that_of_the_grammar(record: RouteRecord) -> None:
    """Any record's checksum is the restated one."""
    assert plain_checksum(record) == record.checksum


_REAL = st.none() | st.floats(allow_nan=False, allow_infinity=False)
SAMPLINGS = st.builds(
    Sampling,
    temperature=_REAL,
    top_p=_REAL,
    top_k=st.none() | st.integers(-(2**63), 2**63 - 1),
    min_p=_REAL,
    presence_penalty=_REAL,
    frequency_penalty=_REAL,
    repetition_penalty=_REAL,
    logit_bias=st.none() | st.just("sha256:0a"),
    processors=st.none() | st.lists(st.sampled_from(["a", "é"]), max_size=3).map(tuple),
    logprobs_mode=st.none() | st.sampled_from(["raw", "processed"]),
)


@given(sampling=SAMPLINGS)
def test_sampling_follows_the_span_that_it_made(sampling: Sampling) -> None:
    """A struct item behind the version of the weights, its members in the order of 6.2; nothing where it is null."""
    spans = (GOLDEN.spans[0], replace(GOLDEN.spans[1], sampling=sampling))
    record = replace(GOLDEN, spans=spans, checksum=None)

    assert plain_checksum(record) == record.checksum


@given(
    starts=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    attempts=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
)
def test_items_of_many_entries_are_those_of_each(starts: list[int], attempts: list[int]) -> None:
    """What is made column by column is, entry by entry, what the grammar says of one."""
    count = len(starts)
    wide, narrow = np.asarray(starts, dtype=np.int64), np.asarray(attempts[:count], dtype=np.int32)
    sizes = np.abs(narrow.astype(np.int64))
    expected = [
        int64("start", start) + item("attempt", struct.pack("<i", attempt)) + int64("stop", start)
        for start, attempt in zip(starts, narrow.tolist(), strict=True)
    ]

    assert expected == number_items(start=wide, attempt=narrow, stop=wide.astype(">i8"))
    heads = array_heads("routes", sizes, behind=int64("routes_start", 3))
    assert [int64("routes_start", 3) + string("routes") + b"\x00" + u64(size) for size in sizes.tolist()] == heads


def test_the_checksum_of_a_call_is_that_of_the_grammar() -> None:
    """A call's checksum follows section 8.1, with and without what is optional."""
    rows_RLK = np.asarray([[[0, 1]], [[3, 2]]], dtype=np.int16)
    full = ModelCall(
        prompt_ids=np.asarray([5, 6]),
        generation_ids=np.asarray([7]),
        routes=rows_RLK,
        layer_ids=(3,),
        weights_version=9,
        call_id="c",
        logprobs=np.asarray([-0.5]),
        media=("m", "n"),
        cached=1,
        loss="aborted",
        columns={"x": np.asarray([1, 2, 3], dtype=np.uint8)},
    )
    bare = ModelCall(
        prompt_ids=np.asarray([5]), generation_ids=np.arange(0), routes=None, weights_version=None, call_id="c"
    )
    for call in (full, bare):
        parts = [
            u64(0),
            utf8("call_id", call.call_id),
            numbers("prompt_ids", call.prompt_ids),
            numbers("generation_ids", call.generation_ids),
            numbers("routes", call.routes),
            int64("first_row", call.first_row),
            numbers("layer_ids", None if call.layer_ids is None else np.asarray(call.layer_ids, dtype=np.int64)),
            int64("weights_version", call.weights_version),
            numbers("logprobs", call.logprobs),
            item("media", b"".join(utf8("digest", digest) for digest in call.media), count=len(call.media)),
            int64("cached", call.cached),
            utf8("loss", call.loss),
        ]
        for name, values in call.columns.items():
            parts += [utf8("type", values.dtype.name), numbers(name, values.array())]

        assert xxhash.xxh3_64_intdigest(b"".join(parts)) == call.checksum


# ----------------------------------------------------------------------------------------------------------------------
# What it must not see
# ----------------------------------------------------------------------------------------------------------------------

NAN_BITS = {
    "<f2": [0x7E00, 0x7C01, 0xFE00, 0x7FFF],
    "<f4": [0x7FC00000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF],
    "<f8": [0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8000000000000],
}


@pytest.mark.parametrize("kind", NAN_BITS)
def test_every_nan_is_one_nan(kind: str) -> None:
    """The payload and sign of a NaN are no content; those of a zero are."""
    size = np.dtype(kind).itemsize
    found = set()
    for bits in NAN_BITS[kind]:
        values = np.asarray([bits, 0], dtype=f"<u{size}").view(kind)
        assert np.isnan(values).tolist() == [True, False]
        assert xxhash.xxh3_64_intdigest(u64(0) + numbers("x", values)) == _hashed(values)
        found.add(_hashed(values))
        assert bits == int(values.view(f"<u{size}")[0])

    assert 1 == len(found)
    assert _hashed(np.zeros(1, dtype=kind)) != _hashed(-np.zeros(1, dtype=kind))


def _hashed(values: NDArray[Any]) -> int:
    out = CanonicalHash(0)
    out.array("x", values)
    return out.value()


def test_memory_layout_does_not_change_the_checksum() -> None:
    """Byte order, strides, write flags and the order of mapping keys are not seen."""
    values = np.arange(12, dtype=np.int32).reshape(3, 4)

    assert _hashed(values) == _hashed(values.astype(">i4"))
    assert _hashed(values) == _hashed(np.asfortranarray(values))
    assert _hashed(values[:, ::2]) == _hashed(values[:, ::2].copy())
    assert _hashed(values[:0]) == _hashed(np.empty(0, dtype=np.int32))
    again = replace(
        GOLDEN,
        attributes=dict(reversed(list(GOLDEN.attributes.items()))),
        columns=dict(reversed(list(GOLDEN.columns.items()))),
        checksum=None,
    )
    assert GOLDEN.checksum == again.checksum


# ----------------------------------------------------------------------------------------------------------------------
# What it must see
# ----------------------------------------------------------------------------------------------------------------------


def _edited(values: NDArray[Any], value: Any) -> NDArray[Any]:
    changed = values.copy()
    changed.reshape(-1)[0] = value
    return changed


def _first(items: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return (replace(items[0], **changes), *items[1:])


CHANGES: dict[str, dict[str, Any]] = {
    "sample_id": {"sample_id": "sample-e"},
    "attempt": {"attempt": 2},
    "segment": {"segment": 1},
    "key_swapped": {"attempt": 2, "segment": 1},
    "group": {"group": "h"},
    "group_null": {"group": None},
    "token_id": {"token_ids": _edited(GOLDEN.token_ids, 50)},
    "row": {"routes": _edited(GOLDEN.routes, 2)},
    "order_in_a_row": {"routes": np.concatenate([GOLDEN.routes[:1, :, ::-1], GOLDEN.routes[1:]])},
    "layers_swapped": {"routes": np.concatenate([GOLDEN.routes[:1, ::-1], GOLDEN.routes[1:]])},
    "prefix_sample": {"prefix": replace(GOLDEN.prefix, sample_id="q") if GOLDEN.prefix else None},
    "prefix_attempt": {"prefix": replace(GOLDEN.prefix, attempt=1) if GOLDEN.prefix else None},
    "prefix_segment": {"prefix": replace(GOLDEN.prefix, segment=0) if GOLDEN.prefix else None},
    "prefix_checksum": {"prefix": replace(GOLDEN.prefix, checksum=1) if GOLDEN.prefix else None},
    "span_bounds": {"spans": (replace(GOLDEN.spans[0], stop=1), replace(GOLDEN.spans[1], start=1))},
    "span_kind": {"spans": _first(GOLDEN.spans, kind="generation")},
    "span_role": {"spans": _first(GOLDEN.spans, role="system")},
    "span_role_null": {"spans": _first(GOLDEN.spans, role=None)},
    "span_role_empty": {"spans": _first(GOLDEN.spans, role="")},
    "span_call": {"spans": _first(GOLDEN.spans, call="b")},
    "span_version": {"spans": _first(GOLDEN.spans, weights_version=0)},
    "spans_split": {"spans": (replace(GOLDEN.spans[0], stop=1), replace(GOLDEN.spans[0], start=1), GOLDEN.spans[1])},
    "capture_state": {"captures": _first(GOLDEN.captures, state="cached")},
    "capture_call": {"captures": _first(GOLDEN.captures, call="b")},
    "capture_version": {"captures": _first(GOLDEN.captures, weights_version=8)},
    "capture_version_null": {"captures": _first(GOLDEN.captures, weights_version=None)},
    "logprob": {"logprobs": _edited(np.asarray(GOLDEN.logprobs), -1)},
    "logprob_zero_sign": {"logprobs": np.abs(np.asarray([np.nan, 0.5, np.inf, 0.0])) * [1, -1, -1, 1]},
    "logprobs_null": {"logprobs": None},
    "attribute_value": {"attributes": {"a": "y", "b": ""}},
    "attribute_key": {"attributes": {"a": "x", "c": ""}},
    "attribute_boundary": {"attributes": {"ax": "", "b": ""}},
    "attributes_none": {"attributes": {}},
    "column_value": {"columns": {**GOLDEN.columns, "x": np.asarray([1, 2, 3, 5], dtype=np.int64)}},
    "column_name": {"columns": {"z": GOLDEN.columns["y"], "x": GOLDEN.columns["x"]}},
    "column_type_of_equal_bytes": {"columns": {**GOLDEN.columns, "x": GOLDEN.columns["x"].values.view(np.uint64)}},
    "bool_as_uint8": {"columns": {**GOLDEN.columns, "y": GOLDEN.columns["y"].values.view(np.uint8)}},
    "column_absent": {"columns": {"x": GOLDEN.columns["x"]}},
    "spec_model": {"spec": replace(GOLDEN.spec, model="other")},
    "spec_width": {"spec": replace(GOLDEN.spec, num_experts=(4, 6))},
    "spec_layers": {"spec": replace(GOLDEN.spec, layer_ids=(1, 4))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: dict[str, Any]) -> None:
    """No field of a record, of its spans, captures, prefix or spec can change under the checksum."""
    changed = replace(GOLDEN, **change, checksum=None)

    assert GOLDEN.checksum != changed.checksum
    assert not GOLDEN.equals(changed)


def test_no_two_changes_collide() -> None:
    """All changed records have checksums of their own."""
    found = [replace(GOLDEN, **change, checksum=None).checksum for change in CHANGES.values()]

    assert len(found) == len(set(found))


CALL = ModelCall(
    prompt_ids=np.asarray([5, 6]),
    generation_ids=np.asarray([7]),
    routes=np.asarray([[[0, 1]], [[3, 2]]]),
    weights_version=9,
    call_id="c",
    logprobs=np.asarray([-0.5]),
)

CALL_CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "call_id": lambda: {"call_id": "d"},
    "tokens_moved": lambda: {"prompt_ids": [5], "generation_ids": [6, 7], "logprobs": None},
    "row": lambda: {"routes": [[[1, 0]], [[3, 2]]]},
    "routes_null": lambda: {"routes": None},
    "first_row": lambda: {"first_row": 1, "rows": "all"},
    "rows": lambda: {"routes": [[[0, 1]], [[3, 2]], [[1, 2]]], "rows": "all"},
    "layer_ids": lambda: {"layer_ids": (0,)},
    "weights_version": lambda: {"weights_version": None},
    "logprobs": lambda: {"logprobs": [-0.25]},
    "media": lambda: {"media": ("m",)},
    "cached": lambda: {"cached": 1},
    "loss": lambda: {"loss": "lost"},
    "columns": lambda: {"columns": {"x": np.zeros(3)}},
}


@pytest.mark.parametrize("change", CALL_CHANGES.values(), ids=CALL_CHANGES)
def test_every_change_of_a_call_is_seen(change: Callable[[], dict[str, Any]]) -> None:
    """No field of a call can change under its checksum."""
    assert CALL.checksum != replace(CALL, **change(), checksum=None).checksum


@given(records(), st.integers(0, 2**64 - 1))
def test_a_given_checksum_is_not_content(record: RouteRecord, checksum: int) -> None:
    """What is stored beside the content does not enter it."""
    assert record.checksum == replace(record, checksum=checksum).compute_checksum()
