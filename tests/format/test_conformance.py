"""The conformance cases of format v1, which any implementation can read, put to this one.

The cases are written by hand. Run as a script (``python tests/format/test_conformance.py``) this fills in what follows
from them, hashes and the bytes under them, with the reference of ``tests/format/reference.py``, never with the library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest

from routeplane.errors import DataError, FormatError, RouteplaneError
from routeplane.record.assembly import assemble
from routeplane.record.batches import Trailer, TrailerCounter
from routeplane.record.codec import read_records, write_batch
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord
from routeplane.record.schema import StreamHeader, arrow_schema, choose_encoding, parse_schema, row_type
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import all_legal, find_problems
from routeplane.stream import new_stream, open_stream
from tests.format import reference
from tests.format.documents import SCHEMAS, call_of, dump, load, record_json, record_of, routes_of, spec_of

CORPUS = SCHEMAS / "conformance"
SCHEMA = load(SCHEMAS / "routeplane-v1.schema.json")
DOCUMENTS = {path.stem: load(path) for path in sorted(CORPUS.glob("*.json"))}

#: Least number of cases per list: a list that was lost, or a typing error in its name, shows.
LEAST = {
    ("assembly", "cases"): 25,
    ("checksums", "calls"): 4,
    ("checksums", "records"): 31,
    ("digests", "cases"): 7,
    ("documents", "cases"): 70,
    ("narrow", "allowed"): 8,
    ("narrow", "cases"): 10,
    ("rows", "cases"): 25,
    ("specs", "cases"): 7,
    ("versions", "cases"): 15,
}


def cases(file: str, key: str = "cases") -> pytest.MarkDecorator:
    """One list of cases as parameters, each under its own name."""
    return pytest.mark.parametrize("case", DOCUMENTS[file][key], ids=lambda case: case["name"])


# ----------------------------------------------------------------------------------------------------------------------
# The corpus itself
# ----------------------------------------------------------------------------------------------------------------------


def test_the_corpus_is_whole() -> None:
    """Every list is there, with no fewer cases than it had, and no list is read by no test."""
    found = {
        (name, key): len(value)
        for name, document in DOCUMENTS.items()
        for key, value in document.items()
        if isinstance(value, list)
    }

    assert set(LEAST) == set(found)
    assert {} == {where: count for where, count in found.items() if count < LEAST[where]}


def test_every_case_has_a_name_of_its_own() -> None:
    """Within a list no two cases share a name, and every file says what it is about."""
    for name, key in LEAST:
        names = [case["name"] for case in DOCUMENTS[name][key]]
        assert len(names) == len(set(names)), (name, key)
        assert DOCUMENTS[name]["about"], name


def test_what_follows_is_filled_in() -> None:
    """Hashes, canonical texts and bytes in the corpus are those of the reference, not leftovers of other content."""
    assert {name: DOCUMENTS[name] for name in filled()} == filled()


# ----------------------------------------------------------------------------------------------------------------------
# Rows and encodings
# ----------------------------------------------------------------------------------------------------------------------


@cases("rows")
def test_row_rule(case: dict[str, Any]) -> None:
    """Every illegal row is found, with its kind, token and layer; no legal one is."""
    spec = spec_of(case["spec"])
    routes_SLK = routes_of(case["routes"], spec)
    found = find_problems(routes_SLK, spec, first_token=case["first_token"])

    assert case["problems"] == [{"kind": str(p.kind), "token": p.token, "layer": p.layer} for p in found]
    assert (not case["problems"]) == all_legal(routes_SLK, spec)


@cases("narrow", "allowed")
def test_narrow_is_allowed(case: dict[str, Any]) -> None:
    """Narrow is for specs whose every row one byte per id can tell from MISSING."""
    spec = spec_of(case["spec"])

    assert ("narrow" if case["allowed"] else "plain") == choose_encoding("auto", spec)
    metadata = {**arrow_schema(spec, "plain").metadata, b"routeplane.encoding": b"narrow"}
    schema = pa.schema(list(arrow_schema(spec, "narrow")), metadata=metadata)
    if case["allowed"]:
        assert "narrow" == parse_schema(schema).encoding
    else:
        with pytest.raises(FormatError):
            parse_schema(schema)


@cases("narrow")
def test_narrow_rows(case: dict[str, Any]) -> None:
    """Legal rows go there and back; bytes that come from damage are refused after decoding, never repaired."""
    spec = spec_of(case["spec"])
    plain_SLK, narrow_SLK = routes_of(case["plain"], spec), routes_of(case["narrow"], spec, dtype=np.uint8)

    assert case["legal"] == all_legal(plain_SLK, spec)
    found = next(read_records(*_narrow_batch(spec, narrow_SLK)))
    if not case["legal"]:
        assert isinstance(found, DataError)
        return
    assert not isinstance(found, DataError)
    np.testing.assert_array_equal(plain_SLK, found.routes)
    stored = write_batch([found], spec, encoding="narrow").column("routes").flatten().storage.flatten()
    np.testing.assert_array_equal(narrow_SLK.reshape(-1), stored.to_numpy())


def _narrow_batch(spec: RouteSpec, narrow_SLK: np.ndarray[Any, Any]) -> tuple[pa.RecordBatch, StreamHeader]:
    """A batch of one record with the given bytes as rows; captures say what the bytes are, where they are legal."""
    missing_SL = (narrow_SLK == 0xFF).all(axis=2)
    states = ["lost" if row.all() else "partial" if row.any() else "captured" for row in missing_SL]
    whole = {"call": "c", "weights_version": None}
    content = {
        "token_ids": pa.array([list(range(len(narrow_SLK)))], pa.large_list(pa.int32())),
        "spans": [[{"start": 0, "stop": len(narrow_SLK), "kind": "prompt", "role": None, **whole}]],
        "captures": [[{"start": at, "stop": at + 1, "state": state, **whole} for at, state in enumerate(states)]],
    }
    storage = pa.FixedSizeListArray.from_arrays(pa.array(narrow_SLK.reshape(-1)), spec.num_layers * spec.top_k)
    rows = pa.ExtensionArray.from_storage(row_type(spec, "narrow"), storage)
    content["routes"] = pa.LargeListArray.from_arrays(pa.array([0, len(narrow_SLK)], pa.int64()), rows)
    plain = {
        "sample_id": ["s"],
        "attempt": [0],
        "segment": [0],
        "routes_start": [0],
        "attributes": [[]],
        "checksum": [0],
    }
    schema = arrow_schema(spec, "narrow")
    arrays = []
    for field in schema:
        values = {**plain, **content}.get(field.name, [None])
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema), parse_schema(schema)


# ----------------------------------------------------------------------------------------------------------------------
# Hashes
# ----------------------------------------------------------------------------------------------------------------------


@cases("specs")
def test_canonical_spec(case: dict[str, Any]) -> None:
    """A spec has one spelling and one digest."""
    spec = spec_of(case["spec"])

    assert case["canonical"] == spec.to_json()
    assert case["digest"] == f"{spec.digest:016x}"


@cases("checksums", "records")
def test_record_checksum(case: dict[str, Any]) -> None:
    """A record has the checksum that the specification gives it, and comes back from either encoding with it."""
    spec = spec_of(case["spec"])
    record = record_of(case["record"], spec)

    assert case["checksum"] == f"{record.checksum:016x}"
    for encoding in ("plain", "narrow"):
        sink = pa.BufferOutputStream()
        with new_stream(sink, spec, encoding=encoding) as writer:
            writer.write(record)
        (again,) = open_stream(sink.getvalue())
        assert {**case["record"], "checksum": case["checksum"]} == {
            **record_json(again),
            "columns": {name: record_json(again)["columns"][name] for name in case["record"]["columns"]},
        }


@pytest.mark.parametrize(
    ("kind", "bits"), [("float16", 0xFE01), ("float32", 0xFFC00001), ("float64", 0xFFF0000000000001)]
)
def test_every_nan_is_one_nan(kind: str, bits: int) -> None:
    """A NaN counts as the canonical one, whatever its sign and payload; a negative zero stays one."""
    (case,) = [case for case in DOCUMENTS["checksums"]["records"] if case["name"] == "token columns of every type"]
    spec, record = spec_of(case["spec"]), record_of(case["record"], spec_of(case["spec"]))
    values = record.columns[kind].values.copy()
    values.view(f"u{values.itemsize}")[0] = bits
    other = replace(record, columns={**record.columns, kind: values}, checksum=None)
    zero = np.where(values == 0, values.dtype.type(0), values)

    assert np.isnan(values[0])
    assert case["checksum"] == f"{other.checksum:016x}"
    (again,) = open_stream(_written(other))
    assert case["checksum"] == f"{again.verify().checksum:016x}"
    assert other.checksum != replace(record, columns={**record.columns, kind: zero}, checksum=None).checksum
    assert spec == again.spec


def _written(record: RouteRecord) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with new_stream(sink, record.spec) as writer:
        writer.write(record)
    return sink.getvalue()


@cases("checksums", "calls")
def test_call_checksum(case: dict[str, Any]) -> None:
    """A call has the checksum that the specification gives it."""
    assert case["checksum"] == f"{call_of(case['call']).checksum:016x}"


def test_different_content_has_different_checksums() -> None:
    """No two cases share a checksum: whatever differs between them is under it."""
    for key in ("records", "calls"):
        found = [case["checksum"] for case in DOCUMENTS["checksums"][key]]
        assert len(found) == len(set(found))


@cases("digests")
def test_stream_digest(case: dict[str, Any]) -> None:
    """The trailer's digest is over version (as the stream has it), spec, encoding, and the records in order."""
    counter = TrailerCounter(spec_of(case["spec"]), case["encoding"], version=case["format"])
    for checksum in case["checksums"]:
        counter.add_record(int(checksum, 16), 1)

    assert case["digest"] == json.loads(counter.trailer().to_json())["digest"]


