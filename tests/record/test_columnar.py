"""Records of a batch that is checked as a whole, against those built one by one: the same, whatever is wrong."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeplane.errors import RouteplaneError, UsageError
from routeplane.record import codec, columnar, validate
from routeplane.record.aligned import AlignedColumn
from routeplane.record.codec import read_records, write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.schema import parse_schema
from routeplane.record.spans import STATES, Capture, Sampling, Span
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from routeplane.testing.strategies import specs
from tests.plain_columns import NARROW, column_record
from tests.record.test_alarms import suspicious
from tests.stream.streams import SPEC, Encoding, content, forge, record, record_lists, stream_of, trailer_of
from tests.stream.test_ipc_columns import FORGED_COLUMNS

WIDE = RouteSpec(num_experts=300, top_k=3, layer_ids=(1, 4), model="tests/columnar")


def outcomes(
    batch: pa.RecordBatch, *, columnar: bool, verify: bool = False, select: RouteSpec | None = None, threads: int = 1
) -> list[Any]:
    """Of each record what it says, or what is wrong with it; the error that ends the batch comes last."""
    found: list[Any] = []
    header = parse_schema(batch.schema)
    with mock.patch.object(validate, "_KERNEL_BYTES", 0):
        try:
            reads = read_records(batch, header, verify=verify, select=select, columnar=columnar, threads=threads)
            for read in reads:
                found.append(content(read) if isinstance(read, RouteRecord) else said(read))
        except RouteplaneError as error:
            found.append(said(error))
    return found


def said(error: RouteplaneError) -> tuple[Any, ...]:
    """All of an error."""
    return type(error), error.kind, str(error), tuple(getattr(error, "problems", ()))


def checked_together(batch: pa.RecordBatch, select: RouteSpec | None = None) -> int:
    """How many records were not built one by one."""
    with mock.patch.object(validate, "_KERNEL_BYTES", 0):
        found = list(read_records(batch, parse_schema(batch.schema), verify=select is None, select=select))
    return sum("_source" in vars(each) for each in found if isinstance(each, RouteRecord))


def require_same(batch: pa.RecordBatch) -> list[Any]:
    """Both ways give the same, checksums compared or not, of all layers or of some."""
    one_by_one: list[Any] = []
    layers = parse_schema(batch.schema).spec.layer_ids
    for kept in {layers, layers[:1], layers[1:], layers[::2]} - {()}:
        some = parse_schema(batch.schema).spec.select(kept)
        one_by_one = outcomes(batch, select=some, columnar=False)
        assert one_by_one == outcomes(batch, select=some, columnar=True)
        assert one_by_one == outcomes(batch, select=some, columnar=True, threads=2)
    for verify in (True, False):
        one_by_one = outcomes(batch, verify=verify, columnar=False)
        assert one_by_one == outcomes(batch, verify=verify, columnar=True)
        with mock.patch.object(columnar, "_CALL_BYTES", 100):
            assert one_by_one == outcomes(batch, verify=verify, columnar=True, threads=3)
    return one_by_one


def scored_record(number: int, tokens: int, **changes: Any) -> RouteRecord:
    """A record with all that may be there: sampling, log-probabilities, attributes, columns of every kind, masks."""
    made = column_record(number, tokens, spec=NARROW)
    how = Sampling(temperature=0.8, top_p=0.9, min_p=-0.0, processors=("a",), logprobs_mode="processed")
    spans = tuple(replace(span, sampling=how if span.kind == "generation" else None) for span in made.spans)
    sampled_S = made.sampled_tokens()
    lists = [[int(token)] if here else [] for token, here in zip(made.token_ids, sampled_S, strict=True)]
    masks = {
        "sampling_mask": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled", axis="kept"),
        "sampling_mask_state": AlignedColumn.of(sampled_S.astype(np.uint8), aligned="sampled"),
        "loss_mask": sampled_S.astype(np.int8),
    }
    logprobs = np.where(sampled_S, -0.5, np.nan).astype(np.float32)
    given: dict[str, Any] = {"logprobs": logprobs, "attributes": {"finish": "stop", "b": "é"}, "group": f"g{number}"}
    return replace(made, spans=spans, columns={**made.columns, **masks}, checksum=None, **{**given, **changes})


RICH = [scored_record(number, 4 + number) for number in range(4)]


@settings(max_examples=30)
@given(record_lists(max_size=5), st.sampled_from(["plain", "narrow"]), st.data())
def test_any_records(drawn: tuple[RouteSpec, list[RouteRecord]], encoding: Encoding, data: st.DataObject) -> None:
    """Every kind of record that can be written, in any slice of a batch."""
    spec, found = drawn
    batch = write_batch(found, spec, encoding=encoding)
    start = data.draw(st.integers(0, len(found)))
    require_same(batch.slice(start))


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_usual_records_are_checked_together(encoding: Encoding) -> None:
    """Not only by the builder behind: prompts and answers, and all that may stand beside."""
    assert 3 == checked_together(
        write_batch([record(sample, 4 + sample) for sample in range(3)], SPEC, encoding=encoding)
    )
    assert len(RICH) == checked_together(write_batch(RICH, NARROW, encoding=encoding))
    require_same(write_batch(RICH, NARROW, encoding=encoding))


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_some_layers_of_usual_records_are_checked_together(encoding: Encoding) -> None:
    """In one call for several records, and in several: the rows of each are those of its own tokens."""
    some = NARROW.select(NARROW.layer_ids[1:])
    batch = write_batch(RICH, NARROW, encoding=encoding)
    for nbytes in (1, 60, 2**22):
        with mock.patch.object(columnar, "_CALL_BYTES", nbytes):
            assert len(RICH) == checked_together(batch, some)
            require_same(batch)


@settings(max_examples=20)
@given(record_lists(max_size=5), st.integers(2, 4), st.sampled_from(["quarantine", "raise"]))
def test_threads_give_what_one_thread_gives(
    drawn: tuple[RouteSpec, list[RouteRecord]], threads: int, on_corrupt: Literal["quarantine", "raise"]
) -> None:
    """Through a reader, whole or damaged: the same records, the same error, the same report."""
    spec, found = drawn
    data = bytearray(stream_of(found, spec=spec))
    data[len(data) // 2] ^= 1
    for stream in (stream_of(found, spec=spec), bytes(data)):
        said_of = [read_by(stream, count, on_corrupt) for count in (1, threads)]
        assert said_of[0] == said_of[1]


def read_by(stream: bytes, threads: int, on_corrupt: Literal["quarantine", "raise"]) -> list[Any]:
    """The records, then the report or the error."""
    found: list[Any] = []
    with mock.patch.object(validate, "_KERNEL_BYTES", 0), mock.patch.object(columnar, "_CALL_BYTES", 200):
        try:
            with open_stream(stream, on_corrupt=on_corrupt).ahead(threads=threads) as reader:
                found += (content(each) for each in reader)
                found.append(reader.report().scalars(prefix=""))
        except RouteplaneError as error:
            found.append(said(error))
    return found


def test_threads_end_where_a_reader_stops_early() -> None:
    """None of them outlives the iteration."""
    stream = stream_of([record(sample, 4 + sample) for sample in range(20)])
    with mock.patch.object(validate, "_KERNEL_BYTES", 0), mock.patch.object(columnar, "_CALL_BYTES", 1):
        reads = iter(open_stream(stream).ahead(threads=2))
        next(reads)
        assert any(each.name.startswith("routeplane-read") for each in threading.enumerate())
        reads.close()  # type: ignore[attr-defined]
    assert not any(each.name.startswith("routeplane-read") for each in threading.enumerate())


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_threads_that_cannot_be(threads: Any) -> None:
    """Refused when said, and so is saying it too late."""
    reader = open_stream(stream_of([record(0, 4)]))
    with pytest.raises(UsageError, match="threads"):
        reader.ahead(threads=threads)
    list(reader)
    with pytest.raises(UsageError, match="before iteration"):
        reader.ahead(threads=2)


def test_rows_that_no_layer_kept_has_are_not_looked_at() -> None:
    """An illegal row elsewhere is not found; one in a kept layer is."""
    illegal = np.array(RICH[1].routes)
    values = np.concatenate([each.routes if at != 1 else illegal for at, each in enumerate(RICH)])
    values[len(RICH[0].routes) + 2, 0] = 0
    batch = write_batch(RICH, NARROW, encoding="plain")
    column = batch.column("routes")
    storage = pa.FixedSizeListArray.from_arrays(
        pa.array(values.reshape(-1)), column.type.value_type.storage_type.list_size
    )
    rows = pa.ExtensionArray.from_storage(column.type.value_type, storage)
    damaged = with_column(batch, "routes", pa.LargeListArray.from_arrays(column.offsets, rows))
    require_same(damaged)
    other, own = (NARROW.select(layers) for layers in (NARROW.layer_ids[1:], NARROW.layer_ids[:1]))
    assert outcomes(damaged, select=other, columnar=True) == [content(each.select(other.layer_ids)) for each in RICH]
    assert [type(each) for each in outcomes(damaged, select=own, columnar=True)].count(tuple) >= 1
    assert checked_together(damaged, other) == len(RICH)
    assert checked_together(damaged, own) == len(RICH) - 1


@pytest.mark.parametrize("name", FORGED_COLUMNS)
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_forged_columns(name: str, encoding: Encoding) -> None:
    """Values of their type that no record can have."""
    column, values = FORGED_COLUMNS[name]
    batch = write_batch([record(sample, 4 + sample) for sample in range(3)], SPEC, encoding=encoding)
    require_same(with_column(batch, column, pa.array(values, batch.schema.field(column).type)))


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """The batch with another column; its fields may be null."""
    fields = [pa.field(each.name, each.type, nullable=True) for each in batch.schema]
    arrays = [values if each.name == name else batch.column(each.name) for each in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=batch.schema.metadata))


def edited(batch: pa.RecordBatch, rng: np.random.Generator) -> pa.RecordBatch:
    """The batch with one bit of one buffer changed, as Arrow takes it; the batch itself where it does not."""
    serialized = bytearray(batch.serialize())
    serialized[int(rng.integers(len(serialized)))] ^= 1 << int(rng.integers(8))
    try:
        found = pa.ipc.read_record_batch(pa.py_buffer(bytes(serialized)), batch.schema)
        found.validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        return batch
    return found


def changed_ids(batch: pa.RecordBatch, rng: np.random.Generator) -> pa.RecordBatch:
    """The batch with an id of one row changed, often to one that makes the row illegal or MISSING in part."""
    column = batch.column("routes")
    flat = column.flatten()
    values = flat.storage.flatten().to_numpy().copy()
    values[int(rng.integers(len(values)))] = rng.choice([0, 1, 5, 63, 64, 127, 255 if values.itemsize == 1 else -1])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(values), flat.storage.type.list_size)
    rows = pa.ExtensionArray.from_storage(flat.type, storage)
    return with_column(batch, "routes", pa.LargeListArray.from_arrays(column.offsets, rows))


def flips(count: int, seed: int) -> Counter[str]:
    """Both ways over damaged batches; how many still read as they were."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    plain = [record(sample, 9 + sample) for sample in range(3)]
    batches = [
        write_batch(records, spec, encoding=encoding)
        for records, spec in ((plain, SPEC), (RICH, NARROW))
        for encoding in ("plain", "narrow")
    ]
    whole = [require_same(batch) for batch in batches]
    for number in range(count):
        place = int(rng.integers(len(batches)))
        wrong = (edited if number % 2 else changed_ids)(batches[place], rng)
        found["same" if require_same(wrong) == whole[place] else "other"] += 1
    return found


