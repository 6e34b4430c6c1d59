"""Batches against the records they were made of; ``test_batch_model.py`` has a real model read them.

Axes: B sequences, N output rows, L layers, K top-k slots.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, RouteBatch, collate, microbatches
from routeplane.errors import DataError, ErrorKind, RouteplaneError, SpecError, UsageError
from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Coverage
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec
from tests.batch.laid_out import laid_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPEC = watermarked_spec(layers=(1, 2, 5, 9), top_k=3)

LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {"layout": "padded"},
    "left": {"layout": "padded", "padding_side": "left"},
    "right_to_multiple": {"layout": "padded", "pad_to_multiple_of": 8},
    "left_to_length": {"layout": "padded", "padding_side": "left", "seq_len": 20},
    "packed": {"layout": "packed"},
    "packed_to_multiple": {"layout": "packed", "pad_to_multiple_of": 4},
}
layouts = pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)


def make(sample: int, num_tokens: int, **options: Any) -> RouteRecord:
    """A watermarked record under SPEC."""
    return watermarked_record(sample, num_tokens=num_tokens, **{"spec": SPEC, **options})


@dataclass(frozen=True)
class ListSource:
    """The least a source can be: records under a spec. Counts what was read."""

    records: list[RouteRecord]
    read: list[RouteRecord]
    spec: RouteSpec = SPEC

    def __iter__(self) -> Iterator[RouteRecord]:
        for record in self.records:
            self.read.append(record)
            yield record


def source(*lengths: int) -> ListSource:
    """Records of these lengths, in order."""
    return ListSource([make(sample, length) for sample, length in enumerate(lengths)], [])


def rows_of(batch: RouteBatch) -> list[tuple[int, int]]:
    """``(record, token)`` of each row, from the lengths alone: the n-th unpadded row is the n-th token."""
    tokens = iter([(b, t) for b, length in enumerate(batch.lengths.tolist()) for t in range(length)])
    return [(-1, -1) if pad else next(tokens) for pad in batch.pad_mask.view(-1).tolist()]


# ----------------------------------------------------------------------------------------------------------------------
# Placement
# ----------------------------------------------------------------------------------------------------------------------

shapes = st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=5)


@given(shapes=shapes, options=st.sampled_from(list(LAYOUTS.values())))
def test_every_row_is_its_token_in_every_tensor(shapes: list[tuple[int, set[int]]], options: dict[str, Any]) -> None:
    """Routes, ids, masks and log-probabilities of a row are those of the token that stands there; padding has none."""
    records = [
        make(sample, length, missing=[token for token in lost if token < length])
        for sample, (length, lost) in enumerate(shapes)
    ]
    batch = collate(records, SPEC, **laid_out(options, pad_token_id=7))
    by_layer = {layer: batch.layer(layer) for layer in SPEC.layer_ids}
    logprobs = torch.full((batch.num_rows,), torch.nan) if batch.logprobs is None else batch.logprobs.view(-1)

    assert sum(length for length, _ in shapes) == int((~batch.pad_mask).sum())
    assert [record.key for record in records] == list(batch.keys)
    for row, (sample, token) in enumerate(rows_of(batch)):
        if sample < 0:
            expected = {layer: [MISSING] * 3 for layer in SPEC.layer_ids}
            ids, sampled, score = 7, False, np.nan
        else:
            lost = token in shapes[sample][1] or token == shapes[sample][0] - 1
            expected = {
                layer: [MISSING] * 3 if lost else watermark(sample, token, layer=layer, k=np.arange(3)).tolist()
                for layer in SPEC.layer_ids
            }
            sampled = token >= max(1, shapes[sample][0] // 2)
            ids, score = 1_000 * sample + token + 1, -(1 + sample + token / 1024) if sampled else np.nan
            assert token == int(batch.position_ids.view(-1)[row])
        assert expected == {layer: rows_NK[row].tolist() for layer, rows_NK in by_layer.items()}
        assert ids == int(batch.token_ids.view(-1)[row])
        assert sampled == bool(batch.generation_mask.view(-1)[row])
        np.testing.assert_array_equal(np.float32(score), logprobs[row].numpy())


def test_types_and_shapes_are_the_documented_ones() -> None:
    """Both layouts have the documented dtypes; gate order is b*S+s, or t."""
    records = [make(0, 3), make(1, 2)]
    padded, packed = (collate(records, SPEC, layout=layout) for layout in ("padded", "packed"))
    dtypes = {
        "routes": torch.int16,
        "token_ids": torch.int64,
        "position_ids": torch.int64,
        "pad_mask": torch.bool,
        "generation_mask": torch.bool,
        "logprobs": torch.float32,
        "lengths": torch.int64,
        "cu_seqlens": torch.int32,
        "cu_seqlens_padded": torch.int32,
    }

    for batch, shape in ((padded, (2, 3)), (packed, (5,))):
        assert dtypes == {name: getattr(batch, name).dtype for name in dtypes}
        assert (*shape, 4, 3) == batch.routes.shape
        assert {shape} == {getattr(batch, name).shape for name in list(dtypes)[1:6]}
        assert (batch.num_rows, 3) == batch.layer(5).shape
        assert batch.routes.untyped_storage().data_ptr() == batch.layer(5).untyped_storage().data_ptr()
    assert [0, 3, 5] == packed.cu_seqlens.tolist() == padded.cu_seqlens.tolist()
    assert [0, 3, 6] == padded.cu_seqlens_padded.tolist()
    assert ("padded", "packed") == (padded.layout, packed.layout)


@given(layers=st.sets(st.sampled_from(SPEC.layer_ids), min_size=1), options=st.sampled_from(list(LAYOUTS.values())))
def test_a_subset_of_layers_equals_records_that_had_no_others(layers: set[int], options: dict[str, Any]) -> None:
    """Leaving layers out while copying gives the routes and the coverage of having selected them before."""
    records = [make(0, 5, missing=[(0, 1), (0, 2), (2, 9)]), make(1, 3, missing=[(1, 5), 0])]
    spec = SPEC.select(layers)

    found = collate(records, spec, **laid_out(options))
    expected = collate([record.select(layers) for record in records], spec, **laid_out(options))

    assert torch.equal(expected.routes, found.routes)
    assert spec == found.spec
    assert expected.coverage() == found.coverage()
    assert (found.routes.shape[-2:], found.routes.is_contiguous()) == (torch.Size(spec.row_shape), True)
    with pytest.raises(SpecError, match="captured layers"):
        found.layer(3)


def test_missing_rows_are_counted_by_reason() -> None:
    """Lost and partial tokens are unexplained; final tokens and padding are not."""
    records = [make(0, 5, missing=[1, (2, 9)]), make(1, 3)]
    batch = collate(records, SPEC, options=BatchOptions(seq_len=8))

    assert reduce(Coverage.merge, [record.coverage() for record in records]) == batch.coverage()
    assert (8, 2, 2) == (batch.coverage().total, batch.coverage().count("not_fed"), batch.unexplained_missing)
    assert 1 == collate(records, SPEC.select([1])).unexplained_missing


def test_records_without_logprobs_have_nan_or_make_none() -> None:
    """One record's lack is NaN; where all lack them there is no tensor."""
    bare = replace(make(1, 2), logprobs=None, checksum=None)
    mixed = collate([make(0, 2), bare], SPEC, layout="packed")

    assert mixed.logprobs is not None
    assert [True, False, True, True] == mixed.logprobs.isnan().tolist()
    assert collate([bare], SPEC).logprobs is None


