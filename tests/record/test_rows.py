"""Rows as they are stored: the one walk against the plain rule, and rows laid out against numpy's indexing.

Each property runs with the kernels and without, and with blocks so small that a few tokens make several.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeplane.record import rows, validate
from routeplane.record.record import cut_record, read_record
from routeplane.record.rows import (
    absent_tokens,
    canonical_blocks,
    lay_out,
    move_checked,
    pick_layers,
    survey,
    widen,
    widen_legal,
)
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import all_legal
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.strategies import CORRUPTIONS, corruptions, records, routes, specs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

WAYS = ("kernels", "numpy")
ways = pytest.mark.parametrize("way", WAYS)


@contextmanager
def asked(way: str, *, block_bytes: int = 2**20) -> Iterator[None]:
    """Arrays of any size go to the kernels, or none does."""
    from_bytes = 0 if way == "kernels" else 2**62
    with (
        mock.patch.object(validate, "_KERNEL_BYTES", from_bytes),
        mock.patch.object(rows, "_BLOCK_BYTES", block_bytes),
        mock.patch.object(rows, "_WIDE_BYTES", block_bytes),
    ):
        yield


def random_rows(seed: int, spec: RouteSpec, *, tokens: int, missing: float) -> NDArray[np.int16]:
    """Legal rows, some of them MISSING."""
    rng = np.random.default_rng(seed)
    layers = [rng.random((tokens, width)).argsort(axis=1)[:, : spec.top_k] for width in spec.experts_per_layer]
    routes_SLK = np.stack(layers, axis=1).astype(np.int16)
    routes_SLK[rng.random(routes_SLK.shape[:2]) < missing] = MISSING
    return routes_SLK


def forms(routes_SLK: NDArray[np.int16], spec: RouteSpec) -> list[NDArray[Any]]:
    """The rows as each encoding stores them."""
    plain_SLK = np.ascontiguousarray(routes_SLK)
    return [plain_SLK, plain_SLK.astype(np.uint8)] if spec.narrow_allowed else [plain_SLK]


def plain_absent(routes_SLK: NDArray[np.int16]) -> list[int]:
    """Token by token."""
    return [token for token, rows_LK in enumerate(routes_SLK.tolist()) if any(-1 in row_K for row_K in rows_LK)]


# ----------------------------------------------------------------------------------------------------------------------
# The walk
# ----------------------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("experts", [200, 256], ids=["below_255", "with_expert_255"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10, 32])
def test_the_walk_says_what_a_loop_says(top_k: int, experts: int, way: str) -> None:
    """Legal rows with none, few and many MISSING, in any number of blocks: absent tokens are those of a loop, and what
    is handed on is all rows as int16, in order."""
    spec = RouteSpec(num_experts=experts if top_k > 1 else 255, top_k=top_k, layer_ids=(0, 3, 7))
    for seed, missing in enumerate((0.0, 0.002, 0.3)):
        routes_SLK = random_rows(seed, spec, tokens=700, missing=missing)
        routes_SLK[-1] = MISSING
        for stored_SLK in forms(routes_SLK, spec):
            for block_bytes in (2**20, 999 * top_k):
                handed: list[NDArray[np.int16]] = []
                with asked(way, block_bytes=block_bytes):
                    absent = survey(stored_SLK, spec, feed=handed.append)
                    silent = survey(stored_SLK, spec)
                    blocks = list(canonical_blocks(stored_SLK, spec))

                assert absent is not None
                assert silent is not None
                assert plain_absent(routes_SLK) == absent.tolist() == silent.tolist()
                assert np.array_equal(routes_SLK, np.concatenate(handed))
                assert np.array_equal(routes_SLK, np.concatenate(blocks))
                assert all(part_SLK.flags.c_contiguous and part_SLK.dtype == np.int16 for part_SLK in handed)


@ways
@given(data=st.data())
def test_any_legal_rows_are_walked(way: str, data: st.DataObject) -> None:
    """Whatever the strategies call legal has its absent tokens found, down to no tokens at all."""
    spec = data.draw(specs(max_layers=4, max_top_k=12))
    routes_SLK = data.draw(routes(spec, tokens=st.integers(0, 40)))
    for stored_SLK in forms(routes_SLK, spec):
        with asked(way, block_bytes=data.draw(st.sampled_from((1, 64, 2**20)))):
            absent = survey(stored_SLK, spec)

        assert absent is not None
        assert plain_absent(routes_SLK) == absent.tolist() == absent_tokens(stored_SLK).tolist()


@ways
@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_no_corruption_is_walked_past(way: str, name: str, data: st.DataObject) -> None:
    """Every named corruption, alone and far behind legal rows, gives no answer."""
    bad = data.draw(corruptions(which=(name,)))
    tokens = data.draw(st.sampled_from((0, 1, 150)))
    before = [] if bad.routes.ndim != 3 else [random_rows(1, bad.spec, tokens=tokens, missing=0.01)]
    fits = before and before[0].shape[1:] == bad.routes.shape[1:] and bad.routes.dtype == np.int16
    stored_SLK = np.ascontiguousarray(np.concatenate([*before, bad.routes]) if fits else bad.routes)
    with asked(way, block_bytes=data.draw(st.sampled_from((500, 2**20)))):
        assert survey(stored_SLK, bad.spec, feed=lambda _: None) is None


@ways
@pytest.mark.parametrize("top_k", [2, 3, 4, 8])
def test_every_pattern_of_255_is_judged_as_when_it_is_wide(top_k: int, way: str) -> None:
    """Narrow rows with 0xFF in any slots, among legal ones: legal exactly where the widened row is, with and without
    expert 255."""
    for experts in (255, 256):
        spec = RouteSpec(num_experts=experts, top_k=top_k, layer_ids=(0, 1))
        stored_SLK = random_rows(3, spec, tokens=200, missing=0.0).astype(np.uint8)
        for pattern in range(2**top_k):
            filler_K = np.asarray([pattern >> slot & 1 for slot in range(top_k)], dtype=np.bool_)
            stored_SLK[101, 1] = np.where(filler_K, 255, np.arange(top_k))
            wide_SLK = widen(stored_SLK, spec)
            with asked(way):
                absent = survey(stored_SLK, spec)

            assert all_legal(wide_SLK, spec) == (absent is not None)
            assert absent is None or plain_absent(wide_SLK) == absent.tolist()


def test_what_cannot_be_walked_is_left_to_the_rule() -> None:
    """Other types, other shapes and gaps in memory get no answer, legal or not."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))
    routes_SLK = random_rows(0, spec, tokens=6, missing=0.0)

    for other in (routes_SLK.astype(np.int32), routes_SLK[::2], routes_SLK[:, :1], routes_SLK.astype(np.int8)):
        assert survey(other, spec) is None


