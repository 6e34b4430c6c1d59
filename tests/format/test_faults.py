"""Faults in streams with every kind of column: flips, cuts, and edits that Arrow cannot see. None may pass in silence.

An edit changes where lists end, or which entries are known, and rebuilds every Arrow length and offset: the stream is a
perfect one for Arrow, under the trailer and the checksums of the true records. Reading damaged bytes can end the
process where a buffer is viewed unchecked, so faults are tried in a process of their own.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from routeplane.errors import RouteplaneError
from routeplane.record.codec import write_batch
from routeplane.record.prefixes import as_delta
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Sampling
from routeplane.stream import open_stream
from tests.plain_columns import NARROW, column_record
from tests.stream.streams import Encoding, contents, forge, stream_of, trailer_of

#: Shares of the faults tried: flipped bits, cuts, edits.
KINDS = ("flip", "cut", "edit")


def true_records() -> list[RouteRecord]:
    """Records with every kind of column, sampling parameters, and a lean delta."""
    first, longer = column_record(1, 5, spec=NARROW), column_record(1, 8, spec=NARROW)
    sampled = tuple(
        replace(span, sampling=Sampling(temperature=0.8, top_p=0.9)) if span.kind == "generation" else span
        for span in longer.spans
    )
    base = replace(first, logprobs=None, checksum=None)
    longer = replace(longer, segment=1, spans=sampled, logprobs=None, checksum=None)
    return [base, as_delta(longer, base), replace(column_record(2, 6, spec=NARROW), logprobs=None, checksum=None)]


# ----------------------------------------------------------------------------------------------------------------------
# Edits that Arrow cannot see
# ----------------------------------------------------------------------------------------------------------------------


def edited(batch: pa.RecordBatch, rng: np.random.Generator) -> tuple[pa.RecordBatch, str]:
    """The batch with one list column changed at its inner offsets or its nulls, or at where records end."""
    name = str(rng.choice(["lists", "maybe_lists", "maybe", "layers", "number"]))
    at = batch.schema.get_field_index(name)
    column = batch.column(at)
    ends, entries = np.asarray(column.offsets, dtype=np.int64), column.flatten()
    kind = entries.type
    how = str(rng.choice(["records", "lists", "nulls"]))
    if how == "lists" and pa.types.is_list(kind):
        entries = _moved_lists(entries, rng)
    elif how == "nulls" and name in ("maybe", "maybe_lists"):
        entries = _other_nulls(entries, rng)
    else:
        how, ends = "records", _moved(ends, rng)
    rebuilt = pa.LargeListArray.from_arrays(pa.array(ends), entries)
    arrays = [rebuilt if index == at else each for index, each in enumerate(batch.columns)]
    found = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
    found.validate(full=True)
    return found, how


def _moved(offsets: np.ndarray[Any, np.dtype[np.int64]], rng: np.random.Generator) -> Any:
    """Offsets of which an inner one lies elsewhere between its neighbours' ends."""
    moved = offsets.copy()
    place = int(rng.integers(1, len(moved) - 1))
    moved[place] = rng.integers(moved[place - 1], moved[place + 1] + 1)
    return moved


def _moved_lists(entries: pa.ListArray, rng: np.random.Generator) -> pa.ListArray:
    """The same values with an end of a list moved; the other lists and all nulls stay."""
    lengths = np.array(entries.value_lengths().fill_null(0), dtype=np.int64)
    mask = np.asarray(entries.is_null())
    give, take = rng.choice(np.flatnonzero(~mask), 2, replace=False)
    if lengths[give] == 0:
        give, take = take, give
    if lengths[give]:
        lengths[give] -= 1
        lengths[take] += 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), entries.flatten(), mask=pa.array(mask))


def _other_nulls(entries: pa.Array, rng: np.random.Generator) -> pa.Array:
    """One more entry that is unknown, or one fewer."""
    plain = entries.to_pylist()
    place = int(rng.integers(len(plain)))
    plain[place] = ([] if pa.types.is_list(entries.type) else 0) if plain[place] is None else None
    return pa.array(plain, entries.type)


# ----------------------------------------------------------------------------------------------------------------------
# What reading gives
# ----------------------------------------------------------------------------------------------------------------------


def outcomes(encoding: Encoding, count: int, seed: int) -> Counter[tuple[str, str]]:
    """``count`` faults and what became of each: same, refused, other content, or an error that is none of ours."""
    rng, found = np.random.default_rng(seed), Counter[tuple[str, str]]()
    records = true_records()
    data = stream_of(records, spec=NARROW, encoding=encoding)
    batch = write_batch(records, NARROW, encoding=encoding)
    trailer = trailer_of(records, spec=NARROW, encoding=encoding)
    expected = contents(records)
    assert expected == contents(open_stream(data)) == contents(open_stream(forge([batch], trailer=trailer)))
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        damaged = bytearray(data)
        if kind == "flip":
            damaged[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        elif kind == "cut":
            del damaged[int(rng.integers(len(data))) :]
        else:
            wrong, kind = edited(batch, rng)
            damaged = bytearray(forge([wrong], trailer=trailer))
        found[kind, _outcome(bytes(damaged), expected)] += 1
    return found


def _outcome(data: bytes, expected: list[dict[str, Any]]) -> str:
    try:
        return "same" if contents(open_stream(data)) == expected else "other content"
    except RouteplaneError:
        return "refused"
    except Exception as error:  # noqa: BLE001  whatever comes is the finding
        return type(error).__name__


def require_loud(encoding: Encoding, count: int, seed: int) -> None:
    """Every fault is refused, or changed nothing that a record says; an abort of the process is an error here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(outcomes, encoding, count, seed).result()
    assert count == found.total()
    assert set() == {outcome for _, outcome in found} - {"same", "refused"}, found
    assert {"flip", "cut", "records", "lists", "nulls"} == {kind for kind, outcome in found if outcome == "refused"}
    assert 0 == found["cut", "same"] + found["nulls", "same"], found


def test_two_hundred_faults() -> None:
    """The short run of every change."""
    require_loud("narrow", 200, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_ten_thousand_faults(encoding: Encoding) -> None:
    """Five thousand of either encoding: none is silent."""
    require_loud(encoding, 5_000, seed=11)
