"""RouteSpec: legal geometries, one spelling per meaning, and names for what differs."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, SpecError
from routeplane.record.spec import MAX_EXPERTS, MAX_TOP_K, MISSING, NARROW_MISSING, RouteSpec
from routeplane.testing.strategies import specs

if TYPE_CHECKING:
    from collections.abc import Callable

LEGAL: dict[str, Any] = {"num_experts": 64, "top_k": 8, "layer_ids": (1, 2, 5), "model": "m"}

# ----------------------------------------------------------------------------------------------------------------------
# Construction
# ----------------------------------------------------------------------------------------------------------------------

ILLEGAL: dict[str, dict[str, Any]] = {
    "no_layers": {"layer_ids": ()},
    "layers_repeat": {"layer_ids": (1, 1)},
    "layers_fall": {"layer_ids": (2, 1)},
    "layer_negative": {"layer_ids": (-1, 2)},
    "layer_fraction": {"layer_ids": (1.0, 2)},
    "layer_text": {"layer_ids": ("1",)},
    "layer_bool": {"layer_ids": (False, True)},
    "layers_none": {"layer_ids": None},
    "layers_scalar": {"layer_ids": 3},
    "layer_beyond_int32": {"layer_ids": (1, 2**31)},
    "layer_after_equals": {"layer_ids": (1, 2, 2)},
    "too_many_layers": {"layer_ids": range(4_097)},
    "no_slots": {"top_k": 0},
    "top_k_negative": {"top_k": -1},
    "top_k_text": {"top_k": "8"},
    "top_k_fraction": {"top_k": 8.0},
    "top_k_per_layer": {"top_k": (8, 8, 8)},
    "top_k_above_width": {"top_k": 65},
    "top_k_above_bound": {"top_k": MAX_TOP_K + 1, "num_experts": 1_000},
    "width_zero": {"num_experts": 0},
    "width_above_int16": {"num_experts": MAX_EXPERTS + 1},
    "width_none": {"num_experts": None},
    "width_bool": {"num_experts": True, "top_k": 1},
    "widths_too_few": {"num_experts": (64, 64)},
    "widths_one_too_narrow": {"num_experts": (64, 7, 64)},
    "widths_text": {"num_experts": ("64", "64", "64")},
    "physical_ids": {"id_space": "physical"},
    "depth_of_the_last_layer": {"layer_ids": (1, 2, 5), "decoder_layers": 5},
    "depth_beyond_int32": {"decoder_layers": 2**31 + 1},
    "model_none": {"model": None},
}


@pytest.mark.parametrize("change", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_geometry_is_refused(change: dict[str, Any]) -> None:
    """Every illegal value is a SpecError that says what was expected and what came."""
    with pytest.raises(SpecError, match=r"expected|needs .*, got ") as caught:
        RouteSpec(**{**LEGAL, **change})

    assert ErrorKind.SPEC_INVALID == caught.value.kind


@pytest.mark.parametrize(("layer_ids", "depth"), [((1, 2, 5), 6), ((0,), 1), ((0,), 2**31), ((2**31 - 1,), 2**31)])
def test_edge_depths_are_legal(layer_ids: tuple[int, ...], depth: int) -> None:
    """A decoder has more layers than its last routed one's number, and at most as many as int32 can number."""
    spec = RouteSpec(num_experts=8, top_k=1, layer_ids=layer_ids, decoder_layers=depth)

    assert RouteSpec.from_json(spec.to_json()).decoder_layers == depth


def test_layer_ids_have_no_default() -> None:
    """The layers behind the axis must be named: they are never guessed from a shape. Field report 58."""
    with pytest.raises(TypeError, match="layer_ids"):
        RouteSpec(num_experts=64, top_k=8)  # type: ignore[call-arg]


@pytest.mark.parametrize("width", [1, 127, 128, 255, 256, 257, MAX_EXPERTS])
def test_edge_widths_are_legal(width: int) -> None:
    """Every width up to int16's is taken, and MISSING lies outside each."""
    spec = RouteSpec(num_experts=width, top_k=1, layer_ids=(0,))

    assert (width,) == spec.experts_per_layer
    assert not 0 <= MISSING < width


def test_edge_counts_are_legal() -> None:
    """As many layers, and as many slots, as the bounds say."""
    spec = RouteSpec(num_experts=MAX_EXPERTS, top_k=MAX_TOP_K, layer_ids=range(4_096))  # type: ignore[arg-type]

    assert (4_096, MAX_TOP_K) == spec.row_shape


@given(specs())
def test_whole_numbers_of_any_type_are_one_spec(spec: RouteSpec) -> None:
    """numpy integers, lists and equal widths per layer spell the same spec."""
    widths = [np.int64(width) for width in spec.experts_per_layer]
    again = RouteSpec(
        num_experts=widths,  # type: ignore[arg-type]
        top_k=np.uint8(spec.top_k),  # type: ignore[arg-type]
        layer_ids=np.asarray(spec.layer_ids, dtype=np.int32),  # type: ignore[arg-type]
        model=spec.model,
    )

    assert spec == again
    assert hash(spec) == hash(again)
    assert spec.digest == again.digest
    assert {int} == {type(value) for value in (*again.layer_ids, again.top_k, *again.experts_per_layer)}


