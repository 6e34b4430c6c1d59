"""Batches that a trainer made itself: checked once, wherever the rows come from; a wrong row is named, never replayed.

Axes: B sequences, S positions, T packed rows, L layers, K top-k slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane import ErrorKind, RouteSpec
from routeplane.batch import BatchOptions, RouteBatch, collate
from routeplane.batch.layouts import take_rows
from routeplane.errors import DataError, RouteplaneError, UsageError
from routeplane.record import validate
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = watermarked_spec(layers=(1, 4), top_k=3)
SMALL = RouteSpec(num_experts=8, top_k=2, layer_ids=(1, 3))


def rows(*shape: int) -> torch.Tensor:
    """Legal rows of SMALL: ids 3 and 5 everywhere."""
    return torch.tensor([3, 5]).expand(*shape, 2, 2).contiguous()


IDS = torch.arange(6).view(2, 3)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    layout=st.sampled_from(("padded", "packed")),
    side=st.sampled_from(("right", "left")),
    dtype=st.sampled_from((torch.int16, torch.int32, torch.int64)),
)
def test_a_batch_of_tensors_is_the_batch_of_the_records(
    lengths: list[int], layout: Any, side: Any, dtype: torch.dtype
) -> None:
    """The tensors of a collated batch, taken over as a trainer's own, give the same routes, plan and coverage."""
    records = [watermarked_record(at, num_tokens=length, spec=SPEC) for at, length in enumerate(lengths)]
    options = BatchOptions(padding_side=side) if layout == "padded" else BatchOptions(pad_to_multiple_of=2)
    batch = collate(records, SPEC, layout=layout, options=options)
    filled = batch.routes.clone()
    filled[batch.pad_mask] = 0
    edges = batch.cu_seqlens_padded if layout == "packed" else None

    own = RouteBatch.from_tensors(
        filled.to(dtype),
        batch.token_ids,
        spec=SPEC,
        cu_seqlens=edges,
        pad_mask=batch.pad_mask,
        generation_mask=batch.generation_mask,
    )

    assert torch.equal(batch.routes, own.routes)
    assert batch.plan.token_N.tolist() == own.plan.token_N.tolist()
    assert torch.equal(batch.position_ids, own.position_ids)
    assert torch.equal(batch.states, own.states)
    assert batch.coverage() == own.coverage()
    assert torch.equal(batch.generation_mask, own.generation_mask)


def test_nested_tensors_are_packed_sequences() -> None:
    """A jagged tensor of routes and one of ids say where sequences begin."""
    parts = [rows(3), rows(1)]
    routes = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)

    own = RouteBatch.from_tensors(routes, ids, spec=SMALL)

    assert [0, 3, 4] == own.cu_seqlens.tolist()
    assert torch.equal(rows(4).short(), own.routes)


def test_filler_outside_of_the_captured_rows_is_missing() -> None:
    """Zeros, arange and ids beyond E are no routes where nothing was captured, and are counted by where they stand."""
    routes = rows(2, 3)
    routes[0, 1:] = 0
    routes[1, 2] = 99

    own = RouteBatch.from_tensors(routes, IDS, spec=SMALL, captured=torch.tensor([1, 2]))

    assert [[3, -1, -1], [3, 3, -1]] == own.routes[:, :, 0, 0].tolist()
    assert {"captured": 3, "not_captured": 1, "not_fed": 2} == {
        state: count for state, count in own.coverage().rows.items() if count
    }
    assert 1 == own.unexplained_missing
    mask = torch.tensor([[True, False, False], [True, True, False]])
    assert torch.equal(own.routes, RouteBatch.from_tensors(routes, IDS, spec=SMALL, captured=mask).routes)


def test_rows_that_are_not_there_are_lost() -> None:
    """A MISSING row inside is lost, one in some layers partial, and the last one was never fed."""
    routes = rows(1, 4)
    routes[0, 1] = -1
    routes[0, 2, 0] = -1
    routes[0, 3] = -1

    counts = RouteBatch.from_tensors(routes, IDS.view(-1)[None, :4], spec=SMALL).coverage().rows

    assert {"captured": 1, "lost": 1, "partial": 1, "not_fed": 1} == {name: n for name, n in counts.items() if n}


def own(change: Callable[[torch.Tensor], None] | None = None, **more: Any) -> RouteBatch:
    """A batch of two sequences of three tokens, with something changed."""
    routes = rows(2, 3)
    if change is not None:
        change(routes)
    return RouteBatch.from_tensors(more.pop("routes", routes), IDS, spec=SMALL, **more)


def at(value: Any) -> Callable[[torch.Tensor], None]:
    """Put ids into sequence 1, token 2, layer 3."""

    def change(routes: torch.Tensor) -> None:
        routes[1, 2, 1] = torch.as_tensor(value)

    return change