def test_damage_of_any_kind() -> None:
    """Flipped bits and changed ids: the same records and the same errors, word for word."""
    found = flips(80, seed=5)
    assert found["other"] > 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 16))
def test_much_damage_of_any_kind(seed: int) -> None:
    """The long run, in parts that each end in time on a busy machine."""
    assert flips(100, seed=seed)["other"] > 30


@settings(max_examples=30)
@given(suspicious(), st.booleans())
def test_the_same_alarms(case: tuple[Any, RouteSpec, list[int]], narrow: bool) -> None:
    """A reader reports the same, whether the batch was looked at as a whole or record by record."""
    rows_SLK, spec, token_ids = case
    tokens = len(rows_SLK)
    missing_S = (rows_SLK[:, :, 0] < 0).any(axis=1)
    states = ["captured" if not missing else "lost" for missing in missing_S]
    if missing_S[-1]:
        states[-1] = "not_fed"
    rows_SLK = np.where(missing_S[:, None, None], -1, rows_SLK).astype(np.int16)
    made = RouteRecord(
        sample_id="s",
        token_ids=np.asarray(token_ids, dtype=np.int32),
        routes=rows_SLK,
        spans=(Span(start=0, stop=tokens, kind="generation", call="c", weights_version=1),),
        captures=tuple(
            Capture(start=at, stop=at + 1, call="c", weights_version=None, state=state)  # type: ignore[arg-type]
            for at, state in enumerate(states)
        ),
        spec=spec,
    )
    batch = write_batch([made], spec, encoding="narrow" if narrow and spec.narrow_allowed else "plain")
    reports = []
    for least in (0, 2**62):
        with mock.patch.object(validate, "_KERNEL_BYTES", least), open_stream(sealed(batch, [made])) as reader:
            list(reader)
            reports.append(reader.report())
    assert reports[0] == reports[1]


