"""Wire forms, read strictly: golden texts, round trips, and a table of malformed payloads with what they may allocate.

Axes: R rows, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
import binascii
import json
import tracemalloc
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from routeplane.capture import wire
from routeplane.capture.layers import rows_from_axis
from routeplane.capture.wire import WireForm, decode, decode_base64, encode, encode_base64, form_of
from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.spec import MISSING, RouteSpec
from tests.capture.payloads import MALFORMED, SPEC, Malformed, engine_rows, npy, size_of
from tests.capture.reading import payload_rows

integers = npst.arrays(
    dtype=st.sampled_from([np.dtype(code) for code in ("i1", "<i2", "<i4")]),
    shape=npst.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5),
)


# ----------------------------------------------------------------------------------------------------------------------
# Base64
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False], ids=["pybase64", "standard library"])
@given(text=st.text(st.sampled_from("AbQ1+/=\n é-"), max_size=13))
def test_both_decoders_take_the_same_texts(fast: bool, text: str) -> None:
    """With and without pybase64 exactly the canonical texts are decoded: those that encoding their bytes gives back."""
    try:
        plain = binascii.a2b_base64(text)
    except ValueError:
        plain = b""
    canonical = base64.b64encode(plain).decode() == text
    assert wire._fast_codec() is not None
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(wire, "_fast_codec", lambda: None)
        if canonical:
            assert plain == decode_base64(text)
        else:
            with pytest.raises(DataError) as caught:
                decode_base64(text)
            assert ErrorKind.ENCODING == caught.value.kind


@given(data=st.binary(max_size=40))
def test_base64_round_trips(data: bytes) -> None:
    """What is encoded is the standard library's text, and decodes to itself."""
    text = encode_base64(data)

    assert base64.b64encode(data).decode() == text
    assert data == decode_base64(text, size=len(data)) == decode_base64(text.encode())


# ----------------------------------------------------------------------------------------------------------------------
# nrlre1
# ----------------------------------------------------------------------------------------------------------------------

GOLDEN: tuple[tuple[Any, Any, str], ...] = (
    ([[[1, 2]]], "int16", "nrlre1:int16:1x1x2:AQACAA=="),
    ([[[0, 1]], [[-1, -1]]], "int8", "nrlre1:int8:2x1x2:AAH//w=="),
    ([[[0, 1]], [[-1, -1]]], "int16", "nrlre1:int16:2x1x2:AAABAP////8="),
    ([[[300, 1]]], "int32", "nrlre1:int32:1x1x2:LAEAAAEAAAA="),
    (np.zeros((0, 3, 2)), "int16", "nrlre1:int16:0x3x2:"),
    (np.arange(12).reshape(2, 3, 2).swapaxes(0, 1), "int16", "nrlre1:int16:3x2x2:AAABAAYABwACAAMACAAJAAQABQAKAAsA"),
)


@pytest.mark.parametrize(("rows", "dtype", "text"), GOLDEN, ids=[text for _, _, text in GOLDEN])
def test_c027_golden_envelopes(rows: Any, dtype: Any, text: str) -> None:
    """NeMo RL fact C-027: the texts that its codec was seen to make, written and read."""
    array = np.asarray(rows).astype(dtype)

    assert text == encode(array, dtype=dtype, form="nrlre1")
    decoded = decode(text, form="nrlre1").routes
    assert (np.dtype(dtype), array.tolist(), array.shape) == (decoded.dtype, decoded.tolist(), decoded.shape)
    assert not decoded.flags.writeable


@given(integers)
def test_c021_envelopes_round_trip(array: NDArray[Any]) -> None:
    """NeMo RL fact C-021: any int8, int16 or int32 array comes back with its type, shape and values, -1 included."""
    name: Any = array.dtype.name
    text = encode(array, dtype=name, form="nrlre1")

    assert text.startswith(f"nrlre1:{name}:{'x'.join(map(str, array.shape))}:")
    np.testing.assert_array_equal(array, decode(text, form="nrlre1").routes)


@pytest.mark.parametrize(("value", "dtype"), [(200, "int8"), (-129, "int8"), (40_000, "int16"), (2**31, "int32")])
def test_no_cast_changes_a_value(value: int, dtype: Any) -> None:
    """Facts C-015, C-018 and C-045, where NeMo RL wraps 200 to -56 and 255 to -1 on some paths: here it is refused."""
    with pytest.raises(DataError) as caught:
        encode(np.full((1, 1, 2), value), dtype=dtype, form="nrlre1")

    assert ErrorKind.VALUE_RANGE == caught.value.kind


def test_c022_nested_lists_are_read() -> None:
    """NeMo RL fact C-022: the older form of a payload."""
    assert [[[1, 2]], [[3, 4]]] == decode([[[1, 2]], [[3, 4]]], form="lists").routes.tolist()


@pytest.mark.parametrize("text", ["any text", "nrlre1:int16:5x3x2:" + "AAAA" * 8, "nrlre1:int64:1x1x1:AAAAAAAAAAA="])
def test_c023_to_c025_are_refused(text: str) -> None:
    """NeMo RL facts C-023 to C-025: other text, a payload of another shape, a type that the form does not have."""
    with pytest.raises(DataError):
        decode(text, form="nrlre1")


