"""Values of the right Arrow type that no record can have, or that were not captured: refused where they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.codec import read_records, write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.schema import parse_schema, row_type
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from tests.stream.streams import SPEC, Encoding, contents, forged_column, record, record_lists

RECORDS = [record(sample, 4 + sample) for sample in range(3)]
BATCH = write_batch(RECORDS, SPEC, encoding="plain")
_ROWS = BATCH.column("routes")


def routes_with_null(where: str) -> pa.Array:
    """The routes of the records with a null in one place."""
    flat = _ROWS.flatten().storage
    values, mask = flat.flatten(), np.zeros(len(flat), dtype=bool)
    if where == "an id":
        values = pa.array([None, *values.to_pylist()[1:]], pa.int16())
    mask[2] = where == "a row"
    storage = pa.FixedSizeListArray.from_arrays(values, 4, mask=pa.array(mask))
    rows = pa.ExtensionArray.from_storage(row_type(SPEC, "plain"), storage)
    lost = pa.array([False, where == "a record's routes", False])
    return pa.LargeListArray.from_arrays(_ROWS.offsets, rows, mask=lost if where == "a record's routes" else None)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("where", ["an id", "a row", "a record's routes"])
def test_nulls_in_routes(where: str, verify: bool) -> None:
    """A null is not read as MISSING: it is refused at every depth, before any record, checksums compared or not."""
    data = forged_column(RECORDS, "routes", routes_with_null(where))
    reader = open_stream(data, verify=verify)
    with pytest.raises(FormatError, match="null"):
        next(iter(reader))


WHOLE = {"call": "c", "weights_version": None}
SPANS = [[{"start": 0, "stop": item.num_tokens, "kind": "prompt", "role": None, **WHOLE}] for item in RECORDS]
CAPTURES = [[{"start": 0, "stop": item.num_tokens, "state": "captured", **WHOLE}] for item in RECORDS]
FORGED_COLUMNS: dict[str, tuple[str, Any]] = {
    "null key": ("sample_id", [None, "b", "c"]),
    "empty key": ("sample_id", ["", "b", "c"]),
    "null attempt": ("attempt", [None, 0, 0]),
    "negative segment": ("segment", [-1, 0, 0]),
    "empty group": ("group", ["", None, None]),
    "null tokens": ("token_ids", [None, [1] * 5, [1] * 6]),
    "null token": ("token_ids", [[1, None, 3, 4], [1] * 5, [1] * 6]),
    "no tokens": ("token_ids", [[], [1] * 5, [1] * 6]),
    "a token more": ("token_ids", [[1] * 5, [1] * 5, [1] * 6]),
    "another token": ("token_ids", [[0, 1, 2, 4], RECORDS[1].token_ids, RECORDS[2].token_ids]),
    "routes that start later": ("routes_start", [1, 0, 0]),
    "routes that start before": ("routes_start", [-1, 0, 0]),
    "a start beyond any record": ("routes_start", [2**62, 0, 0]),
    "a prefix without a start": (
        "prefix",
        [{"sample_id": "p", "attempt": 0, "segment": 0, "stop": 1, "checksum": 1}, None, None],
    ),
    "null spans": ("spans", [None, *SPANS[1:]]),
    "no spans": ("spans", [[], *SPANS[1:]]),
    "a null span": ("spans", [[None], *SPANS[1:]]),
    "a null start": ("spans", [[{**SPANS[0][0], "start": None}], *SPANS[1:]]),
    "a null call": ("spans", [[{**SPANS[0][0], "call": None}], *SPANS[1:]]),
    "an unknown kind": ("spans", [[{**SPANS[0][0], "kind": "system"}], *SPANS[1:]]),
    "a span too short": ("spans", [[{**SPANS[0][0], "stop": 3}], *SPANS[1:]]),
    "a span too long": ("spans", [[{**SPANS[0][0], "stop": 2**62}], *SPANS[1:]]),
    "a null capture": ("captures", [[None], *CAPTURES[1:]]),
    "an unknown state": ("captures", [[{**CAPTURES[0][0], "state": "stale"}], *CAPTURES[1:]]),
    "a null state": ("captures", [[{**CAPTURES[0][0], "state": None}], *CAPTURES[1:]]),
    "captured though the last row is missing": ("captures", CAPTURES),
    "log-probabilities too few": ("logprobs", [[-1.0], None, None]),
    "positive log-probabilities": ("logprobs", [[1.0] * 4, None, None]),
    "null log-probability": ("logprobs", [[-1.0, None, -1.0, -1.0], None, None]),
    "log-probabilities that were not there": ("logprobs", [[-1.0] * 4, None, None]),
    "null attributes": ("attributes", [None, [], []]),
    "a null attribute": ("attributes", [[("a", None)], [], []]),
    "an attribute twice": ("attributes", [[("a", "1"), ("a", "2")], [], []]),
    "a nameless attribute": ("attributes", [[("", "1")], [], []]),
    "an attribute more": ("attributes", [[("a", "1")], [], []]),
    "null checksum": ("checksum", [None, 1, 2]),
    "another checksum": ("checksum", [1, RECORDS[1].checksum, RECORDS[2].checksum]),
    "checksums swapped": ("checksum", [RECORDS[1].checksum, RECORDS[0].checksum, RECORDS[2].checksum]),
}


@pytest.mark.parametrize("name", FORGED_COLUMNS)
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_forged_columns(name: str, encoding: Any) -> None:
    """A value of its type, and yet impossible or not the captured one, is a typed error at its first record."""
    column, values = FORGED_COLUMNS[name]
    data = forged_column(RECORDS, column, values, encoding=encoding)
    with pytest.raises((DataError, FormatError), match="expected"):
        next(iter(open_stream(data)))


def test_a_corrupt_row_is_named() -> None:
    """An illegal row that comes with a matching checksum is still refused, by sample, token and layer."""
    rows = RECORDS[1].routes.copy()
    rows[2, 1] = 5
    storage = pa.FixedSizeListArray.from_arrays(
        pa.array(np.concatenate([RECORDS[0].routes, rows, RECORDS[2].routes]).ravel()), 4
    )
    routes = pa.LargeListArray.from_arrays(
        _ROWS.offsets, pa.ExtensionArray.from_storage(row_type(SPEC, "plain"), storage)
    )
    for verify in (True, False):
        with pytest.raises(DataError) as caught:
            list(open_stream(forged_column(RECORDS, "routes", routes), verify=verify))
        (problem,) = caught.value.problems
        assert (ErrorKind.DUPLICATE_ID, "sample-1", 2, 4) == (
            problem.kind,
            problem.sample,
            problem.token,
            problem.layer,
        )


@given(record_lists(max_size=5), st.data(), st.sampled_from(["plain", "narrow"]))
def test_sliced_batches(drawn: tuple[RouteSpec, list[RouteRecord]], data: st.DataObject, encoding: Encoding) -> None:
    """Some rows of a batch give the records of these rows: offsets of a slice are honoured in every column."""
    spec, found = drawn
    batch = write_batch(found, spec, encoding=encoding)
    start = data.draw(st.integers(0, len(found)))
    length = data.draw(st.integers(0, len(found) - start))
    came = list(read_records(batch.slice(start, length), parse_schema(batch.schema)))

    assert contents(found[start : start + length]) == contents(item for item in came if isinstance(item, RouteRecord))
    assert length == len(came)