def test_token_columns_are_cut_with_the_tokens() -> None:
    """Every column arrives in its type, native whatever the record's byte order, with a neutral value at padding."""
    columns = [
        {"reward": np.asarray([0.5] * n, "f8"), "turn": np.arange(n, dtype=">i4"), "use": np.ones(n, bool)}
        for n in (3, 1)
    ]
    records = [
        replace(make(sample, len(extra["use"])), columns=extra, checksum=None) for sample, extra in enumerate(columns)
    ]
    found = collate(records, SPEC, options=BatchOptions(padding_side="left")).columns

    assert ["reward", "turn", "use"] == sorted(found)
    assert [[0, 1, 2], [0, 0, 0]] == found["turn"].tolist()
    assert [[True] * 3, [False, False, True]] == found["use"].tolist()
    np.testing.assert_array_equal([[0.5] * 3, [np.nan, np.nan, 0.5]], found["reward"].numpy())
    assert (torch.float64, torch.int32, torch.bool) == tuple(found[name].dtype for name in sorted(found))


@layouts
def test_a_batch_owns_its_memory(options: dict[str, Any]) -> None:
    """Writing through every tensor changes no record and no plan, a single exact-size record's included."""
    record = make(0, 20)
    batch = collate([record], SPEC, **laid_out(options))
    for item in fields(batch):
        if isinstance(value := getattr(batch, item.name), torch.Tensor):
            value.zero_()

    record.verify()
    assert [20] == batch.plan.lengths.tolist()
    assert [0, 20] == batch.plan.cu_seqlens.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Moving