@pytest.mark.parametrize("array", [np.ones((2, 2), np.int16), np.ones((1, 1, 1)), np.ones((1, 1, 1), np.bool_)])
def test_c026_only_integers_of_rank_3_are_written(array: NDArray[Any]) -> None:
    """NeMo RL fact C-026, but that int64 is written here where its values fit, since it is looked at."""
    for form in get_args(WireForm):
        with pytest.raises(UsageError):
            encode(array, form=form)
    assert "nrlre1:int16:1x1x1:BwA=" == encode(np.full((1, 1, 1), 7), form="nrlre1")


# ----------------------------------------------------------------------------------------------------------------------
# Every form
# ----------------------------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "npy": lambda rows: npy(rows),
    "npy of ours": lambda rows: encode(rows, form="npy"),
    "nrlre1 int8": lambda rows: encode(rows % 100, dtype="int8", form="nrlre1"),
    "nrlre1": lambda rows: encode(rows, form="nrlre1"),
    "nrlre1 int32": lambda rows: encode(rows, dtype="int32", form="nrlre1"),
    "prime": lambda rows: encode(rows, form="prime"),
    "lists": lambda rows: encode(rows, form="lists"),
    "json lists": lambda rows: json.loads(json.dumps(rows.tolist())),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_every_form_gives_the_same_rows(name: str, rows: int) -> None:
    """One array with a slot per decoder layer, in each form, told apart by itself, gives the rows of the spec."""
    sent_RDK = engine_rows(rows) % 100
    read_RLK, first_row = payload_rows(FORMS[name](sent_RDK), SPEC)

    np.testing.assert_array_equal(sent_RDK[:, [0, 2, 3]], read_RLK)
    assert (0, np.dtype(np.int16), False) == (first_row, read_RLK.dtype, read_RLK.flags.writeable)


@pytest.mark.parametrize("name", FORMS)
def test_an_axis_of_captured_layers_must_be_said(name: str) -> None:
    """An array of the spec's layers alone is read where it is called that, and refused where it is not."""
    sent_RLK = engine_rows(9)[:, [0, 2, 3]] % 100
    payload = FORMS[name](sent_RLK)

    np.testing.assert_array_equal(sent_RLK, payload_rows(payload, SPEC, axis="captured")[0])
    with pytest.raises(RouteplaneError) as caught:
        payload_rows(payload, SPEC)
    assert ErrorKind.LAYERS == caught.value.kind


def test_sglang_is_read_where_it_is_named() -> None:
    """Base64 of bare int32 has no mark; named, it gives the rows."""
    sent_RDK = engine_rows(21)
    text = encode(sent_RDK, form="sglang")

    np.testing.assert_array_equal(sent_RDK, decode(text, layers=4, slots=4, form="sglang").routes)
    np.testing.assert_array_equal(sent_RDK[:, [0, 2, 3]], payload_rows(text, SPEC, form="sglang")[0])
    with pytest.raises(DataError):
        form_of(text)


def test_a_start_that_is_sent_must_be_the_one_expected() -> None:
    """prime-rl's start is the token of the first row; another one than was asked for is refused (field row 22)."""
    payload = encode(engine_rows(5), start=500, form="prime")

    assert 500 == decode(payload, form="prime")[1] == payload_rows(payload, SPEC)[1]
    assert 500 == payload_rows(payload, SPEC, first_row=500)[1]
    with pytest.raises(DataError) as caught:
        payload_rows(payload, SPEC, first_row=400)
    assert ErrorKind.ROW_COUNT == caught.value.kind
    del payload["start"]
    assert 0 == decode(payload, form="prime")[1]


@pytest.mark.parametrize("experts", [255, 256, 300, 32_767])
def test_every_dtype_an_encoder_emits_is_decoded(experts: int) -> None:
    """Whatever type an id needs, all forms that can carry it bring the highest expert back (field rows 37 and 39)."""
    spec = RouteSpec(num_experts=experts, top_k=1, layer_ids=(0,))
    array = np.full((3, 1, 1), experts - 1, np.uint8 if experts <= 256 else np.uint16)
    for payload in (
        encode(array, form="npy"),
        encode(array, form="prime"),
        encode(array, form="nrlre1"),
        encode(array, form="lists"),
    ):
        assert {experts - 1} == set(payload_rows(payload, spec)[0].ravel().tolist())


@given(st.data())
def test_rows_that_never_came_are_missing(data: st.DataObject) -> None:
    """A harness writes -1 into every slot, dense ones too: MISSING, and the rows around it keep their place."""
    sent_RDK = engine_rows(8).astype(np.int16)
    missing = data.draw(st.sets(st.integers(0, 7)))
    sent_RDK[sorted(missing)] = -1

    rows_RLK = rows_from_axis(sent_RDK, SPEC)

    expected = engine_rows(8)[:, [0, 2, 3]].astype(np.int16)
    expected[sorted(missing)] = MISSING
    np.testing.assert_array_equal(expected, rows_RLK)


