"""docs/reference/faults.md, made from what ran: ``python -m tests.trust.faults`` tries each fault and writes the page.

A fault gives inputs; reading each ends as the same records, as an error of ours, or as other content, which no fault
may. What an unchecked buffer does is to end the process, so tests of many inputs run in a process of their own.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from routeplane.errors import RouteplaneError
from routeplane.record.batches import TRAILER_KEY, trailer_batch
from routeplane.record.codec import write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.schema import arrow_schema
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from routeplane.stream.frames import frames_of_buffer
from tests.stream.streams import SPEC, contents, forge, record, stream_of, trailer_of
from tests.trust import decoders
from tests.trust.decoders import Home, Input

__all__ = ["FAULTS", "PAGE", "Tried", "page_of", "tried"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"

#: Inputs of a fault, each with how it is read: whether it means the same.
Inputs = Iterator[tuple[bytes, Callable[[bytes], bool]]]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of one fault's inputs. ``kinds``: of the errors."""

    tried: int
    same: int
    refused: int
    other: int
    kinds: tuple[str, ...]


def _records() -> list[RouteRecord]:
    return [record(sample, 6) for sample in range(6)]


def _stream() -> bytes:
    """Three batches of two records."""
    found = _records()
    return stream_of(found, max_bytes=2 * found[0].nbytes)


def _reads_as(expected: list[dict[str, Any]]) -> Callable[[bytes], bool]:
    return lambda data: bool(expected == contents(open_stream(data)))


def _flips(inputs: Iterator[Input], *, step: int = 1) -> Inputs:
    for given in inputs:
        for at in range(0, len(given.data), step):
            changed = bytearray(given.data)
            changed[at] ^= 1 << at % 8
            yield bytes(changed), given.read


def _home(decoder: Callable[[Home], Iterator[Input]], *, step: int) -> Inputs:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield from _flips(iter(list(decoder(Home(Path(folder), stack)))), step=step)


