"""Layouts of other stacks, on batches that their own rules build from real engines' routes: read, and written back.

Axes: B sequences, T tokens in all, L captured layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

from routeplane import ErrorKind, ModelCall, RouteSpec
from routeplane.batch import LAYOUTS, LayoutBatch, RouteBatch, from_layout, to_layout
from routeplane.capture import record_of_call
from routeplane.errors import DataError, RouteplaneError, UsageError
from routeplane.record import validate
from routeplane.record.spec import MISSING
from tests.batch.native import BUILDERS, DEPTH, FAMILIES, Sample, engine_samples, families, vary

if TYPE_CHECKING:
    from collections.abc import Callable

each_layout = pytest.mark.parametrize("layout", BUILDERS)
each_family = pytest.mark.parametrize("family", FAMILIES)


def draw(family: str, seed: int, count: int = 4) -> list[Sample]:
    """Samples of a family, truncated and multi-turn ones among them."""
    rng = np.random.default_rng(seed)
    pool = engine_samples(family)
    return [vary(pool[index], rng, name=f"s{at}") for at, index in enumerate(rng.choice(len(pool), count))]


def same(expected: Any, got: Any) -> bool:
    """Whether two native values are equal, types of arrays included."""
    if isinstance(expected, torch.Tensor) and expected.is_nested:
        parts = zip(expected.unbind(), got, strict=True)
        return all(same(mine, theirs) for mine, theirs in parts)
    if isinstance(expected, torch.Tensor):
        return same(expected.numpy(), got)
    if isinstance(expected, np.ndarray):
        found = np.asarray(got)
        return expected.shape == found.shape and expected.dtype == found.dtype and expected.tobytes() == found.tobytes()
    if isinstance(expected, dict):
        return set(expected) <= set(got) and all(same(value, got[name]) for name, value in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(got) and all(same(*pair) for pair in zip(expected, got, strict=True))
    return bool(expected == got)


def test_every_layout_has_a_builder() -> None:
    """No layout is declared that no test reads."""
    assert set(LAYOUTS) == set(BUILDERS)


@each_family
@each_layout
def test_a_batch_means_what_the_engine_returned(layout: str, family: str) -> None:
    """Token for token: the rows before the last sampled token are the engine's, and no filler is a route."""
    spec, _ = families()[family]
    for seed in range(6):
        samples = draw(family, seed)
        found = from_layout(BUILDERS[layout](samples, spec), spec, layout=layout, decoder_layers=_depth(layout))

        fed_alone = layout == "skyrl" or layout.startswith("nemo")
        for at, each in enumerate(samples):
            start, stop = found.offsets[at], found.offsets[at] + len(each.tokens)
            behind = each.rows[each.fed :][:, list(spec.layer_ids)]
            # the row behind the last sampled token: where the engine went on, unless it looks like filler
            captured = each.fed + (0 if fed_alone or not behind.any() else len(behind))
            captured = min(captured, len(each.tokens) - (not LAYOUTS[layout].last_row))
            assert captured == found.captured[at]
            assert each.tokens.tolist() == found.token_ids[start:stop].tolist()
            rows = found.routes[start:stop]
            assert each.rows[:captured][:, list(spec.layer_ids)].tolist() == rows[:captured].tolist()
            assert bool((rows[captured:] == -1).all())


@each_layout
def test_the_compiled_loop_reads_and_writes_the_same(layout: str) -> None:
    """Batches that are large enough for the kernel mean the same, and become the same bytes."""
    for family in ("qwen3_dense_first",):
        spec, _ = families()[family]
        native = BUILDERS[layout](draw(family, 11), spec)
        depth = _depth(layout)
        found = []
        for from_bytes in (0, 2**62):
            with mock.patch.object(validate, "_KERNEL_BYTES", from_bytes):
                laid = from_layout(native, spec, layout=layout, decoder_layers=depth)
                batch = RouteBatch.from_layout(native, spec, layout=layout, decoder_layers=depth)
                found.append((laid, batch, to_layout(laid, layout=layout, decoder_layers=depth).content))
        (laid, batch, content), (plain, plain_batch, plain_content) = found

        assert plain.routes.tobytes() == laid.routes.tobytes()
        assert plain.captured.tolist() == laid.captured.tolist()
        assert torch.equal(plain_batch.states, batch.states)
        assert torch.equal(batch.routes, torch.from_numpy(laid.routes))
        assert same(plain_content, content)


def _depth(layout: str) -> int | None:
    return DEPTH if LAYOUTS[layout].axis == "decoder" else None


def _widths(layout: str) -> dict[str, Any]:
    return {"pad_to_multiple_of": 16} if LAYOUTS[layout].container == "packed" else {}


@each_family
@each_layout
def test_a_batch_round_trips_byte_for_byte(layout: str, family: str) -> None:
    """Read and written back, every field of the native batch has its bytes and its type."""
    spec, _ = families()[family]
    for seed in range(6):
        native = BUILDERS[layout](draw(family, seed), spec)
        if layout == "prime_rl":  # the padding of the last sequence becomes tokens of it, which keep the width
            native = {name: value for name, value in native.items() if name != "names"}
        found = from_layout(native, spec, layout=layout, decoder_layers=_depth(layout))
        again = to_layout(found, layout=layout, decoder_layers=_depth(layout), **_widths(layout)).content
        equal = same(native, again)
        assert equal, f"{layout} of {family}, seed {seed}"