# ----------------------------------------------------------------------------------------------------------------------
# Versions and documents
# ----------------------------------------------------------------------------------------------------------------------


@cases("versions")
def test_versions(case: dict[str, Any]) -> None:
    """A known major version is read, every other text refused as a version."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    known = case["format"] if case["accepted"] else "1.1"
    base = arrow_schema(spec, "plain", version=known)
    schema = base.with_metadata({**base.metadata, b"routeplane.format": case["format"].encode()})
    if case["accepted"]:
        assert case["format"] == parse_schema(schema).version
        return
    with pytest.raises(FormatError) as caught:
        parse_schema(schema)
    assert case["error"] == str(caught.value.kind)


PARSERS = {"spec": RouteSpec.from_json, "trailer": Trailer.from_json, "ticket": RouteTicket.from_json}
#: What JSON Schema cannot say, by name: documents that it accepts and a reader must not.
BEYOND_SCHEMA = {
    "spec: top-k above the width",
    "spec: layers out of order",
    "spec: one width too few",
    "spec: a decoder without its last routed layer",
    "spec: half a surrogate pair",
    "ticket: start after stop",
    "ticket: larger than 256 bytes",
    "ticket: 256 bytes in characters, more in UTF-8",
}


@cases("documents")
def test_documents(case: dict[str, Any]) -> None:
    """A document is taken, or refused with an error of ours, whatever it is instead."""
    parse = PARSERS[case["document"]]
    if case["accepted"]:
        parse(case["text"])
        return
    with pytest.raises(RouteplaneError):
        parse(case["text"])


@cases("documents")
def test_documents_against_the_schema(case: dict[str, Any]) -> None:
    """The JSON Schema takes every good document and refuses every bad one that it can judge."""
    schema = {"$ref": f"#/$defs/{case['document']}", "$defs": SCHEMA["$defs"]}
    validator = jsonschema.Draft202012Validator(schema)
    try:
        document = json.loads(case["text"])
    except ValueError:
        assert not case["accepted"]
        return
    assert (case["accepted"] or case["name"] in BEYOND_SCHEMA) == validator.is_valid(document)


# ----------------------------------------------------------------------------------------------------------------------
# Assembly
# ----------------------------------------------------------------------------------------------------------------------


@cases("assembly")
def test_assembly(case: dict[str, Any]) -> None:
    """Calls become exactly these records, or are refused for exactly this reason."""
    spec = spec_of(case["spec"])
    if "error" in case:
        with pytest.raises(RouteplaneError) as caught:
            assemble([call_of(call, spec) for call in case["calls"]], spec, sample_id="s", **case["arguments"])
        assert case["error"] == str(caught.value.kind)
        return
    assembly = assemble([call_of(call, spec) for call in case["calls"]], spec, sample_id="s", **case["arguments"])

    assert case["records"] == [_short(record_json(record)) for record in assembly.records]
    assert case["counts"] == {name: getattr(assembly.report, name) for name in case["counts"]}


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """A record's JSON in the form of the assembly cases."""
    kept = {name: record[name] for name in ("token_ids", "routes", "spans", "captures", "logprobs", "columns")}
    kept["spans"] = [{name: value for name, value in span.items() if name != "role"} for span in record["spans"]]
    return {name: value for name, value in kept.items() if value not in (None, {})}


