"""The engine's layer axis and vLLM's base64 encoding, against plain references and recorded responses. No engine runs.

Axes: R rows, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from routeplane.capture.layers import rows_from_axis, rows_from_layers
from routeplane.capture.wire import decode
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, SpecError
from routeplane.record.spec import RouteSpec

DATA = Path(__file__).parents[1] / "data"
INTEGERS = ("u1", "<u2", "<i2", "<i4", "<i8", "<u8", "i1")

SPEC = RouteSpec(num_experts=200, top_k=3, layer_ids=(1, 3))


def watermarked(rows: int, spec: RouteSpec, *, depth: int, dtype: str = "u1") -> NDArray[Any]:
    """``[R, D, K]`` whose ids say which row, layer and slot they are, never 0; dense slots are zero."""
    row_R, layer_D, slot_K = np.arange(rows), np.arange(depth), np.arange(spec.top_k)
    mark_RDK = 7 * row_R[:, None, None] + 31 * layer_D[None, :, None] + slot_K
    ids_RDK = np.asarray(1 + mark_RDK % (min(spec.experts_per_layer) - 1))
    ids_RDK[:, [layer for layer in layer_D if layer not in spec.layer_ids]] = 0
    return ids_RDK.astype(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The layer axis
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def engine_arrays(draw: st.DrawFn) -> tuple[RouteSpec, NDArray[Any]]:
    """A spec and an array of any integer type that an engine could send under it."""
    depth = draw(st.integers(1, 6))
    layer_ids = draw(st.sets(st.integers(0, depth - 1), min_size=1))
    spec = RouteSpec(num_experts=100, top_k=draw(st.integers(1, 4)), layer_ids=tuple(sorted(layer_ids)))
    rows = draw(st.integers(0, 70))
    return spec, watermarked(rows, spec, depth=depth, dtype=draw(st.sampled_from(INTEGERS)))


@given(engine_arrays())
def test_rows_are_the_captured_layers_of_every_row(case: tuple[RouteSpec, NDArray[Any]]) -> None:
    """Row by row and layer by layer, the ids of the spec's layers come out as int16, whatever type they came in."""
    spec, layers_RDK = case
    before = layers_RDK.copy()

    rows_RLK = rows_from_layers(layers_RDK, spec)

    expected = [[[int(i) for i in row[layer]] for layer in spec.layer_ids] for row in layers_RDK]
    assert expected == rows_RLK.tolist()
    assert (np.dtype(np.int16), (len(layers_RDK), *spec.row_shape)) == (rows_RLK.dtype, rows_RLK.shape)
    assert not rows_RLK.flags.writeable
    np.testing.assert_array_equal(before, layers_RDK)


@given(engine_arrays(), st.data())
def test_ids_in_a_dense_slot_are_named(case: tuple[RouteSpec, NDArray[Any]], data: st.DataObject) -> None:
    """One id in a layer that has no router is refused, with the layer and the absolute token."""
    spec, layers_RDK = case
    dense = sorted(set(range(layers_RDK.shape[1])) - set(spec.layer_ids))
    assume(dense and len(layers_RDK))
    layer = data.draw(st.sampled_from(dense))
    row = data.draw(st.integers(0, len(layers_RDK) - 1))
    layers_RDK[row, layer, data.draw(st.integers(0, spec.top_k - 1))] = 5

    with pytest.raises(CaptureError) as caught:
        rows_from_layers(layers_RDK, spec, first_row=11, call="c")

    [problem] = caught.value.problems
    assert (ErrorKind.DENSE_SLOT, layer, 11 + row, "c") == (problem.kind, problem.layer, problem.token, problem.sample)


@given(engine_arrays(), st.data())
def test_a_row_that_was_not_written_is_named(case: tuple[RouteSpec, NDArray[Any]], data: st.DataObject) -> None:
    """For K >= 2 a row of zeros in a captured layer is refused with layer and token: no router repeats an id."""
    spec, layers_RDK = case
    assume(spec.top_k > 1 and len(layers_RDK))
    layer, row = data.draw(st.sampled_from(spec.layer_ids)), data.draw(st.integers(0, len(layers_RDK) - 1))
    layers_RDK[row, layer] = 0

    with pytest.raises(CaptureError) as caught:
        rows_from_layers(layers_RDK, spec, first_row=11)

    [problem] = caught.value.problems
    assert (ErrorKind.UNCAPTURED_SLOT, layer, 11 + row) == (problem.kind, problem.layer, problem.token)