# ----------------------------------------------------------------------------------------------------------------------
# Rows laid out
# ----------------------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 7, 8, 10, 22, 32])
def test_rows_are_laid_out_as_indexing_would(top_k: int, way: str) -> None:
    """Any tokens and any layers in any order, of either form, at any address: widened, and nothing beside them
    written."""
    spec = RouteSpec(num_experts=255 if top_k == 1 else 256, top_k=top_k, layer_ids=tuple(range(7)))
    routes_SLK = random_rows(top_k, spec, tokens=90, missing=0.2)
    picks: list[tuple[int, ...]] = [
        tuple(range(7)),
        tuple(range(7))[::-1],
        (0,),
        (6, 0, 1, 3),
        (2, 3, 4),
        (3, 2),
        (1, 1),
    ]
    for stored_SLK in forms(routes_SLK, spec):
        for slots in picks:
            for start, stop in ((0, 90), (0, 0), (17, 18), (5, 71), (7, 90)):  # 7: on a boundary of 16 bytes
                around = np.full(2 * 90 * 7 * top_k + 64, 0x55, dtype=np.uint8)
                size, at = (stop - start) * len(slots) * top_k * 2, 2 * (start % 16) + 2
                out_SLK = around[at : at + size].view(np.int16).reshape(stop - start, len(slots), top_k)
                for past_caches in (False, True):
                    out_SLK.fill(0x55)
                    with asked(way, block_bytes=500):
                        lay_out(
                            stored_SLK,
                            spec,
                            tokens=(start, stop),
                            slots=slots,
                            out=out_SLK,
                            past_caches=past_caches,
                        )

                    assert np.array_equal(routes_SLK[start:stop, list(slots)], out_SLK)
                assert {0x55} == {*around[:at].tolist(), *around[at + size :].tolist()}


