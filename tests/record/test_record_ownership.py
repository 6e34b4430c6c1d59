"""RouteRecord: whose memory it is, what the checksum guards, and reports from the field that a record answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from routeplane.errors import ChecksumError, DataError, ErrorKind
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec
from routeplane.testing.strategies import records

SPEC = watermarked_spec()

# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


def _arrays(record: RouteRecord) -> dict[str, Any]:
    return {"token_ids": record.token_ids, "routes": record.routes, "logprobs": record.logprobs, **_values(record)}


def _values(record: RouteRecord) -> dict[str, Any]:
    return {name: column.values for name, column in record.columns.items()}


def _record_over(**arrays: Any) -> RouteRecord:
    """A record of six tokens whose arrays are those given."""
    legal = watermarked_record(3, num_tokens=6, prompt_tokens=4, spec=SPEC)
    columns = {"x": arrays.pop("x")} if "x" in arrays else {}
    return replace(legal, columns=columns, checksum=None, **arrays)


def _writable() -> dict[str, Any]:
    legal = watermarked_record(3, num_tokens=6, prompt_tokens=4, spec=SPEC)
    return {
        "token_ids": legal.token_ids.copy(),
        "routes": legal.routes.copy(),
        "logprobs": np.asarray(legal.logprobs).copy(),
        "x": np.arange(6, dtype=np.float64),
    }


@given(records())
def test_nothing_of_a_record_can_be_written(record: RouteRecord) -> None:
    """Fields, mappings and arrays of a record are read-only."""
    for values in _arrays(record).values():
        assert values is None or not values.flags.writeable
    with pytest.raises(FrozenInstanceError):
        record.attempt = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        record.attributes["a"] = "b"  # type: ignore[index]
    with pytest.raises(TypeError):
        record.columns["a"] = record.token_ids  # type: ignore[index]


def test_arrays_that_fit_are_shared() -> None:
    """No copy where the type fits, at construction and in a slice; the caller's array stays writable."""
    given_arrays = _writable()
    record = _record_over(**given_arrays)
    for name, values in _arrays(record).items():
        assert np.shares_memory(values, given_arrays[name])
        assert given_arrays[name].flags.writeable
    for name, values in _arrays(record.slice(1, 4)).items():
        assert np.shares_memory(values, given_arrays[name])
    assert sum(values.nbytes for values in given_arrays.values()) == record.nbytes