@given(spec=specs(), depth=st.booleans())
def test_a_repr_makes_the_spec_again(spec: RouteSpec, depth: bool) -> None:
    """What an error or a notebook shows is an expression of the same spec."""
    shown = replace(spec, decoder_layers=spec.layer_ids[-1] + 1) if depth else spec

    assert shown == eval(repr(shown), {"RouteSpec": RouteSpec})


@pytest.mark.parametrize(
    ("layer_ids", "shown"),
    [
        (range(1, 27), "range(1, 27)"),
        (range(3, 8), "range(3, 8)"),
        (range(3, 7), "(3, 4, 5, 6)"),
        ((1, 2, 3, 4, 6), "(1, 2, 3, 4, 6)"),
    ],
)
def test_layers_that_follow_each_other_are_shown_as_a_range(layer_ids: tuple[int, ...], shown: str) -> None:
    """A line of 61 numbers hides the others; five are enough for a range."""
    assert f"layer_ids={shown}" in repr(RouteSpec(num_experts=8, top_k=1, layer_ids=layer_ids))


@given(specs())
def test_a_spec_pickles(spec: RouteSpec) -> None:
    """Equal after a process boundary."""
    assert spec == pickle.loads(pickle.dumps(spec))


# ----------------------------------------------------------------------------------------------------------------------
# JSON and digest
# ----------------------------------------------------------------------------------------------------------------------


@given(specs())
def test_json_round_trips(spec: RouteSpec) -> None:
    """JSON is canonical: sorted keys, no blanks, ASCII; it parses back, also from bytes."""
    text = spec.to_json()

    assert spec == RouteSpec.from_json(text) == RouteSpec.from_json(text.encode())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text.isascii()
    assert xxhash.xxh3_64_intdigest(text.encode()) == spec.digest


def test_the_digest_is_pinned() -> None:
    """The JSON and the digest of a spec are part of the format: they stand under every checksum."""
    spec = RouteSpec(num_experts=(64, 60, 64), top_k=8, layer_ids=(1, 2, 5), model="m")

    assert '{"id_space":"logical","layer_ids":[1,2,5],"model":"m","num_experts":[64,60,64],"top_k":8}' == spec.to_json()
    assert 0xB8BA2AAB7F2A39EF == spec.digest


ILLEGAL_JSON: dict[str, str | bytes] = {
    "empty": "",
    "cut": '{"id_space":"logical"',
    "null": "null",
    "list": "[]",
    "deep": "[" * 100_000,
    "not_utf8": b"\xff\xfe",
    "key_absent": '{"id_space":"logical","layer_ids":[1],"model":"","num_experts":4}',
    "key_unknown": '{"id_space":"logical","layer_ids":[1],"model":"","num_experts":4,"top_k":2,"x":1}',
    "layers_scalar": '{"id_space":"logical","layer_ids":1,"model":"","num_experts":4,"top_k":2}',
    "layers_null": '{"id_space":"logical","layer_ids":null,"model":"","num_experts":4,"top_k":2}',
    "layers_object": '{"id_space":"logical","layer_ids":{"1":1},"model":"","num_experts":4,"top_k":2}',
    "width_null": '{"id_space":"logical","layer_ids":[1],"model":"","num_experts":null,"top_k":2}',
    "width_huge": '{"id_space":"logical","layer_ids":[1],"model":"","num_experts":1e999,"top_k":2}',
    "physical": '{"id_space":"physical","layer_ids":[1],"model":"","num_experts":4,"top_k":2}',
    "depth_null": '{"decoder_layers":null,"id_space":"logical","layer_ids":[1],"model":"","num_experts":4,"top_k":2}',
    "model_number": '{"id_space":"logical","layer_ids":[1],"model":7,"num_experts":4,"top_k":2}',
}


@pytest.mark.parametrize("text", ILLEGAL_JSON.values(), ids=ILLEGAL_JSON)
def test_illegal_json_is_refused(text: str | bytes) -> None:
    """A header from outside is a spec or a SpecError, nothing else."""
    with pytest.raises(SpecError) as caught:
        RouteSpec.from_json(text)

    assert ErrorKind.SPEC_INVALID == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Use
# ----------------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_select_keeps_each_layers_width(data: st.DataObject) -> None:
    """A subset in any order, with repetition, is the subset in axis order with its own widths. Field report 44."""
    spec = data.draw(specs())
    chosen = data.draw(st.lists(st.sampled_from(spec.layer_ids), min_size=1))
    selected = spec.select(iter(chosen))
    widths = dict(zip(spec.layer_ids, spec.experts_per_layer, strict=True))

    assert tuple(sorted(set(chosen))) == selected.layer_ids
    assert [widths[layer] for layer in selected.layer_ids] == list(selected.experts_per_layer)
    assert (spec.top_k, spec.model) == (selected.top_k, selected.model)
    assert spec == spec.select(spec.layer_ids)