# ----------------------------------------------------------------------------------------------------------------------


def tensors(batch: RouteBatch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch, by name."""
    found = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value for name, value in {**found, **batch.columns}.items() if isinstance(value, torch.Tensor)}


def with_column() -> RouteBatch:
    """A batch in which no tensor is left out."""
    return collate([replace(make(0, 3), columns={"turn": np.arange(3)}, checksum=None)], SPEC)


def test_every_tensor_moves_and_pins() -> None:
    """``to`` leaves no tensor behind; ``pin_memory`` pins all of them where torch sees an accelerator, else none."""
    batch = with_column()

    assert 11 == len(tensors(batch))
    assert {"meta"} == {value.device.type for value in tensors(batch.to("meta")).values()}
    assert {"cpu"} == {value.device.type for value in tensors(batch).values()}
    pinned = {value.is_pinned() for value in tensors(batch.pin_memory()).values()}
    assert {torch.accelerator.is_available()} == pinned


def test_a_batch_pickles() -> None:
    """What a loader's worker sends arrives whole."""
    batch = with_column()
    came: RouteBatch = pickle.loads(pickle.dumps(batch))

    assert batch.keys == came.keys
    assert batch.coverage() == came.coverage()
    for name, value in tensors(batch).items():
        assert torch.equal(value.nan_to_num(), tensors(came)[name].nan_to_num())


# ----------------------------------------------------------------------------------------------------------------------
# Microbatches
# ----------------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    tokens=st.integers(12, 40),
    options=st.sampled_from(
        [
            {},
            {"pad_to_multiple_of": 4},
            {"layout": "padded"},
            {"layout": "padded", "pad_to_multiple_of": 3, "padding_side": "left"},
            {"layout": "padded", "seq_len": 10},
        ]
    ),
)
def test_microbatches_are_full_and_in_order(lengths: list[int], tokens: int, options: dict[str, Any]) -> None:
    """All records come, in order, in batches within the budget, none of which could have taken the next record."""
    given = source(*lengths)
    found = list(microbatches(given, tokens=tokens, **laid_out(options)))

    assert [record.key for record in given.records] == [key for batch in found for key in batch.keys]
    assert all(batch.num_rows <= tokens for batch in found)
    at = 0
    for batch in found[:-1]:
        stop = at + len(batch.keys)
        wider = collate(given.records[at : stop + 1], SPEC, **laid_out({"layout": "packed", **options}))
        assert wider.num_rows > tokens
        at = stop


def test_microbatches_read_no_further_than_they_must() -> None:
    """A batch is given out as soon as the next record does not fit, and no record before it is asked for."""
    given = source(4, 4, 4, 4, 4)
    found = microbatches(given, tokens=8)

    assert [] == given.read
    next(found)
    assert 3 == len(given.read)


def test_a_column_with_a_layer_axis_follows_the_layers_of_the_batch() -> None:
    """Values that name their layer and token: a stage gets its own layers, in every layout."""
    record = watermarked_record(0, num_tokens=5, spec=SPEC)
    values_SL = np.arange(5)[:, None] * 100 + np.asarray(SPEC.layer_ids)
    column = AlignedColumn.of(values_SL.astype(np.float32), aligned="fed", axes=("layers",))
    record = replace(record, columns={"weight": column}, checksum=None)
    for layout in ("padded", "packed"):
        batch = collate([record], SPEC.select([2, 9]), layout=layout)
        assert values_SL[:, [1, 3]].tolist() == batch.columns["weight"].reshape(5, 2).tolist()


def test_microbatches_take_a_spec_for_fewer_layers_or_a_plain_list() -> None:
    """A stage's layers can be asked for, and a list of records needs no source around it."""
    stage = SPEC.select([2, 9])
    records = source(3, 2).records

    (from_source,) = microbatches(source(3, 2), tokens=8, spec=stage)
    (from_list,) = microbatches(records, tokens=8, spec=stage)

    assert torch.equal(collate(records, stage, layout="packed").routes, from_source.routes)
    assert torch.equal(from_source.routes, from_list.routes)
    assert [] == list(microbatches([], tokens=8, spec=SPEC))


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def delta() -> RouteRecord:
    """A record whose first two rows stand in another one."""
    whole = make(0, 4)
    prefix = Prefix(sample_id="sample-9", stop=2, checksum=1)
    return replace(whole, routes=whole.routes[2:], routes_start=2, prefix=prefix, checksum=None)