def _small() -> Iterator[Input]:
    """One record with something in every column, in both encodings."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,), model="m")
    changes = {
        "group": "g",
        "attributes": {"k": "v"},
        "logprobs": np.asarray([np.nan, -1.0, -2.0], dtype=np.float32),
        "columns": {"a": np.asarray([-1, 2, 3], dtype=np.int32), "c": np.asarray([True, False, True])},
    }
    found = [record(1, 3, spec=spec, **changes)]
    for encoding in ("narrow", "plain"):
        yield Input(data=stream_of(found, spec=spec, encoding=encoding), read=_reads_as(contents(found)))


def _cuts() -> Inputs:
    for given in _small():
        for length in range(len(given.data)):
            yield given.data[:length], given.read


def _frames() -> list[bytes]:
    """Schema, three batches, trailer, each with its header; the mark at the end is not among them."""
    return [frame.data.to_pybytes() for frame in frames_of_buffer(pa.py_buffer(_stream()))]


def _batches(change: Callable[[list[bytes]], list[list[bytes]]]) -> Inputs:
    frames, data = _frames(), _stream()
    rest = data[sum(map(len, frames)) :]
    for changed in change(frames[1:-1]):
        yield b"".join([frames[0], *changed, frames[-1]]) + rest, _reads_as(contents(_records()))


def _dropped(batches: list[bytes]) -> list[list[bytes]]:
    return [batches[:at] + batches[at + 1 :] for at in range(len(batches))]


def _doubled(batches: list[bytes]) -> list[list[bytes]]:
    return [[*batches[:at], batches[at], *batches[at:]] for at in range(len(batches))]


def _swapped(batches: list[bytes]) -> list[list[bytes]]:
    return [[batches[1], batches[0], batches[2]], [batches[0], batches[2], batches[1]], batches[::-1]]


def _spliced() -> Inputs:
    """Rows, tokens or spans of one record in another, under a right checksum of the record and the true trailer."""
    found = _records()
    for at in range(1, len(found)):
        for name in ("routes", "token_ids", "sample_id"):
            other = replace(found[at], **{name: getattr(found[at - 1], name)}, checksum=None)
            if name == "sample_id":
                other = replace(other, attempt=1, checksum=None)
            changed = [*found[:at], other, *found[at + 1 :]]
            batch = write_batch(changed, SPEC, encoding="plain")
            yield forge([batch], trailer=trailer_of(found)), _reads_as(contents(found))


def _other_keys() -> Inputs:
    """A record under another key, its checksum left."""
    found = _records()
    for at in range(len(found)):
        for name, value in (("sample_id", "other"), ("attempt", 7), ("segment", 7), ("group", "other")):
            batch = write_batch(found, SPEC, encoding="plain")
            index = batch.schema.get_field_index(name)
            values = batch.column(index).to_pylist()
            values[at] = value
            arrays = [
                pa.array(values, array.type) if where == index else array for where, array in enumerate(batch.columns)
            ]
            yield (
                forge([pa.RecordBatch.from_arrays(arrays, schema=batch.schema)], trailer=trailer_of(found)),
                _reads_as(contents(found)),
            )


def _other_specs() -> Inputs:
    """Other layers of equal number, experts, slots or a later depth, in the schema alone."""
    found = _records()
    for spec in (
        replace(SPEC, layer_ids=(1, 5)),
        replace(SPEC, layer_ids=(0, 4)),
        replace(SPEC, num_experts=65),
        replace(SPEC, num_experts=(64, 63)),
        replace(SPEC, decoder_layers=9),
        replace(SPEC, model="another"),
    ):
        batch = write_batch(found, SPEC, encoding="plain")
        schema = arrow_schema(spec, "plain")
        changed = batch.replace_schema_metadata(schema.metadata)
        yield forge([changed], trailer=trailer_of(found), schema=schema), _reads_as(contents(found))


def _trailers() -> Inputs:
    """Trailers with another count, digest, key or form."""
    found = _records()
    good = json.loads(trailer_of(found).to_json())
    changes: list[Any] = [{name: value + 1} for name, value in good.items() if isinstance(value, int)]
    changes += [{"digest": "0" * 16}, {"digest": "0"}, {"version": 2}, {"tokens": -1}, {"tokens": None}]
    batch = write_batch(found, SPEC, encoding="plain")
    for change in changes:
        yield forge([batch], trailer=json.dumps({**good, **change})), _reads_as(contents(found))
    yield forge([batch], trailer=None), _reads_as(contents(found))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(2):  # two trailers
            writer.write_batch(trailer_batch(batch.schema), custom_metadata={TRAILER_KEY: json.dumps(good)})
    yield sink.getvalue(), _reads_as(contents(found))


def _nans() -> Inputs:
    """Log-probabilities whose NaN has other bits: they are one value to a checksum."""
    bits = np.asarray([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32)
    for value in bits:
        logprobs = np.asarray([value, 0xBF800000, 0xC0000000], dtype=np.uint32).view(np.float32)
        found = [record(1, 3, logprobs=logprobs)]
        good = [record(1, 3, logprobs=np.asarray([np.nan, -1.0, -2.0], dtype=np.float32))]
        yield stream_of(found), _has_checksums([one.checksum for one in good])


def _has_checksums(expected: list[int]) -> Callable[[bytes], bool]:
    return lambda data: [one.compute_checksum() for one in open_stream(data)] == expected


def _sizes() -> Inputs:
    """Records at the limits: 10^6 tokens, 10 MB of attributes, 32,767 experts, one slot."""
    wide = RouteSpec(num_experts=32_767, top_k=2, layer_ids=(1, 4), model="wide")
    widest_SLK = np.full((4, 2, 2), [0, 32_766], dtype=np.int16)
    widest_SLK[-1] = -1  # not fed
    single = RouteSpec(num_experts=64, top_k=1, layer_ids=(1, 4), model="single")
    for found in (
        record(1, 1_000_000),
        record(1, 4, attributes={"text": "x" * 10_000_000}),
        record(1, 4, spec=wide, routes=widest_SLK),
        record(1, 4, spec=single),
    ):
        yield stream_of([found], spec=found.spec), _has_checksums([found.checksum])


#: name -> inputs
FAULTS: Mapping[str, Callable[[], Inputs]] = {
    "one bit of every byte of a small stream": lambda: _flips(_small()),
    "one bit of every byte of a sealed block": lambda: _home(decoders.blocks, step=1),
    "one bit of every 16th byte of every file of an archive": lambda: _home(decoders.archives, step=16),
    "one bit of every byte of the control files of a place": lambda: _home(decoders.control_files, step=1),
    "one bit of every 8th byte of a Parquet file": lambda: _home(decoders.parquet, step=8),
    "one bit of every 8th byte of a chain of prefixes": lambda: _home(decoders.prefixes, step=8),
    "a small stream cut behind every byte": _cuts,
    "a batch left out": lambda: _batches(_dropped),
    "a batch twice": lambda: _batches(_doubled),
    "batches in another order": lambda: _batches(_swapped),
    "rows, tokens or a name of another record, checksum made right": _spliced,
    "a record under another key": _other_keys,
    "another geometry in the schema": _other_specs,
    "another trailer, none, or two": _trailers,
    "NaN with other bits": _nans,
    "10^6 tokens, 10 MB of attributes, 32,767 experts, one slot": _sizes,
}
#: Faults that change nothing a record says.
HARMLESS = ("NaN with other bits", "10^6 tokens, 10 MB of attributes, 32,767 experts, one slot")


def tried(name: str) -> Tried:
    """Try every input of a fault."""
    found, kinds = Counter[str](), set[str]()
    for data, read in FAULTS[name]():
        try:
            found["same" if read(data) else "other"] += 1
        except RouteplaneError as error:
            found["refused"] += 1
            kinds.add(error.kind.value)
    counts = {outcome: found[outcome] for outcome in ("same", "refused", "other")}
    return Tried(tried=found.total(), kinds=tuple(sorted(kinds)), **counts)


_HEAD = """# Faults that were tried

Each row is a fault, tried at every place that it names: how many inputs, how many read as the same records (a bit that
means nothing, such as Arrow's padding), how many were refused, how many read as other content, and the kinds of errors.
`python -m tests.trust.faults` tries all and writes this page. `make trust` tries random inputs on every decoder.

| fault | tried | same | refused | other content | kinds of error |
|---|---|---|---|---|---|
"""


def page_of(rows: Mapping[str, Tried]) -> str:
    """The text of the page."""
    lines = []
    for name, row in rows.items():
        kinds = " ".join(f"`{kind}`" for kind in row.kinds)
        lines.append(f"| {name} | {row.tried} | {row.same} | {row.refused} | {row.other} | {kinds} |")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of({name: tried(name) for name in FAULTS}), encoding="utf-8")