@each_layout
def test_a_trainer_replays_what_a_layout_means(layout: str) -> None:
    """A native batch becomes a checked RouteBatch without a copy by way of records: that of its tensors."""
    spec, _ = families()["olmoe"]
    native = BUILDERS[layout](draw("olmoe", 3), spec)
    found = from_layout(native, spec, layout=layout)
    tensors = RouteBatch.from_tensors(
        torch.from_numpy(found.routes),
        torch.from_numpy(found.token_ids),
        spec=spec,
        cu_seqlens=found.offsets,
        captured=found.captured,
        generation_mask=torch.from_numpy(found.generated),
    )
    batch = RouteBatch.from_layout(native, spec, layout=layout)

    assert found.routes.tolist() == batch.routes.tolist()
    assert len(found.names) == len(batch.lengths)
    for expected, got in zip(tensors.tensors(), batch.tensors(), strict=True):
        assert torch.equal(expected, got)
    assert tensors.coverage() == batch.coverage()


def lost_batch() -> LayoutBatch:
    """Two sequences, of which the second lost a row."""
    spec, _ = families()["olmoe"]
    samples = draw("olmoe", 1, 2)
    found = from_layout(BUILDERS["tunix"](samples, spec), spec, layout="tunix")
    routes = found.routes.copy()
    routes[int(found.offsets[1]) + 1] = -1
    return replace(found, names=("first", "second"), routes=routes)


def test_lost_rows_are_dropped_masked_or_an_error() -> None:
    """Where a stack has no spelling for MISSING, no sample trains on invented routes without being named."""
    batch = lost_batch()
    with pytest.raises(DataError, match="sample second, token 1, layer 0") as caught:
        to_layout(batch, layout="verl", decoder_layers=DEPTH)
    assert ErrorKind.ROUTES_MISSING == caught.value.kind

    dropped = to_layout(batch, layout="verl", decoder_layers=DEPTH, on_lost="drop_sample")
    masked = to_layout(batch, layout="verl", decoder_layers=DEPTH, on_lost="mask")

    assert (("second",), ()) == (dropped.dropped, dropped.masked)
    assert ["first"] == dropped.content["uid"]
    assert ((), ("second",)) == (masked.dropped, masked.masked)
    assert 0 == masked.content["response_mask"][1].sum() < masked.content["response_mask"][0].sum()
    assert 0 <= masked.content["routed_experts"].min()
    assert -1 == to_layout(batch, layout="tunix").content["forced_routed_experts"].min()


@pytest.mark.parametrize("layout", [name for name, kind in LAYOUTS.items() if kind.spells_missing])
def test_rows_lost_at_the_end_are_missing_where_a_stack_reads_it(layout: str) -> None:
    """An answer that lacks its last rows: NeMo RL's filler is a legal route, which would be replayed as a measured one.

    Rows that were fed are -1, as its own alignment writes them; the row of the last token alone is filler.
    """
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1, 3))
    rows, ids = np.asarray([[[3, 1]] * 2] * 2), np.arange(5)
    call = ModelCall(
        prompt_ids=ids[:3], generation_ids=ids[3:], routes=rows, weights_version=1, call_id="c", loss="lost"
    )
    laid = LayoutBatch.from_records([record_of_call(call, spec, sample_id="s")], spec)

    native = to_layout(laid, layout=layout).content
    found = from_layout(native, spec, layout=layout)

    written = np.asarray(native[LAYOUTS[layout].routes][0])
    assert ([2], [4]) == (laid.captured.tolist(), found.captured.tolist())
    assert [*rows.tolist(), *[[[MISSING] * 2] * 2] * 2] == written[:4].tolist()
    assert laid.routes.tolist() == found.routes.tolist()


def bad(change: Callable[[dict[str, Any]], None], **more: Any) -> LayoutBatch:
    """A verl batch with something wrong."""
    spec, _ = families()["qwen3_dense_first"]
    native = BUILDERS["verl"](draw("qwen3_dense_first", 2), spec)
    change(native)
    return from_layout(native, spec, layout="verl", **more)


def axis(slots: int) -> Callable[[dict[str, Any]], None]:
    """Routes of so many slots."""
    return lambda native: native.update(routed_experts=native["routed_experts"][:, :, :slots])


def nothing(_: dict[str, Any]) -> None:
    """Leave the batch as it is."""


REFUSED: dict[str, tuple[Callable[[], object], type[RouteplaneError], str]] = {
    "short_axis": (lambda: bad(axis(3)), DataError, "at least 4 decoder layers, got 3 slots"),
    "other_depth": (lambda: bad(nothing, decoder_layers=8), DataError, "8 decoder layers, got 4 slots"),
    "field": (lambda: bad(lambda native: native.pop("response_mask")), UsageError, "KeyError: 'response_mask'"),
    "captured": (lambda: bad(nothing, captured=[1]), UsageError, "captured as counts"),
    "layout": (lambda: from_layout({}, families()["olmoe"][0], layout="ours"), UsageError, "a layout of .*'verl'"),
    "depth": (lambda: to_layout(lost_batch(), layout="verl", on_lost="mask"), UsageError, "decoder_layers above 3"),
    "width": (
        lambda: to_layout(lost_batch(), layout="verl", decoder_layers=4, on_lost="mask", prompt_len=1),
        UsageError,
        "widths of at least",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_batch_that_is_not_in_the_layout_is_refused(
    call: Callable[[], object], error: type[RouteplaneError], message: str
) -> None:
    """Missing fields, another layer axis and widths that do not fit say what was expected."""
    with pytest.raises(error, match=message):
        call()