# ----------------------------------------------------------------------------------------------------------------------
# Filling in what follows
# ----------------------------------------------------------------------------------------------------------------------


def filled() -> dict[str, Any]:
    """The files whose cases have derived members, with these as the reference computes them."""
    found: dict[str, Any] = {name: dict(DOCUMENTS[name]) for name in ("specs", "checksums", "digests")}
    found["specs"]["cases"] = [
        {**case, "canonical": reference.canonical_spec(case["spec"]), "digest": reference.spec_digest(case["spec"])}
        for case in DOCUMENTS["specs"]["cases"]
    ]
    for key in ("records", "calls"):
        found["checksums"][key] = list(_with_checksums(DOCUMENTS["checksums"][key]))
    found["digests"]["cases"] = [
        {
            **case,
            "digest": reference.stream_digest(
                case["format"], case["spec"], encoding=case["encoding"], checksums=case["checksums"]
            ),
        }
        for case in DOCUMENTS["digests"]["cases"]
    ]
    return found


def _with_checksums(listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for case in listed:
        data = (
            reference.record_bytes(case["spec"], case["record"])
            if "record" in case
            else reference.call_bytes(case["call"])
        )
        yield {**case, "canonical": data.hex(), "checksum": reference.xxh3(data)}


if __name__ == "__main__":
    for file_name, content in filled().items():
        dump(CORPUS / f"{file_name}.json", content)
    sys.stdout.write(f"filled in {', '.join(filled())} in {CORPUS}\n")