def test_a_layer_is_found_by_number() -> None:
    """Three dense layers before three MoE layers: slots go by layer id, dense ids have none. Field report 43."""
    spec = RouteSpec(num_experts=64, top_k=8, layer_ids=(3, 4, 5))

    assert [0, 1, 2] == [spec.slot(layer) for layer in (3, 4, 5)]
    for dense in (0, 2, 6, -1):
        with pytest.raises(SpecError, match=rf"layers \[3, 4, 5\], got {dense}") as caught:
            spec.slot(dense)
        assert ErrorKind.LAYERS == caught.value.kind
    with pytest.raises(SpecError, match="got 0"):
        spec.select([0, 3])


def test_a_selection_of_nothing_is_refused() -> None:
    """A geometry has at least one layer."""
    with pytest.raises(SpecError) as caught:
        RouteSpec(**LEGAL).select([])

    assert ErrorKind.SPEC_INVALID == caught.value.kind


@pytest.mark.parametrize(
    ("top_k", "width", "allowed"),
    [(1, 255, True), (1, 256, False), (2, 256, True), (2, 257, False), (22, 512, False), (8, 128, True)],
)
def test_narrow_follows_from_the_spec(top_k: int, width: int, allowed: bool) -> None:
    """One byte serves where K bytes 0xFF can be no route: E <= 256 for distinct slots, 255 for one. Reports 36, 37."""
    assert allowed == RouteSpec(num_experts=width, top_k=top_k, layer_ids=(0,)).narrow_allowed
    if allowed:
        row = [0xFF] * top_k
        assert NARROW_MISSING == 0xFF
        assert len(set(row)) < top_k or NARROW_MISSING >= width


def test_narrow_goes_by_the_widest_layer() -> None:
    """One layer of 257 experts makes the whole stream plain."""
    assert not RouteSpec(num_experts=(64, 257), top_k=2, layer_ids=(0, 1)).narrow_allowed


@given(specs())
def test_missing_rows_are_fresh(spec: RouteSpec) -> None:
    """Rows of -1 in int16, of the spec's shape, owned by the caller."""
    rows_SLK = spec.missing_rows(3)

    assert (3, *spec.row_shape) == rows_SLK.shape
    assert np.int16 == rows_SLK.dtype
    assert (rows_SLK == MISSING).all()
    assert rows_SLK.flags.owndata
    assert (0, *spec.row_shape) == spec.missing_rows(0).shape


DIFFERENCES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "num_experts": lambda legal: {**legal, "num_experts": 128},
    "top_k": lambda legal: {**legal, "top_k": 4},
    "layer_ids": lambda legal: {**legal, "layer_ids": (1, 2, 6)},
}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_a_difference_is_named(key: str) -> None:
    """The error names the key, both values and the place; another model's routes do not pass. Field report 54."""
    ours, theirs = RouteSpec(**LEGAL), RouteSpec(**DIFFERENCES[key](LEGAL))
    expected = f"{key}: {getattr(ours, key)} against {getattr(theirs, key)}"

    assert [expected] == ours.differences(theirs)
    with pytest.raises(SpecError) as caught:
        ours.require_same_geometry(theirs, where="stream x")
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind
    assert str(caught.value).startswith("stream x: expected the geometry of m, got m; ")
    assert expected in str(caught.value)


def test_another_depth_is_named_where_both_are_known() -> None:
    """A depth that one side does not know contradicts none."""
    shallow, deep, unknown = (RouteSpec(**LEGAL, decoder_layers=depth) for depth in (6, 8, None))

    assert ["decoder_layers: 6 against 8"] == shallow.differences(deep)
    assert [] == shallow.differences(unknown) == unknown.differences(deep)
    assert [] == shallow.differences(replace(shallow))


def test_the_name_of_a_model_is_not_part_of_its_geometry() -> None:
    """Specs that differ in the model's name alone are one geometry, and two digests."""
    ours, theirs = RouteSpec(**LEGAL), RouteSpec(**{**LEGAL, "model": "other"})
    ours.require_same_geometry(theirs, where="here")

    assert [] == ours.differences(theirs)
    assert ours.digest != theirs.digest


# ----------------------------------------------------------------------------------------------------------------------
# From a configuration (the geometry's own tests go through all families)
# ----------------------------------------------------------------------------------------------------------------------


def test_dense_layers_have_no_slot() -> None:
    """Kind of report 50: one dense layer of four leaves three routers, known by their decoder-layer ids."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
    }
    spec = RouteSpec.from_hf_config(config)

    assert (64, 8, (1, 2, 3)) == (spec.num_experts, spec.top_k, spec.layer_ids)


def test_another_spelling_is_the_same_geometry_and_dense_is_named_before_loading() -> None:
    """Kind of report 57: top-k under another key is found; a dense configuration is refused without a model."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 32,
        "experts_per_token": 4,
    }
    with pytest.raises(SpecError, match="mixture-of-experts model, got LlamaForCausalLM") as caught:
        RouteSpec.from_hf_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2})

    assert ErrorKind.DENSE_MODEL == caught.value.kind
    assert 4 == RouteSpec.from_hf_config(config).top_k