REFUSED: dict[str, tuple[Callable[[], object], type[RouteplaneError], ErrorKind, str]] = {
    "zeros": (lambda: own(at(0)), DataError, ErrorKind.DUPLICATE_ID, "sequence 1, token 2, layer 3"),
    "partial": (lambda: own(at([3, -1])), DataError, ErrorKind.PARTIAL_ROW, "sequence 1, token 2, layer 3"),
    "foreign": (lambda: own(at([0, 9])), DataError, ErrorKind.ID_OUT_OF_RANGE, "sequence 1, token 2, layer 3"),
    "wide": (lambda: own(at([0, 2**40])), DataError, ErrorKind.VALUE_RANGE, "int16"),
    "layers": (lambda: own(routes=rows(2, 3)[:, :, :1]), UsageError, ErrorKind.ARGUMENT, r"layers \[1, 3\]"),
    "floats": (lambda: own(routes=rows(2, 3).float()), UsageError, ErrorKind.ARGUMENT, "integer routes"),
    "captured": (lambda: own(captured=[4, 1]), UsageError, ErrorKind.ARGUMENT, r"captured as bool.*got \[4, 1\]"),
    "numpy": (lambda: own(routes=rows(2, 3).numpy()), UsageError, ErrorKind.ARGUMENT, "routes as a tensor"),
    "attention": (
        lambda: own(at([1, 0]), pad_mask=torch.ones(2, 3, dtype=torch.bool)),
        UsageError,
        ErrorKind.ARGUMENT,
        "True at padding",
    ),
    "lengths": (lambda: own(lengths=[4, 1]), UsageError, ErrorKind.ARGUMENT, "within their"),
}


@pytest.mark.parametrize(("call", "error", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_row_of_an_own_batch_is_named(
    call: Callable[[], object], error: type[RouteplaneError], kind: ErrorKind, message: str
) -> None:
    """All-zero and partial rows, foreign experts and other axes are errors that say where."""
    with pytest.raises(error, match=message) as caught:
        call()

    assert kind == caught.value.kind


def test_other_routes_of_a_batch_are_checked_too() -> None:
    """``with_routes`` refuses an illegal row of a token, and does not look at padding."""
    batch = collate([watermarked_record(0, num_tokens=3, spec=SPEC)], SPEC, options=BatchOptions(seq_len=4))
    routes = batch.routes.clone().view(4, 2, 3)
    routes[3] = 0
    assert torch.equal(batch.routes[0, :2], batch.with_routes(routes).routes[0, :2])

    routes[1, 0] = 0
    with pytest.raises(DataError, match="sequence 0, token 1, layer 1"):
        batch.with_routes(routes)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator: the verdict is the host's")
def test_the_verdict_on_a_device_is_that_on_the_host() -> None:
    """Rows on an accelerator are judged there, and found on the host."""
    device = torch.accelerator.current_accelerator()
    routes = rows(2, 3).to(device)
    assert torch.equal(own().routes, RouteBatch.from_tensors(routes, IDS.to(device), spec=SMALL).routes.cpu())
    routes[1, 2, 1] = 0
    with pytest.raises(DataError, match="sequence 1, token 2, layer 3"):
        RouteBatch.from_tensors(routes, IDS.to(device), spec=SMALL)


def test_own_batches_allocate_their_routes() -> None:
    """The trainer's tensor is only read."""
    routes = rows(2, 3).short()
    batch = RouteBatch.from_tensors(routes, IDS, spec=SMALL, lengths=[3, 1])

    assert np.all(routes.numpy() == rows(2, 3).numpy())
    assert batch.routes.data_ptr() != routes.data_ptr()


@given(data=st.data(), top_k=st.sampled_from((1, 3, 8)), kind=st.sampled_from(("uint8", "int16", "int64")))
def test_the_compiled_loop_takes_what_numpy_takes(data: st.DataObject, top_k: int, kind: str) -> None:
    """Rows, the tokens that lack some, verdicts and errors: the same with the kernel and without it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    depth, tokens = 6, data.draw(st.integers(1, 40))
    layers = data.draw(st.sampled_from(((0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (0, 2, 5))))
    spec = RouteSpec(num_experts=40, top_k=top_k, layer_ids=layers)
    given_rows = rng.random((tokens, depth, 40)).argsort(axis=2)[:, :, :top_k]
    if kind != "uint8":
        given_rows[rng.random((tokens, depth)) < data.draw(st.sampled_from((0.0, 0.2)))] = -1
    for _ in range(data.draw(st.integers(0, 2))):
        at = tuple(rng.integers(0, (tokens, depth, top_k)))
        given_rows[at] = data.draw(st.sampled_from((40, 200, 7, -1, -5, 2**15, 2**20)))
    kept = None if data.draw(st.booleans()) else rng.random(tokens) < 0.6
    slots: Any = slice(2, 6) if layers == (2, 3, 4, 5) else list(layers) if len(layers) == 3 else None

    def taken(from_bytes: int) -> Any:
        out = np.empty((tokens, *spec.row_shape), dtype=np.int16)
        with mock.patch.object(validate, "_KERNEL_BYTES", from_bytes):
            try:
                absent = take_rows(given_rows.astype(kind), spec, out=out, slots=slots, kept=kept)
            except DataError as error:
                return error.kind, str(error)
        return out.tolist(), None if absent is None else absent.tolist()

    assert taken(2**62) == taken(0)