def column(name: str, dtype: str) -> RouteRecord:
    """A record with one token column."""
    return replace(make(1, 2), columns={name: np.zeros(2, dtype)}, checksum=None)


WIDE = watermarked_spec(layers=(1, 2, 5, 9), top_k=2)
OTHER = watermarked_spec(layers=(1, 2, 6, 9), top_k=3)

Kind = tuple[type[RouteplaneError], ErrorKind]
ARGUMENT: Kind = (UsageError, ErrorKind.ARGUMENT)
TOO_LONG: Kind = (UsageError, ErrorKind.TOO_LONG)
MISMATCH: Kind = (SpecError, ErrorKind.SPEC_MISMATCH)
COLUMN: Kind = (DataError, ErrorKind.TOKEN_COLUMN)
PREFIX: Kind = (DataError, ErrorKind.PREFIX)

REFUSED: dict[str, tuple[Callable[[], object], Kind, str]] = {
    "empty": (lambda: collate([], SPEC), ARGUMENT, "at least one record, got none"),
    "long": (
        lambda: collate([make(0, 2), make(1, 5)], SPEC, options=BatchOptions(seq_len=4)),
        TOO_LONG,
        "seq_len=4 tokens, got 5 @ sample sample-1/0/0",
    ),
    "prefix": (lambda: collate([delta()], SPEC), PREFIX, r"resolve\(records\).*sample-9"),
    "top_k": (lambda: collate([make(0, 2)], WIDE), MISMATCH, "top_k: 2 against 3"),
    "layers": (lambda: collate([make(0, 2)], OTHER), MISMATCH, "layer_ids"),
    "subset_of_another": (lambda: collate([make(0, 2)], WIDE.select([2])), MISMATCH, "top_k: 2 against 3"),
    "fewer_layers": (lambda: collate([make(0, 2, spec=SPEC.select([1]))], SPEC), MISMATCH, "layer_ids"),
    "mixed": (lambda: collate([make(0, 2), make(1, 2, spec=OTHER)], SPEC), MISMATCH, "sample sample-1/0/0"),
    "column_absent": (
        lambda: collate([column("turn", "i4"), make(2, 2)], SPEC),
        COLUMN,
        r"\(turn int32\), got \(none\) @ sample sample-2",
    ),
    "column_type": (lambda: collate([column("turn", "i4"), column("turn", "i8")], SPEC), COLUMN, "got .turn int64"),
    "pad_token": (lambda: collate([make(0, 2)], SPEC, options=BatchOptions(pad_token_id=-100)), ARGUMENT, "-100"),
    "packed_seq_len": (
        lambda: collate([make(0, 2)], SPEC, layout="packed", options=BatchOptions(seq_len=4)),
        ARGUMENT,
        "no seq_len",
    ),
    # at the call, before a batch is asked for
    "budget": (lambda: microbatches(source(2), tokens=0), ARGUMENT, "tokens as a positive"),
    "no_spec": (lambda: microbatches([], tokens=8), ARGUMENT, "spec="),
    "options": (
        lambda: microbatches(source(2), tokens=8, options=BatchOptions(padding_side="left")),
        ARGUMENT,
        "'right'",
    ),
    "microbatch_pad_token": (
        lambda: microbatches(source(2), tokens=8, options=BatchOptions(pad_token_id=True)),
        ARGUMENT,
        "True",
    ),
    # as records come
    "beyond_budget": (
        lambda: list(microbatches(source(2, 9), tokens=8)),
        TOO_LONG,
        "at most 8 rows, got 9 @ sample sample-1/0/0",
    ),
    "padded_beyond_budget": (
        lambda: list(microbatches(source(5), tokens=7, options=BatchOptions(pad_to_multiple_of=4))),
        TOO_LONG,
        "at most 7 rows, got 8",
    ),
    "beyond_seq_len": (
        lambda: list(microbatches(source(5), tokens=8, layout="padded", options=BatchOptions(seq_len=4))),
        TOO_LONG,
        "seq_len=4",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_batched_is_refused(call: Callable[[], object], kind: Kind, message: str) -> None:
    """Each refusal has its type and kind and says where."""
    with pytest.raises(kind[0], match=message) as caught:
        call()

    assert kind[1] == caught.value.kind


def test_a_missing_torch_names_the_extra() -> None:
    """Importing the module where torch is not installed says what to install."""
    script = "import sys; sys.modules['torch'] = None; import routeplane.batch.collation"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert 1 == done.returncode
    assert "MissingExtraError: routeplane.batch needs torch: install the extra routeplane[torch]" in done.stderr