@pytest.mark.parametrize("start", [-1, 2**31, 2**32, True, 1.5, "2"])
def test_only_token_positions_are_written_as_a_start(start: Any) -> None:
    """A writer refuses a start that its own reader would refuse."""
    with pytest.raises(UsageError, match="start"):
        encode(engine_rows(5), form="prime", start=start)


@pytest.mark.parametrize(
    ("form", "option"), [("npy", {"start": 1}), ("lists", {"dtype": "int8"}), ("prime", {"dtype": "int8"})]
)
def test_an_option_that_a_form_cannot_carry_is_refused(form: Any, option: dict[str, Any]) -> None:
    """A start is for prime-rl's object alone, a wire type for NeMo RL's envelope alone."""
    with pytest.raises(UsageError, match=next(iter(option))):
        encode(engine_rows(5), form=form, **option)


# ----------------------------------------------------------------------------------------------------------------------
# Malformed
# ----------------------------------------------------------------------------------------------------------------------

#: An exception, its text and what the interpreter allocates on the way.
SLACK = 48_000


def peak(payload: Malformed, spec: RouteSpec = SPEC) -> tuple[RouteplaneError, int]:
    """What reading a payload raises, and the most bytes that were allocated at once on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(RouteplaneError) as caught:
            payload_rows(payload.payload, spec, form=payload.form)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_what_is_malformed_is_refused_at_little_cost(case: Malformed) -> None:
    """Each has an error of its own kind, and its decoder allocates at most twice its size."""
    error, allocated = peak(case)

    assert case.kind == error.kind, error
    assert allocated <= 2 * size_of(case.payload) + SLACK


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("layers", [(5,), tuple(range(0, 32, 2))], ids=["nearly all dense", "half of them dense"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_dense_layers_cost_no_copy(top_k: int, layers: tuple[int, ...], dtype: Any) -> None:
    """Where most of a payload is slots of dense layers, some of its rows MISSING and one wrong, the bound holds too."""
    spec = RouteSpec(num_experts=99, top_k=top_k, layer_ids=layers)
    ids_RDK = np.zeros((4_000, 32, top_k), np.int16)
    ids_RDK[:, layers] = np.arange(1, top_k + 1)
    ids_RDK[7] = MISSING
    ids_RDK[9, 31, 0] = 3
    case = Malformed(name="", payload=encode(ids_RDK, dtype=dtype, form="nrlre1"))
    error, allocated = peak(case, spec)

    assert (ErrorKind.DENSE_SLOT, 9, 31) == (error.kind, error.problems[0].token, error.problems[0].layer)
    assert allocated <= 2 * size_of(case.payload) + SLACK


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_the_least_id_of_a_type_is_found(dtype: Any) -> None:
    """The error names the row that holds it, though its negative is itself."""
    ids_RDK = np.ones((8, 4, 4), dtype) * np.arange(1, 5, dtype=dtype)
    ids_RDK[:, 1] = 0
    ids_RDK[5, 2, 0] = np.iinfo(dtype).min

    with pytest.raises(DataError) as caught:
        rows_from_axis(ids_RDK, SPEC)
    assert (ErrorKind.PARTIAL_ROW, 5, 2) == (
        caught.value.kind,
        caught.value.problems[0].token,
        caught.value.problems[0].layer,
    )


def test_the_table_is_long_enough() -> None:
    """At least 60 cases, with different names, of every form."""
    names = {case.name for case in MALFORMED}

    assert len(MALFORMED) == len(names) >= 60
    assert {"nrlre1", "npy", "prime", "lists", "sglang", "no form"} == {name.split(":")[0] for name in names}


TEXTS = {
    "npy": npy(engine_rows(6)),
    "nrlre1": encode(engine_rows(6), form="nrlre1"),
}


@pytest.mark.parametrize("name", TEXTS)
@given(st.data())
def test_edited_text_is_refused_or_read_as_rows(name: str, data: st.DataObject) -> None:
    """Whatever is cut out of a text or put into it, reading raises a typed error or gives rows of the spec's shape."""
    text = TEXTS[name]
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 6)))
    edited = text[:start] + data.draw(st.text(st.sampled_from("A1x:+/=9 \n\0é"), max_size=6)) + text[stop:]
    tracemalloc.start()
    try:
        rows_RLK, _ = payload_rows(edited, SPEC)
    except RouteplaneError:
        assert tracemalloc.get_traced_memory()[1] <= 2 * len(edited) + SLACK
        return
    finally:
        tracemalloc.stop()
    assert SPEC.row_shape == rows_RLK.shape[1:]


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@given(st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner)))
def test_any_json_is_refused_or_read_as_rows(document: object) -> None:
    """No JSON value makes reading raise anything but a typed error."""
    try:
        rows_RLK, _ = payload_rows(document, SPEC)
    except RouteplaneError:
        return
    assert SPEC.row_shape == rows_RLK.shape[1:]