def test_a_mapping_given_is_copied() -> None:
    """Later changes to the caller's dictionaries do not reach the record."""
    attributes, columns = {"a": "b"}, {"x": np.zeros(6)}
    legal = watermarked_record(3, num_tokens=6, spec=SPEC)
    record = replace(legal, attributes=attributes, columns=columns, checksum=None)
    attributes["a"] = "c"
    columns.clear()

    assert record.verify().attributes == {"a": "b"}
    assert list(record.columns) == ["x"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i2"])
def test_wider_types_are_narrowed_by_value(dtype: Any) -> None:
    """Any integer type is taken and stored as int16 and int32, value for value; a copy, so the caller's stays apart."""
    legal = watermarked_record(3, num_tokens=6, spec=SPEC, last_token_fed=True)
    routes_SLK, token_ids = legal.routes.astype(dtype), legal.token_ids.astype(np.int64)
    record = replace(legal, routes=routes_SLK, token_ids=token_ids, checksum=None)

    assert (np.dtype("int16"), np.dtype("int32")) == (record.routes.dtype, record.token_ids.dtype)
    assert record.equals(legal)
    assert not np.shares_memory(routes_SLK, record.routes)


def test_columns_are_native() -> None:
    """Byte-swapped token columns become the machine's own, which Arrow can take; same values, same checksum."""
    legal = watermarked_record(3, num_tokens=6, spec=SPEC)
    swapped = replace(legal, columns={"x": np.arange(6, dtype=">i4")}, checksum=None)
    native = replace(legal, columns={"x": np.arange(6, dtype=np.int32)}, checksum=None)

    assert swapped.columns["x"].dtype.isnative
    assert swapped.equals(native)


def test_logprobs_of_any_float_type_become_float32() -> None:
    """float16 and float64 are taken; -inf is a value, NaN is none, a hair above zero is rounding."""
    legal = watermarked_record(3, num_tokens=4, spec=SPEC)
    for dtype in (np.float16, np.float64):
        record = replace(legal, logprobs=np.asarray([np.nan, -np.inf, -0.5, 1e-4], dtype=dtype), checksum=None)
        assert record.logprobs is not None
        assert np.float32 == record.logprobs.dtype
        np.testing.assert_allclose([np.nan, -np.inf, -0.5, 1e-4], record.logprobs, rtol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# What the checksum guards
# ----------------------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[RouteRecord], object]] = {
    "verify": lambda record: record.verify(),
    "slice": lambda record: record.slice(0, 3),
    "select": lambda record: record.select([1]),
}


@pytest.mark.parametrize("name", ["token_ids", "routes", "logprobs", "x"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_write_under_a_record_is_caught(name: str, use: Callable[[RouteRecord], object]) -> None:
    """Every operation that verifies detects a write to a shared array after capture, before anything is cut."""
    arrays = _writable()
    record = _record_over(**arrays)
    use(record)
    arrays[name].reshape(-1)[-1] = -7
    with pytest.raises(ChecksumError, match="sample sample-3/0/0") as caught:
        use(record)

    assert ErrorKind.CHECKSUM == caught.value.kind
    assert ["sample-3"] == [problem.sample for problem in caught.value.problems]


def test_a_given_checksum_is_kept() -> None:
    """A checksum that came with the content is kept, compared when asked, and not consulted for equality."""
    legal = watermarked_record(3, num_tokens=4, spec=SPEC)
    right, wrong = replace(legal, checksum=legal.checksum), replace(legal, checksum=5)

    assert legal.checksum == right.verify().checksum
    assert 5 == wrong.checksum
    assert wrong.equals(legal)
    with pytest.raises(ChecksumError, match="expected checksum 0000000000000005, got "):
        wrong.verify()


def test_another_spec_is_another_record() -> None:
    """Equal ids under another geometry are not equal content."""
    legal = watermarked_record(3, num_tokens=4, spec=SPEC)
    wider = replace(legal, spec=replace(SPEC, num_experts=SPEC.experts_per_layer[0] + 1), checksum=None)

    assert not legal.equals(wider)
    assert legal is not wider


# ----------------------------------------------------------------------------------------------------------------------
# Reports from the field
# ----------------------------------------------------------------------------------------------------------------------


def test_truncation_cuts_by_absolute_position() -> None:
    """Kind of reports 6, 13: cutting a response of prompt 4 + response 6 to 3 tokens keeps rows [0, 7), all columns."""
    record = replace(
        watermarked_record(1, num_tokens=10, prompt_tokens=4, spec=SPEC),
        columns={"mask": np.arange(10) >= 4},
        checksum=None,
    )
    part = record.slice(0, 4 + 3)
    expected_SLK = watermark(1, np.arange(7)[:, None, None], layer=np.asarray(SPEC.layer_ids)[:, None], k=np.arange(4))

    np.testing.assert_array_equal(expected_SLK, part.routes)
    assert [("prompt", 4), ("generation", 7)] == [(span.kind, span.stop) for span in part.spans]
    assert {"captured": 7} == {state: count for state, count in part.coverage().rows.items() if count}
    assert [False] * 4 + [True] * 3 == part.columns["mask"].tolist()


def test_a_cut_at_the_prompt_keeps_no_response_by_mistake() -> None:
    """Kind of report 13: prompt 6 + response 4, limit 4: nothing to cut; the response's rows are all there."""
    record = watermarked_record(1, num_tokens=10, prompt_tokens=6, spec=SPEC)
    part = record.slice(0, min(record.num_tokens, 6 + 4))

    assert 9 == part.coverage().count("captured")
    np.testing.assert_array_equal(record.routes[6:9], part.routes[6:9])


def test_prompt_rows_stand_although_no_policy_sampled_them() -> None:
    """Kind of report 32: who sampled a token (spans, the loss) says nothing about whether its row was captured."""
    record = watermarked_record(1, num_tokens=6, prompt_tokens=6, spec=SPEC, last_token_fed=True)

    assert ["prompt"] == [span.kind for span in record.spans]
    assert 6 == record.coverage().count("captured")
    assert not (record.routes == MISSING).any()


def test_unknown_columns_are_carried_or_refused() -> None:
    """Kind of report 21: an unknown token column goes through every operation; one of another length is named."""
    record = replace(watermarked_record(1, num_tokens=6, spec=SPEC), columns={"tool_turn": np.arange(6)}, checksum=None)

    assert [2, 3] == record.slice(2, 4).columns["tool_turn"].tolist()
    assert list(range(6)) == record.select([2]).columns["tool_turn"].tolist()
    assert list(range(6)) == record.without_routes().columns["tool_turn"].tolist()
    with pytest.raises(DataError, match="'tool_turn'"):
        replace(record, columns={"tool_turn": np.arange(5)}, checksum=None)


def test_wide_ids_pass_as_uint16_and_narrow_ones_as_uint8() -> None:
    """Kind of reports 37, 38, 39: top-22 of 512 in uint16 and 200 of 256 in uint8 keep their values, as int16."""
    wide = RouteSpec(num_experts=512, top_k=22, layer_ids=(0,))
    narrow = RouteSpec(num_experts=256, top_k=2, layer_ids=(0,))
    for spec, ids in (
        (wide, np.arange(490, 512, dtype=np.uint16)),
        (narrow, np.asarray([200, 255], dtype=np.uint8)),
    ):
        record = RouteRecord(
            sample_id="s",
            token_ids=np.asarray([1]),
            routes=ids[None, None],
            spans=(Span(start=0, stop=1, kind="prompt", call="c", weights_version=None),),
            captures=(Capture(start=0, stop=1, call="c", weights_version=None, state="captured"),),
            spec=spec,
        )
        assert ids.tolist() == record.routes[0, 0].tolist()
        assert np.int16 == record.routes.dtype


def test_layers_are_selected_before_anything_is_widened() -> None:
    """Kind of report 41: a rank takes its own layers of the stored type; nothing of the others is copied."""
    spec = RouteSpec(num_experts=64, top_k=2, layer_ids=tuple(range(48)))
    record = RouteRecord(
        sample_id="s",
        token_ids=np.arange(3),
        routes=np.tile(np.asarray([1, 0], dtype=np.int16), (3, 48, 1)),
        spans=(Span(start=0, stop=3, kind="prompt", call="c", weights_version=None),),
        captures=(Capture(start=0, stop=3, call="c", weights_version=None, state="captured"),),
        spec=spec,
    )
    part = record.select(range(12, 24))

    assert tuple(range(12, 24)) == part.spec.layer_ids
    assert (3, 12, 2) == part.routes.shape
    assert np.int16 == part.routes.dtype
    assert record.routes.nbytes // 4 == part.routes.nbytes