@ways
@given(data=st.data())
def test_legal_rows_are_widened_alike(way: str, data: st.DataObject) -> None:
    """The way for legal rows gives what the way for any rows gives."""
    spec = data.draw(specs(max_experts=256).filter(lambda spec: spec.narrow_allowed))
    stored_SLK = np.ascontiguousarray(data.draw(routes(spec)).astype(np.uint8))
    with asked(way):
        assert np.array_equal(widen(stored_SLK, spec), widen_legal(stored_SLK, spec))


@given(st.data())
def test_layers_are_picked_as_indexing_would(data: st.DataObject) -> None:
    """Neighbours or not, of int16 or bytes, of every token or every second: the choice is C-contiguous."""
    spec = data.draw(specs(min_layers=2, max_layers=5))
    kind, step = data.draw(st.sampled_from(["int16", "uint8"])), data.draw(st.sampled_from([1, 2]))
    routes_SLK = data.draw(routes(spec)).astype(kind)[::step]
    slots = data.draw(st.lists(st.integers(0, spec.num_layers - 1), min_size=1, max_size=6))
    for wanted in (slots, sorted(set(slots))):
        picked_SLK = pick_layers(routes_SLK, wanted)

        assert np.array_equal(routes_SLK[:, wanted], picked_SLK)
        assert picked_SLK.flags.c_contiguous