def sealed(batch: pa.RecordBatch, found: list[RouteRecord]) -> bytes:
    """A whole stream of the batch."""
    encoding = parse_schema(batch.schema).encoding
    return forge([batch], trailer=trailer_of(found, spec=found[0].spec, encoding=encoding))


@settings(max_examples=30)
@given(specs(max_layers=3, max_top_k=5), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_parts_that_are_made_late(spec: RouteSpec, tokens: int, seed: int) -> None:
    """Each is what the record was written with, in whichever order it is asked for; also after pickling and cutting."""
    made = record(seed % 5, tokens, spec=spec)
    with mock.patch.object(validate, "_KERNEL_BYTES", 0):
        (read,) = list(open_stream(stream_of([made], spec=spec)))
        assert "_source" in vars(read)
        names = ["spans", "captures", "routes", "stored_routes", "absent_tokens", "num_tokens", "nbytes"]
        np.random.default_rng(seed).shuffle(names)
        for name in names:
            assert np.array_equal(getattr(made, name), getattr(read, name)), name
        assert content(made) == content(pickle.loads(pickle.dumps(read)))
        some = spec.layer_ids[:: 1 + seed % 2]
        (part,) = list(open_stream(stream_of([made], spec=spec), verify=False).select(layer_ids=some))
        assert content(made.select(some)) == content(pickle.loads(pickle.dumps(part)))
        assert content(made.slice(0, 1).select(some)) == content(part.slice(0, 1))
        assert content(made.slice(0, 1)) == content(read.slice(0, 1))
        assert made.coverage() == read.coverage()
        assert list(made.capture_intervals()) == list(read.capture_intervals())
        assert {state for _, _, state in read.capture_intervals()} <= set(STATES)


@pytest.mark.parametrize("held", ["plain", "narrow"])
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_batches_of_records_that_were_read(held: Encoding, encoding: Encoding) -> None:
    """Whatever form a reader holds rows in, and however they are copied: the batch is that of the records."""
    for found, spec in (([record(sample, 4 + sample) for sample in range(3)], SPEC), (RICH, NARROW)):
        rows = write_batch(found, spec, encoding=encoding).column("routes")
        read = list(open_stream(stream_of(found, spec=spec, encoding=held)))
        for least in (0, 2**40):
            with mock.patch.object(codec, "_PAST_CACHES", least), mock.patch.object(validate, "_KERNEL_BYTES", least):
                assert rows.equals(write_batch(read, spec, encoding=encoding).column("routes"))
                assert rows[:1].equals(write_batch(read[:1], spec, encoding=encoding).column("routes"))
        widened = [each for each in read if each.stored_routes.dtype == np.uint8 and "routes" in vars(each)]
        assert not widened, "narrow rows were widened to be written"