def test_a_kernel_that_was_never_hooked_is_not_expert_zero() -> None:
    """Zeros of the right shape (a capture bound to nothing) are refused with every captured layer, at any length."""
    with pytest.raises(CaptureError, match="not bound") as caught:
        rows_from_layers(np.zeros((1, 4, 3), np.uint8), SPEC)

    assert [1, 3] == [problem.layer for problem in caught.value.problems]
    assert ErrorKind.UNCAPTURED_SLOT == caught.value.kind


@pytest.mark.parametrize(("rows", "refused"), [(0, False), (1, False), (63, False), (64, True), (500, True)])
def test_top_1_needs_many_zero_rows_to_be_judged(rows: int, refused: bool) -> None:
    """With one slot, zeros are a legal choice; only many of them, in every layer, show that nothing was captured."""
    spec = RouteSpec(num_experts=16, top_k=1, layer_ids=(0, 2))
    layers_RDK = np.zeros((rows, 3, 1), np.uint8)
    if refused:
        with pytest.raises(CaptureError) as caught:
            rows_from_layers(layers_RDK, spec)
        assert ErrorKind.UNCAPTURED_SLOT == caught.value.kind
        layers_RDK[rows // 2, 2] = 1
    np.testing.assert_array_equal(layers_RDK[:, [0, 2]], rows_from_layers(layers_RDK, spec))


@pytest.mark.parametrize("expert", [127, 128, 199, 255])
def test_the_upper_half_of_a_byte_stays_positive(expert: int) -> None:
    """uint8 ids of 128 and more are widened by value, never reinterpreted as negative."""
    spec = RouteSpec(num_experts=256, top_k=1, layer_ids=(0,))

    assert [[[expert]]] == rows_from_layers(np.full((1, 1, 1), expert, np.uint8), spec).tolist()


def test_int16_of_adjacent_layers_is_not_copied() -> None:
    """The common case of an engine without dense layers shares the engine's memory, read-only."""
    spec = RouteSpec(num_experts=100, top_k=2, layer_ids=(0, 1, 2))
    layers_RDK = watermarked(5, spec, depth=3, dtype="<i2")

    rows_RLK = rows_from_layers(layers_RDK, spec)

    assert np.shares_memory(layers_RDK, rows_RLK)
    assert (False, True) == (rows_RLK.flags.writeable, layers_RDK.flags.writeable)


@dataclass(frozen=True, kw_only=True)
class Bad:
    """An array that is not an engine output under SPEC, and how it is refused."""

    name: str
    layers: NDArray[Any]
    error: type[RouteplaneError]
    kind: ErrorKind


BAD = (
    Bad(name="floats", layers=np.ones((2, 4, 3)), error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="booleans", layers=np.ones((2, 4, 3), np.bool_), error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="flattened", layers=np.ones((2, 12), np.uint8), error=DataError, kind=ErrorKind.SHAPE),
    Bad(name="batched", layers=np.ones((1, 2, 4, 3), np.uint8), error=DataError, kind=ErrorKind.SHAPE),
    Bad(name="other top-k", layers=np.ones((2, 4, 2), np.uint8), error=SpecError, kind=ErrorKind.SHAPE),
    Bad(name="MoE layers alone", layers=np.ones((2, 2, 3), np.uint8), error=SpecError, kind=ErrorKind.LAYERS),
    Bad(name="a layer short", layers=np.ones((2, 3, 3), np.uint8), error=SpecError, kind=ErrorKind.LAYERS),
    Bad(name="no rows, a layer short", layers=np.ones((0, 3, 3), np.uint8), error=SpecError, kind=ErrorKind.LAYERS),
    Bad(
        name="beyond int16",
        layers=np.where(np.isin(np.arange(4), SPEC.layer_ids)[None, :, None], 32_768, np.zeros((2, 4, 3))).astype("u2"),
        error=DataError,
        kind=ErrorKind.VALUE_RANGE,
    ),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_arrays_of_another_form_are_refused(bad: Bad) -> None:
    """A wrong type, rank, layer axis, top-k or id range is an error of its own kind that names the call."""
    with pytest.raises(bad.error, match="call turn-7") as caught:
        rows_from_layers(bad.layers, SPEC, call="turn-7")

    assert bad.kind == caught.value.kind


def test_an_axis_of_another_length_than_the_decoder_is_refused() -> None:
    """Where the spec knows the decoder's depth, a slot more is an error too; without it, dense layers may follow."""
    deep = replace(SPEC, decoder_layers=4)
    layers_RDK, longer_RDK = watermarked(2, SPEC, depth=4), watermarked(2, SPEC, depth=5)

    assert rows_from_layers(layers_RDK, deep).tolist() == rows_from_layers(longer_RDK, SPEC).tolist()
    with pytest.raises(SpecError, match="decoder's 4 layers, got 5") as caught:
        rows_from_axis(longer_RDK, deep, call="turn-7")
    assert ErrorKind.LAYERS == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# base64 of .npy
# ----------------------------------------------------------------------------------------------------------------------


def encoded(array: NDArray[Any]) -> str:
    """As vLLM's server does it."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


arrays = npst.arrays(
    dtype=st.sampled_from([np.dtype(code) for code in (*INTEGERS, ">u2", ">i8")]),
    shape=npst.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5),
)


@given(arrays, st.booleans(), st.booleans())
def test_what_numpy_saves_is_decoded(array: NDArray[Any], fortran: bool, as_bytes: bool) -> None:
    """Every integer array of rank 3 that np.save writes comes back with its type, shape and values."""
    text = encoded(np.asfortranarray(array) if fortran else array)

    decoded = decode(text.encode() if as_bytes else text, form="npy").routes

    assert (array.dtype, array.shape) == (decoded.dtype, decoded.shape)
    np.testing.assert_array_equal(array, decoded)
    assert not decoded.flags.writeable


@given(arrays, st.data())
def test_a_cut_file_is_never_decoded(array: NDArray[Any], data: st.DataObject) -> None:
    """Any proper prefix of a file, and any file with bytes behind it, is refused."""
    content = base64.b64decode(encoded(array))
    cut = data.draw(st.integers(0, len(content) - 1))
    for wrong in (content[:cut], content + b"\0" * (cut + 1)):
        with pytest.raises(DataError) as caught:
            decode(base64.b64encode(wrong), form="npy")
        assert ErrorKind.ENCODING == caught.value.kind


@given(arrays, st.data())
def test_a_flipped_byte_is_refused_or_harmless(array: NDArray[Any], data: st.DataObject) -> None:
    """Whatever one byte becomes, decoding raises DataError or returns integers of rank 3 that fill the file exactly."""
    content = bytearray(base64.b64decode(encoded(array)))
    content[data.draw(st.integers(0, min(len(content), 130) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(base64.b64encode(content), form="npy").routes
    except DataError:
        return
    assert (3, array.nbytes) == (decoded.ndim, decoded.nbytes)
    assert decoded.dtype.kind in "iu"


def header(text: bytes, *, version: bytes = b"\1\0", length: int | None = None, payload: bytes = b"") -> bytes:
    """A file with a header of one's own."""
    size = len(text) if length is None else length
    width = 4 if version == b"\2\0" else 2
    return base64.b64encode(b"\x93NUMPY" + version + size.to_bytes(width, "little") + text + payload)


def described(descr: bytes, shape: bytes) -> bytes:
    """The text of a header as np.save lays it out."""
    return b"{'descr': " + descr + b", 'fortran_order': False, 'shape': " + shape + b", }\n"


def test_version_2_headers_are_read() -> None:
    """The four-byte length of version 2.0 is understood."""
    text = header(described(b"'|u1'", b"(1, 2, 3)"), version=b"\2\0", payload=bytes(range(6)))

    assert [[[0, 1, 2], [3, 4, 5]]] == decode(text, form="npy").routes.tolist()


@dataclass(frozen=True, kw_only=True)
class BadText:
    """Text that is not an encoded array, and the kind of the refusal."""

    name: str
    text: Any
    kind: ErrorKind = ErrorKind.ENCODING


BAD_TEXTS = (
    BadText(name="nothing", text=""),
    BadText(name="None", text=None, kind=ErrorKind.DTYPE),
    BadText(name="a list", text=[1, 2], kind=ErrorKind.DTYPE),
    BadText(name="no base64", text="****"),
    BadText(name="a line break inside", text=encoded(np.ones((1, 1, 1), "u1")).replace("A", "\nA", 1)),
    BadText(name="more digits than int takes", text=header(described(b"'|u1'", b"(" + b"9" * 5_000 + b", 1, 1)"))),
    BadText(name="outside ASCII", text="Ångström"),
    BadText(name="another file", text=base64.b64encode(b"PK\3\4" + bytes(40))),
    BadText(name="version 3", text=header(described(b"'|u1'", b"(0, 1, 1)"), version=b"\3\0")),
    BadText(name="a header past the end", text=header(b"{}", length=60_000)),
    BadText(name="a header of 4 GiB", text=header(b"{}" + b" " * 99, version=b"\2\0", length=2**32 - 1)),
    BadText(name="code for a header", text=header(b"__import__('os').system('true')\n")),
    BadText(name="a huge announcement", text=header(described(b"'<i8'", b"(9999999999, 4, 4)"))),
    BadText(name="huge and empty", text=header(described(b"'<i8'", b"(0, 99999999999999999999, 4)"))),
    BadText(name="a negative side", text=header(described(b"'|u1'", b"(-1, 4, 4)"))),
    BadText(name="a structured type", text=header(described(b"[('a', '<i2')]", b"(1, 1, 1)"))),
    BadText(name="objects", text=encoded(np.ones((1, 1, 1), object)), kind=ErrorKind.DTYPE),
    BadText(name="floats", text=encoded(np.ones((1, 1, 1))), kind=ErrorKind.DTYPE),
    BadText(name="booleans", text=encoded(np.ones((1, 1, 1), np.bool_)), kind=ErrorKind.DTYPE),
    BadText(name="text", text=encoded(np.full((1, 1, 1), "a")), kind=ErrorKind.DTYPE),
    BadText(name="rank 2", text=encoded(np.ones((2, 2), "u1")), kind=ErrorKind.SHAPE),
    BadText(name="rank 0", text=encoded(np.ones((), "u1")), kind=ErrorKind.SHAPE),
    BadText(name="rank 4", text=encoded(np.ones((1, 1, 1, 1), "u1")), kind=ErrorKind.SHAPE),
)


@pytest.mark.parametrize("bad", BAD_TEXTS, ids=lambda bad: bad.name)
def test_malformed_text_is_refused(bad: BadText) -> None:
    """No text is evaluated, unpickled or trusted with a size: each is refused with its kind."""
    with pytest.raises(DataError) as caught:
        decode(bad.text, form="npy")

    assert bad.kind == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Recorded responses of a real server
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One choice of a recorded response that carries routes, with the reference made by a Transformers forward."""

    name: str
    spec: RouteSpec
    routed_experts: str
    first_row: int
    token_ids: list[int]
    reference: dict[str, list[list[int]]]


def exchanges() -> Iterator[Exchange]:
    """Every choice with routes: of whole responses, and of the last chunk of a token stream."""
    for generation in ("0.30", "0.32"):
        document = json.loads((DATA / f"vllm-{generation}-http.json").read_text(encoding="utf-8"))
        spec = RouteSpec.from_hf_config(document["model"])
        for case in document["cases"]:
            parts = case["response"] if isinstance(case["response"], list) else [case["response"]]
            choices = [choice for part in parts for choice in part.get("choices", [])]
            texts = [choice["routed_experts"] for choice in choices if choice.get("routed_experts") is not None]
            for index, (text, sequence) in enumerate(zip(texts, case["sequences"], strict=True)):
                yield Exchange(
                    name=f"{generation}, {case['name']}, {index}",
                    spec=spec,
                    routed_experts=text,
                    first_row=case["request"].get("routed_experts_prompt_start") or 0,
                    token_ids=sequence["token_ids"],
                    reference=sequence["reference_sorted_by_layer"],
                )


EXCHANGES = tuple(exchanges())


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_recorded_responses_decode_to_their_reference(exchange: Exchange) -> None:
    """A row for every token from the trim on but the last one, equal as a set to an independent forward's choice."""
    rows_RLK = rows_from_layers(
        decode(exchange.routed_experts, form="npy").routes, exchange.spec, first_row=exchange.first_row
    )

    expected = [
        [exchange.reference[str(layer)][token] for layer in exchange.spec.layer_ids]
        for token in range(exchange.first_row, len(exchange.token_ids) - 1)
    ]
    assert expected == np.sort(rows_RLK, axis=2).tolist()


def test_both_generations_are_recorded_in_full() -> None:
    """Each generation brought routes in the same choices; a case that lost its routes would not pass unseen."""
    names = [exchange.name for exchange in EXCHANGES]

    assert 2 * 19 == len(names)
    assert [name[4:] for name in names[:19]] == [name[4:] for name in names[19:]]