@pytest.mark.parametrize("kind", ["int16", "uint8"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_any_number_of_neighbours_is_picked(top_k: int, kind: str) -> None:
    """Layers that follow one another are copied in one piece, however many, from wherever they begin."""
    routes_SLK = np.arange(4 * 24 * top_k).reshape(4, 24, top_k).astype(kind)
    for first in (0, 1, 5):
        for count in range(1, 24 - first):
            picked_SLK = pick_layers(routes_SLK, range(first, first + count))

            assert np.array_equal(routes_SLK[:, first : first + count], picked_SLK)
    one_SLK = np.ascontiguousarray(routes_SLK[:, :1])
    assert np.array_equal(one_SLK[:, [0, 0]], pick_layers(one_SLK, [0, 0]))


_LEGAL = [[3, 5], [0, 1], [7, 2], [-1, -1]]


@given(
    choices=st.lists(st.sampled_from(_LEGAL), min_size=2, max_size=14)
    | st.lists(st.sampled_from([*_LEGAL, [4, 4], [8, 1], [-1, 2]]), max_size=14),
    wide=st.booleans(),
    filled=st.booleans(),
    gaps=st.none() | st.sets(st.integers(0, 6)),
)
def test_rows_are_moved_and_checked_as_a_loop_would(
    choices: list[list[int]], wide: bool, filled: bool, gaps: set[int] | None
) -> None:
    """Every row stands in its new layer, and the tokens that lack one are named; None where a row is not legal."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1, 4))
    given_SLK = np.asarray(choices[: len(choices) // 2 * 2], dtype=np.int16).reshape(-1, 2, 2)
    source = given_SLK.astype(np.int64 if wide else np.int16)
    out_SDK = np.full((len(source), 3, 2), 99, dtype=np.int16)
    skipped = sorted(token for token in gaps or () if token < len(source))
    with asked("kernels"), mock.patch.object(rows, "_MARKED_TOKENS", 2):
        found = move_checked(
            source,
            out_SDK,
            spec=spec,
            slots=(0, 1),
            into=(2, 0),
            gaps=None if gaps is None else np.asarray(skipped, dtype=np.int64),
            filler=np.asarray([6, 7], dtype=np.int16) if filled else None,
        )
    looked_at = [token for token in range(len(source)) if token not in skipped]
    if any(row not in _LEGAL for token in looked_at for row in given_SLK[token].tolist()):
        assert found is None
        return

    assert found is not None
    assert [token for token in looked_at if MISSING in given_SLK[token]] == found.tolist()
    assert np.array_equal(given_SLK[looked_at], out_SDK[looked_at][:, [2, 0]])
    assert {(6, 7) if filled else (99, 99)} >= {tuple(row) for row in out_SDK[looked_at, 1].tolist()}


# ----------------------------------------------------------------------------------------------------------------------
# Records that hold them
# ----------------------------------------------------------------------------------------------------------------------


def _content(record: Any) -> dict[str, Any]:
    names = ("sample_id", "attempt", "segment", "group", "token_ids", "routes_start", "prefix", "spans", "captures")
    more = ("spec", "logprobs", "attributes", "columns", "checksum")
    return {name: getattr(record, name) for name in (*names, *more)}


@given(st.data())
def test_a_record_is_the_same_in_either_form(data: st.DataObject) -> None:
    """A record over narrow bytes has the content, the checksum and the parts of the one that was written; and widens
    its rows when, and only when, they are asked for."""
    spec = data.draw(specs(max_experts=256).filter(lambda spec: spec.narrow_allowed))
    record = data.draw(records(spec=spec))
    narrow = read_record(record.routes.astype(np.uint8), verify=True, **_content(record))

    assert record.equals(narrow)
    assert record.nbytes == narrow.nbytes
    assert record.absent_tokens.tolist() == narrow.absent_tokens.tolist() == plain_absent(record.routes)
    keep = data.draw(st.sets(st.sampled_from(spec.layer_ids), min_size=1))
    assert record.select(keep).equals(narrow.select(keep))
    assert "routes" not in vars(narrow)
    assert np.array_equal(record.routes, narrow.routes)
    assert "routes" in vars(narrow)
    assert not narrow.routes.flags.writeable
    assert not narrow.stored_routes.flags.writeable


@pytest.mark.parametrize("stored", ["plain", "narrow"])
@given(data=st.data())
def test_a_reader_cuts_as_a_record_does(stored: str, data: st.DataObject) -> None:
    """Tokens, layers and both: the same record as ``slice`` and ``select`` give, valid when it is built again."""
    spec = data.draw(specs(max_experts=256).filter(lambda spec: spec.narrow_allowed))
    record = data.draw(records(spec=spec, prefixes=False))
    held = record.routes.astype(np.uint8) if stored == "narrow" else record.routes
    read = read_record(held, verify=True, **_content(record))
    start = data.draw(st.integers(0, record.num_tokens - 1))
    stop = data.draw(st.integers(start + 1, record.num_tokens))
    subset = spec.select(data.draw(st.sets(st.sampled_from(spec.layer_ids), min_size=1)))
    cut = cut_record(read, tokens=(start, stop), spec=subset)
    plain = record.slice(start, stop).select(subset.layer_ids)

    assert plain.equals(cut)
    assert plain.checksum == cut.checksum
    assert plain.absent_tokens.tolist() == cut.absent_tokens.tolist() == plain_absent(cut.routes)
    rebuilt = read_record(cut.stored_routes, verify=True, **_content(cut))
    assert plain.captures == rebuilt.captures


def test_an_unknown_attribute_is_none_of_the_record() -> None:
    """The way in which rows are widened answers for no other name."""
    record = watermarked_record(0, num_tokens=3, spec=watermarked_spec())

    with pytest.raises(AttributeError, match="routess"):
        _ = record.routess  # type: ignore[attr-defined]
